"""`wgsl-train doctor`: what this machine has, and whether a few kernels compute what they must."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from .config import MambaConfig, TrainConfig
from .device import Device, list_adapters, no_adapter, request_device
from .encoder import Buffers, Encoder
from .errors import WgslTrainError
from .kernel import PORTABLE, Kernel, Target
from .model import Model
from .ops import cross_entropy, linear, rms_norm, selective_scan
from .plan import Layout, Plan
from .precision import check_f16
from .train import Trainer

Array = np.ndarray[Any, Any]

_PURPOSE = {
    "timestamp-query": "GPU time of each kernel, for profiling",
    "shader-f16": "half precision",
    "subgroup": "sums across lanes",
    "shader-int64": "wider loads; asked for on CPUs only",
}
# Paravirtual and reference adapters that are known to return wrong results
_NOT_TRUSTED = ("apple paravirtual device", "microsoft basic render driver")


def diagnose(selector: str | None, say: Callable[[str], None]) -> bool:
    """Print what there is and what is wrong, by `say`; whether training can be trusted."""
    versions = {n: importlib.metadata.version(n) for n in ("wgpu", "numpy", "jinja2")}
    say(f"python {platform.python_version()} on {platform.platform()}")
    say(", ".join(f"{name} {version}" for name, version in versions.items()))
    rows = list_adapters()
    if not rows:
        say(f"\n{no_adapter()}")
        return False
    say("\nadapters")
    for row in rows:
        say(f"  {row}")
    device = request_device(selector, quiet=True)
    say(f"\nchosen     {device}")
    if device.is_cpu:
        say("  a CPU emulates this one: right, but slow. For a GPU, install its driver with Vulkan")
    say("\nlimits                     granted     needed at least")
    sound = True
    for field in fields(Target):
        if field.name.startswith("max_"):
            granted, needed = getattr(device.target, field.name), getattr(PORTABLE, field.name)
            low = granted < needed
            sound &= not low
            say(f"  {field.name:22} {granted:>13,} {needed:>13,}{'  TOO LOW' if low else ''}")
    say("\nfeatures (none is required)")
    for name, purpose in _PURPOSE.items():
        say(f"  {name:16} {'yes' if name in device.target.features else 'no ':3}  {purpose}")
    say("\nself-test")
    for name, test in _TESTS.items():
        try:
            got, want = test(device)
            error = float(np.abs(np.asarray(got, np.float64) - want).max())
            good = bool(error <= 2e-5)
            verdict = (
                "right" if good else f"WRONG: {np.asarray(got).tolist()}, must be {want.tolist()}"
            )
        except WgslTrainError as failure:
            good, verdict = False, f"FAILED: {failure}"
        sound &= good
        say(f"  {name:16} {verdict}")
    if "shader-f16" in device.target.features:
        try:
            check_f16(device)
            verdict = "right"
        except WgslTrainError as failure:  # what is optional leaves the rest sound
            verdict = f"WRONG: {failure}"
        say(f"  {'f16 storage':16} {verdict}")
    if any(bad in device.name.lower() for bad in _NOT_TRUSTED):
        say(f"\n{device.name} is known to compute wrong results: not trusted")
        sound = False
    say("\nall is well" if sound else f"\nnot sound: update the driver ({device.info.driver})")
    return sound


def _dispatch(
    device: Device, kernel: Kernel, out: str, given: dict[str, Any], **options: Any
) -> Array:
    """One dispatch on given arrays; a shape instead of an array is for a result."""
    plan = Plan(Layout([], device.target), device.target)
    tensors = {
        name: plan.persistent(f"doctor.{name}", np.shape(a) if isinstance(a, np.ndarray) else a)
        for name, a in given.items()
    }
    plan.dispatch(kernel, **tensors, **options)
    encoder = Encoder(Buffers(device), plan)
    for name, array in given.items():
        if isinstance(array, np.ndarray):
            encoder.write(tensors[name], array)
    encoder.run("forward")
    return encoder.read(tensors[out])


def _linear(device: Device) -> tuple[Array, Array]:
    x, weight = np.array([[1.0, 2], [3, 4]]), np.array([[5.0, 6], [7, 8], [9, 10]])
    got = _dispatch(device, linear.FORWARD, "out", {"x": x, "weight": weight, "out": (2, 3)})
    return got, np.array([[17.0, 23, 29], [39, 53, 67]])


def _softplus(device: Device) -> tuple[Array, Array]:
    x = np.array([[-20.0], [0], [20], [88.5]])
    given = {"x": x, "weight": np.ones((1, 1)), "out": (4, 1)}
    got = _dispatch(device, linear.FORWARD, "out", given, activation="softplus")
    return got[:, 0], np.array([2.0611536e-9, 0.6931472, 20, 88.5])


def _rms_norm(device: Device) -> tuple[Array, Array]:
    given = {"x": np.array([[3.0, 4]]), "weight": np.array([1.0, 2]), "out": (1, 2), "inv": (1,)}
    got = _dispatch(device, rms_norm.FORWARD, "out", given, eps=0.0)
    return got[0], np.array([0.8485281, 2.2627417])


def _cross_entropy(device: Device) -> tuple[Array, Array]:
    plan = Plan(Layout([], device.target), device.target)
    targets = plan.persistent("doctor.targets", (1,), "u32")
    scale, logits, loss = (
        plan.persistent(f"doctor.{n}", s)
        for n, s in (("scale", (1,)), ("logits", (1, 4)), ("loss", (1,)))
    )
    plan.dispatch(
        cross_entropy.CROSS_ENTROPY,
        targets=targets,
        batch_scale=scale,
        logits=logits,
        row_loss=loss,
    )
    encoder = Encoder(Buffers(device), plan)
    encoder.write(scale, np.ones(1))
    encoder.write(targets, np.array([2]))
    encoder.run("forward")
    got = np.append(encoder.read(logits)[0], encoder.read(loss))
    return got, np.array([0.25, 0.25, -0.75, 0.25, 1.3862944])


def _scan(device: Device) -> tuple[Array, Array]:
    """A scan of ones with decay one half: y[t] = ln 2 * (2 - 2^-t)."""
    plan = Plan(Layout([], device.target), device.target, training=False)
    shapes: dict[str, tuple[int, ...]] = {
        "u": (1, 5, 1),
        "delta": (1, 5, 1),
        "x_dbl": (1, 5, 3),
        "xz": (1, 5, 2),
    }
    shapes |= {"A_log": (1, 1), "D": (1,)}
    t = {name: plan.persistent(f"doctor.{name}", shape) for name, shape in shapes.items()}
    g = selective_scan.selective_scan(plan, *t.values(), dt_rank=1, d_state=1)
    encoder = Encoder(Buffers(device), plan)
    encoder.write(t["u"], np.ones((1, 5, 1)))
    encoder.write(t["delta"], np.full((1, 5, 1), np.log(2)))
    encoder.write(t["x_dbl"], np.ones((1, 5, 3)))
    encoder.write(t["xz"], np.full((1, 5, 2), 20.0))
    encoder.run("forward")
    return encoder.read(g).ravel() / 20, np.log(2) * (2 - 0.5 ** np.arange(5.0))


def _adamw(device: Device) -> tuple[Array, Array]:
    """One step on a one-layer model: every weight moves by the learning rate, decay aside."""
    model = Model(MambaConfig(vocab_size=5, d_model=4, n_layer=1, d_state=2), device)
    name = "backbone.norm_f.weight"
    before = model.state_dict()[name]
    _, grads = model.loss_and_grads([[0, 1, 2, 3]], [[1, 2, 3, 4]])
    trainer = Trainer(model, TrainConfig(lr=0.1, weight_decay=0.0, max_grad_norm=0.0, steps=1))
    trainer.step(np.array([[0, 1, 2, 3]]), np.array([[1, 2, 3, 4]]))
    moved = model.state_dict()[name] - before
    return np.abs(moved), np.full(4, 0.1) * (np.abs(grads[name]) / (np.abs(grads[name]) + 1e-8))


_TESTS = {
    "matrix product": _linear,
    "softplus": _softplus,
    "norm": _rms_norm,
    "cross-entropy": _cross_entropy,
    "selective scan": _scan,
    "AdamW step": _adamw,
}
