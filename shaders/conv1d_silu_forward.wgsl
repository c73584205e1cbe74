// pre = bias[c] + sum_k weight[c,k] x[t-(d_conv-1)+k, x_start+c];  u[t,c] = pre * sigmoid(pre)
// x counts as 0 where it is of another document than t
$$ set apart = "documents" in bound
$$ set packed = "x" in vec4
$$ set width = 4 if packed else 1
$$ set columns = d_inner // width
{$ include "include/conv1d.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let own = own_run(group_index(wid, groups) * {{ workgroup }}u + lane);
    if (!own.valid) {
        return;
    }
    let shift = {{ "bias[own.c]" if "bias" in bound else "pack(0.0)" }};
$$ for k in range(d_conv)
    let w{{ k }} = tap(own.c, {{ k }}u);
$$ endfor
    // a0, a1, ... are the inputs of timesteps t-(d_conv-1), ...: a window that slides in registers.
$$ for k in range(d_conv - 1)
    var a{{ k }} = before(own.sequence, i32(own.start) - {{ d_conv - 1 - k }}, own.c);
$$ if apart
    var of{{ k }} = document_at(own.sequence, i32(own.start) - {{ d_conv - 1 - k }});
$$ endif
$$ endfor
    for (var t = own.start; t < own.stop; t += {{ unroll }}u) {
$$ for j in range(unroll)
        let a{{ d_conv - 1 + j }} = {{ load("x", "x_at(own.sequence, t + " ~ j ~ "u, own.c)") }};
$$ if apart
        let of{{ d_conv - 1 + j }} = document_at(own.sequence, i32(t) + {{ j }});
$$ endif
$$ endfor
$$ for j in range(unroll)
        if (t + {{ j }}u < own.stop) {
$$ if apart
            let pre = shift{$ for k in range(d_conv) $} + w{{ k }} * seen(a{{ j + k }}, of{{ j + k }}, of{{ d_conv - 1 + j }}){$ endfor $};
$$ else
            let pre = shift{$ for k in range(d_conv) $} + w{{ k }} * a{{ j + k }}{$ endfor $};
$$ endif
            {{ store("u", "u_at(own.sequence, t + " ~ j ~ "u, own.c)", "pre * sigmoid(pre)") }}
        }
$$ endfor
$$ for k in range(d_conv - 1)
        a{{ k }} = a{{ unroll + k }};
$$ if apart
        of{{ k }} = of{{ unroll + k }};
$$ endif
$$ endfor
    }
}
