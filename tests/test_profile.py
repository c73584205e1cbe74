"""Where the time of a step goes: what the profile says, and that it leaves no trace."""

import json

import numpy as np
import pytest

import wgsl_train as wt
from tests.test_train import CONFIG, SHAPE, assert_same, make, moments, pair
from wgsl_train.device import with_target
from wgsl_train.errors import ConfigError
from wgsl_train.model import plan_step
from wgsl_train.profile import SECTIONS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def profile(device):
    return make(device).profile(*SHAPE, steps=2)


def test_every_dispatch_is_accounted_for(device, profile):
    layout = wt.Model(CONFIG, device).layout
    plan = plan_step(CONFIG, layout, device.target, *SHAPE, update=True).plan
    assert [t.dispatch.kernel for t in profile.timings] == [d.kernel for d in plan.dispatches]
    assert sum(row.dispatches for row in profile.rows) == len(plan.dispatches)
    assert sum(row.nbytes for row in profile.rows) == sum(d.nbytes for d in plan.dispatches)
    assert sum(row.flops for row in profile.rows) == sum(d.flops for d in plan.dispatches)
    assert profile.gpu == pytest.approx(sum(row.seconds for row in profile.rows))
    assert profile.idle == pytest.approx(profile.wall - profile.gpu)
    assert 0 < profile.encode < profile.wall
    assert 0 < profile.submit < profile.wall
    seconds = [row.seconds for row in profile.rows]
    assert seconds == sorted(seconds, reverse=True)


def test_the_table_says_what_it_measured(profile):
    head, step, ceilings, columns, *rows = str(profile).splitlines()
    assert "batch 2 x 9 tokens, timed by timestamp queries" in head
    for part in ("tokens/s", "GPU", "idle", "encoding", "submitting"):
        assert part in step
    assert "copy" in ceilings
    assert "arithmetic" in ceilings
    assert columns.split()[:4] == ["kernel", "n", "ms", "share"]
    assert len(rows) == len(profile.rows)
    assert sum(float(row.split()[3].rstrip("%")) for row in rows) == pytest.approx(100, abs=2)


def test_json_and_trace(profile, tmp_path):
    values = json.loads(json.dumps(profile.to_dict()))
    assert (values["batch"], values["seqlen"]) == SHAPE
    assert values["ceilings"]["copy_bytes_per_s"] > 0
    assert values["rows"][0]["kernel"] == profile.rows[0].kernel
    profile.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(profile.timings)
    ends = [e["ts"] + e["dur"] for e in spans]
    assert np.allclose([e["ts"] for e in spans[1:]], ends[:-1])


def test_nothing_is_changed(device):
    """The same losses, to the bit, as of a trainer that was never profiled."""
    plain, profiled = make(device, max_grad_norm=0.5), make(device, max_grad_norm=0.5)
    losses = [plain.step(*pair(seed=i)).loss for i in range(4)]
    seen = []
    for i in range(4):
        if i in (0, 2):  # before the first step, and in the middle of a run
            profiled.profile(*SHAPE, steps=2)
        seen.append(profiled.step(*pair(seed=i)))
        if i == 1:
            profiled.profile(1, 5, steps=1)  # with losses that nobody has read yet
    assert [result.loss for result in seen] == losses
    assert [result.step for result in seen] == [1, 2, 3, 4]
    assert vars(profiled.progress) == vars(plain.progress)
    assert_same(profiled.model.state_dict(), plain.model.state_dict())
    assert_same(moments(profiled), moments(plain))
    for tensor in ("state", "log"):
        read = [t.model.buffers.read(getattr(t._optimizer, tensor)) for t in (profiled, plain)]
        np.testing.assert_array_equal(*read)


def test_a_carried_state_is_timed_and_put_back(device):
    plain, profiled = (make(device, carry_state=True, batch_size=SHAPE[0]) for _ in range(2))
    for i in range(2):
        assert profiled.step(*pair(seed=i)).loss == plain.step(*pair(seed=i)).loss
        found = profiled.profile(*SHAPE, steps=1)
    (encoder,) = profiled.model.encoders  # no other step was compiled
    assert [t.dispatch for t in found.timings] == list(encoder.plan.dispatches)


def test_it_puts_things_back_where_it_fails(device, monkeypatch):
    trainer = make(device)
    trainer.step(*pair())
    before = trainer.model.state_dict()

    def fail(*args, **kwargs):
        trainer.step(*pair())
        raise RuntimeError("in the middle")

    monkeypatch.setattr("wgsl_train.train.profile_step", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.profile(*SHAPE)
    assert_same(trainer.model.state_dict(), before)


def test_sections_are_timed_without_timestamp_queries(device, tmp_path):
    masked = with_target(device, features=device.target.features - {"timestamp-query"})
    found = make(masked).profile(*SHAPE, steps=1)
    assert "the host's clock (no timestamp queries)" in str(found).splitlines()[0]
    assert sorted(row.kernel for row in found.rows) == sorted(SECTIONS)
    assert found.ceilings is None
    assert "of copy" not in str(found)
    assert found.to_dict()["ceilings"] is None
    found.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == [r.kernel for r in found.rows]


def test_steps_are_checked(device):
    with pytest.raises(ConfigError, match="steps is 0, must be 1 or more"):
        make(device).profile(*SHAPE, steps=0)
