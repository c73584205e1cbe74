"""Faults that others met, at the level of a model: extreme activations, odd sizes, tight limits."""

import numpy as np
import pytest

import wgsl_train as wt
from tests import harness
from tests.oracle import ORACLES, Case
from tests.oracle_model import loss_and_grads
from tests.test_model import assert_matches_oracle, batch, lively
from wgsl_train.config import MambaConfig
from wgsl_train.errors import DeviceError
from wgsl_train.kernel import KERNELS, Kernel
from wgsl_train.models.initialization import initialize
from wgsl_train.plan import Layout, Plan

EXTREMES = np.array([-1e4, -200.0, -89.0, -20.0, 0.0, 20.0, 89.0, 200.0, 1e4])


@pytest.mark.parametrize("zoh", [False, True])
@pytest.mark.parametrize("sizes", [(2, 33, 12, 16, 4), (2, 7, 3, 10, 4)], ids=str)
def test_n04_directional_derivatives_of_the_oracle(sizes, zoh):
    """(f(p + e v) - f(p - e v)) / 2e against <gradient, v>, for 20 random v over all parameters."""
    rows, seqlen, d_model, d_state, d_conv = sizes
    config = MambaConfig(
        vocab_size=11, d_model=d_model, n_layer=1, d_state=d_state, d_conv=d_conv, dt_rank=2,
        discretization="zoh" if zoh else "euler",
    )  # fmt: skip
    weights = {k: v.astype(np.float64) for k, v in lively(config).items()}
    tokens, targets = batch(config, (rows, seqlen))
    _, grads, _ = loss_and_grads(config, weights, tokens, targets)
    rng, step = np.random.default_rng(0), 1e-6
    for _ in range(20):
        v = {k: rng.standard_normal(a.shape) for k, a in weights.items()}
        up, down = (
            loss_and_grads(
                config, {k: weights[k] + sign * step * v[k] for k in v}, tokens, targets
            )[0]
            for sign in (1, -1)
        )
        want = sum((grads[k] * v[k]).sum() for k in v)
        assert (up - down) / (2 * step) == pytest.approx(want, rel=1e-5)


@pytest.mark.gpu
def test_n09_extreme_gates_stay_finite_and_right(kernel_buffers):
    """silu and its derivative where exp overflows, in the scan's gate and its backward."""
    shape = (1, 9, 1)
    kernel = KERNELS["scan_backward_gate"]
    case = Case(dict(batch=1, seqlen=9, d_inner=1, d_xz=2))
    variant = harness.Variant(kernel, case, "portable")
    xz = np.stack([np.zeros(9), EXTREMES], -1)[None]
    arrays = {"xz": xz, "y": np.ones(shape), "dg": np.ones(shape), "dxz": np.zeros((1, 9, 2))}
    got, faults = harness.run(variant, kernel_buffers, arrays)
    assert not faults
    silu = [0, 0, 0, -4.12230724e-8, 0, 20, 89, 200, 1e4]
    slope = [0, 0, 0, -3.9161918e-8, 0.5, 1 + 3.9161918e-8, 1, 1, 1]
    np.testing.assert_allclose(got["dg"].ravel(), silu, rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(got["dxz"][0, :, 1], slope, rtol=1e-5, atol=1e-30)


@pytest.mark.gpu
def test_n09_weights_of_a_thousand_do_not_make_nan(device):
    config = MambaConfig(vocab_size=11, d_model=8, n_layer=2, d_state=3)
    model, weights = wt.Model(config, device), lively(config)
    for name in weights:
        if name.endswith(("in_proj.weight", "x_proj.weight", "dt_proj.weight")):
            weights[name] *= 1e3
    model.load_state_dict(weights)
    loss, grads = model.loss_and_grads(*batch(config, (2, 20)))
    assert np.isfinite(loss)
    assert all(np.isfinite(g).all() for g in grads.values())


def test_n15_every_initial_model_decays():
    """dt > 0, A < 0 and exp(dt A) in (0, 1], whatever the seed and the variant."""
    for seed in range(200):
        make = MambaConfig.memory_engine if seed % 2 else MambaConfig
        config = make(vocab_size=3, d_model=16, n_layer=1)
        state = dict(initialize(config, seed))
        mixer = "backbone.layers.0.mixer."
        dt = np.log1p(np.exp(state[mixer + "dt_proj.bias"].astype(np.float64)))[:, None]
        A = -np.exp(state[mixer + "A_log"].astype(np.float64))
        assert (dt > 0).all()
        assert (A < 0).all()
        decay = np.exp(dt * A)
        assert ((decay > 0) & (decay <= 1)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("d_conv", [1, 2, 3, 4, 5, 32])
def test_s14_widths_that_divide_nothing(device, d_conv):
    config = MambaConfig(vocab_size=13, d_model=20, n_layer=1, d_state=17, d_conv=d_conv, dt_rank=2)
    assert_matches_oracle(wt.Model(config, device), lively(config), *batch(config, (1, 9)))


@pytest.mark.gpu
@pytest.mark.slow
def test_s11_every_kernel_builds_at_the_guaranteed_limits():
    """256 invocations, 16 KiB of workgroup memory, 8 buffers; and 512 invocations are refused."""
    limits = dict(
        max_storage_buffers=8, max_binding=128 << 20, max_buffer=256 << 20, max_invocations=256,
        max_workgroup_memory=16384,
    )  # fmt: skip
    small = wt.request_device(limits=limits, kind="portable", quiet=True)
    rng = np.random.default_rng(0)
    buffers = wt.encoder.Buffers(small)
    for name in sorted(ORACLES):
        variant = next(v for v in harness.variants(name) if v.kind == "portable")
        harness.check(variant, buffers, rng)
    plan = Plan(Layout([], small.target), small.target)
    kernel = Kernel(
        "test_too_wide", {"x": "n"}, lambda v: (1, 1, 1), {"out": "n"},
        choose=lambda target, values: {"workgroup": 512},
    )  # fmt: skip
    del KERNELS["test_too_wide"]
    with pytest.raises(DeviceError, match="512 invocations"):
        plan.dispatch(kernel, x=plan.persistent("x", (4,)), out=plan.persistent("out", (4,)))
