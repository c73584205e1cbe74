// What is left to add up. From a chunk's end: G = sum of dots + the derivatives by cum from step t on, that by delta[t] A;  ddt = (A G +
// that by delta) times the slope of clamp and softplus, to the last columns of dzxbcdt;  partials = of each trained parameter: dA_log =
// A sum of delta G, dD = sum of x dy, ddt_bias = sum of ddt;  the columns of B and C of dxBC = the sum over the shares of dBC.
// sums, behind its first plane: for each block of a head's columns the derivatives by cum, by delta, and x dy
$$ set low, high = limit
$$ set quads = chunk // 4
$$ set own_quads = quads // slices
{$ include "include/group_index.wgsl" $}
{$ include "include/softplus_slope.wgsl" $}

$$ if slices > 1
var<workgroup> of_slice: array<vec2f, {{ workgroup }}>; // the derivatives by cum, dots
var<workgroup> sums_of_slice: array<vec4f, {{ workgroup }}>; // of delta G, of ddt, of x dy
$$ endif

// Of the four steps of quad q: the derivative by cum (term 0) or delta (1), or x dy (2).
fn sum_of(term: u32, i: u32, q: u32) -> vec4f {
    let at = (i * {{ of_step }}u + 1u + term) * {{ quads }}u + q;
    return {$ for block in range(of_step // 3) $}{{ " + " if block }}sums[at{{ " + %du" % (3 * quads * block) if block }}]{$ endfor $};
}

fn sum_chunks(group: u32, lane: u32) {
{$ include "include/ssd_slice.wgsl" $}
    let part = i / n_heads;
    let first = part % chunks * chunk;
    let row0 = part / chunks * seqlen + first;
    let A = -exp(A_log[head]);
    var G = 0.0;
$$ if "dots" in bound
    for (var j = slice; j < blocks; j += {{ slices }}u) { G += dots[i * blocks + j]; }
$$ endif
$$ for q in range(own_quads)
    let dcum{{ q }} = sum_of(0u, i, slice * {{ own_quads }}u + {{ q }}u);
$$ endfor
$$ if slices > 1
    of_slice[lane] = vec2f({$ for q in range(own_quads) $}{{ " + " if q }}dot(dcum{{ q }}, vec4f(1.0)){$ endfor $}, G);
    workgroupBarrier();
    G = 0.0;
    for (var l = lane % {{ workgroup // slices }}u; l < {{ workgroup }}u; l += {{ workgroup // slices }}u) {
        G += select(0.0, of_slice[l].x, l > lane) + of_slice[l].y;
    }
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
$$ for name, total in [("A_log", "A * total.x"), ("D", "total.z"), ("dt_bias", "total.y")] if name in trained
        partials[({{ trained.index(name) * parts }}u + part) * stride + head] = {{ total }};
$$ endfor
    }
}

$$ if "dBC" in bound
$$ set width = 4 if "dxBC" in vec4 else 1
$$ set own_columns, all_columns = columns // width, d_xBC // width
$$ set elements = batch * seqlen * own_columns
fn sum_shares(i: u32) {
    if (i >= {{ elements }}u) { return; }
    let sum = {$ for share in range(shares) $}{{ " + " if share }}dBC[i{{ " + %du" % (share * elements) if share }}]{$ endfor $};
    dxBC[i / {{ own_columns }}u * {{ all_columns }}u + {{ all_columns - own_columns }}u + i % {{ own_columns }}u] = sum;
}

$$ endif
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let group = group_index(wid, groups);
$$ if "dBC" in bound
$$ set chunk_groups = ceil_div(batch * chunks * n_heads, workgroup // slices)
    if (group < {{ chunk_groups }}u) {
        sum_chunks(group, lane);
    } else {
        sum_shares((group - {{ chunk_groups }}u) * {{ workgroup }}u + lane);
    }
$$ else
    sum_chunks(group, lane);
$$ endif
}
