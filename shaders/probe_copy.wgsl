// out = x
fn element(i: u32) {
    {{ store("out", "i", load("x", "i")) }}
}
$$ set count = ceil_div(n, 4) ~ "u"
{$ include "include/each_element.wgsl" $}
