"""Whether an adapter stores f16 as it must: trusted only once it was seen to."""

from __future__ import annotations

import numpy as np

from .device import Device
from .encoder import Buffers, Encoder
from .errors import DeviceError
from .ops.probe import COPY
from .plan import Layout, Plan

# Exact in f16; between two of its values, and at even distance from both; too large for it
_VALUES = np.array([1.0, -1.5, 65504.0, 6.103515625e-05, 1.0009, 2049.0, 2051.0, 1e5], np.float32)


def check_f16(device: Device) -> None:
    """Store numbers as f16 and read them back: some drivers round wrongly, or give zeros.

    Raises DeviceError where the adapter has no f16, or one that does not round to nearest, ties to
    even, with infinity for what is too large.
    """
    plan = Plan(Layout([], device.target), device.target)
    given = plan.persistent("f16.given", _VALUES.shape)
    stored = plan.tensor("f16.stored", _VALUES.shape, "f16")
    back = plan.persistent("f16.back", _VALUES.shape)
    plan.dispatch(COPY, x=given, out=stored)
    plan.dispatch(COPY, x=stored, out=back)
    buffers = Buffers(device)
    encoder = Encoder(buffers, plan)
    encoder.write(given, _VALUES)
    encoder.run("forward")
    got = encoder.read(back)
    buffers.free()
    with np.errstate(over="ignore"):
        want = _VALUES.astype(np.float16).astype(np.float32)
    if wrong := np.flatnonzero(got != want).tolist():
        i = wrong[0]
        raise DeviceError(
            f"{device.name} stores {_VALUES[i]:g} as f16 and reads {got[i]:g}, not {want[i]:g}: "
            "update its driver, or use precision f32"
        )
