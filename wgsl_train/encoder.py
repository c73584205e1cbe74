"""Turns a plan into GPU work. This module and device.py alone import wgpu."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import wgpu
import wgpu.backends.wgpu_native

from .device import Device
from .errors import DeviceError, KernelCompileError, ShapeError
from .kernel import Kernel, Rendered, Tensor
from .plan import Dispatch, Plan

_NUMPY = {"f32": np.float32, "u32": np.uint32, "f16": np.float16, "i8": np.int8}
_UPLOAD_CHUNK = 64 << 20  # bytes written between submits: staging memory is freed by a submit

Array = np.ndarray[Any, Any]
Item = tuple[Any, Any, int, int, int]  # pipeline, bind group, grid
Program = dict[str, list[Item]]  # by section


class Buffers:
    """GPU buffers by name: what the encoders of one model share."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._buffers: dict[str, Any] = {}
        self._pool: list[Any] = []
        self.submits = 0
        self.readbacks = 0

    def create(self, label: str, nbytes: int) -> Any:
        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
        try:
            return self.device.wgpu.create_buffer(label=label, size=nbytes, usage=usage)
        except wgpu.GPUError as err:
            raise DeviceError(
                f"{self.device.name} could not allocate {nbytes:,} bytes for {label}: {err}. Use a "
                "smaller batch or sequence length, or activation checkpointing."
            ) from err

    def named(self, root: Tensor) -> Any:
        """The buffer of a persistent tensor or a flat parameter buffer; zeros when new."""
        if root.name not in self._buffers:
            self._buffers[root.name] = self.create(root.name, max(256, root.nbytes))
        buffer = self._buffers[root.name]
        if buffer.size < root.nbytes:
            raise ShapeError(f"{root.name} has {buffer.size:,} bytes, {root.nbytes:,} are planned")
        return buffer

    def __contains__(self, root: Tensor) -> bool:
        return root.name in self._buffers

    def clear(self, *roots: Tensor) -> None:
        """Fill persistent tensors with zeros."""
        commands = self.device.wgpu.create_command_encoder()
        for root in roots:
            commands.clear_buffer(self.named(root))
        self.device.wgpu.queue.submit([commands.finish()])

    def clear_named(self, prefix: str) -> None:
        """Fill the buffers whose names begin so with zeros."""
        commands = self.device.wgpu.create_command_encoder()
        for name, buffer in self._buffers.items():
            if name.startswith(prefix):
                commands.clear_buffer(buffer)
        self.device.wgpu.queue.submit([commands.finish()])

    def drop(self, *roots: Tensor) -> None:
        """Free the buffers of persistent tensors."""
        for root in roots:
            if root.name in self._buffers:
                self._buffers.pop(root.name).destroy()

    def free(self) -> None:
        """Free all buffers: encoders made before are of no use then."""
        for buffer in [*self._buffers.values(), *self._pool]:
            buffer.destroy()
        self._buffers.clear()
        self._pool.clear()

    def activations(self, sizes: dict[str, int]) -> dict[str, Any]:
        """Buffers for one plan's activations, taken from the pool that all plans draw on."""
        free = sorted(self._pool, key=lambda b: int(b.size))
        taken = {}
        for name, nbytes in sorted(sizes.items(), key=lambda item: -item[1]):
            buffer = next((b for b in free if b.size >= nbytes), None)
            if buffer is None:
                buffer = self.create(name, nbytes)
                self._pool.append(buffer)
            else:
                free.remove(buffer)
            taken[name] = buffer
        return taken

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(int(b.size) for b in [*self._buffers.values(), *self._pool])

    def write(self, tensor: Tensor, array: Array) -> None:
        """Copy an array of the tensor's shape to the GPU."""
        self.write_buffer(self.named(tensor.root), tensor, array)

    def write_buffer(self, buffer: Any, tensor: Tensor, array: Array) -> None:
        if array.shape != tensor.shape:
            raise ShapeError(f"{tensor.name} is {tensor.shape}, given {array.shape}")
        data = np.ascontiguousarray(array, _NUMPY[tensor.dtype]).reshape(-1).view(np.uint8)
        data = np.pad(data, (0, -data.size % 4)) if data.size % 4 else data  # whole words
        start, queue = tensor.first_byte, self.device.wgpu.queue
        for first in range(0, data.size, _UPLOAD_CHUNK):
            part = data[first : first + _UPLOAD_CHUNK]
            self.device.guard(functools.partial(queue.write_buffer, buffer, start + first, part))
            if data.size > _UPLOAD_CHUNK:
                queue.submit([])

    def read(self, tensor: Tensor) -> Array:
        """Copy a tensor back. Waits for the GPU."""
        return self.read_buffer(self.named(tensor.root), tensor)

    def read_buffer(self, buffer: Any, tensor: Tensor) -> Array:
        self.readbacks += 1
        raw = self.device.guard(
            lambda: self.device.wgpu.queue.read_buffer(buffer, tensor.first_byte, tensor.nbytes)
        )
        elements = np.frombuffer(raw, _NUMPY[tensor.dtype])[: tensor.size]
        return elements.reshape(tensor.shape).copy()

    def layout(self, kernel: Kernel, bound: tuple[str, ...]) -> Any:
        """Bind group layout: from the declaration, since "auto" drops unused bindings."""
        key, layouts = (kernel, bound), self.device.layouts
        if key not in layouts:
            kinds = [
                "read-only-storage" if kernel.bindings[name][1] == "reads" else "storage"
                for name in bound
            ]
            layouts[key] = self.device.wgpu.create_bind_group_layout(
                label=kernel.name,
                entries=[
                    {"binding": i, "visibility": wgpu.ShaderStage.COMPUTE, "buffer": {"type": kind}}
                    for i, kind in enumerate(kinds)
                ],
            )
        return layouts[key]

    def pipeline(self, kernel: Kernel, rendered: Rendered, layout: Any) -> Any:
        """The compiled pipeline of a source; equal sources are compiled once a device."""
        source, pipelines = rendered.source, self.device.pipelines
        if source not in pipelines:
            device = self.device.wgpu
            try:
                pipelines[source] = device.create_compute_pipeline(
                    label=kernel.name,
                    layout=device.create_pipeline_layout(bind_group_layouts=[layout]),
                    compute={
                        "module": device.create_shader_module(label=kernel.name, code=source),
                        "entry_point": "main",
                    },
                )
            except wgpu.GPUError as err:
                raise KernelCompileError(_explain(kernel, rendered, str(err))) from err
        return pipelines[source]


_EXCERPT = re.compile(r" *(?P<line>\d*) (?P<rest>(?P<bar>[│┌=]).*)")


def _explain(kernel: Kernel, rendered: Rendered, message: str) -> str:
    """A compiler's message, with places in the templates instead of those in the rendered source."""
    message = re.sub(
        r"\AValidation Error\s+Caused by:\s+In \w+(, label = '[^']*')?\s+", "", message
    )
    message = re.sub(r"\AShader ('[^']*' parsing|validation) error: ", "", message)
    # what the excerpt's notes say comes once more behind it
    head, *excerpt = message.partition("\n\n\n")[0].rstrip().split("\n")
    where = f"shaders/{kernel.name}.wgsl"
    lines: list[tuple[str, str]] = []  # what stands left and right of the excerpt's bar
    for line in excerpt:
        match = _EXCERPT.fullmatch(line)
        margin, text = ("", match["rest"]) if match else ("", line)
        if match and match["line"]:
            code = text[2:]
            indent = len(code) - len(code.lstrip())
            margin = rendered.place(int(match["line"]), indent + 1).rpartition(":")[0]
        elif match and (place := re.fullmatch(r"┌─ .*:(\d+):(\d+)", text)):
            found = rendered.place(int(place[1]), int(place[2]))
            where = where if lines else found
            text = f"┌─ {found}"
        lines.append((margin, text))
    width = max((len(margin) for margin, _ in lines), default=0)
    told = [f"{margin:>{width}} {text}".rstrip() for margin, text in lines]
    return "\n".join([f"{where}: {kernel.name} does not compile: {head}", *told])


def _record(compute: Any, work: Iterable[Item]) -> None:
    """Record (pipeline, bind group, grid) after another in a compute pass.

    By the C functions that wgpu-py's methods wrap: a third of their time, and a step has hundreds.
    What is wrong with a dispatch is reported when the commands are finished.
    """
    lib, null = wgpu.backends.wgpu_native.lib, wgpu.backends.wgpu_native.ffi.NULL
    set_pipeline = lib.wgpuComputePassEncoderSetPipeline
    set_bind_group = lib.wgpuComputePassEncoderSetBindGroup
    dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
    handle, last = compute._internal, None
    for pipeline, group, x, y, z in work:
        if pipeline is not last:
            set_pipeline(handle, pipeline._internal)
            last = pipeline
        set_bind_group(handle, 0, group._internal, 0, null)
        dispatch(handle, x, y, z)


def _record_pass(commands: Any, work: Sequence[Item]) -> None:
    compute = commands.begin_compute_pass()
    _record(compute, work)
    compute.end()


@dataclass(frozen=True)
class Timing:
    """GPU time of one dispatch, in seconds."""

    dispatch: Dispatch
    seconds: float


class Encoder:
    """Owns the buffers and bind groups of one plan; made once, stepped many times.

    Parameters
    ----------
    share_memory   give activations with disjoint lifetimes one buffer; tests switch it off to
                   read any tensor afterwards
    """

    def __init__(self, buffers: Buffers, plan: Plan, share_memory: bool = True) -> None:
        self.buffers, self.plan, self.device = buffers, plan, buffers.device
        self.memory = plan.memory(share_memory)
        roots = {t.root for d in plan.dispatches for t in d.tensors.values()}
        self._activations = buffers.activations(
            {
                self.memory.place[r]: self.memory.buffers[self.memory.place[r]]
                for r in roots
                if r.kind == "activation"
            }
        )
        for tensor, values in plan.constants.items():
            buffers.write(tensor, np.array(values, np.uint32))
        self.program = self.compile()
        self._captures: dict[Dispatch, list[tuple[Any, ...]]] = {}
        grads = [p.grads for p in plan.layout.trained_pages if p.grads in roots]
        self._clear_first = [*grads, *plan.clear_first]

    def buffer(self, tensor: Tensor) -> Any:
        root = tensor.root
        if root.kind == "activation":
            return self._activations[self.memory.place[root]]
        return self.buffers.named(root)

    def compile(self) -> Program:
        """The dispatches by section, by the templates in use; assign it to `program` to run by it.

        Raises TemplateError, KernelCompileError.
        """
        return {
            section: [self._compile(d) for d in dispatches]
            for section, dispatches in self.plan.sections.items()
        }

    def _compile(self, d: Dispatch) -> Item:
        layout = self.buffers.layout(d.kernel, tuple(d.tensors))
        pipeline = self.buffers.pipeline(d.kernel, d.render(), layout)
        group = self.device.wgpu.create_bind_group(
            label=d.kernel.name,
            layout=layout,
            entries=[
                {
                    "binding": i,
                    "resource": {
                        "buffer": self.buffer(t),
                        "offset": t.first_byte,
                        "size": t.nbytes,
                    },
                }
                for i, t in enumerate(d.tensors.values())
            ],
        )
        return (pipeline, group, *d.grid)

    def write(self, tensor: Tensor, array: Array) -> None:
        self.buffers.write_buffer(self.buffer(tensor), tensor, array)

    def read(self, tensor: Tensor) -> Array:
        """Copy a tensor back. Waits for the GPU."""
        return self.buffers.read_buffer(self.buffer(tensor), tensor)

    def poison(self) -> None:
        """Fill all activations with bits that are NaN in f32 and f16: a read of unwritten memory
        then shows."""
        for buffer in self._activations.values():
            nan = np.full(min(int(buffer.size), _UPLOAD_CHUNK) // 4, 0x7FC07FC0, np.uint32)
            for start in range(0, int(buffer.size), _UPLOAD_CHUNK):
                count = min(_UPLOAD_CHUNK, int(buffer.size) - start) // 4
                self.device.wgpu.queue.write_buffer(buffer, start, nan[:count])

    def run(self, *sections: str, clear_grads: bool = True) -> None:
        """Encode and submit whole sections, in order. Returns before the GPU is done.

        clear_grads   see `encode`
        """
        self.submit(self.encode(*sections, clear_grads=clear_grads))

    def encode(self, *sections: str, clear_grads: bool = True) -> Any:
        """Whole sections, in order, as commands for `submit`.

        clear_grads   start the sums of parameters' gradients and of the loss anew, where "forward"
                      is among the sections
        """
        commands = self.device.wgpu.create_command_encoder()
        if clear_grads and "forward" in sections:
            for tensor in self._clear_first:
                commands.clear_buffer(self.buffers.named(tensor))
        items = [item for section in sections for item in self.program[section]]
        start = 0
        if self._captures:
            for i, d in enumerate(d for section in sections for d in self.plan.sections[section]):
                if copies := self._captures.pop(d, None):
                    _record_pass(commands, items[start:i])
                    for copy in copies:
                        commands.copy_buffer_to_buffer(*copy)
                    start = i
        _record_pass(commands, items[start:])
        return self.device.guard(commands.finish)

    def capture(self, dispatch: Dispatch, to: Encoder, tensors: Mapping[str, Tensor]) -> None:
        """Copy what a dispatch binds, just before it runs the next time, to another encoder's tensors.

        tensors   by binding; of the shapes that the dispatch binds
        """
        copies = self._captures.setdefault(dispatch, [])
        for name, tensor in tensors.items():
            bound = dispatch.tensors[name]
            source, target = self.buffer(bound), to.buffer(tensor)
            copies.append((source, bound.first_byte, target, tensor.first_byte, bound.nbytes))

    def cancel_captures(self) -> None:
        """Forget the captures that have not happened."""
        self._captures.clear()

    def walk(self, *sections: str, clear_grads: bool = True) -> Iterator[Dispatch]:
        """Run sections a dispatch at a time, and yield each after it: to see what it left behind.

        clear_grads   see `encode`
        """
        if clear_grads and "forward" in sections:
            self.buffers.clear(*self._clear_first)
        for section in sections:
            for d, item in zip(self.plan.sections[section], self.program[section], strict=True):
                commands = self.device.wgpu.create_command_encoder()
                _record_pass(commands, [item])
                self.submit(self.device.guard(commands.finish))
                yield d

    def submit(self, commands: Any) -> None:
        """Hand encoded commands to the GPU, once. Returns before it is done."""
        self.buffers.submits += 1
        self.device.guard(lambda: self.device.wgpu.queue.submit([commands]))

    def time(self, *sections: str, repeats: int = 1) -> list[Timing]:
        """GPU time of each dispatch, the median over repeats. Needs timestamp queries.

        Every dispatch gets a compute pass of its own, so that the sum is a little more than a
        step takes. Nothing is waited for between repeats: a GPU that waits lowers its clock.
        """
        if "timestamp-query" not in self.device.target.features:
            raise DeviceError(f"{self.device.name} has no timestamp queries")
        work = [
            (d, item)
            for section in sections
            for d, item in zip(self.plan.sections[section], self.program[section], strict=True)
        ]
        # a query set holds 4,096 queries
        parts = [work[first : first + 2048] for first in range(0, len(work), 2048)]
        submitted = [[self._submit_timed(part) for part in parts] for _ in range(repeats)]
        samples = [[s for ticks in row for s in self._seconds(ticks)] for row in submitted]
        medians = np.median(np.array(samples), axis=0)
        return [Timing(d, float(s)) for (d, _), s in zip(work, medians, strict=True)]

    def _submit_timed(self, work: Sequence[tuple[Dispatch, Any]]) -> Any:
        """The buffer that gets the ticks at which each dispatch begins and ends."""
        device, count = self.device.wgpu, 2 * len(work)
        queries = device.create_query_set(type="timestamp", count=count)
        usage = wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
        resolved = device.create_buffer(size=8 * count, usage=usage)
        commands = device.create_command_encoder()
        for i, (_, item) in enumerate(work):
            compute = commands.begin_compute_pass(
                timestamp_writes={
                    "query_set": queries,
                    "beginning_of_pass_write_index": 2 * i,
                    "end_of_pass_write_index": 2 * i + 1,
                }
            )
            _record(compute, [item])
            compute.end()
        commands.resolve_query_set(queries, 0, count, resolved, 0)
        device.queue.submit([commands.finish()])
        return resolved

    def _seconds(self, resolved: Any) -> list[float]:
        ticks = np.frombuffer(self.device.wgpu.queue.read_buffer(resolved), np.uint64)
        period = self.device.timestamp_period
        begins, ends = ticks.astype(np.int64).reshape(-1, 2).T
        return [float(span) * period * 1e-9 for span in ends - begins]
