import numpy as np
import pytest

from tests import finite_differences
from tests.oracle.conv1d import (
    conv1d_silu_backward,
    conv1d_silu_backward_state,
    conv1d_silu_forward,
    conv1d_silu_state,
    conv1d_silu_state_backward,
)


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("seqlen, d_conv", [(7, 4), (2, 4), (5, 1)])
def test_conv1d_silu(rng, seqlen, d_conv, packed):
    batch, d_inner, context = 2, 3, d_conv - 1
    arrays = {
        "x": rng.uniform(-1, 1, (batch, seqlen, 1 + d_inner)),
        "weight": rng.uniform(-1, 1, (d_inner, 1, d_conv)),
        "bias": rng.uniform(-1, 1, d_inner),
        "state": rng.uniform(-1, 1, (batch, context, d_inner)),
    }
    du = rng.uniform(-1, 1, (batch, seqlen, d_inner))
    dfinal = rng.uniform(-1, 1, (batch, context, d_inner))
    documents = np.array([np.arange(seqlen) // 3, np.zeros(seqlen, int)]) if packed else None

    def loss(x, weight, bias, state):
        u = conv1d_silu_forward(x, weight, bias, state, documents, x_start=1)["u"]
        total = (du * u).sum()
        if context:
            left = conv1d_silu_state(x, state, None, documents, x_start=1)["state"]
            total += (dfinal * left).sum()
        return total

    runs = batch * -(-seqlen // 4)
    got = conv1d_silu_backward(
        du,
        **arrays,
        documents=documents,
        partials=np.empty(runs * 128),
        x_start=1,
        run=4,
        weight_stride=64,
        bias_stride=64,
    )
    assert np.isnan(got["dx"][..., 0]).all()
    dweight, dbias = got["partials"].reshape(2, runs, 64).sum(1)
    dx = np.nan_to_num(got["dx"])
    grads = {"weight": dweight[: d_inner * d_conv], "bias": dbias[:d_inner]}
    if context:
        left = conv1d_silu_state_backward(dx, dfinal, documents, x_start=1)["dx"]
        dx = np.where(np.isnan(left), dx, left)
        state = conv1d_silu_backward_state(
            du, **arrays, documents=documents, dfinal=dfinal, x_start=1
        )
        grads["state"] = state["dstate"]
    finite_differences.check(loss, arrays, {"x": dx, **grads})


def test_state_continues_a_sequence(rng):
    """Two calls with a carried state give what one call over the whole sequence gives."""
    x, weight, bias = (rng.uniform(-1, 1, s) for s in [(2, 9, 6), (3, 1, 4), (3,)])
    whole = conv1d_silu_forward(x, weight, bias, None, None, x_start=2)["u"]
    state, parts = np.zeros((2, 3, 3)), []
    for piece in (x[:, :2], x[:, 2:3], x[:, 3:]):
        parts.append(conv1d_silu_forward(piece, weight, bias, state, None, x_start=2)["u"])
        state = conv1d_silu_state(piece, state, None, None, x_start=2)["state"]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-12)
