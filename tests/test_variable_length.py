"""Padding and packed documents: what is beside a document changes nothing in it."""

from dataclasses import replace

import numpy as np
import pytest

import wgsl_train as wt
from tests.test_model import lively, loss_and_grads, relative
from wgsl_train.config import MambaConfig
from wgsl_train.device import with_target
from wgsl_train.errors import ConfigError, DataError
from wgsl_train.ops import selective_scan, ssd

pytestmark = pytest.mark.gpu

SMALL = MambaConfig(vocab_size=37, d_model=20, n_layer=1, d_state=5, dt_rank=3)
CONFIGS = {
    "euler": SMALL,
    "zoh": replace(SMALL, discretization="zoh", d_state=16, d_conv=3),
    "hybrid": MambaConfig(
        vocab_size=37,
        d_model=20,
        layers="mamba2,attention",
        head_dim=5,
        d_state=5,
        attn_heads=2,
        attn_head_dim=8,
    ),
}


@pytest.fixture(params=[1, 64], ids=["one segment", "segments"])
def segments(request, monkeypatch):
    """How many segments the scan has: all chunks, which are 16 steps long, in one, or one in each;
    and whether a piece is one chunk of the state-space dual, or two."""
    for workgroups in ("FORWARD_WORKGROUPS", "BACKWARD_WORKGROUPS"):
        monkeypatch.setitem(getattr(selective_scan, workgroups), "cpu", request.param)
    monkeypatch.setitem(ssd.CHUNK, "cpu", {1: 64, 64: 16}[request.param])


def make(device, config):
    model = wt.Model(config, with_target(device, kind="cpu"))
    model.load_state_dict(lively(config))
    return model


def document(length, seed=0):
    """Tokens and targets (1, length)."""
    return np.random.default_rng(seed).integers(0, SMALL.vocab_size, (2, 1, length))


def assert_same_grads(got, want, limit=1e-5):
    worst = {name: relative(got[name], want[name]) for name in want}
    assert max(worst.values()) <= limit, worst


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_equal_each_alone(device, name, segments):
    lengths = (24, 24, 24)  # boundaries inside a chunk and between two
    model = make(device, CONFIGS[name])
    alone = [document(n, seed=i) for i, n in enumerate(lengths)]
    results = [model.loss_and_grads(*d) for d in alone]
    share = np.array(lengths) / sum(lengths)
    tokens, targets = np.concatenate(alone, 2)
    ids = np.repeat([[7, 3, 9]], lengths, axis=1)  # a change of the number is what counts
    loss, grads = model.loss_and_grads(tokens, targets, documents=ids)
    assert loss == pytest.approx(sum(s * r[0] for s, r in zip(share, results, strict=True)), 1e-5)
    want = {n: sum(s * r[1][n] for s, r in zip(share, results, strict=True)) for n in grads}
    assert_same_grads(grads, want)
    assert model.loss(tokens, targets, documents=ids) == pytest.approx(loss, rel=1e-6)
    logits = model.logits(tokens, documents=ids)
    each = np.concatenate([model.logits(d[0]) for d in alone], 1)
    assert relative(logits, each) <= 1e-5
    # without the boundaries all of this is another thing
    assert relative(model.logits(tokens), each) > 1e-2
    assert relative(model.loss_and_grads(tokens, targets)[1]["backbone.norm_f.weight"],
                    want["backbone.norm_f.weight"]) > 1e-2  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("left, right", [(3, 0), (0, 3)])
def test_padding_changes_nothing(device, name, left, right):  # T15
    model = make(device, CONFIGS[name])
    tokens, targets = document(5)
    loss, grads = model.loss_and_grads(tokens, targets)
    around = [(0, 0), (left, right)]
    padded = np.pad(tokens, around, constant_values=11)
    mask = np.pad(np.ones_like(tokens), around)
    any_target = np.pad(targets, around, constant_values=5)  # those at padding are ignored
    got, padded_grads = model.loss_and_grads(padded, any_target, attention_mask=mask)
    assert got == pytest.approx(loss, rel=1e-5)
    assert_same_grads(padded_grads, grads)
    real = slice(left, left + 5)
    logits = model.logits(padded, attention_mask=mask.astype(bool))
    assert relative(logits[:, real], model.logits(tokens)) <= 1e-5
    scores = model.scores(padded, any_target, attention_mask=mask)
    assert (scores.rank[:, real] == model.scores(tokens, targets).rank).all()
    assert (scores.rank[mask == 0] == -1).all()
    assert relative(model.embed(padded, attention_mask=mask), model.embed(tokens)) <= 1e-5
    assert relative(model.embed(padded), model.embed(tokens)) > 1e-2
    if left:
        assert relative(model.logits(padded)[:, real], model.logits(tokens)) > 1e-2


def test_no_bit_of_a_document_depends_on_the_one_before(device, segments):  # T16
    model = make(device, SMALL)
    tokens, _ = document(80)
    ids = np.repeat([[0, 1]], [44, 36], axis=1)
    other = tokens.copy()
    other[0, :44] = (tokens[0, :44] + 1) % SMALL.vocab_size
    first, second = (model.logits(t, documents=ids)[0, 44:] for t in (tokens, other))
    np.testing.assert_array_equal(first, second)
    assert (model.logits(tokens)[0, 44:] != model.logits(other)[0, 44:]).any()


def test_activation_checkpointing_of_packed_documents_gives_the_same_bits(device):
    model = make(device, SMALL)
    tokens, targets = document(40)
    ids = np.arange(40)[None] // 13
    loss, grads = model.loss_and_grads(tokens, targets, documents=ids)
    again = model.loss_and_grads(tokens, targets, documents=ids, activation_checkpointing=True)
    assert again[0] == loss
    for name in grads:
        np.testing.assert_array_equal(again[1][name], grads[name], name)


def test_rows_of_a_batch_have_boundaries_of_their_own(device):
    model = make(device, SMALL)
    tokens = np.random.default_rng(1).integers(0, SMALL.vocab_size, (2, 12))
    ids = np.repeat([[0, 1], [1, 2]], [5, 7], axis=1)
    ids[1] = np.arange(12) // 9
    both = model.logits(tokens, documents=ids)
    for row in range(2):
        one = model.logits(tokens[row], documents=ids[row])
        assert relative(both[row : row + 1], one) <= 1e-6


def test_a_trainer_steps_on_packed_documents(device):
    tokens, targets = document(24)
    ids = np.arange(24)[None] // 7
    model = make(device, SMALL)
    want = model.loss(tokens, targets, documents=ids)
    trainer = wt.Trainer(model, wt.TrainConfig(steps=20, lr=1e-2))
    losses = [trainer.step(tokens, targets, documents=ids).loss for _ in range(10)]
    assert losses[0] == pytest.approx(want, rel=1e-6)
    assert losses[-1] < losses[0] - 0.5
    mask = (ids == 1).astype(int)
    only = model.loss(tokens[ids == 1], targets[ids == 1])
    assert trainer.step(tokens, targets, attention_mask=mask).loss == pytest.approx(only, rel=1e-5)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"documents": [[0, 0]]}, r"documents: \(1, 2\), but tokens are \(1, 3\)"),
        ({"documents": [[0.5, 1, 1]]}, "documents: holds float64"),
        ({"attention_mask": [[1, 1, 2]]}, "attention_mask: allowed are 1"),
        ({"attention_mask": [[1.0, 1, 0]]}, "attention_mask: holds float64; allowed are 1"),
        ({"attention_mask": [["1", "1", "0"]]}, "attention_mask: holds <U1; allowed are 1"),
        ({"attention_mask": [[1], [1, 1]]}, "attention_mask: rows of one length are needed"),
        ({"attention_mask": [[1, 0]]}, r"attention_mask: \(1, 2\), but tokens are \(1, 3\)"),
    ],
)
def test_wrong_documents_are_refused(device, given, message):
    model = make(device, SMALL)
    with pytest.raises(DataError, match=message):
        model.logits([[1, 2, 3]], **given)


# Carried states

CARRIED = {
    "euler": CONFIGS["euler"],
    "zoh": CONFIGS["zoh"],
    "dual": replace(SMALL, layers="mamba2*2", n_layer=2, head_dim=5, n_groups=2, d_conv=1),
    "both": replace(SMALL, layers="mamba2:share=a,mamba,mamba2:share=a", n_layer=3, head_dim=8),
}


def chain(model, pieces, **options):
    """Chunks of a sequence, and then, last first, again with what flows back into each."""
    state, chunks = None, []
    for tokens, targets in pieces:
        chunks.append(model.loss_and_grads_from(state, tokens, targets, **options))
        state = chunks[-1].state
    starts = [None, *(chunk.state for chunk in chunks)]
    final_grads, passed = None, []
    for (tokens, targets), start in reversed(list(zip(pieces, starts, strict=False))):
        chunk = model.loss_and_grads_from(
            start, tokens, targets, detached=False, final_grads=final_grads, **options
        )
        passed.append(chunk)
        final_grads = chunk.state_grads
    return chunks, passed


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("name", ["euler", "zoh", "dual", "both"])
def test_chained_halves_give_the_gradients_of_the_whole(device, name, checkpointing, segments):
    model = make(device, CARRIED[name])
    tokens, targets = document(48)
    loss, grads = model.loss_and_grads(tokens, targets)
    pieces = [(tokens[:, i : i + 24], targets[:, i : i + 24]) for i in (0, 24)]
    chunks, passed = chain(model, pieces, activation_checkpointing=checkpointing)
    assert sum(c.loss for c in chunks) / 2 == pytest.approx(loss, rel=1e-5)
    assert [c.loss for c in passed] == [c.loss for c in reversed(chunks)]
    assert_same_grads({n: sum(c.grads[n] for c in passed) / 2 for n in grads}, grads)
    # what a detached state cuts off is no rounding error
    cut = {n: sum(c.grads[n] for c in chunks) / 2 for n in grads}
    assert max(relative(cut[n], grads[n]) for n in grads) > 1e-3
    assert not chunks[0].state_grads


@pytest.mark.parametrize("name", ["euler", "dual", "both"])
def test_chunks_match_the_oracle_with_their_first_states(device, name, segments):
    config = CARRIED[name]
    model, states, state = make(device, config), {}, None
    tokens, targets = document(72)
    for start in (0, 24, 48):
        piece = tokens[:, start : start + 24], targets[:, start : start + 24]
        loss, want, _ = loss_and_grads(config, lively(config), *piece, states)
        chunk = model.loss_and_grads_from(state, *piece)
        assert chunk.loss == pytest.approx(loss, rel=1e-5)
        assert_same_grads(chunk.grads, want, 1e-4)
        state = chunk.state
    alone = loss_and_grads(config, lively(config), *piece)
    assert abs(alone[0] - loss) > 1e-4
    assert max(relative(alone[1][n], want[n]) for n in want) > 1e-2


@pytest.mark.parametrize("name", ["euler", "both"])
def test_gradients_by_the_state_are_differences_of_the_loss(device, name):
    model = make(device, CARRIED[name])
    tokens, targets = document(24)
    state = model.loss_and_grads_from(None, *document(24, seed=1)).state
    chunk = model.loss_and_grads_from(state, tokens, targets, detached=False)
    layers = range(CARRIED[name].n_layer)
    assert chunk.state.keys() == {f"{i}.{of}" for i in layers for of in ("conv", "ssm")}
    assert chunk.state.keys() == chunk.state_grads.keys()
    rng = np.random.default_rng(0)
    for name, grad in chunk.state_grads.items():
        # along the gradient and across: the loss is even in float32 smooth enough for 1 %
        direction = grad / np.linalg.norm(grad) + 0.3 * rng.standard_normal(grad.shape) / grad.size
        losses = [
            model.loss_and_grads_from(
                {**state, name: state[name] + step * direction}, tokens, targets
            ).loss
            for step in (0.1, -0.1)
        ]
        assert (losses[0] - losses[1]) / 0.2 == pytest.approx((grad * direction).sum(), rel=0.02)


@pytest.mark.parametrize("name", ["euler", "dual", "both"])
def test_a_state_belongs_to_the_first_document(device, name):
    model = make(device, CARRIED[name])
    tokens, targets = document(48)
    ids = np.repeat([[0, 1]], [30, 18], axis=1)  # one begins inside the second half
    loss, grads = model.loss_and_grads(tokens, targets, documents=ids)
    first = model.loss_and_grads_from(None, tokens[:, :24], targets[:, :24])
    rest = tokens[:, 24:], targets[:, 24:]
    options = {"documents": ids[:, 24:], "detached": False}
    second = model.loss_and_grads_from(first.state, *rest, **options)
    again = model.loss_and_grads_from(
        None, tokens[:, :24], targets[:, :24], detached=False, final_grads=second.state_grads
    )
    assert (first.loss + second.loss) / 2 == pytest.approx(loss, rel=1e-5)
    assert_same_grads({n: (again.grads[n] + second.grads[n]) / 2 for n in grads}, grads)


def test_what_a_state_is_refused_for(device):
    model = make(device, CONFIGS["hybrid"])
    with pytest.raises(ConfigError, match="from: layer 1 is of type 'attention', whose keys"):
        model.loss_and_grads_from(None, [[1]], [[1]])
    model = make(device, SMALL)
    with pytest.raises(ConfigError, match="not detached only"):
        model.loss_and_grads_from(None, [[1]], [[1]], final_grads={})
    with pytest.raises(DataError, match=r"state: arrays are {}, must be {'0.conv': "):
        model.loss_and_grads_from({}, *document(24))
    state = model.loss_and_grads_from(None, *document(24)).state
    state["0.ssm"][0, 0, 0, 0] = np.nan
    with pytest.raises(DataError, match=r"state: 0\.ssm is not finite"):
        model.loss_and_grads_from(state, *document(24))
    state["0.ssm"] = state["0.ssm"] * 1j
    with pytest.raises(DataError, match=r"state: 0\.ssm holds complex64; allowed: real numbers"):
        model.loss_and_grads_from(state, *document(24))
