// g = grads * control[0];  m += (1 - beta1) (g - m);  v += (1 - beta2) (g^2 - v)
// params -= lr weight_decay params + clamp(lr (m / control[2]) / (sqrt(v / control[3]) + eps), -max_delta, max_delta)
// An element whose gradient is not finite keeps its weight and moments; a step that is not finite counts as 0.
{$ include "include/group_index.wgsl" $}
$$ for name in hyper_names
const {{ name }} = {{ loop.index0 }}u;
$$ endfor

// By the exponent's bits: compilers may assume that comparisons meet no NaN.
fn is_finite(a: vec4f) -> vec4<bool> {
    return ((bitcast<vec4u>(a) >> vec4u(23u)) & vec4u(255u)) != vec4u(255u);
}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    // What all lanes read alike comes before anything branches: there a CPU adapter reads it once, elsewhere once a lane.
    let group = group_index(wid, groups);
    let grad_scale = control[0];
    let rate = control[1];
    let one_minus_beta1_t = control[2];
    let one_minus_beta2_t = control[3];
    let skip = control[4] != 0.0;
    let gain_m = hyper[one_minus_beta1];
    let gain_v = hyper[one_minus_beta2];
    let floor_v = hyper[eps];
    let limit = hyper[max_delta];
    let decays = decay[min(group * {{ workgroup }}u / 256u, n_blocks - 1u)] != 0u;
    let shrink = select(0.0, rate * hyper[weight_decay], decays);
    let i = group * {{ workgroup }}u + lane;
    if (i >= {{ n // 4 }}u || skip) {
        return;
    }
    let raw = grads[i];
    let old_m = m[i];
    let old_v = v[i];
    let old_p = params[i];
    let ok = is_finite(raw);
    let g = raw * grad_scale;
    let new_m = old_m + gain_m * (g - old_m);
    let capped = clamp(g, vec4f(-1.8e19), vec4f(1.8e19));  // so that no square overflows
    let new_v = old_v + gain_v * (capped * capped - old_v);
    let full = rate * (new_m / one_minus_beta1_t) / (sqrt(new_v / one_minus_beta2_t) + floor_v);
    var step = select(vec4f(0.0), full, is_finite(full));
    if (limit > 0.0) {
        step = clamp(step, vec4f(-limit), vec4f(limit));
    }
    m[i] = select(old_m, new_m, ok);
    v[i] = select(old_v, new_v, ok);
    params[i] = select(old_p, old_p - (shrink * old_p + step), ok);
}
