// dx[b,t,x_start+c] += dfinal[b,t-(seqlen-context),c], the gradient of the state that is left, for the last timesteps, as far as
// they are of the last one's document
$$ set count = batch * d_inner
$$ set first = [context - seqlen, 0] | max
fn element(i: u32) {
    let sequence = i / d_inner;
    let c = i % d_inner;
    for (var j = {{ first }}u; j < context; j++) {
        let row = sequence * seqlen + seqlen + j - context;
$$ if "documents" in bound
        if (documents[row] == documents[sequence * seqlen + seqlen - 1u]) {
            dx[row * x_stride + {{ x_start }}u + c] += dfinal[(sequence * context + j) * d_inner + c];
        }
$$ else
        dx[row * x_stride + {{ x_start }}u + c] += dfinal[(sequence * context + j) * d_inner + c];
$$ endif
    }
}
{$ include "include/each_element.wgsl" $}
