"""The linear op: oracles are derivatives of each other, what is planned, extreme activations."""

import numpy as np
import pytest

from tests import finite_differences
from tests.oracle.linear import (
    linear_backward_weight,
    linear_backward_weight_partial,
    linear_backward_x,
    linear_backward_x_partial,
    linear_forward,
)
from wgsl_train.device import with_target
from wgsl_train.encoder import Encoder
from wgsl_train.errors import ShapeError
from wgsl_train.kernel import Target
from wgsl_train.ops.linear import Columns, linear, plan_backward_weight
from wgsl_train.ops.sum_partials import sum_partials
from wgsl_train.plan import Layout, ParamSpec, Plan

ROWS, D_IN, D_OUT = 5, 4, 3
X_STRIDE, X_START, OUT_STRIDE, OUT_START = 6, 1, 5, 2
FORWARD = {
    "out_stride": OUT_STRIDE,
    "x_start": X_START,
    "out_start": OUT_START,
    "activation": "none",
    "scale": 1.5,
}


def test_backward_is_the_derivative_of_forward(rng):
    shapes = {
        "x": (ROWS, X_STRIDE),
        "weight": (D_OUT, D_IN),
        "bias": (D_OUT,),
        "residual": (ROWS, D_OUT),
    }
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    dout = rng.normal(size=(ROWS, OUT_STRIDE))

    def loss(**given):
        out = linear_forward(**given, weight_scale=None, low=None, B=None, **FORWARD)["out"]
        return np.nansum(dout * out)

    x, weight, bias = arrays["x"], arrays["weight"], arrays["bias"]
    grads = linear_backward_weight(1.5 * dout, x, D_OUT, D_IN, OUT_START, X_START, dbias=bias)
    dx = linear_backward_x(dout, weight, None, None, None, X_STRIDE, OUT_START, X_START, scale=1.5)[
        "dx"
    ]
    untouched = np.isnan(dx)
    assert (untouched == untouched[0]).all()
    assert list(untouched[0].nonzero()[0]) == [0, 5]
    claimed = {
        "x": np.nan_to_num(dx),
        "weight": grads["dweight"],
        "bias": grads["dbias"] / 1.5,
        "residual": dout[:, OUT_START:],
    }
    finite_differences.check(loss, arrays, claimed)


def test_so_is_that_of_an_adapter_of_a_weight_with_factors_of_rows(rng):
    """By x, which acts directly and through low = x Aᵀ; and by B."""
    shapes = {"x": (ROWS, D_IN), "B": (D_OUT, 2)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    weight, weight_scale = rng.integers(-127, 128, (D_OUT, D_IN)), rng.normal(size=D_OUT)
    A, dout = rng.normal(size=(2, D_IN)), rng.normal(size=(ROWS, D_OUT))

    def loss(x, B):
        low = x @ A.T
        out = linear_forward(
            x, weight, weight_scale, None, None, low, B, D_OUT, 0, 0, "none", scale=1.5
        )["out"]
        return (dout * out).sum()

    dlow = linear_backward_x(dout, arrays["B"], None, None, None, 2, 0, 0, scale=1.0)["dx"]
    given = (dout, weight, weight_scale, dlow, A)
    low = arrays["x"] @ A.T
    claimed = {
        "x": linear_backward_x(*given, D_IN, 0, 0, scale=1.5)["dx"],
        "B": linear_backward_weight(1.5 * dout, low, D_OUT, 2, 0, 0, dbias=None)["dweight"],
    }
    finite_differences.check(loss, arrays, claimed)
    parts = linear_backward_x_partial(*given, 0, 2, 64, scale=1.5)["dx_partials"]
    total = parts.sum(0)[: ROWS * D_IN].reshape(ROWS, D_IN)
    np.testing.assert_allclose(total, claimed["x"])


def test_partial_sums_add_up_to_the_gradient(rng):
    rows, parts = 150, 4
    dout, x = rng.normal(size=(rows, OUT_STRIDE)), rng.normal(size=(rows, X_STRIDE))
    whole = linear_backward_weight(dout, x, D_OUT, D_IN, OUT_START, X_START, dbias=np.zeros(D_OUT))
    split = linear_backward_weight_partial(
        dout, x, D_OUT, D_IN, OUT_START, X_START, parts, 64, np.zeros((parts, 64))
    )
    weight = split["weight_partials"].sum(0)[: D_OUT * D_IN].reshape(D_OUT, D_IN)
    np.testing.assert_allclose(weight, whole["dweight"])
    np.testing.assert_allclose(split["bias_partials"].sum(0)[:D_OUT], whole["dbias"])


def small_plan(trainable=True, target=None):
    target = target or Target()
    specs = [ParamSpec("w", (8, 4), trainable=trainable), ParamSpec("b", (8,), trainable=trainable)]
    plan = Plan(Layout(specs, target), target)
    return plan, plan.persistent("x", (2, 5, 6))


def test_a_residual_shares_its_gradient():
    plan, x = small_plan()
    residual = plan.persistent("h", (2, 5, 8))
    out = linear(plan, Columns(x, 2, 4), plan.param("w"), plan.param("b"), residual=residual)
    assert out.shape == (2, 5, 8)
    assert plan.grad(out) is plan.grad(residual)


def test_frozen_parameters_get_no_gradient():
    for trainable in (True, False):
        plan, x = small_plan(trainable)
        out = linear(plan, Columns(x, 2, 4), plan.param("w"), plan.param("b"))
        plan._written[plan.grad(out)] = plan._written[plan.grad(x)] = [(0, out.size)]
        plan.backward()
        names = [d.kernel.name for d in plan.sections["backward"]]
        assert ("linear_backward_weight" in names) == trainable
        assert "linear_backward_x" in names


def test_a_cpu_makes_both_gradients_in_one_dispatch():
    for trainable, expected in ((True, ["linear_backward"]), (False, ["linear_backward_x"])):
        plan, x = small_plan(trainable, Target(kind="cpu"))
        out = linear(plan, Columns(x, 2, 4), plan.param("w"), plan.param("b"))
        plan._written[plan.grad(out)] = plan._written[plan.grad(x)] = [(0, out.size)]
        plan.backward()
        assert [d.kernel.name for d in plan.sections["backward"]] == expected


@pytest.mark.parametrize("kind", ["portable", "cpu"])
def test_a_first_contribution_must_cover_all_columns(kind):
    plan, x = small_plan(target=Target(kind=kind))
    out = linear(plan, Columns(x, 2, 4), plan.param("w"))
    plan._written[plan.grad(out)] = [(0, out.size)]
    with pytest.raises(ShapeError, match="first contribution in only 4 of 6 columns"):
        plan.backward()


@pytest.mark.parametrize("start, width", [(3, 4), (-1, 4), (0, 5)])
def test_columns_must_fit(start, width):
    plan, x = small_plan()
    with pytest.raises(ShapeError, match="linear: x"):
        linear(plan, Columns(x, start, width), plan.param("w"))


@pytest.mark.gpu
def test_softplus_neither_overflows_nor_vanishes(device, kernel_buffers):  # N06
    z = np.array([-100, -20, -5, 0, 20, 50, 88.5, 100, 1000], np.float32)
    specs = [ParamSpec("one", (1, 1))]
    plan = Plan(Layout(specs, device.target), device.target)
    x = plan.persistent("softplus.x", (len(z), 1))
    out = linear(plan, x, plan.param("one"), activation="softplus")
    encoder = Encoder(kernel_buffers, plan)
    encoder.write(x, z[:, None])
    encoder.write(plan.param("one"), np.ones((1, 1)))
    encoder.run("forward")
    got = encoder.read(out)[:, 0]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[1:], np.logaddexp(0, z[1:].astype(float)), rtol=2e-6)
    assert 0 <= got[0] <= 1e-37


@pytest.mark.gpu
def test_split_rows_give_the_whole_gradient(device, kernel_buffers, rng):
    """Partial sums of weight and bias, added up by the one dispatch they share."""
    target = with_target(device, kind="portable").target
    rows, d_out, d_in = 1030, 12, 8
    layout = Layout([ParamSpec("split.w", (d_out, d_in)), ParamSpec("split.b", (d_out,))], target)
    plan = Plan(layout, target)
    dout, x = (plan.persistent(f"split.{n}", (rows, s)) for n, s in (("dout", d_out), ("x", d_in)))
    w, b = plan.param("split.w"), plan.param("split.b")
    plan_backward_weight(plan, dout, x, layout.grad(w), layout.grad(b))
    sum_partials(plan)
    assert [d.kernel.name for d in plan.dispatches] == [
        "linear_backward_weight_partial",
        "sum_partials",
    ]
    encoder = Encoder(kernel_buffers, plan)
    arrays = {t: rng.normal(size=t.shape).astype(np.float32) for t in (dout, x)}
    for tensor, array in arrays.items():
        encoder.write(tensor, array)
    encoder.run("forward")
    expected = arrays[dout].astype(float).T @ arrays[x]
    np.testing.assert_allclose(encoder.read(layout.grad(w)), expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(encoder.read(layout.grad(b)), arrays[dout].sum(0), atol=1e-3)
