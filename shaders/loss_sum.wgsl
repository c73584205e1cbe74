// loss[0] += sum of row_loss over the rows
$$ set lanes = workgroup
$$ set value_type = "f32"
fn combine(a: f32, b: f32) -> f32 {
    return a + b;
}
{$ include "include/lane_reduce.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(local_invocation_index) lane: u32) {
    var sum = 0.0;
    for (var r = lane; r < rows; r += {{ workgroup }}u) {
        sum += row_loss[r];
    }
    let total = lane_reduce(sum, lane);
    if (lane == 0u) {
        {{ add("loss", "0", "total") }}
    }
}
