// norm = sqrt(sum of all block_sums); control = (min(1, max_grad_norm / norm), lr at step t, 1 - beta1^t, 1 - beta2^t, skip)
// skip where any gradient, or the norm, is not finite; else state[0], the number of steps applied, becomes t
// where there is loss_scale = (scale, clean steps in a row, overflows): gradients are scale times too large; skip halves it, {{ grow_after }} clean steps double it
// state = (steps applied, calls, skipped in a row, skipped in total);  log[calls % capacity] = (loss, norm, lr, skip, scale)
$$ set lanes = workgroup
$$ set value_type = "vec4f"
$$ for name in hyper_names
const {{ name }} = {{ loop.index0 }}u;
$$ endfor
fn combine(a: vec4f, b: vec4f) -> vec4f {
    return vec4f(a.xyz + b.xyz, max(a.w, b.w));
}
{$ include "include/lane_reduce.wgsl" $}

// 1 - exp(z) for z <= 0, to float32's precision near 0 too.
fn one_minus_exp(z: f32) -> f32 {
    let series = -z * (1.0 + z / 2.0 * (1.0 + z / 3.0 * (1.0 + z / 4.0 * (1.0 + z / 5.0 * (1.0 + z / 6.0 * (1.0 + z / 7.0 * (1.0 + z / 8.0)))))));
    return select(1.0 - exp(max(z, -80.0)), series, z > -0.5);
}

// sqrt(a^2 + b^2) for a, b >= 0, by their ratio: squares could leave the range of f32.
fn length_of(a: f32, b: f32) -> f32 {
    let high = max(a, b);
    let ratio = min(a, b) / max(high, 0x1p-126);
    return high * sqrt(1.0 + ratio * ratio);
}

// Learning rate of step t, counted from 1: a linear rise, then constant, linear or cosine.
fn rate(t: f32) -> f32 {
    let top = hyper[lr];
    let rise = hyper[warmup_steps];
    if (t <= rise) {
        return top * t / rise;
    }
    let progress = min((t - rise) / max(hyper[total_steps] - rise, 1.0), 1.0);
    let low = hyper[min_lr];
    if (hyper[schedule] == 1.0) {
        return mix(top, low, progress);
    }
    if (hyper[schedule] == 2.0) {
        return low + (top - low) * (0.5 + 0.5 * cos({{ pi | f32 }} * progress));
    }
    return top;
}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(local_invocation_index) lane: u32) {
    var own = vec4f(0.0);
    // {{ unroll }} at a time, so that their loads overlap.
    for (var b = lane; b < total_blocks; b += {{ unroll * workgroup }}u) {
$$ for j in range(unroll)
        let sums{{ j }} = block_sums[min(b + {{ j * workgroup }}u, total_blocks - 1u)];
$$ endfor
        own = combine(own, sums0);
$$ for j in range(1, unroll)
        own = combine(own, select(vec4f(0.0), sums{{ j }}, b + {{ j * workgroup }}u < total_blocks));
$$ endfor
    }
    let total = lane_reduce(own, lane);
    if (lane == 0u) {
        // Sums of squares are in units of 2^160, 1 and 2^-160: their roots are brought to one unit.
        let roots = sqrt(total.xyz);
        let in_large = roots.x > 0.0;
        let root = select(length_of(roots.y, roots.z * 0x1p-80), length_of(roots.x, roots.y * 0x1p-80), in_large);
        let too_large = in_large && root >= 0x1p47;  // the norm would pass 2^127
$$ set scaled = "loss_scale" in bound
        let scale = {{ "loss_scale[0]" if scaled else "1.0" }};
        let norm = select(root, min(root, 0x1p47) * 0x1p80, in_large){{ " / scale" if scaled }};
        let skip = total.w > 0.0 || too_large;
        let t = f32(state[0] + 1u);
        let limit = hyper[max_grad_norm];
        let step_lr = rate(t);
        let flag = select(0.0, 1.0, skip);
        control[0] = select(1.0, limit / max(norm, limit), limit > 0.0){{ " / scale" if scaled }};
        control[1] = step_lr;
        control[2] = one_minus_exp(t * hyper[ln_beta1]);
        control[3] = one_minus_exp(t * hyper[ln_beta2]);
        control[4] = flag;
        let row = state[1] % capacity * fields;
        log[row] = loss[0];
        log[row + 1u] = norm;
        log[row + 2u] = step_lr;
        log[row + 3u] = flag;
        log[row + 4u] = scale;
$$ if scaled
        let clean = loss_scale[1] + 1.0;
        let grows = !skip && clean >= {{ grow_after | f32 }};
        loss_scale[0] = select(select(scale, min(2.0 * scale, {{ max_scale | f32 }}), grows), max(0.5 * scale, 1.0), skip);
        loss_scale[1] = select(clean, 0.0, skip || grows);
        loss_scale[2] += flag;
$$ endif
        state[0] += select(1u, 0u, skip);
        state[1] += 1u;
        state[2] = select(0u, state[2] + 1u, skip);
        state[3] += select(0u, 1u, skip);
    }
}
