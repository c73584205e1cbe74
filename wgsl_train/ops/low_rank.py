"""Weights with their adapters added (LoRA), for the small ones that no matrix product reads.

A product adds its adapter to its sums (see linear.py) and never forms the whole weight; a weight
of few columns, such as a convolution's or A_log, is cheaper to form anew in each step.
"""

from ..kernel import Kernel, Tensor, Values, by_kind, ceil_div, elementwise, spread
from ..plan import Plan
from .sum_partials import sum_partials

FORWARD = Kernel(
    "low_rank_forward",
    reads={"weight": "*rows columns", "A": "rank columns", "B": "rows rank"},
    writes={"out": "*rows columns"},
    options={"scale": 1.0},
    grid=elementwise(lambda v: v["rows"] * v["columns"]),
    flops=lambda v: 2 * v["rows"] * v["columns"] * v["rank"],
)


def _groups(v: Values) -> int:
    """One for each element of A, and then B, an element a lane."""
    return int(v["rank"] * v["columns"] + ceil_div(v["rows"] * v["rank"], v["workgroup"]))


BACKWARD = Kernel(
    "low_rank_backward",
    reads={"dout": "*rows columns", "A": "rank columns", "B": "rows rank"},
    adds={"dA": "rank columns", "dB": "rows rank"},
    options={"scale": 1.0},
    choose=by_kind({"workgroup": 256}, cpu={"workgroup": 16}),
    grid=lambda v: spread(_groups(v)),
    flops=lambda v: 4 * v["rows"] * v["columns"] * v["rank"],
)


def effective_weight(plan: Plan, weight: Tensor, name: str) -> Tensor:
    """weight + scale B A, by the adapter that the plan's layout has of it, or weight itself.

    weight (rows, ..., columns) f32, a parameter. The gradient of what is returned is
    `plan.weight_grad` of it; where it is a new tensor `name`, A's and B's are made of that one.
    Source: Hu et al. 2021, arXiv:2106.09685.
    """
    adapter = plan.layout.adapters.get(weight)
    if adapter is None:
        return weight
    given = {"A": adapter.a, "B": adapter.b, "scale": adapter.scale}
    out = plan.tensor(name, weight.shape)
    plan.dispatch(FORWARD, weight=weight, out=out, **given)

    def backward() -> None:
        sum_partials(plan)  # of this gradient, which may lie in parts
        dA, dB = (
            plan.layout.grad(t) or plan.tensor(f"unused_d{t.name}", t.shape)
            for t in (adapter.a, adapter.b)
        )
        plan.dispatch(BACKWARD, dout=plan.grad(out), dA=dA, dB=dB, **given)

    plan.tape(backward)
    return out
