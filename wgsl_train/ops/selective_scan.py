"""The selective scan of Mamba-1, with its skip and gate, forward and backward.

The sequence is cut twice. A *chunk* is what the backward pass replays: the forward pass keeps the
state at each chunk's start, and nothing else of size d_inner x d_state. A *segment* is a run of
chunks that one workgroup walks from end to end, carrying the state in registers. Where batch and
channels alone fill the machine there is one segment; elsewhere several run side by side, after two
small dispatches that find the state each one starts from.

States are stored as vectors of four: (..., groups, d_inner, 4) with groups = ceil(d_state / 4), so
that neighbouring lanes, which hold neighbouring channels, read neighbouring vectors.

Where documents are packed into a row, each begins with a state of zero. Its first step is marked in
the sign of delta, which is free, since softplus makes no negative numbers: the kernels bind all the
buffers that WebGPU guarantees already.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from ..errors import ConfigError, ShapeError
from ..kernel import (
    ALIGN,
    Kernel,
    Target,
    Tensor,
    Values,
    alignment,
    by_kind,
    ceil_div,
    divisor,
    elementwise,
    itemsize,
    round_up,
)
from ..plan import Plan
from .carry import Carried
from .low_rank import effective_weight

CHUNK = 32  # steps between the states that are kept
MAX_STATE = 1024
# Workgroups that fill an adapter, by its kind. The backward pass waits more on each step, and so
# gains from more of them than the forward pass, which pays as much for the states in between.
FORWARD_WORKGROUPS = {"portable": 64, "cpu": 2, "discrete": 256}
BACKWARD_WORKGROUPS = {"portable": 64, "cpu": 2, "discrete": 1536}

Discretization = Literal["euler", "zoh"]


def _groups(d_state: int) -> int:
    return ceil_div(d_state, 4)


def _quads(target: Target, groups: int) -> int:
    """Vectors of four states a lane holds. On a CPU several: loads and barriers are dear there."""
    return divisor(groups, 4) if target.kind == "cpu" else 1


def _channels(target: Target, groups: int) -> int:
    """Channels of a workgroup, whose lanes are channels x groups / quads."""
    lanes = 32 if target.kind == "cpu" else 128
    return max(1, lanes * _quads(target, groups) // groups)


def _by_subgroup(target: Target, groups: int) -> bool:
    """Whether lanes share loads and sums by subgroups of 8, as lavapipe has them."""
    return target.kind == "cpu" and target.lanes == 8 and groups <= 4


def _by_fours(target: Target, v: Values) -> bool:
    """Whether, besides, a lane takes four neighbouring channels whole: loads and stores are dear on
    a CPU, and cheapest by fours."""
    return _by_subgroup(target, _groups(v["d_state"])) and v["d_inner"] % 4 == 0


def _lanes(target: Target, v: Values) -> dict[str, int]:
    """Choices for the kernels that walk each segment once, `span` steps at a time."""
    groups = _groups(v["d_state"])
    quads, channels = _quads(target, groups), _channels(target, groups)
    return {
        "groups": groups,
        "quads": quads,
        "channels": channels,
        "workgroup": channels * groups // quads,
        "subgroup": int(_by_subgroup(target, groups)),
        "span": divisor(v["chunk"], 2 if target.kind == "cpu" else 8),
        "ragged": _ragged(v, channels),
    }


def _forward_lanes(target: Target, v: Values) -> dict[str, int]:
    """Choices for scan_forward. wide: a lane takes four channels."""
    choices, wide = _lanes(target, v), _by_fours(target, v)
    return {**choices, "wide": 1, "workgroup": 8} if wide else {**choices, "wide": 0}


def _backward_lanes(target: Target, v: Values) -> dict[str, int]:
    """Choices for scan_backward: `kept` steps in registers, `span` steps in workgroup memory."""
    groups, cpu = _groups(v["d_state"]), target.kind == "cpu"
    if _by_fours(target, v) and v["channels"] == 32:
        return {
            "wide": 1,
            "subgroup": 1,
            "workgroup": 8,
            "kept": divisor(v["chunk"], 2),
            "ragged": _ragged(v, v["channels"]),
        }
    quads = divisor(groups, 4 if cpu else 2)
    kept = divisor(v["chunk"], 2 if cpu else max(8, v["chunk"] // 32))
    return {
        "wide": 0,
        "subgroup": 0,
        "quads": quads,
        "workgroup": v["channels"] * groups // quads,
        "kept": kept,
        "span": divisor(kept, 2 if groups <= 128 else 1),
        "ragged": _ragged(v, v["channels"]),
    }


def _ragged(v: Values, channels: int) -> int:
    """Whether some lanes or steps lie outside."""
    return int(v["seqlen"] % v["chunk"] > 0 or v["d_inner"] % channels > 0)


def _wide(v: Values, *bindings: str) -> tuple[str, ...]:
    return bindings if v["wide"] else ()


def _packed(v: Values) -> tuple[str, ...]:
    return ("x_dbl",) if v["dt_rank"] % 4 == 0 and v["d_state"] % 4 == 0 else ()


def _steps(v: Values) -> int:
    """Steps of one state each."""
    return int(v["batch"] * v["seqlen"] * v["d_inner"] * v["d_state"])


def _traffic(v: Values, *wide: str) -> int:
    """Bytes of operands with a value a channel, and of B and C where there are such."""
    columns = v["d_inner"] * sum(itemsize(v, b) for b in wide) + 8 * v.get("d_state", 0)
    return int(v["batch"] * v["seqlen"] * columns)


_SHAPE = {
    "dt_rank": 1,
    "d_state": 16,
    "chunk": CHUNK,
    "per_segment": 1,
    "segments": 1,
    "resets": False,  # whether delta's signs mark where documents begin
}
_OPERANDS = {
    "u": "batch seqlen d_inner",
    "delta": "batch seqlen d_inner",
    "x_dbl": "batch seqlen d_x_dbl",
    "AD": "planes d_inner quad",
}


def _without(operand: str) -> dict[str, str]:
    return {name: shape for name, shape in _OPERANDS.items() if name != operand}


RESET = Kernel(
    "scan_reset",
    reads={"documents": "batch seqlen"},
    writes={"delta": "batch seqlen d_inner"},
    grid=elementwise(lambda v: int(v["batch"] * v["seqlen"] * v["d_inner"])),
    u32=frozenset({"documents"}),
    traffic=lambda v: 4 * v["batch"] * v["seqlen"],
)

PREPARE = Kernel(
    "scan_prepare",
    reads={"A_log": "d_inner d_state", "D": "d_inner"},
    writes={"AD": "planes d_inner quad"},
    options={"clamp": None},
    grid=elementwise(lambda v: v["planes"] * v["d_inner"]),
    vec4=lambda v: ("AD",),
)

LOCAL = Kernel(
    "scan_local",
    reads=_OPERANDS,
    writes={
        "chunk_states": "batch chunks groups d_inner quad",
        "delta_sums": "batch segments d_inner",
    },
    options={**_SHAPE, "discretization": "euler"},
    choose=_lanes,
    grid=lambda v: (ceil_div(v["d_inner"], v["channels"]), v["segments"] - 1, v["batch"]),
    vec4=lambda v: ("AD", "chunk_states", *_packed(v)),
    half=frozenset({"u"}),
    flops=lambda v: 5 * _steps(v),
)

COMBINE = Kernel(
    "scan_combine",
    reads={
        "AD": "planes d_inner quad",
        "delta_sums?": "batch segments d_inner",  # where there are several segments
        "state?": "batch groups d_inner quad",
    },
    writes={"states": "batch slots groups d_inner quad"},
    options={"segments": 1, "per_segment": 1, "reverse": False, "resets": False},
    choose=by_kind({"workgroup": 64}),
    grid=elementwise(lambda v: v["batch"] * v["groups"] * v["d_inner"], per_group=64),
    vec4=lambda v: ("AD", "state", "states"),
    traffic=lambda v: 8 * v["batch"] * v["segments"] * v["groups"] * v["d_inner"] * 4,
)

FORWARD = Kernel(
    "scan_forward",
    reads={**_OPERANDS, "xz": "batch seqlen d_xz"},
    writes={
        "chunk_states?": "batch chunks groups d_inner quad",
        "gy": "outputs plane",  # g, then y where the backward pass needs it
        "state?": "batch groups d_inner quad",
    },
    # started: whether chunk_states holds what each segment starts from
    options={**_SHAPE, "started": False, "discretization": "euler"},
    choose=_forward_lanes,
    grid=lambda v: (ceil_div(v["d_inner"], v["channels"]), v["segments"], v["batch"]),
    vec4=lambda v: (
        "AD",
        "chunk_states",
        "state",
        *_packed(v),
        *_wide(v, "u", "delta", "xz", "gy"),
    ),
    half=frozenset({"u", "xz", "gy"}),
    flops=lambda v: 7 * _steps(v),
    traffic=lambda v: _traffic(v, "u", "delta", "xz", *["gy"] * v["outputs"]),
)

BACKWARD_GATE = Kernel(
    "scan_backward_gate",
    reads={"xz": "batch seqlen d_xz", "y": "batch seqlen d_inner"},
    writes={"dg": "batch seqlen d_inner", "dxz": "batch seqlen d_xz"},
    grid=elementwise(lambda v: ceil_div(v["batch"] * v["seqlen"] * v["d_inner"], 4)),
    vec4=lambda v: ("xz", "y", "dg", "dxz") if v["d_inner"] % 4 == 0 else (),
    half=frozenset({"xz", "y", "dg", "dxz"}),
    traffic=lambda v: _traffic(v, "xz", "y", "dg", "dg", "dxz"),
)

BACKWARD_LOCAL = Kernel(
    "scan_backward_local",
    reads={**_without("u"), "dy": "batch seqlen d_inner"},
    writes={
        "carry": "batch segments groups d_inner quad",
        "delta_sums": "batch segments d_inner",
    },
    options=_SHAPE,
    choose=_lanes,
    grid=lambda v: (ceil_div(v["d_inner"], v["channels"]), v["segments"] - 1, v["batch"]),
    vec4=lambda v: ("AD", "carry", *_packed(v)),
    half=frozenset({"dy"}),
    flops=lambda v: 4 * _steps(v),
)

BACKWARD = Kernel(
    "scan_backward",
    reads={
        **_OPERANDS,
        "dy": "batch seqlen d_inner",
        "chunk_states": "batch chunks groups d_inner quad",
    },
    # du, then ddt; partials begin with what BACKWARD_LOCAL and COMBINE found, in `carried` elements
    writes={"du_ddt": "two plane", "partials": "n_partials"},
    # leaves: whether what leaves the first segment takes the place there of what entered it
    options={
        **_SHAPE,
        "channels": 32,
        "carried": 0,
        "leaves": False,
        "discretization": "euler",
    },
    choose=_backward_lanes,
    grid=lambda v: (ceil_div(v["d_inner"], v["channels"]), v["segments"], v["batch"]),
    vec4=lambda v: (
        "AD",
        "chunk_states",
        "partials",
        *_packed(v),
        *_wide(v, "u", "delta", "dy", "du_ddt"),
    ),
    half=frozenset({"u", "dy"}),
    flops=lambda v: 18 * _steps(v),
)


def _sums_elements(v: Values) -> int:
    """Sums that scan_backward_sums makes: of vec4s where columns divide by 4."""
    rows, columns = v["batch"] * v["seqlen"], v["d_x_dbl"]
    width = 4 if _packed(v) else 1
    parameters = v["d_inner"] * (v["d_state"] // width + 1)
    return int(rows * columns // width + parameters + v.get("n_state", 0) // width)


BACKWARD_SUMS = Kernel(
    "scan_backward_sums",
    reads={"partials": "n_partials"},
    writes={"dx_dbl": "batch seqlen d_x_dbl", "dstate?": "*n_state"},
    adds={"dA_log?": "d_inner d_state", "dD?": "d_inner"},
    options={
        "dt_rank": 1,
        "d_state": 16,
        "blocks": 1,
        "segments": 1,
        "d_inner": 1,
        "carried": 0,  # elements of partials before the sums: dstate is among them
    },
    grid=elementwise(_sums_elements),
    vec4=lambda v: ("partials", "dx_dbl", "dstate", "dA_log") if _packed(v) else (),
)


def selective_scan(
    plan: Plan,
    u: Tensor,
    delta: Tensor,
    x_dbl: Tensor,
    xz: Tensor,
    A_log: Tensor,
    D: Tensor,
    *,
    dt_rank: int,
    d_state: int,
    discretization: Discretization = "euler",
    a_log_clamp: tuple[float, float] | None = None,
    documents: Tensor | None = None,
    state: Carried | None = None,
    chunk: int | None = None,
    per_segment: int | None = None,
    name: str = "scan",
) -> Tensor:
    """Scan each channel through its states, add the skip, gate the result.

    h[t] = exp(delta A) h[t-1] + weight B u,  y = sum_n C h + D u,  result = y * silu(z), where
    A = -exp(A_log) and weight is delta ("euler") or (exp(delta A) - 1) / A ("zoh").

    u (batch, seqlen, d_inner) f32 or f16; delta likewise f32, after its softplus; x_dbl
    (batch, seqlen, dt_rank + 2 d_state) holds [dt | B | C], xz (batch, seqlen, 2 d_inner) holds
    [x | z], f32 or f16; A_log (d_inner, d_state), D (d_inner,). Returns (batch, seqlen, d_inner),
    stored like u.

    The backward pass writes all of the gradients of u; of delta, the one before its softplus; and
    of x_dbl, 0 for dt; and the z half of xz's. It adds to A_log's and D's where they train.
    Where the plan's layout has an adapter of A_log, it is added to A_log.

    a_log_clamp   A_log is clamped to this range, without a gradient outside it
    documents     (batch, seqlen) u32, ids that do not decrease along a row: the state is zero where
                  one begins. A state that is given belongs to document 0
    state         (batch, ceil(d_state / 4), d_inner, 4): the scan starts from it and leaves its
                  last state there
    chunk         steps between the states that are kept for the backward pass; by default what
                  suits the adapter, at least 16
    per_segment   chunks a segment; by default what fills the adapter

    Raises ShapeError where shapes do not fit or d_state is above 1,024, ConfigError where the
    discretization is unknown. Source: Gu & Dao, "Mamba" (2023), algorithm 2 and section 3.3.2.
    """
    batch, seqlen, d_inner = u.shape
    groups = _groups(d_state)
    if not 1 <= d_state <= MAX_STATE:
        raise ShapeError(f"selective_scan: d_state is {d_state}, must be 1 to {MAX_STATE:,}")
    if discretization not in ("euler", "zoh"):
        raise ConfigError(f"discretization is {discretization!r}, must be 'euler' or 'zoh'")
    columns = {
        "A_log": (A_log, d_state),
        "delta": (delta, d_inner),
        "xz": (xz, 2 * d_inner),
        "x_dbl": (x_dbl, dt_rank + 2 * d_state),
    }
    for operand, (tensor, width) in columns.items():
        if tensor.shape[-1] != width:
            raise ShapeError(
                f"selective_scan: {operand} is {tensor.shape}, must have {width} columns with "
                f"d_inner = {d_inner}, d_state = {d_state}, dt_rank = {dt_rank}"
            )
    chunk = chunk or (CHUNK // 2 if plan.target.kind == "cpu" else CHUNK)
    chunk = min(chunk, 1 << (seqlen - 1).bit_length())
    channels = _channels(plan.target, groups)
    chunks, blocks = ceil_div(seqlen, chunk), ceil_div(d_inner, channels)
    resets = documents is not None
    shape: dict[str, Any] = {
        "dt_rank": dt_rank,
        "d_state": d_state,
        "chunk": chunk,
        "resets": resets,
    }

    def cut(workgroups: dict[str, int]) -> dict[str, int]:
        """How the chunks are dealt out to segments."""
        wanted = workgroups.get(plan.target.kind, workgroups["portable"])
        most = min(chunks, ceil_div(wanted, batch * blocks))
        per = per_segment or ceil_div(chunks, most)
        return {"per_segment": per, "segments": ceil_div(chunks, per)}

    walk = cut(FORWARD_WORKGROUPS)
    segments = walk["segments"]
    operands: dict[str, Tensor] = {
        "u": u,
        "delta": delta,
        "x_dbl": x_dbl,
        "AD": plan.tensor(f"{name}.AD", (2 * groups + 1, d_inner, 4)),
    }
    if resets:
        plan.dispatch(RESET, documents=documents, delta=delta)
    A_log = effective_weight(plan, A_log, f"{name}.A_log")
    plan.dispatch(PREPARE, A_log=A_log, D=D, AD=operands["AD"], clamp=a_log_clamp)
    chunk_states = None
    plane = round_up(u.size, alignment(u.dtype))
    if plan.training or segments > 1:
        chunk_states = plan.tensor(f"{name}.chunk_states", (batch, chunks, groups, d_inner, 4))
    gy = plan.tensor(f"{name}.gy", (2 if plan.training else 1, plane), u.dtype)
    g = gy.view(0, u.shape, f"{gy.name}.g")
    # a state that is kept for the backward pass lies in chunk_states
    started = segments > 1 or bool(state and plan.training)
    sums = None
    if segments > 1:
        sums = plan.tensor(f"{name}.delta_sums", (batch, segments, d_inner))
        plan.dispatch(
            LOCAL,
            **operands,
            chunk_states=chunk_states,
            delta_sums=sums,
            **shape,
            **walk,
            discretization=discretization,
        )
    if started:
        plan.dispatch(
            COMBINE,
            AD=operands["AD"],
            delta_sums=sums,
            state=state.initial if state else None,
            states=chunk_states,
            **walk,
            resets=resets,
        )
    plan.dispatch(
        FORWARD,
        **operands,
        xz=xz,
        chunk_states=chunk_states,
        gy=gy,
        state=state.final if state else None,
        **shape,
        **walk,
        started=started,
        discretization=discretization,
    )

    def backward() -> None:
        walk = cut(BACKWARD_WORKGROUPS)
        segments = walk["segments"]
        dy = plan.grad(g)
        y = gy.view(plane, u.shape, f"{gy.name}.y")
        plan.dispatch(BACKWARD_GATE, xz=xz, y=y, dg=dy, dxz=plan.grad(xz))
        carry_shape = (batch, segments, groups, d_inner, 4)
        chained = bool(state and state.dinitial)
        carried = round_up(math.prod(carry_shape), ALIGN) if segments > 1 or chained else 0
        dBC_size = batch * seqlen * blocks * 2 * groups * 4
        sums_size = dBC_size + batch * segments * (groups + 1) * d_inner * 4
        partials = plan.tensor(f"{g.name}.partials", (carried + sums_size,))
        carry, sums = partials.view(0, carry_shape), None
        if segments > 1:
            sums = plan.tensor(f"{g.name}.carry_delta_sums", (batch, segments, d_inner))
            plan.dispatch(
                BACKWARD_LOCAL,
                **{name: tensor for name, tensor in operands.items() if name != "u"},
                dy=dy,
                carry=carry,
                delta_sums=sums,
                **shape,
                **walk,
            )
        if carried:
            plan.dispatch(
                COMBINE,
                AD=operands["AD"],
                delta_sums=sums,
                state=state.dfinal if state else None,
                states=carry,
                segments=segments,
                reverse=True,
                resets=resets,
            )
        du_ddt = plan.tensor(f"{g.name}.du_ddt", (2, plane))
        plan.set_grad(u, du_ddt.view(0, u.shape, f"d{u.name}"))
        plan.set_grad(delta, du_ddt.view(plane, u.shape, f"d{delta.name}"))
        plan.dispatch(
            BACKWARD,
            **operands,
            dy=dy,
            chunk_states=chunk_states,
            du_ddt=du_ddt,
            partials=partials,
            **shape,
            **walk,
            channels=channels,
            carried=carried,
            leaves=chained,
            discretization=discretization,
        )
        plan.dispatch(
            BACKWARD_SUMS,
            partials=partials if chained else partials.view(carried, (sums_size,)),
            dx_dbl=plan.grad(x_dbl),
            dstate=state.dinitial if state else None,
            dA_log=plan.weight_grad(A_log),
            dD=plan.layout.grad(D),
            dt_rank=dt_rank,
            d_state=d_state,
            d_inner=d_inner,
            blocks=blocks,
            segments=segments,
            carried=carried if chained else 0,
        )

    plan.tape(backward)
    return g
