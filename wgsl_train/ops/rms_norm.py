"""Root-mean-square normalisation over the last axis."""

from ..kernel import DType, Kernel, Target, Tensor, Values, by_kind, ceil_div, spread
from ..plan import Plan
from .sum_partials import partial

FORWARD = Kernel(
    "rms_norm_forward",
    reads={"x": "*rows d_model", "weight": "d_model"},
    writes={"out": "*rows d_model", "inv": "*rows"},
    options={"eps": 1e-5},
    choose=by_kind({"workgroup": 256, "lanes": 32}, cpu={"workgroup": 64, "lanes": 1}),
    alternatives=lambda target, v: [
        {"workgroup": workgroup, "lanes": lanes} for workgroup in (64, 256) for lanes in (1, 16, 64)
    ],
    grid=lambda v: spread(ceil_div(v["rows"], v["workgroup"] // v["lanes"])),
    vec4=lambda v: ("x", "weight", "out") if v["d_model"] % 4 == 0 else (),
    half=frozenset({"out"}),
    flops=lambda v: 4 * v["rows"] * v["d_model"],
)


_WORKGROUPS = (256, 192, 128, 64)


def _backward_choices(target: Target, v: Values) -> dict[str, int]:
    """The workgroup that leaves the fewest lanes without a column."""
    columns = v["d_model"] // 4 if v["d_model"] % 4 == 0 else v["d_model"]
    return {"workgroup": min(_WORKGROUPS, key=lambda w: (ceil_div(columns, w) * w, -w))}


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
    alternatives=lambda target, v: [{"workgroup": workgroup} for workgroup in _WORKGROUPS],
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
