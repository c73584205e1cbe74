// embedding_backward.wgsl for CPU adapters with subgroups of 8, where barriers are dear: a subgroup for each row of the table
// looks through all rows of the batch, 32 at a time.
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
        for (var r = first; r < min(first + 256u, rows); r += 32u) {
            // Which of 32 rows have the token: a bit a row, and of each lane those that it looks at.
            var bits = 0u;
$$ for j in range(4)
            if (r + {{ 8 * j }}u + lane < rows && tokens[min(r + {{ 8 * j }}u + lane, rows - 1u)] == token) { bits |= 1u << ({{ 8 * j }}u + lane); }
$$ endfor
            bits |= subgroupShuffleXor(bits, 1u);
            bits |= subgroupShuffleXor(bits, 2u);
            bits |= subgroupShuffleXor(bits, 4u);
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
