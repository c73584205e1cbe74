"""Low-rank adapters: gradients, what stays as it is, merging, and PEFT's files."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wgsl_train as wt
from tests.oracle_model import loss_and_grads
from tests.test_model import lively, relative
from tests.test_train import assert_same, moments, pair
from wgsl_train.config import LORA_TARGETS, MambaConfig, TrainConfig
from wgsl_train.device import with_target
from wgsl_train.errors import CheckpointError, ConfigError, ShapeError, TrainingError
from wgsl_train.kernel import PORTABLE
from wgsl_train.model import plan_step
from wgsl_train.models import lora
from wgsl_train.models.language_model import parameters
from wgsl_train.ops.linear import linear
from wgsl_train.plan import Layout, LowRank, ParamSpec, Plan

CONFIG = MambaConfig(vocab_size=23, d_model=8, n_layer=2, d_state=4, d_conv=3, dt_rank=2)
UNTIED = replace(CONFIG, tie_embeddings=False)
ENGINE = MambaConfig.memory_engine(
    vocab_size=23, d_model=8, n_layer=2, d_state=4, d_conv=3, dt_rank=2
)
# All types of layers; two share all their weights, and the adapters of these
SHARED = "mamba:mlp=swiglu:d_ff=13:share=a"
HYBRID = replace(
    CONFIG, n_layer=4, layers=(SHARED, "mamba2:head_dim=4", SHARED, "attention:attn_heads=2")
)
ALL = ("embeddings", "in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "out_proj")
IN_PROJ = "backbone.layers.1.mixer.in_proj"
RANK, ALPHA = 3, 6.0


def settings(**train):
    return TrainConfig(**{"steps": 10, "lr": 1e-2, "lora_rank": RANK, "lora_alpha": ALPHA, **train})


def base(device, config=CONFIG):
    model = wt.Model(config, device)
    model.load_state_dict(lively(config))
    return model


def trainer_of(device, spread=0.3, config=CONFIG, **train):
    """A trainer of an adapter whose B is random, so that every path carries gradient."""
    trainer = wt.Trainer(base(device, config), settings(**train))
    rng = np.random.default_rng(5)
    for name, array in trainer.model.adapter_state().items():
        if name.endswith("lora_B.weight") and spread:
            trainer.model._write(name, rng.uniform(-spread, spread, array.shape))
    return trainer


def merged(model):
    """The oracle's weights: those of the base, and what the adapter adds."""
    weights = {name: array.astype(np.float64) for name, array in model.state_dict().items()}
    added = model.adapter_state()
    for name, low in model.adapter.low_rank().items():
        product = low.scale * added[low.b].astype(np.float64) @ added[low.a]
        weights[name] += product.reshape(weights[name].shape)
    return weights


def oracle_grads(model, tokens, targets):
    """By the chain rule, from the gradient G of the merged weight: s Bᵀ G and s G Aᵀ."""
    loss, grads, logits = loss_and_grads(model.config, merged(model), tokens, targets)
    added, wanted = model.adapter_state(), {}
    for name, low in model.adapter.low_rank().items():
        grad = grads[name].reshape(len(grads[name]), -1)
        wanted[low.a] = low.scale * added[low.b].T @ grad
        wanted[low.b] = low.scale * grad @ added[low.a].T
    return loss, wanted, logits


# What is trained


def test_ranks_are_clamped_and_scaled_by_what_is_in_use():
    adapter = lora.Lora.of(CONFIG, settings())
    assert adapter.summary(CONFIG) == "2 of 2 layers"
    assert len(adapter.ranks) == 8
    scales = {name: low.scale for name, low in adapter.low_rank().items()}
    assert adapter.ranks["backbone.layers.0.mixer.dt_proj"] == 2
    assert scales["backbone.layers.0.mixer.dt_proj.weight"] == 3.0
    assert adapter.ranks[IN_PROJ] == 3
    assert scales[f"{IN_PROJ}.weight"] == 2.0
    some = lora.Lora.of(CONFIG, settings(lora_targets=("x_proj",), lora_rank=100))
    assert set(some.ranks.values()) == {10}
    small = lora.Lora.of(CONFIG, settings(lora_targets=("A_log", "conv1d", "embeddings")))
    assert small.ranks["backbone.layers.0.mixer.conv1d"] == 3
    assert small.summary(CONFIG) == "2 of 2 layers, embeddings"
    assert lora.Lora.of(CONFIG, settings(lora_targets=("A_log",), lora_rank=9)).ranks == {
        f"backbone.layers.{i}.mixer.A_log": 4 for i in range(2)
    }
    shared = lora.Lora.of(HYBRID, settings(lora_targets=("fc1",)))
    assert shared.summary(HYBRID) == "2 of 4 layers"
    head = lora.Lora.of(UNTIED, settings(lora_targets=("lm_head",)))
    assert head.summary(UNTIED) == "0 of 2 layers, lm_head"


@pytest.mark.parametrize(
    "config, targets, message",
    [
        (CONFIG, ("q_proj", "in_proj"), f"lora_targets is 'q_proj'; allowed .*: {', '.join(ALL)}$"),
        (CONFIG, ("lm_head",), "lora_targets is 'lm_head'; .*; the head is tied to the embeddings"),
        (UNTIED, ("D",), "lora_targets is 'D'; allowed .*, out_proj, lm_head$"),
    ],
)
def test_targets_that_match_nothing_are_refused(config, targets, message):  # C13
    with pytest.raises(ConfigError, match=message):
        lora.Lora.of(config, settings(lora_targets=targets))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lora_targets": ()}, "lora_targets"),
        ({"lora_rank": 0, "lora_targets": ("in_proj",)}, "lora_rank is 0"),
        ({"lora_rank": -1}, "lora_rank is -1"),
        ({"lora_alpha": 0.0}, "lora_alpha is 0.0"),
        ({"train": ("*.D",)}, "train is"),
    ],
)
def test_what_cannot_be_adapted_is_refused(change, message):  # C13
    with pytest.raises(ConfigError, match=message):
        settings(**change)


@pytest.mark.gpu
def test_a_new_adapter_changes_nothing(device):
    model = base(device)
    tokens, _ = pair()
    before = model.logits(tokens)
    model.add_adapter(settings())
    np.testing.assert_array_equal(model.logits(tokens), before)
    assert_same(model.state_dict(), lively(CONFIG))
    drawn = [a for n, a in model.adapter_state().items() if n.endswith("lora_A.weight")]
    assert all(a.any() for a in drawn)
    assert not np.array_equal(drawn[0], drawn[4])  # in_proj of the two layers
    wide = MambaConfig(vocab_size=23, d_model=512, n_layer=1)
    adapter = lora.Lora.of(wide, TrainConfig(lora_rank=16))
    initial = dict(adapter.initialize(wide, seed=0))
    a = initial["backbone.layers.0.mixer.in_proj.lora_A.weight"]
    assert a.std() == pytest.approx(512**-0.5, rel=0.05)
    assert not initial["backbone.layers.0.mixer.in_proj.lora_B.weight"].any()
    with pytest.raises(ConfigError, match="has an adapter"):
        model.add_adapter(settings())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config, targets",
    [
        *((CONFIG, (t,)) for t in ALL),
        (CONFIG, LORA_TARGETS),
        (UNTIED, ("lm_head",)),
        (UNTIED, ("embeddings",)),
        (UNTIED, (*ALL, "lm_head")),
        (ENGINE, ALL),
        (HYBRID, (*ALL, "fc1", "fc2")),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, tuple) else value.init,
)
def test_gradients_are_the_oracle_s(device, config, targets):  # C12, L1
    trainer = trainer_of(device, config=config, lora_targets=targets)
    model, (tokens, targets) = trainer.model, pair(ignored=3)
    assert relative(model.logits(tokens), base(device, config).logits(tokens)) > 3e-5
    model.step_encoder(2, 9, activation_checkpointing=False).encoder.poison()
    loss, grads = model.loss_and_grads(tokens, targets)
    want_loss, want, logits = oracle_grads(model, tokens, targets)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert relative(model.logits(tokens), logits) <= 1e-5
    assert grads.keys() == want.keys()
    worst = {name: relative(grads[name], want[name]) for name in want}
    assert max(worst.values()) <= 1e-4, worst
    again = model.loss_and_grads(tokens, targets, activation_checkpointing=True)
    assert_same(again[1], grads)


@pytest.mark.gpu
def test_tables_in_pieces_have_adapters_in_pieces(device):
    """The same numbers where a binding holds but a part of a table."""
    config = replace(UNTIED, vocab_size=600)
    tokens, targets = np.random.default_rng(3).integers(0, 600, (2, 1, 3))
    found = []
    for adapter in (device, with_target(device, max_binding=8192, max_buffer=8192)):
        model = trainer_of(adapter, config=config, lora_targets=("embeddings", "lm_head")).model
        found.append((model.loss_and_grads(tokens, targets), model.adapter_state()))
    for name in ("backbone.embeddings", "lm_head"):
        pieces = [model.layout.pieces[f"{name}{end}"] for end in (".weight", ".lora_B.weight")]
        assert len(pieces[0]) > 2
        assert [first for first, _ in pieces[0]] == [first for first, _ in pieces[1]]
    ((loss, grads), added), ((again, pieces), same) = found
    assert_same(added, same)
    assert again == pytest.approx(loss, rel=1e-6)
    assert max(relative(pieces[name], grads[name]) for name in grads) <= 1e-6


def test_the_oracle_s_gradients_are_derivatives(rng):
    """s Bᵀ G and s G Aᵀ, against finite differences of the loss with merged weights."""
    adapter = lora.Lora.of(CONFIG, settings(lora_targets=ALL))
    added = {s.name: rng.uniform(-0.3, 0.3, s.shape) for s in adapter.parameters(CONFIG)}
    weights, (tokens, targets) = lively(CONFIG), pair()

    def run(added):
        w = {n: a.astype(np.float64) for n, a in weights.items()}
        for name, low in adapter.low_rank().items():
            product = low.scale * added[low.b] @ added[low.a]
            w[name] += product.reshape(w[name].shape)
        return loss_and_grads(CONFIG, w, tokens, targets)

    _, grads, _ = run(added)
    slope = 0.0
    direction = {name: rng.normal(size=array.shape) for name, array in added.items()}
    for name, low in adapter.low_rank().items():
        grad = grads[name].reshape(len(grads[name]), -1)
        slope += (low.scale * added[low.b].T @ grad * direction[low.a]).sum()
        slope += (low.scale * grad @ added[low.a].T * direction[low.b]).sum()
    ends = [run({n: a + e * direction[n] for n, a in added.items()})[0] for e in (1e-6, -1e-6)]
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


def test_an_adapter_that_acts_nowhere_is_an_error():  # C12
    specs = [
        ParamSpec("w", (4, 4), trainable=False),
        ParamSpec("a", (2, 4)),
        ParamSpec("b", (4, 2)),
    ]
    plan = Plan(Layout(specs, adapters={"w": LowRank("a", "b", 1.0)}))
    with pytest.raises(ShapeError, match="the adapter of w acts on nothing"):
        plan.check_adapters()
    linear(plan, plan.persistent("x", (3, 4)), plan.param("w"))
    plan.check_adapters()


def test_no_gradient_of_a_whole_weight_is_planned():
    adapter = lora.Lora.of(CONFIG, settings())
    layout = Layout(lora.adapted(CONFIG, adapter), PORTABLE, adapter.low_rank())
    plan = plan_step(CONFIG, layout, PORTABLE, 2, 9, update=True).plan
    made = [d for d in plan.dispatches if d.kernel.name.startswith("linear_backward_weight")]
    assert len(made) == 16
    assert all(min(d.dims["d_out"], d.dims["d_in"]) <= RANK for d in made)
    whole = plan_step(CONFIG, Layout(parameters(CONFIG)), PORTABLE, 2, 9, update=True).plan
    assert plan.memory().by_kind()["moments"] < whole.memory().by_kind()["moments"]
    assert {t.root.name for _, t in plan.sections["update"][-1].bound("writes")} == {
        "params.0",
        "m.0",
        "v.0",
    }


@pytest.mark.gpu
def test_only_the_adapter_moves(device):
    trainer = trainer_of(device, spread=0.0, max_grad_norm=0.1)
    added = trainer.model.adapter_state()
    _, wanted, _ = oracle_grads(trainer.model, *pair())
    result = trainer.step(*pair())
    norm = np.sqrt(sum((g**2).sum() for g in wanted.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    losses = [trainer.step(*pair()).loss for _ in range(9)]
    assert losses[-1] < result.loss
    assert_same(trainer.model.state_dict(), lively(CONFIG))
    for name, array in trainer.model.adapter_state().items():
        assert not np.array_equal(array, added[name]), name
    assert moments(trainer).keys() == {f"{k}.{n}" for k in "mv" for n in added}


# Merging


@pytest.mark.gpu
def test_merging_and_unmerging(device):  # C11
    model, (tokens, _) = trainer_of(device, lora_targets=ALL).model, pair()
    logits, added = model.logits(tokens), model.adapter_state()
    model.merge_adapter()
    assert model.adapter is None
    assert model.layout.n_params == model.layout.n_trainable
    assert relative(model.logits(tokens), logits) <= 1e-5
    with pytest.raises(ConfigError, match="no adapter"):
        model.merge_adapter()
    model.unmerge_adapter()
    np.testing.assert_array_equal(model.logits(tokens), logits)
    assert_same(model.state_dict(), lively(CONFIG))
    assert_same(model.adapter_state(), added)
    with pytest.raises(ConfigError, match="no adapter is merged"):
        model.unmerge_adapter()
    model.merge_adapter()
    model.load_state_dict(lively(CONFIG))
    with pytest.raises(ConfigError, match="no adapter is merged"):
        model.unmerge_adapter()


@pytest.mark.gpu
def test_what_is_saved_merged_has_no_adapter_beside_it(device, tmp_path):
    trainer, (tokens, _) = trainer_of(device), pair()
    model, logits = trainer.model, trainer.model.logits(tokens)
    model.save_pretrained(tmp_path / "a")
    model.merge_adapter()
    model.save_pretrained(tmp_path / "a")
    again = wt.Model.from_pretrained(tmp_path / "a", device)
    assert again.adapter is None
    assert relative(again.logits(tokens), logits) <= 1e-5
    model.unmerge_adapter()
    saved = trainer.save(tmp_path)
    with pytest.raises(
        CheckpointError, match="checkpoint-0 is a trainer's checkpoint, with a state"
    ):
        model.save_pretrained(saved)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["f32", "f16"])
def test_a_trainer_goes_on_where_the_adapter_was_out(device, precision):
    batch, results = pair(), {}
    for away in (False, True):
        trainer = trainer_of(device, precision=precision, warmup_steps=2)
        first = [trainer.step(*batch) for _ in range(2)]
        if away:
            trainer.model.merge_adapter()
            assert first[1].loss > 0
            assert first[1].lr > 0  # told by the log that was there
            with pytest.raises(TrainingError, match=r"adapter was added, merged.*unmerge_adapter"):
                trainer.step(*batch)
            trainer.model.unmerge_adapter()
        after = trainer.step(*batch)
        assert after.lr == pytest.approx(1e-2)
        results[away] = trainer.model.adapter_state(), moments(trainer), after.record()
    assert results[True][2] == results[False][2]
    assert_same(results[True][0], results[False][0])
    assert_same(results[True][1], results[False][1])


def test_a_base_stored_in_another_way_keeps_the_moments(device):
    trainer, batch = trainer_of(device), pair()
    trainer.step(*batch)
    before = moments(trainer)
    trainer.model.store_base("int8")
    trainer._settle()
    assert_same(before, moments(trainer))
    assert trainer.step(*batch).lr == pytest.approx(1e-2)


def test_an_earlier_trainer_does_not_go_on_with_the_settings_of_a_later(device, tmp_path):
    earlier, batch = trainer_of(device), pair()
    result = earlier.step(*batch)
    later = wt.Trainer(earlier.model, settings(lr=1e-3))
    assert later.step(*batch).lr == pytest.approx(1e-3)
    assert result.lr == pytest.approx(1e-2)
    for act in (lambda: earlier.step(*batch), lambda: earlier.save(tmp_path)):
        with pytest.raises(TrainingError, match="another one was made for its model"):
            act()


def test_loading_weights_refreshes_the_base_alone(device):
    model = trainer_of(device).model
    added, other = model.adapter_state(), lively(CONFIG, seed=9)
    model.load_state_dict(other)
    assert_same(model.state_dict(), other)
    assert_same(model.adapter_state(), added)


# Files


READ = """
import sys
import numpy as np
import wgsl_train as wt
model = wt.Model.from_pretrained(sys.argv[1], wt.request_device(quiet=True))
if len(sys.argv) > 4:
    model.load_adapter(sys.argv[4])
np.save(sys.argv[3], model.logits(np.load(sys.argv[2])))
"""


@pytest.mark.gpu
def test_another_process_computes_the_same(device, tmp_path):  # C11
    model, (tokens, _) = trainer_of(device).model, pair()
    np.save(tmp_path / "tokens.npy", tokens)
    base(device).save_pretrained(tmp_path / "base")
    model.save_adapter(tmp_path / "adapter")
    files = ("base", "tokens.npy", "logits.npy", "adapter")
    subprocess.run([sys.executable, "-c", READ, *(tmp_path / f for f in files)], check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "logits.npy"), model.logits(tokens))
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, ALPHA)
    assert config["target_modules"] == ["dt_proj", "in_proj", "out_proj", "x_proj"]
    assert config["rank_pattern"] == {f"backbone.layers.{i}.mixer.dt_proj": 2 for i in range(2)}
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert tensors[f"base_model.model.{IN_PROJ}.lora_A.weight"].shape == (RANK, 8)
    assert tensors[f"base_model.model.{IN_PROJ}.lora_B.weight"].shape == (32, RANK)
    assert len(tensors) == 16


def foreign(folder, config=(), tensors=None):
    """An adapter as PEFT writes it, of one module."""
    rng = np.random.default_rng(0)
    name = f"base_model.model.{IN_PROJ}.lora_"
    made = {f"{name}A.weight": (8, 8), f"{name}B.weight": (32, 8)}
    made = {n: rng.normal(size=shape).astype(np.float16) for n, shape in made.items()}
    save_file(made if tensors is None else tensors(made), folder / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "r": 8, "lora_alpha": 4, "target_modules": ["in_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**plain, **dict(config)}))
    return made


@pytest.mark.gpu
def test_an_adapter_of_peft_s(device, tmp_path):  # C11
    made = foreign(tmp_path)
    model, (tokens, targets) = base(device), pair()
    model.load_adapter(tmp_path)
    assert model.adapter.low_rank()[f"{IN_PROJ}.weight"].scale == 0.5
    weights = {n: a.astype(np.float64) for n, a in lively(CONFIG).items()}
    a, b = (made[f"base_model.model.{IN_PROJ}.lora_{x}.weight"].astype(float) for x in "AB")
    weights[f"{IN_PROJ}.weight"] += 0.5 * b @ a
    _, _, logits = loss_and_grads(CONFIG, weights, tokens, targets)
    assert relative(model.logits(tokens), logits) <= 1e-5
    model.save_adapter(tmp_path / "again")
    config = json.loads((tmp_path / "again/adapter_config.json").read_text())
    assert config["target_modules"] == [IN_PROJ]  # not of every layer
    trainer = wt.Trainer(model, TrainConfig(steps=3, lr=1e-2))  # goes on with it
    trainer.step(tokens, targets)
    assert_same(model.state_dict(), lively(CONFIG))
    with pytest.raises(ConfigError, match="another rank"):
        wt.Trainer(model, settings())
    with pytest.raises(ConfigError, match="alone trains"):
        wt.Trainer(model, TrainConfig(train=("*.D",)))


@pytest.mark.parametrize(
    "config, tensors, message",
    [
        ({"peft_type": "IA3"}, None, "peft_type is 'IA3'"),
        ({"use_dora": True}, None, "use_dora is True"),
        ({"bias": "all"}, None, "bias is 'all'"),
        ({"lora_alpha": None}, None, "lora_alpha is None"),
        ({"r": "8"}, None, "r is '8'"),
        ({"r": 16}, None, "r is 16, but .*lora_A"),
        ({}, lambda t: {}, "holds no adapter"),
        ({}, lambda t: dict(list(t.items())[:1]), "missing"),
        ({}, lambda t: {k.replace(".1.", ".7."): a for k, a in t.items()}, r"layers\.7\.*.* 0 to 1"),
        ({}, lambda t: {k.replace("in_proj", "q_proj"): a for k, a in t.items()}, "with embeddings, in_"),
        ({}, lambda t: {k.replace("in_proj", "norm"): a for k, a in t.items()}, "with embeddings, in_"),
        ({}, lambda t: {k: a[:, :4].copy() for k, a in t.items()}, "the configuration makes it"),
    ],
)  # fmt: skip
def test_adapters_that_do_not_fit(tmp_path, config, tensors, message):
    foreign(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        lora.load(tmp_path, CONFIG)


def of_embeddings(tensors):
    """An adapter of the embeddings, with the table itself, as PEFT may write it."""
    rng = np.random.default_rng(0)
    shapes = {"lora_embedding_A": (8, 23), "lora_embedding_B": (8, 8), "base_layer.weight": (23, 8)}
    made = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    made["base_layer.weight"] = lively(CONFIG)["backbone.embeddings.weight"]
    return {f"base_model.model.backbone.embeddings.{name}": a for name, a in made.items()}


@pytest.mark.gpu
def test_an_adapter_of_tied_embeddings_must_be_the_head_s_too(device, tmp_path):
    foreign(tmp_path, tensors=of_embeddings)
    model, (tokens, _) = base(device), pair()
    with pytest.raises(CheckpointError, match="to the embeddings and not to the head"):
        model.load_adapter(tmp_path)
    both = {"target_modules": ["embeddings", "lm_head"], "ensure_weight_tying": True}
    foreign(tmp_path, both, of_embeddings)
    model.load_adapter(tmp_path)
    made = of_embeddings({})
    a, b = (made[f"base_model.model.backbone.embeddings.lora_embedding_{x}"].T for x in "BA")
    weights = lively(CONFIG)
    weights["backbone.embeddings.weight"] = weights["backbone.embeddings.weight"] + 0.5 * b @ a
    _, _, logits = loss_and_grads(CONFIG, weights, tokens, pair()[1])
    assert relative(model.logits(tokens), logits) <= 1e-5
    for other in (np.zeros((23, 8)), np.zeros((24, 8))):
        table = {"base_model.model.backbone.embeddings.base_layer.weight": other}
        foreign(tmp_path, both, lambda t: of_embeddings(t) | table)  # noqa: B023
        with pytest.raises(CheckpointError, match="is not that of this base model"):
            model.load_adapter(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("config, targets", [(CONFIG, ALL), (UNTIED, ("A_log", "lm_head"))])
def test_files_of_every_target(device, tmp_path, config, targets):
    model = trainer_of(device, config=config, lora_targets=targets).model
    model.save_adapter(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["target_parameters"] == ["mixer.A_log"]
    tied = ["lm_head"] if "embeddings" in targets else []
    assert written["target_modules"] == sorted(set(targets) - {"A_log"}) + tied
    assert written.get("ensure_weight_tying", False) == bool(tied)
    shapes = {k: a.shape for k, a in load_file(tmp_path / "adapter_model.safetensors").items()}
    mixer = "base_model.model.backbone.layers.1.mixer"
    assert shapes[f"{mixer}.lora_A.weight"] == (RANK, 4)  # A_log's
    if "embeddings" in targets:
        table = "base_model.model.backbone.embeddings.lora_embedding_"
        assert (shapes[f"{table}A"], shapes[f"{table}B"]) == ((RANK, 23), (8, RANK))
        assert shapes[f"{mixer}.base_layer.in_proj.lora_B.weight"] == (32, RANK)
        assert shapes[f"{mixer}.base_layer.conv1d.lora_A.weight"] == (3, 3)
    other = base(device, config)
    other.load_adapter(tmp_path)
    assert other.adapter == model.adapter
    assert_same(other.adapter_state(), model.adapter_state())


@pytest.mark.gpu
def test_checkpoints_hold_the_adapter_and_resume_to_the_same_bits(device, tmp_path):
    straight, first = trainer_of(device), trainer_of(device)
    for seed in range(4):
        straight.step(*pair(seed=seed))
    for seed in range(2):
        first.step(*pair(seed=seed))
    saved = first.save(tmp_path)
    model = wt.Model.from_pretrained(tmp_path, device)
    assert model.adapter == first.model.adapter
    second = wt.Trainer(model, settings())
    second.load(saved)
    for seed in range(2, 4):
        second.step(*pair(seed=seed))
    assert_same(model.adapter_state(), straight.model.adapter_state())
    assert_same(moments(second), moments(straight))
    assert_same(model.state_dict(), lively(CONFIG))
    plain = wt.Trainer(base(device), TrainConfig(steps=10))
    with pytest.raises(CheckpointError, match="another adapter"):
        plain.load(saved)
    with pytest.raises(CheckpointError, match="no adapter"):
        second.load(plain.save(tmp_path / "plain"))
