import numpy as np
import pytest

from tests import finite_differences
from tests.oracle.conv1d import conv1d_silu_backward, conv1d_silu_forward, conv1d_silu_state


@pytest.mark.parametrize("seqlen, d_conv", [(7, 4), (2, 4), (5, 1)])
def test_conv1d_silu(rng, seqlen, d_conv):
    batch, d_inner = 2, 3
    arrays = {
        "xz": rng.uniform(-1, 1, (batch, seqlen, 2 * d_inner)),
        "weight": rng.uniform(-1, 1, (d_inner, 1, d_conv)),
        "bias": rng.uniform(-1, 1, d_inner),
    }
    du = rng.uniform(-1, 1, (batch, seqlen, 2 * d_inner))

    def loss(xz, weight, bias):
        u_delta = conv1d_silu_forward(xz, weight, bias, state=None)["u_delta"]
        return (du * u_delta)[..., :d_inner].sum()

    runs = batch * -(-seqlen // 4)
    got = conv1d_silu_backward(
        du,
        **arrays,
        weight_partials=np.empty((runs, d_inner * d_conv)),
        bias_partials=np.empty((runs, d_inner)),
        run=4,
    )
    assert np.isnan(got["dxz"][..., d_inner:]).all()
    grads = {
        "xz": np.nan_to_num(got["dxz"]),
        "weight": got["weight_partials"].sum(0),
        "bias": got["bias_partials"].sum(0),
    }
    finite_differences.check(loss, arrays, grads)


def test_state_continues_a_sequence(rng):
    """Two calls with a carried state give what one call over the whole sequence gives."""
    xz, weight, bias = (rng.uniform(-1, 1, s) for s in [(2, 9, 6), (3, 1, 4), (3,)])
    whole = conv1d_silu_forward(xz, weight, bias, state=None)["u_delta"][..., :3]
    state, parts = np.zeros((2, 3, 3)), []
    for piece in (xz[:, :2], xz[:, 2:3], xz[:, 3:]):
        parts.append(conv1d_silu_forward(piece, weight, bias, state)["u_delta"][..., :3])
        state = conv1d_silu_state(piece, state)["state"]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-12)
