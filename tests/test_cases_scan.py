"""Known faults of other scans, each with the right value, through the whole op on the GPU."""

from dataclasses import replace

import numpy as np
import pytest

from tests import oracle_model
from wgsl_train.encoder import Encoder
from wgsl_train.errors import ConfigError, ShapeError
from wgsl_train.kernel import PORTABLE
from wgsl_train.ops.carry import carried
from wgsl_train.ops.selective_scan import selective_scan
from wgsl_train.plan import Layout, ParamSpec, Plan

OPEN_GATE = 1.2784645427610738  # z where silu(z) = 1


def plan_scan(
    target, batch, seqlen, d_inner, d_state, dt_rank=1, state=None, training=True, **options
):
    """A plan of one scan, forward and backward."""
    layout = Layout([ParamSpec("A_log", (d_inner, d_state)), ParamSpec("D", (d_inner,))], target)
    plan = Plan(layout, target, training)
    inner = (batch, seqlen, d_inner)
    columns = dt_rank + 2 * d_state
    g = selective_scan(
        plan,
        plan.persistent("u", inner),
        plan.persistent("delta", inner),
        plan.persistent("x_dbl", (batch, seqlen, columns)),
        plan.persistent("xz", (batch, seqlen, 2 * d_inner)),
        layout.param("A_log"),
        layout.param("D"),
        dt_rank=dt_rank,
        d_state=d_state,
        state=carried(plan, "state", state) if state else None,
        **options,
    )
    plan.backward()
    return plan, g


@pytest.fixture
def run(kernel_buffers):
    """Runs the op on u, delta (batch, seqlen, d_inner) and B, C (batch, seqlen, d_state).

    Returns its output y, with the gate open, and after a backward pass the gradients, by name.
    """
    planned = []

    def run(u, delta, B, C, A_log, D=None, dg=None, kind=None, **options):
        batch, seqlen, d_inner = u.shape
        D = np.zeros(d_inner) if D is None else D
        dt = np.zeros((batch, seqlen, 1))
        target = kernel_buffers.device.target
        target = replace(target, kind=kind or target.kind)
        plan, g = plan_scan(target, batch, seqlen, d_inner, B.shape[-1], **options)
        planned.append(plan)
        encoder = Encoder(kernel_buffers, plan, share_memory=False)
        encoder.poison()
        encoder.write(plan["u"], u)
        encoder.write(plan["delta"], delta)
        encoder.write(plan["x_dbl"], np.concatenate([dt, B, C], -1))
        encoder.write(plan["xz"], np.full((batch, seqlen, 2 * d_inner), OPEN_GATE))
        encoder.write(plan.layout.param("A_log"), A_log)
        encoder.write(plan.layout.param("D"), D)
        encoder.run("forward")
        result = {"y": encoder.read(g)}
        if plan.training:
            encoder.write(plan.grad(g), np.ones(g.shape) if dg is None else dg)
            encoder.run("backward")
            result["du"], result["ddt"] = (encoder.read(plan.grad(plan[n])) for n in ("u", "delta"))
            dx_dbl = encoder.read(plan.grad(plan["x_dbl"]))
            assert not dx_dbl[..., 0].any()
            result["dB"], result["dC"] = np.split(dx_dbl[..., 1:], 2, -1)
            for name in ("A_log", "D"):
                result[f"d{name}"] = encoder.read(plan.layout.grad(plan.param(name)))
        return result

    yield run
    for plan in planned:
        for tensor in {t.root for d in plan.dispatches for t in d.tensors.values()}:
            kernel_buffers.drop(tensor)


def column(values):
    """(1, seqlen, 1)"""
    return np.array(values, np.float64).reshape(1, -1, 1)


def close(actual, expected, rtol=1e-5):
    expected = np.asarray(expected)
    error = np.abs(actual.reshape(expected.shape) - expected).max()
    assert error <= rtol * max(1, np.abs(expected).max()), (actual, expected)


def softplus(x):
    return np.log1p(np.exp(x))


@pytest.mark.gpu
def test_n01_steps_past_the_end_leave_the_reverse_scan_alone(run):
    ones = column([1] * 5)
    got = run(ones, softplus(0 * ones), ones, ones, np.zeros((1, 1)))
    close(got["y"], [0.693147, 1.039721, 1.213008, 1.299651, 1.342973], 1e-6)
    close(got["du"], [1.342973, 1.299651, 1.213008, 1.039721, 0.693147], 1e-6)
    close(got["ddt"], [0.968750, 0.612587, 0.420122, 0.295122, 0.175087], 1e-6)
    close(got["dA_log"], [[-2.162039]], 1e-6)
    ones = ones[:, :4]
    got = run(ones, softplus(0 * ones), ones, ones, np.zeros((1, 1)))
    close(got["dA_log"], [[-1.381302]], 1e-6)


def recurrence(a, b):
    """Operands of a scan that is h = a h + b, with A = -1."""
    delta = -np.log(column(a))
    return {
        "u": np.ones_like(delta),
        "delta": delta,
        "B": column(b) / delta,
        "C": np.ones_like(delta),
    }


@pytest.mark.gpu
def test_n02_a_short_recurrence(run):
    got = run(
        **recurrence([0.5, 0.25, 0.1, 0.9], [1, 2, 3, 4]), A_log=np.zeros((1, 1)), training=False
    )
    close(got["y"], [1, 2.25, 3.225, 6.9025], 1e-6)


LENGTHS = [1, 2, 3, 5, 31, 32, 33, 63, 64, 65, 127, 255, 256, 257, 1000, 1025]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "seqlen, options",
    [
        *((seqlen, {}) for seqlen in LENGTHS),
        (65, {"per_segment": 1}),
        (257, {"per_segment": 4}),
        (65, {"kind": "discrete"}),
    ],
)
def test_n02_every_length(run, rng, seqlen, options):
    batch, d_inner, d_state = 2, 3, 5
    shape = (batch, seqlen, d_inner)
    u, dg = rng.uniform(-1, 1, shape), rng.uniform(-1, 1, shape)
    B, C = rng.uniform(-1, 1, (2, batch, seqlen, d_state))
    delta = -np.log(rng.uniform(0.05, 1, shape))  # so that exp(-delta) is uniform
    A_log, D = rng.uniform(-1, 0.5, (d_inner, d_state)), rng.uniform(-1, 1, d_inner)
    got = run(u, delta, B, C, A_log, D, dg, **options)
    A = -np.exp(A_log)
    y, states = oracle_model.scan(u, delta, A, B, C, D, zoh=False)
    du, ddelta, dA, dB, dC, dD = oracle_model.scan_backward(
        dg, u, delta, A, B, C, D, states, zoh=False
    )
    close(got["y"], y)
    close(got["du"], du)
    close(got["ddt"], ddelta * -np.expm1(-delta))
    close(got["dB"], dB)
    close(got["dC"], dC)
    close(got["dA_log"], dA * A)
    close(got["dD"], dD)


@pytest.mark.gpu
def test_n03_reference_gradients_of_a_recurrence(run):
    a = np.array([0.5, 2, 3, 4])  # the first one multiplies nothing
    operands = recurrence(a, [2, 1, 3, 3])
    got = run(**operands, A_log=np.zeros((1, 1)))
    close(got["y"], [2, 5, 18, 75])
    close(got["dB"] / operands["delta"], column([33, 16, 5, 1]))
    da = np.array([0, 32, 25, 18])
    close(got["dA_log"], [[(da * a * np.log(a)).sum()]])
    last = column([0, 0, 0, 1])
    got = run(**operands, A_log=np.zeros((1, 1)), dg=last)
    close(got["dB"] / operands["delta"], column([24, 12, 4, 1]))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [1, 16, 64, 256])
def test_n12_a_decay_to_nothing_stays_finite(run, chunk):
    ones = column([1] * 2048)
    got = run(ones, 10 * ones, ones, ones, np.full((1, 1), 5.0), chunk=chunk)
    close(got["y"], 10 * ones)
    for array in got.values():
        assert np.isfinite(array).all()


@pytest.mark.gpu
def test_n14_a_state_that_only_accumulates(run):
    ones = column([1] * 4096)
    got = run(ones, 0.1 * ones, ones, ones, np.full((1, 1), -20.0), training=False)
    assert got["y"][0, -1, 0] == pytest.approx(409.6, rel=1e-3)


@pytest.mark.gpu
def test_a_gradient_is_repeated_to_the_bit(run, rng):
    operands = [rng.uniform(0.1, 1, (2, 40, n)) for n in (40, 40, 16, 16)]
    A_log = rng.uniform(-1, 1, (40, 16))
    first, second = run(*operands, A_log), run(*operands, A_log)
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes(), name


@pytest.mark.gpu
def test_a_sequence_in_pieces_equals_it_whole(run, rng):
    """What generation does: the state goes from call to call."""
    u, delta = rng.uniform(0, 1, (2, 1, 12, 3))
    B, C = rng.uniform(-1, 1, (2, 1, 12, 5))
    A_log = rng.uniform(-1, 1, (3, 5))
    whole = run(u, delta, B, C, A_log, training=False)["y"]
    pieces = []
    for piece in (slice(0, 8), slice(8, 9), slice(9, 12)):
        at = (slice(None), piece)
        got = run(
            u[at],
            delta[at],
            B[at],
            C[at],
            A_log,
            training=False,
            state=(1, 2, 3, 4),
            chunk=2,
            per_segment=2,
        )
        pieces.append(got["y"])
    close(np.concatenate(pieces, 1), whole, 1e-6)


@pytest.mark.parametrize("kind", ["portable", "cpu", "integrated", "discrete"])
def test_p1_the_states_of_all_steps_are_not_kept(kind):
    batch, seqlen, d_inner, d_state = 2, 1024, 512, 16
    plan, _ = plan_scan(replace(PORTABLE, kind=kind), batch, seqlen, d_inner, d_state)
    all_states = 4 * batch * seqlen * d_inner * d_state
    assert all_states == 67_108_864
    kept = {t for d in plan.sections["forward"] for _, t in d.bound("writes")}
    read = {t for d in plan.sections["backward"] for _, t in d.bound("reads")}
    saved = sum(t.nbytes for t in kept & read)
    activation = 4 * batch * seqlen * d_inner
    assert saved <= all_states / 16 + activation + 100_000


def test_a_scan_that_cannot_be_planned_says_why():
    with pytest.raises(ShapeError, match=r"d_state is 1025, must be 1 to 1,024"):
        plan_scan(PORTABLE, 1, 4, 2, 1025)
    with pytest.raises(ConfigError, match="must be 'euler' or 'zoh'"):
        plan_scan(PORTABLE, 1, 4, 2, 3, discretization="exact")
    plan, _ = plan_scan(PORTABLE, 1, 4, 2, 3)
    with pytest.raises(ShapeError, match=r"x_dbl is \(1, 4, 7\), must have 8 columns"):
        selective_scan(
            plan,
            plan["u"],
            plan["delta"],
            plan["x_dbl"],
            plan["xz"],
            plan.param("A_log"),
            plan.param("D"),
            dt_rank=2,
            d_state=3,
        )
