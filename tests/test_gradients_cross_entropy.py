from dataclasses import replace

import numpy as np
import pytest

from tests import finite_differences
from tests.oracle.cross_entropy import cross_entropy
from wgsl_train.encoder import Buffers, Encoder
from wgsl_train.ops.cross_entropy import IGNORED, head_logits, language_model_loss
from wgsl_train.plan import Layout, ParamSpec, Plan


def test_cross_entropy(rng):
    targets, scale = np.array([2, IGNORED, 0, 6]), np.array([1 / 3])
    arrays = {"logits": rng.uniform(-3, 3, (4, 7))}

    def loss(logits):
        return cross_entropy(targets, scale, logits, gradient=False)["row_loss"].sum()

    got = cross_entropy(targets, scale, **arrays, gradient=True)
    assert (got["logits"][1] == 0).all()
    assert got["row_loss"][1] == 0
    finite_differences.check(loss, arrays, {"logits": got["logits"]})


@pytest.fixture
def batch(rng):
    """(x, targets with some ignored, head, bias)."""
    rows, d_model, vocab_size = 130, 128, 300
    targets = rng.integers(0, vocab_size, rows)
    targets[::7] = IGNORED
    x, head, bias = (rng.uniform(-1, 1, s) for s in [(rows, d_model), (300, d_model), (300,)])
    return x, targets, head, bias


def plan_loss(device, batch, trainable=True, training=True, **limits):
    """Plan the loss of a batch and write its inputs: (plan, encoder)."""
    x, targets, head, bias = batch
    target = replace(device.target, **limits)
    specs = [ParamSpec("head", head.shape, trainable=trainable), ParamSpec("bias", bias.shape)]
    plan = Plan(Layout(specs, target), target, training=training)
    x_tensor = plan.persistent("x", (1, *x.shape))
    plan.grad(x_tensor).kind = "persistent"
    language_model_loss(
        plan,
        x_tensor,
        plan.persistent("targets", (1, *targets.shape), "u32"),
        plan.persistent("batch_scale", (1,)),
        plan.persistent("loss", (1,)),
        "head",
        "bias",
    )
    encoder = Encoder(Buffers(device), plan)
    encoder.write(x_tensor, x[None])
    encoder.write(plan["targets"], targets[None])
    encoder.write(plan["batch_scale"], np.array([1 / (targets != IGNORED).sum()]))
    for first_row, piece in plan.layout.pieces["head"]:
        encoder.write(piece, head[first_row : first_row + piece.shape[0]])
    encoder.write(plan.param("bias"), bias)
    return plan, encoder


@pytest.mark.gpu
@pytest.mark.parametrize("max_binding", [1 << 27, 96 << 10], ids=["whole", "chunks and pieces"])
def test_loss_and_gradients(device, batch, max_binding):  # S02
    x, targets, head, bias = batch
    plan, encoder = plan_loss(device, batch, max_binding=max_binding)
    chunks = [d for d in plan.dispatches if d.kernel.name == "cross_entropy"]
    pieces = plan.layout.pieces["head"]
    assert (len(chunks), len(pieces)) == ((1, 1) if max_binding == 1 << 27 else (3, 2))
    encoder.run("forward")
    scale = np.array([1 / (targets != IGNORED).sum()])
    expected = cross_entropy(targets, scale, x @ head.T + bias, gradient=True)
    dlogits = expected["logits"]

    def close(got, want):
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)

    close(encoder.read(plan["loss"]), expected["row_loss"].sum())
    close(encoder.read(plan["dx"])[0], dlogits @ head)
    dhead = np.concatenate([encoder.read(plan.layout.grad(piece)) for _, piece in pieces])
    close(dhead, dlogits.T @ x)
    close(encoder.read(plan.layout.grad(plan.param("bias"))), dlogits.sum(0))


@pytest.mark.gpu
def test_a_frozen_head_with_a_trained_bias(device, batch):
    x, targets, head, bias = batch
    plan, encoder = plan_loss(device, batch, trainable=False)
    encoder.run("forward")
    scale = np.array([1 / (targets != IGNORED).sum()])
    dlogits = cross_entropy(targets, scale, x @ head.T + bias, gradient=True)["logits"]
    dbias = encoder.read(plan.layout.grad(plan.param("bias")))
    np.testing.assert_allclose(dbias, dlogits.sum(0), atol=1e-6)


@pytest.mark.gpu
def test_evaluation_and_inference(device, batch):
    x, targets, head, bias = batch
    plan, encoder = plan_loss(device, batch, training=False)
    assert {d.kernel.name for d in plan.dispatches} == {
        "linear_forward",
        "cross_entropy",
        "row_rank",
        "loss_sum",
    }
    encoder.run("forward")
    scale = np.array([1 / (targets != IGNORED).sum()])
    expected = cross_entropy(targets, scale, x @ head.T + bias, gradient=False)
    np.testing.assert_allclose(encoder.read(plan["loss"])[0], expected["row_loss"].sum(), 1e-5)

    inference = Plan(plan.layout, plan.target, training=False)
    logits = head_logits(inference, inference.persistent("x", (1, *x.shape)), "head", "bias")
    encoder = Encoder(encoder.buffers, inference)
    encoder.run("forward")
    rows = np.concatenate([encoder.read(chunk) for chunk in logits])
    np.testing.assert_allclose(rows, x @ head.T + bias, atol=1e-4)
