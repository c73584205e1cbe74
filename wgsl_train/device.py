"""Choose an adapter, negotiate features and limits, say which one it is.

This module and encoder.py alone import wgpu.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

# Software Vulkan prints an error for each adapter where this is unset; it needs no real one.
os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())

import wgpu
import wgpu.backends.wgpu_native

from . import tuned
from .errors import DeviceError
from .kernel import Target

_T = TypeVar("_T")
_FEATURES = ("timestamp-query", "shader-f16", "subgroup")
_CPU_FEATURES = ("shader-int64",)  # what only pays there
_LIMITS = {
    "max_storage_buffers": "max-storage-buffers-per-shader-stage",
    "max_binding": "max-storage-buffer-binding-size",
    "max_buffer": "max-buffer-size",
    "max_invocations": "max-compute-invocations-per-workgroup",
    "max_workgroup_memory": "max-compute-workgroup-storage-size",
    "max_workgroups": "max-compute-workgroups-per-dimension",
}
_KINDS = {"CPU": "cpu", "DiscreteGPU": "discrete", "IntegratedGPU": "integrated"}
_PREFERENCE = ["DiscreteGPU", "IntegratedGPU", "Unknown", "CPU"]

_NO_ADAPTER = """\
no WebGPU adapter was found. What to install:
  Linux    the graphics driver of your GPU with its Vulkan part; or, to run on the CPU,
           `apt-get install mesa-vulkan-drivers libvulkan1` (lavapipe)
  Windows  a current graphics driver (Direct3D 12 or Vulkan)
  macOS    nothing: Metal is built in"""


@dataclass(frozen=True)
class AdapterInfo:
    """One row of `wgsl-train devices`."""

    index: int
    name: str
    kind: str
    backend: str
    driver: str
    adapter: Any

    def __str__(self) -> str:
        driver = f", {self.driver}" if self.driver else ""
        return f"{self.index}: {self.name} ({self.kind}, {self.backend}{driver})"


class Device:
    """An open device, and the `Target` that plans for it are made for.

    pipelines, layouts   what the encoders have compiled so far, for all models on this device
    """

    def __init__(self, info: AdapterInfo, device: Any, target: Target) -> None:
        self.info, self.wgpu, self.target = info, device, target
        self.name = info.name
        self.pipelines: dict[str, Any] = {}
        self.layouts: dict[Any, Any] = {}

    @property
    def is_cpu(self) -> bool:
        """Whether a CPU emulates the GPU (lavapipe, SwiftShader, WARP)."""
        return self.info.kind == "CPU"

    @property
    def identity(self) -> str:
        """What tuned choices are valid for: adapter, driver, and versions of what compiles."""
        from . import __version__  # not known yet while the package is being imported

        driver = f"{self.info.backend} {self.info.driver}".strip()
        return f"{self.name} | {driver} | wgpu {wgpu.__version__} | wgsl_train {__version__}"

    @property
    def timestamp_period(self) -> float:
        """Nanoseconds a tick of a timestamp query."""
        lib = wgpu.backends.wgpu_native.lib
        return float(lib.wgpuQueueGetTimestampPeriod(self.wgpu.queue._internal))

    def wait(self) -> None:
        """Wait until all that was submitted is done."""
        # By the C function, since wgpu 0.32's on_submitted_work_done_sync raises TypeError
        native = wgpu.backends.wgpu_native
        self.guard(lambda: native.lib.wgpuDevicePoll(self.wgpu._internal, True, native.ffi.NULL))

    def guard(self, call: Callable[[], _T]) -> _T:
        """Run a call to the driver; its failures become DeviceError."""
        try:
            return call()
        except (wgpu.GPUError, RuntimeError) as err:
            raise DeviceError(
                f"{self.name} failed: {err}. Where the device was lost or memory ran out, restart "
                "from the last checkpoint, with a smaller batch if it happens again."
            ) from err

    def __str__(self) -> str:
        return str(self.info).split(": ", 1)[1]


def no_adapter() -> str:
    """What to say, and to install, where there is none."""
    found = [name for name in os.environ if name.startswith("VK_")]
    hint = f"\nset in the environment, and read by Vulkan: {', '.join(found)}" if found else ""
    return _NO_ADAPTER + hint


def list_adapters() -> list[AdapterInfo]:
    """All adapters, real GPUs first. One driver seen through several backends is listed once.

    OpenGL on a CPU is left out: it knows less than the Vulkan of the same driver.
    """
    rows: list[AdapterInfo] = []
    adapters = wgpu.gpu.enumerate_adapters_sync()
    order = {"Vulkan": 0, "Metal": 0, "D3D12": 1, "OpenGL": 2}
    adapters.sort(
        key=lambda a: (
            _PREFERENCE.index(a.info["adapter_type"])
            if a.info["adapter_type"] in _PREFERENCE
            else 2,
            order.get(a.info["backend_type"], 3),
        )
    )
    backends: dict[str, str] = {}
    for adapter in adapters:
        info = adapter.info
        if (info["adapter_type"], info["backend_type"]) == ("CPU", "OpenGL"):
            continue
        name = info["device"] or info["description"] or "unnamed adapter"
        if backends.setdefault(name, info["backend_type"]) != info["backend_type"]:
            continue
        rows.append(
            AdapterInfo(
                len(rows),
                name,
                info["adapter_type"],
                info["backend_type"],
                info["description"],
                adapter,
            )
        )
    return rows


def _choose(rows: list[AdapterInfo], selector: str | int | None) -> AdapterInfo:
    listing = "\n".join(f"  {row}" for row in rows)
    if selector is None:
        return rows[0]
    if isinstance(selector, int) or selector.isdigit():
        index = int(selector)
        if index >= len(rows):
            raise DeviceError(f"no adapter {index}; there are 0..{len(rows) - 1}:\n{listing}")
        return rows[index]
    found = [row for row in rows if selector.lower() in row.name.lower()]
    if len(found) != 1:
        what = "no adapter's name contains" if not found else "several adapters' names contain"
        raise DeviceError(f"{what} {selector!r}; choose by index:\n{listing}")
    return found[0]


def request_device(
    selector: str | int | None = None,
    *,
    require_gpu: bool = False,
    limits: Mapping[str, int] | None = None,
    kind: str | None = None,
    quiet: bool = False,
) -> Device:
    """Open a device.

    Parameters
    ----------
    selector      index or part of the name, as `wgsl-train devices` lists them; by default the
                  environment's WGSL_TRAIN_ADAPTER, else the best real GPU, else a CPU adapter
    require_gpu   refuse an adapter that a CPU emulates
    limits        fields of `Target` to hold lower than the adapter's own; for tests
    kind          take another column of the tuning tables: "portable", "cpu", "integrated",
                  "discrete"
    quiet         no warning line for a CPU adapter

    Choices that `wgsl-train tune` stored for this adapter are used, unless limits or kind are
    given, or the environment's WGSL_TRAIN_NO_TUNING is 1.

    Raises DeviceError where there is none, or the choice is ambiguous or refused.
    """
    if selector is None:
        selector = os.environ.get("WGSL_TRAIN_ADAPTER") or None
    with _quiet_stderr():
        rows = list_adapters()
    if not rows:
        raise DeviceError(no_adapter())
    info = _choose(rows, selector)
    if info.kind == "CPU":
        if require_gpu:
            raise DeviceError(f"{info.name} is a CPU adapter, and a GPU is required")
        if not quiet:
            print(
                f"warning: {info.name} emulates a GPU on the CPU; training will be slow",
                file=sys.stderr,
            )
    adapter = info.adapter
    granted = {field: int(adapter.limits[key]) for field, key in _LIMITS.items()}
    granted |= {k: min(v, granted[k]) for k, v in (limits or {}).items()}
    wanted = (*_FEATURES, *(_CPU_FEATURES if info.kind == "CPU" else ()))
    features = [f for f in wanted if f in adapter.features]
    try:
        device = adapter.request_device_sync(
            label="wgsl_train",
            required_features=features,
            required_limits={_LIMITS[k]: v for k, v in granted.items()},
        )
    except (wgpu.GPUError, RuntimeError) as err:
        raise DeviceError(f"{info.name} could not be opened: {err}") from err
    target = Target(
        kind=kind or _KINDS.get(info.kind, "portable"),  # type: ignore[arg-type]
        features=frozenset(features),
        lanes=_lanes(info) if "subgroup" in features else 1,
        **granted,  # type: ignore[arg-type]
    )
    opened = Device(info, device, target)
    if limits or kind:
        return opened
    return with_target(opened, tuned=tuned.load(opened.identity))


def _lanes(info: AdapterInfo) -> int:
    """Invocations of a subgroup on lavapipe, whose name holds the bits of its vectors; else 1."""
    bits = re.search(r"llvmpipe .*\b(\d+) bits", info.name)
    return int(bits[1]) // 32 if info.kind == "CPU" and bits else 1


def with_target(device: Device, **changes: Any) -> Device:
    """The same device with a changed `Target`: faked limits, another tuning table. For tests."""
    changed = Device(device.info, device.wgpu, replace(device.target, **changes))
    changed.pipelines, changed.layouts = device.pipelines, device.layouts
    return changed


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Hide what drivers print while adapters are listed; Python's own output is not affected."""
    sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # no stderr at all
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
