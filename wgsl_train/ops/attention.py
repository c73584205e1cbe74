"""Causal softmax attention, multi-head and grouped-query, with rotary positions and a cache.

Products q kᵀ exist in tiles only: the forward pass walks over the keys with a running maximum and
sum (FlashAttention-2, Dao 2023) and keeps one number a row and head, the log of the sum of
exponentials; the backward pass makes the tiles again. One kernel owns tiles of queries and writes
dq, another owns tiles of keys and writes dk and dv, so that each sum has a fixed order.

Heads lie in one tensor as a projection writes it, (batch, seqlen, [q | k | v]), with n_heads heads
of queries and n_kv_heads of keys and of values, each of head_dim columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import ShapeError
from ..kernel import Grid, Kernel, Target, Tensor, Values, ceil_div, elementwise, round_up
from ..plan import Plan

_DECODE = 16  # timesteps from which the cache is read by tiles


@dataclass(frozen=True)
class Cache:
    """Keys and values of the positions so far, of one layer.

    kv         (batch, capacity, 2 * n_kv_heads * head_dim) f32, persistent; keys are rotated
    position   (batch, 2) u32, persistent, common to all layers: where the document of the last
               key begins, and the number of keys. Zeros at first; `advance` moves it on
    """

    kv: Tensor
    position: Tensor


def staged(
    head_dim: int,
    threads_m: int,
    threads_n: int,
    thread_m: int,
    thread_n: int,
    depth: int = 32,
    depth_n: int = 32,
    unroll: int = 1,
) -> dict[str, int]:
    """Tuning choices: operands are staged in workgroup memory.

    threads_m, threads_n   threads of a workgroup along its lines and along columns
    thread_m, thread_n     lines and columns of a thread, multiples of 4
    depth                  elements of a head that are staged at a time, a multiple of 8
    depth_n                lines that are staged at a time to be summed over: it divides
                           4 threads_n
    unroll                 fours of them that the source repeats, in place of a loop
    """
    depth, depth_n = min(depth, round_up(head_dim, 8)), min(depth_n, 4 * threads_n)
    return {
        "threads_m": threads_m,
        "thread_m": thread_m,
        "tile_m": threads_m * thread_m,
        "threads_n": threads_n,
        "thread_n": thread_n,
        "tile_n": threads_n * thread_n,
        "groups_n": thread_n // 4,
        "groups_d": ceil_div(head_dim, 4 * threads_n),
        "depth": depth,
        "depth_n": depth_n,
        "unroll": math.gcd(unroll, depth // 4),
        "unroll_n": math.gcd(unroll, depth_n // 4),
        "lanes": 0,
        "workgroup": threads_m * threads_n,
    }


def direct(thread_m: int, thread_n: int, lanes: int, workgroup: int = 8) -> dict[str, int]:
    """Tuning choices: operands come straight from storage, for adapters that are CPUs.

    thread_m, thread_n   lines and columns of a thread; thread_n is a multiple of 4
    lanes                threads of a subgroup, which share loads; it divides thread_n
    """
    return {
        "threads_m": workgroup,
        "thread_m": thread_m,
        "tile_m": workgroup * thread_m,
        "threads_n": 1,
        "thread_n": thread_n,
        "tile_n": thread_n,
        "groups_n": thread_n // 4,
        "depth": 4,
        "lanes": lanes,
        "workgroup": workgroup,
    }


def _workgroup_memory(choices: Values) -> int:
    """Bytes that attention_staged.wgsl takes, at most."""
    c = choices
    pitch = c["depth"] // 4 + 1
    a = c["tile_m"] * max(pitch, c["threads_n"] + 1)
    b = max(c["tile_n"] * pitch + 32, c["depth_n"] * c["groups_d"] * c["threads_n"])
    return int(16 * (a + b + c["tile_m"] // 4 * c["threads_n"]))


def _head_dim(v: Values) -> int:
    return int(v["d_qkv"] // (v["n_heads"] + 2 * v["n_kv_heads"]))


def _staged_choices(head_dim: int, large: bool) -> Iterator[dict[str, int]]:
    """Tiles for a head, the best first. large: a large GPU, with work to fill it."""
    wanted = next((n for n in (8, 16, 32) if 8 * n >= head_dim), 64)
    for threads_n in (n for n in (64, 32, 16, 8) if n <= wanted):
        for depth in (16, 8) if large else (32, 16, 8):
            if large:
                size = (128 // threads_n, threads_n, 4, 8)
                yield staged(head_dim, *size, depth, depth, unroll=4)
            yield staged(head_dim, max(64 // threads_n, 4), threads_n, 4, 4, depth, depth)
    for threads_m in (4, 2, 1):
        yield staged(head_dim, threads_m, 8, 4, 4, 8, 4)


def _tiles(target: Target, v: Values) -> Values:
    """Tuning choices for a kernel that owns tiles."""
    head_dim = _head_dim(v)
    if target.kind == "cpu":
        size = (4, 32) if v["seqlen"] > 64 else (2, 8)
        return {
            "head_dim": head_dim,
            **(direct(*size, 8) if target.lanes == 8 else direct(4, 8, 1)),
        }
    # few rows are better spread over more workgroups
    large = target.kind == "discrete" and v["batch"] * v["n_heads"] * v["seqlen"] >= 1 << 14
    memory = min(target.max_workgroup_memory, 32768 if large else 16384)
    for choices in _staged_choices(head_dim, large):
        if _workgroup_memory(choices) <= memory:
            return {"head_dim": head_dim, **choices}
    raise ShapeError(
        f"attention: head_dim is {head_dim}, for which {memory:,} bytes of workgroup memory are "
        "not enough. Use more and smaller heads."
    )


def _alternatives(target: Target, v: Values) -> list[Values]:
    head_dim = _head_dim(v)
    if target.kind == "cpu":
        tiles = ((4, 32), (4, 16), (2, 32), (2, 16), (8, 16)) if target.lanes == 8 else ((4, 4),)
        return [direct(m, n, 8 if target.lanes == 8 else 1) for m, n in tiles]
    sizes = ((16, 8, 4, 8), (16, 8, 4, 4), (8, 8, 8, 8), (8, 8, 4, 4), (8, 16, 8, 4), (8, 16, 4, 8))
    found = [
        staged(head_dim, *size, depth, depth, unroll)
        for size in sizes
        for depth, unroll in ((16, 4), (16, 1), (32, 2))
    ]
    return [c for c in found if _workgroup_memory(c) <= target.max_workgroup_memory]


def _grid(heads: str) -> Callable[[Values], Grid]:
    return lambda v: (v[heads], v["batch"], ceil_div(v["seqlen"], v["tile_m"]))


def _vec4(*bindings: str) -> Callable[[Values], Iterable[str]]:
    return lambda v: bindings if v["head_dim"] % 4 == 0 else ()


def _products(v: Values) -> int:
    """Floating-point operations of one product of all queries with their keys."""
    return int(v["batch"] * v["n_heads"] * v["head_dim"] * v["seqlen"] * (v["seqlen"] + 1))


_HEADS = {"n_heads": 1, "n_kv_heads": 1, "scale": 1.0}

FORWARD = Kernel(
    "attention_forward",
    reads={
        "qkv": "batch seqlen d_qkv",
        "documents?": "batch seqlen",
        "cache?": "batch capacity d_cache",
        "position?": "batch two",
    },
    writes={"out": "batch seqlen d_out", "lse?": "batch n_heads seqlen"},
    options=_HEADS,
    choose=_tiles,
    alternatives=_alternatives,
    grid=_grid("n_heads"),
    vec4=_vec4("qkv", "cache", "out"),
    u32=frozenset({"documents", "position"}),
    flops=lambda v: 2 * _products(v),
)

BACKWARD_DELTA = Kernel(
    "attention_backward_delta",
    reads={"dout": "batch seqlen d_out", "out": "batch seqlen d_out"},
    writes={"delta": "batch n_heads seqlen"},
    choose=lambda target, v: {"workgroup": 256, "head_dim": v["d_out"] // v["n_heads"]},
    grid=elementwise(lambda v: int(v["batch"] * v["seqlen"] * v["n_heads"])),
    vec4=_vec4("dout", "out"),
)

_BACKWARD: dict[str, Any] = {  # what the two halves of the backward pass have in common
    "reads": {
        "qkv": "batch seqlen d_qkv",
        "dout": "batch seqlen d_out",
        "lse": "batch n_heads seqlen",
        "delta": "batch n_heads seqlen",
        "documents?": "batch seqlen",
    },
    "writes": {"dqkv": "batch seqlen d_qkv"},
    "options": _HEADS,
    "choose": _tiles,
    "alternatives": _alternatives,
    "vec4": _vec4("qkv", "dout", "dqkv"),
    "u32": frozenset({"documents"}),
}

BACKWARD_Q = Kernel(
    "attention_backward_q", **_BACKWARD, grid=_grid("n_heads"), flops=lambda v: 3 * _products(v)
)

BACKWARD_KV = Kernel(
    "attention_backward_kv", **_BACKWARD, grid=_grid("n_kv_heads"), flops=lambda v: 4 * _products(v)
)


def _rotary_span(target: Target, v: Values) -> Values:
    """A thread turns all heads alike, unless that leaves too few threads."""
    few = v["batch"] * v["seqlen"] * v["rotary_dim"] < 1 << 16 and target.kind != "cpu"
    return {"workgroup": 64, "span": 1 if few else v["heads"]}


def _rotary_vec4(v: Values) -> tuple[str, ...]:
    return ("qkv",) if v["head_dim"] % 4 == 0 and v["rotary_dim"] % 8 == 0 else ()


ROTARY = Kernel(
    "rotary",
    reads={"documents?": "batch seqlen", "position?": "batch two"},
    writes={"qkv": "batch seqlen d_qkv"},
    options={"heads": 1, "head_dim": 2, "rotary_dim": 2, "theta": 10000.0, "reverse": False},
    choose=_rotary_span,
    grid=elementwise(
        lambda v: (
            v["batch"]
            * v["seqlen"]
            * ceil_div(v["heads"], v["span"])
            * (v["rotary_dim"] // 2)
            // (4 if _rotary_vec4(v) else 1)
        ),
        per_group=64,
    ),
    vec4=_rotary_vec4,
    u32=frozenset({"documents", "position"}),
    traffic=lambda v: 8 * v["batch"] * v["seqlen"] * v["heads"] * v["rotary_dim"],
)

APPEND = Kernel(
    "attention_append",
    reads={"qkv": "batch seqlen d_qkv", "position": "batch two"},
    writes={"cache": "batch capacity d_cache"},
    grid=elementwise(lambda v: int(v["batch"] * v["seqlen"] * v["d_cache"])),
    vec4=lambda v: ("qkv", "cache") if v["d_qkv"] % 4 == v["d_cache"] % 4 == 0 else (),
    u32=frozenset({"position"}),
    traffic=lambda v: 8 * v["batch"] * v["seqlen"] * v["d_cache"],
)


def _decode_choices(target: Target, v: Values) -> dict[str, int]:
    head_dim = _head_dim(v)
    threads = {"cpu": 8, "discrete": 256}.get(target.kind, 128)
    quads = ceil_div(head_dim, 4)
    lanes = min(quads, threads)
    return {
        "head_dim": head_dim,
        "lanes": lanes,
        "per_lane": ceil_div(quads, lanes),
        "unroll": math.gcd(lanes, 8),
        "workgroup": threads // lanes * lanes,
    }


DECODE = Kernel(
    "attention_decode",
    reads={
        "qkv": "batch seqlen d_qkv",
        "cache": "batch capacity d_cache",
        "position": "batch two",
        "documents?": "batch seqlen",
    },
    writes={"out": "batch seqlen d_out"},
    options=_HEADS,
    choose=_decode_choices,
    grid=lambda v: (v["n_heads"], v["seqlen"], v["batch"]),
    vec4=_vec4("qkv", "cache", "out"),
    u32=frozenset({"documents", "position"}),
)

ADVANCE = Kernel(
    "attention_advance",
    reads={"documents?": "batch seqlen"},
    writes={"position": "batch two"},
    options={"steps": 1},
    choose=lambda target, v: {"workgroup": 64},
    grid=elementwise(lambda v: int(v["batch"]), per_group=64),
    u32=frozenset({"documents", "position"}),
)


def attention(
    plan: Plan,
    qkv: Tensor,
    *,
    n_heads: int,
    n_kv_heads: int | None = None,
    scale: float | None = None,
    rotary_dim: int = 0,
    rope_theta: float = 10000.0,
    documents: Tensor | None = None,
    cache: Cache | None = None,
    name: str = "attended",
) -> Tensor:
    """Plan causal attention of every position to itself and those before it.

    qkv          (batch, seqlen, (n_heads + 2 n_kv_heads) head_dim) f32. Queries and keys are
                 rotated in place
    n_kv_heads   heads of keys and values; each serves n_heads / n_kv_heads heads of queries.
                 By default n_heads
    scale        of the products; by default 1 / sqrt(head_dim)
    rotary_dim   leading columns of each head that are rotated by their position, halves paired as
                 Llama has them; 0: none
    documents    (batch, seqlen) u32, ids that do not decrease along a row: positions attend inside
                 their own document, and count from its start
    cache        keys and values to attend to as well; the new ones are appended. The caller plans
                 `advance` after all layers, and sees to it that the capacity holds
    returns      (batch, seqlen, n_heads * head_dim) f32

    Raises ShapeError where shapes do not fit, or a cache is given in training. Source: `MHA` of
    mamba_ssm, `apply_rotary_pos_emb` of Hugging Face's Llama.
    """
    n_kv_heads = n_kv_heads or n_heads
    head_dim = _check(qkv, n_heads, n_kv_heads, rotary_dim, rope_theta, cache)
    if cache and plan.training:
        raise ShapeError("attention has a cache in inference only")
    batch, seqlen, _ = qkv.shape
    options: dict[str, Any] = {
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "scale": 1 / math.sqrt(head_dim) if scale is None else scale,
    }
    position = cache.position if cache else None

    def rotate(x: Tensor, reverse: bool) -> None:
        if rotary_dim:
            plan.dispatch(
                ROTARY,
                qkv=x,
                documents=documents,
                position=position,
                heads=n_heads + n_kv_heads,
                head_dim=head_dim,
                rotary_dim=rotary_dim,
                theta=rope_theta,
                reverse=reverse,
            )

    rotate(qkv, reverse=False)
    out = plan.tensor(name, (batch, seqlen, n_heads * head_dim))
    if cache:
        plan.dispatch(APPEND, qkv=qkv, position=position, cache=cache.kv)
        kernel = DECODE if seqlen < _DECODE else FORWARD
        plan.dispatch(
            kernel,
            qkv=qkv,
            cache=cache.kv,
            position=position,
            documents=documents,
            out=out,
            **options,
        )
        return out
    rows = (batch, n_heads, seqlen)
    lse = plan.tensor(f"{name}.lse", rows) if plan.training else None
    plan.dispatch(FORWARD, qkv=qkv, documents=documents, out=out, lse=lse, **options)

    def backward() -> None:
        dout, dqkv = plan.grad(out), plan.grad(qkv)
        delta = plan.tensor(f"{name}.delta", rows)
        plan.dispatch(BACKWARD_DELTA, dout=dout, out=out, delta=delta)
        for kernel in (BACKWARD_Q, BACKWARD_KV):
            plan.dispatch(
                kernel,
                qkv=qkv,
                dout=dout,
                lse=lse,
                delta=delta,
                documents=documents,
                dqkv=dqkv,
                **options,
            )
        rotate(dqkv, reverse=True)

    plan.tape(backward)
    return out


def advance(plan: Plan, cache: Cache, steps: int, documents: Tensor | None = None) -> None:
    """Plan the step of a cache's position past `steps` new keys, after all layers have used it."""
    plan.dispatch(ADVANCE, position=cache.position, documents=documents, steps=steps)


def _check(
    qkv: Tensor,
    n_heads: int,
    n_kv_heads: int,
    rotary_dim: int,
    rope_theta: float,
    cache: Cache | None,
) -> int:
    """head_dim. Raises ShapeError where the sizes do not fit."""
    if n_kv_heads < 1 or n_heads < 1 or n_heads % n_kv_heads:
        raise ShapeError(
            f"attention: n_kv_heads is {n_kv_heads}, must divide n_heads, which is {n_heads}"
        )
    heads = n_heads + 2 * n_kv_heads
    head_dim, rest = divmod(qkv.shape[-1], heads)
    if rest:
        raise ShapeError(
            f"attention: {qkv.name} {qkv.shape} does not divide into {heads} heads, {n_heads} of "
            f"queries and {n_kv_heads} each of keys and values"
        )
    if rotary_dim % 2 or not 0 <= rotary_dim <= head_dim:
        raise ShapeError(
            f"attention: rotary_dim is {rotary_dim}, must be even and at most head_dim, {head_dim}"
        )
    if not rope_theta >= 1:
        raise ShapeError(f"attention: rope_theta is {rope_theta}, must be at least 1")
    if cache and cache.kv.shape[-1] != 2 * n_kv_heads * head_dim:
        raise ShapeError(
            f"attention: the cache {cache.kv.name} {cache.kv.shape} must hold "
            f"{2 * n_kv_heads * head_dim} elements a position"
        )
    if cache and qkv.shape[1] > cache.kv.shape[1]:
        raise ShapeError(
            f"attention: {qkv.shape[1]} positions at once, the cache {cache.kv.name} holds "
            f"{cache.kv.shape[1]}"
        )
    return head_dim
