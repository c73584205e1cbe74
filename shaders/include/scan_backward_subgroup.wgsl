// scan_backward.wgsl for CPU adapters with subgroups of 8: a lane holds all states of four neighbouring channels, which its loads
// and stores move at once; sums over channels are the subgroup's. Barriers are dear there, and loads and stores cheapest by fours.
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
    let four = wid.x * {{ workgroup }}u + lane;
    let c = 4u * min(four, {{ d_inner // 4 - 1 }}u);
    let D = vec4f({$ for e in range(4) $}AD[{{ 2 * groups }}u * d_inner + c + {{ e }}u].x{{ ", " if e < 3 }}{$ endfor $});
    var dD = vec4f(0.0);
$$ for e in range(4)
$$ for q in range(groups)
    let A{{ e }}_{{ q }} = AD[{{ q }}u * d_inner + c + {{ e }}u];
    let rate{{ e }}_{{ q }} = LOG2_E * A{{ e }}_{{ q }};
    var carried{{ e }}_{{ q }} = {{ "partials[((wid.z * %su + wid.y) * groups + %su) * d_inner + c + %su]" % (segments, q, e) if carried else "vec4f(0.0)" }};
    var dA{{ e }}_{{ q }} = vec4f(0.0);
$$ endfor
$$ endfor
    let first = wid.y * {{ per_segment }}u;
    let last = min(first + {{ per_segment }}u, chunks);
    for (var k = last; k > first; k--) {
        let chunk_t = (k - 1u) * {{ chunk }}u;
        // The state every {{ kept }} steps, by a first walk through the chunk.
$$ for e in range(4)
$$ for q in range(groups)
        let start0_{{ e }}_{{ q }} = chunk_states[((wid.z * chunks + k - 1u) * groups + {{ q }}u) * d_inner + c + {{ e }}u];
        var h{{ e }}_{{ q }} = start0_{{ e }}_{{ q }};
$$ for s in range(1, starts)
        var start{{ s }}_{{ e }}_{{ q }} = vec4f(0.0);
$$ endfor
$$ endfor
$$ endfor
$$ if starts > 1
        for (var s = 1u; s < {{ starts }}u; s++) {
$$ for i in range(kept)
            {
                let t = chunk_t + (s - 1u) * {{ kept }}u + {{ i }}u;
                let row = row_at(wid.z, t);
                let bc = BC_at(row, slot);
                let u = u_at(row, t, four);
                let delta = delta_at(row, t, four);
$$ if resets
                let goes_on = goes_on(row, t, four);
$$ endif
$$ for q in range(groups)
                {
                    let B = B{{ q }}_of(bc);
$$ for e in range(4)
$$ set own = "." ~ "xyzw"[e]
$$ if resets
                    h{{ e }}_{{ q }} = select(vec4f(0.0), h{{ e }}_{{ q }}, goes_on{{ own }});
$$ endif
                    let a{{ e }} = exp2(delta{{ own }} * rate{{ e }}_{{ q }});
                    h{{ e }}_{{ q }} = a{{ e }} * h{{ e }}_{{ q }} + input_weight(delta{{ own }}, A{{ e }}_{{ q }}, a{{ e }}) * u{{ own }} * B;
$$ endfor
                }
$$ endfor
            }
$$ endfor
$$ for s in range(1, starts)
            if (s == {{ s }}u) {
$$ for e in range(4)
$$ for q in range(groups)
                start{{ s }}_{{ e }}_{{ q }} = h{{ e }}_{{ q }};
$$ endfor
$$ endfor
            }
$$ endfor
        }
$$ endif
        for (var s = {{ starts }}u; s > 0u; s--) {
            let t = chunk_t + (s - 1u) * {{ kept }}u;
$$ for e in range(4)
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
            let u{{ i }} = u_at(row{{ i }}, t + {{ i }}u, four);
            let delta{{ i }} = delta_at(row{{ i }}, t + {{ i }}u, four);
            let dy{{ i }} = dy_at(row{{ i }}, t + {{ i }}u, four);
$$ if resets
            let goes_on{{ i }} = goes_on(row{{ i }}, t + {{ i }}u, four);
$$ endif
$$ for q in range(groups)
            let B{{ i }}_{{ q }} = B{{ q }}_of(bc{{ i }});
$$ for e in range(4)
$$ set own = "." ~ "xyzw"[e]
$$ if resets
            h{{ e }}_{{ q }} = select(vec4f(0.0), h{{ e }}_{{ q }}, goes_on{{ i }}{{ own }});
$$ endif
            let a{{ i }}_{{ e }}_{{ q }} = exp2(delta{{ i }}{{ own }} * rate{{ e }}_{{ q }});
            let kept{{ i }}_{{ e }}_{{ q }} = a{{ i }}_{{ e }}_{{ q }} * h{{ e }}_{{ q }};
            h{{ e }}_{{ q }} = kept{{ i }}_{{ e }}_{{ q }} + input_weight(delta{{ i }}{{ own }}, A{{ e }}_{{ q }}, a{{ i }}_{{ e }}_{{ q }}) * u{{ i }}{{ own }} * B{{ i }}_{{ q }};
$$ endfor
$$ endfor
$$ endfor
$$ for i in range(kept - 1, -1, -1)
            {
                var du = D * dy{{ i }};
                var ddelta = vec4f(0.0);
                dD += dy{{ i }} * u{{ i }};
$$ for q in range(groups)
                var dB{{ q }} = vec4f(0.0);
                var dC{{ q }} = vec4f(0.0);
                {
                    let B = B{{ i }}_{{ q }};
                    let C = C{{ q }}_of(bc{{ i }});
$$ for e in range(4)
$$ set own = "." ~ "xyzw"[e]
                    {
                        let u = u{{ i }}{{ own }};
                        let dy = dy{{ i }}{{ own }};
                        let delta = delta{{ i }}{{ own }};
                        let a = a{{ i }}_{{ e }}_{{ q }};
                        let weight = input_weight(delta, A{{ e }}_{{ q }}, a);
                        let G = C * dy + carried{{ e }}_{{ q }};
                        let P = G * kept{{ i }}_{{ e }}_{{ q }};
                        carried{{ e }}_{{ q }} = {{ "select(vec4f(0.0), a * G, goes_on" ~ i ~ own ~ ")" if resets else "a * G" }};
$$ if discretization == "zoh"
                        let GBu = G * B * u;
                        dA{{ e }}_{{ q }} += delta * (P + GBu * delta * dphi1(delta * A{{ e }}_{{ q }}, a));
                        du{{ own }} += dot(G * B, weight);
                        ddelta{{ own }} += dot(P, A{{ e }}_{{ q }}) + dot(GBu, a);
$$ else
                        let GB = dot(G, B);
                        dA{{ e }}_{{ q }} += delta * P;
                        du{{ own }} += delta * GB;
                        ddelta{{ own }} += dot(P, A{{ e }}_{{ q }}) + u * GB;
$$ endif
                        dB{{ q }} += G * (weight * u);
                        dC{{ q }} += dy * (kept{{ i }}_{{ e }}_{{ q }} + weight * u * B);
                    }
$$ endfor
                }
$$ endfor
                let dBC = sum_of_lanes(lane{$ for q in range(groups) $}, dB{{ q }}{$ endfor $}{$ for q in range(groups) $}, dC{{ q }}{$ endfor $}{$ for i in range(sums, slots) $}, vec4f(0.0){$ endfor $});
                if (lane < {{ sums }}u{{ " && t + " ~ i ~ "u < seqlen" if ragged else "" }}) {
                    partials[partial_row(wid.z, wid.x, t + {{ i }}u, lane)] = dBC;
                }
                {{ "if (t + " ~ i ~ "u < seqlen && four < " ~ d_inner // 4 ~ "u) " if ragged else "" }}{
                    let at = row{{ i }} * {{ d_inner // 4 }}u + four;
                    let slopes = vec4f({$ for e in range(4) $}softplus_slope(delta{{ i }}.{{ "xyzw"[e] }}){{ ", " if e < 3 }}{$ endfor $});
                    du_ddt[at] = du;
                    du_ddt[plane / 4u + at] = ddelta * slopes;
                }
            }
$$ endfor
        }
    }
    if (four < {{ d_inner // 4 }}u) {
        let at = {{ carried // 4 + batch * seqlen * blocks * 2 * groups }}u + (wid.z * {{ segments }}u + wid.y) * {{ (groups + 1) * d_inner }}u + c;
$$ for e in range(4)
$$ for q in range(groups)
        partials[at + {{ q * d_inner + e }}u] = dA{{ e }}_{{ q }} * AD[{{ groups + q }}u * d_inner + c + {{ e }}u];
$$ endfor
        partials[at + {{ groups * d_inner + e }}u] = vec4f(dD.{{ "xyzw"[e] }}, 0.0, 0.0, 0.0);
$$ endfor
$$ if leaves
        if (wid.y == 0u) {
$$ for q in range(groups)
$$ for e in range(4)
            partials[(wid.z * {{ segments }}u * groups + {{ q }}u) * d_inner + c + {{ e }}u] = carried{{ e }}_{{ q }};
$$ endfor
$$ endfor
        }
$$ endif
    }
}
