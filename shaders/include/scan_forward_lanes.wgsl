// scan_forward.wgsl where a lane holds some states of a channel, whose lanes add y up in workgroup memory.
$$ set lane_groups = groups // quads
$$ set turns = ceil_div(span, lane_groups)
$$ set last_span = ceil_div(seqlen, chunk) * chunk - span

$$ if lane_groups > 1
// C h of each lane, [parity][step][lane group][channel]: two turns, so that one barrier a span is enough.
var<workgroup> products: array<f32, {{ 2 * span * workgroup }}>;
$$ endif

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(local_invocation_index) lane: u32{{ ", @builtin(subgroup_invocation_id) subgroup_lane: u32" if subgroup }}) {
$$ if subgroup
    let slot = BC_slot(subgroup_lane);
$$ endif
    let channel = wid.x * {{ channels }}u + lane % {{ channels }}u;
    let c = min(channel, d_inner - 1u);
    let group = {{ "lane / " ~ channels ~ "u * " ~ quads ~ "u" if groups > quads else "0u" }}; // uniform where it can be
    let D = AD[{{ 2 * groups }}u * d_inner + c].x;
    let first = wid.y * {{ per_segment }}u;
    let last = min(first + {{ per_segment }}u, {{ ceil_div(seqlen, chunk) }}u);
$$ for q in range(quads)
    let A{{ q }} = AD[(group + {{ q }}u) * d_inner + c];
    let rate{{ q }} = LOG2_E * A{{ q }};
$$ if started
    var h{{ q }} = chunk_states[((wid.z * chunks + first) * {{ groups }}u + group + {{ q }}u) * d_inner + c];
$$ elif "state" in bound
    var h{{ q }} = state[(wid.z * {{ groups }}u + group + {{ q }}u) * d_inner + c];
$$ else
    var h{{ q }} = vec4f(0.0);
$$ endif
$$ endfor
$$ if lane_groups > 1
    var turn = 0u;
$$ endif
    // A span's u and delta are loaded while the one before it is worked on.
$$ for i in range(span)
    var next_u{{ i }} = u_at(row_at(wid.z, first * {{ chunk }}u + {{ i }}u), first * {{ chunk }}u + {{ i }}u, channel);
    var next_delta{{ i }} = delta_at(row_at(wid.z, first * {{ chunk }}u + {{ i }}u), first * {{ chunk }}u + {{ i }}u, channel);
$$ if resets
    var next_goes_on{{ i }} = goes_on(row_at(wid.z, first * {{ chunk }}u + {{ i }}u), first * {{ chunk }}u + {{ i }}u, channel);
$$ endif
$$ endfor
    for (var k = first; k < last; k++) {
$$ if "chunk_states" in bound
        if (channel < d_inner) {
$$ for q in range(quads)
            chunk_states[((wid.z * chunks + k) * {{ groups }}u + group + {{ q }}u) * d_inner + channel] = h{{ q }};
$$ endfor
        }
$$ endif
        for (var t = k * {{ chunk }}u; t < (k + 1u) * {{ chunk }}u; t += {{ span }}u) {
$$ for i in range(span)
            let u{{ i }} = next_u{{ i }};
            let delta{{ i }} = next_delta{{ i }};
$$ if resets
            let goes_on{{ i }} = next_goes_on{{ i }};
$$ endif
$$ endfor
            let next_t = min(t + {{ span }}u, {{ last_span }}u);
$$ for i in range(span)
            next_u{{ i }} = u_at(row_at(wid.z, next_t + {{ i }}u), next_t + {{ i }}u, channel);
            next_delta{{ i }} = delta_at(row_at(wid.z, next_t + {{ i }}u), next_t + {{ i }}u, channel);
$$ if resets
            next_goes_on{{ i }} = goes_on(row_at(wid.z, next_t + {{ i }}u), next_t + {{ i }}u, channel);
$$ endif
$$ endfor
$$ for j in range(turns)
            let step{{ j }} = {{ "lane / " ~ channels ~ "u + " if lane_groups > 1 else "" }}{{ j * lane_groups }}u;
            let out_row{{ j }} = row_at(wid.z, t + step{{ j }});
            let z{{ j }} = z_at(out_row{{ j }}, t + step{{ j }}, channel);
            let skip{{ j }} = D * {{ "u_at(out_row" ~ j ~ ", t + step" ~ j ~ ", channel)" if lane_groups > 1 else "u" ~ j }};
$$ endfor
$$ for i in range(span)
            let row{{ i }} = row_at(wid.z, t + {{ i }}u);
$$ if subgroup
            let bc{{ i }} = BC_at(row{{ i }}, slot);
$$ endif
$$ for q in range(quads)
$$ if resets
            h{{ q }} = select(vec4f(0.0), h{{ q }}, goes_on{{ i }});
$$ endif
            let a{{ i }}_{{ q }} = exp2(delta{{ i }} * rate{{ q }});
            h{{ q }} = a{{ i }}_{{ q }} * h{{ q }} + input_weight(delta{{ i }}, A{{ q }}, a{{ i }}_{{ q }}) * u{{ i }} * {{ "B" ~ q ~ "_of(bc" ~ i ~ ")" if subgroup else "B_at(row" ~ i ~ ", group + " ~ q ~ "u)" }};
            {{ "y" if q else "var y" }}{{ i }} {{ "+=" if q else "=" }} dot({{ "C" ~ q ~ "_of(bc" ~ i ~ ")" if subgroup else "C_at(row" ~ i ~ ", group + " ~ q ~ "u)" }}, h{{ q }});
$$ endfor
$$ if lane_groups > 1
            products[(turn * {{ span }}u + {{ i }}u) * {{ workgroup }}u + lane] = y{{ i }};
$$ else
            finish(wid.z, t + {{ i }}u, channel, y{{ i }} + skip{{ i }}, z{{ i }});
$$ endif
$$ endfor
$$ if lane_groups > 1
            workgroupBarrier();
$$ for j in range(turns)
            if (step{{ j }} < {{ span }}u) {
                let at = (turn * {{ span }}u + step{{ j }}) * {{ workgroup }}u + lane % {{ channels }}u;
                var sum = products[at];
$$ if lane_groups <= 16
$$ for l in range(1, lane_groups)
                sum += products[at + {{ l * channels }}u];
$$ endfor
$$ else
                for (var l = 1u; l < {{ lane_groups }}u; l++) { sum += products[at + l * {{ channels }}u]; }
$$ endif
                finish(wid.z, t + step{{ j }}, channel, sum + skip{{ j }}, z{{ j }});
            }
$$ endfor
            turn = 1u - turn;
$$ endif
        }
    }
$$ if "state" in bound
    if (channel < d_inner && last == {{ ceil_div(seqlen, chunk) }}u) {
$$ for q in range(quads)
        state[(wid.z * {{ groups }}u + group + {{ q }}u) * d_inner + channel] = h{{ q }};
$$ endfor
    }
$$ endif
}
