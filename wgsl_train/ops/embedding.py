"""Looking tokens up in a table, which may lie in several pieces."""

from ..kernel import Kernel, Target, Tensor, Values, elementwise, spread
from ..plan import Plan


def _columns(v: Values) -> int:
    return int(v["d_model"]) // 4 if v["d_model"] % 4 == 0 else int(v["d_model"])


FORWARD = Kernel(
    "embedding_forward",
    reads={"tokens": "*rows", "weight": "piece_rows d_model"},
    writes={"out": "*rows d_model"},
    options={"first_row": 0},
    grid=elementwise(lambda v: v["rows"] * _columns(v)),
    vec4=lambda v: ("weight", "out") if v["d_model"] % 4 == 0 else (),
    u32=frozenset({"tokens"}),
    traffic=lambda v: 8 * v["rows"] * v["d_model"],
)


def _choose(target: Target, v: Values) -> Values:
    """per_lane: tokens that a lane compares between barriers; subgroup: 1 where subgroups of 8
    look through the batch for a row of the table each, which pays while that is few looks."""
    if target.kind != "cpu":
        return {"workgroup": 256, "per_lane": 8, "unroll": 8, "subgroup": 0}
    if target.lanes == 8 and v["rows"] * v["piece_rows"] <= 1 << 22 and v["d_model"] <= 1024:
        return {"workgroup": 8, "subgroup": 1}
    return {"workgroup": 32, "per_lane": 64, "unroll": 4, "subgroup": 0}


BACKWARD = Kernel(
    "embedding_backward",
    reads={"dout": "*rows d_model", "tokens": "*rows"},
    writes={"dweight": "piece_rows d_model"},  # in place, and only rows of tokens that occur
    options={"first_row": 0},
    choose=_choose,
    grid=lambda v: spread(v["piece_rows" if v["subgroup"] else "rows"]),
    vec4=lambda v: ("dout", "dweight") if v["d_model"] % 4 == 0 else (),
    u32=frozenset({"tokens"}),
    flops=lambda v: v["rows"] * v["d_model"],
    traffic=lambda v: 12 * v["rows"] * v["d_model"],
)


def embedding(plan: Plan, tokens: Tensor, name: str) -> Tensor:
    """Row tokens[...] of the table that is the parameter `name`, for each token.

    tokens (batch, seqlen) u32, checked against the table by the caller; the table
    (vocab_size, d_model) f32. Returns (batch, seqlen, d_model) f32.
    """
    pieces = plan.layout.pieces[name]
    d_model = pieces[0][1].shape[1]
    out = plan.tensor("embedding", (*tokens.shape, d_model))
    for first_row, piece in pieces:
        plan.dispatch(FORWARD, tokens=tokens, weight=piece, out=out, first_row=first_row)

    def backward() -> None:
        for first_row, piece in pieces:
            if dweight := plan.layout.grad(piece):
                plan.dispatch(
                    BACKWARD,
                    dout=plan.grad(out),
                    tokens=tokens,
                    dweight=dweight,
                    first_row=first_row,
                )

    plan.tape(backward)
    return out
