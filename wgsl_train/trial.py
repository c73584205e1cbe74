"""One dispatch alone, on tensors of its own: to compare what it gives, or to time it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .encoder import Buffers, Encoder
from .kernel import Target
from .plan import Dispatch, Layout, Plan

Array = np.ndarray[Any, Any]

TOLERANCE = 1e-4  # by which results of two versions of a kernel may deviate; see `deviation`
_BLOCK = 1 << 20  # elements compared at a time: of large tensors, copies are larger still
HALF_TOLERANCE = 2e-3  # the same of f16 results: neighbouring numbers are 2^-10 apart


class Trial:
    """A dispatch like another one, planned anew for a target, on tensors of its own.

    Trials that share `buffers` share memory too.
    """

    def __init__(self, buffers: Buffers, like: Dispatch, target: Target) -> None:
        plan = Plan(Layout([], target), target)
        self.tensors = {
            name: plan.persistent(f"trial.{name}", tensor.shape, tensor.dtype)
            for name, tensor in like.tensors.items()
        }
        for name, tensor in self.tensors.items():
            # a first contribution overwrites: the plan knows one by the tensor's kind
            if like.kernel.bindings[name][1] == "adds" and name not in like.accumulate:
                tensor.kind = "activation"
        plan.dispatch(like.kernel, **self.tensors, **like.options)
        (self.dispatch,) = plan.dispatches
        self.encoder = Encoder(buffers, plan, share_memory=False)

    def draw(self) -> dict[str, Array]:
        """Positive numbers, so that no kernel meets a root of a negative one; u32 are 0."""
        rng = np.random.default_rng(0)
        arrays: dict[str, Array] = {}
        for name, t in self.tensors.items():
            if t.dtype == "u32":
                arrays[name] = np.zeros(t.shape, np.uint32)
            elif t.dtype == "i8":
                arrays[name] = rng.integers(1, 128, t.shape)
            else:
                arrays[name] = rng.random(t.shape, np.float32) * np.float32(0.9) + np.float32(0.1)
        return arrays

    def write(self, arrays: Mapping[str, Array]) -> None:
        for name, array in arrays.items():
            self.encoder.write(self.tensors[name], array)

    def results(self) -> dict[str, Array]:
        """Run it on what its tensors hold: what it wrote, by binding."""
        self.encoder.run("forward")
        return {n: self.encoder.read(t) for n, t in self.dispatch.bound("writes", "adds")}

    def seconds(self, repeats: int = 3) -> float:
        """GPU time, the median of some runs. Needs timestamp queries."""
        (timing,) = self.encoder.time("forward", repeats=repeats)
        return timing.seconds


@dataclass(frozen=True)
class Deviation:
    """Where an array differs most from another.

    error    |got - wanted| / (|wanted| + the wanted's root mean square); infinite where just one
             is not finite, or integers differ
    allowed  error of two versions of a kernel
    """

    error: float
    index: tuple[int, ...]
    wanted: float
    got: float
    allowed: float

    def __str__(self) -> str:
        return f"{list(self.index)} is {self.got:.7g}, not {self.wanted:.7g}"


def deviation(wanted: Array, got: Array) -> Deviation:
    """The greatest deviation of one array from another of its shape."""
    want, have = wanted.reshape(-1), got.reshape(-1)
    blocks = [slice(at, at + _BLOCK) for at in range(0, want.size, _BLOCK)]
    rms = np.sqrt(sum(_squares(want[block]) for block in blocks) / want.size)
    error, at = 0.0, 0
    for block in blocks:
        errors = _errors(want[block], have[block], rms)
        worst = int(errors.argmax())
        if errors[worst] > error:
            error, at = float(errors[worst]), block.start + worst
    return Deviation(
        error,
        tuple(map(int, np.unravel_index(at, wanted.shape))),
        float(want[at]),
        float(have[at]),
        HALF_TOLERANCE if wanted.dtype == np.float16 else TOLERANCE,
    )


def _squares(array: Array) -> float:
    """The sum of the squares of what is finite."""
    values = array.astype(np.float64)
    return float(np.square(values[np.isfinite(values)]).sum())


def _errors(wanted: Array, got: Array, rms: float) -> Array:
    """The `Deviation.error` of each element."""
    want, have = wanted.astype(np.float64), got.astype(np.float64)
    same = (want == have) | (np.isnan(want) & np.isnan(have))
    with np.errstate(invalid="ignore"):
        error = np.abs(have - want) / (np.abs(want) + rms + 1e-30)
    if wanted.dtype.kind in "iu":
        error[:] = np.inf
    error[~np.isfinite(error)] = np.inf
    error[same] = 0.0
    return error
