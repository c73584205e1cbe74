// rms_norm_backward.wgsl with four rows at a time, whose columns the lanes of a workgroup hold in registers.
$$ set value_type = "vec4f"
{$ include "include/workgroup_sum.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let group = group_index(wid, groups);
    let first_row = min(group * {{ rows_per_group }}u, rows);
    let end_row = min(first_row + {{ rows_per_group }}u, rows);
$$ for j in range(held)
$$ set rest = columns - j * workgroup
    let c{{ j }} = min(lane + {{ j * workgroup }}u, {{ columns - 1 }}u);
    let w{{ j }} = {{ "select(pack(0.0), weight[c%d], lane < %du)" % (j, rest) if rest < workgroup else "weight[c%d]" % j }};
    var dw{{ j }} = pack(0.0);
$$ endfor
    for (var row0 = first_row; row0 < end_row; row0 += 4u) {
$$ for r in range(4)
        let row{{ r }} = min(row0 + {{ r }}u, end_row - 1u);
$$ for j in range(held)
        let i{{ r }}_{{ j }} = row{{ r }} * {{ columns }}u + c{{ j }};
        let d{{ r }}_{{ j }} = {{ load("dout", "i%d_%d" % (r, j)) }};
        let x{{ r }}_{{ j }} = x[i{{ r }}_{{ j }}];
$$ if "dx" in accumulate
        let before{{ r }}_{{ j }} = dx[i{{ r }}_{{ j }}];
$$ endif
$$ endfor
$$ endfor
        let dots = workgroup_sum(vec4f({$ for r in range(4) $}fold({$ for j in range(held) $}w{{ j }} * d{{ r }}_{{ j }} * x{{ r }}_{{ j }}{{ " + " if j < held - 1 }}{$ endfor $}){{ ", " if r < 3 }}{$ endfor $}), lane);
        let scale = vec4f({$ for r in range(4) $}inv[row{{ r }}]{{ ", " if r < 3 }}{$ endfor $});
        let mean = scale * scale * dots / f32(d_model);
$$ for r in range(4)
        if (row0 + {{ r }}u < end_row) {
$$ for j in range(held)
$$ set rest = columns - j * workgroup
            {{ "if (lane < %du) " % rest if rest < workgroup }}{
                let normed = x{{ r }}_{{ j }} * scale[{{ r }}];
                dx[i{{ r }}_{{ j }}] = {{ "before%d_%d + " % (r, j) if "dx" in accumulate }}scale[{{ r }}] * w{{ j }} * d{{ r }}_{{ j }} - normed * mean[{{ r }}];
                dw{{ j }} += d{{ r }}_{{ j }} * normed;
            }
$$ endfor
        }
$$ endfor
    }
$$ if "weight_partials" in bound
    if (group < parts) {
$$ for j in range(held)
$$ set rest = columns - j * workgroup
        {{ "if (lane < %du) " % rest if rest < workgroup }}{ weight_partials[group * {{ stride // 4 if packed else stride }}u + c{{ j }}] = dw{{ j }}; }
$$ endfor
    }
$$ endif
}
