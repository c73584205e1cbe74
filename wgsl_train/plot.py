"""Curves of runs, drawn from their metrics.jsonl. Needs matplotlib, an extra."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError, DataError
from .train import METRICS

FORMATS = (".png", ".svg", ".pdf")
_PANELS = (
    ("loss", "loss, nats"),
    ("lr", "learning rate"),
    ("grad_norm", "gradient norm"),
    ("tokens_per_s", "tokens/s"),
)

Record = dict[str, Any]


def read_metrics(run: Path) -> list[Record]:
    """The records of a run's folder. Raises DataError naming what is missing or damaged."""
    path = run / METRICS
    try:
        lines = path.read_text("utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path}: damaged: {error}") from None
    if not all(isinstance(r, dict) and "step" in r for r in records) or not records:
        raise DataError(f"{path}: holds no steps")
    return records


def _series(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a number; one that was not finite is left as a gap."""
    found = [(r["step"], r[name]) for r in records if name in r]
    return [s for s, _ in found], [math.nan if v is None else v for _, v in found]


def plot(runs: Sequence[Path], out: Path) -> None:
    """Draw loss, learning rate, gradient norm and throughput of runs into one file.

    out   its suffix, one of FORMATS, decides about the format

    Raises ConfigError where matplotlib is missing or the format unknown, DataError where a run
    has no metrics.
    """
    if out.suffix not in FORMATS:
        raise ConfigError(f"{out}: its suffix is {out.suffix!r}; allowed: {', '.join(FORMATS)}")
    logs = {str(run): read_metrics(run) for run in runs}
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'wgsl-train[plot]'") from None
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for run, records in logs.items():
            (line,) = axes.plot(*_series(records, name), label=run, linewidth=1)
            steps, losses = _series(records, "eval_loss")
            if name == "loss" and steps:
                style = {"color": line.get_color(), "linestyle": "--", "marker": "o"}
                axes.plot(steps, losses, label=f"{run}, held out", markersize=3, **style)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if name == "loss":
            axes.legend()
        if name == "grad_norm":
            axes.set_yscale("log")
    figure.savefig(out)
