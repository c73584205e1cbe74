// row_loss[r] = (log(sum_i exp logits[r,i]) - logits[r, targets[r]]) * batch_scale, 0 where the target is none of the columns
// logits[r,i] = (exp(logits[r,i]) / sum_j exp(logits[r,j]) - [i == targets[r]]) * batch_scale, the loss's gradient; times loss_scale[0]
$$ set packed = "logits" in vec4
$$ set columns = vocab_size // 4 if packed else vocab_size
$$ set value_type = "vec2f"
{$ include "include/group_index.wgsl" $}
{$ include "include/pack.wgsl" $}

// Two values each (highest logit, sum of exp(logit - highest)) of a part of the row.
fn combine(a: vec2f, b: vec2f) -> vec2f {
    let highest = max(a.x, b.x);
    return vec2f(highest, a.y * exp(a.x - highest) + b.y * exp(b.x - highest));
}
{$ include "include/lane_reduce.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let own_row = group_index(wid, groups) * {{ workgroup // lanes }}u + lane / {{ lanes }}u;
    let row = min(own_row, rows - 1u);  // lanes past the end repeat the last row, and store nothing
    let first = row * {{ columns }}u;
    let target_column = targets[row];
    let counted = target_column < vocab_size;
    // Before anything is overwritten: all reads up to lane_reduce's barrier are of logits.
    let i = select(0u, target_column, counted);
    let target_logit = {{ "logits[first + i / 4u][i % 4u]" if packed else "logits[first + i]" }};
    var own = vec2f(-3.0e38, 0.0);
    for (var c = lane % {{ lanes }}u; c < {{ columns }}u; c += {{ lanes }}u) {
        let a = logits[first + c];
        let highest = {{ "max(max(a.x, a.y), max(a.z, a.w))" if packed else "a" }};
        if (highest > own.x) {
            own = vec2f(highest, own.y * exp(own.x - highest));
        }
        own.y += fold(exp(a - own.x));
    }
    let total = lane_reduce(own, lane);
    let scale = select(0.0, batch_scale[0], counted);
    if (own_row < rows && lane % {{ lanes }}u == 0u) {
        row_loss[row] = select(0.0, (total.x + log(total.y) - target_logit) * scale, counted);
    }
$$ if gradient
    if (own_row < rows) {
        for (var c = lane % {{ lanes }}u; c < {{ columns }}u; c += {{ lanes }}u) {
            let softmax = exp(logits[first + c] - total.x) / total.y;
            let one_hot = select(pack(0.0), pack(1.0), {{ "4u * c + vec4u(0u, 1u, 2u, 3u) == vec4u(target_column)" if packed else "c == target_column" }});
            logits[first + c] = select(pack(0.0), (softmax - one_hot) * {{ "(scale * loss_scale[0])" if "loss_scale" in bound else "scale" }}, counted);
        }
    }
$$ endif
}
