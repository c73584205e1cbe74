// state[b,j,c] = the input at timestep seqlen - context + j: from x, or where that is before 0 from state itself
$$ set count = batch * d_inner
fn element(i: u32) {
    let sequence = i / d_inner;
    let c = i % d_inner;
    // Upwards: what is read lies at or after what is written.
    for (var j = 0u; j < context; j++) {
        let to = (sequence * context + j) * d_inner + c;
        if (j + seqlen < context) {
            state[to] = state[to + seqlen * d_inner];
        } else {
            state[to] = x[(sequence * seqlen + j + seqlen - context) * x_stride + {{ x_start }}u + c];
        }
    }
}
{$ include "include/each_element.wgsl" $}
