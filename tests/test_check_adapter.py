"""The report on adapters: what is in it, and that a failure shows."""

import sys

import pytest

from tools import check_adapter

pytestmark = pytest.mark.slow


@pytest.fixture
def report(monkeypatch, tmp_path):
    """Writes a report: exit status and text."""
    monkeypatch.setattr(check_adapter, "STEP", ("--d-model=8", "--n-layer=1", "--steps=1"))

    def write(*options):
        path = tmp_path / "report.md"
        monkeypatch.setattr(sys, "argv", ["check_adapter", f"--out={path}", *options])
        return check_adapter.main(), path.read_text("utf-8") if path.exists() else ""

    return write


def commands(monkeypatch, **programs):
    """Let the parts that have these words in their commands run other modules instead."""
    run = check_adapter.run

    def replaced(index, *command):
        program = next((p for word, p in programs.items() if word in command), None)
        return run(index, program) if program else run(index, *command)

    monkeypatch.setattr(check_adapter, "run", replaced)


@pytest.mark.gpu
def test_a_report_on_a_sound_adapter(report, device):
    status, text = report("--kernels=probe_fma")
    assert status == 0, text
    assert f"## 0: {device}" in text
    for line in ("max_storage_buffers", "timestamp-query", "softplus         right"):
        assert line in text
    assert "| Doctor | ok |" in text
    assert "| Kernels | 2 tests, 0 failed, " in text
    assert "All equal their oracles." in text
    assert "scan_backward" in text  # of the table of times


@pytest.mark.gpu
def test_failures_crashes_and_hangs_show(report, monkeypatch, tmp_path):
    failing = tmp_path / "test_kernels.py"
    failing.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('i', range(30))\n"
        "def test_kernel(i): assert not i, 'y[3] is 1, expected 2'\n"
    )
    monkeypatch.setattr(check_adapter, "SUITE", str(failing))
    (tmp_path / "crash.py").write_text("import os\nprint('so far')\nos.abort()\n")
    (tmp_path / "hang.py").write_text("import time\nprint('begun')\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    commands(monkeypatch, doctor="crash", profile="hang")
    monkeypatch.setattr(check_adapter, "TIMEOUT", 10)
    status, text = report()
    assert status == 1
    assert "| Doctor | crashed, signal 6 |" in text
    assert "so far" in text
    assert "| Kernels | 30 tests, 29 failed, " in text
    assert text.count("y[3] is 1, expected 2") == check_adapter.SHOWN
    assert "- `test_kernel[29]`" in text
    assert "begun\n\nstopped after 10 s" in text
    commands(monkeypatch, pytest="crash")
    status, text = report()
    assert status == 1
    assert "| Kernels | crashed, signal 6 before the end |" in text


def test_no_adapter(report, monkeypatch, capsys):
    monkeypatch.setattr(check_adapter, "list_adapters", list)
    assert report() == (2, "")
    assert "no WebGPU adapter was found" in capsys.readouterr().err


def test_kernels_that_match_nothing_are_named(report, capsys):
    assert report("--kernels=no_such_kernel") == (2, "")
    error = capsys.readouterr().err
    assert "--kernels no_such_kernel matches none of adamw, " in error
    assert "scan_backward, " in error


def test_no_tests_are_no_success(report, monkeypatch):
    commands(monkeypatch)
    part = check_adapter.suite(0, "no_such_kernel")
    assert not part.good
    assert part.summary.startswith("0 tests, 0 failed")
