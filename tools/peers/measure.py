"""What all peers share: the case they work on, time taken alike, one line of JSON as the answer.

    python NAME_peer.py --about                             what it is, and what it can do
    python NAME_peer.py CASE.npz [--warm-up 0.3] [--seconds 3] [--limit 120]

Needs NumPy and the standard library only, since each peer may have an interpreter of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

WORKS = ("step", "matmul", "scan", "copy")
ADAMW = ("lr", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm")  # of a step's case
LOSSES = 6  # steps whose losses are looked at
BLOCK = 0.2  # seconds of work that are waited for once
IN_A_ROW = 5  # or more runs at once, of what takes less than a second


class Case(SimpleNamespace):
    """What is to be done: the numbers of a case as attributes, and its arrays.

    A step has the type of a model's `layers` and its sizes under their usual names (vocab_size,
    d_model, ...), the numbers of `ADAMW`, which decays every weight, `tokens` (batch, seqlen), and
    `weights` by their names in Hugging Face's checkpoints. The loss is that of each sequence's
    tokens after its first.
    Kernels draw their inputs here.
    """

    @classmethod
    def load(cls, path: str | Path) -> Case:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files if name != "case"}
            case = cls(**json.loads(str(file["case"])))
        case.tokens = arrays.pop("tokens", None)
        case.weights = arrays
        return case

    def matmul_inputs(self) -> dict[str, Array]:
        """x, weight and dy, each (n, n)."""
        rng = np.random.default_rng(0)
        return {name: _uniform(rng, -1, 1, self.n, self.n) for name in ("x", "weight", "dy")}

    def scan_inputs(self) -> dict[str, Array]:
        """The scan's operands: u, delta (after its softplus), z and dg (batch, seqlen, d_inner),
        B and C (batch, seqlen, d_state), A_log (d_inner, d_state), D (d_inner,)."""
        rng = np.random.default_rng(0)
        wide = (self.batch, self.seqlen, self.d_inner)
        narrow = (self.batch, self.seqlen, self.d_state)
        A_log = np.log(np.arange(1, self.d_state + 1, dtype=np.float32))
        return {
            "u": _uniform(rng, -1, 1, *wide),
            "delta": _uniform(rng, 0.001, 0.1, *wide),
            "A_log": np.tile(A_log, (self.d_inner, 1)),
            "B": _uniform(rng, -1, 1, *narrow),
            "C": _uniform(rng, -1, 1, *narrow),
            "D": _uniform(rng, 0.5, 1.5, self.d_inner),
            "z": _uniform(rng, -2, 2, *wide),
            "dg": _uniform(rng, -1, 1, *wide),
        }

    def copy_input(self) -> Array:
        return _uniform(np.random.default_rng(0), -1, 1, self.n)


def _uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> Array:
    return rng.random(shape, np.float32) * np.float32(high - low) + np.float32(low)


class Work:
    """Something to time.

    start    does it once, or asks for it: what it returns may still be under way
    wait     returns once such a result is there
    values   a result as numbers: {"loss": ...} of a step, arrays by name of a kernel
    """

    def __init__(
        self,
        start: Callable[[], Any],
        values: Callable[[Any], dict[str, Any]],
        wait: Callable[[Any], Any] = lambda result: None,
    ) -> None:
        self.start, self.wait, self.values = start, wait, values

    def seconds(self, budget: float, warm_up: float) -> float:
        """Median seconds of one run, measured for about `budget` seconds after so many of warm-up:
        a GPU that was idle runs at a low clock at first."""
        once = min(self._block(1) for _ in until(warm_up))
        runs = max(IN_A_ROW if once < 1 else 1, round(BLOCK / once))
        return statistics.median(self._block(runs) for _ in until(budget, 3))

    def _block(self, runs: int) -> float:
        """Seconds a run of several in a row, with one wait at the end."""
        begin = time.perf_counter()
        for _ in range(runs):
            result = self.start()
        self.wait(result)
        return (time.perf_counter() - begin) / runs


def until(seconds: float, at_least: int = 1) -> Iterator[int]:
    """0, 1, 2, ... until so many seconds have passed."""
    end = time.perf_counter() + seconds
    count = 0
    while count < at_least or time.perf_counter() < end:
        yield count
        count += 1


class Peer:
    """A program to measure. Subclasses define those of step, matmul, scan and copy that they can
    do: each takes a Case and returns {part: Work}.

    step     {"step": one training step: forward, backward, clipping, AdamW}
    matmul   {"x_wt": x weightᵀ, "dy_w": dy weight, "dyt_x": dyᵀ x}
    scan     {"forward": g = (y + D u) silu(z), "backward": all gradients, from dg}; `delta` is
             given after its softplus, and its gradient is the one before
    copy     {"copy": out = x}

    layers   the types of a model's layers that step knows
    """

    layers: tuple[str, ...] = ("mamba",)

    def about(self) -> dict[str, Any]:
        """{"versions": {package: version}, "device": "cpu" or the GPU's name}"""
        raise NotImplementedError

    def gpu_bytes(self) -> int | None:
        """Most bytes of GPU memory held at a time; None where that is not known."""
        return None

    def main(self) -> None:
        parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
        parser.add_argument("case", nargs="?")
        parser.add_argument("--about", action="store_true")
        parser.add_argument("--warm-up", type=float, default=0.3, help="seconds, of each part")
        parser.add_argument("--seconds", type=float, default=3.0, help="to measure each part for")
        parser.add_argument("--limit", type=float, default=120.0, help="seconds, of slow steps")
        args, _ = parser.parse_known_args()
        if args.about:
            works = [w for w in WORKS if hasattr(self, w)]
            answer = {**self.about(), "works": works, "layers": self.layers}
        elif args.case:
            answer = self._measure(Case.load(args.case), args.warm_up, args.seconds, args.limit)
        else:
            parser.error("give a case, or --about")
        print(json.dumps(answer), flush=True)

    def _measure(self, case: Case, warm_up: float, seconds: float, limit: float) -> dict[str, Any]:
        times: dict[str, float] = {}
        checks: dict[str, float] = {}
        losses: list[float] = []
        for part, work in getattr(self, case.work)(case).items():
            begin, singles = time.perf_counter(), []
            for _ in range(LOSSES if case.work == "step" else 1):
                before = time.perf_counter()
                result = work.start()
                work.wait(result)
                singles.append(time.perf_counter() - before)
                values = work.values(result)
                if case.work == "step":
                    losses.append(values["loss"])
                else:
                    checks |= {name: _rms(array) for name, array in values.items()}
                spent = time.perf_counter() - begin
                if spent + singles[-1] > limit:
                    break
            if spent + warm_up + seconds + 4 * singles[-1] > limit:
                times[part] = statistics.median(singles[1:] or singles)
            else:
                times[part] = work.seconds(seconds, warm_up)
        return {
            "times": times,
            "checks": checks,
            "loss_first": losses[0] if losses else None,
            "loss_sixth": losses[-1] if len(losses) == LOSSES else None,
            "peak_rss": _peak_rss(),
            "gpu_bytes": self.gpu_bytes(),
        }


def _rms(array: Any) -> float:
    """Root of the mean square, summed in float64."""
    flat = np.asarray(array).reshape(-1)
    pieces = (flat[i : i + (1 << 20)] for i in range(0, flat.size, 1 << 20))
    return float((sum(np.square(p, dtype=np.float64).sum() for p in pieces) / flat.size) ** 0.5)


def _peak_rss() -> int | None:
    """Most bytes of memory this process held; None where the system does not say."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent held when it forked
        line = next(s for s in status.read_text().splitlines() if s.startswith("VmHWM"))
        return int(line.split()[1]) << 10
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
