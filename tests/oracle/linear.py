import math

import numpy as np

from . import case, oracle

TILES = [  # other register tiles: staged in several ways, straight from storage
    {"tile_m": 64, "tile_n": 32, "tile_k": 8, "thread_m": 8, "thread_n": 4, "swizzle": 2, "warp_n": 8, "prefetch": 1, "single": 1, "edge": 1, "lanes": 0, "workgroup": 64},
    {"tile_m": 64, "tile_n": 32, "tile_k": 4, "thread_m": 16, "thread_n": 8, "swizzle": 1, "warp_n": 0, "prefetch": 0, "single": 0, "edge": 1, "lanes": 0, "workgroup": 16},
    {"tile_m": 64, "tile_n": 16, "tile_k": 4, "thread_m": 4, "thread_n": 16, "swizzle": 8, "lanes": 1, "workgroup": 16},
]  # fmt: skip
LARGE = {"tile_m": 128, "tile_n": 128, "tile_k": 16, "thread_m": 8, "thread_n": 8, "swizzle": 8, "warp_n": 8, "prefetch": 0, "single": 0, "edge": 0, "lanes": 0, "workgroup": 256}  # fmt: skip
TINY = {"tile_m": 4, "tile_n": 4, "tile_k": 4, "thread_m": 4, "thread_n": 4, "swizzle": 8, "lanes": 1, "workgroup": 1}  # fmt: skip


F32, LOW, DLOW = ("weight_scale",), ("low", "B"), ("dlow", "A")  # what a case leaves out


def dequantized(weight, weight_scale):
    return weight if weight_scale is None else weight_scale[:, None] * weight


def stored(leave_out=(), **values):
    """A case for each form in which a weight is stored but f32."""
    yield case(leave_out, **values, weight_dtype="i8")
    yield case((*leave_out, *F32), **values, weight_dtype="f16")


@oracle(
    case(F32, rows=37, d_out=45, d_in=33, x_stride=33, out_stride=45, rank=5),
    case((*F32, *LOW), rows=130, d_out=132, d_in=20, x_stride=20, out_stride=132),
    case(("residual", *F32), rows=70, d_out=24, d_in=40, x_stride=48, x_start=8, out_stride=80, out_start=24, activation="softplus", rank=8),
    case((*F32, *LOW), rows=9, d_out=10, d_in=6, x_stride=8, x_start=1, out_stride=16, out_start=3, activation="softplus", scale=0.5),
    case(("bias", *F32), rows=1, d_out=70, d_in=128, x_stride=128, out_stride=70, rank=70),
    case(("bias", "residual", *F32, *LOW), rows=1, d_out=1, d_in=1, x_stride=1, out_stride=1),
    *(case(F32, rows=67, d_out=68, d_in=36, x_stride=36, out_stride=68, rank=12, choices=t) for t in TILES),
    case((*F32, *LOW), rows=128, d_out=128, d_in=16, x_stride=16, out_stride=128, choices=LARGE),
    case((*F32, *LOW), rows=128, d_out=128, d_in=24, x_stride=24, out_stride=128, choices={**LARGE, "prefetch": 1}),
    case(F32, rows=140, d_out=152, d_in=24, x_stride=24, out_stride=152, rank=4, choices={**LARGE, "prefetch": 1, "edge": 1}),
    case((*F32, *LOW), rows=3, d_out=262_150, d_in=1, x_stride=1, out_stride=262_150, choices=TINY),  # a folded grid
    *stored(rows=37, d_out=45, d_in=33, x_stride=33, out_stride=45, rank=5),
    *stored(rows=70, d_out=24, d_in=40, x_stride=40, out_stride=24, rank=4),
    case((*F32, *LOW), rows=37, d_out=45, d_in=33, x_stride=33, out_stride=45, half=("x", "out")),
    case(F32, rows=70, d_out=24, d_in=40, x_stride=48, x_start=8, out_stride=24, rank=8, half=("x",)),
    case(("residual", *F32, *LOW), rows=70, d_out=24, d_in=40, x_stride=40, out_stride=48, out_start=8, half=("out",)),
    *(case((*F32, *LOW), rows=67, d_out=68, d_in=36, x_stride=36, out_stride=68, choices=t, half=("x", "out")) for t in TILES),
)  # fmt: skip
def linear_forward(
    x,
    weight,
    weight_scale,
    bias,
    residual,
    low,
    B,
    out_stride,
    x_start,
    out_start,
    activation,
    scale,
):
    weight = dequantized(weight, weight_scale)
    d_out, d_in = weight.shape
    y = x[:, x_start : x_start + d_in] @ weight.T
    if low is not None:
        y = y + low @ B.T
    y = scale * y
    if bias is not None:
        y = y + bias
    if activation == "softplus":
        y = np.logaddexp(0, y)
    if residual is not None:
        y = y + residual
    out = np.full((len(x), out_stride), np.nan)
    out[:, out_start : out_start + d_out] = y
    return {"out": out}


@oracle(
    case((*F32, *DLOW), rows=37, d_out=45, d_in=33, dout_stride=45, dx_stride=33),
    case(F32, rows=130, d_out=20, d_in=132, dout_stride=20, dx_stride=132, rank=8),
    case((*F32, *DLOW), rows=70, d_out=40, d_in=24, dout_stride=48, dout_start=8, dx_stride=80, dx_start=24, scale=2.5),
    case(F32, rows=9, d_out=6, d_in=10, dout_stride=8, dout_start=1, dx_stride=16, dx_start=3, rank=3),
    case((*F32, *DLOW), rows=1, d_out=1, d_in=1, dout_stride=1, dx_stride=1),
    *(case(F32, rows=67, d_out=36, d_in=68, dout_stride=36, dx_stride=68, rank=40, choices=t) for t in TILES),
    case((*F32, *DLOW), rows=128, d_out=16, d_in=128, dout_stride=16, dx_stride=128, choices=LARGE),
    case((*F32, *DLOW), rows=128, d_out=24, d_in=128, dout_stride=24, dx_stride=128, choices={**LARGE, "prefetch": 1, "single": 1}),
    *stored(rows=37, d_out=45, d_in=33, dout_stride=45, dx_stride=33, rank=5),
    *stored(DLOW, rows=70, d_out=40, d_in=24, dout_stride=40, dx_stride=24),
    case((*F32, *DLOW), rows=37, d_out=45, d_in=33, dout_stride=45, dx_stride=33, half=("dout", "dx")),
    case(F32, rows=70, d_out=40, d_in=24, dout_stride=48, dout_start=8, dx_stride=32, dx_start=8, rank=8, half=("dout", "dx")),
    case((*F32, *DLOW), rows=9, d_out=8, d_in=12, dout_stride=8, dx_stride=12, half=("dx",)),
)  # fmt: skip
def linear_backward_x(dout, weight, weight_scale, dlow, A, dx_stride, dout_start, dx_start, scale):
    weight = dequantized(weight, weight_scale)
    d_out, d_in = weight.shape
    product = dout[:, dout_start : dout_start + d_out] @ weight
    if dlow is not None:
        product = product + dlow @ A
    dx = np.full((len(dout), dx_stride), np.nan)
    dx[:, dx_start : dx_start + d_in] = scale * product
    return {"dx": dx}


@oracle(
    case(rows=37, d_out=45, d_in=33, dout_stride=45, x_stride=33),
    case(("dbias",), rows=70, d_out=24, d_in=40, dout_stride=80, dout_start=24, x_stride=48, x_start=8),
    case(rows=9, d_out=6, d_in=10, dout_stride=8, dout_start=1, x_stride=16, x_start=3),
    case(rows=1, d_out=1, d_in=1, dout_stride=1, x_stride=1),
    case(rows=20, d_out=130, d_in=132, dout_stride=130, x_stride=132),
    *(case(rows=37, d_out=72, d_in=68, dout_stride=72, x_stride=68, choices=t) for t in TILES),
    case(rows=16, d_out=128, d_in=128, dout_stride=128, x_stride=128, choices=LARGE),
    case(rows=36, d_out=152, d_in=136, dout_stride=152, x_stride=136, choices={**LARGE, "edge": 1}),
    case(rows=36, d_out=152, d_in=128, dout_stride=152, x_stride=128, choices={**LARGE, "edge": 1}),
    case(rows=37, d_out=45, d_in=33, dout_stride=45, x_stride=33, half=("dout", "x")),
    case(rows=70, d_out=24, d_in=40, dout_stride=80, dout_start=24, x_stride=48, x_start=8, half=("dout",)),
    case(rows=20, d_out=12, d_in=8, dout_stride=12, x_stride=8, half=("x",)),
    case(rows=72, d_out=64, d_in=40, dout_stride=72, dout_start=8, x_stride=48, x_start=8),
)  # fmt: skip
def linear_backward_weight(dout, x, d_out, d_in, dout_start, x_start, dbias):
    dout, x = dout[:, dout_start : dout_start + d_out], x[:, x_start : x_start + d_in]
    grads = {"dweight": dout.T @ x}
    return grads if dbias is None else grads | {"dbias": dout.sum(0)}


UNEQUAL = {"x_tile_m": 64, "x_tile_n": 16, "x_thread_m": 4, "x_thread_n": 16, "weight_tile_m": 128, "weight_tile_n": 8, "weight_thread_m": 8, "weight_thread_n": 8, "tile_k": 4, "swizzle": 2, "lanes": 1, "workgroup": 16}  # fmt: skip


@oracle(
    case(rows=37, d_out=45, d_in=33, dout_stride=45, x_stride=33, dx_stride=33),
    case(("dbias",), rows=70, d_out=24, d_in=40, dout_stride=80, dout_start=24, x_stride=48, x_start=8, dx_stride=80, dx_start=24),
    case(rows=9, d_out=6, d_in=10, dout_stride=8, dout_start=1, x_stride=16, x_start=3, dx_stride=12, dx_start=1),
    case(rows=1, d_out=1, d_in=1, dout_stride=1, x_stride=1, dx_stride=1),
    case(rows=300, d_out=20, d_in=36, dout_stride=20, x_stride=36, dx_stride=36),
    case(rows=9, d_out=300, d_in=36, dout_stride=300, x_stride=36, dx_stride=36),
    case(rows=130, d_out=200, d_in=68, dout_stride=200, x_stride=68, dx_stride=68, choices=UNEQUAL),
    case(rows=37, d_out=45, d_in=33, dout_stride=45, x_stride=33, dx_stride=33, half=("dout", "x", "dx")),
    case(rows=20, d_out=12, d_in=8, dout_stride=12, x_stride=8, dx_stride=8, half=("x",)),
    case(rows=70, d_out=64, d_in=40, dout_stride=72, dout_start=8, x_stride=48, x_start=8, dx_stride=40),
    case(rows=70, d_out=72, d_in=36, dout_stride=72, x_stride=36, dx_stride=36),
)  # fmt: skip
def linear_backward(dout, x, weight, d_out, d_in, dx_stride, dout_start, x_start, dx_start, dbias):
    dx = linear_backward_x(dout, weight, None, None, None, dx_stride, dout_start, dx_start, 1.0)
    return dx | linear_backward_weight(dout, x, d_out, d_in, dout_start, x_start, dbias)


@oracle(
    case((*F32, *DLOW), rows=37, d_out=45, d_in=33, dout_stride=45, parts=2, part_stride=1280),
    case(F32, rows=24, d_out=70, d_in=40, dout_stride=80, dout_start=8, parts=3, part_stride=960, scale=2.5, rank=4),
    case(F32, rows=3, d_out=6, d_in=10, dout_stride=8, dout_start=1, parts=4, part_stride=64, rank=5),
    *(case((*F32, *DLOW), rows=68, d_out=100, d_in=72, dout_stride=100, parts=3, part_stride=4928, choices=t) for t in TILES),
    *stored(rows=37, d_out=45, d_in=33, dout_stride=45, parts=2, part_stride=1280, rank=5),
    case((*F32, *DLOW), rows=24, d_out=72, d_in=40, dout_stride=80, dout_start=8, parts=3, part_stride=960, half=("dout",)),
)  # fmt: skip
def linear_backward_x_partial(
    dout, weight, weight_scale, dlow, A, dout_start, parts, part_stride, scale
):
    weight = dequantized(weight, weight_scale)
    dout = dout[:, dout_start : dout_start + len(weight)]
    span = math.ceil(math.ceil(len(weight) / parts) / 32) * 32  # outputs of a part
    partials = np.full((parts, part_stride), np.nan)
    for p in range(parts):
        outputs = slice(p * span, (p + 1) * span)
        product = dout[:, outputs] @ weight[outputs]
        if dlow is not None and p == parts - 1:
            product = product + dlow @ A
        partials[p, : product.size] = scale * product.ravel()
    return {"dx_partials": partials}


@oracle(
    case(rows=37, d_out=45, d_in=33, dout_stride=45, x_stride=33, parts=2, weight_stride=1536, bias_stride=64),
    case(("bias_partials",), rows=70, d_out=24, d_in=40, dout_stride=80, dout_start=24, x_stride=48, x_start=8, parts=3, weight_stride=960),
    case(rows=5, d_out=6, d_in=10, dout_stride=8, dout_start=1, x_stride=16, x_start=3, parts=4, weight_stride=64, bias_stride=64),
    *(case(rows=100, d_out=72, d_in=68, dout_stride=72, x_stride=68, parts=3, weight_stride=4928, bias_stride=128, choices=t) for t in TILES),
    case(rows=70, d_out=24, d_in=40, dout_stride=24, x_stride=40, parts=2, weight_stride=960, bias_stride=64, half=("dout", "x")),
)  # fmt: skip
def linear_backward_weight_partial(
    dout, x, d_out, d_in, dout_start, x_start, parts, weight_stride, bias_partials
):
    dout, x = dout[:, dout_start : dout_start + d_out], x[:, x_start : x_start + d_in]
    span = math.ceil(math.ceil(len(x) / parts) / 32) * 32  # rows of a part
    weight_partials = np.full((parts, weight_stride), np.nan)
    bias = None if bias_partials is None else np.full(bias_partials.shape, np.nan)
    for p in range(parts):
        rows = slice(p * span, (p + 1) * span)
        weight_partials[p, : d_out * d_in] = (dout[rows].T @ x[rows]).ravel()
        if bias is not None:
            bias[p, :d_out] = dout[rows].sum(0)
    partials = {"weight_partials": weight_partials}
    return partials if bias is None else partials | {"bias_partials": bias}
