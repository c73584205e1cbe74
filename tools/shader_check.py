"""Kernels beside their oracles and beside their last right versions: what shader_loop.py prints."""

from __future__ import annotations

import functools
import importlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from wgsl_train.config import LAYER_TYPES, MambaConfig, check_keys  # noqa: E402
from wgsl_train.device import Device  # noqa: E402
from wgsl_train.encoder import Buffers  # noqa: E402
from wgsl_train.errors import WgslTrainError  # noqa: E402
from wgsl_train.kernel import KERNELS, SHADER_DIR, Templates, use_templates  # noqa: E402
from wgsl_train.plan import Dispatch, Layout  # noqa: E402
from wgsl_train.profile import Ceilings, measure_ceilings, warm_up  # noqa: E402

MEASURE = 0.15  # seconds of measuring, about, for each of two versions
NOISE = 0.03  # a smaller change of time is never told
# Modules of the package that live on when kernels are declared anew; the others are imported again
KEPT = {"config", "device", "encoder", "errors", "kernel", "plan", "tuned"}


class Checker:
    """Checks kernels on a device, and keeps the last right version of each to time beside.

    timer   another device of the same adapter, on which kernels are timed: where a driver compiles
            at the first run, it does so while the first device compares
    batch, seqlen, d_model   of the training step at whose sizes kernels are timed
    at      other sizes to time at, as "rows=4096 d_model=512"
    soon    seconds of comparing, before the speed is measured and told
    """

    def __init__(
        self,
        device: Device,
        timer: Device,
        *,
        batch: int,
        seqlen: int,
        d_model: int,
        at: str = "",
        soon: float = 1.0,
    ) -> None:
        self.device, self.timer, self.buffers = device, timer, Buffers(device)
        self.sizes, self.at, self.soon = (batch, seqlen, d_model), at, soon
        self._right: dict[str, Any] = {}  # trials
        self.declare()

    @functools.cached_property
    def ceilings(self) -> Ceilings | None:
        """What the adapter reaches; None where it has no clock."""
        timed = "timestamp-query" in self.device.target.features
        return measure_ceilings(self.timer) if timed else None

    def declare(self) -> None:
        """Take in declarations and oracles as they are now. Raises what their modules raise."""
        for name in [n for n in sys.modules if n.startswith(("wgsl_train.", "tests."))]:
            if name.removeprefix("wgsl_train.") not in KEPT:
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if parent in sys.modules:
                    vars(sys.modules[parent]).pop(child, None)
        KERNELS.clear()
        self._harness = importlib.import_module("tests.harness")
        self._trial = importlib.import_module("wgsl_train.trial").Trial
        self._dearest = self._step()

    def _step(self) -> dict[str, Dispatch]:
        """Of each kernel of a training step, the dispatch that does most."""
        plan_step = importlib.import_module("wgsl_train.model").plan_step
        parameters = importlib.import_module("wgsl_train.models.language_model").parameters
        batch, seqlen, d_model = self.sizes
        config = MambaConfig(
            vocab_size=256,
            d_model=d_model,
            head_dim=math.gcd(64, 2 * d_model),  # of d_inner
            layers=tuple(LAYER_TYPES),
            mlp="swiglu",
        )
        target = self.device.target
        layout = Layout(parameters(config), target)
        planned = plan_step(config, layout, target, batch, seqlen, update=True)
        found: dict[str, Dispatch] = {}
        for d in sorted(planned.plan.dispatches, key=lambda d: d.nbytes + d.flops):
            found[d.kernel.name] = d
        return found

    def names(self, patterns: Sequence[str]) -> list[str]:
        """The kernels that patterns mean, such as "scan_*". Raises ConfigError at one of none."""
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in KERNELS):
                check_keys([pattern], KERNELS, "wgsl_train/ops")
        return [n for n in KERNELS if any(fnmatchcase(n, pattern) for pattern in patterns)]

    def check(self, name: str) -> Iterator[tuple[bool, str] | None]:
        """Render, compile, compare and time a kernel by its templates as they are now.

        Yields whether it is right, and what to print: soon, and once more when all cases are done,
        if some were left; None in between, where it may be ended. Raises what an oracle raises.
        """
        ceilings = self.ceilings
        begin = time.perf_counter()
        trial = None
        try:
            use_templates(Templates(SHADER_DIR), [name])
            cases = self._cases(name)  # which renders all of them
            if ceilings:
                where, like = self._like(name)
                trial = self._trial(Buffers(self.timer), like, self.timer.target)
                trial.write(trial.draw())
                trial.encoder.run("forward")  # it compiles meanwhile
            error, told = 0.0, 0
            for done, (variant, accumulate) in enumerate(cases, 1):
                rng = np.random.default_rng(0)
                found = self._harness.examine(variant, self.buffers, rng, accumulate)
                error = max(error, found.error)
                if found.faults:
                    how = "" if accumulate else ", overwriting"
                    text = f"WRONG  {variant.case}{how}: {'; '.join(found.faults)}"
                    yield False, f"{text}; greatest relative error {found.error:.1e}"
                    return
                last = done == len(cases)
                if not told and (last or time.perf_counter() - begin > self.soon):
                    told = done
                    speed = self._speed(trial, where, ceilings) if ceilings else "not timed"
                    text = _verdict(f"{done}" if last else f"{done} of {len(cases)}", error, begin)
                    text = f"{text}\n    {speed}"
                elif last:
                    text = _verdict(f"all {len(cases)}", error, begin)
                else:
                    yield None
                    continue
                if last and trial:
                    self._keep(name, trial)
                    trial = None
                yield True, text
        except WgslTrainError as err:
            yield False, f"ERROR  {err}"
        finally:
            if trial:
                trial.encoder.buffers.free()

    def _keep(self, name: str, trial: Any) -> None:
        """The version that was just found right is what the next one is timed beside."""
        if before := self._right.pop(name, None):
            before.encoder.buffers.free()
        self._right[name] = trial

    def _cases(self, name: str) -> list[tuple[Any, bool]]:
        """Variants, and whether they add to what is there; those that compile fastest first."""
        target = self.device.target

        def lines(case: tuple[Any, bool]) -> int:
            return int(self._harness.planned(case[0], target).render().source.count("\n"))

        cases = [
            (variant, accumulate)
            for variant in self._harness.variants(name, [target.kind])
            for accumulate in ([True, False] if variant.kernel.adds else [True])
        ]
        return sorted(cases, key=lines)

    def _like(self, name: str) -> tuple[str, Dispatch]:
        """What to time, and at what sizes it is."""
        target = self.device.target
        if self.at:
            given = self._harness.settings(self.at.split())
            variant = self._harness.variant_of(name, given, target.kind)
            return f"at {self.at}", self._harness.planned(variant, target)
        if name in self._dearest:
            batch, seqlen, d_model = self.sizes
            return f"in a step of {batch} x {seqlen} tokens, d_model {d_model}", self._dearest[name]
        cases = [
            (f"at {v.case}", self._harness.planned(v, target))
            for v in self._harness.variants(name, [target.kind])
        ]
        return max(cases, key=lambda case: case[1].nbytes + case[1].flops)

    def _speed(self, trial: Any, where: str, ceilings: Ceilings) -> str:
        """What a trial takes, measured in turns with the last right version."""
        before = self._right.get(trial.dispatch.kernel.name)
        warm_up(trial.encoder, "forward", seconds=0.05)
        rounds = int(min(50, max(5, MEASURE / max(trial.seconds(), 1e-6))))
        new, old = [], []
        for _ in range(rounds):
            new.append(max(trial.seconds(repeats=1), 1e-9))
            if before:
                old.append(max(before.seconds(repeats=1), 1e-9))
        seconds = min(new)  # other work on the machine only adds
        d = trial.dispatch
        rate, flops = d.nbytes / seconds, d.flops / seconds
        text = f"{where}: {seconds * 1e3:.3f} ms, {rate / 1e9:.2f} GB/s"
        text += f" ({rate / ceilings.copy_bytes_per_s:.0%} of copying)"
        if d.flops:
            text += f", {flops / 1e9:.2f} GFLOP/s"
            text += f" ({flops / ceilings.flops_per_s:.0%} of arithmetic)"
        return f"{text}; {_change(new, old)}" if old else text


def _verdict(cases: str, error: float, begin: float) -> str:
    seconds = time.perf_counter() - begin
    return f"OK  {cases} cases, greatest relative error {error:.1e}; took {seconds:.2f} s"


def _change(new: list[float], old: list[float]) -> str:
    """How the fastest run compares with that of before, beside how far the faster quarters spread."""
    change = min(new) / min(old) - 1
    noise = max(NOISE, *(sorted(runs)[len(runs) // 4] / min(runs) - 1 for runs in (new, old)))
    before = f"{min(old) * 1e3:.3f} ms"
    if abs(change) <= noise:
        return f"as before, {before}, within {noise:.0%}"
    return f"{abs(change):.0%} {'slower' if change > 0 else 'faster'} than before, {before}"
