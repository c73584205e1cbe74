// initial = state where it is finite, else 0
$$ set count = n
fn element(i: u32) {
    let value = state[i];
    // by the bits of the exponent, since compilers may assume that there is no other
    initial[i] = select(0.0, value, ((bitcast<u32>(value) >> 23u) & 255u) != 255u);
}
{$ include "include/each_element.wgsl" $}
