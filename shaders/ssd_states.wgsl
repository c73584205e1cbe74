// states[n, p] = sum over a chunk's steps of exp(cum[last] - cum[t]) delta[t] B[t, n] x[t, p], what the chunk adds to the state by its end;
// with dy bound of exp(cum[t]) C[t, n] dy[t, p], what it adds to the gradient of the state at its start
$$ set strict, reverse = false, "dy" in bound
$$ set lines_m, lines_n, depth, more, row_sums = d_state, head_dim, chunk, none, false
$$ set a, b = {"along": "lines", "own": true}, {"along": "lines", "own": true, "weighed": "columns"}
$$ set made = chunks - (1 if skip else 0)
$$ set products = batch * made * n_heads
$$ set out_type, width = ("vec4f", 4) if "states" in vec4 else ("f32", 1)
{$ include "include/ssd.wgsl" $}
$$ set start = d_xBC - (1 if reverse else 2) * n_groups * d_state

fn begin(product: u32, first_row: u32) {
    own_head = product % n_heads;
    own_group = own_head / {{ n_heads // n_groups }}u;
    own_chunk = product / n_heads % {{ made }}u{{ " + 1u" if skip == "first" }};
    own_sequence = product / {{ n_heads * made }}u;
    own_dt = dt_index(own_head);
}

fn load_a(n: u32, t: u32) -> vec4f {
    return xBC_four(row_of(t) * d_xBC + {{ start }}u + own_group * d_state + n, i32(d_state) - i32(n));
}

fn load_b(p: u32, t: u32) -> vec4f {
$$ if reverse
    return dy_four((row_of(t) * n_heads + own_head) * head_dim + p, select(0, i32(head_dim) - i32(p), inside(t)));
$$ else
    return xBC_four(row_of(t) * d_xBC + own_head * head_dim + p, select(0, i32(head_dim) - i32(p), t < chunk));
$$ endif
}

fn weigh_b(p: u32, step: u32) -> f32 {
    let t = min(step, chunk - 1u);
    return {{ "left_of_start(own_dt, t)" if reverse else "left_at_end(own_dt, t) * delta_at(own_dt, t)" }};
}

fn weigh_b_four(p: u32, step: u32) -> vec4f {
    let t = min(step, chunk - 4u);
    return {{ "left_of_start_four(own_dt, t)" if reverse else "left_at_end_four(own_dt, t) * delta_four(own_dt, t)" }};
}

{$ include "include/matmul.wgsl" $}

fn finish(n: u32, p: u32, sum: {{ out_type }}) {
    if (n >= d_state || p >= head_dim) { return; }
    states[((((own_sequence * chunks + own_chunk) * n_heads + own_head) * d_state + n) * head_dim + p) / {{ width }}u] = sum;
}
