// out[t] = y[t] = exp(cum[t]) C[t] states + sum over s < t of scores[t, s] exp(cum[t] - cum[s]) delta[s] x[s], states those at the
// chunk's start, not read where they are zero; sums[0] = skip[t] = D + scores[t, t] delta[t]. In reverse du[s] = exp(cum[last] -
// cum[s]) B[s] states + sum over t > s of scores[t, s] exp(cum[t] - cum[s]) dy[t], states the gradients of those at the chunk's end;
// out[s] = dx[s] = delta du + skip dy; sums[1..] = for each block of a head's columns, a workgroup's, the sums of dy y - delta x du, the
// derivative by cum; of x (du + scores[s, s] dy), that by delta but for cum; of x dy. y and du are without their skips
$$ set strict = true
$$ set from_state = ceil_div(d_state, tile_k) * tile_k if "states" in bound else 0
$$ set lines_m, lines_n, depth, more, row_sums = chunk, head_dim, from_state + chunk, none, false
$$ set first_row = "min(tile.x * " ~ tile_m ~ "u, " ~ chunk ~ "u)"
$$ set steps = chunk ~ "u - " ~ first_row if reverse else "min(" ~ first_row ~ " + " ~ tile_m ~ "u, " ~ chunk ~ "u)"
$$ set until = from_state ~ "u + " ~ steps
$$ set zero_chunk = chunks - 1 if reverse else 0
// By the product, which is uniform, as barriers in the walk ask for; what begin() sets is not.
$$ set since = "select(0u, %du, product / %du %% %du == %du)" % (from_state, n_heads, chunks, zero_chunk) if begins_zero else "0u"
$$ set a, b = {"along": "k", "own": true, "blocks": true, "weighed": "all"}, {"along": "lines", "own": true}
$$ set needs = true
$$ set products = batch * chunks * n_heads
$$ set out_type, width = ("vec4f", 4) if "out" in vec4 else ("f32", 1)
$$ set row_terms, each_row = reverse, not reverse
$$ set packed = width == 4
{$ include "include/ssd.wgsl" $}
$$ set start = d_xBC - (2 if reverse else 1) * n_groups * d_state

var<private> first_step: u32; // of those whose inputs are summed

fn begin(product: u32, first_row: u32) {
    own_head = product % n_heads;
    own_group = own_head / {{ n_heads // n_groups }}u;
    own_chunk = product / n_heads % chunks;
    own_sequence = product / (n_heads * chunks);
    own_dt = dt_index(own_head);
    first_step = {{ "first_row" if reverse else "0u" }};
}

fn score_index(t: u32, s: u32) -> u32 {
    return (((own_sequence * chunks + own_chunk) * n_groups + own_group) * chunk + t) * chunk + s;
}

fn load_a_block(t: u32, k: u32) -> mat4x4f {
$$ if "states" in bound
    if (k < {{ from_state }}u) {
        let column = {{ start }}u + own_group * {{ d_state }}u + k;
        return mat4x4f({$ for j in range(4) $}xBC_four(row_of(t + {{ j }}u) * d_xBC + column, {{ d_state }} - i32(k)){{ ", " if j < 3 }}{$ endfor $});
    }
$$ endif
    let s = first_step + k - {{ from_state }}u;
    if (s >= chunk) { return mat4x4f(); }
$$ if reverse
    return transpose(mat4x4f({$ for j in range(4) $}scores[score_index(s + {{ j }}u, t) / 4u]{{ ", " if j < 3 }}{$ endfor $}));
$$ else
    return mat4x4f({$ for j in range(4) $}scores[score_index(t + {{ j }}u, s) / 4u]{{ ", " if j < 3 }}{$ endfor $});
$$ endif
}

fn weigh_a_block(t: u32, k: u32) -> mat4x4f {
$$ if "states" in bound
    if (k < {{ from_state }}u) {
        let left = {{ "left_at_end_four" if reverse else "left_of_start_four" }}(own_dt, t);
        return mat4x4f({$ for j in range(4) $}vec4f(left[{{ j }}]){{ ", " if j < 3 }}{$ endfor $});
    }
$$ endif
    let s = min(first_step + k - {{ from_state }}u, chunk - 4u);
    let left = {{ "left_in_block" if reverse else "left_of_block" }}(own_dt, t, s);
$$ if reverse
    return left;
$$ else
    let delta = delta_four(own_dt, s);
    return mat4x4f({$ for j in range(4) $}left[{{ j }}] * delta{{ ", " if j < 3 }}{$ endfor $});
$$ endif
}

fn load_b(p: u32, k: u32) -> vec4f {
    let count = {{ head_dim }} - i32(p);
$$ if "states" in bound
    if (k < {{ from_state }}u) {
        let i = ((((own_sequence * chunks + own_chunk) * n_heads + own_head) * {{ d_state }}u + k) * {{ head_dim }}u) + p;
        return states_four(i, {{ "count" if from_state == d_state else "select(0, count, k < " ~ d_state ~ "u)" }});
    }
$$ endif
    let s = first_step + k - {{ from_state }}u;
$$ if reverse
    return dy_four((row_of(s) * n_heads + own_head) * {{ head_dim }}u + p, select(0, count, inside(s)));
$$ else
    return xBC_four(row_of(s) * d_xBC + own_head * {{ head_dim }}u + p, count);
$$ endif
}

fn needs(t: u32, p: u32, k: u32) -> bool {
    let s = first_step + k - {{ from_state }}u;
    return {{ "k < " ~ from_state ~ "u || " if from_state }}{{ "s + 15u > t" if reverse else "s < t + 3u" }};
}

{$ include "include/matmul.wgsl" $}

fn sums_index(t: u32) -> u32 {
    return ((own_sequence * chunks + own_chunk) * n_heads + own_head) * {{ of_step * chunk }}u + t;
}

$$ if reverse
{$ include "include/pack.wgsl" $}

struct Found { at: u32, inside: bool, delta: f32, skip: f32, x: pack, dy: pack, y: pack }

fn find(t: u32, p: u32) -> Found {
    if (!inside(t) || p >= {{ head_dim }}u) { return Found(); }
    let at = (row_of(t) * d_xBC + own_head * {{ head_dim }}u + p) / {{ width }}u;
    let i = (row_of(t) * {{ d_inner }}u + own_head * {{ head_dim }}u + p) / {{ width }}u;
    return Found(at, true, delta_at(own_dt, t), sums[sums_index(t)], xBC[at], dy[i], y[i]);
}

fn finish(t: u32, p: u32, du: pack, found: Found) -> vec3f {
    if (!found.inside) { return vec3f(); }
    out[found.at] = found.delta * du + found.skip * found.dy;
    return vec3f(fold(found.dy * found.y), fold(found.x * du), fold(found.x * found.dy));
}

// Sums of dy y, x du and x dy.
fn finish_rows(t: u32, p: u32, totals: mat3x4f) {
    if (t >= chunk) { return; }
    let to = sums_index(t) + (1u + p / {{ tile_n }}u * 3u) * chunk;
    let by_cum = totals[0] - delta_four(own_dt, t) * totals[1];
$$ for j in range(4)
    let score{{ j }} = scores[score_index(t + {{ j }}u, t + {{ j }}u) / 4u][(t + {{ j }}u) % 4u];
    sums[to + {{ j }}u] = by_cum[{{ j }}];
    sums[to + chunk + {{ j }}u] = totals[1][{{ j }}] + score{{ j }} * totals[2][{{ j }}];
    sums[to + 2u * chunk + {{ j }}u] = totals[2][{{ j }}];
$$ endfor
}
$$ else
fn finish(t: u32, p: u32, sum: {{ out_type }}) {
    if (!inside(t) || p >= {{ head_dim }}u) { return; }
    out[(row_of(t) * out_stride + own_head * {{ head_dim }}u + p) / {{ width }}u] = sum;
}

fn finish_row(t: u32) {
    if (!inside(t)) { return; }
    let score = scores[score_index(t, t) / 4u][t % 4u];
    sums[sums_index(t)] = D[own_head] + score * delta_at(own_dt, t);
}
$$ endif
