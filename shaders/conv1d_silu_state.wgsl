// state[b,j,c] = the input at timestep seqlen - context + j: from x, or where that is before 0 from initial, or from state itself
// where that is not bound; 0 where it is of another document than the last timestep
$$ set count = batch * d_inner
$$ set before = "initial" if "initial" in bound else "state"
$$ set apart = "documents" in bound
fn element(i: u32) {
    let sequence = i / d_inner;
    let c = i % d_inner;
$$ if apart
    let last = documents[sequence * seqlen + seqlen - 1u];
$$ endif
    // Upwards: what is read lies at or after what is written.
    for (var j = 0u; j < context; j++) {
        let to = (sequence * context + j) * d_inner + c;
        if (j + seqlen < context) {
            state[to] = {{ "select(0.0, " if apart }}{{ before }}[to + seqlen * d_inner]{{ ", last == 0u)" if apart }};
        } else {
            let row = sequence * seqlen + j + seqlen - context;
            state[to] = {{ "select(0.0, " if apart }}{{ load("x", "row * x_stride + " ~ x_start ~ "u + c") }}{{ ", documents[row] == last)" if apart }};
        }
    }
}
{$ include "include/each_element.wgsl" $}
