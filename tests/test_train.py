"""The trainer against NumPy, and what a training run must and must not do."""

import gc
import hashlib
import json
import math
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import wgsl_train as wt
from tests.oracle_model import loss_and_grads
from tests.test_model import lively
from wgsl_train import checkpoint
from wgsl_train.config import MambaConfig, TrainConfig
from wgsl_train.data import IGNORED, Batch
from wgsl_train.device import Device
from wgsl_train.encoder import Encoder
from wgsl_train.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeviceError,
    TrainingError,
)
from wgsl_train.train import compare, evaluate, saved_config

pytestmark = pytest.mark.gpu

# Few shapes, so that few pipelines are compiled: (2, 9) wherever it does not matter
CONFIG = MambaConfig(vocab_size=23, d_model=8, n_layer=1, d_state=4, d_conv=3, dt_rank=2)
SHAPE = (2, 9)
MIXER = "backbone.layers.0.mixer."


def make(device, weights=0, config=CONFIG, **train):
    """A trainer of a model whose every path carries gradient."""
    model = wt.Model(config, device)
    model.load_state_dict(lively(config, weights))
    return wt.Trainer(model, TrainConfig(**{"steps": 10, "lr": 1e-2, **train}))


def pair(shape=SHAPE, seed=1, ignored=0):
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, CONFIG.vocab_size, (2, *shape))
    targets.flat[:ignored] = -100
    return tokens, targets


def as_batch(tokens, targets):
    wanted = np.where(targets == -100, IGNORED, targets).astype(np.uint32)
    return Batch(tokens.astype(np.uint32), wanted, int((targets != -100).sum()))


def dataset(n_tokens=150, seed=2, **packing):
    ids = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, n_tokens)
    return wt.Dataset(ids, **packing)


def settings(**changes):
    """For `dataset()`: 9 batches an epoch, the last one a short tail."""
    return {"batch_size": 2, "seq_len": 9, **changes}


def moments(trainer):
    return {name: trainer.model.read_moment(name) for name in trainer._moment_shapes()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], name)


def hashes(folder):
    files = [p for p in sorted(Path(folder).rglob("*")) if p.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def logged(out):
    """The records of a run, speed aside."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(ln).items() if k != "tokens_per_s"} for ln in lines]


class AdamW:
    """The update of SEMANTICS in float64, on weights by name."""

    def __init__(self, weights, config):
        self.w = {k: v.astype(np.float64) for k, v in weights.items()}
        self.m = {k: np.zeros_like(v) for k, v in self.w.items()}
        self.v = {k: np.zeros_like(v) for k, v in self.w.items()}
        self.c, self.t = config, 0

    def step(self, grads, lr):
        c, self.t = self.c, self.t + 1
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        scale = min(1.0, c.max_grad_norm / norm) if c.max_grad_norm else 1.0
        for k, g in grads.items():
            g = g * scale
            self.m[k] = c.beta1 * self.m[k] + (1 - c.beta1) * g
            self.v[k] = c.beta2 * self.v[k] + (1 - c.beta2) * g * g
            mean = self.m[k] / (1 - c.beta1**self.t)
            step = lr * mean / (np.sqrt(self.v[k] / (1 - c.beta2**self.t)) + c.eps)
            if c.max_delta:
                step = np.clip(step, -c.max_delta, c.max_delta)
            decay = c.weight_decay if c.decays(k) else 0.0
            self.w[k] = self.w[k] * (1 - lr * decay) - step
        return norm


# Steps


@pytest.mark.parametrize("options", [{}, {"max_delta": 4e-3, "beta1": 0.8, "no_decay": ("",)}])
def test_ten_steps_follow_float64(device, options):
    config = TrainConfig(
        **{"steps": 10, "lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1, "max_grad_norm": 0.7, **options},
        warmup_steps=3, schedule="linear", min_lr=2e-3,
    )  # fmt: skip
    trainer = wt.Trainer(wt.Model(CONFIG, device), config)
    weights = lively(CONFIG)
    trainer.model.load_state_dict(weights)
    oracle = AdamW(weights, config)
    for t in range(1, 11):
        tokens, targets = pair(seed=t, ignored=t % 3)
        lr = 1e-2 * t / 3 if t <= 3 else 1e-2 + (2e-3 - 1e-2) * (t - 3) / 7
        loss, grads, _ = loss_and_grads(CONFIG, oracle.w, tokens, targets)
        norm = oracle.step(grads, lr)
        result = trainer.step(tokens, targets)
        assert result.step == t
        assert not result.skipped
        assert result.loss == pytest.approx(loss, rel=1e-4)
        assert result.grad_norm == pytest.approx(norm, rel=1e-4)
        assert result.lr == pytest.approx(lr, rel=1e-5)
    for name, array in trainer.model.state_dict().items():
        error = np.linalg.norm(array - oracle.w[name]) / np.linalg.norm(oracle.w[name])
        assert error <= 1e-4, name


def test_one_batch_is_learnt(device):
    trainer = make(device, steps=150, lr=2e-2, weight_decay=0.0)
    results = [trainer.step(*pair()) for _ in range(150)]
    assert results[0].loss > 2.5
    assert results[-1].loss < 0.05


def test_two_micro_batches_equal_one_batch(device):
    tokens, targets = pair((4, 9), ignored=5)
    whole, halves = make(device, lr=1e-3), make(device, lr=1e-3)
    one = whole.step(tokens, targets)
    two = halves.step_batches(
        [as_batch(tokens[:2], targets[:2]), as_batch(tokens[2:], targets[2:])]
    )
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    grads = whole.model.read_grads()
    for name, array in halves.model.read_grads().items():
        assert np.linalg.norm(array - grads[name]) <= 1e-5 * np.linalg.norm(grads[name]), name


def test_accumulation_is_weighted_by_tokens(device):  # T01
    """8 sequences of mixed length, as 1x8, 2x4, 4x2 and 8x1: one loss, one gradient."""
    tokens, targets = pair((8, 9))
    for i, length in enumerate([9, 1, 4, 2, 7, 9, 3, 5]):
        targets[i, length:] = -100
    found = []
    for size in (8, 4, 2, 1):
        trainer = make(device)
        parts = [slice(i, i + size) for i in range(0, 8, size)]
        result = trainer.step_batches([as_batch(tokens[p], targets[p]) for p in parts])
        found.append((result.loss, result.grad_norm, trainer.model.read_grads()))
    want, grads, _ = loss_and_grads(CONFIG, lively(CONFIG), tokens, targets)
    assert found[0][0] == pytest.approx(want, rel=1e-5)
    for loss, norm, own in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert norm == pytest.approx(found[0][1], rel=1e-5)
        for name, array in own.items():
            error = np.linalg.norm(array - found[0][2][name])
            assert error <= 1e-5 * np.linalg.norm(grads[name]), name


def test_micro_batches_of_one_and_three_targets(device):  # T01
    """The logged loss is the mean over tokens, not over micro-batches, whatever their shapes."""
    trainer = make(device)
    short, long = pair((1, 1), seed=3), pair(SHAPE, ignored=15)
    losses = [trainer.model.loss(*short), trainer.model.loss(*long)]
    result = trainer.step_batches([as_batch(*short), as_batch(*long)])
    assert abs(losses[0] - losses[1]) > 0.1
    assert result.loss == pytest.approx((1 * losses[0] + 3 * losses[1]) / 4, rel=1e-5)


def test_a_partial_window_steps_and_is_scaled_right(device):  # T02
    data = wt.Dataset(np.random.default_rng(2).integers(0, CONFIG.vocab_size, 7 * 18 + 1))
    config = settings(steps=None, epochs=1, gradient_accumulation=4)
    trainer = make(device, **config)
    assert trainer.total_steps(data) == 2
    norms = []
    trainer.fit(data, on_step=lambda r: norms.append((r.loss, r.grad_norm)))
    assert trainer.progress.step == 2
    assert trainer.progress.batch == 7
    direct = make(device, **config)
    batches = list(data.batches(2, 9, seed=0))
    direct.step_batches(batches[:4])
    second = direct.step_batches(batches[4:])
    assert norms[1] == (second.loss, second.grad_norm)
    assert_same(trainer.model.state_dict(), direct.model.state_dict())
    three = make(device, **config)
    three.fit(wt.Dataset(np.arange(3 * 18 + 1) % CONFIG.vocab_size))
    assert three.progress.step == 1
    with pytest.raises(ConfigError, match="gradient_accumulation is 0"):
        TrainConfig(gradient_accumulation=0)


def test_the_schedule_moves_per_optimizer_step(device):  # T03
    data = wt.Dataset(np.random.default_rng(2).integers(0, CONFIG.vocab_size, 40 * 18 + 1))
    trainer = make(device, **settings(steps=10, lr=1e-3, warmup_steps=10, gradient_accumulation=4))
    rates = []
    trainer.fit(data, on_step=lambda r: rates.append(r.lr))
    np.testing.assert_allclose(rates, np.arange(1, 11) * 1e-4, rtol=1e-5)
    assert trainer.progress.batch == 40


def test_a_schedule_needs_to_know_its_end(device):
    trainer = make(device, steps=None, schedule="cosine")
    with pytest.raises(ConfigError, match="schedule"):
        trainer.step(*pair())
    make(device, steps=None).step(*pair())


def test_the_norm_is_logged_before_clipping(device):  # T04
    free, clipped = make(device, max_grad_norm=0.0), make(device, max_grad_norm=0.01)
    a, b = free.step(*pair()), clipped.step(*pair())
    assert a.grad_norm == b.grad_norm > 0.01
    m = moments(clipped)
    total = math.sqrt(sum((m[k].astype(np.float64) ** 2).sum() for k in m if k.startswith("m.")))
    assert total == pytest.approx(0.1 * 0.01, rel=1e-4)


def test_decay_spares_what_must_not_decay(device):  # T10, T11
    """A step with gradients of zero shrinks the projections by lr * weight_decay, nothing else."""
    trainer = make(device, lr=0.1, weight_decay=0.1)
    before = trainer.model.state_dict()
    step = trainer._encoder(SHAPE)
    run = step.encoder.run

    def run_without_gradients(*sections, **options):
        run(*(s for s in sections if s != "update"), **options)
        trainer.model.buffers.clear(*(p.grads for p in trainer.model.layout.trained_pages))
        run("update")

    step.encoder.run = run_without_gradients
    trainer.step(*pair())
    decayed = ("in_proj.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight")
    decayed += ("conv1d.weight", "embeddings.weight")
    spared = ("A_log", ".D", "norm.weight", "norm_f.weight", ".bias")
    for name, array in trainer.model.state_dict().items():
        assert name.endswith(decayed) != name.endswith(spared)
        if name.endswith(decayed):
            np.testing.assert_allclose(array, before[name] * 0.99, rtol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(array, before[name], name)


def test_activation_checkpointing_trains_to_the_same_bits(device):
    plain, saving = make(device), make(device, activation_checkpointing=True)
    for seed in range(3):
        assert plain.step(*pair(seed=seed)).loss == saving.step(*pair(seed=seed)).loss
    assert_same(plain.model.state_dict(), saving.model.state_dict())


def test_a_new_trainer_of_a_used_model_starts_anew(device):
    """Moments, counters and decay of an earlier trainer are not its own."""
    old = make(device, no_decay=("*",), weight_decay=0.5)
    for _ in range(3):
        old.step(*pair())
    old.model.load_state_dict(lively(CONFIG))
    new, fresh = (
        wt.Trainer(old.model, TrainConfig(steps=10, lr=1e-2, weight_decay=0.5)),
        make(device, weight_decay=0.5),
    )
    for _ in range(2):
        a, b = new.step(*pair()), fresh.step(*pair())
        assert (a.loss, a.grad_norm, a.lr) == (b.loss, b.grad_norm, b.lr)
    assert_same(new.model.state_dict(), fresh.model.state_dict())
    assert_same(moments(new), moments(fresh))


def test_what_a_step_refuses(device):
    trainer = make(device)
    with pytest.raises(DataError, match="at least one batch"):
        trainer.step_batches([])
    with pytest.raises(DataError, match="23"):
        trainer.step(np.array([[1, 23]]), np.array([[1, 1]]))
    with pytest.raises(DataError, match="targets are"):
        trainer.step(*pair()[:1], pair((2, 8))[1])
    assert trainer.progress.step == 0
    with pytest.raises(DataError, match="a batch has 2 rows, batch_size is 3"):
        make(device, carry_state=True, batch_size=3).step(*pair())


@pytest.mark.parametrize("ids", [np.arange(100), -np.arange(1, 100)])
def test_fit_refuses_ids_outside_the_vocabulary(device, ids):
    trainer = make(device, **settings(steps=2))
    for data in ((wt.Dataset(ids), None), (dataset(), wt.Dataset(ids))):
        with pytest.raises(DataError, match=r"token -?\d+ at position \d+, outside the vocabulary"):
            trainer.fit(data[0], eval_dataset=data[1])
    assert trainer.progress.step == 0


def test_a_memory_budget_is_kept_before_anything_is_allocated(device):
    trainer = make(device, memory_budget=100_000)
    before = trainer.model.buffers.nbytes
    with pytest.raises(DeviceError, match=r"[\d,]+ bytes are missing"):
        trainer.step(*pair())
    assert trainer.model.buffers.nbytes == before
    need = trainer.model.step_encoder(*SHAPE, update=True, activation_checkpointing=False)
    make(device, memory_budget=need.encoder.memory.total).step(*pair())


# Targets that do not count, and gradients that are not finite


def test_a_step_without_targets_changes_nothing(device):  # T14
    trainer, straight = make(device), make(device)
    tokens, targets = pair()
    first = trainer.step(tokens, targets)  # not read before the empty step
    with pytest.warns(UserWarning, match="step 2: all targets are ignored"):
        empty = trainer.step(tokens, np.full_like(targets, -100))
    second = trainer.step(tokens, targets)
    wanted = [straight.step(tokens, targets) for _ in range(2)]
    assert [first.loss, second.loss] == [r.loss for r in wanted]
    assert (empty.loss, empty.grad_norm, empty.skipped) == (0.0, 0.0, True)
    assert [r.step for r in (first, empty, second)] == [1, 2, 3]
    assert_same(trainer.model.state_dict(), straight.model.state_dict())
    # a micro-batch without targets does not change the others' step
    result = trainer.step_batches(
        [as_batch(tokens, np.full_like(targets, -100)), as_batch(tokens, targets)]
    )
    assert result.loss == straight.step(tokens, targets).loss
    assert_same(trainer.model.state_dict(), straight.model.state_dict())


def test_a_mean_over_no_target_is_refused(device):
    model, (tokens, targets) = make(device).model, pair()
    nothing = np.full_like(targets, -100)
    for call in (model.loss, model.loss_and_grads):
        with pytest.raises(DataError, match="all targets are ignored"):
            call(tokens, nothing)
    assert not model.scores(tokens, nothing).loss.any()
    alone = wt.Dataset.from_documents([[1], [2], [3]])
    for call in (lambda: evaluate(model, alone, 2, 9), lambda: compare(model, model, alone, 2, 9)):
        with pytest.raises(DataError, match="no token to predict"):
            call()
    trainer = wt.Trainer(model, TrainConfig(**settings(steps=2)))
    with pytest.raises(DataError, match="no token to predict"):
        trainer.fit(dataset(), eval_dataset=alone)
    assert trainer.progress.step == 0  # and not at the end


def test_steps_without_targets_are_no_skips(device):
    trainer = make(device, max_skips=2)
    tokens, targets = pair()
    for _ in range(3):
        with pytest.warns(UserWarning, match="ignored"):
            assert trainer.step(tokens, np.full_like(targets, -100)).skipped
    assert not trainer.step(tokens, targets).skipped


def plant(trainer, name, bits, index=1):
    """Write one bit pattern into a weight."""
    array = trainer.model.state_dict()[name]
    array.view(np.uint32).flat[index] = bits
    trainer.model._write(name, array)


NAN, INF, LARGEST = 0x7FC00000, 0x7F800000, 0x7F7FFFFF


@pytest.mark.parametrize("bits", [NAN, INF], ids=["nan", "inf"])
@pytest.mark.parametrize(
    "name", [MIXER + "in_proj.weight", MIXER + "A_log", "backbone.norm_f.weight"]
)
def test_a_non_finite_weight_is_named_and_nothing_moves(device, name, bits, tmp_path):  # N11, T08
    trainer = make(device)
    trainer.step(*pair())
    good = trainer.save(tmp_path)
    plant(trainer, name, bits)
    before, state = moments(trainer), trainer.model.state_dict()
    result = trainer.step(*pair())
    with pytest.warns(UserWarning, match=f"step 2 was skipped: non-finite at weight {name}"):
        assert result.skipped
    assert not (bits == NAN and math.isfinite(result.loss))
    assert_same(moments(trainer), before)
    for key, array in trainer.model.state_dict().items():
        np.testing.assert_array_equal(array.view(np.uint32), state[key].view(np.uint32), key)
    with pytest.raises(CheckpointError, match="non-finite"):
        trainer.save(tmp_path)
    assert checkpoint.checkpoints(tmp_path) == [good]
    assert not list(tmp_path.glob(".*"))


def with_bad_gradient(trainer, name, bits):
    """Have the next step's gradient hold one bit pattern before the update."""
    encoder = trainer._encoder(SHAPE).encoder
    run = encoder.run

    def run_planting(*sections, **options):
        encoder.run = run
        run(*(s for s in sections if s != "update"), **options)
        grad = trainer.model.layout.grad(trainer.model.layout.param(name))
        array = trainer.model.buffers.read(grad)
        array.view(np.uint32).flat[-1] = bits
        trainer.model.buffers.write(grad, array)
        run("update")

    encoder.run = run_planting


@pytest.mark.parametrize("bits", [NAN, INF, INF | 1 << 31], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["backbone.embeddings.weight", MIXER + "D"])
def test_a_non_finite_gradient_skips_the_whole_step(device, name, bits):  # T06, T08
    """Weights, moments, step count and schedule stand still; the next step is as if it were first."""
    options = dict(warmup_steps=4, lr=0.1)
    trainer, straight = make(device, **options), make(device, **options)
    before = trainer.model.state_dict()
    with_bad_gradient(trainer, name, bits)
    bad = trainer.step(*pair())
    with pytest.warns(UserWarning, match=f"step 1 was skipped: non-finite at gradient of {name}"):
        assert bad.skipped
    assert_same(trainer.model.state_dict(), before)
    assert not any(array.any() for array in moments(trainer).values())
    counters = trainer.model.buffers.read(trainer._optimizer.state)
    assert list(counters) == [0, 1, 1, 1]  # t, calls, skipped in a row, skipped
    after, wanted = trainer.step(*pair(seed=5)), straight.step(*pair(seed=5))
    assert bad.lr == after.lr == wanted.lr
    assert not after.skipped
    assert_same(trainer.model.state_dict(), straight.model.state_dict())
    assert_same(moments(trainer), moments(straight))


@pytest.mark.parametrize(
    "name, bits, message",
    [
        (MIXER + "A_log", NAN, r"layers\.0: scan_prepare wrote .* A_log = .*1 of 64 not finite"),
        (
            MIXER + "out_proj.weight",
            INF,
            r"linear_forward wrote .* to out = layers\.0\.h at \[0, 0",
        ),
        (
            "backbone.norm_f.weight",
            NAN,
            r"rms_norm_forward wrote .* to out = norm_f at \[0, 0, 1\]",
        ),
        # finite all of them, but not their product
        (
            MIXER + "x_proj.weight",
            LARGEST,
            r"scan_forward wrote .* to gy = layers\.0\.scan\.gy .* x_dbl = .* \.\. \d\.\d+e\+3[78]",
        ),
    ],
    ids=["nan", "inf", "norm", "overflow"],
)
def test_an_anomaly_is_traced_to_where_it_began(device, name, bits, message):
    trainer = make(device, detect_anomaly=True)
    trainer.step(*pair())
    before = moments(trainer)
    plant(trainer, name, bits, slice(None) if bits == LARGEST else 1)
    with pytest.raises(TrainingError, match=f"step 2: .*{message}"):
        trainer.step(*pair())
    assert_same(moments(trainer), before)


def test_looking_for_anomalies_changes_nothing(device):
    plain, watched = make(device), make(device, detect_anomaly=True)
    for seed in range(3):
        assert plain.step(*pair(seed=seed)).loss == watched.step(*pair(seed=seed)).loss
    assert_same(plain.model.state_dict(), watched.model.state_dict())


def test_too_many_skips_in_a_row_stop_the_run(device, tmp_path):  # T07
    trainer = make(device, **settings(steps=50, max_skips=2, log_every=1, save_every=3))
    data = dataset()

    def spoil(result):
        if result.step == 4:
            plant(trainer, MIXER + "D", NAN)

    with (
        pytest.warns(UserWarning, match="step 5 was skipped"),
        pytest.raises(TrainingError, match=rf"2 steps in a row.*non-finite at weight {MIXER}D"),
    ):
        trainer.fit(data, out=tmp_path, on_step=spoil)
    # steps 5 and 6 were skipped, as the log says; what was saved before is good
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["checkpoint-3"]
    lines = logged(tmp_path)
    assert [line["skipped"] for line in lines] == [False] * 4 + [True] * 2
    assert lines[-1]["loss"] is None
    make(device, **settings(steps=50)).load(tmp_path)


def test_skips_apart_from_each_other_do_not_stop(device):
    trainer = make(device, max_skips=2)

    def skip_every_other_step():
        for _ in range(3):
            with_bad_gradient(trainer, MIXER + "D", NAN)
            assert trainer.step(*pair()).skipped
            assert not trainer.step(*pair()).skipped

    with pytest.warns(UserWarning, match="skipped") as caught:
        skip_every_other_step()
    assert len(caught) == 1  # said once


# The log


def test_results_are_fetched_when_they_are_read(device):
    trainer = make(device)
    before = trainer.model.buffers.readbacks
    results = [trainer.step(*pair(seed=i)) for i in range(5)]
    assert trainer.model.buffers.readbacks == before
    assert results[4].loss > 0
    assert len({r.loss for r in results}) == 5
    assert all(r.grad_norm > 0 for r in results)
    assert trainer.model.buffers.readbacks == before + 1


def test_results_older_than_the_gpu_s_log_are_right_still(device):
    """The ring on the GPU has 1,024 rows; results that nobody has looked at outlive it."""
    trainer, straight = make(device), make(device)
    wanted = [straight.step(*pair(seed=i % 7)) for i in range(3)]
    early = [r.loss for r in wanted]
    results = [trainer.step(*pair(seed=i % 7)) for i in range(1100)]
    assert [r.loss for r in results[:3]] == early
    assert results[1099].loss != results[1099 - 1024].loss
    assert len({r.loss for r in results}) > 1000
    assert len(trainer._pending) == 0


def test_few_readbacks(device):  # P3
    trainer = make(device, **settings(steps=100, log_every=10))
    before, records = trainer.model.buffers.readbacks, []
    trainer.fit(dataset(), on_log=records.append)
    assert trainer.model.buffers.readbacks - before <= 12
    every = make(device, **settings(steps=100, log_every=1))
    again = []
    every.fit(dataset(), on_log=again.append)
    assert [r["loss"] for r in records] == [r["loss"] for r in again]
    assert [r["step"] for r in records] == list(range(1, 101))


def test_one_submit_a_step_and_no_new_objects(device, monkeypatch):  # P4
    trainer = make(device)
    trainer.step(*pair())
    made = Counter()
    for name in dir(device.wgpu):
        if name.startswith("create_"):
            original = getattr(device.wgpu, name)

            def count(*args, _name=name, _original=original, **options):
                made[_name] += 1
                return _original(*args, **options)

            monkeypatch.setattr(device.wgpu, name, count)
    queue, submits = device.wgpu.queue, []
    submit = queue.submit
    monkeypatch.setattr(queue, "submit", lambda buffers: submits.append(submit(buffers)))
    for seed in range(2, 11):
        trainer.step(*pair(seed=seed))
    assert made == {"create_command_encoder": 9}
    assert len(submits) == 9


@pytest.mark.parametrize("cpu", [True, False])
def test_a_cpu_is_waited_for_as_soon_as_it_has_a_step(device, monkeypatch, cpu):
    trainer, events = make(device), []
    trainer.step(*pair())
    monkeypatch.setattr(Device, "is_cpu", cpu)
    for owner, name in ((Device, "wait"), (Encoder, "encode")):
        original = getattr(owner, name)

        def noted(*args, _name=name, _original=original, **options):
            events.append(_name)
            return _original(*args, **options)

        monkeypatch.setattr(owner, name, noted)
    trainer.step(*pair())
    loss = trainer.step(*pair()).loss
    assert events == (["encode", "wait"] if cpu else ["encode"]) * 2
    assert math.isfinite(loss)


def test_waiting_is_until_all_is_done(device):
    trainer = make(device)
    trainer.step(*pair())
    step = trainer._encoder(pair()[0].shape)
    step.encoder.run(*50 * ["forward", "backward"])
    times = [time.perf_counter()]
    for wait in (device.wait, lambda: step.encoder.read(step.tensors.loss)):
        wait()
        times.append(time.perf_counter())
    waiting, reading = np.diff(times)
    assert reading < waiting


def test_memory_stays_flat(device):  # D15
    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    trainer, data = make(device, **settings()), dataset(60)
    for _ in range(5):
        trainer.step(*pair())
        trainer.evaluate(data)
    before = resident()
    for _ in range(100):
        assert trainer.step(*pair()).loss > 0
        trainer.evaluate(data)
    assert resident() - before < 50e6


# Runs


def test_evaluation_is_the_mean_over_all_predicted_tokens(device):
    trainer, data = make(device, **settings()), dataset(64)
    weights, total = lively(CONFIG), 0.0
    ids = data.tokens.read(0, 64).astype(np.int64)
    for start in range(0, 63, 9):
        piece = ids[start : start + 10]
        loss, _, _ = loss_and_grads(CONFIG, weights, piece[None, :-1], piece[None, 1:])
        total += loss * (piece.size - 1)
    found = trainer.evaluate(data)
    assert found.tokens == 63
    assert found.loss == pytest.approx(total / 63, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / 63), rel=1e-4)
    assert found.bits_per_token == pytest.approx(total / 63 / math.log(2), rel=1e-5)
    before = trainer.model.state_dict()
    assert trainer.evaluate(data, batch_size=1).loss == pytest.approx(found.loss, rel=1e-6)
    assert_same(trainer.model.state_dict(), before)


def test_a_run_logs_evaluates_saves_and_rotates(device, tmp_path):
    trainer = make(
        device, **settings(steps=12, log_every=5, eval_every=6, save_every=2, keep_checkpoints=2)
    )
    seen = []
    progress = trainer.fit(
        dataset(),
        eval_dataset=dataset(40, seed=3),
        out=tmp_path,
        on_step=lambda r: seen.append(r.step),
    )
    assert seen == list(range(1, 13))
    assert (progress.step, progress.epoch, progress.batch) == (12, 1, 3)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-12"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["epoch"] for line in steps] == [0] * 9 + [1] * 3
    assert [lines.index(line) for line in evaluations] == [6, 13]  # behind their steps
    assert {"step", "loss", "lr", "grad_norm", "tokens_per_s", "skipped", "epoch"} <= steps[
        0
    ].keys()
    assert all(line["tokens_per_s"] > 0 for line in steps)
    assert [line["step"] for line in evaluations] == [6, 12]
    assert {"eval_loss", "perplexity", "top1", "top5", "eval_tokens"} <= evaluations[0].keys()
    assert progress.tokens == 9 * 2 * 8 + 149 - 8 * 18 + 9 * 2 * 3


def test_stopping_saves_and_does_not_evaluate(device, tmp_path):
    trainer = make(device, **settings(steps=12, eval_every=5))
    trainer.fit(
        dataset(),
        eval_dataset=dataset(40, seed=3),
        out=tmp_path,
        should_stop=lambda: trainer.progress.step == 5,
    )
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["checkpoint-5"]
    assert "eval_loss" not in (tmp_path / "metrics.jsonl").read_text()


def test_an_evaluation_can_be_stopped(device, tmp_path):
    trainer, asked = make(device, **settings(steps=3)), []

    def should_stop():
        asked.append(trainer.progress.step)
        return len(asked) >= 5  # 3 steps, and one batch of the evaluation

    trainer.fit(dataset(), eval_dataset=dataset(), out=tmp_path, should_stop=should_stop)
    assert asked == [1, 2, 3, 3, 3, 3]
    assert "eval_loss" not in (tmp_path / "metrics.jsonl").read_text()
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["checkpoint-3"]


def test_two_runs_with_one_seed_give_the_same_bytes(device, tmp_path):  # P9
    for name in ("a", "b"):
        model = wt.Model(CONFIG, device, seed=4)
        config = TrainConfig(**settings(steps=20, lr=1e-2, save_every=10, seed=4))
        wt.Trainer(model, config).fit(dataset(), out=tmp_path / name)
    for step in (10, 20):
        a, b = (hashes(tmp_path / name / f"checkpoint-{step}") for name in ("a", "b"))
        assert a == b
        assert len(a) == 4
    other = wt.Trainer(wt.Model(CONFIG, device, seed=4), TrainConfig(**settings(steps=20, seed=5)))
    other.fit(dataset(), out=tmp_path / "c")
    assert hashes(tmp_path / "c" / "checkpoint-20") != hashes(tmp_path / "a" / "checkpoint-20")


# Carried states


BOTH = replace(CONFIG, layers=("mamba2", "mamba"), n_layer=2, head_dim=4)


@pytest.mark.parametrize(
    "model_config, precision, loud, rel",
    [(CONFIG, "f32", 3, 1e-5), (BOTH, "f32", 3, 1e-5), (BOTH, "f16", 2, 2e-3)],
)
def test_a_carried_state_sees_all_that_was_before(device, model_config, precision, loud, rel):
    """At a learning rate of zero, losses are those of the whole sequence, in every epoch."""
    model = wt.Model(model_config, device)
    # a louder model, which forgets slowly
    weights = {n: loud * w for n, w in lively(model_config).items()}
    weights |= {n: np.full_like(w, -4) for n, w in weights.items() if n.endswith("A_log")}
    model.load_state_dict(weights)
    data = dataset(3 * 2 * 9 + 1)
    ids = data.tokens.read(0, len(data))
    rows = [ids[i : i + 28] for i in (0, 27)]  # two streams of three chunks
    losses = np.mean([model.scores(r[:-1], r[1:]).loss[0] for r in rows], 0)
    want = losses.reshape(3, 9).mean(1)

    def run(**train):
        seen = []
        config = TrainConfig(
            **settings(epochs=2, lr=0.0, carry_state=True, precision=precision, **train)
        )
        wt.Trainer(model, config).fit(data, on_step=lambda result: seen.append(result.loss))
        return seen

    plain = run()
    assert plain == pytest.approx([*want, *want], rel=rel)
    assert run(activation_checkpointing=True) == plain
    mean = [want[:2].mean(), want[2]]
    assert run(gradient_accumulation=2) == pytest.approx([*mean, *mean], rel=rel)
    alone = [model.loss([r[i : i + 9] for r in rows], [r[i + 1 : i + 10] for r in rows])
             for i in (0, 9, 18)]  # fmt: skip
    assert alone[0] == pytest.approx(want[0], rel=1e-5)
    assert np.abs(alone[1:] - want[1:]).min() > 10 * rel


def test_a_step_without_targets_carries_the_state_on(device):
    tokens, targets = pair()
    losses = []
    for first in (targets, np.full_like(targets, -100)):
        trainer = make(device, carry_state=True, lr=0.0, batch_size=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.step(tokens, first)
        losses.append(trainer.step(tokens, targets).loss)
        trainer.reset_states()
        losses.append(trainer.step(tokens, targets).loss)
    carried, fresh, also_carried, again = losses
    assert (carried, fresh) == (also_carried, again)
    assert abs(carried - fresh) > 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation": 2},
        {"config": BOTH},
        {"config": BOTH, "precision": "f16", "lora_rank": 2},
    ],
    ids=["mamba", "accumulation", "both", "f16"],
)
def test_a_carried_state_survives_resuming(device, tmp_path, options):
    """Bit for bit, from the middle of the second epoch, of documents that go on too."""
    config = settings(steps=20, carry_state=True, **options)
    data = dataset(pack=True, separator=3)  # 75 ids a row: 9 batches
    straight = make(device, **config)
    straight.fit(data, out=tmp_path / "straight")
    first = make(device, **config)
    first.fit(data, out=tmp_path / "run", should_stop=lambda: first.progress.step == 13)
    assert (tmp_path / "run" / "checkpoint-13" / "states.safetensors").exists()
    second = make(device, weights=9, **config)
    second.load(tmp_path / "run")
    second.fit(data, out=tmp_path / "run")
    a, b = (hashes(tmp_path / name / "checkpoint-20") for name in ("straight", "run"))
    assert a == b
    assert logged(tmp_path / "straight") == logged(tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "checkpoint-20", tmp_path / "without")
    (tmp_path / "without" / "states.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"states\.safetensors is missing"):
        make(device, **config).load(tmp_path / "without")
    with pytest.raises(CheckpointError, match="trained with carry_state True, not False"):
        make(device, **{**config, "carry_state": False}).load(tmp_path / "run")


def test_a_state_that_is_not_finite_is_lost_with_its_step_alone(device, tmp_path):
    trainer = make(device, carry_state=True, batch_size=2)
    weights = trainer.model.state_dict()
    plant(trainer, MIXER + "in_proj.weight", NAN)
    with pytest.warns(UserWarning, match="step 1 was skipped"):
        assert trainer.step(*pair()).skipped
    assert np.isnan(carried(trainer)["0.ssm"]).any()
    trainer.model.load_state_dict(weights)
    again = make(device, carry_state=True, batch_size=2)
    again.load(trainer.save(tmp_path))
    after = trainer.step(*pair())
    assert not after.skipped
    assert again.step(*pair()).loss == after.loss


def carried(trainer):
    """What the next step of `pair()` finds."""
    states = trainer.model.carried_states(2, "carry_state")
    return {name: trainer.model.buffers.read(tensor) for name, tensor in states.items()}


def test_an_anomaly_is_sought_from_the_states_that_its_step_began_with(device, monkeypatch):
    trainer = make(device, config=BOTH, carry_state=True, detect_anomaly=True, batch_size=2)
    trainer.step(*pair())
    before, found = carried(trainer), []
    monkeypatch.setattr(
        "wgsl_train.train.first_anomaly", lambda *_, **__: found.append(carried(trainer))
    )
    plant(trainer, MIXER + "D", NAN)
    with pytest.raises(TrainingError, match="all is finite but"):
        trainer.step(*pair())
    assert_same(found[0], before)


def test_a_layer_without_a_state_for_training_is_refused(device):
    config = MambaConfig(
        vocab_size=23, d_model=8, layers="mamba,attention", attn_heads=2, attn_head_dim=4
    )
    with pytest.raises(ConfigError, match=r"layer 1 is of type 'attention', .* generation only"):
        wt.Trainer(wt.Model(config, device), TrainConfig(steps=1, carry_state=True))


# Resuming


@pytest.mark.parametrize("accumulation", [1, 2])
def test_twenty_steps_are_seven_and_thirteen(device, tmp_path, accumulation):  # C09
    """Bit for bit, from the middle of an epoch, with a new model and a new trainer."""
    config = settings(
        steps=20, gradient_accumulation=accumulation, schedule="cosine", warmup_steps=3, log_every=4
    )
    straight = make(device, **config)
    straight.fit(dataset(), out=tmp_path / "straight")
    first = make(device, **config)
    first.fit(dataset(), out=tmp_path / "run", should_stop=lambda: first.progress.step == 7)
    place = (0, 7) if accumulation == 1 else (1, 4)  # an epoch has 9 batches, 5 windows of 2
    assert (first.progress.epoch, first.progress.batch) == place
    second = make(device, weights=9, **config)
    second.load(tmp_path / "run")
    assert vars(second.progress) == vars(first.progress)
    second.fit(dataset(), out=tmp_path / "run")
    a, b = (hashes(tmp_path / name / "checkpoint-20") for name in ("straight", "run"))
    assert a == b
    assert logged(tmp_path / "straight") == logged(tmp_path / "run")
    assert_same(moments(straight), moments(second))


def test_resuming_reads_headers_and_plans_states_once(device, tmp_path, monkeypatch):
    config = settings(steps=2, carry_state=True)
    make(device, **config).fit(dataset(), out=tmp_path)
    calls = Counter()

    def count(owner, name):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: calls.update([name]) or call(*args))

    count(checkpoint, "check_whole")
    count(wt.Model, "carried_states")
    trainer = make(device, **config)
    trainer.load(tmp_path)
    trainer.save(tmp_path)
    assert calls == {"check_whole": 1, "carried_states": 1}
    trainer.load(tmp_path / "checkpoint-2")
    assert calls == {"check_whole": 2, "carried_states": 1}


def test_a_packed_run_goes_on_exactly_and_packed_only(device, tmp_path):
    data = dataset(pack=True, separator=3)
    config = settings(steps=6)
    straight = make(device, **config)
    straight.fit(data, out=tmp_path / "straight")
    first = make(device, **config)
    first.fit(data, out=tmp_path / "run", should_stop=lambda: first.progress.step == 4)
    second = make(device, weights=9, **config)
    second.load(tmp_path / "run")
    with pytest.raises(DataError, match="began on packed documents, these are not"):
        second.fit(dataset())
    for separator, told in ((4, "4"), (None, "none")):
        with pytest.raises(DataError, match=f"began with separator 3, these data have {told}"):
            second.fit(dataset(pack=True, separator=separator))
    second.fit(data, out=tmp_path / "run")
    assert logged(tmp_path / "straight") == logged(tmp_path / "run")
    plain = make(device, **config)
    plain.fit(dataset(), out=tmp_path / "plain")
    assert logged(tmp_path / "plain") != logged(tmp_path / "run")
    assert second.evaluate(data).loss != second.evaluate(dataset()).loss


def test_a_run_goes_on_with_its_own_data_only(device, tmp_path):
    first = make(device, **settings(steps=4))
    first.fit(dataset(), out=tmp_path, should_stop=lambda: first.progress.step == 2)
    second = make(device, **settings(steps=4))
    second.load(tmp_path)
    with pytest.raises(DataError, match="began on other data of the same length"):
        second.fit(dataset(seed=3), out=tmp_path)
    assert second.fit(dataset(), out=tmp_path).step == 4


def test_a_folder_keeps_the_run_that_got_further(device, tmp_path):
    config = settings(steps=4, keep_checkpoints=1)
    make(device, **config).fit(dataset(), out=tmp_path)
    log = (tmp_path / "metrics.jsonl").read_bytes()
    other = make(device, **config)
    later = (
        "holds checkpoint-4, of a later step than 0: go on from that one, or choose another folder"
    )
    with pytest.raises(CheckpointError, match=later):
        other.fit(dataset(), out=tmp_path)
    with pytest.raises(CheckpointError, match=later):
        other.save(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == log
    with (
        checkpoint.lock(tmp_path / "other"),
        pytest.raises(CheckpointError, match="in use by process"),
    ):
        other.fit(dataset(), out=tmp_path / "other")
    other.load(tmp_path)
    assert other.fit(dataset(), out=tmp_path).step == 4


def test_a_skip_survives_resuming(device, tmp_path):
    """The step count of the schedule, and the count of skips in a row, are part of the state."""
    trainer = make(device, max_skips=2, warmup_steps=5)
    with_bad_gradient(trainer, MIXER + "D", NAN)
    bad = trainer.step(*pair())
    with pytest.warns(UserWarning, match="skipped"):
        assert bad.skipped
    trainer.save(tmp_path)
    again = make(device, max_skips=2, warmup_steps=5)
    again.load(tmp_path)
    a, b = trainer.step(*pair()), again.step(*pair())
    assert (a.step, a.lr, a.loss) == (b.step, b.lr, b.loss) == (2, pytest.approx(2e-3), a.loss)
    again.load(tmp_path)
    with_bad_gradient(again, MIXER + "D", NAN)
    bad = again.step(*pair())
    with pytest.raises(TrainingError, match="2 steps in a row"):
        _ = bad.skipped
    assert bad.skipped


def test_steps_that_are_done_again_are_logged_once(device, tmp_path):
    trainer = make(device, **settings(steps=8, save_every=3))
    trainer.fit(dataset(), out=tmp_path)
    straight = logged(tmp_path)
    again = make(device, **settings(steps=8))
    again.load(tmp_path / "checkpoint-3")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # cut off by a kill
    with pytest.warns(UserWarning, match="holds checkpoint-6, of a later step than 3, which stays"):
        again.fit(dataset(), out=tmp_path)
    assert logged(tmp_path) == straight
    assert [record["step"] for record in straight] == list(range(1, 9))
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]).rstrip())  # no line's end
    again.load(tmp_path / "checkpoint-3")
    with pytest.warns(UserWarning, match="holds checkpoint-6"):
        again.fit(dataset(), out=tmp_path)
    assert logged(tmp_path) == straight


def test_what_resuming_refuses(device, tmp_path):
    trainer = make(device, **settings(steps=3))
    trainer.fit(dataset(), out=tmp_path)
    saved = tmp_path / "checkpoint-3"
    assert saved_config(tmp_path) == trainer.config.to_dict()
    changes = ({"seq_len": 8}, {"batch_size": 3}, {"seed": 1}, {"gradient_accumulation": 2})
    for change in (*changes, {"eval_fraction": 0.1}):
        with pytest.raises(CheckpointError, match=f"trained with {next(iter(change))}"):
            make(device, **{**settings(steps=3), **change}).load(saved)
    longer = make(device, **settings(steps=5, lr=1e-3))
    longer.load(saved)
    with pytest.raises(DataError, match=r"150 tokens.* 151"):
        longer.fit(dataset(151))
    assert longer.fit(dataset()).step == 5

    def damaged(name, data):
        copy = tmp_path / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(saved, copy)
        (copy / name).write_bytes(data) if data is not None else (copy / name).unlink()
        return copy

    state = json.loads((saved / "trainer_state.json").read_text())
    without = {k: v for k, v in state.items() if k != "optimizer"}
    fresh = make(device, **settings(steps=3))
    before = fresh.model.state_dict()

    def with_state(part, **values):
        return json.dumps({**state, part: {**state.get(part, {}), **values}}).encode()

    for name, data, message in [
        ("trainer_state.json", None, "trainer_state.json is missing"),
        ("trainer_state.json", b"{", "damaged"),
        ("trainer_state.json", json.dumps(without).encode(), "not a trainer's state"),
        ("trainer_state.json", with_state("optimizer", calls=-1), "a trainer's state: calls is -1"),
        ("trainer_state.json", with_state("optimizer", calls=2**40), "a trainer's state: calls is"),
        ("trainer_state.json", with_state("progress", step=-5), "a trainer's state: step is -5"),
        ("trainer_state.json", with_state("progress", step=None), "a trainer's state: int"),
        ("trainer_state.json", with_state("progress", batch=-1), "a trainer's state: batch is -1"),
        ("trainer_state.json", with_state("progress", epoch=2**70), "a trainer's state: epoch is"),
        ("trainer_state.json", with_state("loss_scale", scale=None), "a trainer's state: "),
        ("optimizer.safetensors", None, "optimizer.safetensors is missing"),
        ("optimizer.safetensors", (saved / "optimizer.safetensors").read_bytes()[:-4], "damaged"),
        ("optimizer.safetensors", (saved / "model.safetensors").read_bytes(), "missing: m."),
        ("model.safetensors", b"", "model.safetensors"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            fresh.load(damaged(name, data))
    assert_same(fresh.model.state_dict(), before)
    assert fresh.progress.step == 0


def test_a_new_process_goes_on_to_the_same_bits(tmp_path):  # C09
    text = Path(__file__).read_bytes()[:3000]
    (tmp_path / "text.txt").write_bytes(text)

    def train(out, *more):
        command = [sys.executable, "-m", "wgsl_train", "train", "--data", "text.txt", "--out", out]
        options = {"d-model": 8, "n-layer": 1, "d-state": 4, "batch-size": 4, "seq-len": 16}
        options |= {"steps": 20, "gradient-accumulation": 2, "lr": 1e-2, "eval-fraction": 0.05}
        flags = [f"--{name}={value}" for name, value in options.items()]
        done = subprocess.run(
            [*command, *flags, "--save-every=5", *more],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    train("straight")
    train("run", "--stop-after", "7")
    assert checkpoint.latest(tmp_path / "run").name == "checkpoint-7"
    train("run", "--resume")
    a, b = (hashes(tmp_path / name / "checkpoint-20") for name in ("straight", "run"))
    assert a == b
    assert logged(tmp_path / "straight") == logged(tmp_path / "run")
