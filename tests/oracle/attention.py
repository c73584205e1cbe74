import math

import numpy as np

from wgsl_train.ops.attention import staged

from . import case, oracle


def draw_documents(rng, shape, values):
    """Ids that do not decrease along a row, with gaps."""
    return np.sort(rng.integers(0, 6, shape), -1) * 3


def draw_position(rng, shape, values):
    """Rows of the cache with different numbers of keys, and documents that begin in them.

    more   keys more than the capacity leaves room for
    """
    room = values.get("capacity", 2 * values["seqlen"]) - values["seqlen"]
    keys = rng.integers(0, room + 1, shape[0])
    return np.stack([rng.integers(0, keys + 1), keys + values.get("more", 0)], -1)


def split_heads(qkv, n_heads, n_kv_heads):
    """q, k, v (batch, heads, seqlen, head_dim); those of k and v repeated for their groups."""
    batch, seqlen, _ = qkv.shape
    heads = qkv.reshape(batch, seqlen, n_heads + 2 * n_kv_heads, -1).transpose(0, 2, 1, 3)
    q, k, v = np.split(heads, [n_heads, n_heads + n_kv_heads], 1)
    return q, *(np.repeat(x, n_heads // n_kv_heads, 1) for x in (k, v))


def join_heads(x):
    """(batch, heads, seqlen, head_dim) as columns: (batch, seqlen, heads * head_dim)."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def first_keys(batch, seqlen, documents, position):
    """(batch, seqlen): the first key that each timestep sees; and (batch,): keys before them."""
    start, before = np.zeros((2, batch), int) if position is None else position.T.astype(int)
    first = np.repeat(start[:, None], seqlen, 1)
    if documents is not None:
        for b, t in np.ndindex(batch, seqlen):
            own = np.flatnonzero(documents[b] == documents[b, t])[0]
            if own > 0:
                first[b, t] = before[b] + own
    return first, before


def attend(q, k, v, first, before, scale):
    """Softmax attention, and the log of the sum of exponentials, one row after another."""
    out, lse = np.zeros_like(q), np.zeros(q.shape[:3])
    for b, h, t in np.ndindex(q.shape[:3]):
        seen = slice(first[b, t], before[b] + t + 1)
        products = scale * k[b, h, seen] @ q[b, h, t]
        most = products.max()
        weights = np.exp(products - most)
        out[b, h, t] = weights @ v[b, h, seen] / weights.sum()
        lse[b, h, t] = most + math.log(weights.sum())
    return out, lse


def with_cache(qkv, cache, n_heads, n_kv_heads):
    batch, capacity, columns = cache.shape
    queries = np.zeros((batch, capacity, columns // (2 * n_kv_heads) * n_heads))
    return split_heads(np.concatenate([queries, cache], -1), n_heads, n_kv_heads)[1:]


@oracle(
    case(batch=2, seqlen=33, d_qkv=9 * 5, d_out=15, n_heads=3, n_kv_heads=3, scale=0.7,
         leave_out=("documents", "cache", "position")),
    case(batch=1, seqlen=1, d_qkv=3, d_out=1, n_heads=1, n_kv_heads=1, scale=1.0,
         leave_out=("documents", "cache", "position")),
    case(batch=1, seqlen=130, d_qkv=4 * 64, d_out=128, n_heads=2, n_kv_heads=1, scale=0.125,
         leave_out=("documents", "cache", "position")),
    case(batch=1, seqlen=130, d_qkv=4 * 64, d_out=128, n_heads=2, n_kv_heads=1, scale=0.125,
         leave_out=("cache", "position"), choices=staged(64, 16, 8, 4, 8, 32, 16, 2)),
    case(batch=2, seqlen=65, d_qkv=8 * 8, d_out=32, n_heads=4, n_kv_heads=2, scale=-0.3,
         leave_out=("cache", "position")),
    case(batch=1, seqlen=5, d_qkv=3 * 20, d_out=20, n_heads=1, n_kv_heads=1, scale=0.2,
         leave_out=("cache", "position", "lse")),
    case(batch=2, seqlen=40, d_qkv=4 * 20, d_out=40, n_heads=2, n_kv_heads=1, scale=0.2,
         capacity=100, d_cache=40, two=2, leave_out=("lse",)),
    case(batch=2, seqlen=20, d_qkv=9, d_out=3, n_heads=3, n_kv_heads=3, scale=0.2,
         capacity=90, d_cache=6, two=2, leave_out=("lse", "documents")),
    draw={"documents": draw_documents, "position": draw_position},
)  # fmt: skip
def attention_forward(qkv, documents, cache, position, n_heads, n_kv_heads, scale):
    q, k, v = split_heads(qkv, n_heads, n_kv_heads)
    if cache is not None:
        k, v = with_cache(qkv, cache, n_heads, n_kv_heads)
    first, before = first_keys(*qkv.shape[:2], documents, position)
    out, lse = attend(q, k, v, first, before, scale)
    return {"out": join_heads(out), "lse": lse}


@oracle(
    case(batch=1, seqlen=1, d_qkv=4 * 5, d_out=10, n_heads=2, n_kv_heads=1, scale=0.3,
         capacity=40, d_cache=10, two=2),
    case(batch=3, seqlen=3, d_qkv=6 * 8, d_out=32, n_heads=4, n_kv_heads=1, scale=0.3,
         capacity=200, d_cache=16, two=2),
    case(batch=1, seqlen=2, d_qkv=3 * 64, d_out=64, n_heads=1, n_kv_heads=1, scale=0.3,
         capacity=70, d_cache=128, two=2, leave_out=("documents",)),
    case(batch=1, seqlen=1, d_qkv=3 * 260, d_out=260, n_heads=1, n_kv_heads=1, scale=0.1,
         capacity=70, d_cache=520, two=2, leave_out=("documents",)),
    draw={"documents": draw_documents, "position": draw_position},
)  # fmt: skip
def attention_decode(qkv, cache, position, documents, n_heads, n_kv_heads, scale):
    out = attention_forward(qkv, documents, cache, position, n_heads, n_kv_heads, scale)["out"]
    return {"out": out}


@oracle(
    case(batch=2, seqlen=33, d_out=15, n_heads=3),
    case(batch=1, seqlen=5, d_out=16, n_heads=2),
)
def attention_backward_delta(dout, out, n_heads):
    products = (dout * out).reshape(*out.shape[:2], n_heads, -1)
    return {"delta": products.sum(-1).transpose(0, 2, 1)}


def gradients(qkv, dout, lse, delta, documents, n_heads, n_kv_heads, scale):
    """dq, dk, dv: (batch, seqlen, heads, head_dim)."""
    q, k, v = split_heads(qkv, n_heads, n_kv_heads)
    dout = dout.reshape(*dout.shape[:2], n_heads, -1).transpose(0, 2, 1, 3)
    seqlen = q.shape[2]
    first, _ = first_keys(q.shape[0], seqlen, documents, None)
    steps = np.arange(seqlen)
    seen = (steps <= steps[:, None]) & (steps >= first[:, None, :, None])
    p = np.where(
        seen, np.exp(np.where(seen, scale * q @ k.swapaxes(-1, -2), 0) - lse[..., None]), 0
    )
    ds = scale * p * (dout @ v.swapaxes(-1, -2) - delta[..., None])

    def by_group(x):
        batch, _, seqlen, head_dim = x.shape
        return x.reshape(batch, n_kv_heads, -1, seqlen, head_dim).sum(2)

    return ds @ k, by_group(ds.swapaxes(-1, -2) @ q), by_group(p.swapaxes(-1, -2) @ dout)


BACKWARD_CASES = (
    case(batch=2, seqlen=33, d_qkv=9 * 5, d_out=15, n_heads=3, n_kv_heads=3, scale=0.7,
         leave_out=("documents",)),
    case(batch=1, seqlen=1, d_qkv=3, d_out=1, n_heads=1, n_kv_heads=1, scale=1.0,
         leave_out=("documents",)),
    case(batch=1, seqlen=130, d_qkv=4 * 64, d_out=128, n_heads=2, n_kv_heads=1, scale=0.125,
         leave_out=("documents",)),
    case(batch=1, seqlen=130, d_qkv=4 * 64, d_out=128, n_heads=2, n_kv_heads=1, scale=0.125,
         choices=staged(64, 8, 16, 8, 4, 16, 32, 2)),
    case(batch=2, seqlen=65, d_qkv=8 * 8, d_out=32, n_heads=4, n_kv_heads=2, scale=-0.3),
    case(batch=1, seqlen=5, d_qkv=3 * 20, d_out=20, n_heads=1, n_kv_heads=1, scale=0.2),
)  # fmt: skip
BACKWARD_DRAW = {
    "documents": draw_documents,
    "lse": lambda rng, shape, values: rng.uniform(2, 3, shape),
}


@oracle(*BACKWARD_CASES, draw=BACKWARD_DRAW)
def attention_backward_q(qkv, dout, lse, delta, documents, n_heads, n_kv_heads, scale):
    dq, dk, dv = gradients(qkv, dout, lse, delta, documents, n_heads, n_kv_heads, scale)
    rest = np.full_like(np.concatenate([dk, dv], 1), np.nan)
    return {"dqkv": join_heads(np.concatenate([dq, rest], 1))}


@oracle(*BACKWARD_CASES, draw=BACKWARD_DRAW)
def attention_backward_kv(qkv, dout, lse, delta, documents, n_heads, n_kv_heads, scale):
    dq, dk, dv = gradients(qkv, dout, lse, delta, documents, n_heads, n_kv_heads, scale)
    return {"dqkv": join_heads(np.concatenate([np.full_like(dq, np.nan), dk, dv], 1))}


@oracle(
    case(batch=2, seqlen=5, d_qkv=8 * 9, heads=7, head_dim=8, rotary_dim=8, theta=10000.0,
         leave_out=("documents", "position")),
    case(batch=2, seqlen=7, d_qkv=4 * 10, heads=3, head_dim=10, rotary_dim=6, theta=500.0, two=2),
    case(batch=1, seqlen=9, d_qkv=3 * 12, heads=2, head_dim=12, rotary_dim=8, theta=1e6,
         reverse=True, leave_out=("position",)),
    case(batch=1, seqlen=3, d_qkv=3 * 64, heads=2, head_dim=64, rotary_dim=64, theta=10000.0,
         more=1_000_000, two=2, leave_out=("documents",)),
    draw={
        "documents": draw_documents,
        "position": draw_position,
    },
    rtol=2e-6,
)  # fmt: skip
def rotary(qkv, documents, position, heads, head_dim, rotary_dim, theta, reverse):
    batch, seqlen, _ = qkv.shape
    first, before = first_keys(batch, seqlen, documents, position)
    place = before[:, None] + np.arange(seqlen) - first
    half = rotary_dim // 2
    angle = place[..., None, None] * theta ** (-np.arange(half) / half) * (-1 if reverse else 1)
    result = qkv.reshape(batch, seqlen, -1, head_dim).copy()
    x, y = result[:, :, :heads, :half].copy(), result[:, :, :heads, half:rotary_dim].copy()
    result[:, :, :heads, :half] = x * np.cos(angle) - y * np.sin(angle)
    result[:, :, :heads, half:rotary_dim] = y * np.cos(angle) + x * np.sin(angle)
    return {"qkv": result.reshape(qkv.shape)}


@oracle(
    case(batch=2, seqlen=3, d_qkv=20, capacity=9, d_cache=12, two=2),
    case(batch=1, seqlen=4, d_qkv=9, capacity=9, d_cache=6, two=2),
    case(batch=1, seqlen=4, d_qkv=9, capacity=9, d_cache=6, two=2, more=3),
    draw={
        "position": draw_position,
    },
)
def attention_append(qkv, position, cache):
    result = np.full(cache.shape, np.nan)
    for b, (_, keys) in enumerate(position.astype(int)):
        new = qkv[b, :, qkv.shape[-1] - cache.shape[-1] :]
        kept = result[b, keys : keys + len(new)]
        kept[:] = new[: len(kept)]
    return {"cache": result}


@oracle(
    case(batch=5, seqlen=7, two=2, steps=7),
    case(batch=2, two=2, steps=3, seqlen=3, leave_out=("documents",)),
    draw={"documents": draw_documents, "position": draw_position},
)
def attention_advance(documents, position, steps):
    start, keys = position.astype(int).T.copy()
    if documents is not None:
        for b, ids in enumerate(documents):
            own = np.flatnonzero(ids == ids[-1])[0]
            if own > 0:
                start[b] = keys[b] + own
    return {"position": np.stack([start, keys + steps], -1)}
