"""One vector for a whole sequence."""

from ..kernel import Kernel, Tensor, by_kind, spread
from ..plan import Plan

MEAN_POOL = Kernel(
    "mean_pool",
    reads={"x": "batch seqlen d_model", "counted?": "batch seqlen"},
    writes={"out": "batch d_model"},
    choose=by_kind({"workgroup": 256}, cpu={"workgroup": 16}),
    grid=lambda v: spread(v["batch"]),
    u32=frozenset({"counted"}),
    vec4=lambda v: ("x", "out") if v["d_model"] % 4 == 0 else (),
    flops=lambda v: v["batch"] * (v["seqlen"] + 4) * v["d_model"],
)


def mean_pool(plan: Plan, x: Tensor, counted: Tensor | None = None, name: str = "pooled") -> Tensor:
    """The mean over time, divided by its L2 norm; for inference, no backward.

    x (batch, seqlen, d_model) f32; counted (batch, seqlen) u32, 1 for the timesteps that count, 0
    for the others; by default all do. Returns (batch, d_model) f32. Raises ShapeError where x has
    other axes.
    """
    out = plan.tensor(name, (x.shape[0], x.shape[-1]))
    plan.dispatch(MEAN_POOL, x=x, counted=counted, out=out)
    return out
