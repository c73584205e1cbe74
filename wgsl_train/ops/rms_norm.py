"""Root-mean-square normalisation over the last axis."""

from ..kernel import DType, Kernel, Target, Tensor, Values, ceil_div, spread
from ..plan import Plan
from .sum_partials import partial

_LANES = (1, 8, 16, 32, 64, 128, 256)
_WORKGROUPS = (256, 192, 128, 64)
_HELD = 8  # columns that a lane keeps in registers, at most


def _columns(v: Values) -> int:
    """Columns of a row, where 4 neighbours are one that can be."""
    return int(v["d_model"] // 4 if v["d_model"] % 4 == 0 else v["d_model"])


def _forward(v: Values, workgroup: int, lanes: int) -> dict[str, int]:
    """Choices for the forward kernel. held: columns of a lane that stay in registers; 0: all are
    read twice."""
    held = ceil_div(_columns(v), lanes)
    return {"workgroup": workgroup, "lanes": lanes, "held": held if held <= _HELD else 0}


def _forward_choices(target: Target, v: Values) -> dict[str, int]:
    if target.kind == "cpu":
        return {"workgroup": 64, "lanes": 1, "held": 0}
    return _forward(v, 256, next((n for n in _LANES[3:] if _HELD * n >= _columns(v)), 256))


FORWARD = Kernel(
    "rms_norm_forward",
    reads={"x": "*rows d_model", "weight": "d_model"},
    writes={"out": "*rows d_model", "inv": "*rows"},
    options={"eps": 1e-5},
    choose=_forward_choices,
    alternatives=lambda target, v: [
        _forward(v, workgroup, lanes)
        for workgroup in (64, 128, 256)
        for lanes in _LANES
        if lanes <= workgroup
    ],
    grid=lambda v: spread(ceil_div(v["rows"], v["workgroup"] // v["lanes"])),
    vec4=lambda v: ("x", "weight", "out") if v["d_model"] % 4 == 0 else (),
    half=frozenset({"out"}),
    flops=lambda v: 4 * v["rows"] * v["d_model"],
)


def _backward(v: Values, workgroup: int) -> dict[str, int]:
    """Choices for the backward kernel, held as above."""
    held = ceil_div(_columns(v), workgroup)
    held = held if held <= _HELD // 4 else 0  # of four rows
    return {"workgroup": workgroup, "held": held, "subgroup": 0}


def _backward_choices(target: Target, v: Values) -> dict[str, int]:
    """The workgroup that leaves the fewest lanes without a column; subgroup: it is one, of 8."""
    columns = _columns(v)
    if target.kind == "cpu" and target.lanes == 8 and columns <= 8 * _HELD:
        return {"workgroup": 8, "held": ceil_div(columns, 8), "subgroup": 1}
    workgroup = min(_WORKGROUPS, key=lambda w: (ceil_div(columns, w) * w, -w))
    choices = _backward(v, workgroup)
    return {**choices, "held": 0} if target.kind == "cpu" else choices


BACKWARD = Kernel(
    "rms_norm_backward",
    reads={
        "dout": "*rows d_model",
        "x": "*rows d_model",
        "weight": "d_model",
        "inv": "*rows",
    },
    writes={"weight_partials?": "parts stride"},
    adds={"dx": "*rows d_model"},
    options={"rows_per_group": 16},  # 16, 32 or 64
    choose=_backward_choices,
    alternatives=lambda target, v: [
        choices
        for workgroup in _WORKGROUPS
        for choices in (_backward(v, workgroup), {**_backward(v, workgroup), "held": 0})
    ],
    grid=lambda v: spread(ceil_div(v["rows"], v["rows_per_group"])),
    vec4=lambda v: (
        ("dout", "x", "weight", "dx", "weight_partials") if v["d_model"] % 4 == 0 else ()
    ),
    half=frozenset({"dout"}),
    flops=lambda v: 9 * v["rows"] * v["d_model"],
)


def rms_norm(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    eps: float,
    name: str = "norm",
    storage: DType = "f32",
) -> Tensor:
    """Normalise each row of x by its root mean square, then scale each column by weight.

    x (..., d_model) f32; weight (d_model,) f32; eps is added to the mean square. Returns a tensor
    of x's shape, stored as f32 or f16. Raises ShapeError where the shapes do not fit. Source: Zhang & Sennrich,
    "Root Mean Square Layer Normalization" (2019).
    """
    out = plan.tensor(name, x.shape, storage)
    inv = plan.tensor(f"{name}_inv", x.shape[:-1])
    plan.dispatch(FORWARD, x=x, weight=weight, out=out, inv=inv, eps=eps)

    def backward() -> None:
        rows_per_group = 64 if plan.target.kind == "cpu" else 16
        dweight = plan.layout.grad(weight)
        partials = dweight and partial(plan, dweight, ceil_div(inv.size, rows_per_group))
        plan.dispatch(
            BACKWARD,
            dout=plan.grad(out),
            x=x,
            weight=weight,
            inv=inv,
            weight_partials=partials,
            dx=plan.grad(x),
            rows_per_group=rows_per_group,
        )

    plan.tape(backward)
    return out
