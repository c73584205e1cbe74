"""Runs one kernel on the GPU beside its oracle. Used by the tests and by the shader tools."""

import ast
import inspect
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests import oracle
from wgsl_train import ops
from wgsl_train.config import check_keys
from wgsl_train.encoder import Buffers, Encoder
from wgsl_train.errors import ConfigError
from wgsl_train.kernel import KERNELS, PORTABLE, DType, Kernel, Target, Tensor, alignment
from wgsl_train.plan import Dispatch, Layout, Plan

ops.load_all()
oracle.load_all()

GUARD = np.float32(-12345.678)  # stands before and after every tensor, and must stay there
HALF_RTOL = 1e-3  # what an f16 result is held to: it is rounded to 2^-11 of its value
NUMPY = {"f32": np.float32, "u32": np.uint32, "f16": np.float16, "i8": np.int8}
KINDS = ("portable", "cpu", "integrated", "discrete")


@dataclass
class Variant:
    """A case of a kernel under one set of tuning choices."""

    kernel: Kernel
    case: oracle.Case
    kind: str

    def target(self, target: Target) -> Target:
        key = self.kernel.key(self.dims, self.options)
        tuned = {key: self.case.choices} if self.case.choices else {}
        features = target.features | ({"shader-f16"} if self.case.half else set())
        return replace(target, kind=self.kind, tuned=tuned, features=features)

    @property
    def dims(self) -> dict[str, int]:
        shapes = {b: s for b, s in self.shapes.items() if b not in self.case.leave_out}
        return self.kernel.match(shapes)

    @property
    def options(self):
        return {k: v for k, v in self.case.values.items() if k in self.kernel.options}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            binding: tuple(self.case.values[d.lstrip("*")] for d in declared.split())
            for binding, (declared, _, _) in self.kernel.bindings.items()
            if binding not in self.case.leave_out
        }

    def dtype(self, binding: str) -> DType:
        values = {**self.kernel.options, **self.case.values, "half": frozenset(self.case.half)}
        return self.kernel.dtype(binding, values)

    def __str__(self) -> str:
        return f"{self.kernel.name}-{self.case}-{self.kind}"


def variants(name: str, kinds: Sequence[str] = KINDS) -> list[Variant]:
    """All cases of a kernel, at every distinct set of choices the tables hold for these kinds."""
    found: list[Variant] = []
    for case in oracle.ORACLES[name].cases:
        found += _distinct((Variant(KERNELS[name], case, kind) for kind in kinds), Target())
    return found


def _distinct(variants: Iterable[Variant], target: Target) -> Iterator[Variant]:
    """The first of each set of choices."""
    seen = []
    for v in variants:
        values = v.kernel.values(v.target(target), v.dims, v.options, frozenset(v.case.half))
        if values not in seen:
            seen.append(values)
            yield v


def settings(words: Iterable[str]) -> dict[str, Any]:
    """Values by name, of words such as "rows=37". Raises ConfigError."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r}: sizes and options are given as NAME=VALUE")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values


def variant_of(
    name: str, given: Mapping[str, Any], kind: str, leave_out: Sequence[str] | None = None
) -> Variant:
    """A kernel at some dims and options; what is not given is that of its first case.

    leave_out   optional bindings that are not bound; None: those of the first case

    Where the oracle's module has a function `dims`, it fills in the sizes that follow from others.
    Raises ConfigError at a name that is none.
    """
    check_keys([name], KERNELS, "wgsl_train/ops")
    kernel, reference = KERNELS[name], oracle.ORACLES[name]
    first = reference.cases[0]
    dims = [d.lstrip("*") for shape, _, _ in kernel.bindings.values() for d in shape.split()]
    check_keys(given, dict.fromkeys([*dims, *kernel.options, *first.values]), name)
    optional = [binding for binding, (_, _, may) in kernel.bindings.items() if may]
    check_keys(leave_out or (), optional, f"{name}, among the bindings that may be left out,")
    values = {**first.values, **given}
    if fill := getattr(sys.modules[reference.compute.__module__], "dims", None):
        basic = inspect.signature(fill).parameters
        values |= {**fill(**{k: values[k] for k in basic if k in values}), **given}
    left_out = first.leave_out if leave_out is None else tuple(leave_out)
    for binding, (shape, _, _) in kernel.bindings.items():
        for dim in [] if binding in left_out else shape.replace("*", "").split():
            if not isinstance(values.get(dim), int) or values[dim] < 1:
                found = f"{dim} is {values[dim]!r}" if dim in values else f"{dim} is not given"
                raise ConfigError(f"{name}: {binding} is ({shape}), and {found}")
    return Variant(kernel, oracle.Case(values, left_out), kind)


def alternatives(name: str, target: Target) -> Iterator[Variant]:
    """A kernel's cases at each set of choices that `wgsl-train tune` measures beside the tables'."""
    for case in oracle.ORACLES[name].cases:
        yield from _distinct(_alternatives(KERNELS[name], case, target), target)


def _alternatives(kernel: Kernel, case: oracle.Case, target: Target) -> Iterator[Variant]:
    for kind in KINDS:
        plain = Variant(kernel, case, kind)
        half = frozenset(case.half)
        values = kernel.values(plain.target(target), plain.dims, plain.options, half)
        for choices in kernel.alternatives(plain.target(target), values):
            yield Variant(kernel, replace(case, choices=choices), kind)


def plan(variant: Variant, target: Target = PORTABLE, accumulate: bool = True) -> Plan:
    """A plan of one dispatch, whose tensors each lie between guards in a buffer of their own.

    accumulate   False: `adds` bindings are overwritten, as at an activation's first contribution
    """
    kernel, target = variant.kernel, variant.target(target)
    made = Plan(Layout([], target), target)
    tensors: dict[str, Tensor] = {}
    for binding, shape in variant.shapes.items():
        dtype = variant.dtype(binding)
        margin = alignment(dtype)
        base = made.persistent(f"test.{binding}", (math.prod(shape) + 2 * margin,), dtype)
        if kernel.bindings[binding][1] == "adds" and not accumulate:
            base.kind = "activation"
        tensors[binding] = base.view(margin, shape, binding)
    made.dispatch(kernel, **tensors, **variant.options)
    return made


def planned(variant: Variant, target: Target = PORTABLE) -> Dispatch:
    """The dispatch of a case, whatever memory it takes."""
    large = replace(target, max_binding=1 << 31, max_buffer=1 << 31)
    (dispatch,) = plan(variant, large).dispatches
    return dispatch


def draw(variant: Variant, rng: np.random.Generator) -> oracle.Arrays:
    """Inputs for a case, in the oracle's float64 (exactly representable in float32)."""
    reference = oracle.ORACLES[variant.kernel.name]
    arrays = {}
    for binding, shape in variant.shapes.items():
        if binding in reference.draw:
            array = reference.draw[binding](rng, shape, variant.case.values)
        elif binding in variant.kernel.u32:
            array = rng.integers(0, variant.case.values["vocab_size"], shape)
        elif variant.dtype(binding) == "i8":
            array = rng.integers(-127, 128, shape)
        else:
            array = rng.uniform(-1, 1, shape)
        if binding not in variant.kernel.u32:
            stored = np.float16 if variant.dtype(binding) == "f16" else np.float32
            array = array.astype(stored).astype(np.float64)
        arrays[binding] = array
    return arrays


def expect(variant: Variant, arrays: oracle.Arrays) -> oracle.Arrays:
    """What the oracle says, given inputs."""
    reference = oracle.ORACLES[variant.kernel.name]
    known = {**variant.kernel.options, **variant.case.values, **arrays}
    known |= dict.fromkeys(variant.case.leave_out)
    wanted = inspect.signature(reference.compute).parameters
    return reference.compute(**{k: known[k] for k in wanted})


def contents(dispatch: Dispatch, arrays: oracle.Arrays) -> oracle.Arrays:
    """What the buffer of each binding holds before the dispatch, guards included."""
    wanted = inspect.signature(oracle.ORACLES[dispatch.kernel.name].compute).parameters
    filled = {}
    for binding, tensor in dispatch.tensors.items():
        use = dispatch.kernel.bindings[binding][1]
        if use == "reads" or binding in dispatch.accumulate or binding in wanted:
            body = arrays[binding].ravel()
        else:
            body = np.full(tensor.size, np.nan)  # so that an element left unwritten shows
        guard = np.full(tensor.start, 7 if tensor.dtype in ("u32", "i8") else GUARD)
        filled[binding] = np.concatenate([guard, body, guard]).astype(NUMPY[tensor.dtype])
    return filled


def results(dispatch: Dispatch, after: oracle.Arrays) -> tuple[oracle.Arrays, list[str]]:
    """What every changed binding holds, given buffers after the dispatch, and what was wrong
    around them (guard elements that were overwritten)."""
    got, faults = {}, []
    for binding, tensor in dispatch.bound("writes", "adds"):
        raw, start, stop = after[binding], tensor.start, tensor.start + tensor.size
        guards = np.concatenate([raw[:start], raw[stop:]])
        if not (guards == guards[0]).all():
            faults.append(f"{binding}: wrote outside the tensor")
        got[binding] = raw[start:stop].astype(np.float64).reshape(tensor.shape)
    return got, faults


def run(
    variant: Variant, buffers: Buffers, arrays: oracle.Arrays, accumulate: bool = True
) -> tuple[oracle.Arrays, list[str]]:
    """One dispatch on the GPU: its `results`."""
    made = plan(variant, buffers.device.target, accumulate)
    (dispatch,) = made.dispatches
    encoder = Encoder(buffers, made, share_memory=False)
    for binding, content in contents(dispatch, arrays).items():
        encoder.write(dispatch.tensors[binding].root, content)
    encoder.run("forward")
    after = {b: encoder.read(t.root) for b, t in dispatch.bound("writes", "adds")}
    for tensor in dispatch.tensors.values():
        buffers.drop(tensor.root)
    return results(dispatch, after)


@dataclass
class Found:
    """How the GPU's results differ from the oracle's.

    faults   what is wrong: a line a binding, with its first wrong element; none where it is right
    error    the greatest |value - expected| / (|expected| + root mean square of the tensor)
    """

    faults: list[str]
    error: float = 0.0


def compare(
    variant: Variant,
    arrays: oracle.Arrays,
    expected: oracle.Arrays,
    got: oracle.Arrays,
    accumulate: bool = True,
) -> Found:
    """Results of the GPU beside the oracle's."""
    kernel = variant.kernel
    wanted = inspect.signature(oracle.ORACLES[kernel.name].compute).parameters
    found = Found([])
    changed = {b for b, (_, use, _) in kernel.bindings.items() if use != "reads" and b in got}
    if changed != expected.keys() & got.keys() or not changed <= expected.keys():
        fault = f"the oracle returns {sorted(expected)}, the kernel changes {sorted(changed)}"
        return Found([fault])
    for binding, actual in got.items():
        want = np.array(expected[binding], np.float64).reshape(actual.shape)
        untouched = np.isnan(want)
        rtol = oracle.ORACLES[kernel.name].rtol
        if variant.dtype(binding) == "f16":
            rtol = max(rtol, HALF_RTOL)
        if kernel.bindings[binding][1] == "adds" and accumulate:
            want = want + arrays[binding].reshape(want.shape)
            before = arrays[binding].reshape(want.shape)
        else:
            before = (
                arrays[binding].reshape(want.shape)
                if binding in wanted
                else np.full(want.shape, np.nan)
            )
        want = np.where(untouched, before, want)
        scale = np.sqrt(np.mean(np.square(want[~untouched]))) if (~untouched).any() else 0.0
        with np.errstate(invalid="ignore"):
            error = np.abs(actual - want)
            ok = error <= rtol * (np.abs(want) + scale) + 1e-30
            relative = np.nan_to_num(error / (np.abs(want) + scale + 1e-30), nan=np.inf)
        same = np.isnan(want) & np.isnan(actual)
        ok |= same
        found.error = max(found.error, float(relative[~same].max(initial=0.0)))
        if not ok.all():
            at = tuple(int(i) for i in np.argwhere(~ok)[0])
            found.faults.append(
                f"{binding}{list(at)} is {actual[at]!s}, expected {want[at]:.9g}; "
                f"{(~ok).sum()} of {ok.size} wrong"
            )
    return found


def examine(
    variant: Variant, buffers: Buffers, rng: np.random.Generator, accumulate: bool = True
) -> Found:
    """Run the kernel beside its oracle, on random inputs."""
    arrays = draw(variant, rng)
    expected = expect(variant, arrays)
    got, faults = run(variant, buffers, arrays, accumulate)
    found = compare(variant, arrays, expected, got, accumulate)
    return Found(faults + found.faults, found.error)


def check(
    variant: Variant, buffers: Buffers, rng: np.random.Generator, accumulate: bool = True
) -> None:
    """Assert that the kernel equals its oracle."""
    faults = examine(variant, buffers, rng, accumulate).faults
    assert not faults, f"{variant}\n" + "\n".join(faults)
