"""Matrix products: out = x Wᵀ + bias, and its gradients dx = dout W, dW = doutᵀ x.

A frozen W may be stored as f16, or as i8 with a factor a row. An adapter of W (LoRA) is a second,
small product that is added in the same dispatch. All are renderings of one template, shaders/include/matmul.wgsl. Inputs and outputs may be ranges
of columns of wider tensors (`Columns`), so that nothing is copied to split or join.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ShapeError
from ..kernel import (
    ITEMSIZE,
    DType,
    Grid,
    Kernel,
    Target,
    Tensor,
    Values,
    ceil_div,
    itemsize,
    multiprocessors,
    round_up,
    spread,
)
from ..plan import Adapter, Plan
from .sum_partials import partial, sum_partials

Activation = Literal["none", "softplus"]


@dataclass(frozen=True)
class Columns:
    """`width` columns of the last axis of a tensor, from column `start` on."""

    tensor: Tensor
    start: int
    width: int


def staged(
    tile_m: int,
    tile_n: int,
    tile_k: int = 16,
    thread_m: int = 8,
    thread_n: int = 8,
    swizzle: int = 8,
    warp_n: int = 8,
    prefetch: int = 0,
    single: int = 0,
    edge: int = 0,
) -> dict[str, Any]:
    """Tuning choices: operands are staged in workgroup memory.

    tile_m, tile_n, tile_k   outputs of a workgroup, and how deep it goes between barriers
    thread_m, thread_n       outputs of a thread; like the tile's, multiples of 4; at least
                             tile_m / 4 threads
    swizzle                  tiles along m that are visited together
    warp_n                   of 32 neighbouring threads so many lie along n; 0: all that there are
    prefetch                 1: load the next operands to registers while computing
    single                   1: an operand a that is turned is kept number by number, not by fours
    edge                     1: a last tile that is half empty has a loop of its own, which leaves
                             that half out
    """
    threads_m, threads_n = tile_m // thread_m, tile_n // thread_n
    if warp_n and (threads_n % warp_n or threads_m % (32 // warp_n)):
        warp_n = 0
    return {
        "tile_m": tile_m,
        "tile_n": tile_n,
        "tile_k": tile_k,
        "thread_m": thread_m,
        "thread_n": thread_n,
        "swizzle": swizzle,
        "warp_n": warp_n,
        "prefetch": prefetch,
        "single": single,
        "edge": edge,
        "lanes": 0,
        "workgroup": threads_m * threads_n,
    }


def direct(
    thread_m: int,
    thread_n: int,
    lanes: int = 1,
    workgroup: int = 8,
    swizzle: int = 8,
    eights: bool = False,
) -> dict[str, Any]:
    """Tuning choices: operands come straight from storage, for adapters that are CPUs.

    thread_m, thread_n   outputs of a thread, multiples of 4; threads lie along m
    lanes                threads of a subgroup, which share loads; it divides thread_n
    eights               operands are loaded by 8 neighbours where sizes allow it, else by 4
    """
    return {
        "tile_m": workgroup * thread_m,
        "tile_n": thread_n,
        "tile_k": 8 if eights else 4,
        "thread_m": thread_m,
        "thread_n": thread_n,
        "swizzle": swizzle,
        "lanes": lanes,
        "workgroup": workgroup,
    }


@dataclass(frozen=True)
class _Adapter:
    """What the choice of tiles assumes of a kind of adapter. Rates are of float32 arithmetic.

    flops       FLOP/s of all of them together, with the best tiles
    bandwidth   bytes/s of memory
    """

    flops: float
    bandwidth: float


_ADAPTERS = {
    "portable": _Adapter(2e12, 1e11),
    "integrated": _Adapter(2e12, 1e11),
    "discrete": _Adapter(40e12, 3e12),
}

# (tile_m, tile_n, thread_m, thread_n, their speed relative to the best where there are enough)
_STAGED = (
    (128, 128, 8, 8, 1.0),
    (64, 64, 4, 4, 0.45),
    (64, 32, 4, 4, 0.4),
    (32, 32, 4, 4, 0.3),
    (16, 64, 4, 4, 0.3),
)


def _staged_tiles(
    target: Target, m: int, n: int, parts: int
) -> list[tuple[int, int, int, int, float]]:
    """Rows like _STAGED's: those, for a large product half of the largest, and where the sum is
    split, so that there are workgroups enough, tiles that are 128 long and as narrow as a narrow
    product."""
    tiles = list(_STAGED)
    if m * n >= 2 * multiprocessors(target) * 128 * 128:
        tiles.append((128, 64, 8, 8, 0.94))  # a last wave of these wastes less
    for size, turned in ((n, False), (m, True)):
        width = round_up(size, 16)
        if parts > 1 and width < 128:
            thin = 4 if 128 // 8 * width // 4 <= target.max_invocations else 8
            tile = (width, 128, thin, 8, 0.7) if turned else (128, width, 8, thin, 0.7)
            tiles.append(tile)
    return tiles


def _fastest(
    target: Target,
    m: int,
    n: int,
    depth: int,
    parts: int = 1,
    prefetch: bool = True,
    single: bool = False,
) -> tuple[float, dict[str, Any]]:
    """Estimated seconds of a staged product and the tile that takes the least: what counts is
    how full the last wave of workgroups leaves the adapter."""
    units, flops = multiprocessors(target), _ADAPTERS[target.kind].flops

    def seconds(tile_m: int, tile_n: int, speed: float) -> float:
        tiles = ceil_div(m, tile_m) * ceil_div(n, tile_n)
        waves, rest = divmod(tiles * parts, units)
        # A last wave that needs no more than the half-empty tiles, which take a third of the time.
        short = _edge(m, n, tile_m, tile_n) * parts
        last = 0.3 if 0 < rest < short else 1.0 if rest else 0.0
        work = 2 * tile_m * tile_n * ceil_div(depth, parts)
        filling = 0.25  # waves' worth of time in which the adapter starts and drains
        return float((waves + last + filling) * work) / (flops / units * speed)

    estimates = [
        (seconds(m_, n_, speed), m_, n_, tm, tn)
        for m_, n_, tm, tn, speed in _staged_tiles(target, m, n, parts)
    ]
    best, tile_m, tile_n, thread_m, thread_n = min(estimates)
    tile_k = _tile_k(tile_m, tile_n)
    more = {
        "prefetch": int(prefetch and depth // parts >= 256),  # it loads one round that is not used
        "single": int(single),
        "edge": int(_edge(m, n, tile_m, tile_n) > 0),
    }
    return best, staged(tile_m, tile_n, tile_k, thread_m, thread_n, **more)


def _edge(m: int, n: int, tile_m: int, tile_n: int) -> int:
    """How many tiles a half-empty last row or column of tiles has, of the largest tiles: smaller
    ones gain nothing by a loop of their own."""
    if (tile_m, tile_n) != (128, 128):
        return 0
    if n > tile_n and 0 < n % tile_n <= tile_n // 2:
        return ceil_div(m, tile_m)
    if m > tile_m and 0 < m % tile_m <= tile_m // 2:
        return ceil_div(n, tile_n)
    return 0


def _tile_k(tile_m: int, tile_n: int) -> int:
    """How deep a tile goes between barriers; small ones go deep."""
    return 16 if tile_m + tile_n > 128 else 32  # in 16 KiB


def _choose(
    m: str, n: str, depth: str, prefetch: bool = True, single: bool = False, tall: bool = False
) -> Callable[[Target, Values], dict[str, Any]]:
    """Tuning choices for a product of the sizes that these dims or options have.

    prefetch, single   see `staged`
    tall       the rows of a are neighbours in memory: on a CPU a thread then takes more of them, so
           that more of a page of memory is read while it is at hand
    """

    def choose(target: Target, v: Values) -> dict[str, Any]:
        if target.kind != "cpu":
            parts = v.get("parts", 1)
            return _fastest(target, v[m], v[n], v[depth], parts, prefetch, single)[1]
        return _direct_tile(target, v[m], v[n], v[depth], tall)

    return choose


def _direct_tile(target: Target, m: int, n: int, depth: int, tall: bool = False) -> dict[str, Any]:
    """The choices for a product that comes straight from storage. tall: see `_choose`."""
    if target.lanes != 8:
        return direct(8, 8)
    widths = [32, 40, 24, 16, 8]  # the first of those that waste the fewest columns
    thread_n = min(widths, key=lambda width: round_up(n, width))
    more = tall and round_up(m, 64) == round_up(m, 32)
    eights = "shader-int64" in target.features and depth % 8 == 0
    return direct(8 if more else 4, thread_n, lanes=8, eights=eights)


def _choose_both(target: Target, v: Values) -> dict[str, Any]:
    """Tuning choices for both gradients in one dispatch: sizes of tiles are named by product."""
    products = {
        "x": _direct_tile(target, v["rows"], v["d_in"], v["d_out"]),
        "weight": _direct_tile(target, v["d_out"], v["d_in"], v["rows"], tall=True),
    }
    sizes = ("tile_m", "tile_n", "thread_m", "thread_n")
    own = {f"{name}_{size}": tile[size] for name, tile in products.items() for size in sizes}
    common = {k: value for k, value in products["x"].items() if k not in sizes}
    return {**common, **own}


def _tiles_of_both(v: Values) -> int:
    dx = ceil_div(v["rows"], v["x_tile_m"]) * ceil_div(v["d_in"], v["x_tile_n"])
    dweight = ceil_div(v["d_out"], v["weight_tile_m"]) * ceil_div(v["d_in"], v["weight_tile_n"])
    return int(dx + dweight)


def _alternatives(
    m: str, n: str, depth: str, turned: bool = True
) -> Callable[[Target, Values], list[dict[str, Any]]]:
    """Tuning choices to measure for a product of these sizes: all tiles, with and without prefetch,
    where a is turned in both ways, and half as deep where no load then has to look for the end."""

    def alternatives(target: Target, v: Values) -> list[dict[str, Any]]:
        if target.kind == "cpu":
            plain = [direct(m, n) for m, n in ((8, 8), (4, 8), (8, 4), (4, 16), (4, 4))]
            if target.lanes != 8:
                return plain
            return plain[:2] + [
                direct(m, n, lanes=8, eights=eights)
                for m in (4, 8)
                for n in (8, 16, 24, 32, 40)
                for eights in sorted({False, "shader-int64" in target.features})
            ]
        lines_m, lines_n = v[m], v[n]
        tiles = _staged_tiles(target, lines_m, lines_n, v.get("parts", 1))
        tiles += [(64, 128, 8, 8, 1.0), (128, 64, 8, 8, 1.0)]
        halves = (16, 8) if v[depth] % 16 == 8 else (16,)
        return [
            staged(tm, tn, tile_k, own_m, own_n, prefetch=prefetch, single=single, edge=edge)
            for tm, tn, own_m, own_n in dict.fromkeys(tile[:4] for tile in tiles)
            for tile_k in (halves if _tile_k(tm, tn) == 16 else (_tile_k(tm, tn),))
            for prefetch in (0, 1)
            for single in ((0, 1) if turned else (0,))
            for edge in range(1 + bool(_edge(lines_m, lines_n, tm, tn)))
        ]

    return alternatives


def _tiles(m: int, n: int, choices: Values) -> int:
    return ceil_div(m, choices["tile_m"]) * ceil_div(n, choices["tile_n"])


def _grid(m: str, n: str) -> Callable[[Values], Grid]:
    def grid(v: Values) -> Grid:
        x, y, _ = spread(_tiles(v[m], v[n], v))
        return (x, y, v.get("parts", 1))

    return grid


def _whole(by: int, bindings: Mapping[str, tuple[str, ...]], v: Values) -> list[str]:
    """The bindings all of whose sizes divide by a number."""
    return [b for b, sizes in bindings.items() if all(v.get(s, 1) % by == 0 for s in sizes)]


def _vec4(**bindings: tuple[str, ...]) -> Callable[[Values], list[str]]:
    """The bindings all of whose row lengths, first columns and widths divide by 4."""
    return lambda v: _whole(4, bindings, v)


def _vec8(**bindings: tuple[str, ...]) -> Callable[[Values], list[str]]:
    """Where operands are loaded by 8: the bindings all of whose sizes divide by 8."""
    return lambda v: _whole(8, bindings, v) if v["lanes"] == v["tile_k"] == 8 else []


def _flops(v: Values) -> int:
    return int(2 * v["rows"] * v["d_out"] * v["d_in"])


def _weight_bytes(v: Values) -> int:
    return int(ITEMSIZE[v["weight_dtype"]] * v["d_out"] * v["d_in"])


def _traffic(v: Values, *operands: tuple[str, str]) -> int:
    """Bytes of the rows of operands: (binding, dim or option of its width)."""
    return int(v["rows"] * sum(itemsize(v, binding) * v[width] for binding, width in operands))


_STORED = {"weight_dtype": "f32"}  # how the weight is stored; of i8, weight_scale holds the factors
_OUT = ("out_start", "out_stride", "d_out")
_DOUT = ("dout_start", "dout_stride", "d_out")
_X = ("x_start", "x_stride", "d_in")
_RANK = ("rank",)

_BACKWARD_READS = {
    "dout": "*rows dout_stride",
    "weight": "d_out d_in",
    "weight_scale?": "d_out",
    "dlow?": "*rows rank",
    "A?": "rank d_in",
}


def _stored(v: Values) -> dict[str, Any]:
    return {"weight": v["weight_dtype"]}


FORWARD = Kernel(
    "linear_forward",
    reads={
        "x": "*rows x_stride",
        "weight": "d_out d_in",
        "weight_scale?": "d_out",
        "bias?": "d_out",
        "residual?": "*rows d_out",
        "low?": "*rows rank",
        "B?": "d_out rank",
    },
    writes={"out": "*rows out_stride"},
    options={"x_start": 0, "out_start": 0, "activation": "none", "scale": 1.0, **_STORED},
    choose=_choose("rows", "d_out", "d_in"),
    alternatives=_alternatives("rows", "d_out", "d_in"),
    grid=_grid("rows", "d_out"),
    vec4=_vec4(x=_X, weight=("d_in",), bias=_OUT, residual=_OUT, low=_RANK, B=_RANK, out=_OUT),
    vec8=_vec8(x=_X, weight=("d_in",)),
    stored=_stored,
    flops=_flops,
    half=frozenset({"x", "out"}),
    traffic=lambda v: _traffic(v, ("x", "d_in"), ("out", "d_out")) + _weight_bytes(v),
)

BACKWARD_X = Kernel(
    "linear_backward_x",
    reads=_BACKWARD_READS,
    adds={"dx": "*rows dx_stride"},
    options={"dout_start": 0, "dx_start": 0, "scale": 1.0, **_STORED},
    choose=_choose("rows", "d_in", "d_out", single=True),
    alternatives=_alternatives("rows", "d_in", "d_out"),
    grid=_grid("rows", "d_in"),
    vec4=_vec4(
        dout=_DOUT,
        weight=("d_in",),
        dlow=_RANK,
        A=("d_in",),
        dx=("dx_start", "dx_stride", "d_in"),
    ),
    vec8=_vec8(dout=_DOUT, weight=("d_in",)),
    stored=_stored,
    flops=_flops,
    half=frozenset({"dout", "dx"}),
    traffic=lambda v: _traffic(v, *2 * [("dx", "d_in")], ("dout", "d_out")) + _weight_bytes(v),
)

BACKWARD_X_PARTIAL = Kernel(
    "linear_backward_x_partial",
    reads=_BACKWARD_READS,
    writes={"dx_partials": "parts part_stride"},
    options={"dout_start": 0, "scale": 1.0, **_STORED},
    choose=_choose("rows", "d_in", "d_out", single=True),
    alternatives=_alternatives("rows", "d_in", "d_out"),
    grid=_grid("rows", "d_in"),
    vec4=_vec4(
        dout=_DOUT,
        weight=("d_in",),
        dlow=_RANK,
        A=("d_in",),
        dx_partials=("d_in", "part_stride"),
    ),
    vec8=_vec8(dout=_DOUT, weight=("d_in",)),
    stored=_stored,
    flops=_flops,
    half=frozenset({"dout"}),
    traffic=lambda v: (
        4 * v["rows"] * v["parts"] * v["d_in"] + _traffic(v, ("dout", "d_out")) + _weight_bytes(v)
    ),
)

BACKWARD_WEIGHT = Kernel(
    "linear_backward_weight",
    reads={"dout": "*rows dout_stride", "x": "*rows x_stride"},
    adds={"dweight": "d_out d_in", "dbias?": "d_out"},
    options={"dout_start": 0, "x_start": 0},
    choose=_choose("d_out", "d_in", "rows", prefetch=False, tall=True),
    alternatives=_alternatives("d_out", "d_in", "rows", turned=False),
    grid=_grid("d_out", "d_in"),
    vec4=_vec4(dout=_DOUT, x=_X, dweight=("d_in",)),
    vec8=_vec8(dout=(*_DOUT, "thread_m"), x=_X),
    flops=_flops,
    half=frozenset({"dout", "x"}),
    traffic=lambda v: _traffic(v, ("x", "d_in"), ("dout", "d_out")) + 8 * v["d_out"] * v["d_in"],
)

# For CPUs, where a dispatch takes 25 to 50 µs besides its work.
BACKWARD = Kernel(
    "linear_backward",
    reads={"dout": "*rows dout_stride", "x": "*rows x_stride", "weight": "d_out d_in"},
    adds={"dx": "*rows dx_stride", "dweight": "d_out d_in", "dbias?": "d_out"},
    options={"dout_start": 0, "x_start": 0, "dx_start": 0},
    choose=_choose_both,
    grid=lambda v: (_tiles_of_both(v), 1, 1),
    vec4=_vec4(
        dout=_DOUT,
        x=_X,
        weight=("d_in",),
        dx=("dx_start", "dx_stride", "d_in"),
        dweight=("d_in",),
    ),
    vec8=_vec8(dout=(*_DOUT, "weight_thread_m"), x=_X, weight=("d_in",)),
    flops=lambda v: 2 * _flops(v),
    half=frozenset({"dout", "x", "dx"}),
    traffic=lambda v: (
        _traffic(v, ("x", "d_in"), *2 * [("dout", "d_out")], *2 * [("dx", "d_in")])
        + 12 * v["d_out"] * v["d_in"]
    ),
)

BACKWARD_WEIGHT_PARTIAL = Kernel(
    "linear_backward_weight_partial",
    reads={"dout": "*rows dout_stride", "x": "*rows x_stride"},
    writes={"weight_partials": "parts weight_stride", "bias_partials?": "parts bias_stride"},
    options={"d_out": 1, "d_in": 1, "dout_start": 0, "x_start": 0},
    choose=_choose("d_out", "d_in", "rows", tall=True),
    alternatives=_alternatives("d_out", "d_in", "rows", turned=False),
    grid=_grid("d_out", "d_in"),
    vec4=_vec4(dout=_DOUT, x=_X, weight_partials=("d_in", "weight_stride")),
    vec8=_vec8(dout=(*_DOUT, "thread_m"), x=_X),
    flops=_flops,
    half=frozenset({"dout", "x"}),
    traffic=lambda v: (
        _traffic(v, ("x", "d_in"), ("dout", "d_out")) + 4 * v["parts"] * v["d_out"] * v["d_in"]
    ),
)


def columns(x: Tensor | Columns, width: int, of: str) -> Columns:
    """x as a range of columns, checked to be `width` wide and inside its tensor."""
    if isinstance(x, Tensor):
        x = Columns(x, 0, x.shape[-1])
    if x.width != width or x.start < 0 or x.start + x.width > x.tensor.shape[-1]:
        raise ShapeError(
            f"{of}: columns {x.start}..{x.start + x.width} of {x.tensor.name} {x.tensor.shape}, "
            f"{width} are needed"
        )
    return x


def plan_forward(
    plan: Plan,
    x: Tensor | Columns,
    weight: Tensor,
    out: Tensor | Columns,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation = "none",
    low: Tensor | None = None,
    B: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Plan out = activation(scale (x weightᵀ + low Bᵀ) + bias) + residual; no backward.

    x (*, d_in), weight (d_out, d_in), bias (d_out), residual and out (*, d_out); low (*, rank) and
    B (d_out, rank), both or none. Raises ShapeError where they do not fit.
    """
    d_out, d_in = weight.shape
    x, out = columns(x, d_in, "linear_forward: x"), columns(out, d_out, "linear_forward: out")
    plan.dispatch(
        FORWARD,
        x=x.tensor,
        **stored_weight(plan, weight),
        bias=bias,
        residual=residual,
        low=low,
        B=B,
        out=out.tensor,
        x_start=x.start,
        out_start=out.start,
        activation=activation,
        scale=scale,
    )


def stored_weight(plan: Plan, weight: Tensor) -> dict[str, Any]:
    """The bindings and options of a weight, however it is stored."""
    scale = plan.layout.scales.get(weight)
    return {"weight": weight, "weight_scale": scale, "weight_dtype": weight.dtype}


def plan_backward_x(
    plan: Plan,
    dout: Tensor | Columns,
    weight: Tensor,
    dx: Tensor | Columns,
    dlow: Tensor | None = None,
    A: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Plan dx += scale (dout weight + dlow A); the first contribution to an activation's gradient
    overwrites.

    dout (*, d_out), weight (d_out, d_in), dx (*, d_in); dlow (*, rank) and A (rank, d_in), both or
    none. Raises ShapeError where they do not fit, or where some columns of a gradient would be
    overwritten and the others left unwritten.
    Where the tiles of dx are too few to fill the adapter the sum is split in parts.
    """
    d_out, d_in = weight.shape
    dout = columns(dout, d_out, "linear_backward_x: dout")
    dx = columns(dx, d_in, "linear_backward_x: dx")
    rows = dout.tensor.size // dout.tensor.shape[-1]
    parts = _parts(plan.target, rows, d_in, d_out, dispatch=2e-5)
    given: dict[str, Any] = {
        "dout": dout.tensor,
        **stored_weight(plan, weight),
        "dlow": dlow,
        "A": A,
        "dout_start": dout.start,
        "scale": scale,
    }
    if parts > 1 and dx.width == dx.tensor.shape[-1]:
        plan.dispatch(BACKWARD_X_PARTIAL, **given, dx_partials=partial(plan, dx.tensor, parts))
        sum_partials(plan)
        return
    plan.dispatch(BACKWARD_X, **given, dx=dx.tensor, dx_start=dx.start)
    _check_first(plan, dx)


def _check_first(plan: Plan, dx: Columns) -> None:
    """Raises ShapeError where the last dispatch overwrote only some columns of dx."""
    first = "dx" not in plan.sections[plan.section][-1].accumulate
    if first and dx.width < dx.tensor.shape[-1]:
        raise ShapeError(
            f"linear_backward_x: {dx.tensor.name} gets its first contribution in only "
            f"{dx.width} of {dx.tensor.shape[-1]} columns"
        )


def plan_backward_weight(
    plan: Plan,
    dout: Tensor | Columns,
    x: Tensor | Columns,
    dweight: Tensor,
    dbias: Tensor | None = None,
) -> None:
    """Plan dweight += doutᵀ x and dbias += the sum of dout's rows.

    dout (*, d_out), x (*, d_in), dweight (d_out, d_in), dbias (d_out). Where the tiles of dweight
    are too few to fill the adapter the rows are split: partial sums, added up by
    `sum_partials`, which the caller plans. Raises ShapeError where shapes do not fit.
    """
    d_out, d_in = dweight.shape
    dout = columns(dout, d_out, "linear_backward_weight: dout")
    x = columns(x, d_in, "linear_backward_weight: x")
    rows = dout.tensor.size // dout.tensor.shape[-1]
    given: dict[str, Any] = {
        "dout": dout.tensor,
        "x": x.tensor,
        "dout_start": dout.start,
        "x_start": x.start,
    }
    parts = _parts(plan.target, d_out, d_in, rows)
    if parts == 1:
        plan.dispatch(BACKWARD_WEIGHT, **given, dweight=dweight, dbias=dbias)
        return
    plan.dispatch(
        BACKWARD_WEIGHT_PARTIAL,
        **given,
        d_out=d_out,
        d_in=d_in,
        weight_partials=partial(plan, dweight, parts),
        bias_partials=None if dbias is None else partial(plan, dbias, parts),
    )


def plan_backward(
    plan: Plan,
    dout: Tensor | Columns,
    x: Tensor | Columns,
    weight: Tensor,
    dx: Tensor | Columns,
    dweight: Tensor | None,
    dbias: Tensor | None = None,
    dlow: Tensor | None = None,
    A: Tensor | None = None,
) -> None:
    """Plan what `plan_backward_weight`, unless dweight is None, and `plan_backward_x` do.

    On a CPU in one dispatch, where the weight is f32 and there is no dlow. Raises ShapeError as
    these do.
    """
    d_out, d_in = weight.shape
    dout = columns(dout, d_out, "linear_backward: dout")
    x = columns(x, d_in, "linear_backward: x")
    dx = columns(dx, d_in, "linear_backward: dx")
    sizes = {"rows": x.tensor.size // x.tensor.shape[-1], "d_out": d_out, "d_in": d_in}
    tiles = _tiles_of_both({**sizes, **_choose_both(plan.target, sizes)})
    alone = dlow is None and weight.dtype == "f32"
    if dweight is not None and alone and plan.target.kind == "cpu" and tiles < 1 << 16:
        plan.dispatch(
            BACKWARD,
            dout=dout.tensor,
            x=x.tensor,
            weight=weight,
            dx=dx.tensor,
            dweight=dweight,
            dbias=dbias,
            dout_start=dout.start,
            x_start=x.start,
            dx_start=dx.start,
        )
        _check_first(plan, dx)
        return
    if dweight is not None:
        plan_backward_weight(plan, dout, x, dweight, dbias)
    plan_backward_x(plan, dout, weight, dx, dlow, A)


@functools.cache
def _parts(target: Target, m: int, n: int, depth: int, dispatch: float = 0.0) -> int:
    """How many parts a sum over `depth` is split into, so that few tiles fill the adapter.

    Weighs the waves of workgroups against writing and reading the partial sums.
    dispatch   seconds that one dispatch more costs
    """
    if target.kind == "cpu":
        return 1
    adapter, nbytes = _ADAPTERS[target.kind], 4 * m * n

    def seconds(parts: int) -> float:
        sums = dispatch + (2 * parts + 2) * nbytes / adapter.bandwidth if parts > 1 else 0.0
        return _fastest(target, m, n, depth, parts)[0] + sums

    most = min(depth // 64, target.usable_binding // (2 * nbytes), 128)
    return min(range(1, max(1, most) + 1), key=seconds)


# An adapter's own part of a product: low = scale x Aᵀ and out += low Bᵀ. low and its gradient hold
# the scale, so that nothing else need be scaled.


def plan_low(plan: Plan, x: Tensor | Columns, adapter: Adapter, name: str) -> Tensor:
    """Plan a new tensor low = scale x Aᵀ, (*, rank), of x (*, d_in)."""
    shape = (x if isinstance(x, Tensor) else x.tensor).shape
    low = plan.tensor(name, (*shape[:-1], adapter.a.shape[0]))
    plan_forward(plan, x, adapter.a, low, scale=adapter.scale)
    return low


def plan_backward_b(plan: Plan, dout: Tensor | Columns, low: Tensor, adapter: Adapter) -> None:
    """Plan B's gradient, and add to low's."""
    if dB := plan.layout.grad(adapter.b):
        plan_backward_weight(plan, dout, low, dB)
    plan_backward_x(plan, dout, adapter.b, plan.grad(low), scale=adapter.scale)


def plan_backward_a(plan: Plan, x: Tensor | Columns, low: Tensor, adapter: Adapter) -> Tensor:
    """Plan A's gradient from low's, which is returned: times A it is a part of x's gradient."""
    dlow = plan.grad(low)
    if dA := plan.layout.grad(adapter.a):
        plan_backward_weight(plan, dlow, x, dA)
    return dlow


def linear(
    plan: Plan,
    x: Tensor | Columns,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: Activation = "none",
    name: str = "out",
    storage: DType = "f32",
) -> Tensor:
    """activation(x weightᵀ + bias) + residual, and its backward.

    Where the plan's layout has an adapter of weight, scale (x Aᵀ) Bᵀ is added in front of the
    bias (LoRA, Hu et al. 2021, arXiv:2106.09685).

    Parameters
    ----------
    x           (*, d_in), a whole tensor or a range of columns
    weight      (d_out, d_in), a parameter
    bias        (d_out), a parameter
    residual    (*, d_out); its gradient is then out's own, and is only added into
    activation  softplus: the gradient of `out` is expected to hold the gradient before the
                activation, since the op that reads `out` can fold in the derivative for free
    storage     of the result: f32 or f16

    Returns a new tensor `name` (*, d_out). The backward adds into x's gradient, and into those of weight and
    bias where they are trained. Raises ShapeError where shapes do not fit.
    """
    d_out, d_in = weight.shape
    x = columns(x, d_in, "linear: x")
    out = plan.tensor(name, (*x.tensor.shape[:-1], d_out), storage)
    adapter, low = plan.layout.adapters.get(weight), None
    if adapter:
        low = plan_low(plan, x, adapter, f"{name}_low")
    plan_forward(
        plan, x, weight, out, bias, residual, activation, low, adapter.b if adapter else None
    )
    if residual is not None:
        plan.share_grad(out, residual)

    def backward() -> None:
        dout = plan.grad(out)
        dweight = plan.layout.grad(weight)
        dbias = None if bias is None else plan.layout.grad(bias)
        if dweight is None and dbias is not None:  # rare; the kernel makes both
            dweight = plan.tensor(f"unused_d{weight.name}", weight.shape)
        dx, dlow = Columns(plan.grad(x.tensor), x.start, x.width), None
        if adapter and low:
            plan_backward_b(plan, dout, low, adapter)
            dlow = plan_backward_a(plan, x, low, adapter)
        a = adapter.a if adapter else None
        plan_backward(plan, dout, x, weight, dx, dweight, dbias, dlow, a)

    plan.tape(backward)
    return out
