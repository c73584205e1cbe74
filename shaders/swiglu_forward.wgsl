// up = x[r, i], gate = x[r, d_ff + i];  out[r, i] = up * gate * sigmoid(gate)
$$ set packed = "out" in vec4
$$ set columns = d_ff // 4 if packed else d_ff
$$ set count = rows * columns
{$ include "include/pack.wgsl" $}
{$ include "include/sigmoid.wgsl" $}

fn element(i: u32) {
    let up = i + i / {{ columns }}u * {{ columns }}u;
    let gate = {{ load("x", "up + " ~ columns ~ "u") }};
    {{ store("out", "i", load("x", "up") ~ " * gate * sigmoid(gate)") }}
}
{$ include "include/each_element.wgsl" $}
