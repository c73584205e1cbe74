// dg = dg silu(z), which is dy; dxz's second half = dg y silu'(z), which is dz
$$ set packed = "y" in vec4
$$ set columns = d_inner // 4 if packed else d_inner
$$ set count = batch * seqlen * columns
{$ include "include/pack.wgsl" $}

fn element(i: u32) {
    let at = i / {{ columns }}u * {{ 2 * columns }}u + {{ columns }}u + i % {{ columns }}u;
    let z = {{ load("xz", "at") }};
    let e = exp(-abs(z)); // never overflows
    let s = select(e, pack(1.0), z >= pack(0.0)) / (1.0 + e);
    let dout = {{ load("dg", "i") }};
    {{ store("dg", "i", "dout * z * s") }}
    {{ store("dxz", "at", "dout * " ~ load("y", "i") ~ " * s * (1.0 + z * (1.0 - s))") }}
}

{$ include "include/each_element.wgsl" $}
