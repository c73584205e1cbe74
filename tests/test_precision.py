"""Training with activations stored as f16: what it computes, what it saves, how it scales the loss."""

import json
from dataclasses import replace

import numpy as np
import pytest

import wgsl_train as wt
from tests import oracle_model
from tests.test_model import lively
from wgsl_train import checkpoint
from wgsl_train.device import with_target
from wgsl_train.errors import ConfigError, DeviceError, TrainingError
from wgsl_train.kernel import Target
from wgsl_train.model import plan_step
from wgsl_train.models.language_model import parameters
from wgsl_train.ops.optimizer import INITIAL_SCALE
from wgsl_train.plan import Layout

CONFIG = wt.MambaConfig(vocab_size=23, d_model=8, n_layer=2, d_state=4, d_conv=3, dt_rank=2)
LARGE = Target(
    kind="discrete",
    max_binding=(1 << 31) - 4,
    max_buffer=(1 << 31) - 4,
    features=frozenset({"shader-f16"}),
)
NORM = "backbone.norm_f.weight"


def pair(seed=1, shape=(2, 9)):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (2, *shape))


def make(device, config=CONFIG, **train):
    model = wt.Model(config, device)
    model.load_state_dict(lively(config, 0))
    return wt.Trainer(
        model, wt.TrainConfig(**{"steps": 10, "lr": 1e-2, "precision": "f16", **train})
    )


def plan_bytes(config, batch, seqlen, precision):
    layout = Layout(parameters(config), LARGE)
    step = plan_step(config, layout, LARGE, batch, seqlen, update=True, precision=precision)
    return step.plan.memory().by_kind()


def test_a_third_of_the_activations_memory_is_saved():
    config = wt.MambaConfig(vocab_size=50280, d_model=768, n_layer=24)
    plain, half = (plan_bytes(config, 8, 1024, p) for p in ("f32", "f16"))
    assert half["activations"] <= 0.7 * plain["activations"]
    assert all(half[kind] == plain[kind] for kind in ("parameters", "gradients", "moments"))


def test_without_the_feature_it_is_refused():  # D09, U7
    target = replace(LARGE, features=frozenset())
    with pytest.raises(DeviceError, match="shader-f16"):
        plan_step(CONFIG, Layout(parameters(CONFIG), target), target, 1, 4, precision="f16")


@pytest.mark.gpu
def test_no_shader_of_f32_training_needs_the_feature(device):
    trainer = make(device, precision="f32")
    trainer.step(*pair())
    (compiled,) = trainer.model._steps.values()
    assert not any("f16" in d.render().source for d in compiled.encoder.plan.dispatches)
    half = make(device)
    half.step(*pair())
    (compiled,) = half.model._steps.values()
    assert any("enable f16;" in d.render().source for d in compiled.encoder.plan.dispatches)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, layers=("mamba", "attention:mlp=swiglu"), attn_heads=2, attn_head_dim=4),
    ],
    ids=["mamba", "hybrid"],
)
def test_a_step_is_near_the_exact_one(device, config):
    tokens, targets = pair()
    exact, grads, _ = oracle_model.loss_and_grads(config, lively(config, 0), tokens, targets)
    trainer = make(device, config, lr=0.0)
    result = trainer.step(tokens, targets)
    assert result.loss == pytest.approx(exact, rel=2e-3)
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-2)  # the scale is taken out again
    assert result.loss_scale == INITIAL_SCALE
    for name, grad in trainer.model.read_grads().items():
        error = np.linalg.norm(grad / INITIAL_SCALE - grads[name]) / np.linalg.norm(grads[name])
        assert error < 2e-2, name


@pytest.mark.gpu
def test_it_learns_what_f32_learns(device):
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 60, np.uint8)
    losses = []
    for precision in ("f32", "f16"):
        config = wt.MambaConfig(vocab_size=256, d_model=32, n_layer=1)
        train = wt.TrainConfig(steps=40, lr=5e-3, batch_size=4, seq_len=32, precision=precision)
        trainer = wt.Trainer(wt.Model(config, device), train)
        trainer.fit(wt.Dataset(text))
        losses.append(trainer.evaluate(wt.Dataset(text[:513])).loss)
    assert losses[0] < 3
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[1] != losses[0]


def plant(trainer, value):
    weight = trainer.model.state_dict()[NORM]
    trainer.model._write(NORM, np.full_like(weight, value))
    return weight


@pytest.mark.gpu
def test_an_overflow_moves_nothing_and_halves_the_scale(device):
    trainer, straight = make(device), make(device)
    straight.step(*pair())
    trainer.step(*pair())
    good = plant(trainer, 3e38)  # its output passes the range of f16, and of f32
    before = {n: trainer.model.read_moment(n) for n in trainer._moment_shapes()}
    with pytest.warns(UserWarning, match="step 2 was skipped"):
        assert trainer.step(*pair()).skipped
    trainer.model._write(NORM, good)
    for name, moment in before.items():
        np.testing.assert_array_equal(trainer.model.read_moment(name), moment)
    after, wanted = trainer.step(*pair(2)), straight.step(*pair(2))
    assert after.loss_scale == INITIAL_SCALE / 2
    assert after.loss == wanted.loss
    assert after.lr == wanted.lr
    assert after.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-3)


@pytest.mark.gpu
def test_overflows_without_end_stop_the_run_by_name(device):
    trainer = make(device, max_skips=3)
    plant(trainer, np.inf)
    with pytest.warns(UserWarning, match="skipped"):
        assert trainer.step(*pair()).skipped
    assert trainer.step(*pair()).skipped
    last = trainer.step(*pair())
    with pytest.raises(TrainingError, match=rf"3 steps in a row.*{NORM}.*precision f32"):
        _ = last.skipped


@pytest.mark.gpu
def test_resuming_goes_on_with_the_same_scale_and_bits(device, tmp_path):  # C09
    data = wt.Dataset(np.random.default_rng(2).integers(0, CONFIG.vocab_size, 150))
    settings = {"batch_size": 2, "seq_len": 9, "gradient_accumulation": 2, "steps": 7}
    straight = make(device, **settings)
    straight.fit(data)
    first = make(device, **settings)
    first.fit(data, out=tmp_path, should_stop=lambda: first.progress.step == 3)
    saved = json.loads((checkpoint.latest(tmp_path) / "trainer_state.json").read_text())
    assert saved["loss_scale"] == {"scale": INITIAL_SCALE, "clean_steps": 3.0, "overflows": 0.0}
    again = wt.Trainer(wt.Model.from_pretrained(tmp_path, device), first.config)
    again.load(tmp_path)
    again.fit(data, out=tmp_path)
    for name, array in straight.model.state_dict().items():
        np.testing.assert_array_equal(again.model.state_dict()[name], array, name)
    assert json.loads((tmp_path / "tuning.json").read_text())["precision"] == "f16"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["loss_scale"] for line in lines if "loss" in line} == {INITIAL_SCALE}


def test_a_precision_that_is_unknown():
    with pytest.raises(ConfigError, match="precision is 'bf16'"):
        wt.TrainConfig(steps=1, precision="bf16")


@pytest.mark.gpu
def test_a_device_without_f16_is_refused_before_anything_is_planned(device):
    masked = with_target(device, features=device.target.features - {"shader-f16"})
    with pytest.raises(DeviceError, match="f16"):
        make(masked).step(*pair())
