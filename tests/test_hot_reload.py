"""Shader templates edited while a model trains: swapped in, or refused with the reason."""

import itertools
import os
import re
import shutil
import time
from types import SimpleNamespace

import pytest

from tests.test_train import assert_same, dataset, make, moments, pair, settings
from wgsl_train import cli, kernel, reload
from wgsl_train.kernel import Templates

pytestmark = pytest.mark.gpu

KERNEL = "rms_norm_forward"
LINE = "        squares += a * a;"  # of its template
TYPO = LINE.replace("a;", "aa;")
STEPS = 1_000_000  # more than any test waits for


@pytest.fixture
def shaders(tmp_path, monkeypatch):
    """A copy of the templates to edit, by which kernels render. Edits are seen at once."""
    folder = tmp_path / "shaders"
    shutil.copytree(kernel.SHADER_DIR, folder)
    monkeypatch.setattr(kernel, "TEMPLATES", Templates(folder))
    monkeypatch.setattr(kernel, "_edited", {})
    monkeypatch.setattr(reload, "INTERVAL", 0.0)
    monkeypatch.setattr(reload, "REST", 0.0)
    return folder


@pytest.fixture
def edit(shaders):
    """Replaces text of a template."""

    def replace(old, new, name=KERNEL):
        path = shaders / f"{name}.wgsl"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return replace


class Session:
    """A run beside which a user edits: a generator that yields what it waits for."""

    def __init__(self, device, user, eval_every=0, **options):
        self.said, self.losses = [], []
        self.trainer = make(device, steps=STEPS, **settings(eval_every=eval_every))
        self._user = user(self)
        self._wait = lambda: True
        self._deadline = time.monotonic() + 30
        self.trainer.fit(
            dataset(),
            on_step=lambda result: self.losses.append(result.loss),
            should_stop=self._advance,
            hot_reload=self.said.append,
            **options,
        )

    def _advance(self):
        assert time.monotonic() < self._deadline, self.said
        if self._wait():
            try:
                self._wait = next(self._user)
            except StopIteration:
                return True
        return False

    def steps(self, count):
        """Waits until so many more are done."""
        end = len(self.losses) + count
        return lambda: len(self.losses) >= end

    def told(self, count):
        return lambda: len(self.said) >= count

    def pause(self, seconds):
        end = time.monotonic() + seconds
        return lambda: time.monotonic() > end

    def sources(self, name=KERNEL):
        """Which a kernel's dispatches run by, and would be rendered as."""
        pipelines = self.trainer.model.device.pipelines
        by_pipeline = {id(pipeline): source for source, pipeline in pipelines.items()}
        for encoder in self.trainer.model.encoders:
            for section, dispatches in encoder.plan.sections.items():
                for d, item in zip(dispatches, encoder.program[section], strict=True):
                    if d.kernel.name == name:
                        yield by_pipeline[id(item[0])], d.render().source


def assert_undisturbed(device, session):
    """Losses, weights and moments are those of a run that nobody disturbs, to the bit."""
    plain = make(device, steps=STEPS, **settings())
    losses = []
    plain.fit(
        dataset(),
        on_step=lambda result: losses.append(result.loss),
        should_stop=lambda: len(losses) == len(session.losses),
    )
    assert session.losses == losses
    assert_same(moments(session.trainer), moments(plain))
    assert_same(session.trainer.model.state_dict(), plain.model.state_dict())
    assert session.trainer.progress.step == plain.progress.step


def test_u1_a_typo_is_told_once_and_the_next_valid_version_is_used(
    device, shaders, edit, monkeypatch
):
    monkeypatch.setattr(reload, "INTERVAL", 0.2)  # as it is
    monkeypatch.setattr(reload, "REST", 0.1)

    def user(session):
        yield session.steps(3)
        edit(LINE, TYPO)
        yield session.told(1)
        for _ in range(3):
            os.utime(shaders / f"{KERNEL}.wgsl")
            yield session.pause(0.4)
        edit(TYPO, LINE + "  // again")
        begin = time.monotonic()
        yield session.told(2)
        assert time.monotonic() - begin < 2
        yield session.steps(3)

    session = Session(device, user)
    refused, reloaded = session.said
    assert f"{KERNEL} is not reloaded" in refused
    line = 1 + (shaders / f"{KERNEL}.wgsl").read_text().splitlines().index(f"{LINE}  // again")
    assert f"shaders/{KERNEL}.wgsl:{line}:{1 + TYPO.index('aa;')}: " in refused
    assert reloaded.startswith(f"{KERNEL} is reloaded, and used from step ")
    sources = list(session.sources())
    assert len(sources) >= 2
    assert all(runs == rendered and "// again" in runs for runs, rendered in sources)
    assert_undisturbed(device, session)


def test_u2_ten_touches_in_a_tenth_of_a_second_are_one_rebuild(device, shaders, monkeypatch):
    """By a clock of its own, for a machine with other work. A step takes 5 ms."""
    monkeypatch.setattr(reload, "INTERVAL", 0.2)
    monkeypatch.setattr(reload, "REST", 0.1)
    now = [int(1e18)]
    clock = SimpleNamespace(monotonic=lambda: now[0] * 1e-9, time_ns=lambda: now[0])
    monkeypatch.setattr(reload, "time", clock)
    trainer, said = make(device), []
    trainer.step(*pair())
    watching = reload.HotReload(trainer.model, said.append)
    for step in range(200):
        if step in range(50, 70, 2):
            os.utime(shaders / f"{KERNEL}.wgsl", ns=(now[0], now[0]))
        watching.before_step([])
        now[0] += int(5e6)
    assert said == [f"{KERNEL} renders as before"]
    assert watching.rebuilds == 1


def test_u2_changed_bindings_are_refused(device, edit):
    def user(session):
        yield session.steps(1)
        edit(
            "fn combine", "@group(0) @binding(4) var<storage, read> fifth: array<f32>;\nfn combine"
        )
        yield session.told(1)
        yield session.steps(1)

    session = Session(device, user)
    assert "declares a binding" in session.said[0]
    assert f"shaders/{KERNEL}.wgsl:7:1: " in session.said[0]
    assert all("fifth" not in runs for runs, _ in session.sources())


def test_u2_a_changed_declaration_is_told(device, shaders, tmp_path, monkeypatch):
    monkeypatch.setattr(reload, "OPS", tmp_path)
    (tmp_path / "rms_norm.py").write_text("old")

    def user(session):
        yield session.steps(1)
        (tmp_path / "rms_norm.py").write_text("newer")
        yield session.told(1)
        yield session.steps(2)

    (told,) = Session(device, user).said
    assert told.startswith("wgsl_train/ops/rms_norm.py is not reloaded")
    assert "--resume" in told


@pytest.mark.parametrize(
    "name, old, new, binding",
    [
        (KERNEL, "inv[row] = scale;", "if (row != 1u) { inv[row] = scale; }", "inv"),  # unwritten
        (KERNEL, "@workgroup_size({{ workgroup }})", "@workgroup_size(1)", "out"),  # of the grid
        # only the run's own inputs show these: random ones are positive, and not skipped
        (KERNEL, "a * a;", "a * a * select(pack(1.0), pack(1.01), a < pack(0.0));", "out"),
        ("adamw", "old_p - (", "old_p + (", "params"),  # behind the backward pass, in place
    ],
)
def test_other_results_are_refused(device, edit, name, old, new, binding):
    def user(session):
        yield session.steps(2)
        edit(old, new, name)
        yield session.told(1)
        yield session.steps(2)

    session = Session(device, user)
    (told,) = session.said
    assert re.match(
        rf"{name} is not reloaded, .*: {binding}\[[\d, ]+\] is .*, not .* allowed", told
    )
    assert all(runs == rendered for runs, rendered in session.sources(name))
    assert not any(new in runs for runs, _ in session.sources(name))
    assert_undisturbed(device, session)


def test_a_rounding_apart_is_reloaded(device, edit):
    def user(session):
        yield session.steps(2)
        edit("weight[c] * x[first + c] * scale", "x[first + c] * (scale * weight[c])")
        yield session.told(1)
        yield session.steps(2)

    session = Session(device, user)
    assert re.fullmatch(
        rf"{KERNEL} is reloaded, and used from step \d+ on: .* deviate by \de-\d+ at most|.*e-0[78] at most",
        session.said[0],
    )
    assert all("(scale * weight[c])" in runs for runs, _ in session.sources())


def test_an_error_in_an_include_is_told_once_whoever_includes_it(device, edit):
    def user(session):
        yield session.steps(2)
        edit("groups.x", "group.x", "include/group_index")
        yield session.told(1)
        yield session.steps(2)
        edit("group.x", "groups.x", "include/group_index")
        yield session.steps(2)

    (told,) = Session(device, user).said
    assert "shaders/include/group_index.wgsl:3:20: " in told


def test_evaluations_are_swapped_too_and_proven_on_random_inputs(device, edit):
    """row_rank has no part in training."""

    def user(session):
        yield session.steps(4)
        edit("select(-1.0, rank,", "select(-1.0, rank + 1.0,", "row_rank")
        yield session.told(1)

    session = Session(device, user, eval_every=2, eval_dataset=dataset(40))
    assert re.match(r"row_rank is not reloaded, .*: row_rank\[\d+\] is \d+, not", session.said[0])


def test_a_kernel_without_a_part_is_told(device, edit):
    def user(session):
        yield session.steps(2)
        edit("//", "// new:", "mean_pool")
        yield session.told(1)

    assert Session(device, user).said == [
        "mean_pool is not reloaded: it has had no part in this run yet"
    ]


def test_u1_on_the_command_line(device, shaders, edit, tmp_path, monkeypatch, capsys):
    steps, before_step = itertools.count(1), reload.HotReload.before_step
    edits = {3: (LINE, TYPO), 10: (TYPO, LINE + "  // again")}

    def edit_then(self, encoders):
        step = next(steps)
        if step in edits:
            edit(*edits[step])
        before_step(self, encoders)

    monkeypatch.setattr(reload.HotReload, "before_step", edit_then)
    monkeypatch.setattr(cli, "request_device", lambda *a, **k: device)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 20)
    sizes = ["--d-model=8", "--n-layer=1", "--d-state=4", "--batch-size=2", "--seq-len=16"]
    paths = [f"--data={tmp_path / 'text.txt'}", f"--out={tmp_path / 'run'}"]
    argv = ["wgsl-train", "train", *paths, *sizes, "--steps=15", "--hot-reload"]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    told = capsys.readouterr().err
    assert told.count(f"{KERNEL} does not compile: no definition") == 1
    assert told.count(f"{KERNEL} is reloaded, and used from step 11 on") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 15
