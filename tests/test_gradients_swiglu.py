import numpy as np
import pytest

from tests import finite_differences
from tests.oracle.swiglu import swiglu_backward, swiglu_forward
from wgsl_train.errors import ShapeError
from wgsl_train.ops.swiglu import swiglu
from wgsl_train.plan import Layout, Plan


@pytest.mark.parametrize("rows, d_ff", [(5, 7), (1, 1), (3, 8)])
def test_swiglu(rng, rows, d_ff):
    x = rng.uniform(-3, 3, (rows, 2 * d_ff))
    dout = rng.uniform(-1, 1, (rows, d_ff))

    def loss(x):
        return (dout * swiglu_forward(x, d_ff)["out"]).sum()

    finite_differences.check(loss, {"x": x}, {"x": swiglu_backward(dout, x, d_ff)["dx"]})


def test_gates_far_out_are_the_limits():
    gate = np.array([[-800.0, -50.0, 0.0, 50.0, 800.0]])
    x = np.concatenate([np.full((1, 5), 2.0), gate], -1)
    np.testing.assert_allclose(swiglu_forward(x, 5)["out"], [[0, 0, 0, 100, 1600]], atol=1e-18)


def test_odd_columns_are_refused():
    plan = Plan(Layout([]))
    with pytest.raises(ShapeError, match=r"x \(2, 3\) does not divide into two halves"):
        swiglu(plan, plan.tensor("x", (2, 3)))
