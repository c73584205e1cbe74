// inv[r] = 1 / sqrt(mean_i x[r,i]^2 + eps);  out[r,i] = weight[i] * x[r,i] * inv[r]
$$ set packed = "x" in vec4
$$ set columns = d_model // 4 if packed else d_model
$$ set value_type = "f32"
{$ include "include/group_index.wgsl" $}
{$ include "include/pack.wgsl" $}
fn combine(a: f32, b: f32) -> f32 {
    return a + b;
}
{$ include "include/lane_reduce.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let own_row = group_index(wid, groups) * {{ workgroup // lanes }}u + lane / {{ lanes }}u;
    let row = min(own_row, rows - 1u);  // lanes past the end repeat the last row, and store nothing
    let first = row * {{ columns }}u;
    var squares = pack(0.0);
    for (var c = lane % {{ lanes }}u; c < {{ columns }}u; c += {{ lanes }}u) {
        let a = x[first + c];
        squares += a * a;
    }
    let scale = inverseSqrt(lane_reduce(fold(squares), lane) / f32(d_model) + {{ eps | f32 }});
    if (own_row < rows) {
        if (lane % {{ lanes }}u == 0u) { inv[row] = scale; }
        for (var c = lane % {{ lanes }}u; c < {{ columns }}u; c += {{ lanes }}u) {
            {{ store("out", "first + c", "weight[c] * x[first + c] * scale") }}
        }
    }
}
