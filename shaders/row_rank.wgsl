// row_rank[r] = how many logits of row r are above logits[r, targets[r]]; -1 where the target is none of the columns
$$ set packed = "logits" in vec4
$$ set columns = vocab_size // 4 if packed else vocab_size
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
    let target_column = targets[row];
    let counted = target_column < vocab_size;
    let i = select(0u, target_column, counted);
    let target_logit = pack({{ "logits[first + i / 4u][i % 4u]" if packed else "logits[first + i]" }});
    var above = pack(0.0);
    for (var c = lane % {{ lanes }}u; c < {{ columns }}u; c += {{ lanes }}u) {
        above += select(pack(0.0), pack(1.0), logits[first + c] > target_logit);
    }
    let rank = lane_reduce(fold(above), lane);
    if (own_row < rows && lane % {{ lanes }}u == 0u) {
        row_rank[row] = select(-1.0, rank, counted);
    }
}
