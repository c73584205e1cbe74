"""Right values for the optimizer, reduced from what went wrong elsewhere."""

from dataclasses import replace

import numpy as np
import pytest

from tests.oracle.optimizer import hyper
from wgsl_train.encoder import Buffers, Encoder
from wgsl_train.errors import ShapeError
from wgsl_train.ops.optimizer import HYPER, LOG, STATE, optimizer
from wgsl_train.plan import Layout, ParamSpec, Plan

pytestmark = pytest.mark.gpu

PLAIN = {"warmup": 0, "decay": 0.0, "max_norm": 0.0}


class Stepper:
    """An optimizer alone: the test writes the gradients."""

    def __init__(self, device, specs, capacity=64, max_binding=None, **of):
        target = device.target
        target = replace(target, max_binding=max_binding or target.max_binding)
        specs = [s if isinstance(s, ParamSpec) else ParamSpec(*s) for s in specs]
        self.layout = Layout(specs, target)
        self.plan = Plan(self.layout, target)
        self.loss = self.plan.persistent("loss", (1,))
        self.optimizer = optimizer(self.plan, capacity)
        self.encoder = Encoder(Buffers(device), self.plan)
        self.set(**of)

    def set(self, **of):
        self.encoder.write(self.optimizer.hyper, hyper(**of))

    def write(self, name, value):
        param = self.layout.param(name)
        self.encoder.write(param, np.broadcast_to(np.float32(value), param.shape))

    def grad(self, name, value):
        grad = self.layout.grad(self.layout.param(name))
        self.encoder.write(grad, np.broadcast_to(np.float32(value), grad.shape))

    def step(self):
        """One call; its row of the log, by name."""
        call = self.state["calls"]
        self.encoder.run("update")
        log = self.encoder.read(self.optimizer.log)
        return dict(zip(LOG, log[call % len(log)], strict=True))

    @property
    def state(self):
        return dict(zip(STATE, self.encoder.read(self.optimizer.state), strict=True))

    def read(self, name):
        return self.encoder.read(self.layout.param(name))

    def moments(self, name):
        return [self.encoder.read(t) for t in self.layout.moments(self.layout.param(name))]

    def everything(self):
        page = self.layout.trained_pages[0]
        return b"".join(self.encoder.read(t).tobytes() for t in (page.params, page.m, page.v))


def test_the_hyperparameters_are_those_of_the_oracle():
    assert len(HYPER) == len(hyper())


def test_warm_up_counts_steps(device):  # T03
    s = Stepper(device, [("w", (3,))], lr=1e-3, warmup=10)
    s.grad("w", 0.1)
    rates = [s.step()["lr"] for _ in range(12)]
    np.testing.assert_allclose(rates, [*np.arange(1, 11) * 1e-4, 1e-3, 1e-3], rtol=1e-6)


@pytest.mark.parametrize("schedule, middle", [(0, 1.0), (1, 0.6), (2, 0.6)])
def test_schedules_end_at_min_lr(device, schedule, middle):
    s = Stepper(device, [("w", (3,))], lr=1.0, min_lr=0.2, warmup=2, total=6, schedule=schedule)
    s.grad("w", 0.0)
    rates = [s.step()["lr"] for _ in range(8)]
    last = 1.0 if schedule == 0 else 0.2
    np.testing.assert_allclose(
        [rates[1], rates[3], rates[5], rates[7]], [1.0, middle, last, last], rtol=1e-6
    )


def test_clips_to_the_norm(device):  # T04
    s = Stepper(device, [("w", (2,))], **{**PLAIN, "max_norm": 1.0})
    s.grad("w", [3, 4])
    assert s.step()["grad_norm"] == 5.0
    m, v = s.moments("w")
    np.testing.assert_allclose(m / 0.1, [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(v / 0.001, [0.36, 0.64], rtol=1e-5)


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-15, 1.0, 1e15, 1e30])
def test_the_norm_neither_overflows_nor_vanishes(device, size):
    if size < 1e-38:
        size = 1.2e-38  # below it, numbers are denormal, and may count as 0
    s = Stepper(device, [("w", (2,)), ("x", (2,))], **PLAIN)
    s.grad("w", [3 * size, 0])
    s.grad("x", [0, 4 * size])
    np.testing.assert_allclose(s.step()["grad_norm"], 5 * size, rtol=1e-6)


def test_a_norm_of_mixed_sizes(device, rng):
    grads = np.exp2(rng.uniform(36, 44, 5000)).astype(np.float32)
    s = Stepper(device, [("w", (5000,))], **PLAIN)
    for scale in (1.0, 2.0**-80):
        s.grad("w", grads * scale)
        norm = np.linalg.norm((grads * scale).astype(np.float64))
        np.testing.assert_allclose(s.step()["grad_norm"], norm, rtol=1e-5)


def test_a_norm_beyond_float32_is_skipped(device):
    s = Stepper(device, [("w", (4,))], **PLAIN)
    s.grad("w", 3e38)
    assert s.step()["skipped"] == 1


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001])
def test_a_non_finite_gradient_moves_nothing(device, bits):  # N10, T06, T08
    s = Stepper(device, [(f"w{i}", (100_003,)) for i in range(10)], lr=0.1, **PLAIN)
    for i in range(10):
        s.write(f"w{i}", 1.0)
        s.grad(f"w{i}", 0.5)
    planted = np.full(100_003, 0.5, np.float32)
    planted.view(np.uint32)[100_002] = bits
    s.grad("w9", planted)
    before = s.everything()
    for call in range(1, 3):
        row = s.step()
        assert row["skipped"] == 1
        assert s.everything() == before
        assert s.state == {
            "steps": 0,
            "calls": call,
            "skipped_in_a_row": call,
            "skipped": call,
        }
    s.grad("w9", 0.5)
    assert s.step()["skipped"] == 0
    assert s.state == {"steps": 1, "calls": 3, "skipped_in_a_row": 0, "skipped": 2}
    np.testing.assert_allclose(s.read("w9"), 0.9, rtol=1e-6)  # 0.9256 where t was counted


def test_gradients_of_zero_are_a_step(device):
    s = Stepper(device, [("w", (3,))], **{**PLAIN, "max_norm": 1.0})
    s.write("w", 1.0)
    assert s.step() == {
        "loss": 0,
        "grad_norm": 0,
        "lr": np.float32(1e-3),
        "skipped": 0,
        "loss_scale": 1,
    }
    assert s.state["steps"] == 1
    np.testing.assert_array_equal(s.read("w"), 1.0)


def test_decay_is_decoupled(device):  # T10
    s = Stepper(device, [("w", (1,))], lr=0.1, **{**PLAIN, "decay": 0.1})
    s.write("w", 1.0)
    for grad, expected in [(0.5, 0.890000), (-0.25, 0.854466)]:
        s.grad("w", grad)
        s.step()
        np.testing.assert_allclose(s.read("w"), expected, atol=1e-6)


def test_decay_spares_what_must_not_decay(device):  # T11
    specs = [ParamSpec("D", (7,), decay=False), ParamSpec("w", (1500,))]
    s = Stepper(device, specs, lr=0.1, **{**PLAIN, "decay": 0.1})
    s.write("D", 0.3)
    s.write("w", 0.3)
    s.step()
    np.testing.assert_array_equal(s.read("D"), np.float32(0.3))
    np.testing.assert_allclose(s.read("w"), 0.3 * 0.99, rtol=1e-6)


def test_max_delta_bounds_a_step(device):
    s = Stepper(device, [("w", (2,))], lr=0.5, **PLAIN, max_delta=0.05)
    s.grad("w", [1, -2])
    s.step()
    np.testing.assert_allclose(s.read("w"), [-0.05, 0.05], rtol=1e-6)


def test_many_steps_follow_float64(device, rng):
    of = {"lr": 0.01, "decay": 0.1, "max_norm": 0.0, "warmup": 0}
    s = Stepper(device, [("w", (64,))], **of)
    p, m, v = np.ones(64), np.zeros(64), np.zeros(64)
    s.write("w", p)
    for t in range(1, 51):
        g = rng.normal(size=64)
        s.grad("w", g)
        s.step()
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        step = 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        p = p * (1 - 0.01 * 0.1) - step
    np.testing.assert_allclose(s.read("w"), p, atol=2e-6)


def test_the_log_is_a_ring(device):
    s = Stepper(device, [("w", (2,))], capacity=4, **PLAIN)
    for call in range(6):
        s.encoder.write(s.loss, np.array([call]))
        s.encoder.run("update")
    np.testing.assert_array_equal(s.encoder.read(s.optimizer.log)[:, 0], [4, 5, 2, 3])
    np.testing.assert_array_equal(s.encoder.read(s.loss), 5)


def test_pages_do_not_change_a_bit(device, rng):
    grads = {f"w{i}": rng.normal(size=3000) for i in range(6)}
    found = []
    for max_binding in (1 << 27, 1 << 15):
        specs = [(name, (3000,)) for name in grads]
        s = Stepper(device, specs, max_binding=max_binding, **{**PLAIN, "max_norm": 1.0})
        for name, grad in grads.items():
            s.grad(name, grad)
        found.append((len(s.layout.pages), s.step()["grad_norm"], [s.read(n) for n in grads]))
    (one, norm, params), (many, other_norm, other_params) = found
    assert (one, many) == (1, 3)
    assert norm == other_norm
    np.testing.assert_array_equal(params, other_params)


@pytest.mark.slow
def test_more_elements_than_workgroups_along_one_side(device):  # S03
    n = 65535 * 256 + 1
    s = Stepper(device, [("w", (n,))], lr=0.1, **PLAIN)
    grad = np.ones(n, np.float32)
    grad[-1] = -1
    s.grad("w", grad)
    np.testing.assert_allclose(s.step()["grad_norm"], np.sqrt(n), rtol=1e-6)
    w = s.read("w")
    np.testing.assert_allclose(w[[0, n // 2, -2, -1]], [-0.1, -0.1, -0.1, 0.1], rtol=1e-5)


def test_nothing_to_train_is_an_error(device):
    layout = Layout([ParamSpec("w", (3,), trainable=False)], device.target)
    with pytest.raises(ShapeError, match="no parameter"):
        optimizer(Plan(layout, device.target))
