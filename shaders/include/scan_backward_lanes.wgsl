// scan_backward.wgsl with a channel's states spread over lanes, and sums through workgroup memory.
$$ set pitch = channels + 1 if channels > 1 else 1
$$ set rows = span * 2 * groups
$$ set per_part = ceil_div(channels, [workgroup // rows, 1] | max)
$$ set parts = ceil_div(channels, per_part)
$$ set lane_groups = groups // quads

// Sums over channels: a lane stores its dB and dC, then sums a part of one row's channels.
var<workgroup> terms: array<vec4f, {{ rows * pitch }}>; // [step][dB, dC][group][channel], padded
$$ if parts > 1
var<workgroup> part_sums: array<vec4f, {{ rows * parts }}>;
$$ endif
$$ if lane_groups > 1
// Sums over lane groups, [du, ddelta][step][lane group][channel].
var<workgroup> products: array<f32, {{ 2 * span * workgroup }}>;
$$ endif

// du and ddt of a step, given what the states add up to.
fn finish(batch_index: u32, t: u32, channel: u32, slot: u32, sum: f32, D: f32) {
    if (t < seqlen && channel < d_inner) {
        let i = (batch_index * seqlen + t) * d_inner + channel;
        if (slot == 0u) {
            du_ddt[i] = sum + D * {{ load("dy", "i") }};
        } else {
            du_ddt[plane + i] = sum * softplus_slope({{ "abs(delta[i])" if resets else "delta[i]" }});
        }
    }
}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(local_invocation_index) lane: u32) {
    let own = lane % {{ channels }}u;
    let channel = wid.x * {{ channels }}u + own;
    let c = min(channel, d_inner - 1u);
    let group = {{ "lane / " ~ channels ~ "u * " ~ quads ~ "u" if groups > quads else "0u" }}; // uniform where it can be
    let D = AD[{{ 2 * groups }}u * d_inner + c].x;
    var dD = 0.0;
$$ for q in range(quads)
    let A{{ q }} = AD[(group + {{ q }}u) * d_inner + c];
    let rate{{ q }} = LOG2_E * A{{ q }};
    var carried{{ q }} = {{ "partials[((wid.z * " ~ segments ~ "u + wid.y) * groups + group + " ~ q ~ "u) * d_inner + c]" if carried else "vec4f(0.0)" }};
    var dA{{ q }} = vec4f(0.0);
$$ endfor
    let first = wid.y * {{ per_segment }}u;
    let last = min(first + {{ per_segment }}u, chunks);
    // Replayed twice: first for the states every {{ kept }} steps, then for those between, last first. They are
    // kept in variables, since an array with a dynamic index would be put in memory.
    for (var k = last; k > first; k--) {
        let chunk_t = (k - 1u) * {{ chunk }}u;
$$ for q in range(quads)
        let start0_{{ q }} = chunk_states[((wid.z * chunks + k - 1u) * groups + group + {{ q }}u) * d_inner + c];
        var h{{ q }} = start0_{{ q }};
$$ for s in range(1, starts)
        var start{{ s }}_{{ q }} = vec4f(0.0);
$$ endfor
$$ endfor
$$ if starts > 1
        for (var s = 1u; s < {{ starts }}u; s++) {
            let t = chunk_t + (s - 1u) * {{ kept }}u;
$$ for i in range(kept)
            let row{{ i }} = row_at(wid.z, t + {{ i }}u);
            let u{{ i }} = u_at(row{{ i }}, t + {{ i }}u, channel);
            let delta{{ i }} = delta_at(row{{ i }}, t + {{ i }}u, channel);
$$ if resets
            let goes_on{{ i }} = goes_on(row{{ i }}, t + {{ i }}u, channel);
$$ endif
$$ endfor
$$ for i in range(kept)
$$ for q in range(quads)
$$ if resets
            h{{ q }} = select(vec4f(0.0), h{{ q }}, goes_on{{ i }});
$$ endif
            let a{{ i }}_{{ q }} = exp2(delta{{ i }} * rate{{ q }});
            h{{ q }} = a{{ i }}_{{ q }} * h{{ q }} + input_weight(delta{{ i }}, A{{ q }}, a{{ i }}_{{ q }}) * u{{ i }} * B_at(row{{ i }}, group + {{ q }}u);
$$ endfor
$$ endfor
$$ for q in range(quads)
$$ for s in range(1, starts)
            if (s == {{ s }}u) { start{{ s }}_{{ q }} = h{{ q }}; }
$$ endfor
$$ endfor
        }
$$ endif
        for (var s = {{ starts }}u; s > 0u; s--) {
            let t = chunk_t + (s - 1u) * {{ kept }}u;
$$ for q in range(quads)
            h{{ q }} = start0_{{ q }};
$$ for s in range(1, starts)
            if (s == {{ s + 1 }}u) { h{{ q }} = start{{ s }}_{{ q }}; }
$$ endfor
$$ endfor
$$ for i in range(kept)
            let row{{ i }} = row_at(wid.z, t + {{ i }}u);
            let u{{ i }} = u_at(row{{ i }}, t + {{ i }}u, channel);
            let delta{{ i }} = delta_at(row{{ i }}, t + {{ i }}u, channel);
$$ if resets
            let goes_on{{ i }} = goes_on(row{{ i }}, t + {{ i }}u, channel);
$$ endif
            let dy{{ i }} = dy_at(row{{ i }}, t + {{ i }}u, channel);
$$ endfor
$$ for i in range(kept)
$$ for q in range(quads)
$$ if resets
            h{{ q }} = select(vec4f(0.0), h{{ q }}, goes_on{{ i }});
$$ endif
            let a{{ i }}_{{ q }} = exp2(delta{{ i }} * rate{{ q }});
            let kept{{ i }}_{{ q }} = a{{ i }}_{{ q }} * h{{ q }};
            h{{ q }} = kept{{ i }}_{{ q }} + input_weight(delta{{ i }}, A{{ q }}, a{{ i }}_{{ q }}) * u{{ i }} * B_at(row{{ i }}, group + {{ q }}u);
$$ endfor
$$ endfor
$$ for low in range(kept - span, -1, -span)
$$ for i in range(low + span - 1, low - 1, -1)
            {
                var du = 0.0;
                var ddelta = 0.0;
                dD += dy{{ i }} * u{{ i }};
$$ for q in range(quads)
                {
                    let B = B_at(row{{ i }}, group + {{ q }}u);
                    let weight = input_weight(delta{{ i }}, A{{ q }}, a{{ i }}_{{ q }});
                    let G = C_at(row{{ i }}, group + {{ q }}u) * dy{{ i }} + carried{{ q }};
                    let P = G * kept{{ i }}_{{ q }};
                    carried{{ q }} = {{ "select(vec4f(0.0), a" ~ i ~ "_" ~ q ~ " * G, goes_on" ~ i ~ ")" if resets else "a" ~ i ~ "_" ~ q ~ " * G" }};
$$ if discretization == "zoh"
                    let GBu = G * B * u{{ i }};
                    dA{{ q }} += delta{{ i }} * (P + GBu * delta{{ i }} * dphi1(delta{{ i }} * A{{ q }}, a{{ i }}_{{ q }}));
                    du += dot(G * B, weight);
                    ddelta += dot(P, A{{ q }}) + dot(GBu, a{{ i }}_{{ q }});
$$ else
                    let GB = dot(G, B);
                    dA{{ q }} += delta{{ i }} * P;
                    du += delta{{ i }} * GB;
                    ddelta += dot(P, A{{ q }}) + u{{ i }} * GB;
$$ endif
                    terms[({{ (i - low) * 2 }}u * groups + group + {{ q }}u) * {{ pitch }}u + own] = G * (weight * u{{ i }});
                    terms[({{ (i - low) * 2 + 1 }}u * groups + group + {{ q }}u) * {{ pitch }}u + own] = dy{{ i }} * (kept{{ i }}_{{ q }} + weight * u{{ i }} * B);
                }
$$ endfor
$$ if lane_groups > 1
                products[{{ (i - low) * workgroup }}u + lane] = du;
                products[{{ (span + i - low) * workgroup }}u + lane] = ddelta;
$$ else
                finish(wid.z, t + {{ i }}u, channel, 0u, du, D);
                finish(wid.z, t + {{ i }}u, channel, 1u, ddelta, D);
$$ endif
            }
$$ endfor
            workgroupBarrier();
$$ if lane_groups > 1
$$ for j in range(ceil_div(2 * span, lane_groups))
            {
                let slot = lane / {{ channels }}u + {{ j * lane_groups }}u;
                if (slot < {{ 2 * span }}u) {
                    let at = slot * {{ workgroup }}u + own;
                    var sum = products[at];
$$ if lane_groups <= 16
$$ for l in range(1, lane_groups)
                    sum += products[at + {{ l * channels }}u];
$$ endfor
$$ else
                    for (var l = 1u; l < {{ lane_groups }}u; l++) { sum += products[at + l * {{ channels }}u]; }
$$ endif
                    finish(wid.z, t + {{ low }}u + slot % {{ span }}u, channel, slot / {{ span }}u, sum, D);
                }
            }
$$ endfor
$$ endif
$$ if parts > 1
            if (lane < {{ rows * parts }}u) {
                let part = lane / {{ rows }}u * {{ per_part }}u;
                let at = lane % {{ rows }}u * {{ pitch }}u + part;
                var sum = terms[at];
$$ for k in range(1, per_part)
                {{ "if (part + " ~ k ~ "u < " ~ channels ~ "u) { " if channels % per_part else "" }}sum += terms[at + {{ k }}u];{{ " }" if channels % per_part else "" }}
$$ endfor
                part_sums[lane] = sum;
            }
            workgroupBarrier();
            if (lane < {{ rows }}u{{ " && t + " ~ low ~ "u + lane / " ~ 2 * groups ~ "u < seqlen" if ragged else "" }}) {
                var sum = part_sums[lane];
$$ for p in range(1, parts)
                sum += part_sums[lane + {{ p * rows }}u];
$$ endfor
                partials[partial_row(wid.z, wid.x, t + {{ low }}u + lane / {{ 2 * groups }}u, lane)] = sum;
            }
$$ else
            for (var row = lane; row < {{ rows }}u; row += {{ workgroup }}u) {
                let at = t + {{ low }}u + row / {{ 2 * groups }}u;
                var sum = terms[row * {{ pitch }}u];
$$ for k in range(1, channels)
                sum += terms[row * {{ pitch }}u + {{ k }}u];
$$ endfor
                {{ "if (at < seqlen) { " if ragged else "" }}partials[partial_row(wid.z, wid.x, at, row)] = sum;{{ " }" if ragged else "" }}
            }
            workgroupBarrier();
$$ endif
$$ endfor
        }
    }
    if (channel < d_inner) {
        let at = {{ carried // 4 + batch * seqlen * blocks * 2 * groups }}u + (wid.z * {{ segments }}u + wid.y) * {{ (groups + 1) * d_inner }}u + channel;
$$ for q in range(quads)
        partials[at + (group + {{ q }}u) * d_inner] = dA{{ q }} * AD[(groups + group + {{ q }}u) * d_inner + channel];
$$ endfor
        if (group == 0u) { partials[at + groups * d_inner] = vec4f(dD, 0.0, 0.0, 0.0); }
$$ if leaves
        if (wid.y == 0u) {
$$ for q in range(quads)
            partials[(wid.z * {{ segments }}u * groups + group + {{ q }}u) * d_inner + channel] = carried{{ q }};
$$ endfor
        }
$$ endif
    }
}
