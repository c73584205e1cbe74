import numpy as np

from . import case, oracle


def skewed(rng, shape, values):
    """Tokens of which a few are frequent, as in text."""
    return (values["vocab_size"] * rng.uniform(0, 1, shape) ** 3).astype(int)


def stored(**values):
    """A case for each form in which a table is stored."""
    yield case(**values, weight_dtype="i8")
    for dtype in ("f16", "f32"):
        yield case(("weight_scale",), **values, weight_dtype=dtype)


@oracle(
    *stored(rows=37, d_model=5, piece_rows=11, vocab_size=11),
    *stored(rows=300, d_model=12, piece_rows=20, vocab_size=50),
    *stored(rows=40, d_model=8, piece_rows=20, vocab_size=50, first_row=20, scale=2.5),
)
def embedding_forward(tokens, weight, weight_scale, first_row, scale):
    if weight_scale is not None:
        weight = weight_scale[:, None] * weight
    row = tokens - first_row
    own = (row >= 0) & (row < len(weight))
    other = 0 if first_row == 0 else np.nan
    return {"out": np.where(own[:, None], scale * weight[np.where(own, row, 0)], other)}


@oracle(
    case(rows=2500, d_model=5, piece_rows=7, vocab_size=7),
    case(rows=300, d_model=1032, piece_rows=5, vocab_size=9, first_row=3),
    case(rows=70, d_model=12, piece_rows=90, vocab_size=90),
    draw={"tokens": skewed},
)
def embedding_backward(dout, tokens, dweight, first_row):
    result = np.full(dweight.shape, np.nan)
    for token in np.unique(tokens):
        if 0 <= token - first_row < len(dweight):
            row = token - first_row
            result[row] = dweight[row] + dout[tokens == token].sum(0)
    return {"dweight": result}
