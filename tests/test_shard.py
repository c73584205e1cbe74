"""Sharded optimizer state: each process keeps the moments of its own parameters, and moves these."""

import numpy as np
import pytest

import wgsl_train as wt
from tests.test_narrow import CONFIG, NAMES, make
from tests.test_train import assert_same, moments, pair
from wgsl_train.config import TrainConfig
from wgsl_train.device import with_target
from wgsl_train.errors import CheckpointError, ConfigError
from wgsl_train.kernel import PORTABLE
from wgsl_train.model import plan_step
from wgsl_train.models.language_model import parameters
from wgsl_train.plan import BLOCK, Layout


@pytest.mark.parametrize("shard", [(3, 3), (-1, 2), (0, 0), (0.0, 2.0), (0, 1, 2), "0/2"])
def test_no_such_shard(shard):
    with pytest.raises(ConfigError, match=r"shard is .*0 <= index < count"):
        TrainConfig(shard=shard)


def test_every_parameter_has_one_owner_and_moments_are_shared_out():
    layouts = [Layout(parameters(CONFIG), PORTABLE, None, (i, 3)) for i in range(3)]
    assert [layout.owned for layout in layouts] == [NAMES[i::3] for i in range(3)]
    assert sum(layout.n_owned for layout in layouts) == layouts[0].n_params
    for layout in layouts:
        (page,) = layout.pages
        assert page.m.size == len(layout.owned) * BLOCK
        assert sum(run.size for run in page.runs) == page.m.size
        plan = plan_step(CONFIG, layout, PORTABLE, 2, 9, update=True).plan
        assert plan.memory().by_kind()["moments"] == 8 * page.m.size
    (whole,) = Layout(parameters(CONFIG)).pages
    assert len(whole.runs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"train": ("*.x_proj.*", "*.D")}, {"lora_rank": 2}], ids=str
)
def test_the_union_of_all_steps_is_the_unsharded_step(device, options):
    options = {"max_grad_norm": 0.1, "weight_decay": 0.1, **options}
    whole = make(device, **options)
    parts = [make(device, shard=(i, 3), **options) for i in range(3)]
    for seed in range(3):
        result = whole.step(*pair(seed=seed))
        for part in parts:
            one = part.step(*pair(seed=seed))
            assert (one.loss, one.grad_norm) == (result.loss, result.grad_norm)
        for to in parts:
            for other in parts:
                to.model.update(other.owned_state())
    for part in parts:
        assert_same(part.model.state_dict(), whole.model.state_dict())
        assert_same(part.model.adapter_state(), whole.model.adapter_state())
    assert_same({k: a for part in parts for k, a in moments(part).items()}, moments(whole))


@pytest.mark.gpu
def test_parameters_of_others_stand_still_whatever_the_pages(device):
    tiny = with_target(device, max_buffer=20 << 10)
    results = []
    for where in (device, tiny):
        trainer = make(where, shard=(1, 2))
        before = trainer.model.state_dict()
        trainer.step(*pair())
        after = trainer.model.state_dict()
        for i, name in enumerate(NAMES):
            assert (i % 2 == 1) != np.array_equal(before[name], after[name]), name
        results.append(after)
    assert len(trainer.model.layout.pages) > 3
    assert_same(*results)


@pytest.mark.gpu
def test_a_shard_resumes_and_others_moments_are_not_taken_for_its_own(device, tmp_path):
    first, straight = make(device, shard=(0, 2)), make(device, shard=(0, 2))
    straight.step(*pair())
    first.step(*pair())
    saved = first.save(tmp_path)
    second = make(device, shard=(0, 2))
    second.load(saved)
    assert second.step(*pair()).loss == straight.step(*pair()).loss
    assert_same(second.model.state_dict(), straight.model.state_dict())
    assert_same(moments(second), moments(straight))
    other = make(device, shard=(1, 2))
    with pytest.warns(UserWarning, match="made without updating .*start at zero"):
        other.load(saved)
    assert not any(array.any() for array in moments(other).values())


@pytest.mark.gpu
def test_updates_are_checked(device):
    model = wt.Model(CONFIG, device)
    before = model.state_dict()
    for wrong in ({NAMES[0]: np.ones(3)}, {NAMES[1]: before[NAMES[1]] + 1, "other": np.ones(1)}):
        with pytest.raises(CheckpointError, match=r"the state: .*(embeddings|other)"):
            model.update(wrong)
    assert_same(model.state_dict(), before)
