"""NumPy references in float64: the proof of every kernel. Never imported by the package.

A function here has the name of the kernel it checks. Its parameters are names of bindings,
dims and options; it returns {binding: array} for every binding the kernel writes or adds to (for
`adds`, the increment). NaN in a result means: the kernel must leave this element as it was.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """Dims and options to check a kernel at.

    leave_out   optional bindings that are not bound
    choices     tuning choices to force, instead of each kind of adapter's own
    half        bindings that are f16
    """

    values: Mapping[str, Any]
    leave_out: tuple[str, ...] = ()
    choices: Mapping[str, int] = field(default_factory=dict)
    half: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{k}={v}" for k, v in {**self.values, **self.choices}.items()]
        parts += [f"no {n}" for n in self.leave_out] + [f"f16 {n}" for n in self.half]
        return ",".join(parts).replace(" ", "")


def case(
    leave_out: tuple[str, ...] = (),
    choices: Mapping[str, int] | None = None,
    half: tuple[str, ...] = (),
    **values: Any,
):
    return Case(values, leave_out, choices or {}, half)


Draw = Callable[[np.random.Generator, tuple[int, ...], Mapping[str, Any]], np.ndarray]


@dataclass(frozen=True)
class Oracle:
    compute: Callable[..., Arrays]
    cases: tuple[Case, ...]
    draw: Mapping[str, Draw]
    rtol: float


ORACLES: dict[str, Oracle] = {}


def oracle(*cases: Case, draw: Mapping[str, Draw] | None = None, rtol: float = 1e-5):
    """Register a reference with the cases to check it at; the first should divide no tile.

    draw   how inputs are made, by binding; the others are uniform in [-1, 1)
    rtol   what float32 on a GPU is held to: |error| <= rtol * (|value| + rms of the tensor)
    """

    def register(f):
        ORACLES[f.__name__] = Oracle(f, cases, draw or {}, rtol)
        return f

    return register


def uniform(low: float, high: float) -> Draw:
    return lambda rng, shape, values: rng.uniform(low, high, shape)


def documents(rng: np.random.Generator, shape: tuple[int, ...], values: Mapping[str, Any]):
    """Ids that do not decrease along a row; some rows begin with 0, the state's document."""
    begins = rng.random(shape) < 0.2
    begins[:, 0] = rng.random(shape[0]) < 0.5
    return begins.cumsum(1)


def load_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
