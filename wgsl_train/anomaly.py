"""Where a step went wrong: the first dispatch that made a number that is not finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .encoder import Encoder
from .kernel import Tensor
from .plan import Dispatch

Array = np.ndarray[Any, Any]


def first_anomaly(encoder: Encoder, *sections: str, clear_grads: bool = True) -> str | None:
    """Run sections one dispatch at a time and look at all that each wrote; None where all is finite.

    Says which dispatch wrote the first NaN or infinity, where, and what range its inputs had. A
    tensor that was not finite before is named as such. As slow as it sounds: everything is read
    back.
    """
    for d in encoder.walk(*sections, clear_grads=clear_grads):
        for binding, tensor in d.bound("writes", "adds"):
            if (place := _not_finite(encoder.read(tensor), tensor)) is not None:
                return _describe(encoder, d, binding, tensor, place)
    return None


def _not_finite(array: Array, tensor: Tensor) -> list[int] | None:
    """Index of the first element that is no finite number."""
    if tensor.dtype == "u32":
        return None
    places = np.argwhere(~np.isfinite(array))
    return [int(i) for i in places[0]] if len(places) else None


def _describe(
    encoder: Encoder, d: Dispatch, binding: str, tensor: Tensor, place: Iterable[int]
) -> str:
    inputs = []
    for name, given in d.bound("reads"):
        array = encoder.read(given)
        inputs.append(f"{name} = {given.name} {_range(array, given)}")
    where = f"{d.label}: " if d.label else ""
    return (
        f"{where}{d.kernel.name} wrote a number that is not finite to {binding} = {tensor.name} at "
        f"{list(place)}; it read {', '.join(inputs) or 'nothing'}"
    )


def _range(array: Array, tensor: Tensor) -> str:
    if tensor.dtype == "u32":
        return f"in {array.min()} .. {array.max()}"
    finite = array[np.isfinite(array)]
    missing = array.size - finite.size
    lost = f", {missing:,} of {array.size:,} not finite" if missing else ""
    return f"in {finite.min():.4g} .. {finite.max():.4g}{lost}" if finite.size else "not finite"
