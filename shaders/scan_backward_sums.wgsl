// dx_dbl = [0 | dB | dC], sums of partials over blocks of channels; dA_log, dD += sums of partials over sequences and segments;
// dstate = what each sequence's first segment has carried
$$ set groups = ceil_div(d_state, 4)
$$ set width, kind = (4, "vec4f") if "dx_dbl" in vec4 else (1, "f32")
$$ set parameters = carried + batch * seqlen * blocks * 8 * groups
$$ set x_dbl_count, A_log_count = batch * seqlen * d_x_dbl // width, d_inner * d_state // width
$$ set states = n_state // width if "dstate" in bound else 0
$$ set count = states + x_dbl_count + (A_log_count + d_inner if "dA_log" in bound or "dD" in bound else 0)

// Indices here are in {{ kind }}s. 8 parts at a time, so that their loads overlap.
fn sum(from_index: u32, parts: u32, stride: u32) -> {{ kind }} {
    var s = {{ kind }}();
    var at = from_index;
    var p = 0u;
$$ if [blocks, batch * segments] | max >= 8
    for (; p + 7u < parts; p += 8u) {
$$ for j in range(8)
        let a{{ j }} = partials[at + {{ j }}u * stride];
$$ endfor
        s += ((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7));
        at += 8u * stride;
    }
$$ endif
    for (; p < parts; p++) {
        s += partials[at];
        at += stride;
    }
    return s;
}

fn element(own: u32) {
$$ if states
    if (own < {{ states }}u) {
        // a sequence has so many elements, and behind them those of its other segments
$$ set each = states // batch
        dstate[own] = partials[own / {{ each }}u * {{ each * segments }}u + own % {{ each }}u];
        return;
    }
    let i = own - {{ states }}u;
$$ else
    let i = own;
$$ endif
    // Of dx_dbl. One sum for all results: a CPU's lanes walk both sides of a branch.
    let column = i % {{ d_x_dbl // width }}u;
    let row = i / {{ d_x_dbl // width }}u;
    let n = column - {{ dt_rank // width }}u;
$$ if d_state == 4 * groups
    let state = n;
$$ else
    let state = select(n, n + {{ 4 * groups - d_state }}u, n >= {{ d_state }}u);
$$ endif
    var at = {{ carried // width }}u + row * {{ blocks * 8 * groups // width }}u + state;
    var parts = select({{ blocks }}u, 0u, column < {{ dt_rank // width }}u);
    var stride = {{ 8 * groups // width }}u;
$$ if "dA_log" in bound or "dD" in bound
    let j = i - {{ x_dbl_count }}u;
    if (i >= {{ x_dbl_count }}u) {
        parts = {{ batch * segments }}u;
        stride = {{ (groups + 1) * d_inner * 4 // width }}u;
$$ if width == 4
        at = {{ parameters // 4 }}u + j % {{ groups }}u * {{ d_inner }}u + j / {{ groups }}u;
$$ else
        at = {{ parameters }}u + (j % {{ d_state }}u / 4u * {{ d_inner }}u + j / {{ d_state }}u) * 4u + j % {{ d_state }}u % 4u;
$$ endif
        if (j >= {{ A_log_count }}u) {
            at = {{ parameters // width }}u + ({{ groups * d_inner }}u + j - {{ A_log_count }}u){{ " * 4u" if width == 1 }};
        }
    }
$$ endif
    let total = sum(at, parts, stride);
    if (i < {{ x_dbl_count }}u) {
        dx_dbl[i] = total;
        return;
    }
$$ if "dA_log" in bound
    if (j < {{ A_log_count }}u) {
        {{ add("dA_log", "j", "total") }}
    }
$$ endif
$$ if "dD" in bound
    if (j >= {{ A_log_count }}u) {
        let channel = j - {{ A_log_count }}u;
        {{ add("dD", "channel", "total" ~ (".x" if width == 4 else "")) }}
    }
$$ endif
}

{$ include "include/each_element.wgsl" $}
