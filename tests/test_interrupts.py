"""Runs that are stopped: by a signal they save, and whatever happens a whole checkpoint stays."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import wgsl_train as wt
from wgsl_train import checkpoint, interrupts
from wgsl_train.train import saved_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals"),
]

TEXT = b"the quick brown fox jumps over the lazy dog. " * 40
SIZES = ("--d-model=8", "--n-layer=1", "--d-state=4", "--batch-size=2", "--seq-len=16")


@pytest.fixture
def start(tmp_path):
    """Starts `wgsl-train train` in a process of its own, which the test ends at the latest."""
    (tmp_path / "text.txt").write_bytes(TEXT)
    started = []

    def call(*args):
        command = [sys.executable, "-m", "wgsl_train", "train", "--data=text.txt", "--out=run"]
        process = subprocess.Popen(
            [*command, *args],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
        if not process.stdout.closed:
            process.communicate()


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def finish(process, code):
    said = process.communicate(timeout=120)[0]
    assert process.returncode == code, said
    assert "Traceback" not in said
    return said


def newest(run):
    """The number of the newest checkpoint; 0 where there is none."""
    return max((int(p.name.split("-")[1]) for p in checkpoint.checkpoints(run)), default=0)


def n_logged(run):
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def trainer_of(run, device):
    """A trainer that has loaded the run's newest whole checkpoint."""
    trainer = wt.Trainer(wt.Model.from_pretrained(run, device), wt.TrainConfig(**saved_config(run)))
    trainer.load(run)
    return trainer


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_goes_on(start, device, tmp_path, number, code):
    run = tmp_path / "run"
    process = start(*SIZES, "--steps=1000000", "--log-every=1", "--eval-fraction=0.1")
    wait_for(lambda: n_logged(run) >= 5, process)
    other = start(*SIZES, "--resume")  # a second process on the folder is refused
    said = finish(other, 1)
    assert "no whole checkpoint" in said or f"in use by process {process.pid}" in said
    process.send_signal(number)
    said = finish(process, code)
    assert "stopping after this step; the checkpoint is saved first" in said
    [saved] = checkpoint.checkpoints(run)
    assert f"saved      run/{saved.name}" in said
    trainer = trainer_of(run, device)
    steps = trainer.progress.step
    assert saved.name == f"checkpoint-{steps}"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, steps + 1))
    assert "eval_loss" not in records[-1]  # a person who stops a run does not wait for that
    finish(start("--resume", f"--steps={steps + 3}"), 0)
    assert checkpoint.latest(run).name == f"checkpoint-{steps + 3}"
    assert n_logged(run) == steps + 3 + 1  # the last is the evaluation at the end


def test_a_running_run_s_folder_is_its_own(start, tmp_path):
    run = tmp_path / "run"
    process = start(*SIZES, "--steps=1000000", "--save-every=3", "--keep-checkpoints=2")
    wait_for(lambda: checkpoint.checkpoints(run), process)
    for args in (("--resume",), (*SIZES, "--steps=1")):
        said = finish(start(*args), 1)
        assert f"in use by process {process.pid}" in said or "holds a run already" in said
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    finish(process, 130)
    assert len(checkpoint.checkpoints(run)) == 2


def test_a_signal_before_training_ends_at_once(start, tmp_path):
    process = start(*SIZES, "--steps=1000000")
    said = process.stdout.readline()  # of the adapter, by which Python's own handler is replaced
    process.send_signal(signal.SIGINT)
    said += process.communicate(timeout=60)[0]
    assert process.returncode == 130, said


def test_a_signal_in_a_destructor_is_not_lost():
    """Python drops what a destructor, a weak reference's callback or a driver's callback raises."""
    code = """if True:
        import os, signal, time
        from wgsl_train import cli

        class Driver:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)

        @cli.app.command()
        def wait():
            Driver()
            time.sleep(30)

        cli.main()"""
    ended = subprocess.run([sys.executable, "-c", code, "wait"], capture_output=True, timeout=60)
    assert ended.returncode == 143, ended
    assert not ended.stderr


@pytest.mark.timeout(1800)
def test_ended_at_any_moment_fifty_times(start, device, tmp_path):
    """The newest checkpoint loads and the run goes on, as if it had never ended there."""
    run, rng = tmp_path / "run", np.random.default_rng(os.getpid())
    steps, options = 0, ("--steps=1000000", "--save-every=1", "--keep-checkpoints=2", "--lr=0.01")
    for i in range(50):
        process = start(*SIZES, *options, *(["--resume"] if i else []))
        wait_for(lambda before=steps: newest(run) > before, process)
        time.sleep(rng.uniform(0, 0.2))
        process.send_signal(rng.choice([signal.SIGKILL, signal.SIGINT, signal.SIGTERM]))
        assert "Traceback" not in process.communicate(timeout=120)[0]
        trainer = trainer_of(run, device)
        assert trainer.progress.step > steps
        steps = trainer.progress.step
        assert n_logged(run) >= steps
    finish(start("--resume", f"--stop-after={steps + 1}"), 0)
    assert not list(run.glob(".*tmp*"))
    assert not list(run.glob(".*old*"))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, steps + 2))
    (tmp_path / "straight").mkdir()
    data = wt.Dataset.from_paths([tmp_path / "text.txt"])
    config = wt.TrainConfig(**{**saved_config(run), "steps": None, "epochs": 1000, "save_every": 0})
    model = wt.Model(wt.Model.from_pretrained(run, device).config, device)
    straight = wt.Trainer(model, config)
    straight.fit(data, should_stop=lambda: straight.progress.step == steps + 1)
    resumed = wt.Model.from_pretrained(run, device).state_dict()
    for name, array in straight.model.state_dict().items():
        np.testing.assert_array_equal(resumed[name], array, name)


IN_A_TERMINAL = """if True:
    import fcntl, os, signal, sys, termios

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which tests run by nohup ignore
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.execv(sys.executable, [sys.executable, "-m", "wgsl_train", *sys.argv[1:]])"""


def test_a_terminal_that_is_closed(tmp_path):
    """What is said to it is an error from then on, which must not end the run before it saves."""
    import pty  # which Windows has not

    run = tmp_path / "run"
    (tmp_path / "text.txt").write_bytes(TEXT)
    terminal, its = pty.openpty()
    args = ["train", "--data=text.txt", "--out=run", "--steps=1000000", *SIZES]
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, *args],
        cwd=tmp_path,
        stdin=its,
        stdout=its,
        stderr=its,
    )
    os.close(its)
    seen = b""
    while n_logged(run) < 5 or b"left" not in seen:
        seen += os.read(terminal, 4096)  # raises where the process has ended
    assert b" tokens/s " in seen  # which 80 columns hold
    process.send_signal(signal.SIGHUP)  # as a shell tells its jobs
    os.close(terminal)  # upon which the system tells all of that terminal
    assert process.wait(60) == 129
    [saved] = checkpoint.checkpoints(run)
    assert saved.name == f"checkpoint-{n_logged(run)}"


def test_a_log_s_reader_ends_by_the_same_key(start, tmp_path):
    """In `train | tee log` Ctrl-C ends both, and the run saves all the same."""
    run = tmp_path / "run"
    process = start(*SIZES, "--steps=1000000", "--log-every=1000000")  # nothing more to say
    wait_for(lambda: n_logged(run) >= 5, process)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    [saved] = checkpoint.checkpoints(run)
    assert saved.name == f"checkpoint-{n_logged(run)}"


@pytest.mark.parametrize(
    ("caught", "error", "passes"),
    [
        ([], BrokenPipeError(), True),
        ([2], BrokenPipeError(), False),
        ([2], SystemExit(1), False),  # rich's, of a broken pipe
        ([2], interrupts.Signalled(2), True),  # the second Ctrl-C, while something is said
    ],
)
def test_what_ends_a_run_that_is_stopping(caught, error, passes):
    with pytest.raises(type(error)) if passes else nullcontext(), interrupts.unread(caught):
        raise error


def test_what_a_person_sees_who_cannot_wait(start, tmp_path):
    """The second signal ends the process without saving."""
    run = tmp_path / "run"
    process = start(*SIZES, "--steps=1000000", "--log-every=1")
    wait_for(lambda: n_logged(run) >= 2, process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode in (130, 143)
    assert "Traceback" not in said
    assert Path(run / "metrics.jsonl").exists()
