"""The state-space dual through the whole op on the GPU: against a plain loop, and known faults."""

from dataclasses import replace

import numpy as np
import pytest

from tests import oracle_model
from tests.oracle.ssd import from_chunks
from wgsl_train.encoder import Encoder
from wgsl_train.errors import ShapeError
from wgsl_train.kernel import PORTABLE
from wgsl_train.ops.carry import carried
from wgsl_train.ops.ssd import ssd
from wgsl_train.ops.sum_partials import sum_partials
from wgsl_train.plan import Layout, ParamSpec, Plan

OPEN_GATE = 1.2784645427610738  # z where silu(z) = 1
EPS = 1e-5
PARAMETERS = ("dt_bias", "A_log", "D")


def plan_dual(
    target, batch, seqlen, n_heads, head_dim, d_state, n_groups=1, training=True, **options
):
    """A plan of the op, forward and backward."""
    d_inner, d_xBC = n_heads * head_dim, n_heads * head_dim + 2 * n_groups * d_state
    specs = [ParamSpec(name, (n_heads,)) for name in PARAMETERS]
    layout = Layout([*specs, ParamSpec("norm", (d_inner,))], target)
    plan = Plan(layout, target, training)
    if options.get("documents"):
        options["documents"] = plan.persistent("documents", (batch, seqlen), "u32")
    if options.get("state"):
        options["state"] = carried(plan, "state", (batch, n_heads, d_state, head_dim))
        if training:
            options["state"] = options["state"].chained(plan)
    out = ssd(
        plan,
        plan.persistent("zxbcdt", (batch, seqlen, d_inner + d_xBC + n_heads)),
        plan.persistent("xBC", (batch, seqlen, d_xBC)),
        *(plan.param(name) for name in PARAMETERS),
        plan.param("norm"),
        n_groups=n_groups,
        norm_groups=n_groups,
        eps=EPS,
        **options,
    )
    plan.backward()
    sum_partials(plan)
    return plan, out


@pytest.fixture
def run(kernel_buffers):
    """Runs the op on x (batch, seqlen, n_heads, head_dim), dt (batch, seqlen, n_heads), before
    its softplus, and B, C (batch, seqlen, n_groups, d_state), with the gate open.

    Returns the scan's output y, its skip added, and after a backward pass that starts from the
    gradient dy the other gradients, by name; and where it starts from a state, (batch, n_heads,
    d_state, head_dim), the one it leaves, and with the gradient dfinal by that, that by the first.
    """
    planned = []

    def run(
        x, dt, B, C, A_log, D=None, dy=None, kind=None, documents=None,
        state=None, dfinal=None, **options,
    ):  # fmt: skip
        batch, seqlen, n_heads, head_dim = x.shape
        D = np.zeros(n_heads) if D is None else D
        target = kernel_buffers.device.target
        target = replace(target, kind=kind or target.kind)
        if documents is not None:
            options["documents"] = True
        if state is not None:
            options["state"] = True
        sizes = (batch, seqlen, n_heads, head_dim, B.shape[-1], B.shape[2])
        plan, out = plan_dual(target, *sizes, **options)
        planned.append(plan)
        encoder = Encoder(kernel_buffers, plan, share_memory=False)
        encoder.poison()
        rows = [v.reshape(batch, seqlen, -1) for v in (x, B, C)]
        z, zeros = (
            np.full(out.shape, OPEN_GATE),
            np.zeros((batch, seqlen, sum(r.shape[-1] for r in rows))),
        )
        encoder.write(plan["xBC"], np.concatenate(rows, -1))
        encoder.write(plan["zxbcdt"], np.concatenate([z, zeros, dt], -1))
        for name, value in (("dt_bias", np.zeros(n_heads)), ("A_log", A_log), ("D", D)):
            encoder.write(plan.param(name), value)
        encoder.write(plan.param("norm"), np.ones(out.shape[-1]))
        if documents is not None:
            encoder.write(plan["documents"], documents)
        if state is not None:
            encoder.write(plan["state"], state)
        encoder.run("forward")
        skip = encoder.read(plan["ssd.sums"])[:, :, :, 0]  # batch, chunks, n_heads, chunk
        skip = from_chunks(np.moveaxis(skip, -1, 2), seqlen)[..., None]
        result = {"y": encoder.read(plan["ssd.y"]).reshape(x.shape) + skip * x}
        if state is not None:
            result["state"] = encoder.read(plan["state"])
        if plan.training:
            # the norm's backward pass is tested elsewhere: here the scan's gradient is given
            for d in plan.sections["backward"][:]:
                if d.kernel.name == "ssd_norm_backward":
                    plan.sections["backward"].remove(d)
            encoder = Encoder(kernel_buffers, plan, share_memory=False)
            encoder.poison()
            if state is not None:
                encoder.write(plan["state"], state)
                encoder.write(plan["dstate.final"], dfinal)
            encoder.run("forward")
            dy = np.ones(out.shape) if dy is None else dy.reshape(out.shape)
            encoder.write(plan.grad(out), dy)
            encoder.run("backward")
            dxBC = encoder.read(plan.grad(plan["xBC"]))
            dx, dB, dC = np.split(dxBC, [out.shape[-1], out.shape[-1] + rows[1].shape[-1]], -1)
            result |= {
                "dx": dx.reshape(x.shape),
                "dB": dB.reshape(B.shape),
                "dC": dC.reshape(C.shape),
            }
            result["ddt"] = encoder.read(plan.grad(plan["zxbcdt"]))[..., -n_heads:]
            for name in PARAMETERS:
                result[f"d{name}"] = encoder.read(plan.layout.grad(plan.param(name)))
            if state is not None:
                result["dstate"] = encoder.read(plan["dstate.initial"])
        return result

    yield run
    for plan in planned:
        for tensor in {t.root for d in plan.dispatches for t in d.tensors.values()}:
            kernel_buffers.drop(tensor)


def close(actual, expected, rtol=1e-5):
    expected = np.asarray(expected)
    error = np.abs(actual.reshape(expected.shape) - expected).max()
    assert error <= rtol * max(1, np.abs(expected).max()), (error, actual, expected)


def expected(x, dt, B, C, A_log, D, dy, documents=None, state=None, dfinal=0):
    """What a plain loop gives, by the names of `run`."""
    n_groups, left = B.shape[2], None
    if documents is not None:
        left = documents == np.pad(documents, [(0, 0), (1, 0)])[:, :-1]
    by_head = [v.repeat(x.shape[2] // n_groups, 2) for v in (B, C)]
    delta, A = oracle_model.softplus(dt), -np.exp(A_log)
    y, states = oracle_model.ssd(x, delta, A, *by_head, D, left, state)
    dx, ddelta, dA, *dBC, dD, dstate = oracle_model.ssd_backward(
        dy, x, delta, A, *by_head, D, states, left, dfinal
    )
    dB, dC = (v.reshape(*B.shape[:3], -1, B.shape[3]).sum(3) for v in dBC)
    ddt = ddelta * oracle_model.sigmoid(dt)
    made = {
        "y": y, "dx": dx, "ddt": ddt, "dB": dB, "dC": dC,
        "ddt_bias": ddt.sum((0, 1)), "dA_log": dA * A, "dD": dD,
    }  # fmt: skip
    return made if state is None else {**made, "state": states[-1], "dstate": dstate}


def draw(rng, batch, seqlen, n_heads, head_dim, d_state, n_groups=1):
    shape = (batch, seqlen, n_heads, head_dim)
    return {
        "x": rng.uniform(-1, 1, shape),
        "dt": rng.uniform(-3, 1, shape[:3]),
        "B": rng.uniform(-1, 1, (batch, seqlen, n_groups, d_state)),
        "C": rng.uniform(-1, 1, (batch, seqlen, n_groups, d_state)),
        "A_log": rng.uniform(-1, 2, n_heads),
        "D": rng.uniform(-1, 1, n_heads),
        "dy": rng.uniform(-1, 1, shape),
    }


@pytest.mark.gpu
@pytest.mark.parametrize(
    "seqlen, options",
    [
        *((seqlen, {}) for seqlen in (1, 2, 5, 31, 32, 33, 257)),
        (33, {"chunk": 4}),
        (40, {"kind": "discrete", "chunk": 16}),
    ],
)
def test_every_length(run, rng, seqlen, options):
    """S13, N02."""
    operands = draw(rng, 2, seqlen, 4, 5, 6, 2)
    got, want = run(**operands, **options), expected(**operands)
    assert got.keys() == want.keys()
    for name in want:
        # sums over all timesteps of differences of sums: float32 is further off than in one scan
        close(got[name], want[name], 3e-5 if name == "dA_log" else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 40, 3, 64, 16, 3), (1, 40, 2, 12, 130), (1, 9, 1, 1, 1)])
def test_every_size(run, rng, sizes):
    """S14."""
    operands = draw(rng, *sizes)
    got, want = run(**operands, chunk=16), expected(**operands)
    for name in want:
        close(got[name], want[name])


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [4, 16])
def test_t16_documents_do_not_leak(run, rng, chunk):
    operands = draw(rng, 2, 37, 4, 5, 6, 2)
    documents = np.cumsum(rng.random((2, 37)) < 0.2, 1)
    documents[0, 16:] += 1  # one that begins with a chunk
    got = run(**operands, documents=documents, chunk=chunk)
    want = expected(**operands, documents=documents)
    for name in want:
        close(got[name], want[name])
    first = documents == documents[:, :1]
    changed = {**operands, "x": np.where(first[..., None, None], 3.0, operands["x"])}
    changed["dt"] = np.where(first[..., None], 2.0, operands["dt"])
    other = run(**changed, documents=documents, chunk=chunk)
    assert (other["y"][first] != got["y"][first]).any()
    assert (other["y"][~first] == got["y"][~first]).all()  # to the bit


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("seqlen, sizes", [(3, (4, 5, 6, 2)), (37, (4, 5, 6, 2)), (37, (2, 8, 12))])
def test_a_state_goes_through(run, rng, seqlen, sizes, packed):
    """Forwards and, as a gradient, backwards; with documents only through those of number 0."""
    operands = draw(rng, 3, seqlen, *sizes)
    operands["state"], operands["dfinal"] = rng.uniform(-1, 1, (2, 3, sizes[0], sizes[2], sizes[1]))
    if packed:
        documents = np.zeros((3, seqlen), int)
        documents[0], documents[1, seqlen // 2 :] = 1, 1
        operands["documents"] = documents
    got, want = run(**operands, chunk=16), expected(**operands)
    assert got.keys() == want.keys()
    for name in want:
        close(got[name], want[name], 3e-5 if name == "dA_log" else 1e-5)
    if packed:
        assert got["dstate"].any((1, 2, 3)).tolist() == [False, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [4, 16, 64, 256])
def test_n12_a_decay_to_nothing_stays_finite(run, chunk):
    ones = np.ones((1, 512, 1, 1))
    got = run(ones, 10 * ones[..., 0], ones, ones, np.full(1, 5.0), chunk=chunk)
    close(got["y"], oracle_model.softplus(10) * ones)
    for array in got.values():
        assert np.isfinite(array).all()
    # what is decayed to nothing has no gradient at all, not one of rounding errors
    assert got["dA_log"] == 0


@pytest.mark.gpu
def test_a_reset_leaves_later_decays_their_digits(run):
    """Steps that forget everything must not drown the small decays behind them."""
    rng = np.random.default_rng(3)
    operands = draw(rng, 1, 64, 2, 4, 4)
    operands["dt"][:] = -3
    operands["dt"][:, ::9] = 12
    operands["A_log"][:] = 4
    got, want = run(**operands, chunk=64), expected(**operands)
    for name in want:
        close(got[name], want[name], 1e-3)


@pytest.mark.gpu
def test_n14_a_state_that_only_accumulates(run):
    ones = np.ones((1, 4096, 1, 1))
    dt = np.log(np.expm1(0.1)) * ones[..., 0]
    got = run(ones, dt, ones, ones, np.full(1, -20.0), training=False)
    assert got["y"][0, -1, 0, 0] == pytest.approx(409.6, rel=1e-3)


@pytest.mark.gpu
def test_a_gradient_is_repeated_to_the_bit(run, rng):
    operands = draw(rng, 2, 40, 4, 8, 12)
    first, second = run(**operands), run(**operands)
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes(), name


@pytest.mark.gpu
def test_a_sequence_in_pieces_equals_it_whole(run, rng):
    """What generation does: the state goes from call to call."""
    operands = draw(rng, 2, 70, 4, 5, 6, 2)
    A_log, D = operands.pop("A_log"), operands.pop("D")
    del operands["dy"]
    whole = run(**operands, A_log=A_log, D=D, training=False)["y"]
    pieces, state = [], np.zeros((2, 4, 6, 5))
    for piece in (slice(0, 64), slice(64, 65), slice(65, 70)):
        part = {name: array[:, piece] for name, array in operands.items()}
        got = run(**part, A_log=A_log, D=D, training=False, state=state, chunk=16)
        pieces.append(got["y"])
        state = got["state"]
    close(np.concatenate(pieces, 1), whole)


@pytest.mark.parametrize("kind", ["portable", "cpu", "integrated", "discrete"])
def test_the_states_of_all_steps_are_not_kept(kind):
    plan, _ = plan_dual(replace(PORTABLE, kind=kind), 2, 1024, 8, 64, 128)
    all_states = 4 * 2 * 1024 * 512 * 128
    largest = max(t.root.nbytes for d in plan.dispatches for t in d.tensors.values())
    assert largest <= all_states / 32


def test_what_cannot_be_planned_says_why():
    with pytest.raises(ShapeError, match=r"d_state is 1025, must be 1 to 1,024"):
        plan_dual(PORTABLE, 1, 4, 2, 3, 1025)
    with pytest.raises(ShapeError, match=r"do not fit d_inner = 9, n_heads = 3, n_groups = 2"):
        plan_dual(PORTABLE, 1, 4, 3, 3, 5, 2)
    for chunk in (6, 2048):
        with pytest.raises(ShapeError, match=f"chunk is {chunk}, must be a multiple of 4"):
            plan_dual(PORTABLE, 1, 4, 2, 3, 5, chunk=chunk)
