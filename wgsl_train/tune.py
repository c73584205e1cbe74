"""Measure alternative tuning choices for this adapter, on the kernels of one training step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .config import MambaConfig
from .device import Device
from .encoder import Buffers, Encoder
from .errors import DeviceError, KernelCompileError, ShapeError
from .kernel import Tensor, Values
from .model import plan_step
from .models.language_model import parameters
from .plan import Dispatch, Layout, Plan
from .profile import warm_up

Array = np.ndarray[Any, Any]

TOLERANCE = 1e-4  # by which results may differ from the default's, relative to them and their rms
LEAST_GAIN = 0.03  # part of the time that a choice must save to be kept: less is noise
_ROUNDS = 5
_HOPELESS = 2.0  # slower than the fastest by this factor in the first round: not measured again


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


class _Candidate:
    """One dispatch, under some choices, with tensors of its own."""

    def __init__(self, buffers: Buffers, like: Dispatch, target: Any, choices: Values) -> None:
        self.choices = choices
        target = replace(target, tuned={like.key: choices})
        plan = Plan(Layout([], target), target)
        self.tensors = {
            name: plan.persistent(f"tune.{name}", tensor.shape, tensor.dtype)
            for name, tensor in like.tensors.items()
        }
        for name, tensor in self.tensors.items():
            # a first contribution overwrites: the plan knows one by the tensor's kind
            if like.kernel.bindings[name][1] == "adds" and name not in like.accumulate:
                tensor.kind = "activation"
        plan.dispatch(like.kernel, **self.tensors, **like.options)
        self.encoder = Encoder(buffers, plan, share_memory=False)

    def results(self, inputs: dict[str, Array]) -> list[Array]:
        for name, array in inputs.items():
            self.encoder.write(self.tensors[name], array)
        self.encoder.run("forward")
        (dispatch,) = self.encoder.plan.dispatches
        return [self.encoder.read(tensor) for _, tensor in dispatch.bound("writes", "adds")]

    def seconds(self) -> float:
        (timing,) = self.encoder.time("forward", repeats=3)
        return timing.seconds


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


def _choices(d: Dispatch, target: Any) -> list[Values]:
    """The table's choices, as {}, then every alternative that differs from them."""
    found: list[Values] = [{}]
    for choices in d.kernel.alternatives(target, d.values):
        if choices not in found and {**d.values, **choices} != d.values:
            found.append(choices)
    return found


def _inputs(tensors: dict[str, Tensor]) -> dict[str, Array]:
    """Positive numbers, so that no kernel meets a root of a negative one; integers are 0."""
    rng = np.random.default_rng(0)
    return {
        name: np.zeros(t.shape, np.uint32)
        if t.dtype == "u32"
        else rng.random(t.shape, np.float32) * np.float32(0.9) + np.float32(0.1)
        for name, t in tensors.items()
    }


def _measure(
    device: Device, group: Sequence[Dispatch], target: Any, choices: Sequence[Values]
) -> Tuned:
    d, buffers = group[0], Buffers(device)
    try:
        default = _Candidate(buffers, d, target, choices[0])
        inputs = _inputs(default.tensors)
        wanted = default.results(inputs)
        candidates = [default]
        for choice in choices[1:]:
            try:
                candidate = _Candidate(buffers, d, target, choice)
                if _same(wanted, candidate.results(inputs)):
                    candidates.append(candidate)
            except (KernelCompileError, ShapeError, DeviceError):
                continue  # more than this adapter allows
        measured = len(candidates)
        warm_up(default.encoder, "forward", seconds=0.05)
        # in turns, so that a change of clock meets all of them alike
        samples: dict[_Candidate, list[float]] = {c: [c.seconds()] for c in candidates}
        bound = _HOPELESS * min(s[0] for s in samples.values())
        candidates = [c for c in candidates if c is default or samples[c][0] <= bound]
        for _ in range(_ROUNDS - 1):
            for c in candidates:
                samples[c].append(c.seconds())
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


def _same(wanted: Sequence[Array], got: Sequence[Array]) -> bool:
    """Whether results agree. What a kernel leaves untouched is the same input in both."""
    for want, have in zip(wanted, got, strict=True):
        scale = np.abs(want) + np.sqrt(np.mean(np.square(want, dtype=np.float64)))
        error = np.abs(have.astype(np.float64) - want)
        if not (error <= TOLERANCE * scale).all():
            return False
    return True
