"""Tuning choices: measured, stored, loaded, and kept by a run that goes on."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import wgsl_train as wt
from tests import harness
from tests.test_structure import render, workgroup_bytes
from tests.test_train import CONFIG, SHAPE, assert_same, dataset, make, moments, settings
from wgsl_train import trial, tuned
from wgsl_train import tune as tune_module
from wgsl_train.device import request_device, with_target
from wgsl_train.errors import CheckpointError, DeviceError
from wgsl_train.kernel import KERNELS, Target
from wgsl_train.model import plan_step
from wgsl_train.trial import TOLERANCE, deviation
from wgsl_train.tune import tune

RMS = "rms_norm_forward rows=18 d_model=8 eps=1e-05"  # of CONFIG and SHAPE


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache folder of one's own, which is used."""
    monkeypatch.setenv("WGSL_TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WGSL_TRAIN_NO_TUNING")
    return tmp_path / "cache" / "tuning.json"


# What kernels declare


@pytest.mark.parametrize("name", KERNELS)
def test_alternatives_fit_the_portable_limits(name):
    """They render at every kind of adapter, and take no more than WebGPU promises."""
    for variant in harness.alternatives(name, Target()):
        assert variant.case.choices.get("workgroup", 1) <= 256
        assert workgroup_bytes(render(variant)) <= 16384, variant


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["portable", "cpu"])
def test_alternatives_give_the_same_results(device, kind, monkeypatch):
    """Those of the dearest kernels, which no table chooses, so that no other test meets them."""
    right, same = [], tune_module._same  # which says no here: all the others are checked, too
    monkeypatch.setattr(tune_module, "_same", lambda *results: right.append(same(*results)))
    monkeypatch.setattr(
        tune_module._Candidate, "seconds", lambda self, repeats: 1e-4 if self.choices else 1e-3
    )
    found = list(tune(with_target(device, kind=kind), CONFIG, 1, 7, only="rms_norm"))
    assert {row.key.split()[0] for row in found} == {"rms_norm_forward", "rms_norm_backward"}
    assert len(right) == sum(row.refused for row in found) > 2  # none failed to compile
    assert all(right)
    assert all(row.measured == 1 and row.choices is None for row in found)


def test_keys_tell_dims_and_plain_options_apart():
    kernel = KERNELS["linear_forward"]
    dims = {"rows": 2, "d_out": 4}
    key = kernel.key(dims, {"activation": "softplus"})
    assert key.startswith("linear_forward rows=2 d_out=4 ")
    assert "activation=softplus" in key
    assert key != kernel.key(dims, {})
    assert "segments" not in KERNELS["sum_partials"].key({"n": 3}, {"segments": ((0, 1, 2, 3),)})


# Measuring


def fake(monkeypatch, seconds, alternatives):
    """Let rms_norm_forward have these alternatives, and take seconds(choices)."""
    kernel = KERNELS["rms_norm_forward"]
    monkeypatch.setitem(vars(kernel), "alternatives", lambda target, values: alternatives)
    monkeypatch.setattr(
        tune_module._Candidate, "seconds", lambda self, repeats: seconds(self.choices)
    )


@pytest.mark.gpu
def test_the_fastest_choice_that_is_right_wins(device, monkeypatch):
    right, slow = {"workgroup": 16, "lanes": 1}, {"workgroup": 32, "lanes": 1}
    refused = [
        {"workgroup": 1 << 20, "lanes": 1},  # more than the adapter allows
        {"workgroup": 62, "lanes": 31},  # sums over lanes of two rows
    ]
    times = {16: 1e-4, 32: 3e-4, 62: 5e-5}
    fake(monkeypatch, lambda c: times.get(c.get("workgroup"), 2e-4), [right, slow, *refused])
    (row,) = tune(device, CONFIG, *SHAPE, only="rms_norm_forward")
    assert (row.key, row.choices, row.dispatches) == (RMS, right, 2)
    assert (row.measured, row.refused) == (3, 2)
    assert row.gain == pytest.approx(0.5)


@pytest.mark.gpu
def test_only_what_would_win_is_checked(device, monkeypatch):
    """From the fastest on, up to the first that is right; no result is read for the others."""
    wrong, right = {"workgroup": 62, "lanes": 31}, {"workgroup": 16, "lanes": 1}
    others = [{"workgroup": size, "lanes": 1} for size in (32, 48, 128)]
    times = {62: 1e-5, 16: 1e-4, 32: 1.5e-4, 48: 1.96e-4, 128: 9e-4}
    read, results = [], tune_module._Candidate.results
    monkeypatch.setattr(
        tune_module._Candidate, "results", lambda self: read.append(self.choices) or results(self)
    )
    known = set(device.pipelines)
    fake(monkeypatch, lambda c: times.get(c.get("workgroup"), 2e-4), [*others, right, wrong])
    (row,) = tune(device, CONFIG, *SHAPE, only="rms_norm_forward")
    assert read == [{}, wrong, right]
    assert (row.choices, row.measured, row.refused) == (right, 5, 1)
    assert set(device.pipelines) == known  # what was compiled to measure is not kept
    read.clear()
    fake(monkeypatch, lambda c: 2e-4, [*others, right, wrong])
    (row,) = tune(device, CONFIG, *SHAPE, only="rms_norm_forward")
    assert (read, row.choices, row.measured, row.refused) == ([], None, 6, 0)


@pytest.mark.gpu
def test_noise_is_no_gain(device, monkeypatch):
    fake(monkeypatch, lambda c: 0.98e-4 if c else 1e-4, [{"workgroup": 16}])
    (row,) = tune(device, CONFIG, *SHAPE, only="rms_norm_forward")
    assert row.choices is None
    assert row.gain == 0


def test_wrong_results_are_seen(monkeypatch):
    a = np.linspace(-1, 1, 12, dtype=np.float32)
    a[3] = np.nan  # as far as it was left untouched by both
    assert deviation(a, a).error == 0
    assert deviation(a, a * (1 + 5e-5)).error <= TOLERANCE
    for wrong in (np.nan, np.inf, 0.0, 1e30):
        b = a.copy()
        b[-1] = wrong
        found = deviation(a, b)
        assert found.error > TOLERANCE
        assert (found.index, found.wanted) == ((11,), 1.0)
    monkeypatch.setattr(trial, "_BLOCK", 5)  # in several blocks, of which the last is shorter
    b = a.copy()
    b[[4, 7, 11]] += np.float32([1e-3, 1e-2, 1e-3])
    assert (found := deviation(a.reshape(3, 4), b.reshape(3, 4))).index == (1, 3)
    whole = np.sqrt(np.square(a[np.isfinite(a)]).sum() / a.size)
    assert found.error == pytest.approx(1e-2 / (abs(a[7]) + whole), rel=1e-4)
    assert deviation(np.array([70000, 1], np.uint32), np.array([70001, 1], np.uint32)).error > 1


@pytest.mark.gpu
def test_without_timestamp_queries_nothing_is_tuned(device):
    masked = with_target(device, features=frozenset())
    with pytest.raises(DeviceError, match="no timestamp queries"):
        next(tune(masked, CONFIG, *SHAPE))


@pytest.mark.gpu
def test_tuned_choices_are_used(device):
    used = with_target(device, tuned={RMS: {"workgroup": 32, "lanes": 1}})
    layout = wt.Model(CONFIG, used).layout
    plan = plan_step(CONFIG, layout, used.target, *SHAPE).plan
    assert {d.values["workgroup"] for d in plan.dispatches if d.key == RMS} == {32}


# The cache


def test_the_cache_folder_is_the_system_s(monkeypatch):
    for name in ("WGSL_TRAIN_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    home = Path.home()
    for system, default in (
        ("linux", home / ".cache"),
        ("darwin", home / "Library" / "Caches"),
        ("win32", home / "AppData" / "Local"),
    ):
        monkeypatch.setattr(sys, "platform", system)
        assert tuned.cache_folder() == default / "wgsl_train"
    monkeypatch.setenv("LOCALAPPDATA", "local")
    assert tuned.cache_folder() == Path("local/wgsl_train")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")
    assert tuned.cache_folder() == Path("xdg/wgsl_train")
    monkeypatch.setenv("WGSL_TRAIN_CACHE", "own")
    assert tuned.cache_folder() == Path("own")


def test_tables_are_kept_by_adapter(cache, monkeypatch):
    assert tuned.load("A") == {}
    assert tuned.store("A", {"k": {"workgroup": 64}, "gone": {"workgroup": 1}}) == cache
    tuned.store("B", {"k": {"packed": "ab"}})
    tuned.store("A", {"gone": None, "new": {"workgroup": 8}, "never": None})
    assert tuned.load("A") == {"k": {"workgroup": 64}, "new": {"workgroup": 8}}
    assert tuned.load("B") == {"k": {"packed": "ab"}}
    assert tuned.load("C") == {}
    assert [p.name for p in cache.parent.iterdir()] == ["tuning.json"]
    monkeypatch.setenv("WGSL_TRAIN_NO_TUNING", "1")
    assert tuned.load("A") == {}


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"A": 3}', '{"A": {"k": 1}}', '{"A": {"k": {"w": [2]}}}', "\xff\0"]
)
def test_a_damaged_cache_is_named_and_not_used(cache, text):
    cache.parent.mkdir()
    cache.write_bytes(text.encode("latin-1"))
    with pytest.warns(UserWarning, match=r"tuning\.json: not used, .*default choices"):
        assert tuned.load("A") == {}
    tuned.store("A", {"k": {"workgroup": 64}})
    assert tuned.load("A") == {"k": {"workgroup": 64}}


@pytest.mark.gpu
def test_a_device_opens_with_its_table(cache, device, monkeypatch):
    table = {RMS: {"workgroup": 32, "lanes": 1}}
    tuned.store(device.identity, table)
    opened = request_device(quiet=True)
    assert opened.identity == device.identity
    assert opened.target.tuned == table
    opened.wgpu.destroy()


# Runs


def run(device, out, until=20, resume=False):
    trainer = make(device, **settings(steps=20))
    if resume:
        trainer.load(out)
    trainer.fit(dataset(), out=out, should_stop=lambda: trainer.progress.step == until)
    return trainer


def record(out):
    return json.loads((out / "tuning.json").read_text())


@pytest.mark.gpu
def test_a_run_goes_on_by_the_choices_it_recorded(device, tmp_path):
    """Another table, stored between stop and resume, changes no bit."""
    table = {"rms_norm_backward rows=18 d_model=8 parts=1 stride=64 rows_per_group=64": {}}
    slow = {RMS: {"workgroup": 64, "lanes": 4}}  # sums in another order
    for name, first, second in (("default", {}, slow), ("tuned", slow, table)):
        whole = run(with_target(device, tuned=first), tmp_path / f"{name}-whole")
        run(with_target(device, tuned=first), tmp_path / name, until=11)
        assert record(tmp_path / name)["choices"] == (first or "default")
        assert record(tmp_path / name)["adapter"] == device.identity
        resumed = run(with_target(device, tuned=second), tmp_path / name, resume=True)
        assert resumed.model.device.target.tuned == first
        assert record(tmp_path / name) == record(tmp_path / f"{name}-whole")
        assert_same(resumed.model.state_dict(), whole.model.state_dict())
        assert_same(moments(resumed), moments(whole))


@pytest.mark.gpu
def test_a_record_of_another_adapter_is_not_used(device, tmp_path):
    run(device, tmp_path, until=2)
    other = {"adapter": "another", "choices": {RMS: {"workgroup": 32}}}
    (tmp_path / "tuning.json").write_text(json.dumps(other))
    trainer = make(device, **settings(steps=20))
    with pytest.warns(UserWarning, match=r"tuning\.json: recorded for another, not for .*round"):
        trainer.load(tmp_path)
    assert trainer.model.device.target.tuned == {}
    (tmp_path / "tuning.json").write_text(json.dumps({**other, "choices": "default"}))
    trainer.load(tmp_path)  # nothing differs: no warning
    (tmp_path / "tuning.json").write_text('{"choices": [1]}')
    with pytest.raises(CheckpointError, match=r"tuning\.json: not a table of choices; without"):
        trainer.load(tmp_path)
    (tmp_path / "tuning.json").unlink()
    trainer.load(tmp_path)
