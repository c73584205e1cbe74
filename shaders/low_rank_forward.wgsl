// out[r,c] = weight[r,c] + scale * sum over k of B[r,k] * A[k,c]
$$ set count = rows * columns
fn element(i: u32) {
    let r = i / columns;
    let c = i % columns;
    var sum = 0.0;
    for (var k = 0u; k < rank; k++) { sum += B[r * rank + k] * A[k * columns + c]; }
    out[i] = weight[i] + {{ scale | f32 }} * sum;
}
{$ include "include/each_element.wgsl" $}
