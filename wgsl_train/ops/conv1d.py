"""Causal depthwise convolution over time, then SiLU: the short filter in front of the scan."""

from ..kernel import (
    ALIGN,
    Grid,
    Kernel,
    Target,
    Tensor,
    Values,
    ceil_div,
    elementwise,
    itemsize,
    multiprocessors,
    round_up,
    spread,
)
from ..plan import Plan
from .carry import Carried
from .linear import Columns, columns
from .low_rank import effective_weight
from .sum_partials import partials


def _packed(v: Values) -> bool:
    return all(v[size] % 4 == 0 for size in ("d_inner", "x_stride", "x_start"))


def _channels(d_inner: int) -> int:
    """Lanes along the channels."""
    return d_inner // 4 if d_inner % 4 == 0 else d_inner


def _run(target: Target, batch: int, seqlen: int, d_inner: int) -> int:
    """Timesteps of a lane: long runs read little twice, but must leave a large GPU enough lanes."""
    few = batch * seqlen * _channels(d_inner) < 1 << 20
    return 16 if few and target.kind == "discrete" else 64


def _choices(target: Target, v: Values) -> dict[str, int]:
    run = _run(target, v["batch"], v["seqlen"], v["d_inner"])
    return {"workgroup": 64, "unroll": 4 if target.kind == "cpu" else 8, "run": run}


def _backward_choices(target: Target, v: Values) -> dict[str, int]:
    """Rounds of 4 timesteps, or of 3, which need fewer registers, where a GPU's multiprocessors
    must run more than 6 workgroups each to have all under way at once."""
    choices = {"workgroup": 64, "unroll": 4}
    if target.kind != "cpu" and _workgroups({**v, **choices}) > 6 * multiprocessors(target):
        choices["unroll"] = 3
    return choices


_ALTERNATIVES = [
    {"workgroup": workgroup, "unroll": unroll} for workgroup in (64, 128, 256) for unroll in (4, 8)
]


def _workgroups(v: Values) -> int:
    channels = v["d_inner"] // 4 if _packed(v) else v["d_inner"]
    return ceil_div(v["batch"] * ceil_div(v["seqlen"], v["run"]) * channels, v["workgroup"])


def _grid(v: Values) -> Grid:
    return spread(_workgroups(v))


def _traffic(v: Values, *bindings: str) -> int:
    return int(v["batch"] * v["seqlen"] * v["d_inner"] * sum(itemsize(v, b) for b in bindings))


FORWARD = Kernel(
    "conv1d_silu_forward",
    reads={
        "x": "batch seqlen x_stride",
        "weight": "d_inner one d_conv",
        "bias?": "d_inner",
        "state?": "batch context d_inner",
        "documents?": "batch seqlen",
    },
    writes={"u": "batch seqlen d_inner"},
    options={"x_start": 0},
    choose=_choices,
    alternatives=lambda target, v: [
        {**walk, "run": run} for walk in _ALTERNATIVES for run in (16, 32, 64)
    ],
    grid=_grid,
    vec4=lambda v: ("x", "bias", "state", "u") if _packed(v) else (),
    u32=frozenset({"documents"}),
    half=frozenset({"x", "u"}),
    flops=lambda v: 2 * v["batch"] * v["seqlen"] * v["d_inner"] * (v["d_conv"] + 2),
    traffic=lambda v: _traffic(v, "x", "u"),
)

STATE = Kernel(
    "conv1d_silu_state",
    reads={
        "x": "batch seqlen x_stride",
        "initial?": "batch context d_inner",
        "documents?": "batch seqlen",
    },
    writes={"state": "batch context d_inner"},
    options={"x_start": 0},
    grid=elementwise(lambda v: int(v["batch"] * v["d_inner"])),
    u32=frozenset({"documents"}),
    half=frozenset({"x"}),
    traffic=lambda v: 8 * v["batch"] * v["context"] * v["d_inner"],
)

BACKWARD = Kernel(
    "conv1d_silu_backward",
    reads={
        "du": "batch seqlen d_inner",
        "x": "batch seqlen x_stride",
        "weight": "d_inner one d_conv",
        "bias?": "d_inner",
        "state?": "batch context d_inner",
        "documents?": "batch seqlen",
    },
    # sums over runs of timesteps, those for weight and then those for bias: a run's begin at
    # multiples of these strides; 0: there are none
    writes={"dx": "batch seqlen x_stride", "partials?": "n_partials"},
    # run: timesteps of a lane, and of a partial sum
    options={"x_start": 0, "run": 64, "weight_stride": 0, "bias_stride": 0},
    choose=_backward_choices,
    alternatives=lambda target, v: [
        {"workgroup": workgroup, "unroll": unroll}
        for workgroup in (64, 128)
        for unroll in (2, 3, 4)
    ],
    grid=_grid,
    vec4=lambda v: ("du", "x", "bias", "state", "dx") if _packed(v) else (),
    u32=frozenset({"documents"}),
    half=frozenset({"du", "x", "dx"}),
    flops=lambda v: 2 * v["batch"] * v["seqlen"] * v["d_inner"] * (3 * v["d_conv"] + 6),
    traffic=lambda v: _traffic(v, "du", "x", "dx"),
)

BACKWARD_STATE = Kernel(
    "conv1d_silu_backward_state",
    reads={
        "du": "batch seqlen d_inner",
        "x": "batch seqlen x_stride",
        "weight": "d_inner one d_conv",
        "bias?": "d_inner",
        "state": "batch context d_inner",
        "documents?": "batch seqlen",
        "dfinal": "batch context d_inner",
    },
    writes={"dstate": "batch context d_inner"},
    options={"x_start": 0},
    grid=elementwise(lambda v: int(v["batch"] * v["d_inner"])),
    u32=frozenset({"documents"}),
    traffic=lambda v: 20 * v["batch"] * v["context"] * v["d_inner"],
)

STATE_BACKWARD = Kernel(
    "conv1d_silu_state_backward",
    reads={"dfinal": "batch context d_inner", "documents?": "batch seqlen"},
    writes={"dx": "batch seqlen x_stride"},
    options={"x_start": 0},
    grid=elementwise(lambda v: int(v["batch"] * v["d_inner"])),
    u32=frozenset({"documents"}),
    traffic=lambda v: 12 * v["batch"] * v["context"] * v["d_inner"],
)


def conv1d_silu(
    plan: Plan,
    x: Tensor | Columns,
    weight: Tensor,
    bias: Tensor | None,
    documents: Tensor | None = None,
    state: Carried | None = None,
    name: str = "u",
) -> Tensor:
    """u = SiLU(x filtered over time), (batch, seqlen, d_inner), stored like x.

    x (batch, seqlen, d_inner) f32 or f16, a whole tensor or a range of columns; weight
    (d_inner, 1, d_conv) f32, its last tap multiplying the present timestep; bias (d_inner,) f32.
    Inputs before the first timestep are zero, or come from state (batch, d_conv - 1, d_inner) f32,
    which is left as the last inputs are. documents (batch, seqlen) u32 are ids that do not decrease
    along a row: inputs of other documents count as zero, and the state is document 0's. The
    backward pass overwrites these columns of x's gradient, and that of the state.
    Where the plan's layout has an adapter of weight, it is added to weight.
    Raises ShapeError where shapes do not fit.
    Source: mamba_ssm's causal_conv1d_fn and causal_conv1d_update.
    """
    d_inner, _, d_conv = weight.shape
    x = columns(x, d_inner, "conv1d_silu: x")
    batch, seqlen, _ = x.tensor.shape
    if d_conv == 1:
        state = None
    weight = effective_weight(plan, weight, "conv1d.weight")
    u = plan.tensor(name, (batch, seqlen, d_inner), x.tensor.dtype)
    given = {"x": x.tensor, "x_start": x.start}
    taps = {"weight": weight, "bias": bias, "documents": documents}
    initial = state.initial if state else None
    plan.dispatch(FORWARD, **given, **taps, state=initial, u=u)
    if state:
        plan.dispatch(STATE, **given, documents=documents, initial=state.apart, state=state.final)

    def backward() -> None:
        run = _run(plan.target, batch, seqlen, d_inner)
        parts = batch * ceil_div(seqlen, run)
        dweight = plan.weight_grad(weight)
        dbias = plan.layout.grad(bias) if bias else None
        summed = [grad for grad in (dweight, dbias) if grad]
        du, dx = plan.grad(u), plan.grad(x.tensor)
        plan.dispatch(
            BACKWARD,
            **given,
            **taps,
            state=initial,
            du=du,
            dx=dx,
            partials=partials(plan, summed, parts) if summed else None,
            run=run,
            weight_stride=round_up(dweight.size, ALIGN) if dweight else 0,
            bias_stride=round_up(dbias.size, ALIGN) if dbias else 0,
        )
        if state and state.dinitial:
            plan.dispatch(
                BACKWARD_STATE,
                **given,
                **taps,
                state=initial,
                du=du,
                dfinal=state.dfinal,
                dstate=state.dinitial,
            )
            plan.dispatch(
                STATE_BACKWARD,
                dfinal=state.dfinal,
                documents=documents,
                dx=dx,
                x_start=x.start,
            )

    plan.tape(backward)
    return u
