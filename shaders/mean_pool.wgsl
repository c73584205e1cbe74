// out[b] = m / |m|, m = mean of x[b, t] over the t that are counted; one workgroup a sequence
$$ set packed = "x" in vec4
$$ set columns = d_model // 4 if packed else d_model
$$ set lanes = workgroup
$$ set value_type = "f32"
{$ include "include/group_index.wgsl" $}
{$ include "include/pack.wgsl" $}
fn combine(a: f32, b: f32) -> f32 {
    return a + b;
}
{$ include "include/lane_reduce.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let own = group_index(wid, groups);
    let b = min(own, batch - 1u);  // workgroups past the end repeat the last sequence, and store nothing
$$ if "counted" in bound
    var steps = 0.0;
    for (var t = 0u; t < seqlen; t++) { steps += f32(counted[b * seqlen + t]); }
    steps = max(steps, 1.0);
$$ else
    let steps = f32(seqlen);
$$ endif
    var squares = pack(0.0);
    for (var c = lane; c < {{ columns }}u; c += {{ workgroup }}u) {
        var sum = pack(0.0);
        for (var t = 0u; t < seqlen; t++) {
$$ if "counted" in bound
            if (counted[b * seqlen + t] != 0u) { sum += x[(b * seqlen + t) * {{ columns }}u + c]; }
$$ else
            sum += x[(b * seqlen + t) * {{ columns }}u + c];
$$ endif
        }
        let mean = sum / steps;
        squares += mean * mean;
        if (own < batch) { out[b * {{ columns }}u + c] = mean; }
    }
    // The smallest norm keeps a vector of zeros from a division by zero.
    let scale = inverseSqrt(max(lane_reduce(fold(squares), lane), 1e-24));
    if (own < batch) {
        for (var c = lane; c < {{ columns }}u; c += {{ workgroup }}u) {
            out[b * {{ columns }}u + c] *= scale;
        }
    }
}
