// states[chunk] = what reaches it: carry = exp(cum[last]) carry + states (what the chunk adds), in order of time or in reverse;
// dots[chunk] = carry starts[chunk + 1], or last, summed over a workgroup's part of the state: both belong to the end of the chunk;
// carry begins as initial, or as state, or 0, which is not stored, and ends as state
$$ set packed = "states" in vec4
$$ set size = d_state * head_dim // (4 if packed else 1)
$$ set parts = ceil_div(size, workgroup)
$$ set ahead = 1 if chunks == 1 else 2 if chunks == 2 else 4 if chunks <= 4 else 8
$$ set kind = "vec4f" if packed else "f32"
{$ include "include/group_index.wgsl" $}
{$ include "include/pack.wgsl" $}

$$ if "dots" in bound
var<workgroup> terms: array<f32, {{ ahead * workgroup }}>;
var<workgroup> part_sums: array<f32, {{ workgroup }}>;
$$ endif

fn decay(chunk_row: u32) -> f32 {
    let dt = chunk_row * {{ planes * chunk }}u;
    let left = exp2(dt_cum[dt + {{ 2 * chunk - 1 }}u]);
    return {{ "select(0.0, left, dt_cum[dt + " ~ (3 * chunk - 1) ~ "u] == 0.0)" if planes == 3 else "left" }};
}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let group = group_index(wid, groups);
    let own_part = group % {{ parts }}u;
    let own = group / {{ parts }}u; // sequence and head
    let sequence = own / n_heads;
    let head = own % n_heads;
    let i = own_part * {{ workgroup }}u + lane;
    let valid = sequence < batch && i < {{ size }}u;
    let at = min(i, {{ size - 1 }}u);
    let state_at = min(own, {{ batch * n_heads - 1 }}u) * {{ size }}u + at;
    var carry = {{ "initial[state_at]" if "initial" in bound else "state[state_at]" if "state" in bound else kind ~ "()" }};
    for (var step = 0u; step < {{ chunks }}u; step += {{ ahead }}u) {
        // Loaded {{ ahead }} at a time, so that they overlap.
$$ for j in range(ahead)
        let k{{ j }} = min(step + {{ j }}u, {{ chunks - 1 }}u);
        let row{{ j }} = (min(sequence, {{ batch - 1 }}u) * {{ chunks }}u + {{ (chunks - 1) ~ "u - " if reverse }}k{{ j }}) * n_heads + head;
        let own{{ j }} = states[row{{ j }} * {{ size }}u + at];
        let decay{{ j }} = decay(row{{ j }});
$$ if "dots" in bound
        let after{{ j }} = starts[(row{{ j }} + select(n_heads, 0u, k{{ j }} == 0u)) * {{ size }}u + at];
        let start{{ j }} = {{ "select(after" ~ j ~ ", last[state_at], k" ~ j ~ " == 0u)" if "last" in bound else "after" ~ j }};
$$ endif
$$ endfor
$$ for j in range(ahead)
        {{ "if (step + " ~ j ~ "u < " ~ chunks ~ "u) " if chunks % ahead }}{
            if (valid{{ " && step > 0u" if j == 0 and "initial" not in bound and "state" not in bound }}) { states[row{{ j }} * {{ size }}u + at] = carry; }
$$ if "dots" in bound
            terms[{{ j * workgroup }}u + lane] = select(0.0, fold(carry * start{{ j }}), valid);
$$ endif
$$ if "state" in bound
            carry = decay{{ j }} * carry + own{{ j }};
$$ else
            // The last one's own contribution is never made, and reaches nothing.
            if (step + {{ j + 1 }}u < {{ chunks }}u) { carry = decay{{ j }} * carry + own{{ j }}; }
$$ endif
        }
$$ endfor
$$ if "dots" in bound
$$ set slices = workgroup // ahead
        workgroupBarrier();
        var sum = 0.0;
        for (var l = lane % {{ slices }}u; l < {{ workgroup }}u; l += {{ slices }}u) { sum += terms[lane / {{ slices }}u * {{ workgroup }}u + l]; }
        part_sums[lane] = sum;
        workgroupBarrier();
        if (lane < {{ ahead }}u && step + lane < {{ chunks }}u && sequence < batch) {
            var total = 0.0;
            for (var l = 0u; l < {{ slices }}u; l++) { total += part_sums[lane * {{ slices }}u + l]; }
            let row = (sequence * {{ chunks }}u + {{ (chunks - 1) ~ "u - " if reverse }}(step + lane)) * n_heads + head;
            dots[row * {{ parts }}u + own_part] = total;
        }
$$ endif
    }
$$ if "state" in bound
    if (valid) { state[state_at] = carry; }
$$ endif
}
