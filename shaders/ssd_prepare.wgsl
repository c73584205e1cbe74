// What a chunk's products share. dt_cum = [delta | cum | number of documents begun]: delta = clamp(softplus(dt + dt_bias)), cum[t] = sum
// over the chunk's steps up to t, anew from each document's first, of -exp(A_log) delta log2(e); past the sequence's end delta = 0 and the
// others stay;  scores[t, s] = sum over d_state of C[t] B[s], for the steps s <= t of a chunk and each group; 0 for the others
$$ set low, high = limit
$$ set quads = chunk // 4
$$ set own_quads = quads // slices
$$ set strict, joined = false, ""
$$ set lines_m, lines_n, depth, more, row_sums = chunk, chunk, d_state, none, false
$$ set a, b = {"along": "k", "own": true}, {"along": "k", "own": true}
$$ set lower = true
$$ set products = batch * chunks * n_groups
$$ set out_type = "vec4f"
{$ include "include/group_index.wgsl" $}
{$ include "include/softplus.wgsl" $}
{$ include "include/ssd.wgsl" $}
$$ set B_start, C_start = d_xBC - 2 * n_groups * d_state, d_xBC - n_groups * d_state

fn begin(product: u32, first_row: u32) {
    own_group = product % n_groups;
    own_chunk = product / n_groups % chunks;
    own_sequence = product / (n_groups * chunks);
}

fn load_a(t: u32, n: u32) -> vec4f {
    return xBC_four(row_of(t) * d_xBC + {{ C_start }}u + own_group * {{ d_state }}u + n, {{ d_state }} - i32(n));
}

fn load_b(s: u32, n: u32) -> vec4f {
    return xBC_four(row_of(s) * d_xBC + {{ B_start }}u + own_group * {{ d_state }}u + n, {{ d_state }} - i32(n));
}

{$ include "include/matmul.wgsl" $}

fn finish(t: u32, s: u32, sum: vec4f) {
    if (t >= chunk || s >= chunk) { return; }
    scores[((((own_sequence * chunks + own_chunk) * n_groups + own_group) * chunk + t) * chunk + s) / 4u] =
        select(vec4f(), sum, vec4u(s, s + 1u, s + 2u, s + 3u) <= vec4u(t));
}

fn sum_decays(group: u32, lane: u32) {
{$ include "include/ssd_slice.wgsl" $}
    let first = i / n_heads % chunks * chunk;
    let row0 = i / (n_heads * chunks) * seqlen;
    let rate = -1.44269504088896340736f * exp(A_log[head]);
    let bias = dt_bias[head];
    var cum = 0.0;
    var begun = 0.0;
$$ for q in range(own_quads)
    var deltas{{ q }} = vec4f();
    var cums{{ q }} = vec4f();
    var begins{{ q }} = vec4f();
$$ for j in range(4)
    {
        let t = first + 4u * (slice * {{ own_quads }}u + {{ q }}u) + {{ j }}u;
        let row = row0 + min(t, seqlen - 1u);
        var delta = softplus(zxbcdt[row * d_proj + {{ d_proj - n_heads }}u + head] + bias);
$$ if low > 0
        delta = max(delta, {{ low | f32 }});
$$ endif
$$ if high < 3e38
        delta = min(delta, {{ high | f32 }});
$$ endif
        delta = select(0.0, delta, t < seqlen);
$$ if planes == 3
        // A state that is carried into a row belongs to document 0.
        if (t < seqlen && documents[row] != select(documents[max(row, 1u) - 1u], 0u, t == 0u)) {
            begun += 1.0;
            cum = 0.0;
        }
$$ endif
        // What is left after a step of -127 is 0 in float32; larger ones would only cost cum its digits.
        cum += max(rate * delta, -127.0);
        deltas{{ q }}[{{ j }}] = delta;
        cums{{ q }}[{{ j }}] = cum;
        begins{{ q }}[{{ j }}] = begun;
    }
$$ endfor
$$ endfor
    var cum_before = 0.0;
    var begun_before = 0.0;
$$ if slices > 1
    tile_a[lane] = vec4f(cum, begun, 0.0, 0.0); // the products' memory: a workgroup makes one or the other
    workgroupBarrier();
    for (var l = lane % {{ workgroup // slices }}u; l < lane; l += {{ workgroup // slices }}u) {
        cum_before = {{ "select(0.0, cum_before, tile_a[l].y == 0.0)" if planes == 3 else "cum_before" }} + tile_a[l].x;
        begun_before += tile_a[l].y;
    }
$$ endif
    if (own == i) {
        let to = i * {{ planes * quads }}u + slice * {{ own_quads }}u;
$$ for q in range(own_quads)
        dt_cum[to + {{ q }}u] = deltas{{ q }};
        dt_cum[to + {{ quads + q }}u] = cums{{ q }} + {{ "select(vec4f(), vec4f(cum_before), begins" ~ q ~ " == vec4f())" if planes == 3 else "cum_before" }};
$$ if planes == 3
        dt_cum[to + {{ 2 * quads + q }}u] = begins{{ q }} + begun_before;
$$ endif
$$ endfor
    }
}

$$ set decay_groups = ceil_div(batch * chunks * n_heads, workgroup // slices)
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let group = group_index(wid, groups);
    if (group < {{ decay_groups }}u) {
        sum_decays(group, lane);
    } else {
        product(group - {{ decay_groups }}u, lane);
    }
}
