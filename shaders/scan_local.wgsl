// chunk_states[first of segment] = the segment's last h, from h = 0: h = exp(delta A) h + weight u B; delta_sums = sum of delta, or -1 where
// a document begins in the segment
{$ include "include/scan.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(local_invocation_index) lane: u32{{ ", @builtin(subgroup_invocation_id) subgroup_lane: u32" if subgroup }}) {
$$ if subgroup
    let slot = BC_slot(subgroup_lane);
$$ endif
    let channel = wid.x * {{ channels }}u + lane % {{ channels }}u;
    let c = min(channel, d_inner - 1u);
    let group = {{ "lane / " ~ channels ~ "u * " ~ quads ~ "u" if groups > quads else "0u" }}; // uniform where it can be
$$ for q in range(quads)
    let A{{ q }} = AD[(group + {{ q }}u) * d_inner + c];
    let rate{{ q }} = LOG2_E * A{{ q }};
    var h{{ q }} = vec4f(0.0);
$$ endfor
    var sum = 0.0;
$$ if resets
    var whole = true;
$$ endif
    let first = wid.y * {{ per_segment }}u;
    for (var t = first * {{ chunk }}u; t < (first + {{ per_segment }}u) * {{ chunk }}u; t += {{ span }}u) {
$$ for i in range(span)
        let row{{ i }} = row_at(wid.z, t + {{ i }}u);
        let u{{ i }} = u_at(row{{ i }}, t + {{ i }}u, channel);
        let delta{{ i }} = delta_at(row{{ i }}, t + {{ i }}u, channel);
$$ if resets
        let goes_on{{ i }} = goes_on(row{{ i }}, t + {{ i }}u, channel);
$$ endif
$$ if subgroup
        let bc{{ i }} = BC_at(row{{ i }}, slot);
$$ endif
$$ endfor
$$ for i in range(span)
        sum += delta{{ i }};
$$ if resets
        whole = whole && goes_on{{ i }};
$$ endif
$$ for q in range(quads)
$$ if resets
        h{{ q }} = select(vec4f(0.0), h{{ q }}, goes_on{{ i }});
$$ endif
        let a{{ i }}_{{ q }} = exp2(delta{{ i }} * rate{{ q }});
        h{{ q }} = a{{ i }}_{{ q }} * h{{ q }} + input_weight(delta{{ i }}, A{{ q }}, a{{ i }}_{{ q }}) * u{{ i }} * {{ "B" ~ q ~ "_of(bc" ~ i ~ ")" if subgroup else "B_at(row" ~ i ~ ", group + " ~ q ~ "u)" }};
$$ endfor
$$ endfor
    }
    if (channel < d_inner) {
$$ for q in range(quads)
        chunk_states[((wid.z * chunks + first) * {{ groups }}u + group + {{ q }}u) * d_inner + channel] = h{{ q }};
$$ endfor
        if (group == 0u) { delta_sums[(wid.z * segments + wid.y) * d_inner + channel] = {{ "select(-1.0, sum, whole)" if resets else "sum" }}; }
    }
}
