// s = sigmoid(gate);  dup = dout * gate * s;  dgate = dout * up * s * (1 + gate * (1 - s));  dx = [dup | dgate]
$$ set packed = "dx" in vec4
$$ set columns = d_ff // 4 if packed else d_ff
$$ set count = rows * columns
{$ include "include/pack.wgsl" $}
{$ include "include/sigmoid.wgsl" $}

fn element(i: u32) {
    let up = i + i / {{ columns }}u * {{ columns }}u;
    let gate = {{ load("x", "up + " ~ columns ~ "u") }};
    let s = sigmoid(gate);
    let slope = s * (1.0 + gate * (1.0 - s)) * {{ load("x", "up") }};
    let d = {{ load("dout", "i") }};
    {{ add("dx", "up", "d * gate * s") }}
    {{ add("dx", "up + " ~ columns ~ "u", "d * slope") }}
}
{$ include "include/each_element.wgsl" $}
