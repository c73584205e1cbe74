// dscores[part, t, s] = sum over the part's heads of exp(cum[t] - cum[s]) delta[s] (dy[t] x[s]) for s <= t, 0 for the others
$$ set strict = false
$$ set per_fold = ceil_div(head_dim, tile_k) * tile_k
$$ set per_part = n_heads // (n_groups * splits)
$$ set lines_m, lines_n, depth, more, row_sums = chunk, chunk, per_part * per_fold, none, false
$$ set a, b = {"along": "k", "own": true}, {"along": "k", "own": true}
$$ set needs, lower = true, true
$$ set products = batch * chunks * n_groups * splits
$$ set out_type = "vec4f"
{$ include "include/ssd.wgsl" $}

var<private> own_part: u32;

fn begin(product: u32, first_row: u32) {
    own_part = product % splits;
    own_group = product / splits % n_groups;
    own_chunk = product / {{ n_groups * splits }}u % chunks;
    own_sequence = product / {{ n_groups * splits * chunks }}u;
    own_head = own_group * {{ n_heads // n_groups }}u + own_part * {{ per_part }}u; // the first
}

fn load_a(t: u32, k: u32) -> vec4f {
    let p = k % {{ per_fold }}u;
    let i = (row_of(t) * n_heads + own_head + k / {{ per_fold }}u) * {{ head_dim }}u + p;
    return dy_four(i, select(0, {{ head_dim }} - i32(p), inside(t)));
}

fn load_b(s: u32, k: u32) -> vec4f {
    let p = k % {{ per_fold }}u;
    return xBC_four(row_of(s) * d_xBC + (own_head + k / {{ per_fold }}u) * {{ head_dim }}u + p, {{ head_dim }} - i32(p));
}

fn fold_weight(t: u32, s: u32, fold: u32) -> vec4f {
    let dt = dt_index(own_head + fold);
    return left_of_four(dt, t, s) * delta_four(dt, s);
}

fn needs(t: u32, s: u32, k: u32) -> bool {
    return s <= t + 3u;
}

{$ include "include/matmul.wgsl" $}

fn finish(t: u32, s: u32, sum: vec4f) {
    if (t >= chunk || s >= chunk) { return; }
    dscores[(((((own_part * batch + own_sequence) * chunks + own_chunk) * n_groups + own_group) * chunk + t) * chunk + s) / 4u] = sum;
}
