"""A base in f16 or int8 under an adapter: what is stored, and that it is computed with."""

import json

import numpy as np
import pytest

import wgsl_train as wt
from tests.test_lora import ALL, CONFIG, HYBRID, UNTIED, base, oracle_grads, settings, trainer_of
from tests.test_model import lively, relative
from tests.test_train import assert_same, pair
from wgsl_train import checkpoint
from wgsl_train.config import MambaConfig, TrainConfig
from wgsl_train.encoder import Buffers
from wgsl_train.errors import CheckpointError, ConfigError, DeviceError, ShapeError
from wgsl_train.kernel import PORTABLE
from wgsl_train.model import plan_step
from wgsl_train.models import lora
from wgsl_train.models.language_model import parameters
from wgsl_train.plan import Layout, ParamSpec
from wgsl_train.quantize import dequantize, quantize

MATRICES = ("embeddings", "in_proj", "x_proj", "dt_proj", "out_proj", "lm_head", "fc1", "fc2")


def is_stored(name):
    return name.endswith(tuple(f"{m}.weight" for m in MATRICES))


def rounded(array, lora_base):
    return dequantize(*quantize(array, {"f16": "f16", "int8": "i8"}[lora_base]))


# Rounding


def test_int8_is_symmetric_with_a_factor_a_row(rng):
    array = rng.normal(size=(50, 33)).astype(np.float32) * np.exp(rng.normal(size=(50, 1)))
    array[7] = 0
    array[8] = np.eye(1, 33)  # its largest magnitude is the factor's 127
    stored, factors = quantize(array, "i8")
    assert stored.dtype == np.int8
    assert (np.abs(stored[np.arange(50) != 7]).max(1) == 127).all()
    np.testing.assert_allclose(factors, np.abs(array).max(1) / 127, rtol=2**-16)
    back = dequantize(stored, factors)
    assert back.dtype == np.float32
    assert (np.abs(back - array) <= factors[:, None] * 0.501).all()
    assert not back[7].any()
    exact = stored.astype(np.float64) * factors.astype(np.float64)[:, None]
    np.testing.assert_array_equal(back, exact)  # no product is rounded


def test_f16_rounds_to_nearest_even():
    ties = np.array([[1 + 2**-11, 1 + 3 * 2**-11, 65504, 2**-24, 2**-25, -0.1]], np.float32)
    stored, factors = quantize(ties, "f16")
    assert factors is None
    np.testing.assert_array_equal(
        stored, np.array([[1, 1 + 2**-9, 65504, 2**-24, 0, -0.1]], np.float16)
    )


@pytest.mark.parametrize("dtype", ["f16", "i8"])
def test_rounding_again_changes_nothing(rng, dtype):
    array = rng.normal(size=(300, 40)).astype(np.float32) * np.exp(3 * rng.normal(size=(300, 1)))
    stored, factors = quantize(array, dtype)
    again, same = quantize(dequantize(stored, factors), dtype)
    np.testing.assert_array_equal(again, stored)
    np.testing.assert_array_equal(same, factors)


@pytest.mark.parametrize(
    "value, dtype, message",
    [
        (np.nan, "i8", r"w\[1, 2\] is nan, which i8 cannot hold"),
        (-np.inf, "f16", r"w\[1, 2\] is -inf, which f16 cannot hold"),
        (7e4, "f16", r"w\[1, 2\] is 70000.0, which f16 cannot hold"),
    ],
)
def test_what_cannot_be_held_is_refused(value, dtype, message):
    array = np.ones((3, 4), np.float32)
    array[1, 2] = value
    with pytest.raises(CheckpointError, match=message):
        quantize(array, dtype, "w")


# Configuration


@pytest.mark.parametrize("lora_base", ["int4", 8])
def test_unknown_bases_are_refused(lora_base):
    with pytest.raises(ConfigError, match=r"lora_base is .*; allowed: 'f32' or 'f16' or 'int8'"):
        TrainConfig(lora_base=lora_base)


@pytest.mark.gpu
def test_a_base_needs_an_adapter(device):
    with pytest.raises(ConfigError, match=r"lora_base is 'int8'.*set lora_rank"):
        wt.Trainer(base(device), TrainConfig(lora_base="int8"))


def test_what_trains_is_not_rounded():
    with pytest.raises(ShapeError, match="a parameter that trains is stored as f32, not as i8"):
        Layout([ParamSpec("w", (4, 4), dtype="i8")])


# Memory


@pytest.mark.parametrize("lora_base, share", [("f16", 0.5), ("int8", 0.25)])
def test_memory_shows_what_is_saved(lora_base, share):
    config = MambaConfig(vocab_size=500, d_model=128, n_layer=2)
    adapter = lora.Lora.of(config, settings())
    layouts, memory = {}, {}
    for name in ("f32", lora_base):
        specs = lora.adapted(config, adapter, name)
        assert [s.name for s in specs if s.dtype != "f32"] == [
            s.name for s in parameters(config) if name != "f32" and is_stored(s.name)
        ]
        layouts[name] = Layout(specs, PORTABLE, adapter.low_rank())
        planned = plan_step(config, layouts[name], PORTABLE, 1, 8, update=True)
        memory[name] = planned.plan.memory().by_kind()
    stored, as_f32 = layouts[lora_base].stored_bytes
    assert share <= stored / as_f32 < share + 0.02
    saved = memory["f32"]["parameters"] - memory[lora_base]["parameters"]
    assert saved == pytest.approx(as_f32 - stored, rel=0.05)  # factors fill whole blocks
    assert memory[lora_base]["moments"] == memory["f32"]["moments"]
    assert layouts[lora_base].n_params == layouts["f32"].n_params


# Numbers


@pytest.mark.gpu
@pytest.mark.parametrize("lora_base", ["f16", "int8"])
@pytest.mark.parametrize("config", [CONFIG, UNTIED, HYBRID], ids=["tied", "untied", "hybrid"])
def test_gradients_are_the_oracle_s_on_the_rounded_weights(device, config, lora_base):
    trainer = trainer_of(device, config=config, lora_targets=ALL, lora_base=lora_base)
    model, weights, (tokens, targets) = trainer.model, lively(config), pair(ignored=3)
    for name, array in model.state_dict().items():
        want = rounded(weights[name], lora_base) if is_stored(name) else weights[name]
        np.testing.assert_array_equal(array, want, name)
    model.step_encoder(2, 9, activation_checkpointing=False).encoder.poison()
    loss, grads = model.loss_and_grads(tokens, targets)
    want_loss, want, logits = oracle_grads(model, tokens, targets)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert relative(model.logits(tokens), logits) <= 1e-5
    worst = {name: relative(grads[name], want[name]) for name in want}
    assert grads.keys() == want.keys()
    assert max(worst.values()) <= 1e-4, worst
    exact = trainer_of(device, config=config, lora_targets=ALL).model.logits(tokens)
    assert 1e-4 < relative(logits, exact) < 0.1  # it is rounded, and not by much


@pytest.mark.gpu
def test_generation_is_that_of_whole_forward_passes(device):
    """Token by token, through the state, with every adapter and a base in fewer bits."""
    model = trainer_of(device, lora_targets=ALL, lora_base="int8").model
    ids = list(np.random.default_rng(3).integers(0, CONFIG.vocab_size, 5))
    for token in model.generate(ids, 4, temperature=0):
        logits = model.logits(np.array([ids]))[0, -1]
        assert logits[token] >= logits.max() - 1e-4 * np.abs(logits).max()
        ids.append(token)


@pytest.mark.gpu
def test_the_base_stays_and_the_adapter_learns(device):
    trainer = wt.Trainer(base(device), settings(lora_base="int8"))
    before = trainer.model.state_dict()
    losses = [trainer.step(*pair()).loss for _ in range(10)]
    assert losses[-1] < losses[0]
    assert_same(trainer.model.state_dict(), before)


# Files


@pytest.mark.gpu
@pytest.mark.parametrize("lora_base", ["f16", "int8"])
def test_runs_resume_to_the_same_bits(device, tmp_path, lora_base):
    def made():
        return wt.Trainer(base(device), settings(lora_base=lora_base))

    straight, first = made(), made()
    for seed in range(4):
        straight.step(*pair(seed=seed))
    for seed in range(2):
        first.step(*pair(seed=seed))
    saved = first.save(tmp_path)
    second = made()
    second.load(saved)
    for seed in range(2, 4):
        second.step(*pair(seed=seed))
    assert_same(second.model.adapter_state(), straight.model.adapter_state())
    assert_same(second.model.state_dict(), straight.model.state_dict())
    counts = json.loads((saved / "trainer_state.json").read_text())["parameters"]
    assert counts["trainable"] == straight.model.layout.n_trainable
    assert counts["base_bytes_saved"] > 0


@pytest.mark.gpu
def test_a_checkpoint_has_the_values_that_were_computed_with_and_says_so(device, tmp_path):
    trainer, (tokens, _) = trainer_of(device, lora_base="int8"), pair()
    model, weights = trainer.model, lively(CONFIG)
    logits = model.logits(tokens)
    model.save_pretrained(tmp_path)
    tensors = checkpoint.load_tensors(tmp_path)
    assert tensors.metadata == {"format": "pt", "wgsl_train.lora_base": "int8"}
    for name, array in tensors.items():
        want = rounded(weights[name], "int8") if is_stored(name) else weights[name]
        np.testing.assert_array_equal(array, want, name)
    again = wt.Model.from_pretrained(tmp_path, device)
    assert again.lora_base == "int8"
    np.testing.assert_array_equal(again.logits(tokens), logits)
    wide = wt.Model.from_pretrained(tmp_path, device, lora_base="f32")
    assert wide.lora_base == "f32"
    assert relative(wide.logits(tokens), logits) <= 1e-6
    wide.save_pretrained(tmp_path / "wide")
    assert checkpoint.load_tensors(tmp_path / "wide").metadata == {"format": "pt"}


@pytest.mark.gpu
def test_a_trainer_leaves_the_base_as_it_is(device, tmp_path):
    trainer_of(device, lora_base="int8").model.save_pretrained(tmp_path)
    model = wt.Model.from_pretrained(tmp_path, device)
    wt.Trainer(model, settings())
    assert model.lora_base == "int8"
    wt.Trainer(model, settings(lora_base="f32"))
    assert model.lora_base == "f32"
    base(device).save_pretrained(tmp_path / "whole")
    model = wt.Model.from_pretrained(tmp_path / "whole", device, "f16")
    with pytest.raises(
        ConfigError, match=r"lora_base is 'f16'.*set lora_rank, or lora_base to 'f32'"
    ):
        wt.Trainer(model, TrainConfig())
    wt.Trainer(model, settings())
    assert model.lora_base == "f16"


@pytest.mark.gpu
def test_merging_adds_to_the_rounded_weights(device):
    model, (tokens, _) = trainer_of(device, lora_targets=ALL, lora_base="int8").model, pair()
    logits, before = model.logits(tokens), model.state_dict()
    model.merge_adapter()
    assert model.lora_base == "f32"
    assert {spec.dtype for spec in model.layout.specs.values()} == {"f32"}
    assert relative(model.logits(tokens), logits) <= 1e-5
    model.unmerge_adapter()
    assert model.lora_base == "int8"
    np.testing.assert_array_equal(model.logits(tokens), logits)
    assert_same(model.state_dict(), before)


@pytest.mark.gpu
def test_a_model_without_adapter_may_be_narrow_too(device, tmp_path):
    model, (tokens, targets) = base(device), pair()
    model.save_pretrained(tmp_path)
    exact = model.logits(tokens)
    small = wt.Model.from_pretrained(tmp_path, device, lora_base="int8")
    assert 1e-4 < relative(small.logits(tokens), exact) < 0.1
    _, grads = small.loss_and_grads(tokens, targets)
    assert not any(map(is_stored, grads))
    small.store_base("f32")  # in the rounded values
    assert relative(small.logits(tokens), exact) > 1e-4


# What cannot be stored


def held(model):
    """All that must not change: weights, adapter, their storage, and what is computed."""
    specs, tokens = model.layout.specs, pair()[0]
    weights = {name: model._read(name) for name in specs}
    return weights, specs, model.adapter, model.lora_base, model.loss(*pair()), model.logits(tokens)


def assert_held(model, before):
    weights, specs, adapter, lora_base, loss, logits = held(model)
    assert_same(weights, before[0])
    assert (specs, adapter, lora_base, loss) == before[1:5]
    np.testing.assert_array_equal(logits, before[5])


def too_large(weights):
    """Those weights, with one of the last layer beyond what f16 holds."""
    name = [n for n in weights if n.endswith("out_proj.weight")][-1]
    array = weights[name].copy()
    array[1, 2] = 1e5
    return {**weights, name: array}


@pytest.mark.gpu
@pytest.mark.parametrize("adapter", [False, True])
def test_a_base_that_cannot_be_stored_leaves_the_model_as_it_was(device, adapter):
    model = trainer_of(device).model if adapter else base(device)
    model.load_state_dict(too_large(model.state_dict()))
    before = held(model)
    with pytest.raises(CheckpointError, match=r"out_proj.weight\[1, 2\] is 100000.0, which f16"):
        wt.Trainer(model, settings(lora_base="f16"))
    assert_held(model, before)


@pytest.mark.gpu
def test_a_device_without_room_leaves_model_and_trainer_as_they_were(device, monkeypatch):
    trainer, straight = trainer_of(device, lora_base="int8"), trainer_of(device, lora_base="int8")
    for one in (trainer, straight):
        one.step(*pair())
    before, create, made = held(trainer.model), Buffers.create, []

    def refuse(buffers, label, nbytes):
        made.append(label)
        if len(made) == 1:  # what comes next is what was there
            raise DeviceError(f"no room for {label}")
        return create(buffers, label, nbytes)

    monkeypatch.setattr(Buffers, "create", refuse)
    with pytest.raises(DeviceError, match="no room for"):
        trainer.model.merge_adapter()
    assert_held(trainer.model, before)
    assert trainer.step(*pair()).record() == straight.step(*pair()).record()
    assert_same(trainer.model.adapter_state(), straight.model.adapter_state())


@pytest.mark.gpu
def test_weights_that_cannot_be_stored_are_not_written_in_part(device):
    model = trainer_of(device, lora_base="f16").model
    before, state = held(model), model.state_dict()
    wrong = {name: array + 1 for name, array in too_large(state).items()}
    for load in (model.load_state_dict, model.update):
        with pytest.raises(CheckpointError, match="which f16 cannot hold"):
            load(wrong)
        assert_held(model, before)
    model.merge_adapter()
    merged = held(model)
    name = "backbone.embeddings.weight"  # no adapter's: what it is now stays
    assert name not in model._merged.before
    model.update({name: too_large({"out_proj.weight": state[name]})["out_proj.weight"]})
    with pytest.raises(CheckpointError, match="which f16 cannot hold"):
        model.unmerge_adapter()
    model.update({name: state[name]})
    assert_held(model, merged)
    model.unmerge_adapter()
    assert_held(model, before)


@pytest.mark.gpu
def test_what_is_narrow_cannot_train_and_stays(device):
    model = trainer_of(device, lora_base="int8").model
    before = held(model)
    with pytest.raises(ShapeError, match="a parameter that trains is stored as f32, not as i8"):
        model.set_trainable(["backbone.layers.0.mixer.out_proj.weight"])
    assert_held(model, before)
