from dataclasses import replace

import numpy as np
import pytest

from tests import finite_differences
from tests.oracle.embedding import embedding_backward, embedding_forward
from wgsl_train.encoder import Buffers, Encoder
from wgsl_train.ops.embedding import embedding
from wgsl_train.plan import Layout, ParamSpec, Plan


def test_embedding(rng):
    tokens = np.array([1, 3, 1, 1, 0])
    arrays = {"weight": rng.uniform(-1, 1, (5, 3))}
    dout = rng.uniform(-1, 1, (5, 3))

    def loss(weight):
        out = embedding_forward(tokens, weight, None, first_row=0, scale=1.5)["out"]
        return (dout * out).sum()

    dweight = embedding_backward(1.5 * dout, tokens, np.zeros((5, 3)), first_row=0)["dweight"]
    assert np.isnan(dweight[[2, 4]]).all()
    finite_differences.check(loss, arrays, {"weight": np.nan_to_num(dweight)})


def plan_lookup(target, spec, n_tokens):
    """A plan of one lookup and its backward pass, whose incoming gradient the test writes."""
    plan = Plan(Layout([spec], target), target)
    out = embedding(plan, plan.persistent("tokens", (1, n_tokens), "u32"), spec.name)
    plan.grad(out).kind = "persistent"
    plan.backward()
    return plan, out


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens, upstream, expected, tolerance",
    [
        ([1, 1, 1, 2], 1.0, [0, 3, 1, 0], 0),
        ([1] * 10_000, 0.1, [0, 1000, 0, 0], 0.01),
    ],
)
def test_repeated_tokens_add_up(device, tokens, upstream, expected, tolerance):  # N18
    plan, out = plan_lookup(device.target, ParamSpec("table", (4, 2)), len(tokens))
    encoder = Encoder(Buffers(device), plan)
    encoder.write(plan["tokens"], np.array([tokens]))
    encoder.write(plan.grad(out), np.full(out.shape, upstream))
    encoder.run("forward", "backward")
    dweight = encoder.read(plan.layout.grad(plan.param("table")))
    np.testing.assert_allclose(dweight, np.array(expected)[:, None] * [1, 1], atol=tolerance)


@pytest.mark.gpu
def test_a_table_in_pieces(device, rng):
    """Forward and backward through a table that exceeds one binding."""
    target = replace(device.target, max_binding=8 * 1024)
    table, tokens = rng.uniform(-1, 1, (300, 16)), rng.integers(0, 300, 50)
    plan, out = plan_lookup(target, ParamSpec("table", table.shape), len(tokens))
    pieces = plan.layout.pieces["table"]
    assert len(pieces) == 3
    encoder = Encoder(Buffers(device), plan, share_memory=False)
    for first_row, piece in pieces:
        encoder.write(piece, table[first_row : first_row + piece.shape[0]])
    encoder.write(plan["tokens"], tokens[None])
    dout = rng.uniform(-1, 1, (50, 16))
    encoder.write(plan.grad(out), dout[None])
    encoder.run("forward", "backward")
    np.testing.assert_array_equal(encoder.read(out)[0], table[tokens].astype(np.float32))
    dweight = np.concatenate([encoder.read(plan.layout.grad(piece)) for _, piece in pieces])
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, dout)
    np.testing.assert_allclose(dweight, expected, atol=1e-6)
