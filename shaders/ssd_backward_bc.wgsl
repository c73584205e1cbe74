// The gradients of B and C, summed over the heads of a group: dC[t] = sum over s of dscores[t, s] B[s] + exp(cum[t]) states dy[t];
// dB[s] = sum over t of dscores[t, s] C[t] + exp(cum[last] - cum[s]) delta[s] dstates x[s]; each part has some of the steps and heads
$$ set strict = false
$$ set own_steps = 4 * ceil_div(chunk // 4, shares)
$$ set part_steps = ceil_div(own_steps, tile_k) * tile_k
$$ set per_head = ceil_div(head_dim, tile_k) * tile_k
$$ set part_heads = n_heads // (n_groups * shares)
$$ set depth = part_steps + (part_heads * per_head if "states" in bound else 0)
$$ set fresh = true
$$ set lines_m, lines_n, more, row_sums = chunk, d_state, none, false
$$ set a, b = {"along": "k", "own": true, "blocks": true, "weighed": "columns"}, {"along": "k", "own": true}
$$ set products = 2 * batch * chunks * n_groups * shares
$$ set out_type, width = ("vec4f", 4) if "out" in vec4 else ("f32", 1)
$$ set until = "select(" ~ depth ~ "u, " ~ part_steps ~ "u, no_states(product))"
{$ include "include/ssd.wgsl" $}
$$ set B_start, C_start = d_xBC - 2 * n_groups * d_state, d_xBC - n_groups * d_state

var<private> of_B: bool; // whether the product is dB; the others are dC
var<private> own_share: u32;

fn begin(product: u32, first_row: u32) {
    own_share = product % shares;
    of_B = product / shares % 2u == 0u;
    own_group = product / {{ 2 * shares }}u % {{ n_groups }}u;
    own_chunk = product / {{ 2 * shares * n_groups }}u % chunks;
    own_sequence = product / ({{ 2 * shares * n_groups }}u * chunks);
    own_head = own_group * {{ n_heads // n_groups }}u + own_share * {{ part_heads }}u; // the first
}

// Whether the states at the chunk's start, for dC, or their gradients at its end, for dB, are zero; those are not read. By the product,
// which is uniform, as barriers in the walk ask for; what begin() sets is not.
fn no_states(product: u32) -> bool {
    let makes_B = product / shares % 2u == 0u;
    let chunk_index = product / {{ 2 * shares * n_groups }}u % chunks;
    return {{ "(makes_B && chunk_index == " ~ (chunks - 1) ~ "u)" if ends_zero else "false" }} || {{ "(!makes_B && chunk_index == 0u)" if begins_zero else "false" }};
}

fn score_four(t: u32, s: u32) -> vec4f {
    var sum = vec4f();
$$ for part in range(splits)
    sum += dscores[((((({{ part }}u * batch + own_sequence) * chunks + own_chunk) * {{ n_groups }}u + own_group) * chunk + t) * chunk + s) / 4u];
$$ endfor
    return sum;
}

fn load_a_block(t: u32, k: u32) -> mat4x4f {
    if (k < {{ part_steps }}u) {
        let first = own_share * {{ own_steps }}u + k;
        if (first >= chunk{{ " || k >= " ~ own_steps ~ "u" if own_steps < part_steps }}) { return mat4x4f(); }
        if (of_B) {
            return transpose(mat4x4f({$ for j in range(4) $}score_four(first + {{ j }}u, t){{ ", " if j < 3 }}{$ endfor $}));
        }
        return mat4x4f({$ for j in range(4) $}score_four(t + {{ j }}u, first){{ ", " if j < 3 }}{$ endfor $});
    }
$$ if "states" in bound
    let p = (k - {{ part_steps }}u) % {{ per_head }}u;
    let head = own_head + (k - {{ part_steps }}u) / {{ per_head }}u;
    let count = {{ head_dim }} - i32(p);
    if (of_B) {
        return mat4x4f({$ for j in range(4) $}xBC_four(row_of(t + {{ j }}u) * d_xBC + head * {{ head_dim }}u + p, count){{ ", " if j < 3 }}{$ endfor $});
    }
    return mat4x4f({$ for j in range(4) $}dy_four((row_of(t + {{ j }}u) * n_heads + head) * {{ head_dim }}u + p, count){{ ", " if j < 3 }}{$ endfor $});
$$ else
    return mat4x4f();
$$ endif
}

fn weigh_a_block(t: u32, k: u32) -> vec4f {
$$ if "states" in bound
    if (k >= {{ part_steps }}u) {
        let dt = dt_index(own_head + (k - {{ part_steps }}u) / {{ per_head }}u);
        if (of_B) { return left_at_end_four(dt, t) * delta_four(dt, t); }
        return left_of_start_four(dt, t);
    }
$$ endif
    return vec4f(1.0);
}

fn fresh(k: u32) -> bool {
    return k == 0u || (k >= {{ part_steps }}u && (k - {{ part_steps }}u) % {{ per_head }}u == 0u);
}

fn load_b(n: u32, k: u32) -> vec4f {
    let line = min(n, {{ d_state - 1 }}u);
    if (k < {{ part_steps }}u) {
        let first = own_share * {{ own_steps }}u + k;
        let column = select({{ B_start }}u, {{ C_start }}u, of_B) + own_group * {{ d_state }}u + line;
        return vec4f({$ for j in range(4) $}{{ "xBC_one(row_of(first + " ~ j ~ "u) * d_xBC + column)" }}{{ ", " if j < 3 }}{$ endfor $});
    }
$$ if "states" in bound
    let p = (k - {{ part_steps }}u) % {{ per_head }}u;
    let head = own_head + (k - {{ part_steps }}u) / {{ per_head }}u;
    let i = (((own_sequence * chunks + own_chunk) * n_heads + head) * {{ d_state }}u + line) * {{ head_dim }}u + p;
    let count = {{ head_dim }} - i32(p);
    if (of_B) { return dstates_four(i, count); }
    return states_four(i, count);
$$ else
    return vec4f();
$$ endif
}

{$ include "include/matmul.wgsl" $}

fn finish(t: u32, n: u32, sum: {{ out_type }}) {
    if (!inside(t) || n >= {{ d_state }}u) { return; }
    let column = {{ out_start }}u + select({{ n_groups * d_state }}u, 0u, of_B) + own_group * {{ d_state }}u + n;
    out[((own_share * {{ batch * seqlen }}u + row_of(t)) * out_stride + column) / {{ width }}u] = sum;
}
