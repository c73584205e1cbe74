"""A run's numbers as TensorBoard event files. Needs tensorboardX, an extra."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import ConfigError


@contextlib.contextmanager
def event_writer(
    folder: str | Path, first_step: int = 0
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What writes each record of a run to an event file in a folder: for `Trainer.fit(on_log=...)`.

    first_step   steps done before: TensorBoard forgets what an earlier file says of later ones

    Raises ConfigError where tensorboardX is missing.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ConfigError(
            "event files need tensorboardX: pip install 'wgsl-train[tensorboard]'"
        ) from None
    writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)

    def write(record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name != "step" and isinstance(value, (int, float)) and math.isfinite(value):
                kind = "eval" if "eval_loss" in record else "train"
                writer.add_scalar(f"{kind}/{name}", float(value), record["step"])

    with writer:
        yield write
