"""States that one chunk of a sequence hands to the next."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernel import Kernel, Tensor, elementwise
from ..plan import Plan

BEGIN = Kernel(
    "carry_begin",
    reads={"state": "*n"},
    writes={"initial": "*n"},
    grid=elementwise(lambda v: int(v["n"])),
)


@dataclass(frozen=True)
class Carried:
    """A state that an op starts from, and the one that it leaves.

    initial    read by the op
    final      written by the op; in inference the same tensor
    dinitial   written by the op's backward pass; None: no gradient leaves the chunk
    dfinal     the gradient by `final`, which the host gives; goes with `dinitial`
    """

    initial: Tensor
    final: Tensor
    dinitial: Tensor | None = None
    dfinal: Tensor | None = None

    @property
    def apart(self) -> Tensor | None:
        """`initial`, unless it is `final` too, as which an op binds it then."""
        return None if self.initial is self.final else self.initial

    def chained(self, plan: Plan) -> Carried:
        """The same, with persistent tensors for the gradients."""
        dinitial, dfinal = (
            plan.persistent(f"d{self.final.name}.{end}", self.final.shape)
            for end in ("initial", "final")
        )
        return Carried(self.initial, self.final, dinitial, dfinal)


def carried(plan: Plan, name: str, shape: tuple[int, ...]) -> Carried:
    """A persistent state, f32, that a plan starts from, and leaves brought up to date.

    Where the plan trains, ops read a copy, since the backward pass may need what the state was,
    and a layer that is planned a second time must not start from where it ended. What is not
    finite there is copied as 0, or a step that is skipped would spoil all that come after it.
    """
    final = plan.persistent(name, shape)
    if not plan.training:
        return Carried(final, final)
    initial = plan.tensor(f"{name}.initial", shape)
    plan.dispatch(BEGIN, state=final, initial=initial)
    return Carried(initial, final)
