// dA[k,c] += scale * sum over r of B[r,k] * dout[r,c];  dB[r,k] += scale * sum over c of dout[r,c] * A[k,c]
$$ set lanes = workgroup
$$ set value_type = "f32"
{$ include "include/group_index.wgsl" $}
fn combine(a: f32, b: f32) -> f32 {
    return a + b;
}
{$ include "include/lane_reduce.wgsl" $}

// A group sums one element of dA by all its lanes; those behind have an element of dB a lane.
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let group = group_index(wid, groups);
    let of_a = group < {{ rank * columns }}u;
    var sum = 0.0;
    if (of_a) {
        let k = group / columns;
        let c = group % columns;
        for (var r = lane; r < rows; r += {{ workgroup }}u) { sum += B[r * rank + k] * dout[r * columns + c]; }
    }
    let total = lane_reduce(sum, lane);
    if (of_a && lane == 0u) { {{ add("dA", "group", (scale | f32) ~ " * total") }} }
    let i = (group - {{ rank * columns }}u) * {{ workgroup }}u + lane;
    if (!of_a && i < {{ rows * rank }}u) {
        let r = i / rank;
        let k = i % rank;
        for (var c = 0u; c < columns; c++) { sum += dout[r * columns + c] * A[k * columns + c]; }
        {{ add("dB", "i", (scale | f32) ~ " * sum") }}
    }
}
