"""Measure alternative tuning choices for this adapter, on the kernels of one training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .config import MambaConfig
from .device import Device
from .encoder import Buffers
from .errors import DeviceError, KernelCompileError, ShapeError
from .kernel import Target, Values
from .model import plan_step
from .models.language_model import parameters
from .plan import Dispatch, Layout
from .profile import warm_up
from .trial import Trial, deviation

Array = np.ndarray[Any, Any]

LEAST_GAIN = 0.03  # part of the time that a choice must save to be kept: less is noise
_ROUNDS = 4
_HOPELESS = 1.5  # slower than the fastest by this factor in the first round: not measured again


@dataclass(frozen=True)
class Tuned:
    """What was measured for one kernel at one set of dims and options. Seconds are medians.

    key        as `Kernel.key` has it
    default    seconds of one dispatch by the table's choices
    best       seconds by the fastest choices
    choices    the fastest, where they differ from the table's; None: the table's
    measured   how many choices were compared, the table's among them
    refused    how many did not compile here, or gave other results
    dispatches of this key in a step
    """

    key: str
    default: float
    best: float
    choices: Values | None
    measured: int
    refused: int
    dispatches: int

    @property
    def gain(self) -> float:
        """Part of the default's time that is saved."""
        return 1 - self.best / self.default


class _Candidate(Trial):
    """A dispatch under some choices."""

    def __init__(self, buffers: Buffers, like: Dispatch, target: Target, choices: Values) -> None:
        super().__init__(buffers, like, replace(target, tuned={like.key: choices}))
        self.choices = choices

    def sample(self) -> float:
        """Seconds by a GPU that was busy with the same before, so that its clock is high."""
        warm_up(self.encoder, "forward", seconds=0.02)
        return self.seconds(repeats=5)


def tune(
    device: Device,
    config: MambaConfig,
    batch: int,
    seqlen: int,
    *,
    activation_checkpointing: bool = False,
    only: str = "",
) -> Iterator[Tuned]:
    """Measure every kernel of a training step that declares alternatives, the dearest first.

    only   part of the names of the kernels to measure

    A choice counts only where it compiles and gives the default's results, within 1e-4, on the
    same random inputs. Stores nothing: see `tuned.store`. Raises DeviceError where the adapter
    has no timestamp queries.
    """
    if "timestamp-query" not in device.target.features:
        raise DeviceError(f"{device.name} has no timestamp queries, without which nothing is tuned")
    target = replace(device.target, tuned={})
    layout = Layout(parameters(config), target)
    planned = plan_step(
        config,
        layout,
        target,
        batch,
        seqlen,
        update=True,
        activation_checkpointing=activation_checkpointing,
    )
    groups: dict[str, list[Dispatch]] = {}
    for d in planned.plan.dispatches:
        if only in d.kernel.name:
            groups.setdefault(d.key, []).append(d)
    for group in sorted(groups.values(), key=lambda g: -sum(d.nbytes + d.flops for d in g)):
        choices = _choices(group[0], target)
        if len(choices) > 1:
            yield _measure(device, group, target, choices)


def _choices(d: Dispatch, target: Target) -> list[Values]:
    """The table's choices, as {}, then every alternative that differs from them."""
    found: list[Values] = [{}]
    for choices in d.kernel.alternatives(target, d.values):
        if choices not in found and {**d.values, **choices} != d.values:
            found.append(choices)
    return found


def _measure(
    device: Device, group: Sequence[Dispatch], target: Target, choices: Sequence[Values]
) -> Tuned:
    d, buffers = group[0], Buffers(device)
    try:
        default = _Candidate(buffers, d, target, choices[0])
        inputs = default.draw()
        default.write(inputs)
        wanted = default.results()
        changed = {name: inputs[name] for name, _ in d.bound("writes", "adds")}
        candidates = [default]
        for choice in choices[1:]:
            try:
                candidate = _Candidate(buffers, d, target, choice)
                candidate.write(changed)  # all of them have the same tensors
                if _same(wanted, candidate.results()):
                    candidates.append(candidate)
            except (KernelCompileError, ShapeError, DeviceError):
                continue  # more than this adapter allows
        measured = len(candidates)
        # in turns, so that a change of clock meets all of them alike
        warm_up(default.encoder, "forward", seconds=0.1)
        samples: dict[_Candidate, list[float]] = {c: [c.sample()] for c in candidates}
        bound = _HOPELESS * min(s[0] for s in samples.values())
        candidates = [c for c in candidates if c is default or samples[c][0] <= bound]
        for _ in range(_ROUNDS - 1):
            for c in candidates:
                samples[c].append(c.sample())
    finally:
        buffers.free()
    medians = {c: max(float(np.median(samples[c])), 1e-9) for c in candidates}
    best = min(candidates, key=lambda c: medians[c])
    if medians[best] > (1 - LEAST_GAIN) * medians[default]:
        best = default
    return Tuned(
        key=d.key,
        default=medians[default],
        best=medians[best],
        choices=None if best is default else best.choices,
        measured=measured,
        refused=len(choices) - measured,
        dispatches=len(group),
    )


def _same(wanted: Mapping[str, Array], got: Mapping[str, Array]) -> bool:
    """Whether results agree. What a kernel leaves untouched is the same input in both."""
    found = (deviation(wanted[name], got[name]) for name in wanted)
    return all(d.error <= d.allowed for d in found)
