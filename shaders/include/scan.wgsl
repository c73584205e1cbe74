// Operands of a step of the selective scan. Rows of x_dbl are [dt | B | C].
// A step past the end of the sequence, or a channel past the last, has u = delta = dy = 0: it changes no state.
const LOG2_E = 1.44269504088896340736f;

// Row of step t. Clamped, since 0 * B needs a finite B.
fn row_at(batch_index: u32, t: u32) -> u32 {
$$ if ragged
    return batch_index * seqlen + min(t, seqlen - 1u);
$$ else
    return batch_index * seqlen + t;
$$ endif
}

$$ set wide = "delta" in vec4
$$ set kind, columns = ("vec4f", d_inner // 4) if wide else ("f32", d_inner)
$$ set here = "row * " ~ (columns ~ "u" if wide else "d_inner") ~ " + channel"
$$ for name, index in [("u", here), ("delta", here), ("dy", here), ("z", "row * " ~ 2 * columns ~ "u + " ~ columns ~ "u + channel" if wide else "row * d_xz + d_inner + channel")]
$$ set array = "xz" if name == "z" else name
$$ if array in bound
$$ set value = "abs(delta[" ~ index ~ "])" if name == "delta" and resets else load(array, index)
// {{ name }} of a channel{{ "; here of four, which `channel` counts" if wide }}.
fn {{ name }}_at(row: u32, t: u32, channel: u32) -> {{ kind }} {
$$ if ragged
    return select({{ kind }}(0.0), {{ value }}, t < seqlen && channel < {{ columns }}u);
$$ else
    return {{ value }};
$$ endif
}

$$ endif
$$ endfor
$$ if resets
// Whether step t goes on with the state before it: scan_reset makes delta negative where a document begins.
$$ if wide
fn goes_on(row: u32, t: u32, channel: u32) -> vec4<bool> {
    return {{ "select(" if ragged }}delta[{{ here }}] >= vec4f(0.0){{ ", vec4<bool>(true), t >= seqlen)" if ragged }};
}
$$ else
fn goes_on(row: u32, t: u32, channel: u32) -> bool {
    return delta[{{ here }}] >= 0.0{{ " || t >= seqlen" if ragged }};
}
$$ endif

$$ endif
$$ for name, column in [("B", dt_rank), ("C", dt_rank + d_state)]
// {{ name }} of four states; 0 for states past the last.
fn {{ name }}_at(row: u32, group: u32) -> vec4f {
$$ if "x_dbl" in vec4
    return x_dbl[row * {{ (dt_rank + 2 * d_state) // 4 }}u + {{ column // 4 }}u + group];
$$ else
    let i = row * d_x_dbl + {{ column }}u + 4u * group;
$$ if d_state % 4 == 0
    return vec4f(x_dbl[i], x_dbl[i + 1u], x_dbl[i + 2u], x_dbl[i + 3u]);
$$ else
    let states = {{ d_state }}u - 4u * group;
    return vec4f(x_dbl[i], select(0.0, x_dbl[i + 1u], states > 1u), select(0.0, x_dbl[i + 2u], states > 2u), select(0.0, x_dbl[i + 3u], states > 3u));
$$ endif
$$ endif
}

$$ endfor
$$ if subgroup
// Loads are dear on a CPU: each lane of a subgroup loads one vec4 of a row's B and C, and hands it round.
fn BC_slot(lane: u32) -> u32 {
    return min(lane, {{ 2 * ceil_div(d_state, 4) - 1 }}u);
}
fn BC_at(row: u32, slot: u32) -> vec4f {
$$ if "x_dbl" in vec4
    return x_dbl[row * {{ (dt_rank + 2 * d_state) // 4 }}u + {{ dt_rank // 4 }}u + slot];
$$ else
    if (slot < {{ ceil_div(d_state, 4) }}u) { return B_at(row, slot); }
    return C_at(row, slot - {{ ceil_div(d_state, 4) }}u);
$$ endif
}
$$ for q in range(ceil_div(d_state, 4))
fn B{{ q }}_of(bc: vec4f) -> vec4f { return subgroupBroadcast(bc, {{ q }}u); }
fn C{{ q }}_of(bc: vec4f) -> vec4f { return subgroupBroadcast(bc, {{ ceil_div(d_state, 4) + q }}u); }
$$ endfor

$$ endif
$$ if discretization == "zoh"
// (e^X - 1) / X, given a = e^X: near 0 by its series, since the quotient cancels there.
fn phi1(X: vec4f, a: vec4f) -> vec4f {
    let small = abs(X) < vec4f(0.5);
    let series = 1.0 + X / 2.0 * (1.0 + X / 3.0 * (1.0 + X / 4.0 * (1.0 + X / 5.0 * (1.0 + X / 6.0 * (1.0 + X / 7.0 * (1.0 + X / 8.0))))));
    return select((a - 1.0) / select(X, vec4f(1.0), small), series, small);
}

// Derivative of phi1: (X e^X - e^X + 1) / X^2.
fn dphi1(X: vec4f, a: vec4f) -> vec4f {
    let small = abs(X) < vec4f(0.5);
    let series = 1.0 / 2.0 + X * (1.0 / 3.0 + X * (1.0 / 8.0 + X * (1.0 / 30.0 + X * (1.0 / 144.0 + X * (1.0 / 840.0 + X * (1.0 / 5760.0 + X / 45360.0))))));
    let safe = select(X, vec4f(1.0), small);
    return select((safe * a - a + 1.0) / (safe * safe), series, small);
}

$$ endif
// What u B is multiplied by: delta (euler) or (e^X - 1) / A (zoh), with X = delta A and a = e^X.
fn input_weight(delta: f32, A: vec4f, a: vec4f) -> vec4f {
$$ if discretization == "zoh"
    return delta * phi1(delta * A, a);
$$ else
    return vec4f(delta);
$$ endif
}
