"""Kernels beside their oracles and beside their last right versions: what shader_loop.py prints."""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Sequence
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

    batch, seqlen, d_model   of the training step at whose sizes kernels are timed
    at    other sizes to time at, as "rows=4096 d_model=512"
    """

    def __init__(self, device: Device, batch: int, seqlen: int, d_model: int, at: str = "") -> None:
        self.device, self.buffers = device, Buffers(device)
        self.sizes, self.at = (batch, seqlen, d_model), at
        self._right: dict[str, Any] = {}  # trials
        self.declare()

    @functools.cached_property
    def ceilings(self) -> Ceilings | None:
        """What the adapter reaches; None where it has no clock."""
        timed = "timestamp-query" in self.device.target.features
        return measure_ceilings(self.device) if timed else None

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
            vocab_size=256, d_model=d_model, layers=tuple(LAYER_TYPES), mlp="swiglu"
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

    def check(self, name: str) -> tuple[bool, str]:
        """Render, compile, compare and time a kernel by its templates as they are now.

        Returns whether it is right, and what to print. Raises what an oracle raises.
        """
        ceilings = self.ceilings
        begin = time.perf_counter()
        try:
            use_templates(Templates(SHADER_DIR), [name])
            cases, error = 0, 0.0
            for variant in self._harness.variants(name, [self.device.target.kind]):
                for accumulate in [True, False] if variant.kernel.adds else [True]:
                    rng = np.random.default_rng(0)
                    found = self._harness.examine(variant, self.buffers, rng, accumulate)
                    cases, error = cases + 1, max(error, found.error)
                    if found.faults:
                        how = "" if accumulate else ", overwriting"
                        text = f"WRONG  {variant.case}{how}: {'; '.join(found.faults)}"
                        text += f"; greatest relative error {found.error:.1e}"
                        return False, text
            speed = self._time(name, ceilings) if ceilings else "not timed: no timestamp queries"
        except WgslTrainError as err:
            return False, f"ERROR  {err}"
        seconds = time.perf_counter() - begin
        text = f"OK  {cases} cases, greatest relative error {error:.1e}; took {seconds:.2f} s"
        return True, f"{text}\n    {speed}"

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

    def _time(self, name: str, ceilings: Ceilings) -> str:
        """Time it in turns with its last right version, whose place it takes."""
        where, like = self._like(name)
        before = self._right.get(name)
        trial = self._trial(Buffers(self.device), like, self.device.target)
        trial.write(trial.draw())
        warm_up(trial.encoder, "forward", seconds=0.05)
        rounds = int(min(50, max(5, MEASURE / max(trial.seconds(), 1e-6))))
        new, old = [], []
        for _ in range(rounds):
            new.append(max(trial.seconds(repeats=1), 1e-9))
            if before:
                old.append(max(before.seconds(repeats=1), 1e-9))
        if before:
            before.encoder.buffers.free()
        self._right[name] = trial
        seconds = min(new)  # other work on the machine only adds
        d = trial.dispatch
        rate, flops = d.nbytes / seconds, d.flops / seconds
        text = f"{where}: {seconds * 1e3:.3f} ms, {rate / 1e9:.2f} GB/s"
        text += f" ({rate / ceilings.copy_bytes_per_s:.0%} of copying)"
        if d.flops:
            text += f", {flops / 1e9:.2f} GFLOP/s"
            text += f" ({flops / ceilings.flops_per_s:.0%} of arithmetic)"
        return f"{text}; {_change(new, old)}" if old else text


def _change(new: list[float], old: list[float]) -> str:
    """How the fastest run compares with that of before, beside how far the faster quarters spread."""
    change = min(new) / min(old) - 1
    noise = max(NOISE, *(sorted(runs)[len(runs) // 4] / min(runs) - 1 for runs in (new, old)))
    before = f"{min(old) * 1e3:.3f} ms"
    if abs(change) <= noise:
        return f"as before, {before}, within {noise:.0%}"
    return f"{abs(change):.0%} {'slower' if change > 0 else 'faster'} than before, {before}"
