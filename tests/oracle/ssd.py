import numpy as np

from . import case, oracle, uniform

LOG2_E = np.log2(np.e)
HEAD_BLOCK = 64  # columns of a head whose sums are kept apart


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def dims(batch=2, seqlen=9, n_heads=4, head_dim=5, d_state=6, n_groups=2, chunk=4, **more):
    """Values of a case, the derived ones filled in."""
    d_inner, chunks = n_heads * head_dim, -(-seqlen // chunk)
    d_xBC = d_inner + 2 * n_groups * d_state
    width = 4 if head_dim % 4 == 0 else 1
    return {
        "batch": batch,
        "seqlen": seqlen,
        "n_heads": n_heads,
        "head_dim": head_dim,
        "d_state": d_state,
        "n_groups": n_groups,
        "chunk": chunk,
        "chunks": chunks,
        "norm_groups": n_groups,
        "planes": 2,
        "splits": 1,
        "shares": 1,
        "d_inner": d_inner,
        "d_xBC": d_xBC,
        "d_proj": d_inner + d_xBC + n_heads,
        "d_states": d_state,
        "d_heads": head_dim,
        "blocks": -(-d_state * head_dim // width // 64),
        "of_step": 1 + 3 * -(-head_dim // HEAD_BLOCK),
        **more,
    }


def tile(m, n, prefetch):
    """The tiles of large GPUs, of 8 x 8 outputs a thread."""
    return {
        "tile_m": m,
        "tile_n": n,
        "tile_k": 16,
        "thread_m": 8,
        "thread_n": 8,
        "swizzle": 8,
        "warp_n": 8,
        "prefetch": prefetch,
        "single": 0,
        "lanes": 0,
        "workgroup": m * n // 64,
    }


PACKED = dims(batch=1, seqlen=70, n_heads=4, head_dim=8, d_state=12, n_groups=1, chunk=32)


def into_chunks(rows, chunk):
    """(batch, seqlen, ...) -> (batch, chunks, chunk, ...); past the end is the last row."""
    batch, seqlen = rows.shape[:2]
    chunks = -(-seqlen // chunk)
    t = np.minimum(np.arange(chunks * chunk), seqlen - 1)
    return rows[:, t].reshape(batch, chunks, chunk, *rows.shape[2:])


def from_chunks(steps, seqlen):
    """The inverse of `into_chunks`."""
    batch, chunks, chunk = steps.shape[:3]
    return steps.reshape(batch, chunks * chunk, *steps.shape[3:])[:, :seqlen]


class Chunks:
    """Operands by chunk: x, dy (batch, chunks, chunk, n_heads, head_dim), 0 past the end, B, C
    (batch, chunks, chunk, n_heads, d_state), each head with its group's; decays."""

    def __init__(self, xBC, dt_cum, d_state, head_dim, n_groups, dy=None):
        self.batch, self.seqlen, _ = xBC.shape
        n_heads, chunk = dt_cum.shape[2], dt_cum.shape[-1]
        d_inner, per_group = n_heads * head_dim, n_heads // n_groups
        x, B, C = np.split(into_chunks(xBC, chunk), [d_inner, d_inner + n_groups * d_state], -1)
        shape = x.shape[:3]
        t = np.arange(shape[1] * chunk).reshape(1, -1, chunk, 1, 1)
        self.inside = np.broadcast_to(t < self.seqlen, (*shape, 1, 1))
        self.x = x.reshape(*shape, n_heads, head_dim) * self.inside
        self.B_groups, self.C_groups = (v.reshape(*shape, n_groups, d_state) for v in (B, C))
        self.B, self.C = (np.repeat(v, per_group, 3) for v in (self.B_groups, self.C_groups))
        if dy is not None:
            self.dy = into_chunks(dy, chunk).reshape(self.x.shape) * self.inside
        # (batch, chunks, n_heads, chunk)
        self.delta, cum = dt_cum[..., 0, :], dt_cum[..., 1, :]
        begun = dt_cum[..., 2, :] if dt_cum.shape[3] == 3 else np.zeros_like(cum)
        self.left_of_start = np.exp2(cum) * (begun == 0)
        self.left_at_end = np.exp2(cum[..., -1:] - cum) * (begun == begun[..., -1:])
        self.left_of_chunk = self.left_of_start[..., -1]
        # [t, s]: what is left at step t of step s's input; strictly: without t's own
        difference = cum[..., :, None] - cum[..., None, :]
        same = begun[..., :, None] == begun[..., None, :]
        self.left = np.exp2(np.minimum(difference, 0)) * same * np.tri(chunk)
        self.strictly = self.left * np.tri(chunk, k=-1)

    def rows(self, steps):
        """(batch, chunks, chunk, n_heads, head_dim) -> (batch, seqlen, d_inner)"""
        return from_chunks(steps.reshape(*steps.shape[:3], -1), self.seqlen)


def without(states, chunk):
    """The states with those of a chunk zero: a kernel may not read these."""
    states = states.copy()
    states[:, chunk] = 0
    return states


def by_head(scores, n_heads):
    """(batch, chunks, n_groups, chunk, chunk) -> one for each head"""
    return np.repeat(scores, n_heads // scores.shape[2], 2)


def dt_cum_draw(rng, shape, values):
    batch, chunks, n_heads, planes, chunk = shape
    delta = rng.uniform(0.05, 1, (batch, chunks * chunk, n_heads))
    delta[:, values["seqlen"] :] = 0
    delta = delta.reshape(batch, chunks, chunk, n_heads)
    rate = -rng.uniform(0.1, 1, n_heads)
    result = [delta, np.cumsum(delta * rate, 2)]
    if planes == 3:
        begun = rng.random(batch * chunks * chunk) < 0.1
        begun = np.cumsum(begun.reshape(batch, chunks, chunk, 1), 2)
        result.append(np.broadcast_to(begun, delta.shape))
    return np.moveaxis(np.stack(result, 2), -1, 2)


DRAW = {"dt_cum": dt_cum_draw}


@oracle(
    case(**dims(), leave_out=("documents",)),
    case(**dims(seqlen=70, n_heads=3, n_groups=1, chunk=32, planes=3, vocab_size=2)),
    case(**dims(seqlen=50, chunk=20, planes=3, vocab_size=2)),
    case(**dims(seqlen=3), limit=(0.5, 1.0), leave_out=("documents",)),
    case(**dims(d_state=7, chunk=8, seqlen=5), leave_out=("documents",)),
    case(**PACKED, leave_out=("documents",)),
    draw={"zxbcdt": uniform(-3, 3), "A_log": uniform(0, 5)},
)
def ssd_prepare(zxbcdt, dt_bias, A_log, documents, xBC, dt_cum, scores, limit, d_state):
    planes, chunk = dt_cum.shape[3:]
    batch, seqlen, _ = zxbcdt.shape
    delta = np.clip(softplus(zxbcdt[..., -len(A_log) :] + dt_bias), *limit)
    inside = into_chunks(np.ones((batch, seqlen)), chunk)
    inside.reshape(batch, -1)[:, seqlen:] = 0
    delta = into_chunks(delta, chunk) * inside[..., None]
    steps = np.maximum(-np.exp(A_log) * delta * LOG2_E, -127)
    first = np.zeros((batch, seqlen))
    if planes == 3:
        first = documents != np.pad(documents, [(0, 0), (1, 0)])[:, :-1]
    first = into_chunks(first, chunk) * inside
    cum, last = np.zeros_like(steps), np.zeros_like(steps[:, :, 0])
    for t in range(chunk):
        last = cum[:, :, t] = last * (1 - first[:, :, t, None]) + steps[:, :, t]
    result = [delta, cum]
    if planes == 3:
        result.append(np.broadcast_to(np.cumsum(first, 2)[..., None], delta.shape))
    n_groups = scores.shape[2]
    B, C = np.split(into_chunks(xBC[..., -2 * n_groups * d_state :], chunk), 2, -1)
    shape = (*B.shape[:3], n_groups, d_state)
    products = np.einsum("bctgn,bcsgn->bcgts", C.reshape(shape), B.reshape(shape))
    return {
        "dt_cum": np.moveaxis(np.stack(result, 2), -1, 2),
        "scores": products * np.tri(chunk),
    }


@oracle(
    case(**dims(), skip="last", leave_out=("dy",)),
    case(**dims(planes=3), skip="first"),
    case(**PACKED, skip="", leave_out=("dy",)),
    case(**{**PACKED, "planes": 3}, skip="first"),
    case(**dims(seqlen=12, d_state=130, n_heads=2, head_dim=68), skip="last", leave_out=("dy",)),
    draw=DRAW,
)
def ssd_states(xBC, dt_cum, dy, states, n_groups, skip):
    d_state, head_dim = states.shape[-2:]
    c = Chunks(xBC, dt_cum, d_state, head_dim, n_groups, dy)
    if dy is None:
        made = np.einsum("bcht,bcthn,bcthp->bchnp", c.left_at_end * c.delta, c.B, c.x)
    else:
        made = np.einsum("bcht,bcthn,bcthp->bchnp", c.left_of_start, c.C, c.dy)
    if skip:
        made[:, 0 if skip == "first" else -1] = np.nan
    return {"states": made}


OPTIONAL = ("starts", "last", "initial", "state", "dots")


def combine_case(base, *bound, reverse=False):
    left_out = tuple(binding for binding in OPTIONAL if binding not in bound)
    return case(**base, reverse=reverse, leave_out=left_out)


@oracle(
    combine_case(dims()),
    combine_case(dims(seqlen=40, planes=3), "state"),
    combine_case(dims(seqlen=40, planes=3), "initial", "state"),
    combine_case(PACKED, "initial", "state"),
    combine_case(dims(seqlen=3), "state"),
    combine_case(dims(seqlen=40, planes=3), "starts", "dots", reverse=True),
    combine_case(PACKED, "starts", "dots", reverse=True),
    combine_case(dims(seqlen=6, head_dim=12, d_state=30), "starts", "dots", reverse=True),
    combine_case(dims(seqlen=3), "starts", "dots", reverse=True),
    combine_case(dims(seqlen=3, planes=3), *OPTIONAL, reverse=True),
    combine_case(dims(seqlen=40, head_dim=12, d_state=30), *OPTIONAL, reverse=True),
    draw={"dt_cum": dt_cum_draw},
)
def ssd_combine(dt_cum, starts, last, initial, states, state, dots, reverse):
    cum = dt_cum[..., 1, -1]
    decay = np.exp2(cum) * (dt_cum[..., 2, -1] == 0 if dt_cum.shape[3] == 3 else 1)
    chunks = states.shape[1]
    begin = state if initial is None else initial
    carry = np.zeros_like(states[:, 0]) if begin is None else begin
    result = {"states": np.empty_like(states)}
    if dots is not None:
        result["dots"] = np.zeros_like(dots)
        after = [*np.moveaxis(starts[:, 1:], 1, 0), np.zeros_like(carry) if last is None else last]
    for k in reversed(range(chunks)) if reverse else range(chunks):
        result["states"][:, k] = carry
        if dots is not None:
            product = (carry * after[k]).reshape(*carry.shape[:2], -1)
            span = 64 * (4 if states.shape[-1] % 4 == 0 else 1)
            for part in range(dots.shape[-1]):
                result["dots"][:, k, :, part] = product[..., part * span : (part + 1) * span].sum(
                    -1
                )
        carry = decay[:, k, :, None, None] * carry + states[:, k]
    if state is not None:
        result["state"] = carry
    elif initial is None:
        result["states"][:, chunks - 1 if reverse else 0] = np.nan
    return result


def output_case(base, reverse=False, leave_out=(), choices=None, **options):
    """Forward: the columns of y; in reverse the first ones of dxBC."""
    stride = base["d_xBC"] if reverse else base["d_inner"]
    options["leave_out"] = (*leave_out, *(("D",) if reverse else ("dy", "y")))
    return case(**base, out_stride=stride, reverse=reverse, choices=choices, **options)


# A chunk, and steps that fill one and a part of the next
LONG = dims(seqlen=300, chunk=256, head_dim=4, n_heads=1, n_groups=1, batch=1)


@oracle(
    output_case(dims()),
    output_case(dims(planes=3), reverse=True),
    output_case(PACKED),
    output_case({**PACKED, "planes": 3}),
    output_case({**PACKED, "planes": 3}, reverse=True),
    output_case(PACKED, begins_zero=True),
    output_case(dims(), reverse=True, begins_zero=True),
    output_case(dims(seqlen=3), leave_out=("states",)),
    output_case(dims(seqlen=3), reverse=True, leave_out=("states",)),
    output_case(dims(seqlen=130, chunk=128, head_dim=68, n_heads=2), choices=tile(128, 64, 1)),
    output_case(dims(seqlen=20, chunk=16, head_dim=130, n_heads=2), reverse=True),
    output_case(
        dims(seqlen=130, chunk=128, head_dim=68, d_state=8, n_heads=2),
        reverse=True,
        choices=tile(128, 64, 1),
    ),
    output_case(LONG),
    output_case(LONG, reverse=True),
    draw=DRAW,
)
def ssd_output(
    xBC,
    dt_cum,
    scores,
    states,
    D,
    dy,
    y,
    out,
    sums,
    d_state,
    head_dim,
    reverse,
    begins_zero,
):
    if begins_zero:
        states = without(states, -1 if reverse else 0)
    n_heads, n_groups = dt_cum.shape[2], scores.shape[2]
    c = Chunks(xBC, dt_cum, d_state, head_dim, n_groups, dy)
    scores = by_head(scores, n_heads)
    own = np.einsum("bchtt->bcht", scores)
    left = np.full(sums.shape, np.nan)
    if not reverse:
        weights = scores * c.strictly * c.delta[..., None, :]
        y = np.einsum("bchts,bcshp->bcthp", weights, c.x)
        if states is not None:
            y += np.einsum("bcht,bcthn,bchnp->bcthp", c.left_of_start, c.C, states)
        left[..., 0, :] = own * c.delta + D[:, None]
        t = np.arange(left.shape[1] * left.shape[-1]).reshape(-1, 1, left.shape[-1])
        left[..., 0, :][:, np.broadcast_to(t >= c.seqlen, left.shape[1:3] + t.shape[-1:])] = np.nan
        return {"out": c.rows(y), "sums": left}
    du = np.einsum("bchts,bchts,bcthp->bcshp", scores, c.strictly, c.dy)
    if states is not None:
        du += np.einsum("bcht,bcthn,bchnp->bcthp", c.left_at_end, c.B, states)
    y = into_chunks(y, dt_cum.shape[-1]).reshape(c.x.shape) * c.inside
    skip, delta, own = (np.moveaxis(v, -1, 2)[..., None] for v in (sums[..., 0, :], c.delta, own))
    rows = np.full(out.shape, np.nan)
    rows[..., : n_heads * head_dim] = c.rows(delta * du + skip * c.dy)
    terms = (c.dy * y - delta * c.x * du, c.x * (du + own * c.dy), c.x * c.dy)
    for first in range(0, head_dim, HEAD_BLOCK):
        for i, term in enumerate(terms):
            total = (term * c.inside)[..., first : first + HEAD_BLOCK].sum(-1)
            left[..., 1 + first // HEAD_BLOCK * 3 + i, :] = np.moveaxis(total, 2, -1)
    return {"out": rows, "sums": left}


def gated(y, xBC, zxbcdt, sums, eps, norm_groups):
    """y with its skip, z, y silu(z), and by group its inverse root mean square."""
    batch, seqlen, d_inner = y.shape
    x, z = xBC[..., :d_inner], zxbcdt[..., :d_inner]
    skip = from_chunks(np.moveaxis(sums[..., 0, :], -1, 2), seqlen)
    y = y + np.repeat(skip, d_inner // skip.shape[-1], -1) * x
    a = y * z * sigmoid(z)
    grouped = a.reshape(batch, seqlen, norm_groups, -1)
    inv = 1 / np.sqrt(np.mean(grouped**2, -1) + eps)
    return y, z, a, np.repeat(inv, d_inner // norm_groups, -1)


@oracle(
    case(**dims(), eps=1e-2),
    case(**PACKED, eps=1e-5),
    case(**dims(n_heads=3, norm_groups=3, head_dim=130), eps=1e-5),
)
def ssd_norm_forward(y, xBC, zxbcdt, sums, weight, eps, norm_groups):
    _, _, a, inv = gated(y, xBC, zxbcdt, sums, eps, norm_groups)
    return {"out": weight * a * inv}


@oracle(
    case(**dims(), eps=1e-2, rows_per_group=16, parts=2, stride=64),
    case(**PACKED, eps=1e-5, rows_per_group=64, parts=2, stride=64),
    case(
        **dims(n_heads=24, norm_groups=24, head_dim=12, d_state=2),
        eps=1e-5,
        rows_per_group=16,
        parts=2,
        stride=320,
    ),
    case(
        **dims(n_heads=4, n_groups=1, head_dim=275, d_state=2, seqlen=20),
        eps=1e-5,
        rows_per_group=16,
        parts=3,
        stride=1152,
    ),
    case(**PACKED, eps=1e-5, rows_per_group=16, leave_out=("weight_partials",)),
)
def ssd_norm_backward(
    y, xBC, zxbcdt, sums, weight, dout, dzxbcdt, weight_partials, eps, norm_groups, rows_per_group
):
    batch, seqlen, d_inner = y.shape
    y, z, a, inv = gated(y, xBC, zxbcdt, sums, eps, norm_groups)
    products = (weight * dout * a).reshape(batch, seqlen, norm_groups, -1)
    mean = np.repeat(products.mean(-1), d_inner // norm_groups, -1)
    da = inv * (weight * dout - a * inv**2 * mean)
    s = sigmoid(z)
    left = np.full(dzxbcdt.shape, np.nan)
    left[..., :d_inner] = da * y * s * (1 + z * (1 - s))
    result = {"dout": da * z * s, "dzxbcdt": left}
    if weight_partials is not None:
        partials = np.full(weight_partials.shape, np.nan)
        rows = (dout * a * inv).reshape(-1, d_inner)
        for p in range(len(partials)):
            partials[p, :d_inner] = rows[p * rows_per_group : (p + 1) * rows_per_group].sum(0)
        result["weight_partials"] = partials
    return result


@oracle(
    case(**dims()),
    case(**dims(planes=3, head_dim=18, n_heads=6, n_groups=1, splits=3)),
    case(**{**PACKED, "planes": 3, "splits": 2}),
    case(**dims(seqlen=160, chunk=160, head_dim=8, n_heads=2), choices=tile(128, 128, 0)),
    draw=DRAW,
)
def ssd_backward_scores(xBC, dt_cum, dy, dscores, d_state, head_dim):
    splits, n_groups, chunk = dscores.shape[0], dscores.shape[3], dscores.shape[-1]
    c = Chunks(xBC, dt_cum, d_state, head_dim, n_groups, dy)
    products = np.einsum("bcthp,bcshp->bchts", c.dy, c.x)
    terms = products * c.left * c.delta[..., None, :]
    terms = terms.reshape(*terms.shape[:2], n_groups, splits, -1, chunk, chunk).sum(4)
    return {"dscores": np.moveaxis(terms, 3, 0)}


def bc_case(base, leave_out=(), choices=None, **options):
    """In shares: all columns of a tensor of their own; else the last ones of dxBC."""
    stride, start = base["d_xBC"], base["d_inner"]
    if base["shares"] > 1:
        stride, start = 2 * base["n_groups"] * base["d_state"], 0
    options["leave_out"], options["choices"] = leave_out, choices
    return case(**base, out_stride=stride, out_start=start, **options)


@oracle(
    bc_case(dims()),
    bc_case(dims(planes=3, head_dim=18, n_heads=6, n_groups=1, splits=3, shares=3)),
    bc_case({**PACKED, "planes": 3, "splits": 2, "shares": 2}),
    bc_case(PACKED, begins_zero=True),
    bc_case(dims(), begins_zero=True, ends_zero=True),
    bc_case(dims(seqlen=40, chunk=20, d_state=140, shares=2), choices=tile(128, 128, 1)),
    bc_case(dims(seqlen=3), leave_out=("states", "dstates")),
    bc_case(dims(seqlen=12, chunk=12, shares=2), leave_out=("states", "dstates")),
    draw={
        **DRAW,
        # as ssd_backward_scores leaves them: nothing above the diagonal or past the end
        "dscores": lambda rng, shape, values: (
            rng.uniform(-1, 1, shape)
            * np.tri(shape[-1])
            * (np.arange(shape[2] * shape[-1]).reshape(-1, 1, shape[-1], 1) < values["seqlen"])
        ),
    },
)
def ssd_backward_bc(
    xBC,
    dt_cum,
    dy,
    dscores,
    states,
    dstates,
    out,
    d_state,
    head_dim,
    out_start,
    begins_zero,
    ends_zero,
):
    if begins_zero:
        states = without(states, 0)
    if ends_zero:
        dstates = without(dstates, -1)
    n_groups, shares, chunk = dscores.shape[3], len(out), dscores.shape[-1]
    c = Chunks(xBC, dt_cum, d_state, head_dim, n_groups, dy)
    dscores = dscores.sum(0)
    own_steps = 4 * -(-chunk // 4 // shares)
    result = np.full(out.shape, np.nan)
    for share in range(shares):
        at = slice(share * own_steps, (share + 1) * own_steps)
        dC = np.einsum("bcgts,bcsgn->bctgn", dscores[..., at], c.B_groups[:, :, at])
        dB = np.einsum("bcgts,bctgn->bcsgn", dscores[..., at, :], c.C_groups[:, :, at])
        if states is not None:
            for d, terms in (
                (dC, ("bcht,bcthp,bchnp->bcthn", c.left_of_start, c.dy, states)),
                (dB, ("bcht,bcthp,bchnp->bcthn", c.left_at_end * c.delta, c.x, dstates)),
            ):
                heads = np.einsum(*terms).reshape(*d.shape[:4], shares, -1, d_state)
                d += heads[:, :, :, :, share].sum(4)
        both = np.concatenate([c.rows(dB), c.rows(dC)], -1)
        result[share][..., out_start : out_start + both.shape[-1]] = both
    return {"out": result}


PARTIALS = {"parameters": 3, "parts": 6, "stride": 64, "trained": ("A_log", "D", "dt_bias")}


@oracle(
    case(**dims(shares=3), columns=24, **PARTIALS),
    case(
        **dims(planes=3, head_dim=130),
        **PARTIALS,
        limit=(0.3, 0.7),
        leave_out=("dBC", "dxBC"),
    ),
    case(**{**PACKED, "shares": 2}, columns=24, leave_out=("dots", "partials")),
    case(
        **PACKED,
        **{**PARTIALS, "parameters": 1, "parts": 3, "trained": ("D",)},
        leave_out=("dots", "dBC", "dxBC"),
    ),
    draw={"dt_cum": dt_cum_draw, "sums": uniform(-1, 1)},
)
def ssd_backward_sums(sums, dt_cum, A_log, dots, dBC, dzxbcdt, partials, dxBC, limit, trained):
    seqlen = dzxbcdt.shape[1]
    delta, A = dt_cum[..., 0, :], -np.exp(A_log)[:, None]
    blocks = sums[..., 1:, :].reshape(*sums.shape[:3], -1, 3, sums.shape[-1])
    dcum, ddelta, x_dy = np.moveaxis(blocks.sum(3), 3, 0)
    carried = 0 if dots is None else dots.sum(-1)[..., None]
    G = carried + np.cumsum(dcum[..., ::-1], -1)[..., ::-1]
    slope = -np.expm1(-delta) * (delta > limit[0]) * (delta < limit[1])
    ddt = (A * G + ddelta) * slope
    result = {"dzxbcdt": np.full(dzxbcdt.shape, np.nan)}
    result["dzxbcdt"][..., -len(A_log) :] = from_chunks(np.moveaxis(ddt, -1, 2), seqlen)
    if partials is not None:
        terms = {"A_log": A * delta * G, "D": x_dy, "dt_bias": ddt}
        result["partials"] = np.full(partials.shape, np.nan)
        for i, name in enumerate(trained):
            sums_of_part = terms[name].sum(-1).reshape(-1, len(A_log))
            result["partials"][i, :, : len(A_log)] = sums_of_part
    if dBC is not None:
        result["dxBC"] = np.full(dxBC.shape, np.nan)
        result["dxBC"][..., -dBC.shape[-1] :] = dBC.sum(0)
    return result
