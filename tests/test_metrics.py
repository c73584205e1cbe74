"""Accuracy, comparison of models, embeddings; against NumPy on the logits."""

import numpy as np
import pytest

import wgsl_train as wt
from tests.oracle_model import loss_and_grads
from tests.test_model import lively
from tests.test_train import CONFIG, dataset, make, pair
from wgsl_train.config import MambaConfig
from wgsl_train.device import with_target
from wgsl_train.errors import ConfigError
from wgsl_train.train import compare, evaluate

pytestmark = pytest.mark.gpu


def losses_and_ranks(weights, tokens, targets):
    _, _, logits = loss_and_grads(CONFIG, weights, tokens, targets)
    logits = logits - logits.max(-1, keepdims=True)
    own = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    loss = np.log(np.exp(logits).sum(-1)) - own
    rank = (logits > own[..., None]).sum(-1)
    return np.where(targets < 0, 0, loss), np.where(targets < 0, -1, rank)


def test_scores_are_those_of_the_logits(device):
    model, (tokens, targets) = make(device).model, pair(ignored=4)
    scores = model.scores(tokens, targets)
    loss, rank = losses_and_ranks(lively(CONFIG), tokens, targets)
    np.testing.assert_allclose(scores.loss, loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(scores.rank, rank)
    assert len(set(scores.rank.flat)) > 3
    assert model.loss(tokens, targets) == pytest.approx(scores.loss.sum() / 14, rel=1e-6)


def test_ranks_are_whole_where_logits_come_in_chunks(device):
    """A binding that holds 64 rows of logits, and the table in two pieces."""
    config = MambaConfig(vocab_size=300, d_model=16, n_layer=1)
    limited = with_target(device, max_binding=64 * 300 * 4, max_buffer=64 * 300 * 4)
    tokens, targets = np.random.default_rng(0).integers(0, 300, (2, 2, 70))
    found = []
    for where in (device, limited):
        model = wt.Model(config, where)
        model.load_state_dict(lively(config))
        found.append(model.scores(tokens, targets))
    np.testing.assert_array_equal(found[0].rank, found[1].rank)
    np.testing.assert_allclose(found[0].loss, found[1].loss, rtol=1e-5)


def test_evaluation_counts_what_was_foreseen(device):
    model, data = make(device).model, dataset()
    found = evaluate(model, data, 2, 9)
    losses, ranks = [], []
    for batch in data.batches(2, 9, seed=None, epoch=0):
        loss, rank = losses_and_ranks(
            lively(CONFIG), batch.inputs.astype(int), batch.targets.astype(int)
        )
        losses += list(loss.flat)
        ranks += list(rank.flat)
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert found.top1 == np.mean(np.array(ranks) == 0)
    assert found.top5 == np.mean(np.array(ranks) < 5)
    assert 0 < found.top1 < found.top5 < 1
    trainer = make(device, steps=150, lr=2e-2, weight_decay=0.0)
    tokens, targets = pair()
    for _ in range(150):
        trainer.step(tokens, targets)
    assert (trainer.model.scores(tokens, targets).rank == 0).mean() > 0.9


def test_comparing(device):
    a, data = make(device).model, dataset()
    b = make(device, weights=3).model
    found = compare(a, b, data, 2, 9)
    first, second = evaluate(a, data, 2, 9), evaluate(b, data, 2, 9)
    assert (found.loss_a, found.loss_b) == (first.loss, second.loss)
    assert found.tokens == first.tokens
    assert found.record()["difference"] == second.loss - first.loss
    assert compare(b, a, data, 2, 9).wins == pytest.approx(1 - found.wins)
    assert compare(a, a, data, 2, 9).wins == 0.5
    other = wt.Model(MambaConfig(vocab_size=24, d_model=8, n_layer=1), device)
    with pytest.raises(ConfigError, match="23 and 24 tokens"):
        compare(a, other, data, 2, 9)


def test_embeddings(device):
    """The mean over time of what the head multiplies, of length 1: found from the logits."""
    model, (tokens, _) = make(device).model, pair()
    got = model.embed(tokens)
    assert got.shape == (2, CONFIG.d_model)
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), 1, rtol=1e-6)
    table = lively(CONFIG)["backbone.embeddings.weight"].astype(np.float64)
    normed = model.logits(tokens) @ np.linalg.pinv(table).T  # logits = normed tableᵀ
    mean = normed.mean(1)
    want = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
    np.testing.assert_allclose(got, want, atol=1e-4)
    np.testing.assert_allclose(model.embed(tokens[1]), got[1:], rtol=1e-4, atol=1e-5)
