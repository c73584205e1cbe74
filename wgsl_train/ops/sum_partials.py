"""Gradients of parameters that arrive as partial sums, added up in order, in one dispatch.

A sum over all rows of a batch (a weight's gradient, a bias's, A_log's) is made in two stages:
workgroups write partial sums, and a last dispatch adds them up in a fixed order. `partial`
hands out space for the first stage; `sum_partials` plans the last for all that was handed out
since, one dispatch for a whole block of a model rather than one a parameter.
"""

from collections.abc import Sequence

from ..kernel import ALIGN, Kernel, Tensor, Values, by_kind, ceil_div, itemsize, round_up, spread
from ..plan import Plan


def _groups(v: Values) -> int:
    def span(size: int) -> int:
        wide = size >= v["wide_from"]
        return int(4 * v["workgroup"] if wide else v["workgroup"] // v["slices"])

    return sum(ceil_div(size, span(size)) for _, _, size, _ in v["segments"])


SUM = Kernel(
    "sum_partials",
    reads={"partials": "n_partials"},
    adds={"grads": "n"},
    options={"segments": ()},  # (first partial, parts, elements, first gradient), ...
    # slices: lanes that share the parts of an element; wide_from: elements from which a lane
    # sums four neighbours instead
    choose=by_kind(
        {"workgroup": 256, "slices": 8, "wide_from": 1 << 16},
        cpu={"workgroup": 256, "slices": 1, "wide_from": 1 << 10},
    ),
    grid=lambda v: spread(_groups(v)),
    vec4=lambda v: ("partials",),
    half=frozenset({"grads"}),
    traffic=lambda v: sum(
        size * (4 * parts + 2 * itemsize(v, "grads")) for _, parts, size, _ in v["segments"]
    ),
)


def partial(plan: Plan, grad: Tensor, parts: int) -> Tensor:
    """Space for `parts` partial sums of a parameter's gradient: (parts, grad.size rounded up).

    Each part starts at a multiple of ALIGN elements: index by the second dim, not by the
    gradient's size.
    """
    stride = round_up(grad.size, ALIGN)
    return partials(plan, [grad], parts).view(0, (parts, stride), f"{grad.name}.partials")


def partials(plan: Plan, grads: Sequence[Tensor], parts: int) -> Tensor:
    """Space as `partial` makes it for each of several gradients, one behind another: (elements,)."""
    strides = [round_up(grad.size, ALIGN) for grad in grads]
    size, arena, start = parts * sum(strides), None, 0
    if plan.partials:
        last, _ = plan.partials[-1]
        end = last.start + last.size
        if 4 * (end + size) <= plan.target.usable_binding:
            arena, start = last.root, end
    arena = arena or plan.tensor(f"partials_for_{grads[0].name}", (0,))
    arena.shape = (start + size,)
    space, at = arena.view(start, (size,), f"{grads[0].name}.space"), 0
    for grad, stride in zip(grads, strides, strict=True):
        part = space.view(at, (parts, stride), f"{grad.name}.partials")
        plan.partials.append((part, grad))
        at += parts * stride
    return space


def sum_partials(plan: Plan) -> None:
    """Plan the sums of all partial gradients handed out since the last call."""
    pending, plan.partials = plan.partials, []
    groups: list[list[tuple[Tensor, Tensor]]] = []
    for space, grad in pending:
        # one dispatch binds one arena and one page, and adds once to a gradient: layers that share
        # parameters take turns
        before = groups[-1][-1] if groups else None
        alike = before and before[0].root is space.root and before[1].root is grad.root
        if not alike or _has(groups[-1], grad):
            groups.append([])
        groups[-1].append((space, grad))
    for segments in groups:
        arena, page = segments[0][0].root, segments[0][1].root
        first = min(g.start for _, g in segments)
        last = max(g.start + g.size for _, g in segments)
        plan.dispatch(
            SUM,
            partials=arena,
            grads=page.view(first, (last - first,), f"{page.name}[{first}:{last}]"),
            segments=tuple((p.start, p.shape[0], g.size, g.start - first) for p, g in segments),
        )


def _has(segments: list[tuple[Tensor, Tensor]], grad: Tensor) -> bool:
    return any(grad is other for _, other in segments)
