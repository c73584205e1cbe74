"""The gate of a gated MLP: SwiGLU."""

from ..errors import ShapeError
from ..kernel import Kernel, Tensor, Values, elementwise
from ..plan import Plan


def _elements(v: Values) -> int:
    return int(v["rows"] * v["d_ff"] // (4 if v["d_ff"] % 4 == 0 else 1))


FORWARD = Kernel(
    "swiglu_forward",
    reads={"x": "*rows two_d_ff"},
    writes={"out": "*rows d_ff"},
    grid=elementwise(_elements),
    vec4=lambda v: ("x", "out") if v["d_ff"] % 4 == 0 else (),
    half=frozenset({"x", "out"}),
    flops=lambda v: 6 * v["rows"] * v["d_ff"],
)

BACKWARD = Kernel(
    "swiglu_backward",
    reads={"dout": "*rows d_ff", "x": "*rows two_d_ff"},
    adds={"dx": "*rows two_d_ff"},
    grid=elementwise(_elements),
    vec4=lambda v: ("dout", "x", "dx") if v["d_ff"] % 4 == 0 else (),
    half=frozenset({"dout", "x", "dx"}),
    flops=lambda v: 12 * v["rows"] * v["d_ff"],
)


def swiglu(plan: Plan, x: Tensor, name: str = "gated") -> Tensor:
    """Plan up * silu(gate), x being [up | gate] as one projection makes them.

    x (*, 2 d_ff) f32 or f16; returns (*, d_ff), stored like x. Raises ShapeError where the columns are odd. Source:
    Shazeer, "GLU Variants Improve Transformer" (2020); the order is that of mamba_ssm's `GatedMLP`.
    """
    d_ff, odd = divmod(x.shape[-1], 2)
    if odd:
        raise ShapeError(f"swiglu: {x.name} {x.shape} does not divide into two halves")
    out = plan.tensor(name, (*x.shape[:-1], d_ff), x.dtype)
    plan.dispatch(FORWARD, x=x, out=out)
    plan.tape(lambda: plan.dispatch(BACKWARD, dout=plan.grad(out), x=x, dx=plan.grad(x)))
    return out
