// scores[t, s] = sum over d_state of C[t] B[s], for the steps s <= t of a chunk and each group; 0 for the others
$$ set n_heads, planes, strict = n_groups, 2, false
$$ set lines_m, lines_n, depth, more, row_sums = chunk, chunk, d_state, none, false
$$ set a, b = {"along": "k", "own": true}, {"along": "k", "own": true}
$$ set lower = true
$$ set products = batch * chunks * n_groups
$$ set out_type = "vec4f"
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
