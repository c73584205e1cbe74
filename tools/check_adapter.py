"""Runs the kernel suite on every adapter of this machine and writes a report for an issue.

    tools/check_adapter.sh                       all adapters, into adapter-report.md
    tools/check_adapter.sh --device 1 --kernels scan --out scan.md

Per adapter: what `wgsl-train doctor` says (driver, limits, features, self-test), which kernels
differ from their oracles, and where the time of a training step goes. Each part is a process of
its own, so that a driver that crashes or hangs costs no other part. Exit status: 0; 1 where
anything failed; 2 where there is no adapter.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import wgsl_train
from wgsl_train.device import AdapterInfo, list_adapters, no_adapter
from wgsl_train.kernel import KERNELS
from wgsl_train.ops import load_all

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 3600.0  # seconds a part may take
TAIL = 40  # lines kept of a part that crashed
SHOWN = 20  # failures written out in full
SUITE = "tests/test_kernels.py"
STEP = ("--d-model=128", "--n-layer=4", "--batch-size=8", "--seq-len=256", "--steps=5")


@dataclass(frozen=True)
class Part:
    """One part of an adapter's section: what it is called, its text, and whether all was well."""

    title: str
    body: str
    good: bool
    summary: str


def run(index: int, *command: str) -> tuple[int, str]:
    """Exit status (negative: the signal that ended it) and output of a module, on an adapter."""
    environment = {
        **os.environ,
        "WGSL_TRAIN_ADAPTER": str(index),
        "WGSL_TRAIN_NO_TUNING": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",  # so that what was said before a crash is in the report
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired as err:
        output = (err.output or b"").decode(errors="replace")  # bytes, whatever text= says
        return 1, f"{output}\nstopped after {TIMEOUT:.0f} s"
    return done.returncode, done.stdout


def verdict(status: int) -> str:
    """An exit status in words."""
    return "ok" if status == 0 else f"crashed, signal {-status}" if status < 0 else "FAILED"


def fenced(text: str) -> str:
    """As it is, in Markdown."""
    return f"```text\n{text.strip()}\n```"


def doctor(index: int) -> Part:
    """Driver, limits, features and self-test."""
    status, text = run(index, "wgsl_train", "doctor")
    return Part("Doctor", fenced(text), status == 0, verdict(status))


def step(index: int) -> Part:
    """GPU time by kernel."""
    start = time.monotonic()
    status, text = run(index, "wgsl_train", "profile", "--allow-cpu-adapter", *STEP)
    took = f"{verdict(status)}, {time.monotonic() - start:.0f} s"
    return Part("A training step", fenced(f"{' '.join(STEP)}\n{text}"), status == 0, took)


def suite(index: int, kernels: str) -> Part:
    """Every kernel against its oracle; `kernels` is an expression for pytest's -k."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = ["pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
        command += ["-k", kernels] if kernels else []
        status, text = run(index, *command, SUITE)
        if not results.exists():
            tail = "\n".join(text.splitlines()[-TAIL:])
            return Part("Kernels", fenced(tail), False, f"{verdict(status)} before the end")
        cases = list(ET.parse(results).getroot().iter("testcase"))
    failed = {
        case.get("name", ""): fault.get("message", "")
        for case in cases
        for fault in case
        if fault.tag in ("failure", "error")
    }
    seconds = sum(float(case.get("time", 0)) for case in cases)
    summary = f"{len(cases)} tests, {len(failed)} failed, {seconds:.0f} s"
    lines = [f"- `{name}`\n\n{fenced(text)}\n" for name, text in list(failed.items())[:SHOWN]]
    lines += [f"- `{name}`" for name in list(failed)[SHOWN:]]
    good = status == 0 and bool(cases)
    return Part("Kernels", "\n".join(lines) or "All equal their oracles.", good, summary)


def section(row: AdapterInfo, kernels: str) -> tuple[str, bool]:
    """Markdown of one adapter, and whether all was well."""
    parts = [doctor(row.index), suite(row.index, kernels), step(row.index)]
    table = [f"| {p.title} | {p.summary} |" for p in parts]
    lines = [f"## {row}", "", "| part | result |", "|---|---|", *table]
    for part in parts:
        lines += ["", f"### {part.title}", "", part.body]
    return "\n".join(lines), all(part.good for part in parts)


def commit() -> str:
    """Of the sources this runs from, or nothing."""
    try:
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return f" ({done.stdout.strip()})" if done.returncode == 0 else ""


def main() -> int:
    """Write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("adapter-report.md"))
    parser.add_argument("--device", type=int, help="only the adapter of this index")
    parser.add_argument("--kernels", default="", help="only tests that match, as pytest -k")
    options = parser.parse_args()
    rows = [row for row in list_adapters() if options.device in (None, row.index)]
    if not rows:
        print(no_adapter(), file=sys.stderr)
        return 2
    if options.kernels:
        look = ("pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-k", options.kernels)
        if run(rows[0].index, *look, SUITE)[0]:
            load_all()
            print(
                f"--kernels {options.kernels} matches none of {', '.join(sorted(KERNELS))}",
                file=sys.stderr,
            )
            return 2
    text = [
        "# Adapter report",
        "",
        f"wgsl_train {wgsl_train.__version__}{commit()}, python {platform.python_version()} on "
        f"{platform.platform()}, {datetime.date.today()}",
    ]
    sound = True
    for row in rows:
        print(f"{row} ...", flush=True)
        markdown, good = section(row, options.kernels)
        sound &= good
        text += ["", markdown]
        options.out.write_text("\n".join(text) + "\n", "utf-8")
        print("  all is well" if good else "  something failed", flush=True)
    print(f"{options.out}: attach this file to an issue")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
