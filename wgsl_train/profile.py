"""Where the time of a training step goes: by kernel, beside what the adapter can do."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .device import Device
from .encoder import Buffers, Encoder, Timing
from .kernel import Kernel
from .model import Model
from .ops import probe
from .plan import Layout, Plan

SECTIONS = ("forward", "backward", "update")


@dataclass(frozen=True)
class Ceilings:
    """What the adapter reaches in kernels that only copy or only multiply and add."""

    copy_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Row:
    """All dispatches of one kernel in a step. Seconds, bytes and operations are their sums."""

    kernel: str
    dispatches: int
    seconds: float
    nbytes: int
    flops: int


@dataclass(frozen=True)
class Profile:
    """The profile of a step. Times in seconds.

    wall     of one step in a run of steps, as a user sees it
    encode   of it, in which Python encodes; hidden behind the GPU's work on the step before,
             unless it is longer
    submit   of it, in which the driver takes the commands; hidden likewise
    gpu      sum over all dispatches, each timed in a pass of its own
    idle     wall - gpu: gaps between dispatches, waiting for the host; near 0 is good, and below 0
             where passes of their own cost more than they take in one
    """

    adapter: str
    batch: int
    seqlen: int
    wall: float
    encode: float
    submit: float
    gpu: float
    idle: float
    ceilings: Ceilings | None
    rows: list[Row]
    timed_by: str
    timings: list[Timing]

    def to_dict(self) -> dict[str, Any]:
        values = {k: v for k, v in vars(self).items() if k not in ("timings", "rows", "ceilings")}
        values["ceilings"] = asdict(self.ceilings) if self.ceilings else None
        values["rows"] = [asdict(r) for r in self.rows]
        return values

    def __str__(self) -> str:
        tokens = self.batch * self.seqlen
        lines = [
            f"{self.adapter}, batch {self.batch} x {self.seqlen} tokens, timed by {self.timed_by}",
            f"step {self.wall * 1e3:.3f} ms ({tokens / self.wall:,.0f} tokens/s): GPU "
            f"{self.gpu * 1e3:.3f} ms, idle {self.idle * 1e3:.3f} ms; encoding "
            f"{self.encode * 1e3:.3f} ms, submitting {self.submit * 1e3:.3f} ms",
        ]
        head = f"{'kernel':34}{'n':>5}{'ms':>10}{'share':>8}{'GB/s':>9}{'GFLOP/s':>10}"
        if self.ceilings:
            c = self.ceilings
            lines.append(
                f"ceilings: copy {c.copy_bytes_per_s / 1e9:,.1f} GB/s, "
                f"arithmetic {c.flops_per_s / 1e9:,.1f} GFLOP/s"
            )
            head += f"{'of copy':>9}{'of arith.':>11}"
        lines.append(head)
        for row in self.rows:
            rate, flops = row.nbytes / row.seconds, row.flops / row.seconds
            line = (
                f"{row.kernel:34}{row.dispatches:5}{row.seconds * 1e3:10.3f}"
                f"{row.seconds / self.gpu:8.1%}{rate / 1e9:9.1f}{flops / 1e9:10.1f}"
            )
            if self.ceilings:
                line += f"{rate / self.ceilings.copy_bytes_per_s:9.1%}"
                line += f"{flops / self.ceilings.flops_per_s:11.1%}"
            lines.append(line)
        return "\n".join(lines)

    def write_trace(self, path: str | Path) -> None:
        """A trace file for Perfetto or chrome://tracing: dispatches one after another, or whole
        sections where there are no timestamp queries."""
        events: list[dict[str, Any]] = []
        start = 0.0

        def add(name: str, where: str, seconds: float, detail: dict[str, Any]) -> None:
            nonlocal start
            event = {"name": name, "cat": where, "ph": "X", "ts": start * 1e6, "args": detail}
            events.append({**event, "dur": seconds * 1e6, "pid": 1, "tid": 1})
            start += seconds

        for t in self.timings:
            d = t.dispatch
            detail = {"grid": d.grid, "bytes": d.nbytes, "flops": d.flops, "where": d.label}
            add(d.kernel.name, d.label or "step", t.seconds, {**detail, **d.dims})
        if not self.timings:
            for row in self.rows:
                add(row.kernel, "step", row.seconds, {"bytes": row.nbytes, "flops": row.flops})
        names = [
            {"name": n, "ph": "M", "pid": 1, "tid": 1, "args": {"name": v}}
            for n, v in (("process_name", self.adapter), ("thread_name", "GPU"))
        ]
        Path(path).write_text(json.dumps({"traceEvents": names + events}), encoding="utf-8")


def measure_ceilings(device: Device) -> Ceilings:
    """Copy and arithmetic rates of this adapter, the best of several runs."""
    size = min(64 << 20, device.target.usable_binding // 4)  # elements; well past any cache
    n = (8 << 20 if device.is_cpu else size) // 4 * 4
    small = 1 << (16 if device.is_cpu else 22)
    copy = _fastest(device, probe.COPY, n)
    fma = _fastest(device, probe.FMA, small)
    return Ceilings(8 * n / copy.seconds, fma.dispatch.flops / fma.seconds)


def _fastest(device: Device, kernel: Kernel, n: int) -> Timing:
    plan = Plan(Layout([], device.target), device.target)
    x, out = plan.persistent("probe.x", (n,)), plan.tensor("probe.out", (n,))
    plan.dispatch(kernel, x=x, out=out)
    buffers = Buffers(device)
    encoder = Encoder(buffers, plan)
    encoder.write(x, np.random.default_rng(0).random(n, np.float32))
    warm_up(encoder, "forward")
    return min((encoder.time("forward")[0] for _ in range(5)), key=lambda t: t.seconds)


def warm_up(encoder: Encoder, *sections: str, seconds: float = 0.3) -> None:
    """Run for a while: a GPU that was idle, or waits between runs, has a low clock."""
    start, runs = time.perf_counter(), 1
    while True:
        began = time.perf_counter()
        for _ in range(runs):
            encoder.run(*sections)
        encoder.device.wait()
        now = time.perf_counter()
        if now > start + seconds:
            return
        if now - began < 0.01:  # mostly waiting to hear of it
            runs *= 2


def profile_step(model: Model, step: Any, steps: int = 10) -> Profile:
    """Profile a step of `Model.step_encoder` that updates, as the mean over `steps` of them.

    They are real optimizer steps on random tokens, under the hyper-parameters that are on the GPU:
    weights, moments, counters and carried states move, and the log fills. `Trainer.profile` puts
    everything back. Where the adapter has no timestamp queries, whole sections are timed by the
    host's clock, and there are no ceilings; the profile says so.
    """
    encoder, tensors = step.encoder, step.tensors
    batch, seqlen = tensors.tokens.shape
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, model.config.vocab_size, (2, batch, seqlen))
    model.load_batch(step, tokens.astype(np.uint32), targets.astype(np.uint32), tokens.size)
    warm_up(encoder, *SECTIONS)
    encode = submit = 0.0
    begin = time.perf_counter()
    for _ in range(steps):
        start = time.perf_counter()
        commands = encoder.encode(*SECTIONS)
        encoded = time.perf_counter()
        encoder.submit(commands)
        encode += encoded - start
        submit += time.perf_counter() - encoded
    encoder.device.wait()
    wall = (time.perf_counter() - begin) / steps
    if "timestamp-query" in model.device.target.features:
        timings = encoder.time(*SECTIONS, repeats=3)
        rows = _by_kernel(timings)
        ceilings, timed_by = measure_ceilings(model.device), "timestamp queries"
    else:
        timings, ceilings, timed_by = [], None, "the host's clock (no timestamp queries): sections"
        rows = [_section(encoder, s, steps) for s in SECTIONS]
    gpu = sum(r.seconds for r in rows)
    return Profile(
        adapter=str(model.device),
        batch=batch,
        seqlen=seqlen,
        wall=wall,
        encode=encode / steps,
        submit=submit / steps,
        gpu=gpu,
        idle=wall - gpu,
        ceilings=ceilings,
        rows=rows,
        timed_by=timed_by,
        timings=timings,
    )


def _by_kernel(timings: Sequence[Timing]) -> list[Row]:
    groups: dict[str, list[Timing]] = {}
    for t in timings:
        groups.setdefault(t.dispatch.kernel.name, []).append(t)
    rows = [
        Row(
            name,
            len(ts),
            sum(t.seconds for t in ts),
            sum(t.dispatch.nbytes for t in ts),
            sum(t.dispatch.flops for t in ts),
        )
        for name, ts in groups.items()
    ]
    return sorted(rows, key=lambda r: -r.seconds)


def _section(encoder: Encoder, section: str, steps: int) -> Row:
    """A whole section by the host's clock."""
    begin = time.perf_counter()
    for _ in range(steps):
        encoder.run(section)
    encoder.device.wait()
    seconds = (time.perf_counter() - begin) / steps
    dispatches = encoder.plan.sections[section]
    return Row(
        section,
        len(dispatches),
        seconds,
        sum(d.nbytes for d in dispatches),
        sum(d.flops for d in dispatches),
    )
