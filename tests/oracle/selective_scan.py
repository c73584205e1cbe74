import numpy as np

from . import case, documents, oracle, uniform

SMALL = 1e-2  # |X| below which the quotients of phi1 and its derivative cancel in float64


def phi1(X):
    """(e^X - 1) / X."""
    small = np.abs(X) < SMALL
    safe = np.where(small, 1, X)
    return np.where(small, 1 + X / 2 + X**2 / 6 + X**3 / 24 + X**4 / 120, np.expm1(safe) / safe)


def dphi1(X):
    """(X e^X - e^X + 1) / X^2."""
    small = np.abs(X) < SMALL
    safe = np.where(small, 1, X)
    series = 1 / 2 + X / 3 + X**2 / 8 + X**3 / 30 + X**4 / 144 + X**5 / 840
    return np.where(small, series, (safe * np.exp(safe) - np.expm1(safe)) / safe**2)


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def by_channel(vectors):
    """(..., groups, d_inner, 4) -> (..., d_inner, 4 groups)."""
    return np.moveaxis(vectors, -3, -2).reshape(*vectors.shape[:-3], vectors.shape[-2], -1)


def by_group(states):
    """(..., d_inner, 4 groups) -> (..., groups, d_inner, 4)."""
    return np.moveaxis(states.reshape(*states.shape[:-1], -1, 4), -3, -2)


class Steps:
    """The operands of all steps, each indexed by t, with the states padded to 4 groups."""

    def __init__(self, u, delta, x_dbl, AD, dt_rank, d_state, resets, discretization="euler"):
        groups = len(AD) // 2
        self.u, self.delta = np.moveaxis(u, 1, 0), np.moveaxis(delta, 1, 0)
        B, C = np.split(x_dbl[..., dt_rank:], 2, -1)
        pad = [(0, 0), (0, 0), (0, 4 * groups - d_state)]
        self.B, self.C = (np.moveaxis(np.pad(v, pad), 1, 0)[:, :, None, :] for v in (B, C))
        self.A, self.derivative = by_channel(AD[:groups]), by_channel(AD[groups:-1])
        self.D = AD[-1, :, 0]
        self.zoh = discretization == "zoh"
        # whether each step goes on with the state before it
        self.goes_on = self.delta >= 0 if resets else np.ones(self.delta.shape, bool)
        self.delta = np.abs(self.delta) if resets else self.delta

    def sums(self, steps):
        """The sum of delta over these steps; -1 where a document begins in them."""
        return np.where(self.goes_on[steps].all(0), self.delta[steps].sum(0), -1)

    def exponent(self, t):
        return self.delta[t][..., None] * self.A

    def weight(self, t):
        return self.delta[t][..., None] * (phi1(self.exponent(t)) if self.zoh else 1)

    def decay(self, t):
        return np.exp(self.exponent(t)) * self.goes_on[t][..., None]

    def next(self, h, t):
        return self.decay(t) * h + self.weight(t) * self.u[t][..., None] * self.B[t]


def ad_draw(rng, shape, values):
    AD = rng.uniform(-2, -0.05, shape)
    AD[-1] = rng.uniform(-1, 1, shape[1:])
    return AD


def delta_draw(rng, shape, values):
    delta = rng.uniform(0.01, 1, shape)
    if values.get("resets"):
        delta[documents(rng, shape[:2], values) % 2 == 1] *= -1
    return delta


def sums_draw(rng, shape, values):
    sums = rng.uniform(0.01, 1, shape)
    if values.get("resets"):
        sums[rng.random(shape) < 0.5] = -1
    return sums


DRAW = {"delta": delta_draw, "AD": ad_draw}


def dims(batch=2, seqlen=9, d_inner=5, d_state=3, dt_rank=2, chunk=4, per_segment=None, **more):
    """Values of a case, the derived ones filled in."""
    groups, chunks = -(-d_state // 4), -(-seqlen // chunk)
    per_segment = per_segment or chunks
    segments = -(-chunks // per_segment)
    channels = more.pop("channels", max(1, 128 // groups))
    blocks = -(-d_inner // channels)
    n_partials = more.get("carried", 0) + 8 * groups * batch * seqlen * blocks
    n_partials += 4 * batch * segments * (groups + 1) * d_inner
    return {
        "batch": batch,
        "seqlen": seqlen,
        "d_inner": d_inner,
        "d_state": d_state,
        "dt_rank": dt_rank,
        "chunk": chunk,
        "per_segment": per_segment,
        "segments": segments,
        "chunks": chunks,
        "slots": chunks,
        "groups": groups,
        "channels": channels,
        "blocks": blocks,
        "n_partials": n_partials,
        "planes": 2 * groups + 1,
        "quad": 4,
        "plane": -(-batch * seqlen * d_inner // 64) * 64,
        "two": 2,
        "d_xz": 2 * d_inner,
        "d_x_dbl": dt_rank + 2 * d_state,
        **more,
    }


def without(values, *names):
    return {k: v for k, v in values.items() if k not in names}


@oracle(
    case(batch=3, seqlen=7, d_inner=5),
    case(batch=2, seqlen=40, d_inner=64),
    draw={"delta": uniform(0, 1), "documents": documents},
)
def scan_reset(documents, delta):
    first = np.diff(documents, axis=1, prepend=0) != 0
    return {"delta": np.where(first[..., None], -np.maximum(delta, 1e-30), delta)}


@oracle(
    case(**without(dims(d_state=6), "n_partials")),
    case(**dims(d_inner=70, d_state=4), clamp=(-0.5, 0.25)),
)
def scan_prepare(A_log, D, clamp):
    d_state = A_log.shape[1]
    groups = -(-d_state // 4)
    A = -np.exp(np.clip(A_log, *clamp) if clamp else A_log)
    inside = (A_log > clamp[0]) & (A_log < clamp[1]) if clamp else True
    pad = [(0, 0), (0, 4 * groups - d_state)]
    skip = np.pad(D[None, :, None], [(0, 0), (0, 0), (0, 3)])
    padded = np.pad(A, pad, constant_values=-1), np.pad(np.where(inside, A, 0), pad)
    return {"AD": np.concatenate([*map(by_group, padded), skip])}


@oracle(
    case(**dims(per_segment=1)),
    case(**dims(seqlen=40, d_inner=33, d_state=16, dt_rank=4, chunk=8, per_segment=2)),
    case(**dims(seqlen=40, d_inner=33, d_state=16, per_segment=4), discretization="zoh"),
    case(**dims(seqlen=40, d_inner=33, d_state=16, per_segment=4), resets=True),
    case(**dims(seqlen=16, d_inner=8, d_state=8, per_segment=2), half=("u",)),
    draw=DRAW,
)
def scan_local(
    u,
    delta,
    x_dbl,
    AD,
    dt_rank,
    d_state,
    chunk,
    per_segment,
    segments,
    chunks,
    resets,
    discretization,
):
    s = Steps(u, delta, x_dbl, AD, dt_rank, d_state, resets, discretization)
    _, batch, d_inner = s.u.shape
    states = np.full((batch, chunks, len(AD) // 2, d_inner, 4), np.nan)
    sums = np.full((batch, segments, d_inner), np.nan)
    for segment in range(segments - 1):
        steps = range(segment * per_segment * chunk, (segment + 1) * per_segment * chunk)
        h = 0
        for t in steps:
            h = s.next(h, t)
        states[:, segment * per_segment] = by_group(h)
        sums[:, segment] = s.sums(steps)
    return {"chunk_states": states, "delta_sums": sums}


COMBINE = dims(seqlen=20, d_state=6, chunk=2, per_segment=3)


@oracle(
    case(("state",), **COMBINE),
    case(**COMBINE),
    case(("state",), **{**COMBINE, "slots": COMBINE["segments"], "per_segment": 1}, reverse=True),
    case(**COMBINE, resets=True),
    case(("delta_sums",), **{**COMBINE, "per_segment": 1, "segments": 1}),
    draw={"AD": ad_draw, "delta_sums": sums_draw},
)
def scan_combine(AD, delta_sums, state, states, segments, per_segment, reverse, resets):
    A = AD[: len(AD) // 2]
    out = np.full_like(states, np.nan)
    carry = 0 if state is None else state
    for k in reversed(range(segments)) if reverse else range(segments):
        slot = k * per_segment
        out[:, slot] = carry
        if segments == 1:
            break
        sums = delta_sums[:, k][:, None, :, None]
        carry = np.exp(A * np.abs(sums)) * carry * (sums >= 0) + states[:, slot]
    return {"states": out}


@oracle(
    case(("state",), **dims(), outputs=2),
    case(("state", "chunk_states"), **dims(seqlen=1, d_inner=33, d_state=17, chunk=1), outputs=1),
    case(
        ("chunk_states",),
        **dims(seqlen=7, d_inner=130, d_state=4, dt_rank=4, chunk=8),
        outputs=1,
    ),
    case(
        (),
        outputs=2,
        **dims(seqlen=16, d_inner=32, d_state=16, dt_rank=4, chunk=8),
        discretization="zoh",
    ),
    case(
        (),
        **dims(seqlen=20, d_inner=40, d_state=12, chunk=2, per_segment=3),
        outputs=2,
        started=True,
    ),
    case((), **dims(seqlen=9, d_inner=16, d_state=8, chunk=4), outputs=2, started=True),
    case((), **dims(batch=1, seqlen=8, d_inner=2, d_state=1024, chunk=8), outputs=2),
    case((), **dims(seqlen=18, d_inner=33, d_state=7, chunk=4), outputs=2, resets=True),
    case((), **dims(seqlen=20, d_inner=16, d_state=16, chunk=4), outputs=2, resets=True),
    case(("state",), **dims(), outputs=2, half=("u", "xz", "gy")),
    case(
        ("state",),
        **dims(seqlen=16, d_inner=32, d_state=16, dt_rank=4, chunk=8),
        outputs=2,
        half=("u", "xz", "gy"),
    ),
    draw=DRAW,
)
def scan_forward(
    u,
    delta,
    x_dbl,
    AD,
    xz,
    chunk_states,
    gy,
    state,
    dt_rank,
    d_state,
    chunk,
    per_segment,
    segments,
    resets,
    started,
    discretization,
):
    s = Steps(u, delta, x_dbl, AD, dt_rank, d_state, resets, discretization)
    seqlen, batch, d_inner = s.u.shape
    h = np.zeros((batch, d_inner, s.A.shape[1])) if state is None else by_channel(state)
    starts, y = [], np.empty((batch, seqlen, d_inner))
    for t in range(seqlen):
        if started and t % (chunk * per_segment) == 0:
            h = by_channel(chunk_states[:, t // chunk])
        if t % chunk == 0:
            starts.append(by_group(h))
        h = s.next(h, t)
        y[:, t] = (s.C[t] * h).sum(-1) + s.D * s.u[t]
    z = xz[..., d_inner:]
    out = {"gy": np.full(gy.shape, np.nan)}
    for plane, value in zip(out["gy"], (y * z * sigmoid(z), y), strict=False):
        plane[: y.size] = value.ravel()
    if chunk_states is not None:
        out["chunk_states"] = np.stack(starts, 1)
    if state is not None:
        out["state"] = by_group(h)
    return out


@oracle(
    case(**dims()),
    case(**dims(d_inner=64)),
    *(case(**dims(d_inner=d), half=("xz", "y", "dg", "dxz")) for d in (5, 64)),
    draw={"xz": uniform(-20, 20)},
)
def scan_backward_gate(xz, y, dg):
    z = xz[..., y.shape[-1] :]
    s = sigmoid(z)
    dz = dg * y * s * (1 + z * (1 - s))
    return {"dg": dg * z * s, "dxz": np.concatenate([np.full_like(dz, np.nan), dz], -1)}


@oracle(
    case(**dims(per_segment=1)),
    case(**dims(seqlen=40, d_inner=33, d_state=16, dt_rank=4, chunk=8, per_segment=2)),
    case(**dims(seqlen=38, d_inner=33, d_state=16, chunk=8, per_segment=2), resets=True),
    case(**dims(seqlen=16, d_inner=8, d_state=8, per_segment=2), half=("dy",)),
    draw=DRAW,
)
def scan_backward_local(
    delta, x_dbl, AD, dy, dt_rank, d_state, chunk, per_segment, segments, resets
):
    s = Steps(delta, delta, x_dbl, AD, dt_rank, d_state, resets)  # u plays no part
    seqlen, batch, d_inner = s.u.shape
    carry = np.full((batch, segments, len(AD) // 2, d_inner, 4), np.nan)
    sums = np.full((batch, segments, d_inner), np.nan)
    for segment in range(1, segments):
        first = segment * per_segment * chunk
        steps = range(first, min(first + per_segment * chunk, seqlen))
        e = 0
        for t in reversed(steps):
            e = s.decay(t) * (s.C[t] * dy[:, t, :, None] + e)
        carry[:, segment] = by_group(e)
        sums[:, segment] = s.sums(steps)
    return {"carry": carry, "delta_sums": sums}


@oracle(
    case(**dims()),
    case(**dims(seqlen=20, d_inner=40, d_state=12, chunk=2, per_segment=3, carried=4 * 960)),
    case(**dims(seqlen=32, d_inner=64, d_state=16, dt_rank=4, chunk=16)),
    case(
        **dims(seqlen=21, d_inner=40, d_state=10, chunk=4, per_segment=3, carried=4 * 480 + 64),
        discretization="zoh",
    ),
    case(**dims(batch=1, seqlen=5, d_inner=3, d_state=1001, chunk=8)),
    case(**dims(seqlen=22, d_inner=16, d_state=16, chunk=8, channels=16), resets=True),
    case(**dims(seqlen=22, d_inner=9, d_state=6, chunk=8), resets=True, discretization="zoh"),
    case(**dims(), half=("u", "dy")),
    case(**dims(seqlen=32, d_inner=64, d_state=16, dt_rank=4, chunk=16), half=("u", "dy")),
    case(**dims(seqlen=21, d_inner=16, d_state=6, chunk=4, channels=16, carried=256), leaves=True),
    case(
        **dims(seqlen=20, d_inner=40, d_state=12, chunk=2, per_segment=3, carried=4 * 960),
        leaves=True,
    ),
    draw=DRAW,
)
def scan_backward(
    u,
    delta,
    x_dbl,
    AD,
    dy,
    chunk_states,
    du_ddt,
    partials,
    dt_rank,
    d_state,
    chunk,
    per_segment,
    segments,
    channels,
    carried,
    leaves,
    resets,
    discretization,
):
    s = Steps(u, delta, x_dbl, AD, dt_rank, d_state, resets, discretization)
    seqlen, batch, d_inner = s.u.shape
    h, states = 0, []
    for t in range(seqlen):
        if t % chunk == 0:
            h = by_channel(chunk_states[:, t // chunk])
        states.append(h)
        h = s.next(h, t)
    du, ddt = (np.empty((batch, seqlen, d_inner)) for _ in range(2))
    carry = None
    if carried:
        shape = (batch, segments, len(AD) // 2, d_inner, 4)
        carry = partials[: np.prod(shape)].reshape(shape)
    blocks = [slice(c, c + channels) for c in range(0, d_inner, channels)]
    dBC = np.empty((batch, seqlen, len(blocks), 2, s.A.shape[1]))
    dA = np.zeros((batch, segments, *s.A.shape))
    dD = np.zeros((batch, segments, d_inner))
    e = 0
    for t in reversed(range(seqlen)):
        segment = t // (chunk * per_segment)
        if carry is not None and (t == seqlen - 1 or (t + 1) % (chunk * per_segment) == 0):
            e = by_channel(carry[:, segment])
        u_t, delta_t, dy_t = s.u[t][..., None], s.delta[t][..., None], dy[:, t, :, None]
        exp, a, w = np.exp(s.exponent(t)), s.decay(t), s.weight(t)
        G = s.C[t] * dy_t + e
        P = G * a * states[t]
        GBu = G * s.B[t] * u_t
        e = a * G
        du[:, t] = (G * w * s.B[t]).sum(-1) + s.D * dy[:, t]
        ddelta = (P * s.A + GBu * (exp if s.zoh else 1)).sum(-1)
        ddt[:, t] = ddelta * -np.expm1(-s.delta[t])
        dw_dA = delta_t**2 * dphi1(s.exponent(t)) if s.zoh else 0
        dA[:, segment] += (P * delta_t + GBu * dw_dA) * s.derivative
        dD[:, segment] += dy[:, t] * s.u[t]
        for i, block in enumerate(blocks):
            dBC[:, t, i, 0] = (G * w * u_t)[:, block].sum(1)
            dBC[:, t, i, 1] = (dy_t * s.next(states[t], t))[:, block].sum(1)
    skip = np.pad(dD[:, :, None, :, None], [(0, 0)] * 4 + [(0, 3)])
    parameters = np.concatenate([by_group(dA), skip], 2)
    planes = np.full(du_ddt.shape, np.nan)
    planes[0, : du.size], planes[1, : du.size] = du.ravel(), ddt.ravel()
    kept = np.full(carried, np.nan)
    if leaves:
        kept[: carry.size].reshape(carry.shape)[:, 0] = by_group(e)
    return {
        "du_ddt": planes,
        "partials": np.concatenate([kept, dBC.ravel(), parameters.ravel()]),
    }


SUMS = dims(seqlen=5, d_inner=7, d_state=6, channels=3, per_segment=1)
LEFT = dims(seqlen=5, d_inner=7, d_state=6, channels=3, per_segment=1, carried=256)
WIDE = dims(seqlen=9, d_inner=16, d_state=8, dt_rank=4, channels=8, per_segment=2, carried=512)


@oracle(
    case(("dstate",), **SUMS),
    case(("dA_log", "dstate"), **SUMS),
    case(
        ("dA_log", "dD", "dstate"),
        **dims(seqlen=5, d_inner=16, d_state=8, dt_rank=4, channels=8),
    ),
    case(**LEFT, n_state=2 * 2 * 7 * 4),
    case(**WIDE, n_state=2 * 2 * 16 * 4),
)
def scan_backward_sums(
    partials,
    dA_log,
    dD,
    dstate,
    batch,
    seqlen,
    dt_rank,
    d_state,
    d_inner,
    blocks,
    segments,
    carried,
):
    groups = -(-d_state // 4)
    carry, partials = partials[:carried], partials[carried:]
    count = batch * seqlen * blocks * 8 * groups
    dBC = partials[:count].reshape(batch, seqlen, blocks, 2, 4 * groups).sum(2)
    parameters = partials[count:].reshape(batch * segments, groups + 1, d_inner, 4).sum(0)
    dx_dbl = np.zeros((batch, seqlen, dt_rank + 2 * d_state))
    dx_dbl[..., dt_rank:] = dBC[..., :d_state].reshape(batch, seqlen, 2 * d_state)
    out = {"dx_dbl": dx_dbl}
    if dstate is not None:
        shape = (batch, segments, dstate.size // batch)
        out["dstate"] = carry[: np.prod(shape)].reshape(shape)[:, 0]
    if dA_log is not None:
        out["dA_log"] = by_channel(parameters[:-1])[:, :d_state]
    if dD is not None:
        out["dD"] = parameters[-1, :, 0]
    return out
