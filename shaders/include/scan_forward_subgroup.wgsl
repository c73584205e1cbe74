// scan_forward.wgsl for CPU adapters with subgroups of 8: a lane holds all states of four neighbouring channels, since loads and
// stores are dear there, and cheapest by fours.
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(subgroup_invocation_id) lane: u32) {
    let slot = BC_slot(lane);
    let four = wid.x * {{ workgroup }}u + lane;
    let c = 4u * min(four, {{ d_inner // 4 - 1 }}u);
    let D = vec4f({$ for e in range(4) $}AD[{{ 2 * groups }}u * d_inner + c + {{ e }}u].x{{ ", " if e < 3 }}{$ endfor $});
    let first = wid.y * {{ per_segment }}u;
    let last = min(first + {{ per_segment }}u, {{ ceil_div(seqlen, chunk) }}u);
$$ for e in range(4)
$$ for q in range(groups)
    let A{{ e }}_{{ q }} = AD[{{ q }}u * d_inner + c + {{ e }}u];
    let rate{{ e }}_{{ q }} = LOG2_E * A{{ e }}_{{ q }};
$$ if started
    var h{{ e }}_{{ q }} = chunk_states[((wid.z * chunks + first) * {{ groups }}u + {{ q }}u) * d_inner + c + {{ e }}u];
$$ elif "state" in bound
    var h{{ e }}_{{ q }} = state[(wid.z * {{ groups }}u + {{ q }}u) * d_inner + c + {{ e }}u];
$$ else
    var h{{ e }}_{{ q }} = vec4f(0.0);
$$ endif
$$ endfor
$$ endfor
    for (var k = first; k < last; k++) {
$$ if "chunk_states" in bound
        if (four < {{ d_inner // 4 }}u) {
$$ for q in range(groups)
$$ for e in range(4)
            chunk_states[((wid.z * chunks + k) * {{ groups }}u + {{ q }}u) * d_inner + c + {{ e }}u] = h{{ e }}_{{ q }};
$$ endfor
$$ endfor
        }
$$ endif
        for (var t = k * {{ chunk }}u; t < min((k + 1u) * {{ chunk }}u, seqlen); t++) {
            let row = row_at(wid.z, t);
            let bc = BC_at(row, slot);
            let u = u_at(row, t, four);
            let delta = delta_at(row, t, four);
$$ if resets
            let goes_on = goes_on(row, t, four);
$$ endif
            var y = D * u;
$$ for q in range(groups)
            {
                let B = B{{ q }}_of(bc);
                let C = C{{ q }}_of(bc);
$$ for e in range(4)
$$ set own = "." ~ "xyzw"[e]
                let a{{ e }} = exp2(delta{{ own }} * rate{{ e }}_{{ q }});
$$ if resets
                h{{ e }}_{{ q }} = select(vec4f(0.0), h{{ e }}_{{ q }}, goes_on{{ own }});
$$ endif
                h{{ e }}_{{ q }} = a{{ e }} * h{{ e }}_{{ q }} + input_weight(delta{{ own }}, A{{ e }}_{{ q }}, a{{ e }}) * u{{ own }} * B;
                y{{ own }} += dot(C, h{{ e }}_{{ q }});
$$ endfor
            }
$$ endfor
            finish(wid.z, t, four, y, z_at(row, t, four));
        }
    }
$$ if "state" in bound
    if (four < {{ d_inner // 4 }}u && last == {{ ceil_div(seqlen, chunk) }}u) {
$$ for q in range(groups)
$$ for e in range(4)
        state[(wid.z * {{ groups }}u + {{ q }}u) * d_inner + c + {{ e }}u] = h{{ e }}_{{ q }};
$$ endfor
$$ endfor
    }
$$ endif
}
