"""A kernel: one compute dispatch, declared once, rendered from shaders/<name>.wgsl.

Also the two descriptions of memory and machine that everything above is written in terms of:
`Tensor` (a named array) and `Target` (what a plan may assume of an adapter). Touches no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jinja2
from jinja2.ext import Extension

from .errors import ShapeError, TemplateError

_here = Path(__file__).parent
SHADER_DIR = next(p for p in (_here / "shaders", _here.parent / "shaders") if p.is_dir())

ALIGN = 64  # elements: WebGPU binds storage at multiples of 256 bytes
MAX_ELEMENTS = 2**31 - 1  # shaders index with u32, and some drivers with i32

DType = Literal["f32", "u32", "f16", "i8"]
ITEMSIZE: dict[DType, int] = {"f32": 4, "u32": 4, "f16": 2, "i8": 1}  # bytes of an element
Grid = tuple[int, int, int]
Values = Mapping[str, Any]  # dims, options and choices of one dispatch, by name

KERNELS: dict[str, Kernel] = {}  # filled by declaring a Kernel; read by tests and tools


@dataclass(frozen=True)
class Target:
    """What a plan may assume of the adapter it will run on. Sizes in bytes.

    kind       which column of the tables of tuning choices applies
    lanes      invocations of a subgroup, where a CPU adapter's are known and usable; else 1
    tuned      choices measured for this adapter, by `Kernel.key`; they override the tables
    """

    kind: Literal["portable", "cpu", "integrated", "discrete"] = "portable"
    max_storage_buffers: int = 8
    max_binding: int = 128 << 20
    max_buffer: int = 256 << 20
    max_invocations: int = 256
    max_workgroup_memory: int = 16384
    max_workgroups: int = 65535
    features: frozenset[str] = frozenset()
    lanes: int = 1
    tuned: Mapping[str, Values] = field(default_factory=dict, compare=False)

    @property
    def usable_binding(self) -> int:
        """Bytes one binding may have: no single reported limit can be trusted alone."""
        return min(self.max_binding, self.max_buffer) // 256 * 256


PORTABLE = Target()


@dataclass(eq=False)
class Tensor:
    """A named array that a plan needs. Describes memory; owns none.

    dtype     f16 and i8 are forms of storage: shaders compute in f32. Parameters of these are read
              as words of 32 bits, little end first; activations of f16 as such
    kind      activation: lives from its first write to its last read in a step, so that memory
              is shared; persistent: keeps its contents between steps; param, grad, moment: a
              part of the flat buffers
    base      the tensor this one is a view of, or None
    offset    elements from the start of `base`
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType = "f32"
    kind: Literal["activation", "persistent", "param", "grad", "moment"] = "activation"
    base: Tensor | None = None
    offset: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes, in whole words of 32 bits."""
        return round_up(ITEMSIZE[self.dtype] * self.size, 4)

    @property
    def root(self) -> Tensor:
        """The tensor whose memory this one lies in."""
        return self.base.root if self.base else self

    @property
    def start(self) -> int:
        """Elements from the start of `root`."""
        return self.offset + (self.base.start if self.base else 0)

    @property
    def first_byte(self) -> int:
        """Bytes from the start of `root`."""
        return ITEMSIZE[self.dtype] * self.start

    def view(self, offset: int, shape: tuple[int, ...], name: str = "") -> Tensor:
        """Elements from `offset` on, with a shape of their own. Offsets are multiples of ALIGN
        words of 32 bits."""
        align = alignment(self.dtype)
        if offset % align:
            raise ShapeError(
                f"a view of {self.name} at element {offset}: not a multiple of {align}"
            )
        name = name or f"{self.name}[{offset}:]"
        return Tensor(name, shape, self.dtype, self.kind, base=self, offset=offset)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop of this tensor with all axes but the last folded: (stop-start, last)."""
        last = self.shape[-1]
        return self.view(start * last, (stop - start, last), f"{self.name}[{start}:{stop}]")


def alignment(dtype: DType) -> int:
    """Elements of which a tensor's views start at multiples."""
    return 4 * ALIGN // ITEMSIZE[dtype]


def ceil_div(a: int, b: int) -> int:
    """Least integer that is not below a / b."""
    return -(-a // b)


def divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most `limit`."""
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


def round_up(n: int, multiple: int) -> int:
    """Least multiple that is not below n."""
    return ceil_div(n, multiple) * multiple


def spread(groups: int) -> Grid:
    """A grid of at least `groups` workgroups, folded into y past 65,535 along x.

    The shader includes `include/group_index.wgsl` and leaves where its index is too large.
    """
    x = min(groups, 65535)
    return (x, ceil_div(groups, x), 1)


def itemsize(values: Values, binding: str) -> int:
    """Bytes of an element of an activation as a dispatch has it."""
    return ITEMSIZE["f16" if binding in values["half"] else "f32"]


def elementwise(count: Callable[[Values], int], per_group: int = 256) -> Callable[[Values], Grid]:
    """The grid for shaders that include each_element.wgsl, which loops past the cap."""
    return lambda v: (min(ceil_div(count(v), per_group), 4096), 1, 1)


def by_kind(
    portable: Mapping[str, int], **kinds: Mapping[str, int]
) -> Callable[[Target, Values], Values]:
    """Tuning choices from a table: the portable ones, overridden for a kind of adapter."""
    return lambda target, values: {**portable, **kinds.get(target.kind, {})}


# Of a GPU of each kind, as choices assume them
_MULTIPROCESSORS = {"portable": 16, "integrated": 16, "discrete": 132}


def multiprocessors(target: Target) -> int:
    """How many workgroups a GPU of this kind runs at once, where each fills a multiprocessor."""
    return _MULTIPROCESSORS[target.kind]


_DEFAULT_CHOICES = by_kind({"workgroup": 256})


def _f32(value: float) -> str:
    """A float as a WGSL literal."""
    if not math.isfinite(value):
        raise ValueError(f"{value} has no WGSL literal")
    return f"f32({float(value)!r})"


class _Marks(Extension):
    """Marks in templates where their text comes from, so that it is known of what they render.

    A mark stands before each piece of text of a line; one with "=" before each value, all of which
    comes from one place. Marks outlive loops, macros and includes.
    """

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        marked, line, column = [], 1, 1
        for _, kind, token in self.environment.lex(source, name, filename):
            for i, part in enumerate(token.split("\n")):
                if i:
                    marked.append("\n")
                    line, column = line + 1, 1
                if kind == "variable_begin":
                    marked.append(f"/*@{name}:{line}:{column}=*/")
                elif kind == "data" and part.strip():
                    marked.append(f"/*@{name}:{line}:{column}*/")
                marked.append(part)
                column += len(part)
        return "".join(marked)


_MARK = re.compile(r"/\*@([^*:]+):(\d+):(\d+)(=?)\*/")


Stamps = dict[str, tuple[int, int]]  # time of change in ns, and bytes


def stamps(folder: Path, pattern: str) -> Stamps:
    """Those of the files in a folder, by their paths in it."""
    found = {}
    for path in sorted(folder.rglob(pattern)):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found[path.relative_to(folder).as_posix()] = stat.st_mtime_ns, stat.st_size
    return found


class Templates:
    """The shader templates of a folder as they are now, however its files change later.

    The dialect is Jinja's, with {{ }} for values, {$ $} and $$ lines for statements, and strict
    about names.

    stamps   of the files; see `stamps`
    texts    by path in the folder, with "/"
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stamps = stamps(folder, "*.wgsl")
        self.texts: dict[str, str] = {}
        for name in self.stamps:
            with contextlib.suppress(OSError):  # an editor may just be replacing it
                self.texts[name] = (folder / name).read_text("utf-8", errors="replace")
        self._environment = jinja2.Environment(
            loader=jinja2.FunctionLoader(self._load),
            extensions=[_Marks],
            block_start_string="{$",
            block_end_string="$}",
            line_statement_prefix="$$",
            undefined=jinja2.StrictUndefined,
            keep_trailing_newline=True,
            autoescape=False,
        )
        self._environment.filters["f32"] = _f32
        self._environment.globals["ceil_div"] = ceil_div

    def _load(self, name: str) -> tuple[str, str, Callable[[], bool]] | None:
        return (self.texts[name], name, lambda: True) if name in self.texts else None

    def render(self, name: str, values: Values) -> str:
        """The template with its values, and marks of where everything comes from.

        Raises TemplateError with the file, line and column of whatever is wrong.
        """
        try:
            return self._environment.get_template(name).render(**values)
        except jinja2.TemplateNotFound as err:
            message = f"there is no template shaders/{err.name}"
            raise TemplateError(self._at(err, message)) from err
        except jinja2.TemplateError as err:
            raise TemplateError(self._at(err, str(err.message))) from err
        except Exception as err:  # an expression may raise anything
            raise TemplateError(self._at(err, f"{type(err).__name__}: {err}")) from err

    def _at(self, err: Exception, message: str) -> str:
        """The message, with the place that an error comes from and its line."""
        if isinstance(err, jinja2.TemplateSyntaxError):
            name, line = err.name or "", err.lineno
        else:
            frames = traceback.extract_tb(err.__traceback__)
            places = [(f.filename, f.lineno or 1) for f in frames if f.filename in self.texts]
            if not places:
                return message
            name, line = places[-1]
        text = self.texts[name].split("\n")[line - 1]
        # Jinja knows no columns: that of the name it complains of, else of the line's first tag
        quoted = re.search(r"'(\w+)'", message)
        patterns = [rf"\b{quoted[1]}\b"] if quoted else []
        patterns += [r"\{\{|\{\$|\{#|\$\$", r"\S", ""]
        column = next(found.start() for p in patterns if (found := re.search(p, text)))
        caret = re.sub(r"\S", " ", text[:column]) + "^"
        return f"shaders/{name}:{line}:{column + 1}: {message}\n{text}\n{caret}"


TEMPLATES = Templates(SHADER_DIR)  # those of the start
_edited: dict[str, Templates] = {}  # by kernel, where others are used


def use_templates(templates: Templates, kernels: Iterable[str]) -> None:
    """Have kernels render by these templates from now on, rather than by those of the start."""
    _edited.update(dict.fromkeys(kernels, templates))


class Span(NamedTuple):
    """From `start`, a column, to the next span's a rendered line comes from this place.

    Lines and columns count from 1.

    value   of an expression: all of it comes from this column
    """

    start: int
    file: str
    line: int
    column: int
    value: bool


# What the array of a binding is of, by its tensor's dtype: in general, and where it is among vec4
_ELEMENTS: dict[DType, tuple[str, str]] = {
    "f32": ("f32", "vec4<f32>"),
    "u32": ("u32", "vec4<u32>"),
    "f16": ("u32", "vec2<u32>"),
    "i8": ("u32", "u32"),
}


@dataclass(frozen=True)
class Rendered:
    """WGSL ready to compile, and for each of its lines where in the templates it comes from."""

    source: str
    origins: tuple[tuple[Span, ...], ...]

    def place(self, line: int, column: int = 1) -> str:
        """Where a place in the source comes from: "shaders/FILE:LINE:COLUMN"."""
        spans = self.origins[line - 1]
        span = next((s for s in reversed(spans) if s.start <= column), spans[0])
        within = 0 if span.value else max(0, column - span.start)
        return f"{span.file}:{span.line}:{span.column + within}"


def _unmark(line: str) -> tuple[str, tuple[Span, ...]]:
    """A rendered line without its marks, and what they say."""
    code, spans, end = "", [], 0
    for mark in _MARK.finditer(line):
        code += line[end : mark.start()]
        end = mark.end()
        file, at, column, value = mark.groups()
        span = Span(len(code) + 1, f"shaders/{file}", int(at), int(column), bool(value))
        spans.append(span)
    return (code + line[end:]).rstrip(), tuple(spans)


@dataclass(frozen=True, eq=False)
class Kernel:
    """Declaration of one dispatch. The only place a kernel's interface is written down.

    name     shaders/<name>.wgsl holds its body and the oracle's function has its name
    reads    {binding: shape}, read-only; "*rows d_in" folds the leading axes into one;
             a binding whose name ends in "?" may be left out
    writes   {binding: shape}, every element overwritten or updated in place
    adds     {binding: shape}, gradients: added into, except that a plan overwrites an
             activation's gradient at its first contribution (`add()` in the template emits
             `=` or `+=`)
    grid     values -> workgroups along x, y, z
    options  compile-time constants of a dispatch and their defaults
    choose   tuning choices for a target: names the template may use, "workgroup" among them
    alternatives   other choices that may be faster on some adapter, for `wgsl-train tune` to
             measure: each overrides what `choose` says. They change no tensor's shape
    vec4     values -> bindings that are arrays of vec4<f32> rather than f32
    vec8     values -> bindings, only read, that are arrays of vec4<u64> where they are f32, 8 to an
             element: for devices with the feature shader-int64, where loads are dear by their number
    u32      bindings of unsigned integers
    stored   values -> dtypes of the bindings that may be stored as f16 or i8: arrays of u32, or
             of vec2<u32> for f16 that is among vec4
    flops    values -> floating-point operations, for the profiler
    half     bindings of activations, which a dispatch may give as f16: real halves, for devices
             with the feature shader-f16. Templates reach them by `load` and `store`, which
             convert from and to f32; values["half"] holds those of a dispatch
    traffic  values -> bytes moved; by default each bound element once (twice where added into)
    """

    name: str
    reads: Mapping[str, str]
    grid: Callable[[Values], Grid]
    writes: Mapping[str, str] = field(default_factory=dict)
    adds: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    choose: Callable[[Target, Values], Values] = _DEFAULT_CHOICES
    alternatives: Callable[[Target, Values], Iterable[Values]] = lambda target, values: ()
    vec4: Callable[[Values], Iterable[str]] = lambda v: ()
    vec8: Callable[[Values], Iterable[str]] = lambda v: ()
    u32: frozenset[str] = frozenset()
    stored: Callable[[Values], Mapping[str, DType]] = lambda v: {}
    half: frozenset[str] = frozenset()
    flops: Callable[[Values], int] = lambda v: 0
    traffic: Callable[[Values], int] | None = None

    def __post_init__(self) -> None:
        if self.name in KERNELS:
            raise ValueError(f"kernel {self.name} is declared twice")
        KERNELS[self.name] = self

    @functools.cached_property
    def bindings(self) -> dict[str, tuple[str, Literal["reads", "writes", "adds"], bool]]:
        """{name: (declared shape, how it is used, may it be left out)} in binding order."""
        groups = (("reads", self.reads), ("writes", self.writes), ("adds", self.adds))
        return {
            name.rstrip("?"): (shape, use, name.endswith("?"))  # type: ignore[misc]
            for use, declared in groups
            for name, shape in declared.items()
        }

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Solve the declared shapes for their dims.

        Raises ShapeError naming kernel, binding, declared shape and given shape.
        """
        missing = [n for n, (_, _, o) in self.bindings.items() if not o and n not in shapes]
        unknown = shapes.keys() - self.bindings.keys()
        if missing or unknown:
            raise ShapeError(
                f"{self.name} binds {sorted(self.bindings)}, was given {sorted(shapes)}"
            )
        dims: dict[str, int] = {}
        for binding, (declared, _, _) in self.bindings.items():
            if binding not in shapes:
                continue
            names, shape = declared.split(), shapes[binding]
            if names and names[0].startswith("*"):
                lead = len(shape) - len(names) + 1
                names, shape = [names[0][1:], *names[1:]], (math.prod(shape[:lead]), *shape[lead:])
            if len(names) != len(shape) or any(
                dims.setdefault(n, s) != s for n, s in zip(names, shape, strict=True)
            ):
                raise ShapeError(
                    f"{self.name}: {binding} is declared ({declared}), given {shapes[binding]}, "
                    f"with {dims}"
                )
        if empty := [n for n, s in dims.items() if s < 1]:
            raise ShapeError(f"{self.name}: {empty[0]} is {dims[empty[0]]}, must be at least 1")
        return dims

    def values(
        self, target: Target, dims: Values, options: Values, half: frozenset[str] = frozenset()
    ) -> dict[str, Any]:
        """Dims, options and tuning choices of a dispatch, together; and which bindings are f16."""
        if unknown := options.keys() - self.options.keys():
            raise ShapeError(f"{self.name} has no option {sorted(unknown)}")
        values = {**dims, **self.options, **options, "half": half}
        values |= self.choose(target, values)
        if target.tuned:
            values |= target.tuned.get(self.key(dims, options), {})
        return values

    def dtype(self, binding: str, values: Values) -> DType:
        """The dtype of the tensor that a binding takes."""
        if binding in values.get("half", ()):
            return "f16"
        return "u32" if binding in self.u32 else self.stored(values).get(binding, "f32")

    def key(self, dims: Values, options: Values) -> str:
        """Name of this kernel at these dims and options, for tables of tuned choices.

        Options that are no plain values (tables of offsets, of names) are left out.
        """
        plain = {
            name: value
            for name, value in {**self.options, **options}.items()
            if isinstance(value, (int, float, str))
        }
        return " ".join([self.name, *(f"{k}={v}" for k, v in {**dims, **plain}.items())])

    @property
    def templates(self) -> Templates:
        """Those that it renders by."""
        return _edited.get(self.name, TEMPLATES)

    def render(
        self, dims: Values, values: Values, bound: Iterable[str], accumulate: Iterable[str]
    ) -> Rendered:
        """WGSL: generated constants and bindings, then the template's body.

        accumulate   the `adds` bindings that are added into; the others are overwritten

        Raises TemplateError naming the template's file, line and column.
        """
        bound, accumulate, half = set(bound), set(accumulate), values.get("half", ())
        vec4 = set(self.vec4(values)) & bound
        vec8 = {b for b in self.vec8(values) if b in bound and self.dtype(b, values) == "f32"}
        lines = [f"// {self.name}", *(["enable f16;"] if half else [])]
        lines += [f"const {name}: u32 = {size}u;" for name, size in dims.items()]
        for i, name in enumerate(b for b in self.bindings if b in bound):
            access = "read" if self.bindings[name][1] == "reads" else "read_write"
            plain, wide = (
                ("f16", "vec4<f16>") if name in half else _ELEMENTS[self.dtype(name, values)]
            )
            element = "vec4<u64>" if name in vec8 else wide if name in vec4 else plain
            lines.append(
                f"@group(0) @binding({i}) var<storage, {access}> {name}: array<{element}>;"
            )

        def load(binding: str, index: str) -> str:
            wide = "vec4f" if binding in vec4 else "f32"
            return f"{wide}({binding}[{index}])" if binding in half else f"{binding}[{index}]"

        def store(binding: str, index: str, value: str) -> str:
            narrow = "vec4<f16>" if binding in vec4 else "f16"
            stored = f"{narrow}({value})" if binding in half else value
            return f"{binding}[{index}] = {stored};"

        def add(binding: str, index: str, value: str) -> str:
            if binding not in accumulate:
                return store(binding, index, value)
            if binding in half:
                return store(binding, index, f"{load(binding, index)} + ({value})")
            return f"{binding}[{index}] += {value};"

        origins: list[tuple[Span, ...]] = [
            (Span(1, f"{self.name} (generated)", i, 1, False),) for i in range(1, len(lines) + 1)
        ]
        given: dict[str, Any] = {"bound": bound, "vec4": vec4, "vec8": vec8}
        given["accumulate"] = accumulate
        given |= {"load": load, "store": store, "add": add}
        for line in self.templates.render(f"{self.name}.wgsl", {**values, **given}).split("\n"):
            code, spans = _unmark(line)
            if code:
                lines.append(code)
                origins.append(spans or (origins[-1][-1]._replace(start=1, value=True),))
                if re.match(r"[^/]*@(binding|group)\b", code):
                    raise TemplateError(
                        f"{Rendered(code, tuple(origins[-1:])).place(1)}: declares a binding: those of "
                        f"{self.name} are generated from its declaration in wgsl_train/ops"
                    )
        return Rendered("\n".join(lines) + "\n", tuple(origins))
