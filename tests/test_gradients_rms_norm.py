import numpy as np
import pytest

from tests import finite_differences
from tests.oracle.rms_norm import rms_norm_backward, rms_norm_forward


@pytest.mark.parametrize("rows, d_model", [(5, 7), (1, 1), (3, 8)])
def test_rms_norm(rng, rows, d_model):
    arrays = {"x": rng.uniform(-1, 1, (rows, d_model)), "weight": rng.uniform(-1, 1, d_model)}
    dout, eps = rng.uniform(-1, 1, (rows, d_model)), 0.1

    def loss(x, weight):
        return (dout * rms_norm_forward(x, weight, eps)["out"]).sum()

    inv = rms_norm_forward(**arrays, eps=eps)["inv"]
    partials = np.empty((2, d_model))
    got = rms_norm_backward(dout, **arrays, inv=inv, weight_partials=partials, rows_per_group=4)
    grads = {"x": got["dx"], "weight": got["weight_partials"].sum(0)}
    finite_differences.check(loss, arrays, grads)
