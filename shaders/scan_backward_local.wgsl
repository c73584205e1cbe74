// carry[segment] = e before the segment, from e = 0 after it: e = exp(delta A) (C dy + e), from right to left; delta_sums = sum of delta, or
// -1 where a document begins in the segment
$$ set discretization = "euler"
{$ include "include/scan.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(local_invocation_index) lane: u32) {
    let channel = wid.x * {{ channels }}u + lane % {{ channels }}u;
    let c = min(channel, d_inner - 1u);
    let group = {{ "lane / " ~ channels ~ "u * " ~ quads ~ "u" if groups > quads else "0u" }}; // uniform where it can be
$$ for q in range(quads)
    let rate{{ q }} = LOG2_E * AD[(group + {{ q }}u) * d_inner + c];
    var e{{ q }} = vec4f(0.0);
$$ endfor
    var sum = 0.0;
$$ if resets
    var whole = true;
$$ endif
    let segment = wid.y + 1u; // nothing lies left of the first
    let first = segment * {{ per_segment * chunk }}u;
    let last = min(first + {{ per_segment * chunk }}u, {{ ceil_div(seqlen, chunk) * chunk }}u);
    for (var end = last; end > first; end -= {{ span }}u) {
$$ for i in range(span)
        let t{{ i }} = end - {{ i + 1 }}u;
        let row{{ i }} = row_at(wid.z, t{{ i }});
        let delta{{ i }} = delta_at(row{{ i }}, t{{ i }}, channel);
        let dy{{ i }} = dy_at(row{{ i }}, t{{ i }}, channel);
$$ if resets
        let goes_on{{ i }} = goes_on(row{{ i }}, t{{ i }}, channel);
$$ endif
$$ endfor
$$ for i in range(span)
        sum += delta{{ i }};
$$ if resets
        whole = whole && goes_on{{ i }};
$$ endif
$$ for q in range(quads)
        e{{ q }} = exp2(delta{{ i }} * rate{{ q }}) * (C_at(row{{ i }}, group + {{ q }}u) * dy{{ i }} + e{{ q }});
$$ if resets
        e{{ q }} = select(vec4f(0.0), e{{ q }}, goes_on{{ i }});
$$ endif
$$ endfor
$$ endfor
    }
    if (channel < d_inner) {
$$ for q in range(quads)
        carry[((wid.z * segments + segment) * groups + group + {{ q }}u) * d_inner + channel] = e{{ q }};
$$ endfor
        if (group == 0u) { delta_sums[(wid.z * segments + segment) * d_inner + channel] = {{ "select(-1.0, sum, whole)" if resets else "sum" }}; }
    }
}
