// h = exp(delta A) h + weight u B; y = sum over states of C h + D u; g = y silu(z); chunk_states = h at each chunk's start
{$ include "include/scan.wgsl" $}
$$ set lane_groups = groups // quads

$$ if lane_groups > 1
// C h of each lane, [parity][step][lane group][channel]: two turns, so that one barrier a span is enough.
var<workgroup> products: array<f32, {{ 2 * span * workgroup }}>;
$$ endif

fn finish(batch_index: u32, t: u32, channel: u32, states: f32, D: f32) {
    if (t < seqlen && channel < d_inner) {
        let row = batch_index * seqlen + t;
        let value = states + D * u_delta[row * d_u_delta + channel];
        let z = xz[row * d_xz + d_inner + channel];
        let i = row * d_inner + channel;
$$ if "y" in bound
        y[i] = value;
$$ endif
        let e = exp(-abs(z)); // never overflows
        g[i] = value * z * select(e, 1.0, z >= 0.0) / (1.0 + e);
    }
}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(local_invocation_index) lane: u32) {
    let channel = wid.x * {{ channels }}u + lane % {{ channels }}u;
    let c = min(channel, d_inner - 1u);
    let group = lane / {{ channels }}u * {{ quads }}u;
    let D = AD[{{ 2 * groups }}u * d_inner + c].x;
    let first = wid.y * {{ per_segment }}u;
    let last = min(first + {{ per_segment }}u, {{ ceil_div(seqlen, chunk) }}u);
$$ for q in range(quads)
    let A{{ q }} = AD[(group + {{ q }}u) * d_inner + c];
    let rate{{ q }} = LOG2_E * A{{ q }};
$$ if segments > 1
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
            let row{{ i }} = row_at(wid.z, t + {{ i }}u);
            let u{{ i }} = u_at(row{{ i }}, t + {{ i }}u, channel);
            let delta{{ i }} = delta_at(row{{ i }}, t + {{ i }}u, channel);
$$ endfor
$$ for i in range(span)
$$ for q in range(quads)
            let a{{ i }}_{{ q }} = exp2(delta{{ i }} * rate{{ q }});
            h{{ q }} = a{{ i }}_{{ q }} * h{{ q }} + input_weight(delta{{ i }}, A{{ q }}, a{{ i }}_{{ q }}) * u{{ i }} * B_at(row{{ i }}, group + {{ q }}u);
            {{ "y" if q else "var y" }}{{ i }} {{ "+=" if q else "=" }} dot(C_at(row{{ i }}, group + {{ q }}u), h{{ q }});
$$ endfor
$$ if lane_groups > 1
            products[(turn * {{ span }}u + {{ i }}u) * {{ workgroup }}u + lane] = y{{ i }};
$$ else
            finish(wid.z, t + {{ i }}u, channel, y{{ i }}, D);
$$ endif
$$ endfor
$$ if lane_groups > 1
            workgroupBarrier();
            for (var job = lane; job < {{ span * channels }}u; job += {{ workgroup }}u) {
                let step = job / {{ channels }}u;
                let from_lane = (turn * {{ span }}u + step) * {{ workgroup }}u + lane % {{ channels }}u;
                var states = 0.0;
                for (var l = 0u; l < {{ lane_groups }}u; l++) { states += products[from_lane + l * {{ channels }}u]; }
                finish(wid.z, t + step, channel, states, D);
            }
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
