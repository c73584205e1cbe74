// dpre[t,c] = du[t,c] * s (1 + pre (1 - s)), s = sigmoid(pre), pre as in the forward pass, recomputed
// dx[t,x_start+c] = sum_k weight[c,k] dpre[t+(d_conv-1)-k, c]
// partials = [sum over the timesteps t of run p of dpre[t,c] x[t-(d_conv-1)+k, x_start+c], by p, c, k | sum of dpre[t,c], by p, c]
// Products of timesteps of different documents count as 0.
$$ set apart = "documents" in bound
$$ set packed = "x" in vec4
$$ set width = 4 if packed else 1
$$ set columns = d_inner // width
$$ set halo = d_conv - 1
{$ include "include/conv1d.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let own = own_run(group_index(wid, groups) * {{ workgroup }}u + lane);
    if (!own.valid) {
        return;
    }
    let shift = {{ "bias[own.c]" if "bias" in bound else "pack(0.0)" }};
    var dbias = pack(0.0);
$$ for k in range(d_conv)
    let w{{ k }} = tap(own.c, {{ k }}u);
    var dw{{ k }} = pack(0.0);
$$ endfor
    // Windows that slide in registers: the inputs a0, ... and dpre d0, ... of timesteps t-{{ halo }}, ...
$$ for k in range(halo)
    var a{{ k }} = before(own.sequence, i32(own.start) - {{ halo - k }}, own.c);
    var d{{ k }} = pack(0.0);
$$ if apart
    var of{{ k }} = document_at(own.sequence, i32(own.start) - {{ halo - k }});
$$ endif
$$ endfor
$$ for j in range(unroll)
    var next_a{{ j }} = {{ load("x", "x_at(own.sequence, own.start + " ~ j ~ "u, own.c)") }};
    var next_g{{ j }} = {{ load("du", "u_at(own.sequence, own.start + " ~ j ~ "u, own.c)") }};
$$ endfor
    // dx of a timestep needs dpre of the {{ halo }} after it: the walk goes on past the run's end.
    for (var t = own.start; t < own.stop + {{ halo }}u; t += {{ unroll }}u) {
$$ for j in range(unroll)
        let a{{ halo + j }} = next_a{{ j }};
        let g{{ j }} = next_g{{ j }};
$$ if apart
        let of{{ halo + j }} = document_at(own.sequence, i32(t) + {{ j }});
$$ endif
$$ endfor
        // These arrive while this round computes. Behind the run's end none need come; but to look for it costs registers,
        // which rounds of fewer than 4 are there to spare.
        {{ "if (t + %du < own.stop + %du) " % (unroll, halo) if unroll >= 4 }}{
$$ for j in range(unroll)
            next_a{{ j }} = {{ load("x", "x_at(own.sequence, t + " ~ (unroll + j) ~ "u, own.c)") }};
            next_g{{ j }} = {{ load("du", "u_at(own.sequence, t + " ~ (unroll + j) ~ "u, own.c)") }};
$$ endfor
        }
$$ for j in range(unroll)
$$ if apart
$$ for k in range(d_conv)
        let seen{{ j }}_{{ k }} = seen(a{{ j + k }}, of{{ j + k }}, of{{ halo + j }});
$$ endfor
$$ endif
        let pre{{ j }} = shift{$ for k in range(d_conv) $} + w{{ k }} * {{ "seen" ~ j ~ "_" ~ k if apart else "a" ~ (j + k) }}{$ endfor $};
        let s{{ j }} = sigmoid(pre{{ j }});
        let d{{ halo + j }} = select(pack(0.0), g{{ j }} * s{{ j }} * (1.0 + pre{{ j }} * (1.0 - s{{ j }})), t + {{ j }}u < seqlen);
        if (t + {{ j }}u < own.stop) {
$$ for k in range(d_conv)
            dw{{ k }} += d{{ halo + j }} * {{ "seen" ~ j ~ "_" ~ k if apart else "a" ~ (j + k) }};
$$ endfor
            dbias += d{{ halo + j }};
        }
        if (t + {{ j }}u >= own.start + {{ halo }}u && t + {{ j }}u < own.stop + {{ halo }}u) {
$$ if apart
            let dx{{ j }} = pack(0.0){$ for k in range(d_conv) $} + w{{ k }} * seen(d{{ halo + j - k }}, of{{ halo + j - k }}, of{{ j }}){$ endfor $};
$$ else
            let dx{{ j }} = w0 * d{{ halo + j }}{$ for k in range(1, d_conv) $} + w{{ k }} * d{{ halo + j - k }}{$ endfor $};
$$ endif
            {{ store("dx", "x_at(own.sequence, t + " ~ j ~ "u - " ~ halo ~ "u, own.c)", "dx" ~ j) }}
        }
$$ endfor
$$ for k in range(halo)
        a{{ k }} = a{{ unroll + k }};
        d{{ k }} = d{{ unroll + k }};
$$ if apart
        of{{ k }} = of{{ unroll + k }};
$$ endif
$$ endfor
    }
$$ for i in range(width)
$$ set of = "[" ~ i ~ "]" if packed else ""
$$ if weight_stride
$$ for k in range(d_conv)
    partials[own.part * {{ weight_stride }}u + (own.c * {{ width }}u + {{ i }}u) * d_conv + {{ k }}u] = dw{{ k }}{{ of }};
$$ endfor
$$ endif
$$ if bias_stride
    partials[{{ batch * ceil_div(seqlen, run) * weight_stride }}u + own.part * {{ bias_stride }}u + own.c * {{ width }}u + {{ i }}u] = dbias{{ of }};
$$ endif
$$ endfor
}
