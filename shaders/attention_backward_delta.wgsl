// delta[b,h,i] = dout[b,i,h] . out[b,i,h]
$$ set depth = 4
$$ set loads = [("dout", d_out, "batch * seqlen - 1u"), ("out", d_out, "batch * seqlen - 1u")]
$$ set stores = []
{$ include "include/attention.wgsl" $}
$$ set count = batch * seqlen * n_heads
fn element(i: u32) {
    let row = i / n_heads;
    let h = i % n_heads;
    var sum = vec4f();
    for (var e = 0u; e < {{ head_dim }}u; e += 4u) {
        sum += load_dout(h * {{ head_dim }}u, row, e) * load_out(h * {{ head_dim }}u, row, e);
    }
    delta[(row / seqlen * n_heads + h) * seqlen + row % seqlen] = (sum.x + sum.y) + (sum.z + sum.w);
}
{$ include "include/each_element.wgsl" $}
