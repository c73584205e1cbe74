// What the kernels of the state-space dual share: the place of a head's chunk, its decays, and loads of four neighbours.
// A row of xBC is [x | B | C]: n_heads of head_dim, then twice n_groups of d_state. A head's chunk has {{ planes }} planes of
// dt_cum, each over its steps: delta, 0 past the sequence's end; cum, the sum of delta A log2(e) up to and with the step, which
// never rises; with documents how many began up to then, and cum anew from each one's first step, so that none depends on the one
// before it even in its last digit. The kernel sets strict: whether a step's own input is left out of what is left of inputs.
$$ set ragged = seqlen % chunk > 0

var<private> own_sequence: u32;
var<private> own_chunk: u32;
var<private> own_head: u32;
var<private> own_group: u32;
var<private> own_dt: u32; // where the head's chunk begins in dt_cum

fn dt_index(head: u32) -> u32 {
    return ((own_sequence * {{ chunks }}u + own_chunk) * {{ n_heads }}u + head) * {{ planes * chunk }}u;
}

// Step t of the own chunk as a row of all sequences; past the end the last one.
fn row_of(t: u32) -> u32 {
$$ if ragged
    return own_sequence * {{ seqlen }}u + min(own_chunk * {{ chunk }}u + t, {{ seqlen - 1 }}u);
$$ else
    return own_sequence * {{ seqlen }}u + own_chunk * {{ chunk }}u + t;
$$ endif
}

fn inside(t: u32) -> bool {
    return {{ "t < " ~ chunk ~ "u" }}{{ " && own_chunk * " ~ chunk ~ "u + t < " ~ seqlen ~ "u" if ragged }};
}

$$ if "dt_cum" in bound
fn dt_one(i: u32) -> f32 {
    return dt_cum[i / 4u][i % 4u];
}

fn delta_at(dt: u32, t: u32) -> f32 {
    return dt_one(dt + t);
}

fn delta_four(dt: u32, t: u32) -> vec4f {
    return dt_cum[(dt + t) / 4u];
}

fn cum_four(dt: u32, t: u32) -> vec4f {
    return dt_cum[(dt + {{ chunk }}u + t) / 4u];
}

$$ if planes == 3
fn begun_four(dt: u32, t: u32) -> vec4f {
    return dt_cum[(dt + {{ 2 * chunk }}u + t) / 4u];
}

$$ endif
// What is left at step t of the state at the chunk's start.
fn left_of_start(dt: u32, t: u32) -> f32 {
    let left = exp2(dt_one(dt + {{ chunk }}u + t));
    return {{ "select(0.0, left, dt_one(dt + " ~ 2 * chunk ~ "u + t) == 0.0)" if planes == 3 else "left" }};
}

// What is left at the chunk's end of step t's input.
fn left_at_end(dt: u32, t: u32) -> f32 {
    let left = exp2(min(dt_one(dt + {{ 2 * chunk - 1 }}u) - dt_one(dt + {{ chunk }}u + t), 0.0));
    return {{ "select(0.0, left, dt_one(dt + " ~ 2 * chunk ~ "u + t) == dt_one(dt + " ~ (3 * chunk - 1) ~ "u))" if planes == 3 else "left" }};
}

// left_of_start and left_at_end of the four steps from t on.
fn left_of_start_four(dt: u32, t: u32) -> vec4f {
    let left = exp2(cum_four(dt, t));
    return {{ "select(vec4f(), left, begun_four(dt, t) == vec4f())" if planes == 3 else "left" }};
}

fn left_at_end_four(dt: u32, t: u32) -> vec4f {
    let left = exp2(min(dt_one(dt + {{ 2 * chunk - 1 }}u) - cum_four(dt, t), vec4f()));
    return {{ "select(vec4f(), left, begun_four(dt, t) == vec4f(dt_one(dt + " ~ (3 * chunk - 1) ~ "u)))" if planes == 3 else "left" }};
}

// What is left at step t of the inputs of the four steps from s on; 0 for those after t{{ ", and t's own" if strict }}.
fn left_of_four(dt: u32, t: u32, s: u32) -> vec4f {
    let left = exp2(min(dt_one(dt + {{ chunk }}u + t) - cum_four(dt, s), vec4f()));
    let before = vec4u(s, s + 1u, s + 2u, s + 3u) {{ "<" if strict else "<=" }} vec4u(t);
    return select(vec4f(), left, before{{ " & (vec4f(dt_one(dt + " ~ 2 * chunk ~ "u + t)) == begun_four(dt, s))" if planes == 3 }});
}

// The same for the four steps from t on, each a column; and for those from t on of their own inputs at the four steps from s on.
$$ for name, rise, order in [("left_of_block", "cum[%d] - cum_s", "<" if strict else "<="), ("left_in_block", "cum_s - cum[%d]", ">" if strict else ">=")]
fn {{ name }}(dt: u32, t: u32, s: u32) -> mat4x4f {
    let steps = vec4u(s, s + 1u, s + 2u, s + 3u);
    let cum = cum_four(dt, t);
    let cum_s = cum_four(dt, s);
$$ if planes == 3
    let begun = begun_four(dt, t);
    let begun_s = begun_four(dt, s);
$$ endif
    return mat4x4f(
$$ for j in range(4)
        select(vec4f(), exp2(min({{ rise % j }}, vec4f())), (steps {{ order }} vec4u(t + {{ j }}u)){{ " & (begun_s == vec4f(begun[%d]))" % j if planes == 3 }}){{ "," if j < 3 }}
$$ endfor
    );
}

$$ endfor
$$ endif
$$ for array in ["xBC", "dy", "states", "dstates"] if array in bound
// Four elements from i on, of which the first `count` are wanted; the others are 0.
fn {{ array }}_four(i: u32, count: i32) -> vec4f {
$$ if array in vec4
    if (count <= 0) { return vec4f(); }  // not a select(), which would wait for the load
    return {{ array }}[i / 4u];
$$ else
    return select(vec4f(), vec4f({{ array }}[i], {{ array }}[i + 1u], {{ array }}[i + 2u], {{ array }}[i + 3u]), vec4i(count) > vec4i(0, 1, 2, 3));
$$ endif
}

$$ endfor
$$ if "xBC" in bound
fn xBC_one(i: u32) -> f32 {
    return {{ "xBC[i / 4u][i % 4u]" if "xBC" in vec4 else "xBC[i]" }};
}
$$ endif
