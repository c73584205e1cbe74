"""Shader templates that are edited while a model trains: proven, then swapped in between steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import kernel, ops
from .encoder import Buffers, Encoder
from .errors import WgslTrainError
from .kernel import KERNELS, Stamps, Templates, stamps, use_templates
from .model import Model
from .plan import Dispatch
from .trial import Deviation, Trial, deviation

OPS = Path(ops.__file__).parent
INTERVAL = 0.2  # seconds between looks at the files
REST = 0.1  # seconds for which they must not have changed: editors write in pieces


@dataclass(frozen=True)
class _Pair:
    """A dispatch by the templates in use, and by edited ones, on copies of the same inputs."""

    running: Trial
    edited: Trial

    def deviations(self) -> Iterator[tuple[str, Deviation]]:
        wanted, got = self.running.results(), self.edited.results()
        for binding in wanted:
            yield binding, deviation(wanted[binding], got[binding])


@dataclass(frozen=True)
class _Candidate:
    """A kernel by edited templates: a pair for every source that is to be replaced."""

    name: str
    templates: Templates
    pairs: list[_Pair]

    def free(self) -> None:
        for pair in self.pairs:
            for trial in (pair.running, pair.edited):
                trial.encoder.buffers.free()


class HotReload:
    """Watches the shader templates of a model that trains, and swaps in what computes the same.

    Parameters
    ----------
    model   whose pipelines are replaced; its buffers, and what they hold, stay
    say     called with what became of an edit; not twice with the same

    `before_step` and `after_step` stand around every step. An edited kernel is compiled before a
    step, which runs by the old one and lends its inputs to both: results that deviate by more
    than the tolerance of `trial` are refused, as is what does not compile. Nothing here ends a run.
    """

    def __init__(self, model: Model, say: Callable[[str], None]) -> None:
        self.model, self.say = model, say
        self.rebuilds = 0  # how often edits were looked into
        self._folder = kernel.TEMPLATES.folder
        self._done = self._latest = (kernel.TEMPLATES.stamps, stamps(OPS, "*.py"))
        self._looked = 0.0
        self._said: dict[str, str] = {}  # by kernel or file, since it was last reloaded
        self._candidates: list[_Candidate] = []

    def before_step(self, encoders: Sequence[Encoder]) -> None:
        """Prepare what was edited, once its files are at rest.

        encoders   which this step will run
        """
        now = time.monotonic()
        if now - self._looked < (INTERVAL if self._latest == self._done else REST):
            return
        self._looked = now
        before, self._latest = self._latest, (stamps(self._folder, "*.wgsl"), stamps(OPS, "*.py"))
        if self._latest != self._done and (self._latest == before or _at_rest(*self._latest)):
            self.rebuilds += 1
            self._rebuild(encoders)

    def after_step(self, step: int) -> None:
        """Swap in, or refuse, what was prepared before this step. Waits for the GPU if it must.

        step   its number
        """
        if not self._candidates:
            return
        for encoder in self.model.encoders:
            encoder.cancel_captures()
        for candidate in self._candidates:
            try:
                worst = _worst(candidate)
                self._swap(candidate)
                self._said.pop(candidate.name, None)
                self.say(
                    f"{candidate.name} is reloaded, and used from step {step + 1} on: its results "
                    f"deviate by {worst:.1e} at most"
                )
            except WgslTrainError as error:
                self._refuse(candidate.name, error)
            finally:
                candidate.free()
        self._candidates = []

    def _rebuild(self, encoders: Sequence[Encoder]) -> None:
        (shaders, declarations), self._done = self._done, self._latest
        for name in _changed(declarations, self._latest[1]):
            self._tell(
                f"ops/{name}",
                f"wgsl_train/ops/{name} is not reloaded: a run keeps the bindings and sizes that "
                "it was planned with. Stop it, and go on with --resume.",
            )
        changed = _changed(shaders, self._latest[0])
        used = {d.kernel.name for encoder in self.model.encoders for d in encoder.plan.dispatches}
        included = any("/" in name for name in changed)  # by whatever kernel
        templates = Templates(self._folder)
        places = set()  # of errors: one in an include is told of one kernel only
        for name in sorted(used if included else {Path(name).stem for name in changed}):
            if name not in used:
                self._tell(name, f"{name} is not reloaded: it has had no part in this run yet")
                continue
            candidate = _Candidate(name, templates, [])
            try:
                self._prepare(candidate, encoders)
            except WgslTrainError as error:
                candidate.free()
                if (place := str(error).split(" ")[0]) not in places:
                    places.add(place)
                    self._refuse(name, error)
                continue
            if candidate.pairs:
                self._candidates.append(candidate)
            elif not included:
                self._tell(name, f"{name} renders as before")

    def _prepare(self, candidate: _Candidate, encoders: Sequence[Encoder]) -> None:
        """Compile a kernel by edited templates, and have the step lend its inputs.

        Sources that the step does not run, as those of evaluations, are tried on random inputs.
        """
        places = [
            (encoder, d)
            for encoder in self.model.encoders
            for d in encoder.plan.dispatches
            if d.kernel.name == candidate.name
        ]
        running = [d.render().source for _, d in places]
        with _using(candidate):
            edited = [d.render().source for _, d in places]
        groups: dict[tuple[str, str], list[tuple[Encoder, Dispatch]]] = {}
        for old, new, place in zip(running, edited, places, strict=True):
            if old != new:
                groups.setdefault((old, new), []).append(place)
        for group in groups.values():
            lenders = {e: d for e, d in reversed(group) if e in encoders}  # each one's first
            for trial in self._pair(candidate, group[0][1]):
                if not lenders:
                    trial.write(trial.draw())
                for encoder, d in lenders.items():
                    encoder.capture(d, trial.encoder, trial.tensors)

    def _pair(self, candidate: _Candidate, d: Dispatch) -> tuple[Trial, Trial]:
        # buffers of their own, so that what one writes does not help the other
        device = self.model.device
        running = Trial(Buffers(device), d, device.target)
        with _using(candidate):
            edited = Trial(Buffers(device), d, device.target)
        candidate.pairs.append(_Pair(running, edited))
        return running, edited

    def _swap(self, candidate: _Candidate) -> None:
        encoders = self.model.encoders
        with _using(candidate):
            programs = [encoder.compile() for encoder in encoders]
        for encoder, program in zip(encoders, programs, strict=True):
            encoder.program = program
        use_templates(candidate.templates, [candidate.name])

    def _refuse(self, name: str, error: WgslTrainError) -> None:
        self._tell(name, f"{name} is not reloaded, and goes on as it was: {error}")

    def _tell(self, about: str, text: str) -> None:
        if self._said.get(about) != text:
            self._said[about] = text
            self.say(text)


@contextlib.contextmanager
def _using(candidate: _Candidate) -> Iterator[None]:
    """Have the kernel render by the edited templates in here."""
    before = KERNELS[candidate.name].templates
    use_templates(candidate.templates, [candidate.name])
    try:
        yield
    finally:
        use_templates(before, [candidate.name])


def _worst(candidate: _Candidate) -> float:
    """The greatest deviation. Raises WgslTrainError where it is more than may be."""
    worst = 0.0
    for pair in candidate.pairs:
        for binding, found in pair.deviations():
            if found.error > found.allowed:
                raise WgslTrainError(
                    f"{binding}{found}; a deviation of {found.error:.1e} of |value| + rms, "
                    f"{found.allowed:.0e} is allowed"
                )
            worst = max(worst, found.error)
    return worst


def _changed(before: Stamps, after: Stamps) -> list[str]:
    """Names that are new, gone, or stand for another version."""
    return sorted(n for n in before | after if before.get(n) != after.get(n))


def _at_rest(*found: Stamps) -> bool:
    newest = max(changed for group in found for changed, _ in group.values())
    return time.time_ns() - newest > REST * 1e9
