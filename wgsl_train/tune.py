"""Measure alternative tuning choices for this adapter, on the kernels of one training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
_HOPELESS = 1.2  # slower than the default by this factor in the first round: not measured again


@dataclass(frozen=True)
class Tuned:
    """What was measured for one kernel at one set of dims and options. Seconds are medians.

    key        as `Kernel.key` has it
    default    seconds of one dispatch by the table's choices
    best       seconds by the fastest choices
    choices    the fastest, where they differ from the table's; None: the table's
    measured   how many choices were timed, the table's among them, without those refused
    refused    how many did not compile here, or gave other results: those are checked that would
               win, from the fastest on, up to the first that is right
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
        self.samples: list[float] = []

    def sample(self) -> None:
        """Time it on a GPU that was busy with the same before, so that its clock is high."""
        warm_up(self.encoder, "forward", seconds=0.02)
        self.samples.append(self.seconds(repeats=5))

    @property
    def median(self) -> float:
        """Seconds, above 0."""
        return max(float(np.median(self.samples)), 1e-9)


def tune(
    device: Device,
    config: MambaConfig,
    batch: int,
    seqlen: int,
    *,
    activation_checkpointing: bool = False,
    only: str = "",
    announce: Callable[[str], None] = lambda text: None,
) -> Iterator[Tuned]:
    """Measure every kernel of a training step that declares alternatives, the dearest first.

    only       part of the names of the kernels to measure
    announce   called before each kernel with what will be measured

    A choice wins only where it gives the default's results, within 1e-4, on the same random
    inputs. Stores nothing: see `tuned.store`. Raises DeviceError where the adapter has no
    timestamp queries.
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
    dearest = sorted(groups.values(), key=lambda g: -sum(d.nbytes + d.flops for d in g))
    with_choices = ((group, _choices(group[0], target)) for group in dearest)
    work = [(group, choices) for group, choices in with_choices if len(choices) > 1]
    for i, (group, choices) in enumerate(work, 1):
        announce(f"{group[0].kernel.name}, {len(choices)} choices, {i} of {len(work)}")
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
    d, buffers, known = group[0], Buffers(device), set(device.pipelines)
    try:
        default = _Candidate(buffers, d, target, choices[0])
        arrays = default.draw()
        default.write(arrays)
        arrays = {name: arrays[name] for name, _ in d.bound("writes", "adds")}
        candidates = [default]
        for choice in choices[1:]:
            try:
                candidate = _Candidate(buffers, d, target, choice)
                warm_up(candidate.encoder, "forward", seconds=0)
                candidates.append(candidate)
            except (KernelCompileError, ShapeError, DeviceError):
                continue  # more than this adapter allows
        refused = len(choices) - len(candidates)
        # in turns, so that a change of clock meets all of them alike
        warm_up(default.encoder, "forward", seconds=0.1)
        for c in candidates:
            c.sample()
        bound = _HOPELESS * default.median
        candidates = [c for c in candidates if c is default or c.median <= bound]
        for _ in range(_ROUNDS - 1):
            for c in candidates:
                c.sample()
        best, wrong = _fastest_right(default, candidates, arrays)
    finally:
        buffers.free()
        for source in device.pipelines.keys() - known:
            del device.pipelines[source]
    return Tuned(
        key=d.key,
        default=default.median,
        best=best.median,
        choices=None if best is default else best.choices,
        measured=len(choices) - refused - wrong,
        refused=refused + wrong,
        dispatches=len(group),
    )


def _fastest_right(
    default: _Candidate, candidates: Sequence[_Candidate], arrays: Mapping[str, Array]
) -> tuple[_Candidate, int]:
    """The fastest that saves enough and gives the default's results, or the default; and how many
    before it did not.

    arrays   what all begin with, of the tensors that they change. To read and compare results may
             take far longer than to time them, so that only what would win is checked
    """
    enough = (1 - LEAST_GAIN) * default.median
    contenders = sorted((c for c in candidates if c.median <= enough), key=lambda c: c.median)
    wanted: Mapping[str, Array] = {}
    for wrong, contender in enumerate(contenders):
        wanted = wanted or _results(default, arrays)
        if _same(wanted, _results(contender, arrays)):
            return contender, wrong
    return default, len(contenders)


def _results(candidate: _Candidate, arrays: Mapping[str, Array]) -> dict[str, Array]:
    candidate.write(arrays)
    return candidate.results()


def _same(wanted: Mapping[str, Array], got: Mapping[str, Array]) -> bool:
    """Whether results agree. What a kernel leaves untouched is the same input in both."""
    for name, array in wanted.items():
        if not np.array_equal(array, got[name]):  # fast; by the same order of sums they are equal
            found = deviation(array, got[name])
            if found.error > found.allowed:
                return False
    return True
