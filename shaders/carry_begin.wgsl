// initial = state
$$ set count = n
fn element(i: u32) {
    initial[i] = state[i];
}
{$ include "include/each_element.wgsl" $}
