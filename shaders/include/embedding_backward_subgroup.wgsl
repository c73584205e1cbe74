// embedding_backward.wgsl for CPU adapters with subgroups of 8, where barriers are dear: a subgroup for each row of the table
// looks through all rows of the batch, 8 at a time.
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(subgroup_invocation_id) lane: u32) {
    let own = group_index(wid, groups);
    if (own >= piece_rows) {
        return;
    }
    let token = own + {{ first_row }}u;
$$ for s in range(slots)
    var sum{{ s }} = pack(0.0);
$$ endfor
    var occurs = false;
    for (var first = 0u; first < rows; first += 256u) {
        // Each 256 rows have a sum of their own, which keeps that of a frequent token exact to float32.
$$ for s in range(slots)
        var part{{ s }} = pack(0.0);
$$ endfor
        for (var r = first; r < min(first + 256u, rows); r += 8u) {
            var bits = subgroupBallot(r + lane < rows && tokens[min(r + lane, rows - 1u)] == token).x;
            occurs = occurs || bits != 0u;
            while (bits != 0u) {
                let row = r + firstTrailingBit(bits);
                bits &= bits - 1u;
$$ for s in range(slots)
                part{{ s }} += dout[row * {{ columns }}u + min(lane + {{ 8 * s }}u, {{ columns - 1 }}u)];
$$ endfor
            }
        }
$$ for s in range(slots)
        sum{{ s }} += part{{ s }};
$$ endfor
    }
    if (occurs) {
$$ for s in range(slots)
        if (lane + {{ 8 * s }}u < {{ columns }}u) {
            dweight[own * {{ columns }}u + lane + {{ 8 * s }}u] += sum{{ s }};
        }
$$ endfor
    }
}
