"""Causal depthwise convolution over time, then SiLU: the short filter in front of the scan."""

from ..errors import ShapeError
from ..kernel import Grid, Kernel, Target, Tensor, Values, by_kind, ceil_div, elementwise, spread
from ..plan import Plan
from .low_rank import effective_weight
from .sum_partials import partial


def _channels(d_inner: int) -> int:
    """Lanes along the channels."""
    return d_inner // 4 if d_inner % 4 == 0 else d_inner


def _run(target: Target, batch: int, seqlen: int, d_inner: int) -> int:
    """Timesteps of a lane: long runs read little twice, but must leave a large GPU enough lanes."""
    few = batch * seqlen * _channels(d_inner) < 1 << 20
    return 16 if few and target.kind == "discrete" else 64


def _choices(target: Target, v: Values) -> dict[str, int]:
    run = _run(target, v["batch"], v["seqlen"], v["d_inner"])
    return {"workgroup": 64, "unroll": 4, "run": run}


def _grid(v: Values) -> Grid:
    lanes = v["batch"] * ceil_div(v["seqlen"], v["run"]) * _channels(v["d_inner"])
    return spread(ceil_div(lanes, v["workgroup"]))


FORWARD = Kernel(
    "conv1d_silu_forward",
    reads={
        "xz": "batch seqlen two_d_inner",
        "weight": "d_inner one d_conv",
        "bias?": "d_inner",
        "state?": "batch context d_inner",
    },
    writes={"u_delta": "batch seqlen two_d_inner"},
    choose=_choices,
    alternatives=lambda target, v: [
        {"workgroup": workgroup, "run": run} for workgroup in (64, 128, 256) for run in (16, 32, 64)
    ],
    grid=_grid,
    vec4=lambda v: ("xz", "bias", "state", "u_delta") if v["d_inner"] % 4 == 0 else (),
    flops=lambda v: 2 * v["batch"] * v["seqlen"] * v["d_inner"] * (v["d_conv"] + 2),
    traffic=lambda v: 8 * v["batch"] * v["seqlen"] * v["d_inner"],
)

STATE = Kernel(
    "conv1d_silu_state",
    reads={"xz": "batch seqlen two_d_inner"},
    writes={"state": "batch context d_inner"},
    grid=elementwise(lambda v: int(v["batch"] * v["d_inner"])),
    traffic=lambda v: 8 * v["batch"] * v["context"] * v["d_inner"],
)

BACKWARD = Kernel(
    "conv1d_silu_backward",
    reads={
        "du_ddt": "batch seqlen two_d_inner",
        "xz": "batch seqlen two_d_inner",
        "weight": "d_inner one d_conv",
        "bias?": "d_inner",
    },
    writes={
        "dxz": "batch seqlen two_d_inner",
        "weight_partials?": "parts stride",
        "bias_partials?": "parts bias_stride",
    },
    options={"run": 64},  # timesteps of a lane, and of a partial sum
    choose=by_kind({"workgroup": 64, "unroll": 4}),
    alternatives=lambda target, v: [{"workgroup": workgroup} for workgroup in (32, 128, 256)],
    grid=_grid,
    vec4=lambda v: ("du_ddt", "xz", "bias", "dxz") if v["d_inner"] % 4 == 0 else (),
    flops=lambda v: 2 * v["batch"] * v["seqlen"] * v["d_inner"] * (3 * v["d_conv"] + 6),
    traffic=lambda v: 12 * v["batch"] * v["seqlen"] * v["d_inner"],
)


def conv1d_silu(
    plan: Plan,
    xz: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    u_delta: Tensor,
    state: Tensor | None = None,
) -> None:
    """Filter x, the first d_inner columns of xz, over time; u = SiLU goes to those of u_delta.

    xz and u_delta (batch, seqlen, 2 * d_inner) f32; weight (d_inner, 1, d_conv) f32, its last tap
    multiplying the present timestep; bias (d_inner,) f32. Inputs before the first timestep are
    zero, or come from state (batch, d_conv - 1, d_inner) f32, which is then brought up to date.
    Where the plan's layout has an adapter of weight, it is added to weight.
    Raises ShapeError where shapes do not fit, or a state is given in training.
    Source: mamba_ssm's causal_conv1d_fn and causal_conv1d_update.
    """
    batch, seqlen, _ = xz.shape
    d_conv = weight.shape[-1]
    if d_conv == 1:
        state = None
    if state and plan.training:
        raise ShapeError("conv1d_silu carries a state between calls in inference only")
    weight = effective_weight(plan, weight, "conv1d.weight")
    plan.dispatch(FORWARD, xz=xz, weight=weight, bias=bias, state=state, u_delta=u_delta)
    if state:
        plan.dispatch(STATE, xz=xz, state=state)

    def backward() -> None:
        run = _run(plan.target, batch, seqlen, weight.shape[0])
        parts = batch * ceil_div(seqlen, run)
        dweight = plan.weight_grad(weight)
        dbias = plan.layout.grad(bias) if bias else None
        plan.dispatch(
            BACKWARD,
            du_ddt=plan.grad(u_delta),
            xz=xz,
            weight=weight,
            bias=bias,
            dxz=plan.grad(xz),
            weight_partials=dweight and partial(plan, dweight, parts),
            bias_partials=dbias and partial(plan, dbias, parts),
            run=run,
        )

    plan.tape(backward)
