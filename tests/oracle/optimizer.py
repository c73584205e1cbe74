import math

import numpy as np

from . import case, oracle

LR, MIN_LR, WARMUP, TOTAL, SCHEDULE, LN1, LN2, OMB1, OMB2, EPS, DECAY, MAX_NORM, MAX_DELTA = range(
    13
)


def hyper(
    lr=1e-3,
    min_lr=1e-4,
    warmup=10,
    total=100,
    schedule=0,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    decay=0.01,
    max_norm=1.0,
    max_delta=0.0,
):
    """What the host writes, for both the tests and the draws here."""
    return np.array(
        [
            lr,
            min_lr,
            warmup,
            total,
            schedule,
            math.log(beta1),
            math.log(beta2),
            1 - beta1,
            1 - beta2,
            eps,
            decay,
            max_norm,
            max_delta,
        ]
    )


def magnitudes(rng, shape, values):
    """Values of all sizes that float32 holds, zeros among them."""
    size = np.exp2(rng.uniform(-100, 100, shape) * rng.integers(0, 2, shape))
    return np.sign(rng.uniform(-1, 0.9, shape)) * size * rng.integers(0, 2, shape)


def not_finite(rng, shape, values):
    """A few infinities and NaNs."""
    array = rng.uniform(-1, 1, shape)
    at = rng.integers(0, array.size, 9)
    array[at] = rng.choice([np.inf, -np.inf, np.nan], 9)
    return array


@oracle(
    case(n=5 * 1024, total_blocks=5, four=4, first_block=0),
    case(n=40 * 1024, total_blocks=50, four=4, first_block=7),
    draw={"grads": magnitudes},
)
def grad_norm_blocks(grads, total_blocks, first_block):
    g = grads.reshape(-1, 1024)
    finite = np.isfinite(g)
    g = np.where(finite, g, 0)
    large, small = np.abs(g) > 2.0**40, np.abs(g) < 2.0**-40
    sums = np.full((total_blocks, 4), np.nan)
    sums[first_block : first_block + len(g)] = np.stack(
        [
            (np.square(g * 2.0**-80) * large).sum(1),
            (np.square(g) * ~(large | small)).sum(1),
            (np.square(g * 2.0**80) * small).sum(1),
            ~finite.all(1),
        ],
        1,
    )
    return {"block_sums": sums}


BLOCK_SUMS = {  # highest values of the first three columns, by kind of case
    "small": (0, 0, 1),
    "middle": (0, 1, 1),
    "large": (1e-9, 1e30, 1),
    "too large": (1e30, 1e30, 1),
    "not finite": (1e-9, 1, 1),
}


def block_sums(rng, shape, values):
    sums = rng.uniform(0, 1, shape) * [*BLOCK_SUMS[values["sums"]], 0]
    if values["sums"] == "not finite":
        sums[-1, 3] = 1
    return sums


def learning_rate(t, h):
    if t <= h[WARMUP]:
        return h[LR] * t / h[WARMUP]
    progress = min((t - h[WARMUP]) / max(h[TOTAL] - h[WARMUP], 1), 1)
    if h[SCHEDULE] == 1:
        return h[LR] + (h[MIN_LR] - h[LR]) * progress
    if h[SCHEDULE] == 2:
        return h[MIN_LR] + (h[LR] - h[MIN_LR]) * (1 + math.cos(math.pi * progress)) / 2
    return h[LR]


def control_case(sums, total_blocks=37, steps=4, calls=9, loss_scale=None, **of):
    dims = {"four": 4, "n_hyper": 13, "one": 1, "n_state": 4, "n_control": 5, "fields": 5}
    if loss_scale:
        dims |= {"n_scale": 3, "scale": loss_scale}
    return case(
        () if loss_scale else ("loss_scale",),
        sums=sums,
        total_blocks=total_blocks,
        steps=steps,
        calls=calls,
        capacity=8,
        of=of,
        **dims,
    )


@oracle(
    control_case("middle", warmup=0),
    control_case("large", total_blocks=5000, schedule=1, steps=54),
    control_case("small", schedule=2, steps=30, max_norm=0),
    control_case("too large", total_blocks=1),
    control_case("not finite"),
    control_case("large", loss_scale=(65536, 41, 3)),
    control_case("small", loss_scale=(1024, 199, 0), max_norm=0),
    control_case("middle", loss_scale=(2**24, 199, 0)),
    control_case("not finite", loss_scale=(2, 199, 3)),
    control_case("not finite", loss_scale=(1, 0, 3)),
    draw={
        "loss_scale": lambda rng, shape, values: np.array(values["scale"]),
        "block_sums": block_sums,
        "hyper": lambda rng, shape, values: hyper(**values["of"]),
        "state": lambda rng, shape, values: np.array([values["steps"], values["calls"], 2, 5]),
    },
)
def step_control(block_sums, hyper, loss, state, control, log, loss_scale):
    large, middle, small, broken = block_sums.sum(0)
    norm = math.sqrt(large * 2.0**160 + middle + small * 2.0**-160)
    skip = broken > 0 or norm >= 2.0**127
    factor, clean, overflows = (1, 0, 0) if loss_scale is None else loss_scale
    norm = min(norm, 2.0**127) / factor
    steps, calls, in_a_row, skipped = (int(s) for s in state)
    t = steps + 1
    lr = learning_rate(t, hyper)
    scale = min(1, hyper[MAX_NORM] / norm) if hyper[MAX_NORM] > 0 else 1
    rows = np.full(log.shape, np.nan)
    rows[calls % len(log)] = [loss[0], norm, lr, skip, factor]
    found = {
        "control": np.array(
            [scale / factor, lr, -math.expm1(t * hyper[LN1]), -math.expm1(t * hyper[LN2]), skip]
        ),
        "state": np.array(
            [steps, calls + 1, in_a_row + 1, skipped + 1] if skip else [t, calls + 1, 0, skipped]
        ),
        "log": rows,
    }
    if loss_scale is None:
        return found
    if skip:
        after = [max(factor / 2, 1), 0, overflows + 1]
    elif clean == 199:
        after = [min(2 * factor, 2**24), 0, overflows]
    else:
        after = [factor, clean + 1, overflows]
    return found | {"loss_scale": np.array(after)}


def adamw_case(n, skip=0, **of):
    return case(n=n, n_blocks=n // 1024, n_control=5, n_hyper=13, skip=skip, of=of)


@oracle(
    adamw_case(5 * 1024),
    adamw_case(3 * 1024, decay=0.1, max_delta=0.03),
    adamw_case(1024, skip=1),
    draw={
        "grads": not_finite,
        "control": lambda rng, shape, values: np.array(
            [0.25, 0.1, 1 - 0.9**4, 1 - 0.999**4, values["skip"]]
        ),
        "hyper": lambda rng, shape, values: hyper(**values["of"]),
        "decay": lambda rng, shape, values: rng.integers(0, 2, shape),
        "v": lambda rng, shape, values: rng.uniform(0, 1, shape),
    },
)
def adamw(grads, control, hyper, decay, params, m, v):
    scale, lr, correction1, correction2, skip = control
    if skip:
        untouched = np.full(grads.shape, np.nan)
        return {"params": untouched, "m": untouched, "v": untouched}
    ok = np.isfinite(grads)
    g = np.where(ok, grads, 0) * scale
    new_m = m + hyper[OMB1] * (g - m)
    new_v = v + hyper[OMB2] * (g * g - v)
    step = lr * (new_m / correction1) / (np.sqrt(new_v / correction2) + hyper[EPS])
    if hyper[MAX_DELTA] > 0:
        step = np.clip(step, -hyper[MAX_DELTA], hyper[MAX_DELTA])
    shrink = lr * hyper[DECAY] * np.repeat(decay, 1024)
    new_params = params * (1 - shrink) - step
    return {
        "params": np.where(ok, new_params, np.nan),
        "m": np.where(ok, new_m, np.nan),
        "v": np.where(ok, new_v, np.nan),
    }
