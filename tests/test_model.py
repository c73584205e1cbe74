"""Whole models on the GPU against the float64 oracle, and against Hugging Face's values."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import wgsl_train as wt
from tests.oracle_model import batch, lively, loss_and_grads, relative
from wgsl_train import checkpoint
from wgsl_train.config import MambaConfig
from wgsl_train.device import with_target
from wgsl_train.errors import CheckpointError, ConfigError, DataError, TrainingError
from wgsl_train.train import evaluate

DATA = Path(__file__).parent / "data"


def assert_matches_oracle(model, weights, tokens, targets, limit=1e-4):
    model.load_state_dict(weights)
    want_loss, want, logits = loss_and_grads(model.config, weights, tokens, targets)
    loss, grads = model.loss_and_grads(tokens, targets)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert grads.keys() == want.keys()
    worst = {name: relative(grads[name], want[name]) for name in want}
    assert max(worst.values()) <= limit, worst
    assert relative(model.logits(tokens), logits) <= 1e-5


SMALL = dict(vocab_size=37, d_model=20, n_layer=2, d_state=5, dt_rank=3)
SMALL2 = dict(vocab_size=37, d_model=20, n_layer=2, layers="mamba2", d_state=5, head_dim=10)
CONFIGS = {
    "default": MambaConfig(vocab_size=64, d_model=32, n_layer=2),
    "odd": MambaConfig(**SMALL),
    "state17": MambaConfig(**{**SMALL, "d_state": 17, "d_conv": 1}),
    "expand1_conv5": MambaConfig(**{**SMALL, "d_conv": 5, "expand": 1, "d_state": 1}),
    "biases_untied": MambaConfig(
        **SMALL, use_bias=True, x_proj_bias=True, lm_head_bias=True, tie_embeddings=False
    ),
    "no_conv_bias": MambaConfig(**SMALL, use_conv_bias=False, d_conv=2),
    "zoh": MambaConfig(**SMALL, discretization="zoh"),
    "mamba2": MambaConfig(vocab_size=64, d_model=32, n_layer=2, layers="mamba2", head_dim=16),
    "mamba2_groups": MambaConfig(**SMALL2, n_groups=2, use_bias=True, use_conv_bias=False),
    "mamba2_whole_norm": MambaConfig(**SMALL2, n_groups=2, norm_per_group=False),
    "mamba2_limited": MambaConfig(**{**SMALL2, "head_dim": 1}, d_conv=1, time_step_limit=(0.5, 1)),
    "memory_engine": MambaConfig.memory_engine(vocab_size=37, d_model=24, n_layer=2),
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 33), (3, 7), (1, 1)], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_logits_and_every_gradient_match_the_oracle(device, name, shape):
    config = CONFIGS[name]
    model = wt.Model(config, device)
    tokens, targets = batch(config, shape, ignored=min(3, shape[0] * shape[1] - 1))
    assert_matches_oracle(model, lively(config), tokens, targets)


@pytest.mark.gpu
def test_a_wrong_gradient_would_be_seen(device):
    config = CONFIGS["odd"]
    model, weights = wt.Model(config, device), lively(config)
    tokens, targets = batch(config, (2, 9))
    shifted = {k: v * 1.001 for k, v in weights.items()}
    model.load_state_dict(shifted)
    _, grads = model.loss_and_grads(tokens, targets)
    _, want, _ = loss_and_grads(config, weights, tokens, targets)
    assert max(relative(grads[n], want[n]) for n in want) > 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", [2, 3, 5, 31, 32, 63, 64, 65, 127, 255, 257])
def test_any_sequence_length(device, seqlen):
    config = MambaConfig(vocab_size=11, d_model=8, n_layer=1, d_state=3)
    model = wt.Model(config, device)
    assert_matches_oracle(model, lively(config), *batch(config, (1, seqlen)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, options",
    # the values of Mamba-2 were computed with the gated norm over all channels, as older releases
    # do; for norm_per_group there is test_transformers.py
    [("hf_tiny", {}), ("hf_mamba2_tiny", {"norm_per_group": False})],
    ids=["mamba", "mamba2"],
)
def test_hugging_face_values(device, name, options):
    """Loss, logits and gradients that transformers computed in float64."""
    values = np.load(DATA / f"{name}.npz")
    config = MambaConfig.from_hugging_face(json.loads((DATA / f"{name}.json").read_text()))
    config = replace(config, **options)
    model = wt.Model(config, device)
    model.load_state_dict({k[2:]: values[k] for k in values.files if k.startswith("w:")})
    tokens, targets = values["input_ids"], np.full(values["labels"].shape, -100)
    targets[:, :-1] = values["labels"][:, 1:]
    loss, grads = model.loss_and_grads(tokens, targets)
    assert loss == pytest.approx(float(values["loss"]), rel=1e-5)
    assert relative(model.logits(tokens), values["logits"]) <= 1e-5
    for name, grad in grads.items():
        assert relative(grad, values[f"g:{name}"]) <= 1e-4, name


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["portable", "cpu", "discrete"])
def test_every_tuning_table_gives_the_same_gradients(device, kind):
    config = MambaConfig(vocab_size=70, d_model=48, n_layer=1)
    model = wt.Model(config, with_target(device, kind=kind))
    assert_matches_oracle(model, lively(config), *batch(config, (2, 70)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["zoh", "mamba2_groups"])
def test_activation_checkpointing_gives_the_same_bits(device, name):
    config = CONFIGS[name]
    model = wt.Model(config, device)
    model.load_state_dict(lively(config))
    tokens, targets = batch(config, (2, 40))
    loss, grads = model.loss_and_grads(tokens, targets)
    again = model.loss_and_grads(tokens, targets, activation_checkpointing=True)
    assert again[0] == loss
    for name in grads:
        np.testing.assert_array_equal(again[1][name], grads[name], name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["odd", "mamba2_groups"])
def test_repeated_backward_gives_the_same_bits_whatever_lay_in_memory(device, name):
    config = CONFIGS[name]
    model = wt.Model(config, device)
    model.load_state_dict(lively(config))
    tokens, targets = batch(config, (2, 33))
    loss, grads = model.loss_and_grads(tokens, targets)
    step = model.step_encoder(2, 33)
    for i in range(30):
        if i % 10 == 0:
            step.encoder.poison()
        again = model.loss_and_grads(tokens, targets)
        assert again[0] == loss
        for name in grads:
            np.testing.assert_array_equal(again[1][name], grads[name], name)


@pytest.mark.gpu
@pytest.mark.slow
def test_an_embedding_beyond_one_binding_at_the_guaranteed_limits():
    """vocab 50280 x d_model 768 in f32 is 154 MB, a binding 128 MiB."""
    limits = dict(
        max_storage_buffers=8, max_binding=128 << 20, max_buffer=256 << 20,
        max_invocations=256, max_workgroup_memory=16384,
    )  # fmt: skip
    small = wt.request_device(limits=limits, kind="portable", quiet=True)
    config = MambaConfig(vocab_size=50280, d_model=768, n_layer=1)
    model = wt.Model(config, small)
    assert len(model.layout.pieces["backbone.embeddings.weight"]) == 2
    tokens, targets = batch(config, (1, 8))
    tokens[0, :2] = [0, 50279]
    trainer = wt.Trainer(model, wt.TrainConfig(steps=8, lr=1e-3, weight_decay=0.0))
    first = trainer.step(tokens, targets)
    assert first.loss == pytest.approx(np.log(50280), rel=0.05)
    weights = {k: v for k, v in wt.models.initialization.initialize(config, 0)}
    want, grads, _ = loss_and_grads(config, weights, tokens, targets)
    assert first.loss == pytest.approx(want, rel=1e-5)
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    assert first.grad_norm == pytest.approx(norm, rel=1e-4)
    last = [trainer.step(tokens, targets) for _ in range(4)][-1]
    assert last.loss < first.loss - 0.5


@pytest.mark.gpu
def test_logits_in_row_chunks_equal_the_whole(device):
    """A binding that holds 64 rows of logits: several chunks, and the table in pieces."""
    config = MambaConfig(vocab_size=300, d_model=16, n_layer=1)
    weights, (tokens, targets) = lively(config), batch(config, (2, 70), ignored=9)
    whole = wt.Model(config, device)
    whole.load_state_dict(weights)
    limited = with_target(device, max_binding=64 * 300 * 4, max_buffer=64 * 300 * 4)
    chunked = wt.Model(config, limited)
    assert_matches_oracle(chunked, weights, tokens, targets)
    loss, grads = whole.loss_and_grads(tokens, targets)
    again, pieces = chunked.loss_and_grads(tokens, targets)
    assert again == pytest.approx(loss, rel=1e-6)
    for name in grads:
        assert relative(pieces[name], grads[name]) <= 1e-6, name


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["default", "odd", "memory_engine", "state17", "mamba2", "mamba2_limited"]
)
def test_generation_carries_the_state(device, name):
    """Token by token through the state, after a prompt longer than the prefill's step, the
    likeliest continuation is the one that whole forward passes give."""
    config = CONFIGS[name]
    model = wt.Model(config, device)
    model.load_state_dict(lively(config))
    prompt = np.random.default_rng(3).integers(0, config.vocab_size, 130)
    got = model.generate(prompt, 6, temperature=0)
    ids = list(prompt)
    for token in got:
        logits = model.logits(np.array([ids]))[0, -1, : config.vocab_size]
        assert logits[token] >= logits.max() - 1e-4 * np.abs(logits).max()
        ids.append(token)


@pytest.mark.gpu
def test_integers_are_no_weights(device, tmp_path):
    model = wt.Model(CONFIGS["default"], device)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = dict(checkpoint.load_tensors(file))
    weights["backbone.norm_f.weight"] = weights["backbone.norm_f.weight"].astype(np.int32)
    checkpoint.save_tensors(file, weights)
    with pytest.raises(CheckpointError, match=r"backbone.norm_f.weight holds I32; allowed: floats"):
        wt.Model.from_pretrained(tmp_path, device)


@pytest.mark.gpu
def test_sampling_is_seeded_and_bounded(device):
    config = CONFIGS["default"]
    model = wt.Model(config, device)
    a = model.generate([1, 2, 3], 12, seed=5)
    assert a == model.generate([1, 2, 3], 12, seed=5)
    with pytest.raises(ConfigError, match="top_k is -1"):
        model.stream([1, 2, 3], top_k=-1)  # at the call, before a token is asked for
    assert a != model.generate([1, 2, 3], 12, seed=6)
    assert model.generate([1], 12, eos_token_id=model.generate([1], 1, seed=2)[0], seed=2) == [
        model.generate([1], 1, seed=2)[0]
    ]
    with pytest.raises(ConfigError, match="'int4'; allowed: 'f32' or 'f16' or 'int8'"):
        wt.Model.from_pretrained("anywhere", device, lora_base="int4")
    for option in ("top_k", "max_new_tokens"):
        with pytest.raises(ConfigError, match=rf"{option} is 1.5, must be an integer"):
            model.stream([1, 2, 3], **{option: 1.5})
    with pytest.raises(ConfigError, match="seed is -1, must be 0 or more"):
        wt.Model(config, device, seed=-1)
    with pytest.raises(ConfigError, match="seed is -1, must be 0 or more"):
        model.generate([1], 1, seed=-1)
    with pytest.raises(ConfigError, match="top_p"):
        model.generate([1], 1, top_p=0)
    with pytest.raises(DataError, match="64"):
        model.generate([64], 1)


@pytest.mark.gpu
@pytest.mark.parametrize("layers", ["mamba", "mamba,attention"])
def test_a_stream_stops_where_another_has_begun(device, layers):
    model = wt.Model(MambaConfig(37, 20, layers=layers), device)
    alone = model.generate([1, 2, 3], 6, temperature=0)
    first = model.stream([1, 2, 3], 6, temperature=0)
    other = model.stream([4], 400, temperature=0)  # more than there is room for at first
    assert [next(first), next(first)] == alone[:2]
    next(other)
    with pytest.raises(TrainingError, match=r"another one has begun.*or a second Model"):
        next(first)
    next(other)  # which is not disturbed; and is abandoned
    whole = model.stream([1, 2, 3], 6, temperature=0)
    assert [next(whole) for _ in range(6)] == alone
    assert model.generate([1, 2, 3], 6, temperature=0) == alone
    assert list(whole) == []  # it had all its tokens before the other began


@pytest.mark.gpu
def test_a_stream_stops_where_parameters_have_moved(device):
    model = wt.Model(CONFIGS["default"], device)
    stream = model.stream([1, 2, 3], 6)
    next(stream)
    model.set_trainable(["backbone.norm_f.weight"])
    with pytest.raises(TrainingError, match="parameters moved"):
        next(stream)
    assert len(model.generate([1, 2, 3], 6)) == 6


@pytest.mark.gpu
def test_a_model_that_is_not_finite_gives_no_tokens(device):
    model = wt.Model(CONFIGS["default"], device)
    name = "backbone.norm_f.weight"
    model.update({name: np.full_like(model.state_dict()[name], np.nan)})
    for temperature in (0, 1):
        with pytest.raises(TrainingError, match="the logits are not finite"):
            model.generate([1], 2, temperature=temperature)
    found = evaluate(model, wt.Dataset(np.arange(60)), 2, 8)
    assert (found.top1, found.top5) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [37, -1, 2**31])
def test_a_token_outside_the_vocabulary_is_an_error_before_any_work(device, bad):
    model = wt.Model(CONFIGS["odd"], device)
    submits = model.buffers.submits
    with pytest.raises(DataError, match=str(bad)):
        model.loss_and_grads([[1, bad]], [[1, 1]])
    with pytest.raises(DataError, match=str(bad)):
        model.loss_and_grads([[1, 1]], [[1, bad]])
    assert model.buffers.submits == submits


@pytest.mark.gpu
def test_save_and_load_keep_every_bit(device, tmp_path):
    for name in ("default", "biases_untied", "memory_engine", "mamba2", "mamba2_limited"):
        model = wt.Model(CONFIGS[name], device)
        model.load_state_dict(lively(CONFIGS[name]))
        model.save_pretrained(tmp_path / name)
        again = wt.Model.from_pretrained(tmp_path / name, device)
        assert again.config == model.config
        for key, array in model.state_dict().items():
            np.testing.assert_array_equal(again.state_dict()[key], array, key)


@pytest.mark.gpu
def test_nothing_is_loaded_unless_all_fits(device):
    model = wt.Model(CONFIGS["odd"], device)
    before, weights = model.state_dict(), lively(CONFIGS["odd"])
    weights["backbone.layers.1.mixer.D"] = np.ones(3, np.float32)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mixer\.D"):
        model.load_state_dict(weights)
    name = "backbone.norm_f.weight"
    for wrong, dtype in ((before[name] * 1j, "complex64"), (before[name].astype(str), "<U32")):
        for load, state in ((model.load_state_dict, before), (model.update, {})):
            told = rf"the state: backbone\.norm_f\.weight holds {dtype}; allowed: real numbers"
            with pytest.raises(CheckpointError, match=told):
                load({**state, name: wrong})
    for name, array in before.items():
        np.testing.assert_array_equal(model.state_dict()[name], array)


@pytest.mark.gpu
def test_initialisation(device):
    """dt in its range, A, D, the bound of dt_proj's weight, and the loss of knowing nothing."""
    config = MambaConfig(vocab_size=256, d_model=64, n_layer=2)
    model = wt.Model(config, device)
    state = model.state_dict()
    mixer = "backbone.layers.0.mixer."
    dt = np.log1p(np.exp(state[mixer + "dt_proj.bias"].astype(np.float64)))
    assert ((dt >= 0.999e-3) & (dt <= 0.1001)).all()
    assert 5e-3 < np.median(dt) < 2e-2
    assert np.abs(state[mixer + "dt_proj.weight"]).max() <= 4**-0.5
    np.testing.assert_allclose(np.exp(state[mixer + "A_log"][3]), np.arange(1, 17), rtol=1e-6)
    assert (state[mixer + "D"] == 1).all()
    loss, _ = model.loss_and_grads(*batch(config, (2, 64)))
    assert loss == pytest.approx(5.545, rel=0.05)
    again = wt.Model(config, device).state_dict()
    other = wt.Model(config, device, seed=1).state_dict()
    for name, array in state.items():
        np.testing.assert_array_equal(again[name], array)
    assert not np.array_equal(other[mixer + "in_proj.weight"], state[mixer + "in_proj.weight"])


@pytest.mark.gpu
def test_initialisation_of_mamba2(device):
    config = MambaConfig(vocab_size=256, d_model=64, n_layer=2, layers="mamba2", head_dim=2)
    model = wt.Model(config, device)
    state = model.state_dict()
    mixer = "backbone.layers.0.mixer."
    dt = np.log1p(np.exp(state[mixer + "dt_bias"].astype(np.float64)))
    assert ((dt >= 0.999e-3) & (dt <= 0.1001)).all()
    assert 5e-3 < np.median(dt) < 2e-2
    np.testing.assert_allclose(np.exp(state[mixer + "A_log"]), np.arange(1, 65), rtol=1e-6)
    assert (state[mixer + "D"] == 1).all()
    assert (state[mixer + "norm.weight"] == 1).all()
    loss, _ = model.loss_and_grads(*batch(config, (2, 64)))
    assert loss == pytest.approx(5.545, rel=0.05)
    decay = {name for name in state if wt.TrainConfig().decays(name)}
    assert {name for name in state if mixer in name} & decay == {
        mixer + name for name in ("in_proj.weight", "conv1d.weight", "out_proj.weight")
    }


@pytest.mark.gpu
def test_spread_over_tiny_buffers_gives_the_same_bits(device):
    config = MambaConfig(vocab_size=50, d_model=32, n_layer=2)
    results = []
    for target in (device, with_target(device, max_buffer=32 << 10)):
        model = wt.Model(config, target)
        trainer = wt.Trainer(model, wt.TrainConfig(steps=5, lr=1e-2))
        losses = [trainer.step(*batch(config, (2, 20))).loss for _ in range(5)]
        results.append((losses, model.state_dict(), len(model.layout.pages)))
    assert results[0][2] == 1
    assert results[1][2] > 3
    assert results[0][0] == results[1][0]
    for name, array in results[0][1].items():
        np.testing.assert_array_equal(results[1][1][name], array, name)


def test_config_and_dataclass_are_frozen():
    config = CONFIGS["odd"]
    assert replace(config, d_model=40).d_inner == 80
    with pytest.raises(AttributeError):
        config.d_model = 1
