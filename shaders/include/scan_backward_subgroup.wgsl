// scan_backward.wgsl for CPU adapters with subgroups of 8: a lane holds all states of its channels, sums over channels are the
// subgroup's, since barriers are dear there.
$$ set own = channels // 8
$$ set sums = 2 * groups
$$ set slots = 8 if sums > 4 else 4 if sums > 2 else 2

// The sum over all lanes of value i, in lane i (of a period of {{ slots }}): halves of the values change sides in each round.
fn sum_of_lanes(lane: u32{$ for i in range(slots) $}, v{{ i }}: vec4f{$ endfor $}) -> vec4f {
$$ set at = namespace(name="v", count=slots, bit=1)
$$ for round in range(3)
$$ if at.count > 1
    let odd{{ at.bit }} = (lane & {{ at.bit }}u) != 0u;
$$ for i in range(at.count // 2)
    let r{{ at.bit }}_{{ i }} = select({{ at.name }}{{ 2 * i }}, {{ at.name }}{{ 2 * i + 1 }}, odd{{ at.bit }}) + subgroupShuffleXor(select({{ at.name }}{{ 2 * i + 1 }}, {{ at.name }}{{ 2 * i }}, odd{{ at.bit }}), {{ at.bit }}u);
$$ endfor
$$ set at.count = at.count // 2
$$ else
    let r{{ at.bit }}_0 = {{ at.name }}0 + subgroupShuffleXor({{ at.name }}0, {{ at.bit }}u);
$$ endif
$$ set at.name = "r" ~ at.bit ~ "_"
$$ set at.bit = 2 * at.bit
$$ endfor
    return r4_0;
}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(subgroup_invocation_id) lane: u32) {
    let slot = BC_slot(lane);
$$ for e in range(own)
    let channel{{ e }} = wid.x * {{ channels }}u + {{ 8 * e }}u + lane;
    let c{{ e }} = min(channel{{ e }}, d_inner - 1u);
    let D{{ e }} = AD[{{ 2 * groups }}u * d_inner + c{{ e }}].x;
    var dD{{ e }} = 0.0;
$$ for q in range(groups)
    let A{{ e }}_{{ q }} = AD[{{ q }}u * d_inner + c{{ e }}];
    let rate{{ e }}_{{ q }} = LOG2_E * A{{ e }}_{{ q }};
    var carried{{ e }}_{{ q }} = {{ "partials[((wid.z * " ~ segments ~ "u + wid.y) * groups + " ~ q ~ "u) * d_inner + c" ~ e ~ "]" if carried else "vec4f(0.0)" }};
    var dA{{ e }}_{{ q }} = vec4f(0.0);
$$ endfor
$$ endfor
    let first = wid.y * {{ per_segment }}u;
    let last = min(first + {{ per_segment }}u, chunks);
    for (var k = last; k > first; k--) {
        let chunk_t = (k - 1u) * {{ chunk }}u;
$$ for e in range(own)
$$ for q in range(groups)
        let start0_{{ e }}_{{ q }} = chunk_states[((wid.z * chunks + k - 1u) * groups + {{ q }}u) * d_inner + c{{ e }}];
        var h{{ e }}_{{ q }} = start0_{{ e }}_{{ q }};
$$ endfor
$$ endfor
$$ for s in range(1, starts)
$$ for i in range(kept)
        {
            let t = chunk_t + {{ (s - 1) * kept + i }}u;
            let row = row_at(wid.z, t);
            let bc = BC_at(row, slot);
$$ for q in range(groups)
            let B{{ q }} = B{{ q }}_of(bc);
$$ endfor
$$ for e in range(own)
            let u{{ e }} = u_at(row, t, channel{{ e }});
            let delta{{ e }} = delta_at(row, t, channel{{ e }});
$$ if resets
            let goes_on{{ e }} = goes_on(row, t, channel{{ e }});
$$ endif
$$ for q in range(groups)
            {
$$ if resets
                h{{ e }}_{{ q }} = select(vec4f(0.0), h{{ e }}_{{ q }}, goes_on{{ e }});
$$ endif
                let a = exp2(delta{{ e }} * rate{{ e }}_{{ q }});
                h{{ e }}_{{ q }} = a * h{{ e }}_{{ q }} + input_weight(delta{{ e }}, A{{ e }}_{{ q }}, a) * u{{ e }} * B{{ q }};
            }
$$ endfor
$$ endfor
        }
$$ endfor
$$ for e in range(own)
$$ for q in range(groups)
        let start{{ s }}_{{ e }}_{{ q }} = h{{ e }}_{{ q }};
$$ endfor
$$ endfor
$$ endfor
        for (var s = {{ starts }}u; s > 0u; s--) {
            let t = chunk_t + (s - 1u) * {{ kept }}u;
$$ for e in range(own)
$$ for q in range(groups)
            h{{ e }}_{{ q }} = start0_{{ e }}_{{ q }};
$$ for s in range(1, starts)
            if (s == {{ s + 1 }}u) { h{{ e }}_{{ q }} = start{{ s }}_{{ e }}_{{ q }}; }
$$ endfor
$$ endfor
$$ endfor
$$ for i in range(kept)
            let row{{ i }} = row_at(wid.z, t + {{ i }}u);
            let bc{{ i }} = BC_at(row{{ i }}, slot);
$$ for e in range(own)
            let u{{ i }}_{{ e }} = u_at(row{{ i }}, t + {{ i }}u, channel{{ e }});
            let delta{{ i }}_{{ e }} = delta_at(row{{ i }}, t + {{ i }}u, channel{{ e }});
$$ if resets
            let goes_on{{ i }}_{{ e }} = goes_on(row{{ i }}, t + {{ i }}u, channel{{ e }});
$$ endif
            let dy{{ i }}_{{ e }} = dy_at(row{{ i }}, t + {{ i }}u, channel{{ e }});
$$ for q in range(groups)
$$ if resets
            h{{ e }}_{{ q }} = select(vec4f(0.0), h{{ e }}_{{ q }}, goes_on{{ i }}_{{ e }});
$$ endif
            let a{{ i }}_{{ e }}_{{ q }} = exp2(delta{{ i }}_{{ e }} * rate{{ e }}_{{ q }});
            let kept{{ i }}_{{ e }}_{{ q }} = a{{ i }}_{{ e }}_{{ q }} * h{{ e }}_{{ q }};
            h{{ e }}_{{ q }} = kept{{ i }}_{{ e }}_{{ q }} + input_weight(delta{{ i }}_{{ e }}, A{{ e }}_{{ q }}, a{{ i }}_{{ e }}_{{ q }}) * u{{ i }}_{{ e }} * B{{ q }}_of(bc{{ i }});
$$ endfor
$$ endfor
$$ endfor
$$ for i in range(kept - 1, -1, -1)
            {
$$ for e in range(own)
                var du{{ e }} = 0.0;
                var ddelta{{ e }} = 0.0;
                dD{{ e }} += dy{{ i }}_{{ e }} * u{{ i }}_{{ e }};
$$ endfor
$$ for q in range(groups)
                var dB{{ q }} = vec4f(0.0);
                var dC{{ q }} = vec4f(0.0);
                {
                    let B = B{{ q }}_of(bc{{ i }});
                    let C = C{{ q }}_of(bc{{ i }});
$$ for e in range(own)
                    {
                        let delta = delta{{ i }}_{{ e }};
                        let a = a{{ i }}_{{ e }}_{{ q }};
                        let weight = input_weight(delta, A{{ e }}_{{ q }}, a);
                        let G = C * dy{{ i }}_{{ e }} + carried{{ e }}_{{ q }};
                        let P = G * kept{{ i }}_{{ e }}_{{ q }};
                        carried{{ e }}_{{ q }} = {{ "select(vec4f(0.0), a * G, goes_on" ~ i ~ "_" ~ e ~ ")" if resets else "a * G" }};
$$ if discretization == "zoh"
                        let GBu = G * B * u{{ i }}_{{ e }};
                        dA{{ e }}_{{ q }} += delta * (P + GBu * delta * dphi1(delta * A{{ e }}_{{ q }}, a));
                        du{{ e }} += dot(G * B, weight);
                        ddelta{{ e }} += dot(P, A{{ e }}_{{ q }}) + dot(GBu, a);
$$ else
                        let GB = dot(G, B);
                        dA{{ e }}_{{ q }} += delta * P;
                        du{{ e }} += delta * GB;
                        ddelta{{ e }} += dot(P, A{{ e }}_{{ q }}) + u{{ i }}_{{ e }} * GB;
$$ endif
                        dB{{ q }} += G * (weight * u{{ i }}_{{ e }});
                        dC{{ q }} += dy{{ i }}_{{ e }} * (kept{{ i }}_{{ e }}_{{ q }} + weight * u{{ i }}_{{ e }} * B);
                    }
$$ endfor
                }
$$ endfor
                let dBC = sum_of_lanes(lane{$ for q in range(groups) $}, dB{{ q }}{$ endfor $}{$ for q in range(groups) $}, dC{{ q }}{$ endfor $}{$ for i in range(sums, slots) $}, vec4f(0.0){$ endfor $});
                if (lane < {{ sums }}u{{ " && t + " ~ i ~ "u < seqlen" if ragged else "" }}) {
                    partials[partial_row(wid.z, wid.x, t + {{ i }}u, lane)] = dBC;
                }
$$ for e in range(own)
                {{ "if (t + " ~ i ~ "u < seqlen && channel" ~ e ~ " < d_inner) " if ragged else "" }}{
                    let at = row{{ i }} * d_inner + channel{{ e }};
                    du_ddt[at] = du{{ e }} + D{{ e }} * dy{{ i }}_{{ e }};
                    du_ddt[plane + at] = ddelta{{ e }} * softplus_slope(delta{{ i }}_{{ e }});
                }
$$ endfor
            }
$$ endfor
        }
    }
$$ for e in range(own)
    if (channel{{ e }} < d_inner) {
        let at = {{ carried // 4 + batch * seqlen * blocks * 2 * groups }}u + (wid.z * {{ segments }}u + wid.y) * {{ (groups + 1) * d_inner }}u + channel{{ e }};
$$ for q in range(groups)
        partials[at + {{ q * d_inner }}u] = dA{{ e }}_{{ q }} * AD[{{ groups + q }}u * d_inner + channel{{ e }}];
$$ endfor
        partials[at + groups * d_inner] = vec4f(dD{{ e }}, 0.0, 0.0, 0.0);
$$ if leaves
        if (wid.y == 0u) {
$$ for q in range(groups)
            partials[(wid.z * {{ segments }}u * groups + {{ q }}u) * d_inner + channel{{ e }}] = carried{{ e }}_{{ q }};
$$ endfor
        }
$$ endif
    }
$$ endfor
}
