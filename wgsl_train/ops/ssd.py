"""The state-space dual of Mamba-2, with its skip, gate and norm, forward and backward.

A head's state h (d_state, head_dim) decays by one number a step, so that steps can be summed by
matrix products. The sequence is cut into chunks: inside a chunk an output is a masked product of
scores C[t] B[s], between chunks the state at a chunk's start stands for all before it. All products
are renderings of shaders/include/matmul.wgsl, many at once, whose operands are scaled by decays as
they are loaded. In memory are a state a chunk and head, and the scores of a chunk and group; nothing
of size seqlen x d_inner x d_state.

The backward pass is the same in reverse: gradients of states go from the last chunk to the first,
and du is to dy as y is to x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import ShapeError
from ..kernel import (
    ALIGN,
    Grid,
    Kernel,
    Target,
    Tensor,
    Values,
    by_kind,
    ceil_div,
    divisor,
    multiprocessors,
    round_up,
    spread,
)
from ..plan import Plan
from .carry import Carried
from .linear import direct, staged
from .sum_partials import partial, partials

# Steps of a chunk, by kind of adapter: long ones cost more products inside, short ones more states
CHUNK = {"portable": 64, "cpu": 64, "discrete": 128}
MAX_CHUNK = 1024
HEAD_BLOCK = 64  # columns of a head whose sums of a step are one workgroup's, in ssd_output
MAX_STATE = 1024
# Workgroups that a product over all heads of a group should have, by kind of adapter
WORKGROUPS = {"portable": 64, "cpu": 1, "discrete": 256}


class _Tile(NamedTuple):
    """A tile of a product, and what its choice assumes of it.

    size              `staged`'s first arguments: tile_m, tile_n, tile_k, thread_m, thread_n
    speed, triangle   an output's beside the best tile's, in a square product, and in one whose
                      tiles leave out terms above a diagonal: small ones leave out more
    at_once           workgroups that a multiprocessor needs
    """

    size: tuple[int, int, int, int, int]
    speed: float
    triangle: float
    at_once: int


_TILES = (
    _Tile((128, 128, 16, 8, 8), 1.0, 0.65, 1),
    _Tile((128, 64, 16, 8, 8), 0.95, 0.75, 2),
    _Tile((64, 64, 16, 8, 4), 0.5, 1.0, 2),
    _Tile((64, 64, 32, 4, 4), 0.5, 0.95, 1),
    _Tile((64, 32, 32, 4, 4), 0.4, 0.8, 2),
    _Tile((32, 32, 32, 4, 4), 0.3, 0.6, 4),
    _Tile((16, 16, 16, 4, 4), 0.1, 0.2, 8),
)


def _choose(
    count: Callable[[Values], int],
    m: str,
    n: str,
    fold: bool = False,
    triangle: bool = False,
    prefetch: bool = False,
) -> Callable[[Target, Values], dict[str, Any]]:
    """Tuning choices for `count` products (m, n): the tile that takes the least time.

    fold       a thread holds two tiles of sums, for which more than 4 x 4 are too many
    triangle   tiles leave out what lies above the diagonal
    prefetch   as `staged` has it
    """

    def choose(target: Target, v: Values) -> dict[str, Any]:
        if target.kind == "cpu":
            widest = 8 if target.lanes != 8 else 16 if fold else 32
            widths = [width for width in (32, 24, 16, 8) if width <= widest]
            width = min(widths, key=lambda width: round_up(v[n], width))
            if v.get("reverse"):
                width = min(round_up(v[n], 8), HEAD_BLOCK)
            return direct(4, width, lanes=8 if target.lanes == 8 else 1)
        units = multiprocessors(target)

        def work(tile: _Tile) -> float:
            tile_m, tile_n, *_ = tile.size
            workgroups = count(v) * ceil_div(v[m], tile_m) * ceil_div(v[n], tile_n)
            # as in linear.py: waves of workgroups, and a quarter of one to start and to drain
            waves = ceil_div(workgroups, units * tile.at_once) + 0.25
            speed = tile.triangle if triangle else tile.speed
            return waves * tile.at_once * tile_m * tile_n / speed

        tiles = [
            tile
            for tile in _TILES
            if (not fold or tile.size[3] * tile.size[4] == 16) and _whole_rows(tile.size[1], v)
        ]
        return staged(*min(tiles, key=work).size, prefetch=int(prefetch))

    return choose


def _whole_rows(tile_n: int, v: Values) -> bool:
    """Whether a workgroup with so many columns has all that one sums, in ssd_output's reverse."""
    if not v.get("reverse"):
        return True
    return tile_n == HEAD_BLOCK or bool(tile_n >= v["head_dim"] < HEAD_BLOCK)


def _alternatives(target: Target, v: Values) -> list[dict[str, Any]]:
    if target.kind == "cpu":
        lanes = 8 if target.lanes == 8 else 1
        widths = [width for width in (8, 16, 32, 64) if _whole_rows(width, v)]
        return [direct(m, n, lanes=lanes) for m in (4, 8) for n in widths]
    tiles = [tile.size for tile in _TILES]
    tiles += [(64, 64, 16, 8, 8), (128, 64, 16, 8, 4)]
    return [
        staged(m, n, tile_k, thread_m, thread_n, prefetch=prefetch, single=single)
        for m, n, _, thread_m, thread_n in tiles
        for tile_k in (16, 32)
        for prefetch in (0, 1)
        for single in (0, 1)
        if 4 * tile_k * (m + n) <= 16384
        if _whole_rows(n, v) and (m <= thread_n * tile_k or not v.get("reverse"))
    ]


def _products(count: Callable[[Values], int], m: str, n: str) -> Callable[[Values], Grid]:
    """The grid of `count` products (m, n)."""

    def grid(v: Values) -> Grid:
        tiles = ceil_div(v[m], v["tile_m"]) * ceil_div(v[n], v["tile_n"])
        return spread(count(v) * tiles)

    return grid


def _packed(v: Values, *sizes: str) -> bool:
    """Whether rows of these sizes, and of xBC, are whole vectors of 4."""
    return all(v[size] % 4 == 0 for size in (*sizes, "d_xBC"))


def _vec4(*always: str, **packed: tuple[str, ...]) -> Callable[[Values], list[str]]:
    """The bindings that are vectors of 4: some always, others where all these sizes divide by 4."""
    return lambda v: [*always, *(b for b, of in packed.items() if all(v[s] % 4 == 0 for s in of))]


_DT_CUM = "batch chunks n_heads planes chunk"
_STATES = "batch chunks n_heads d_state head_dim"
_STATE = "batch n_heads d_state head_dim"
_SUMS = "batch chunks n_heads of_step chunk"
_XBC = ("d_xBC", "d_state", "head_dim")


def _chunk_heads(v: Values) -> int:
    return int(v["batch"] * v["chunks"] * v["n_heads"])


def _chunk_groups(v: Values) -> int:
    return int(v["batch"] * v["chunks"] * v["n_groups"])


def _slices(target: Target, v: Values) -> dict[str, int]:
    """Choices for kernels that go along a chunk: lanes that share its steps, and of all heads."""
    slices = 1 if target.kind == "cpu" else divisor(v["chunk"] // 4, 32)
    return {"slices": slices, "workgroup": slices * max(8, ceil_div(64, slices))}


def _sliced(v: Values) -> int:
    """Workgroups that go along all chunks of heads."""
    return ceil_div(_chunk_heads(v), v["workgroup"] // v["slices"])


_choose_scores = _choose(_chunk_groups, "chunk", "chunk")


def _decay_slices(tile: dict[str, Any], v: Values) -> dict[str, Any]:
    """The choices of a tile, with lanes that share a chunk's steps where the tile is staged."""
    shared = 1 if tile["lanes"] else math.gcd(v["chunk"] // 4, tile["workgroup"], 32)
    return {**tile, "slices": shared}


def _prepare_choices(target: Target, v: Values) -> dict[str, Any]:
    """Small tiles for long chunks too: the products are few, so that each decides how long all take."""
    if target.kind != "cpu" and v["chunk"] >= 64:
        return _decay_slices(staged(64, 32, 16, 4, 4, prefetch=1), v)
    return _decay_slices(_choose_scores(target, v), v)


def _prepare_grid(v: Values) -> Grid:
    """Workgroups for the decays of heads, then for the scores of groups."""
    tiles = ceil_div(v["chunk"], v["tile_m"]) * ceil_div(v["chunk"], v["tile_n"])
    return spread(_sliced(v) + _chunk_groups(v) * tiles)


PREPARE = Kernel(
    "ssd_prepare",
    reads={
        "zxbcdt": "batch seqlen d_proj",
        "dt_bias": "n_heads",
        "A_log": "n_heads",
        "documents?": "batch seqlen",
        "xBC": "batch seqlen d_xBC",
    },
    writes={"dt_cum": _DT_CUM, "scores": "batch chunks n_groups chunk chunk"},
    options={"limit": (0.0, math.inf), "d_state": 1},
    choose=_prepare_choices,
    alternatives=lambda target, v: [_decay_slices(tile, v) for tile in _alternatives(target, v)],
    grid=_prepare_grid,
    u32=frozenset({"documents"}),
    vec4=_vec4("dt_cum", "scores", xBC=("d_xBC", "d_state")),
    flops=lambda v: 2 * _chunk_groups(v) * v["chunk"] ** 2 * v["d_state"],
    traffic=lambda v: (
        4 * _chunk_heads(v) * v["chunk"] * (1 + v["planes"])
        + 4 * _chunk_groups(v) * v["chunk"] * (v["chunk"] + 2 * v["d_state"])
    ),
)


def _made(v: Values) -> int:
    """States that ssd_states makes."""
    return int(v["batch"] * (v["chunks"] - bool(v["skip"])) * v["n_heads"])


STATES = Kernel(
    "ssd_states",
    reads={"xBC": "batch seqlen d_xBC", "dt_cum": _DT_CUM, "dy?": "batch seqlen d_inner"},
    writes={"states": _STATES},
    options={"n_groups": 1, "skip": ""},  # skip: "first" or "last" chunk, whose are not needed
    choose=_choose(_made, "d_state", "head_dim"),
    alternatives=_alternatives,
    grid=_products(_made, "d_state", "head_dim"),
    vec4=_vec4("dt_cum", xBC=_XBC, dy=("head_dim",), states=("head_dim",)),
    flops=lambda v: 2 * _made(v) * v["chunk"] * v["d_state"] * v["head_dim"],
)


def _blocks(v: Values) -> int:
    """Workgroups that share a head's state in ssd_combine."""
    width = 4 if v["head_dim"] % 4 == 0 else 1
    return ceil_div(v["d_state"] * v["head_dim"] // width, 64)


COMBINE = Kernel(
    "ssd_combine",
    reads={"dt_cum": _DT_CUM, "starts?": _STATES, "last?": _STATE, "initial?": _STATE},
    writes={
        "states": _STATES,
        "state?": _STATE,
        "dots?": "batch chunks n_heads blocks",
    },
    options={"reverse": False},
    choose=by_kind({"workgroup": 64}),
    grid=lambda v: spread(v["batch"] * v["n_heads"] * _blocks(v)),
    vec4=lambda v: (
        ("starts", "last", "initial", "states", "state") if v["head_dim"] % 4 == 0 else ()
    ),
)

OUTPUT = Kernel(
    "ssd_output",
    reads={
        "xBC": "batch seqlen d_xBC",
        "dt_cum": _DT_CUM,
        "scores": "batch chunks n_groups chunk chunk",
        "states?": "batch chunks n_heads d_states d_heads",
        "D?": "n_heads",
        "dy?": "batch seqlen d_inner",
        "y?": "batch seqlen d_inner",
    },
    writes={"out": "batch seqlen out_stride", "sums": _SUMS},
    # begins_zero: nothing is carried in, from the side that the scan comes from
    options={
        "d_state": 1,
        "head_dim": 1,
        "reverse": False,
        "begins_zero": False,
    },
    choose=_choose(_chunk_heads, "chunk", "head_dim", triangle=True),
    alternatives=_alternatives,
    grid=_products(_chunk_heads, "chunk", "head_dim"),
    vec4=_vec4(
        "dt_cum",
        "scores",
        xBC=_XBC,
        states=("head_dim",),
        dy=_XBC,
        y=_XBC,
        out=(*_XBC, "out_stride"),
    ),
    flops=lambda v: (
        2 * _chunk_heads(v) * v["chunk"] * v["head_dim"] * (v["d_state"] + v["chunk"] // 2)
    ),
)


def _norm_columns(v: Values) -> int:
    """Columns of a group, where 4 neighbours are one that can be."""
    width = 4 if _packed(v, "head_dim", "d_proj") else 1
    return int(v["d_inner"] // v["norm_groups"] // width)


def _norm_lanes(target: Target, v: Values) -> dict[str, int]:
    """Choices for ssd_norm_forward: enough lanes that each holds three columns, where they are."""
    if target.kind == "cpu":
        return {"workgroup": 64, "lanes": 1}
    lanes = next((n for n in (16, 32, 64, 128) if 3 * n >= _norm_columns(v)), 256)
    return {"workgroup": max(128, lanes), "lanes": lanes}


def _norm_held(target: Target, v: Values) -> dict[str, int]:
    """Choices for ssd_norm_backward: held, the columns of a lane that stay in registers; 0: all
    are read twice."""
    if target.kind == "cpu":
        return {"workgroup": 64, "held": 0}
    columns = _norm_columns(v)
    workgroup = min((256, 192, 128, 64), key=lambda w: (ceil_div(columns, w) * w, -w))
    held = ceil_div(columns, workgroup)
    return {"workgroup": workgroup, "held": held if v["norm_groups"] == 1 and held <= 8 else 0}


NORM_FORWARD = Kernel(
    "ssd_norm_forward",
    reads={
        "y": "batch seqlen d_inner",
        "xBC": "batch seqlen d_xBC",
        "zxbcdt": "batch seqlen d_proj",
        "sums": _SUMS,
        "weight": "d_inner",
    },
    writes={"out": "batch seqlen d_inner"},
    options={"norm_groups": 1, "head_dim": 1, "eps": 1e-5},
    choose=_norm_lanes,
    alternatives=lambda target, v: [
        {"workgroup": workgroup, "lanes": lanes}
        for workgroup in (128, 256)
        for lanes in (32, 64, 128)
    ],
    grid=lambda v: spread(
        ceil_div(v["batch"] * v["seqlen"] * v["norm_groups"], v["workgroup"] // v["lanes"])
    ),
    vec4=lambda v: (
        ("y", "xBC", "zxbcdt", "weight", "out") if _packed(v, "head_dim", "d_proj") else ()
    ),
    traffic=lambda v: 16 * v["batch"] * v["seqlen"] * v["d_inner"],
)

NORM_BACKWARD = Kernel(
    "ssd_norm_backward",
    reads={
        "y": "batch seqlen d_inner",
        "xBC": "batch seqlen d_xBC",
        "zxbcdt": "batch seqlen d_proj",
        "sums": _SUMS,
        "weight": "d_inner",
    },
    writes={
        "dout": "batch seqlen d_inner",
        "dzxbcdt": "batch seqlen d_proj",
        "weight_partials?": "parts stride",
    },
    options={"norm_groups": 1, "head_dim": 1, "eps": 1e-5, "rows_per_group": 16},
    choose=_norm_held,
    alternatives=lambda target, v: [
        {"workgroup": workgroup, "held": held}
        for workgroup in (64, 128, 192, 256)
        for held in {0, ceil_div(_norm_columns(v), workgroup) if v["norm_groups"] == 1 else 0}
    ],
    grid=lambda v: spread(ceil_div(v["batch"] * v["seqlen"], v["rows_per_group"])),
    vec4=lambda v: (
        ("y", "xBC", "zxbcdt", "weight", "dout", "dzxbcdt", "weight_partials")
        if _packed(v, "head_dim", "d_proj")
        else ()
    ),
    traffic=lambda v: 24 * v["batch"] * v["seqlen"] * v["d_inner"],
)


def _split_groups(v: Values) -> int:
    """Products that ssd_backward_scores makes."""
    return _chunk_groups(v) * int(v["splits"])


BACKWARD_SCORES = Kernel(
    "ssd_backward_scores",
    reads={"xBC": "batch seqlen d_xBC", "dt_cum": _DT_CUM, "dy": "batch seqlen d_inner"},
    writes={"dscores": "splits batch chunks n_groups chunk chunk"},
    options={"d_state": 1, "head_dim": 1},
    choose=_choose(_split_groups, "chunk", "chunk", fold=True, triangle=True),
    alternatives=_alternatives,
    grid=_products(_split_groups, "chunk", "chunk"),
    vec4=_vec4("dt_cum", "dscores", xBC=_XBC, dy=("head_dim",)),
    flops=lambda v: 2 * _chunk_heads(v) * v["chunk"] ** 2 * v["head_dim"],
)


def _sides(v: Values) -> int:
    """Products that ssd_backward_bc makes."""
    return 2 * _chunk_groups(v) * int(v["shares"])


BACKWARD_BC = Kernel(
    "ssd_backward_bc",
    reads={
        "xBC": "batch seqlen d_xBC",
        "dt_cum": _DT_CUM,
        "dy": "batch seqlen d_inner",
        "dscores": "splits batch chunks n_groups chunk chunk",
        "states?": "batch chunks n_heads d_states d_heads",
        "dstates?": "batch chunks n_heads d_states d_heads",
    },
    writes={"out": "shares batch seqlen out_stride"},
    options={
        "d_state": 1,
        "head_dim": 1,
        "out_start": 0,
        "begins_zero": False,  # no state is carried in
        "ends_zero": False,  # no gradient of the last state
    },
    choose=_choose(_sides, "chunk", "d_state", prefetch=True),
    alternatives=_alternatives,
    grid=_products(_sides, "chunk", "d_state"),
    vec4=_vec4(
        "dt_cum",
        "dscores",
        xBC=_XBC,
        dy=("head_dim",),
        states=("head_dim",),
        dstates=("head_dim",),
        out=("d_state", "out_stride", "out_start"),
    ),
    flops=lambda v: (
        4 * _chunk_heads(v) * v["chunk"] * v["head_dim"] * v["d_state"]
        + 4 * _chunk_groups(v) * v["chunk"] ** 2 * v["d_state"]
    ),
)


def _bc_width(v: Values) -> int:
    """Neighbouring columns of B and C that one lane adds up."""
    return 4 if v["columns"] % 4 == 0 and v["d_xBC"] % 4 == 0 else 1


def _sums_grid(v: Values) -> Grid:
    """Workgroups for chunks, then for the shares of B's and C's gradients, if there are any."""
    bc = v["batch"] * v["seqlen"] * v["columns"] // _bc_width(v) if "shares" in v else 0
    return spread(_sliced(v) + ceil_div(bc, v["workgroup"]))


BACKWARD_SUMS = Kernel(
    "ssd_backward_sums",
    reads={
        "sums": _SUMS,
        "dt_cum": _DT_CUM,
        "A_log": "n_heads",
        "dots?": "batch chunks n_heads blocks",
        "dBC?": "shares batch seqlen columns",
    },
    writes={
        "dzxbcdt": "batch seqlen d_proj",
        "partials?": "parameters parts stride",
        "dxBC?": "batch seqlen d_xBC",
    },
    options={"limit": (0.0, math.inf), "trained": ()},  # trained: whose partials there are, by name
    choose=_slices,
    grid=_sums_grid,
    vec4=lambda v: (
        "sums",
        "dt_cum",
        *(("dBC", "dxBC") if "shares" in v and _bc_width(v) == 4 else ()),
    ),
    traffic=lambda v: (
        4 * _chunk_heads(v) * v["chunk"] * (4 + v["planes"])
        + 4 * v["batch"] * v["seqlen"] * v.get("columns", 0) * (v.get("shares", 0) + 1)
    ),
)


def ssd(
    plan: Plan,
    zxbcdt: Tensor,
    xBC: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm_weight: Tensor,
    *,
    n_groups: int,
    norm_groups: int,
    eps: float,
    time_step_limit: tuple[float, float] = (0.0, math.inf),
    documents: Tensor | None = None,
    state: Carried | None = None,
    chunk: int | None = None,
    name: str = "ssd",
) -> Tensor:
    """Scan each head through its state, add the skip, gate and normalise the result.

    h[t] = exp(delta A) h[t-1] + delta B xᵀ,  y = C h + D x,  a = y silu(z),  result = weight a /
    sqrt(mean(a²) + eps), where A = -exp(A_log) and delta = clamp(softplus(dt + dt_bias),
    time_step_limit). The mean is over each of norm_groups equal ranges of columns.

    zxbcdt (batch, seqlen, d_proj) f32 holds [z | what the convolution reads | dt], of d_inner, d_xBC
    and n_heads columns; xBC (batch, seqlen, d_inner + 2 n_groups d_state) holds [x | B | C]; dt_bias,
    A_log, D (n_heads,), norm_weight (d_inner,). Neighbouring heads form n_groups groups with a B and
    C each. Returns (batch, seqlen, d_inner).

    The backward pass writes all of xBC's gradient, the columns of z and dt of zxbcdt's, and that of
    the state. It adds to those of the parameters that train.

    documents   (batch, seqlen) u32, ids that do not decrease along a row: the state is zero where
                one begins. A state that is given belongs to document 0
    state       (batch, n_heads, d_state, head_dim): the scan starts from it and leaves its last
                state there
    chunk       steps of a chunk, a multiple of 4; by default what suits the adapter

    Raises ShapeError where shapes do not fit. Source: Dao & Gu, "Transformers are SSMs" (2024),
    section 6; mamba_ssm's Mamba2.
    """
    batch, seqlen, d_proj = zxbcdt.shape
    (n_heads,), (d_inner,), d_xBC = A_log.shape, norm_weight.shape, xBC.shape[-1]
    d_state = (d_xBC - d_inner) // (2 * n_groups)
    if (
        d_inner % n_heads
        or n_heads % n_groups
        or d_inner % norm_groups
        or d_xBC != d_inner + 2 * n_groups * d_state
        or d_proj != d_inner + d_xBC + n_heads
    ):
        raise ShapeError(
            f"ssd: zxbcdt {zxbcdt.shape} and xBC {xBC.shape} do not fit d_inner = {d_inner}, "
            f"n_heads = {n_heads}, n_groups = {n_groups}, norm_groups = {norm_groups}: d_inner must "
            "be a multiple of n_heads and norm_groups, n_heads of n_groups; xBC has d_inner + 2 n_groups d_state columns, zxbcdt d_inner + "
            "n_heads more"
        )
    if not 1 <= d_state <= MAX_STATE:
        raise ShapeError(f"ssd: d_state is {d_state}, must be 1 to {MAX_STATE:,}")
    kind = plan.target.kind
    chunk = chunk or min(CHUNK.get(kind, CHUNK["portable"]), 1 << (seqlen - 1).bit_length())
    chunk = max(chunk, 4)
    if chunk % 4 or chunk > MAX_CHUNK:
        raise ShapeError(f"ssd: chunk is {chunk}, must be a multiple of 4, at most {MAX_CHUNK:,}")
    chunks, head_dim = ceil_div(seqlen, chunk), d_inner // n_heads
    sizes = {"d_state": d_state, "head_dim": head_dim}
    norm = {"norm_groups": norm_groups, "head_dim": head_dim, "eps": eps}
    score_shape = (batch, chunks, n_groups, chunk, chunk)
    state_shape = (batch, chunks, n_heads, d_state, head_dim)

    dt_cum = plan.tensor(f"{name}.dt_cum", (batch, chunks, n_heads, 3 if documents else 2, chunk))
    scores = plan.tensor(f"{name}.scores", score_shape)
    plan.dispatch(
        PREPARE,
        zxbcdt=zxbcdt,
        dt_bias=dt_bias,
        A_log=A_log,
        documents=documents,
        xBC=xBC,
        dt_cum=dt_cum,
        scores=scores,
        limit=time_step_limit,
        d_state=d_state,
    )
    states = None
    if chunks > 1 or state:
        states = plan.tensor(f"{name}.states", state_shape)
        skip = "" if state else "last"
        plan.dispatch(STATES, xBC=xBC, dt_cum=dt_cum, states=states, n_groups=n_groups, skip=skip)
        plan.dispatch(
            COMBINE,
            dt_cum=dt_cum,
            initial=state and state.apart,
            states=states,
            state=state and state.final,
        )
    y = plan.tensor(f"{name}.y", (batch, seqlen, d_inner))
    # of each step: its skip, and what the backward pass sums over blocks of a head's columns
    of_step = 1 + 3 * ceil_div(head_dim, HEAD_BLOCK)
    sums = plan.tensor(f"{name}.sums", (batch, chunks, n_heads, of_step, chunk))
    plan.dispatch(
        OUTPUT,
        xBC=xBC,
        dt_cum=dt_cum,
        scores=scores,
        states=states,
        D=D,
        out=y,
        sums=sums,
        begins_zero=state is None,
        **sizes,
    )
    out = plan.tensor(name, (batch, seqlen, d_inner))
    gated = {"y": y, "xBC": xBC, "zxbcdt": zxbcdt, "sums": sums, "weight": norm_weight}
    plan.dispatch(NORM_FORWARD, **gated, out=out, **norm)

    def backward() -> None:
        rows_per_group = 64 if kind == "cpu" else 16
        dy, dxBC, dzxbcdt = plan.grad(out), plan.grad(xBC), plan.grad(zxbcdt)
        dweight = plan.layout.grad(norm_weight)
        parts = ceil_div(batch * seqlen, rows_per_group)
        plan.dispatch(
            NORM_BACKWARD,
            **gated,
            dout=dy,
            dzxbcdt=dzxbcdt,
            weight_partials=dweight and partial(plan, dweight, parts),
            rows_per_group=rows_per_group,
            **norm,
        )
        given = {"xBC": xBC, "dt_cum": dt_cum, "dy": dy}
        dstates = dots = None
        chained = state if state and state.dinitial else None
        if states:
            dstates = plan.tensor(f"{name}.dstates", state_shape)
            if chunks > 1 or chained:  # else nothing reaches the end of the only chunk
                skip = "" if chained else "first"
                plan.dispatch(STATES, **given, states=dstates, n_groups=n_groups, skip=skip)
            dots = plan.tensor(f"{name}.dots", (batch, chunks, n_heads, _blocks(sizes)))
            plan.dispatch(
                COMBINE,
                dt_cum=dt_cum,
                starts=states,
                last=chained and chained.final,
                initial=chained and chained.dfinal,
                states=dstates,
                state=chained and chained.dinitial,
                dots=dots,
                reverse=True,
            )
        plan.dispatch(
            OUTPUT,
            **given,
            scores=scores,
            states=dstates,
            y=y,
            out=dxBC,
            sums=sums,
            reverse=True,
            begins_zero=chained is None,
            **sizes,
        )
        # the heads of a group are dealt out where there are few products
        wanted = WORKGROUPS.get(kind, WORKGROUPS["portable"])
        splits = divisor(n_heads // n_groups, ceil_div(wanted, 2 * batch * chunks * n_groups))
        dscores = plan.tensor(f"{name}.dscores", (splits, *score_shape))
        plan.dispatch(BACKWARD_SCORES, **given, dscores=dscores, **sizes)
        dBC = None
        if splits > 1:
            dBC = plan.tensor(f"{name}.dBC", (splits, batch, seqlen, d_xBC - d_inner))
        plan.dispatch(
            BACKWARD_BC,
            **given,
            dscores=dscores,
            states=states,
            dstates=dstates,
            out=dBC or dxBC.view(0, (1, *dxBC.shape)),
            out_start=0 if dBC else d_inner,
            begins_zero=state is None,
            ends_zero=chained is None,
            **sizes,
        )
        parameters = {"A_log": A_log, "D": D, "dt_bias": dt_bias}
        grads = {of: grad for of, p in parameters.items() if (grad := plan.layout.grad(p))}
        parts, stride = batch * chunks, round_up(n_heads, ALIGN)
        space = partials(plan, list(grads.values()), parts) if grads else None
        plan.dispatch(
            BACKWARD_SUMS,
            sums=sums,
            dt_cum=dt_cum,
            A_log=A_log,
            dots=dots,
            dBC=dBC,
            dzxbcdt=dzxbcdt,
            partials=space and space.view(0, (len(grads), parts, stride)),
            dxBC=dBC and dxBC,
            limit=time_step_limit,
            trained=tuple(grads),
        )

    plan.tape(backward)
    return out
