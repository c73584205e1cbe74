// From a chunk's end: G = sum of dots + the derivatives by cum from step t on, that by delta[t] A;  ddt = (A G + that by delta) times
// the slope of clamp and softplus, to the last columns of dzxbcdt;  dA_log = A sum of delta G;  ddt_bias = sum of ddt;  dD = sum of x dy.
// sums, behind its first plane: for each block of a head's columns the derivatives by cum, by delta, and x dy
$$ set low, high = limit
$$ set quads = chunk // 4
$$ set own_quads = quads // slices
{$ include "include/group_index.wgsl" $}
{$ include "include/softplus_slope.wgsl" $}

$$ if slices > 1
var<workgroup> of_slice: array<f32, {{ workgroup }}>;
var<workgroup> sums_of_slice: array<vec4f, {{ workgroup }}>; // of delta G, of ddt, of x dy
$$ endif

// Of the four steps of quad q: the derivative by cum (term 0) or delta (1), or x dy (2).
fn sum_of(term: u32, i: u32, q: u32) -> vec4f {
    let at = (i * {{ of_step }}u + 1u + term) * {{ quads }}u + q;
    return {$ for block in range(of_step // 3) $}{{ " + " if block }}sums[at{{ " + %du" % (3 * quads * block) if block }}]{$ endfor $};
}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
{$ include "include/ssd_slice.wgsl" $}
    let part = i / n_heads;
    let first = part % chunks * chunk;
    let row0 = part / chunks * seqlen + first;
    let A = -exp(A_log[head]);
    var G = 0.0;
$$ if "dots" in bound
    for (var j = 0u; j < blocks; j++) { G += dots[i * blocks + j]; }
$$ endif
$$ for q in range(own_quads)
    let dcum{{ q }} = sum_of(0u, i, slice * {{ own_quads }}u + {{ q }}u);
$$ endfor
$$ if slices > 1
    of_slice[lane] = {$ for q in range(own_quads) $}{{ " + " if q }}dot(dcum{{ q }}, vec4f(1.0)){$ endfor $};
    workgroupBarrier();
    for (var l = lane + {{ workgroup // slices }}u; l < {{ workgroup }}u; l += {{ workgroup // slices }}u) { G += of_slice[l]; }
$$ endif
    var total = vec4f(); // of delta G, of ddt, of x dy
$$ for q in range(own_quads - 1, -1, -1)
    {
        let delta = dt_cum[i * {{ planes * quads }}u + slice * {{ own_quads }}u + {{ q }}u];
        let ddelta = sum_of(1u, i, slice * {{ own_quads }}u + {{ q }}u);
        total.z += dot(sum_of(2u, i, slice * {{ own_quads }}u + {{ q }}u), vec4f(1.0));
$$ for j in range(3, -1, -1)
$$ set e = "." ~ "xyzw"[j]
        {
            let t = 4u * (slice * {{ own_quads }}u + {{ q }}u) + {{ j }}u;
            G += dcum{{ q }}{{ e }};
            total.x += delta{{ e }} * G;
            var ddt = (A * G + ddelta{{ e }}) * softplus_slope(delta{{ e }});
$$ if low > 0
            ddt = select(0.0, ddt, delta{{ e }} > {{ low | f32 }});
$$ endif
$$ if high < 3e38
            ddt = select(0.0, ddt, delta{{ e }} < {{ high | f32 }});
$$ endif
            if (own == i && first + t < seqlen) {
                total.y += ddt;
                dzxbcdt[(row0 + t) * d_proj + {{ d_proj - n_heads }}u + head] = ddt;
            }
        }
$$ endfor
    }
$$ endfor
$$ if slices > 1
    sums_of_slice[lane] = total;
    workgroupBarrier();
    for (var l = lane + {{ workgroup // slices }}u; l < {{ workgroup }}u; l += {{ workgroup // slices }}u) { total += sums_of_slice[l]; }
$$ endif
    if (own == i && slice == 0u) {
$$ if "A_log_partials" in bound
        A_log_partials[part * A_log_stride + head] = A * total.x;
$$ endif
$$ if "dt_bias_partials" in bound
        dt_bias_partials[part * dt_bias_stride + head] = total.y;
$$ endif
$$ if "D_partials" in bound
        D_partials[part * D_stride + head] = total.z;
$$ endif
    }
}
