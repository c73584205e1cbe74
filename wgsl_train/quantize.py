"""Weights in fewer bits, as they lie on the device: half floats, or int8 with a factor a row.

On the host, when weights are loaded or saved; shaders turn them back as they read them. What was
rounded once is not changed by being rounded again: a checkpoint holds what was computed with.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import CheckpointError

Array = np.ndarray[Any, Any]

_FACTOR_BITS = 16  # of a factor's mantissa: with 7 bits of an int8, products are exact in float32


def quantize(array: Array, dtype: str, name: str = "an array") -> tuple[Array, Array | None]:
    """An array (rows, columns) as it is stored, and the factors (rows,) of int8.

    dtype   "f16": rounded to nearest, ties to even; "i8": integers from -127 to 127 times the
            row's factor, its largest magnitude / 127

    Raises CheckpointError where a value is not finite, or beyond what f16 holds.
    """
    values = np.asarray(array, np.float32)
    if dtype == "f16":
        with np.errstate(over="ignore"):
            stored, factors = values.astype(np.float16), None
        right = np.isfinite(stored)
    else:
        right = np.isfinite(values)
        largest = np.abs(np.where(right, values, 0)).max(1).astype(np.float64)
        mantissa, exponent = np.frexp(largest / 127)
        rounded = np.rint(np.ldexp(mantissa, _FACTOR_BITS))
        factors = np.ldexp(rounded, exponent - _FACTOR_BITS).astype(np.float32)
        divisor = np.where(factors > 0, factors, 1).astype(np.float64)[:, None]
        stored = np.clip(np.rint(np.where(right, values, 0) / divisor), -127, 127).astype(np.int8)
    if not right.all():
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        raise CheckpointError(f"{name}{list(at)} is {values[at]}, which {dtype} cannot hold")
    return stored, factors


def dequantize(stored: Array, factors: Array | None = None) -> Array:
    """The float32 values of what `quantize` returns."""
    values = stored.astype(np.float32, copy=False)
    return values if factors is None else values * factors[:, None]
