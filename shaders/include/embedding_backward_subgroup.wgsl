// embedding_backward.wgsl for CPU adapters with subgroups of 8, where barriers are dear: a subgroup for every {{ each }} rows of the
// table looks through all rows of the batch, 32 at a time.
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(subgroup_invocation_id) lane: u32) {
    let own = group_index(wid, groups) * {{ each }}u;
    if (own >= piece_rows) {
        return;
    }
$$ for e in range(each)
$$ for s in range(slots)
    var sum{{ e }}_{{ s }} = pack(0.0);
$$ endfor
    var occurs{{ e }} = false;
$$ endfor
    for (var first = 0u; first < rows; first += 256u) {
        // Each 256 rows have a sum of their own, which keeps that of a frequent token exact to float32.
$$ for e in range(each)
$$ for s in range(slots)
        var part{{ e }}_{{ s }} = pack(0.0);
$$ endfor
$$ endfor
        for (var r = first; r < min(first + 256u, rows); r += 32u) {
$$ for j in range(4)
            // A row past the end has no token of the table.
            let token{{ j }} = select(0xffffffffu, tokens[min(r + {{ 8 * j }}u + lane, rows - 1u)], r + {{ 8 * j }}u + lane < rows);
$$ endfor
$$ for e in range(each)
            {
                // Which of 32 rows have the token: a bit a row, and of each lane those that it looks at.
                let token = own + {{ first_row + e }}u;
                var bits = 0u;
$$ for j in range(4)
                bits |= select(0u, 1u << ({{ 8 * j }}u + lane), token{{ j }} == token);
$$ endfor
                bits |= subgroupShuffleXor(bits, 1u);
                bits |= subgroupShuffleXor(bits, 2u);
                bits |= subgroupShuffleXor(bits, 4u);
                occurs{{ e }} = occurs{{ e }} || bits != 0u;
                while (bits != 0u) {
                    let row = r + firstTrailingBit(bits);
                    bits &= bits - 1u;
$$ for s in range(slots)
                    part{{ e }}_{{ s }} += dout[row * {{ columns }}u + min(lane + {{ 8 * s }}u, {{ columns - 1 }}u)];
$$ endfor
                }
            }
$$ endfor
        }
$$ for e in range(each)
$$ for s in range(slots)
        sum{{ e }}_{{ s }} += part{{ e }}_{{ s }};
$$ endfor
$$ endfor
    }
$$ for e in range(each)
    if (occurs{{ e }}{{ " && own + " ~ e ~ "u < piece_rows" if piece_rows % each }}) {
$$ for s in range(slots)
        if (lane + {{ 8 * s }}u < {{ columns }}u) {
            dweight[(own + {{ e }}u) * {{ columns }}u + lane + {{ 8 * s }}u] += sum{{ e }}_{{ s }};
        }
$$ endfor
    }
$$ endfor
}
