"""Looking tokens up in a table, which may lie in several pieces."""

from collections.abc import Sequence

from ..kernel import ITEMSIZE, Kernel, Target, Tensor, Values, ceil_div, elementwise, spread
from ..plan import Plan
from .linear import plan_backward_weight, plan_backward_x, plan_forward, stored_weight


def _columns(v: Values) -> int:
    return int(v["d_model"]) // 4 if v["d_model"] % 4 == 0 else int(v["d_model"])


FORWARD = Kernel(
    "embedding_forward",
    reads={"tokens": "*rows", "weight": "piece_rows d_model", "weight_scale?": "piece_rows"},
    writes={"out": "*rows d_model"},
    # weight_dtype: how it is stored; of i8, weight_scale holds the factors of rows
    options={"first_row": 0, "scale": 1.0, "weight_dtype": "f32"},
    grid=elementwise(lambda v: v["rows"] * _columns(v)),
    vec4=lambda v: ("weight", "out") if v["d_model"] % 4 == 0 else (),
    u32=frozenset({"tokens"}),
    stored=lambda v: {"weight": v["weight_dtype"]},
    traffic=lambda v: (4 + ITEMSIZE[v["weight_dtype"]]) * v["rows"] * v["d_model"],
)


def _choose(target: Target, v: Values) -> Values:
    """per_lane: tokens that a lane compares between barriers; subgroup: 1 where subgroups of 8
    look through the batch for `each` rows of the table, which pays while that is few looks."""
    if target.kind != "cpu":
        return {"workgroup": 256, "per_lane": 8, "unroll": 8, "subgroup": 0}
    if target.lanes == 8 and v["rows"] * v["piece_rows"] <= 1 << 22 and v["d_model"] <= 1024:
        each = max(1, 8 // ceil_div(_columns(v), 8))
        return {"workgroup": 8, "subgroup": 1, "each": each}
    return {"workgroup": 32, "per_lane": 64, "unroll": 4, "subgroup": 0}


BACKWARD = Kernel(
    "embedding_backward",
    reads={"dout": "*rows d_model", "tokens": "*rows"},
    writes={"dweight": "piece_rows d_model"},  # in place, and only rows of tokens that occur
    options={"first_row": 0},
    choose=_choose,
    grid=lambda v: spread(ceil_div(v["piece_rows"], v["each"]) if v["subgroup"] else v["rows"]),
    vec4=lambda v: ("dout", "dweight") if v["d_model"] % 4 == 0 else (),
    u32=frozenset({"tokens"}),
    flops=lambda v: v["rows"] * v["d_model"],
    traffic=lambda v: 12 * v["rows"] * v["d_model"],
)


def embedding(plan: Plan, tokens: Tensor, name: str) -> Tensor:
    """Row tokens[...] of the table that is the parameter `name`, for each token.

    tokens (batch, seqlen) u32, checked against the table by the caller; the table
    (vocab_size, d_model). Returns (batch, seqlen, d_model) f32.

    Where the plan's layout has an adapter of the table, scale B[tokens[...]] A is added.
    """
    pieces = plan.layout.pieces[name]
    adapters = [plan.layout.adapters.get(piece) for _, piece in pieces]
    out = _look_up(plan, tokens, pieces, "embedding")
    if adapters[0]:
        A, scale = adapters[0].a, adapters[0].scale
        B = [(first, of.b) for (first, _), of in zip(pieces, adapters, strict=True) if of]
        # low and its gradient hold the scale, so that nothing else need be scaled
        low = _look_up(plan, tokens, B, "embedding_low", scale)
        plan_backward_x(plan, low, A, out)  # out += low A

    def backward() -> None:
        dout = plan.grad(out)
        _add_rows(plan, dout, tokens, pieces)
        if adapters[0]:
            if dA := plan.layout.grad(A):
                plan_backward_weight(plan, low, dout, dA)
            plan_forward(plan, dout, A, plan.grad(low), scale=scale)
            _add_rows(plan, plan.grad(low), tokens, B)

    plan.tape(backward)
    return out


Pieces = Sequence[tuple[int, Tensor]]


def _look_up(plan: Plan, tokens: Tensor, pieces: Pieces, name: str, scale: float = 1.0) -> Tensor:
    """Plan a new tensor: scale times the rows of a table."""
    out = plan.tensor(name, (*tokens.shape, pieces[0][1].shape[1]))
    for first_row, piece in pieces:
        given = {**stored_weight(plan, piece), "first_row": first_row, "scale": scale}
        plan.dispatch(FORWARD, tokens=tokens, out=out, **given)
    return out


def _add_rows(plan: Plan, dout: Tensor, tokens: Tensor, pieces: Pieces) -> None:
    """Plan the gradient of a table, where it trains."""
    for first_row, piece in pieces:
        if dweight := plan.layout.grad(piece):
            plan.dispatch(BACKWARD, dout=dout, tokens=tokens, dweight=dweight, first_row=first_row)
