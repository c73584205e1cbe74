// What the convolution's kernels share: a lane's own channels and its run of timesteps.
{$ include "include/group_index.wgsl" $}
{$ include "include/pack.wgsl" $}
{$ include "include/sigmoid.wgsl" $}

struct Run {
    sequence: u32,
    start: u32,  // first timestep
    stop: u32,
    part: u32,  // index of (sequence, run) among all of them
    c: u32,
    valid: bool,
}

fn own_run(i: u32) -> Run {
    let part = i / {{ columns }}u;
    let start = part % {{ ceil_div(seqlen, run) }}u * {{ run }}u;
    return Run(part / {{ ceil_div(seqlen, run) }}u, start, min(start + {{ run }}u, seqlen), part, i % {{ columns }}u, i < {{ batch * ceil_div(seqlen, run) * columns }}u);
}

// Index of the columns c of a timestep in a tensor of x's width, past the end that of the last one.
fn x_at(sequence: u32, t: u32, c: u32) -> u32 {
    return (sequence * seqlen + min(t, seqlen - 1u)) * {{ x_stride // width }}u + {{ x_start // width }}u + c;
}

// The same in a tensor of u's width.
fn u_at(sequence: u32, t: u32, c: u32) -> u32 {
    return (sequence * seqlen + min(t, seqlen - 1u)) * {{ columns }}u + c;
}

// The input before the first timestep of a run: of the same sequence, or carried, or zero.
fn before(sequence: u32, t: i32, c: u32) -> pack {
    if (t >= 0) {
        return {{ load("x", "x_at(sequence, u32(t), c)") }};
    }
$$ if "state" in bound
    return state[(sequence * context + u32(t + i32(context))) * {{ columns }}u + c];
$$ else
    return pack(0.0);
$$ endif
}

$$ if "documents" in bound
// The document of a timestep: before the first that of the state, past the end that of the last.
fn document_at(sequence: u32, t: i32) -> u32 {
    return select(documents[sequence * seqlen + u32(clamp(t, 0, i32(seqlen) - 1))], 0u, t < 0);
}

// What document `own` sees of a value of document `of`.
fn seen(value: pack, of_document: u32, own: u32) -> pack {
    return select(pack(0.0), value, of_document == own);
}

$$ endif
fn tap(c: u32, k: u32) -> pack {
$$ if packed
    let i = 4u * c * d_conv + k;
    return pack(weight[i], weight[i + d_conv], weight[i + 2u * d_conv], weight[i + 3u * d_conv]);
$$ else
    return weight[c * d_conv + k];
$$ endif
}
