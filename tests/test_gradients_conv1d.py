import numpy as np
import pytest

from tests import finite_differences
from tests.oracle.conv1d import conv1d_silu_backward, conv1d_silu_forward, conv1d_silu_state


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("seqlen, d_conv", [(7, 4), (2, 4), (5, 1)])
def test_conv1d_silu(rng, seqlen, d_conv, packed):
    batch, d_inner = 2, 3
    arrays = {
        "x": rng.uniform(-1, 1, (batch, seqlen, 1 + d_inner)),
        "weight": rng.uniform(-1, 1, (d_inner, 1, d_conv)),
        "bias": rng.uniform(-1, 1, d_inner),
    }
    du = rng.uniform(-1, 1, (batch, seqlen, d_inner))

    documents = np.arange(2 * seqlen).reshape(2, seqlen) // 3 if packed else None

    def loss(x, weight, bias):
        return (du * conv1d_silu_forward(x, weight, bias, None, documents, x_start=1)["u"]).sum()

    runs = batch * -(-seqlen // 4)
    got = conv1d_silu_backward(
        du,
        **arrays,
        documents=documents,
        weight_partials=np.empty((runs, d_inner * d_conv)),
        bias_partials=np.empty((runs, d_inner)),
        x_start=1,
        run=4,
    )
    assert np.isnan(got["dx"][..., 0]).all()
    grads = {
        "x": np.nan_to_num(got["dx"]),
        "weight": got["weight_partials"].sum(0),
        "bias": got["bias_partials"].sum(0),
    }
    finite_differences.check(loss, arrays, grads)


def test_state_continues_a_sequence(rng):
    """Two calls with a carried state give what one call over the whole sequence gives."""
    x, weight, bias = (rng.uniform(-1, 1, s) for s in [(2, 9, 6), (3, 1, 4), (3,)])
    whole = conv1d_silu_forward(x, weight, bias, None, None, x_start=2)["u"]
    state, parts = np.zeros((2, 3, 3)), []
    for piece in (x[:, :2], x[:, 2:3], x[:, 3:]):
        parts.append(conv1d_silu_forward(piece, weight, bias, state, None, x_start=2)["u"])
        state = conv1d_silu_state(piece, state, x_start=2)["state"]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-12)
