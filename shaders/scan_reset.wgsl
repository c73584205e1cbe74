// delta = -max(delta, 1e-30) at each document's first step: where documents differs from the step before, or is not 0 at a row's first
$$ set count = batch * seqlen * d_inner
fn element(i: u32) {
    let row = i / d_inner;
    // A state that is carried into a row belongs to document 0.
    let before = select(documents[max(row, 1u) - 1u], 0u, row % seqlen == 0u);
    if (documents[row] != before) {
        delta[i] = -max(delta[i], 1e-30);
    }
}
{$ include "include/each_element.wgsl" $}
