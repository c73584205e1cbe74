"""A plan: the ordered dispatches of one training step, as plain data. Touches no GPU.

`Layout` places parameters in flat buffers, `Plan` records dispatches and the tape of backward
passes, `Memory` assigns activations with disjoint lifetimes to shared buffers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import DeviceError, ShapeError
from .kernel import (
    ITEMSIZE,
    MAX_ELEMENTS,
    PORTABLE,
    DType,
    Grid,
    Kernel,
    Rendered,
    Target,
    Templates,
    Tensor,
    ceil_div,
    round_up,
)

BLOCK = 1024  # elements: parameters start at multiples of it in the flat buffers


@dataclass(frozen=True)
class ParamSpec:
    """A parameter of a model: its checkpoint name, shape, and how it is trained.

    dtype   how it is stored: f16 and i8, with a factor for each row, only where it is frozen
    """

    name: str
    shape: tuple[int, ...]
    decay: bool = True
    trainable: bool = True
    dtype: DType = "f32"


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a weight (rows, ...), the last axes folded: scale B A.

    a       name of A (rank, columns)
    b       name of B (rows, rank)
    """

    a: str
    b: str
    scale: float


@dataclass(frozen=True)
class Adapter:
    """A `LowRank` whose tensors have their places, of a weight or of a piece of one: b (rows of
    the piece, rank)."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass
class Run:
    """Neighbouring parameters that this process updates: elements of a page.

    first   in the flat buffers of parameters and gradients
    moment  in those of moments
    """

    first: int
    moment: int
    size: int


@dataclass(eq=False)
class Page:
    """One flat buffer of parameters, with gradients at the same offsets.

    m, v    moments of the parameters that this process updates, and of no others
    runs    where these lie
    decay   for each BLOCK of elements, 1 where weight decay applies
    """

    params: Tensor
    grads: Tensor
    m: Tensor
    v: Tensor
    trainable: bool
    runs: list[Run] = field(default_factory=list)
    decay: list[int] = field(default_factory=list)


class Layout:
    """Where every parameter lies: pages no larger than one binding of the target.

    adapters   what is added to weights, by their names; its parameters are among the specs.
               As an attribute: by the weights' pieces
    shard      (index, count): of the trained parameters, in order, those whose number modulo
               count is index have moments and are updated here; by default all

    A parameter that alone exceeds a binding is split by rows into pieces, and the B of an adapter
    at the same rows as its weight. Every parameter starts at a multiple of BLOCK, so that the
    gradient norm, which is summed by blocks, has the same bits however the pages fall.

    scales     by piece that is stored as i8: the factors (rows,) of its rows
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        target: Target = PORTABLE,
        adapters: Mapping[str, LowRank] | None = None,
        shard: tuple[int, int] | None = None,
    ) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.pages: list[Page] = []
        self.pieces: dict[str, list[tuple[int, Tensor]]] = {}
        self.shard = shard
        trained = [spec.name for spec in specs if spec.trainable]
        self.owned = trained[shard[0] :: shard[1]] if shard else trained
        self.scales: dict[Tensor, Tensor] = {}
        self._grads: dict[Tensor, Tensor] = {}
        self._moments: dict[Tensor, int] = {}
        self._limits: dict[DType, int] = {  # elements of a page
            dtype: target.usable_binding // itemsize // BLOCK * BLOCK
            for dtype, itemsize in ITEMSIZE.items()
        }
        rows = {spec.name: _rows(spec, self._limits[spec.dtype]) for spec in specs}
        for weight, low in (adapters or {}).items():
            rows[weight] = rows[low.b] = min(rows[weight], rows[low.b])
        for trainable in (True, False):
            for spec in specs:
                if spec.trainable == trainable:
                    self.pieces[spec.name] = list(self._pieces_of(spec, rows[spec.name]))
        self.adapters = {
            piece: Adapter(self.param(low.a), b, low.scale)
            for weight, low in (adapters or {}).items()
            for (_, piece), (_, b) in zip(self.pieces[weight], self.pieces[low.b], strict=True)
        }

    def _pieces_of(self, spec: ParamSpec, rows: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, piece) of a parameter of which a piece has at most `rows` rows."""
        for first in range(0, spec.shape[0], rows):
            shape = (min(rows, spec.shape[0] - first), *spec.shape[1:])
            piece = self._place(spec, spec.name, shape, spec.dtype)
            if spec.dtype == "i8":
                self.scales[piece] = self._place(spec, f"{spec.name}.scale", shape[:1], "f32")
            yield first, piece

    def _place(self, spec: ParamSpec, name: str, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """A new tensor at the end of the last page of its kind, or of a new one."""
        size = round_up(Tensor("", shape).size, BLOCK)
        alike = [p for p in self.pages if p.trainable == spec.trainable and p.params.dtype == dtype]
        page = alike[-1] if alike else None
        if page is None or page.params.size + size > self._limits[dtype]:
            page = self._page(spec.trainable, dtype, len(alike))
        piece = Tensor(name, shape, dtype, "param", page.params, page.params.size)
        self._grads[piece] = Tensor(f"d{name}", shape, "f32", "grad", page.grads, piece.offset)
        page.decay += [int(spec.decay)] * (size // BLOCK)
        for flat in (page.params, page.grads):
            flat.shape = (flat.size + size,)
        if spec.name in self.owned:
            self._own(page, piece, size)
        return piece

    def _page(self, trainable: bool, dtype: DType, i: int) -> Page:
        if trainable and dtype != "f32":
            raise ShapeError(f"a parameter that trains is stored as f32, not as {dtype}")
        name = "params" if trainable else "frozen" if dtype == "f32" else f"frozen_{dtype}"
        params = Tensor(f"{name}.{i}", (0,), dtype, "param")
        grads = Tensor(f"grads.{i}", (0,), kind="grad")
        m, v = (Tensor(f"{n}.{i}", (0,), kind="moment") for n in "mv")
        self.pages.append(Page(params, grads, m, v, trainable))
        return self.pages[-1]

    def _own(self, page: Page, piece: Tensor, size: int) -> None:
        """Give a piece moments, at the end of its page's."""
        self._moments[piece] = page.m.size
        last = page.runs[-1] if page.runs else None
        if last and last.first + last.size == piece.offset:
            last.size += size
        else:
            page.runs.append(Run(piece.offset, page.m.size, size))
        for flat in (page.m, page.v):
            flat.shape = (flat.size + size,)

    @property
    def trained_pages(self) -> list[Page]:
        return [p for p in self.pages if p.trainable]

    def param(self, name: str) -> Tensor:
        """The parameter as one tensor. Raises ShapeError where it had to be split."""
        if len(self.pieces[name]) > 1:
            shape = self.specs[name].shape
            raise ShapeError(
                f"{name} {shape} does not fit one storage binding of this adapter: "
                "only embeddings and heads may be split"
            )
        return self.pieces[name][0][1]

    def grad(self, piece: Tensor) -> Tensor | None:
        """The gradient of a parameter, or of a piece of one; None where it is frozen."""
        page = piece.root
        return None if page.name.startswith("frozen") else self._grads[piece]

    def moments(self, piece: Tensor) -> tuple[Tensor, Tensor]:
        """m and v of a parameter that is updated here, or of a piece of one."""
        page = next(p for p in self.pages if p.params is piece.root)
        start = self._moments[piece]
        m, v = (
            Tensor(f"{n}.{piece.name}", piece.shape, kind="moment", base=flat, offset=start)
            for n, flat in (("m", page.m), ("v", page.v))
        )
        return m, v

    def set_decay(self, decays: Callable[[str], bool]) -> None:
        """Choose by name which parameters weight decay applies to."""
        self.specs = {n: replace(spec, decay=decays(n)) for n, spec in self.specs.items()}
        for name, pieces in self.pieces.items():
            for _, piece in pieces:
                page = next(p for p in self.pages if p.params is piece.root)
                first, count = piece.offset // BLOCK, ceil_div(piece.size, BLOCK)
                page.decay[first : first + count] = [int(self.specs[name].decay)] * count

    @property
    def n_params(self) -> int:
        """Number of parameters, padding not counted."""
        return sum(Tensor("", s.shape).size for s in self.specs.values())

    @property
    def n_trainable(self) -> int:
        return sum(Tensor("", s.shape).size for s in self.specs.values() if s.trainable)

    @property
    def stored_bytes(self) -> tuple[int, int]:
        """Bytes of what is stored as f16 or i8, factors included, and as f32 it would take."""
        pieces = [p for of in self.pieces.values() for _, p in of if p.dtype != "f32"]
        factors = sum(scale.nbytes for scale in self.scales.values())
        return sum(p.nbytes for p in pieces) + factors, sum(4 * p.size for p in pieces)

    @property
    def n_owned(self) -> int:
        """Number of parameters that have moments."""
        return sum(Tensor("", self.specs[name].shape).size for name in self.owned)


def _rows(spec: ParamSpec, limit: int) -> int:
    """The most rows of a parameter that a piece of at most `limit` elements holds."""
    whole = Tensor(spec.name, spec.shape)
    if whole.size > MAX_ELEMENTS:
        raise ShapeError(
            f"{spec.name} {spec.shape} has {whole.size:,} elements, more than {MAX_ELEMENTS:,}"
        )
    if round_up(whole.size, BLOCK) <= limit:
        return spec.shape[0]
    row, itemsize = whole.size // spec.shape[0], ITEMSIZE[spec.dtype]
    rows = limit // row
    if rows < 1:
        raise ShapeError(
            f"{spec.name} {spec.shape}: a row of {itemsize * row:,} bytes exceeds this adapter's "
            f"storage binding of {itemsize * limit:,} bytes"
        )
    if rows > BLOCK:
        rows = rows // BLOCK * BLOCK
    while round_up(rows * row, BLOCK) > limit:
        rows -= 1
    return rows


@dataclass(frozen=True, eq=False)
class Dispatch:
    """One kernel, with the tensors it binds and the values its source is rendered with."""

    kernel: Kernel
    label: str
    dims: dict[str, int]
    values: dict[str, Any]
    tensors: dict[str, Tensor]
    accumulate: frozenset[str]
    grid: Grid

    def render(self) -> Rendered:
        """Its source, by the templates in use."""
        return _render(
            self.kernel,
            self.kernel.templates,
            tuple(self.dims.items()),
            tuple(self.values.items()),
            tuple(self.tensors),
            self.accumulate,
        )

    @property
    def options(self) -> dict[str, Any]:
        return {name: self.values[name] for name in self.kernel.options}

    @property
    def key(self) -> str:
        """What tables of tuned choices call it."""
        return self.kernel.key(self.dims, self.options)

    def bound(self, *uses: str) -> Iterator[tuple[str, Tensor]]:
        """(binding, tensor) of the bindings that are used so: reads, writes, adds."""
        for name, tensor in self.tensors.items():
            if self.kernel.bindings[name][1] in uses:
                yield name, tensor

    @property
    def flops(self) -> int:
        return self.kernel.flops(self.values)

    @property
    def nbytes(self) -> int:
        """Bytes that must move through memory."""
        if self.kernel.traffic:
            return self.kernel.traffic(self.values)
        return sum(t.nbytes * (1 + (n in self.accumulate)) for n, t in self.tensors.items())

    def __str__(self) -> str:
        dims = " ".join(f"{k}={v}" for k, v in self.dims.items())
        grid = "x".join(map(str, self.grid))
        return (
            f"{self.label:34} {self.kernel.name:28} grid {grid:14} "
            f"{self.nbytes / 1e6:10.3f} MB {self.flops / 1e6:12.3f} MFLOP  {dims}"
        )


@functools.lru_cache(maxsize=4096)
def _render(
    kernel: Kernel,
    templates: Templates,  # by which it renders: a part of the cache's key
    dims: tuple[tuple[str, int], ...],
    values: tuple[tuple[str, Any], ...],
    bound: tuple[str, ...],
    accumulate: frozenset[str],
) -> Rendered:
    return kernel.render(dict(dims), dict(values), bound, accumulate)


class Plan:
    """Records dispatches as ops are called, and each op's backward for later.

    The backward walk is micrograd's: run what was taped, last first. Backward kernels add into
    parameters' gradients, which the encoder clears at the start of a step; an activation's
    gradient is overwritten by its first contribution and added into by the others, so that it
    needs no clearing.

    storage   dtype of the wide activations that models keep for the backward pass: f32, or f16
              where the target has shader-f16
    """

    def __init__(
        self,
        layout: Layout,
        target: Target = PORTABLE,
        training: bool = True,
        storage: DType = "f32",
    ) -> None:
        self.layout, self.target, self.training = layout, target, training
        self.storage = storage
        self.sections: dict[str, list[Dispatch]] = {"forward": [], "backward": [], "update": []}
        self.section = "forward"  # where dispatch() appends
        self.constants: dict[Tensor, Sequence[int]] = {}  # persistent tensors filled once
        self.clear_first: list[Tensor] = []  # persistent tensors cleared with the gradients
        self.keep: list[Tensor] = []  # activations that the host reads after a run
        self.partials: list[tuple[Tensor, Tensor]] = []  # see ops/sum_partials.py
        self._scope: tuple[str, ...] = ()
        self._names: dict[str, Tensor] = {}
        self._alias: dict[Tensor, Tensor] = {}
        self._grads: dict[Tensor, Tensor] = {}
        self._written: dict[Tensor, list[tuple[int, int]]] = {}
        self._tape: list[tuple[tuple[str, ...], Callable[[], None]]] = []

    # -- tensors ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of tensors and dispatches planned inside."""
        outer = self._scope
        self._scope = (*outer, name)
        try:
            yield
        finally:
            self._scope = outer

    def tensor(self, name: str, shape: tuple[int, ...], dtype: DType = "f32") -> Tensor:
        """A new activation; its name gets the scope's prefix, and a number where it is taken."""
        full = ".".join((*self._scope, name))
        unique, n = full, 1
        while unique in self._names:
            unique, n = f"{full}.{n}", n + 1
        return self._new(Tensor(unique, shape, dtype))

    def persistent(self, name: str, shape: tuple[int, ...], dtype: DType = "f32") -> Tensor:
        """A tensor that keeps its contents between steps, shared by name between plans."""
        return self._new(Tensor(name, shape, dtype, kind="persistent"))

    def constant(self, name: str, values: Sequence[int]) -> Tensor:
        """A persistent u32 tensor that the encoder fills once."""
        tensor = self.persistent(name, (len(values),), "u32")
        self.constants[tensor] = values
        return tensor

    def _new(self, tensor: Tensor) -> Tensor:
        if tensor.name in self._names:
            raise ShapeError(f"tensor {tensor.name} is planned twice")
        if tensor.size > MAX_ELEMENTS:
            raise ShapeError(
                f"{tensor.name} {tensor.shape} has {tensor.size:,} elements, "
                f"more than {MAX_ELEMENTS:,}"
            )
        self._names[tensor.name] = tensor
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name, as planned."""
        return self._names[name]

    def param(self, name: str) -> Tensor:
        return self.layout.param(name)

    def grad(self, of: Tensor) -> Tensor:
        """The gradient of an activation, stored like it; made at the first call."""
        while of in self._alias:
            of = self._alias[of]
        if of not in self._grads:
            self._grads[of] = self._new(Tensor(f"d{of.name}", of.shape, of.dtype))
        return self._grads[of]

    def weight_grad(self, weight: Tensor) -> Tensor | None:
        """The gradient of a parameter, None where it is frozen, or of a weight that is computed."""
        return self.layout.grad(weight) if weight.root.kind == "param" else self.grad(weight)

    def set_grad(self, of: Tensor, grad: Tensor) -> None:
        """Let an activation have this tensor, of its shape, as its gradient, before its first use."""
        if of in self._grads or of in self._alias or grad.shape != of.shape:
            raise ShapeError(f"{grad.name} {grad.shape} cannot be the gradient of {of.name}")
        self._grads[of] = grad

    def share_grad(self, of: Tensor, like: Tensor) -> None:
        """Let `of` have the gradient tensor of `like`: for out = like + f(like), residuals."""
        self._alias[of] = like

    # -- dispatches ------------------------------------------------------------------------

    def dispatch(self, kernel: Kernel, **bindings_and_options: Any) -> None:
        """Append one dispatch: tensors by binding name (None: left out), options by name.

        Raises ShapeError at once where a tensor does not fit, exceeds the target's binding, or
        is read before anything wrote it.
        """
        options = {k: v for k, v in bindings_and_options.items() if k in kernel.options}
        given = {
            k: v for k, v in bindings_and_options.items() if k not in options and v is not None
        }
        dims = kernel.match({name: t.shape for name, t in given.items()})
        tensors = {name: given[name] for name in kernel.bindings if name in given}
        half = frozenset(n for n, t in tensors.items() if n in kernel.half and t.dtype == "f16")
        values = kernel.values(self.target, dims, options, half)
        accumulate = set()
        for name, tensor in tensors.items():
            use = kernel.bindings[name][1]
            span = (tensor.start, tensor.start + tensor.size)
            written = self._written.setdefault(tensor.root, [])
            if use == "reads" and tensor.root.kind == "activation" and not _overlaps(span, written):
                raise ShapeError(f"{kernel.name} reads {tensor.name}, which nothing has written")
            if use == "adds" and (tensor.root.kind != "activation" or _overlaps(span, written)):
                accumulate.add(name)
        for name, tensor in tensors.items():
            if kernel.bindings[name][1] != "reads":
                self._written[tensor.root].append((tensor.start, tensor.start + tensor.size))
        label = ".".join(self._scope)
        d = Dispatch(
            kernel, label, dims, values, tensors, frozenset(accumulate), kernel.grid(values)
        )
        self._check(d)
        self.sections[self.section].append(d)

    def _check(self, d: Dispatch) -> None:
        """The rules of WebGPU and the limits of the target, for one dispatch."""
        name, target = d.kernel.name, self.target
        if d.values["half"] and "shader-f16" not in target.features:
            raise DeviceError(
                "storing activations as f16 needs the feature shader-f16, which this adapter does "
                "not have: use precision f32"
            )
        if len(d.tensors) > target.max_storage_buffers:
            raise ShapeError(
                f"{name} binds {len(d.tensors)} buffers, the adapter allows "
                f"{target.max_storage_buffers}"
            )
        for binding, t in d.tensors.items():
            if t.dtype != (dtype := d.kernel.dtype(binding, d.values)):
                raise ShapeError(f"{name}: {binding} holds {dtype}, {t.name} is {t.dtype}")
            if t.nbytes > target.usable_binding:
                raise DeviceError(
                    f"{name}: {binding} {t.shape} takes {t.nbytes:,} bytes, this adapter binds at "
                    f"most {target.usable_binding:,}. Use a smaller batch or sequence length "
                    "(and more gradient accumulation)."
                )
        if max(d.grid) > target.max_workgroups:
            raise DeviceError(f"{name}: grid {d.grid} exceeds {target.max_workgroups} workgroups")
        if d.values.get("workgroup", 1) > target.max_invocations:
            raise DeviceError(
                f"{name}: {d.values['workgroup']} invocations a workgroup, the adapter allows "
                f"{target.max_invocations}"
            )
        reads = [t for _, t in d.bound("reads")]
        changes = [t for _, t in d.bound("writes", "adds")]
        for i, t in enumerate(changes):
            if any(r.root is t.root for r in reads):
                raise ShapeError(f"{name} reads and writes {t.root.name} in one dispatch")
            for other in changes[:i]:
                span = (other.start, other.start + other.size)
                if other.root is t.root and _overlaps((t.start, t.start + t.size), [span]):
                    raise ShapeError(f"{name} writes {t.name} and {other.name}, which overlap")

    # -- backward --------------------------------------------------------------------------

    def tape(self, backward: Callable[[], None]) -> None:
        """Have `backward` plan this op's backward pass, in today's scope, when the tape unwinds."""
        if self.training:
            self._tape.append((self._scope, backward))

    def backward(self) -> None:
        """Plan the backward pass: what was taped, last first."""
        self.section = "backward"
        self._unwind()

    def _unwind(self) -> None:
        outer = self._scope
        while self._tape:
            self._scope, backward = self._tape.pop()
            backward()
        self._scope = outer

    def checkpoint(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Plan block(x), keeping only x: the backward pass plans the block's forward again."""
        if not self.training:
            return block(x)
        outer, self._tape = self._tape, []
        out = block(x)
        self._tape = outer

        def backward() -> None:
            outer, self._tape = self._tape, []
            with self.scope("replay"):
                again = block(x)
            if self.grad(again) is not self.grad(out):
                raise ShapeError("a checkpointed block must end in a residual addition")
            self._unwind()
            self._tape = outer

        self.tape(backward)
        return out

    def prune(self) -> None:
        """Drop dispatches that only write activations which nobody reads afterwards."""
        needed = {t.root for t in self.keep}
        for dispatches in reversed(list(self.sections.values())):
            for d in reversed(dispatches[:]):
                changed = [t.root for _, t in d.bound("writes", "adds")]
                if any(t.kind != "activation" or t in needed for t in changed):
                    needed |= {t.root for _, t in d.bound("reads")} | set(changed)
                else:
                    dispatches.remove(d)

    def check_adapters(self) -> None:
        """Raises ShapeError where an adapter of the layout acts nowhere."""
        read = {t for d in self.dispatches for _, t in d.bound("reads")}
        for piece, adapter in self.layout.adapters.items():
            if not {adapter.a, adapter.b} <= read:
                raise ShapeError(f"the adapter of {piece.name} acts on nothing that is planned")

    # -- views of the whole ----------------------------------------------------------------

    @property
    def dispatches(self) -> list[Dispatch]:
        return [d for section in self.sections.values() for d in section]

    def memory(self, share: bool = True) -> Memory:
        return Memory(self.dispatches, share, self.keep)

    def __str__(self) -> str:
        lines = []
        for section, dispatches in self.sections.items():
            lines.append(f"{section}: {len(dispatches)} dispatches")
            lines += [f"  {d}" for d in dispatches]
        return "\n".join(lines)


def _overlaps(span: tuple[int, int], others: Iterable[tuple[int, int]]) -> bool:
    return any(span[0] < stop and start < span[1] for start, stop in others)


class Memory:
    """Buffers for all tensors of a plan: {buffer name: bytes}, and which buffer a root is in.

    Activations with disjoint lifetimes share a buffer; ones alive at the same time never do,
    because WebGPU forbids binding one buffer read-only and read-write in a dispatch. Largest
    first, each into the smallest buffer that is free over its lifetime ("greedy by size",
    Pisarchyk & Lee 2020).
    """

    def __init__(
        self, dispatches: Sequence[Dispatch], share: bool = True, keep: Sequence[Tensor] = ()
    ) -> None:
        self.buffers: dict[str, int] = {}
        self.place: dict[Tensor, str] = {}
        lives: dict[Tensor, tuple[int, int]] = {}
        for i, d in enumerate(dispatches):
            for tensor in d.tensors.values():
                root = tensor.root
                lives[root] = (lives.get(root, (i, i))[0], i)
        for tensor in keep:
            lives[tensor.root] = (lives[tensor.root][0], len(dispatches))
        slots: list[tuple[str, list[tuple[int, int]]]] = []
        for root in sorted(lives, key=lambda t: -t.nbytes):
            first, last = lives[root]
            if root.kind != "activation" or not share:
                self.place[root] = root.name
                self.buffers[root.name] = round_up(root.nbytes, 256)
                continue
            for name, taken in reversed(slots):  # noqa: B007 - smallest first; used below
                if not _overlaps((first, last + 1), taken):
                    break
            else:
                name, taken = f"activations.{len(slots)}", []
                slots.append((name, taken))
                self.buffers[name] = round_up(root.nbytes, 256)
            taken.append((first, last + 1))
            self.place[root] = name
        self._kinds = {self.place[root]: root.kind for root in lives}

    def by_kind(self) -> dict[str, int]:
        """Bytes by what they hold: parameters, gradients, moments, activations, persistent."""
        names = {"param": "parameters", "grad": "gradients", "moment": "moments"}
        names |= {"activation": "activations", "persistent": "state"}
        totals = dict.fromkeys(names.values(), 0)
        for buffer, nbytes in self.buffers.items():
            totals[names[self._kinds[buffer]]] += nbytes
        return totals

    @property
    def total(self) -> int:
        """Bytes of all buffers."""
        return sum(self.buffers.values())

    def require(self, budget: int | None) -> None:
        """Raises DeviceError with the number of bytes missing where the budget does not hold."""
        if budget is not None and self.total > budget:
            kinds = ", ".join(f"{k} {n:,}" for k, n in self.by_kind().items())
            raise DeviceError(
                f"the plan needs {self.total:,} bytes ({kinds}), the memory budget is {budget:,}: "
                f"{self.total - budget:,} bytes are missing. Use a smaller batch or sequence "
                "length, or activation checkpointing."
            )


__all__ = [
    "BLOCK",
    "Adapter",
    "Dispatch",
    "Layout",
    "LowRank",
    "Memory",
    "Page",
    "ParamSpec",
    "Plan",
    "Run",
    "ceil_div",
]
