"""Narrow training: chosen parameters train, and nothing else moves, is kept or is computed."""

import numpy as np
import pytest

import wgsl_train as wt
from tests.oracle_model import loss_and_grads
from tests.test_model import lively
from tests.test_train import assert_same, moments, pair
from wgsl_train.config import WRITE_THROUGH, MambaConfig, TrainConfig
from wgsl_train.errors import ConfigError
from wgsl_train.kernel import PORTABLE
from wgsl_train.model import plan_step
from wgsl_train.models.language_model import parameters
from wgsl_train.plan import Layout, ParamSpec

# The sizes of test_train, so that pipelines are shared, but with a layer below another
CONFIG = MambaConfig(vocab_size=23, d_model=8, n_layer=2, d_state=4, d_conv=3, dt_rank=2)
NAMES = [spec.name for spec in parameters(CONFIG)]
X_PROJ = [f"backbone.layers.{i}.mixer.x_proj.weight" for i in range(2)]


def make(device, **train):
    model = wt.Model(CONFIG, device)
    model.load_state_dict(lively(CONFIG))
    return wt.Trainer(model, TrainConfig(**{"steps": 10, "lr": 1e-2, **train}))


def planned(*patterns, **options):
    names = TrainConfig(train=patterns).trained(NAMES)
    specs = [ParamSpec(s.name, s.shape, trainable=s.name in names) for s in parameters(CONFIG)]
    return plan_step(CONFIG, Layout(specs), PORTABLE, 2, 9, update=True, **options).plan


def test_patterns_choose_by_name():
    assert TrainConfig().trained(NAMES) == set(NAMES)
    assert TrainConfig.write_through().trained(NAMES) == set(X_PROJ)
    assert TrainConfig.write_through(lr=1e-3).max_delta == 0.05
    two = TrainConfig(train=("*.1.*.D", "*norm_f*")).trained(NAMES)
    assert two == {"backbone.layers.1.mixer.D", "backbone.norm_f.weight"}
    with pytest.raises(
        ConfigError, match=r"train is 'q_proj'.*backbone\.layers\.\*\.mixer\.x_proj"
    ):
        TrainConfig(train=("*.x_proj.*", "q_proj")).trained(NAMES)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_only_serves_frozen_parameters_is_not_planned(checkpointing):
    plan = planned("*.1.*.x_proj.*", activation_checkpointing=checkpointing)
    backward = plan.sections["backward"]
    assert not any("layers.0" in d.label for d in backward)
    kernels = [d.kernel.name for d in plan.dispatches]
    assert sum(k.startswith("linear_backward_weight") for k in kernels) == 1
    assert not {"embedding_backward", "conv1d_silu_backward"} & set(kernels)
    assert kernels.count("scan_backward") == 1
    # out_proj and dt_proj lead back to x_proj, and the head to them
    assert sum(k.startswith("linear_backward_x") for k in kernels) == 3
    whole = planned(activation_checkpointing=checkpointing)
    assert plan.memory().by_kind()["moments"] < whole.memory().by_kind()["moments"] / 4
    top = planned("*.norm_f.*", activation_checkpointing=checkpointing)
    assert {d.kernel.name for d in top.sections["backward"]} == {
        "rms_norm_backward",
        "sum_partials",
    }


@pytest.mark.gpu
@pytest.mark.parametrize(
    "patterns",
    [("*.x_proj.*",), ("*.1.*",), ("*.bias", "*.A_log"), ("*embeddings*",), ("*.0.*.D",)],
    ids=str,
)
def test_gradients_are_those_of_the_full_backward(device, patterns):  # L1
    """Whatever lay in memory before: no kernel that is left reads what a dropped one wrote."""
    full = make(device).model
    loss, grads = full.loss_and_grads(*pair())
    narrow = make(device, train=patterns).model
    narrow.step_encoder(2, 9, activation_checkpointing=False).encoder.poison()
    again, own = narrow.loss_and_grads(*pair())
    assert again == loss
    assert own.keys() == TrainConfig(train=patterns).trained(NAMES)
    assert_same(own, {name: grads[name] for name in own})


@pytest.mark.gpu
def test_only_the_chosen_move(device):
    trainer = make(device, **WRITE_THROUGH, lr=1.0, weight_decay=0.1)
    weights = lively(CONFIG)
    _, grads, _ = loss_and_grads(CONFIG, weights, *pair())
    result = trainer.step(*pair())
    norm = np.sqrt(sum((grads[name] ** 2).sum() for name in X_PROJ))
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    for _ in range(3):
        trainer.step(*pair())
    after = trainer.model.state_dict()
    for name in NAMES:
        if name not in X_PROJ:
            np.testing.assert_array_equal(after[name], weights[name], name)
    moved = np.abs(after[X_PROJ[0]] - weights[X_PROJ[0]])
    assert 0.01 < moved.max() <= 4 * (0.05 + 0.1 * 1.0)
    assert moments(trainer).keys() == {f"{k}.{n}" for k in "mv" for n in X_PROJ}


@pytest.mark.gpu
def test_a_model_is_widened_again_with_its_weights(device):
    trainer = make(device, train=("*.D",))
    trainer.step(*pair())
    state = trainer.model.state_dict()
    wide = wt.Trainer(trainer.model, TrainConfig(steps=10, lr=1e-2))
    assert_same(wide.model.state_dict(), state)
    fresh = wt.Model(CONFIG, device)
    fresh.load_state_dict(state)
    other = wt.Trainer(fresh, TrainConfig(steps=10, lr=1e-2))
    assert wide.step(*pair()).loss == other.step(*pair()).loss
    assert_same(wide.model.state_dict(), fresh.state_dict())
    with pytest.raises(ConfigError, match="no parameter would train"):
        fresh.set_trainable([])


@pytest.mark.gpu
def test_narrowing_and_widening_between_runs_keep_moments_with_their_names(device, tmp_path):
    full = make(device)
    for _ in range(2):
        full.step(*pair())
    narrow = make(device, train=("*.x_proj.*",))
    narrow.load(full.save(tmp_path / "full"))
    before = moments(full)
    assert_same(moments(narrow), {k: before[k] for k in moments(narrow)})
    narrow.step(*pair())
    saved = narrow.save(tmp_path / "narrow")
    for wide in (make(device), full):  # one of which has moments of its own
        with pytest.warns(UserWarning, match=r"checkpoint-3 .* and 19 more: moments start at zero"):
            wide.load(saved)
        for name, array in moments(wide).items():
            if name[2:] in X_PROJ:
                np.testing.assert_array_equal(array, narrow.model.read_moment(name), name)
            else:
                assert not array.any(), name
        assert_same(wide.model.state_dict(), narrow.model.state_dict())
    assert wide.progress.step == 3
