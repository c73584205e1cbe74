"""Times kernels and whole training steps, with other programs beside them in the same run.

    python tools/bench.py                         what suits the adapter, all installed peers
    python tools/bench.py --configs XS,S --kernels none --peers torch,jax,numpy
    python tools/bench.py --peers none --json new.json --against old.json --factor 1.2

Every side runs as a process of its own, in turn (A B A B ...), on the same weights, tokens and
inputs. Time is the median over rounds of medians after a warm-up: of our kernels by the GPU's own
clock, of all else as the caller sees it, many runs in a row with one wait at the end. That all
sides computed the same is checked: by the first and the sixth loss of a step, by the root mean
square of what a kernel returns. "ratio" is a peer's time in units of ours: above 1, ours is faster.

A peer is a script in tools/peers, and needs its packages: in this interpreter, or in others that
--python or WGSL_TRAIN_PEER_PYTHON name, as PATH for all or PEER=PATH,PEER=PATH. With "all", peers
on the CPU do not stand beside a GPU.

Exit status: 0; 1 where ours failed, results differ, or a time regressed; 2 where the request makes
no sense.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wgsl_train import MambaConfig
from wgsl_train.models.initialization import initialize

ROOT = Path(__file__).resolve().parent.parent
OURS = "wgsl_train"
SCRIPTS = {
    OURS: ["ours.py"],
    "torch": ["torch_peer.py"],
    "torch-autograd": ["torch_peer.py", "--autograd"],
    "torch-compiled": ["torch_peer.py", "--autograd", "--compile"],
    "mamba_ssm": ["mamba_ssm_peer.py"],
    "hf": ["hf_peer.py"],
    "jax": ["jax_peer.py"],
    "numpy": ["numpy_peer.py"],
    "tinygrad": ["tinygrad_peer.py"],
}
PEERS = [name for name in SCRIPTS if name != OURS]
SLOW_TO_START = {"torch-compiled"}  # only where named: minutes a round

# vocab_size, d_model, n_layer, batch, seqlen
CONFIGS = {
    "XS": (256, 64, 2, 4, 64),
    "S": (256, 128, 4, 8, 256),
    "M": (256, 256, 6, 4, 512),
    "tiny": (256, 128, 4, 8, 256),
    "25m": (256, 512, 12, 16, 512),
    "130m": (50280, 768, 24, 8, 1024),
}
# The layers of a model that a config's name ends in, as in S-mamba2; by default Mamba's
LAYERS: dict[str, dict[str, Any]] = {
    "mamba2": {"d_state": 128, "head_dim": 64},
    "attention": {"mlp": "swiglu"},
}
# What is run by default, on an adapter that a CPU emulates and on a GPU
DEFAULT_CONFIGS = {True: ["XS", "S", "M"], False: ["tiny", "25m", "130m"]}
MATMUL = {True: [512], False: [4096]}  # n
SCAN = {  # batch, seqlen, d_inner, d_state
    True: [(2, 256, 128, 16)],
    False: [(8, 1024, 1536, 16), (2, 4096, 1536, 16), (4, 2048, 2048, 16)],
}
COPY = {True: 8 << 20, False: 256 << 20}  # elements, or as many as the adapter binds
KERNELS = ["matmul", "scan", "copy"]

TRAINING = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
}
# of a model's config, as peers read them
_SIZES = [
    *("vocab_size", "d_model", "n_layer", "norm_eps", "d_inner", "d_state", "dt_rank"),
    *("n_heads", "head_dim", "attn_heads", "attn_head_dim"),
]
TOLERANCE = 1e-4  # of losses, and relative of kernels' results


class BenchError(Exception):
    """The request makes no sense, or a side did not answer."""


@dataclass(frozen=True)
class Case:
    """What all sides do: its name, the numbers that the scripts read, and how much work it is."""

    name: str
    numbers: dict[str, Any]
    amount: float
    unit: str  # of amount a second

    def save(self, path: Path) -> None:
        arrays: dict[str, Any] = {}
        if self.numbers["work"] == "step":
            n = self.numbers
            arrays = dict(initialize(MambaConfig(**n["model"]), seed=0))
            shape = (n["batch"], n["seqlen"])
            arrays["tokens"] = np.random.default_rng(0).integers(0, n["vocab_size"], shape)
        np.savez(path, case=json.dumps(self.numbers), **arrays)


def step_configs() -> list[str]:
    """The names that --configs takes: of CONFIGS, and with layers of LAYERS."""
    return [*CONFIGS, *(f"{name}-{layers}" for name in CONFIGS for layers in LAYERS)]


def step_case(name: str, activation_checkpointing: bool = False) -> Case:
    """One training step of a model of `step_configs`."""
    sizes, _, layers = name.partition("-")
    vocab_size, d_model, n_layer, batch, seqlen = CONFIGS[sizes]
    model: dict[str, Any] = {"vocab_size": vocab_size, "d_model": d_model, "n_layer": n_layer}
    if layers:
        model |= {**LAYERS[layers], "layers": (layers,) * n_layer}
    config = MambaConfig(**model)
    numbers = {
        **{key: getattr(config, key) for key in _SIZES},
        "work": "step",
        "model": model,
        "layers": layers or "mamba",
        "batch": batch,
        "seqlen": seqlen,
        "activation_checkpointing": activation_checkpointing,
        **TRAINING,
    }
    suffix = " checkpointed" if activation_checkpointing else ""
    return Case(f"step {name}{suffix}", numbers, batch * seqlen / 1e3, "ktokens/s")


def kernel_cases(kernel: str, on_cpu: bool, largest_binding: int) -> list[Case]:
    """The cases of one of KERNELS on such an adapter."""
    if kernel == "matmul":
        return [
            Case(f"matmul {n}", {"work": "matmul", "n": n}, 2 * n**3 / 1e9, "GFLOP/s")
            for n in MATMUL[on_cpu]
        ]
    if kernel == "copy":
        n = min(COPY[on_cpu], largest_binding // 4)
        return [Case(f"copy {n}", {"work": "copy", "n": n}, 8 * n / 1e9, "GB/s")]
    keys = ("batch", "seqlen", "d_inner", "d_state")
    return [
        Case(
            "scan " + "x".join(map(str, shape)),
            {"work": "scan", **dict(zip(keys, shape, strict=True))},
            float(np.prod(shape)) / 1e9,
            "Gstates/s",
        )
        for shape in SCAN[on_cpu]
    ]


@dataclass(frozen=True)
class Side:
    """One program of the comparison: how it is called, and what it said about itself."""

    name: str
    python: str
    about: Mapping[str, Any]

    def __str__(self) -> str:
        versions = ", ".join(f"{k} {v}" for k, v in self.about["versions"].items())
        return f"{self.name}: {versions} on {self.about['device']}"


def call(name: str, python: str, arguments: Sequence[str], timeout: float, on_cpu: bool) -> Any:
    """Run a side's script; what it answers. Raises BenchError with the last line it said."""
    script, *options = SCRIPTS[name]
    # These two make OpenBLAS take kernels for another CPU
    hidden = {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"}
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    if name == OURS:
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    if on_cpu:  # all sides on the same processor
        env |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    command = [python, str(ROOT / "tools" / "peers" / script), *options, *arguments]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise BenchError(f"no answer within {timeout:.0f} s") from None
    except OSError as error:
        raise BenchError(f"{python}: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing said"]
        raise BenchError(f"exit status {done.returncode}: {said[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def interpreters(text: str) -> dict[str, str]:
    """{peer: path} from "PATH" (for all, under "") or "PEER=PATH,PEER=PATH,PATH"."""
    found = {}
    for item in filter(None, text.split(",")):
        peer, _, path = item.rpartition("=")
        if peer and peer not in PEERS:
            raise BenchError(f"--python names {peer!r}; peers are {', '.join(PEERS)}")
        found[peer] = path
    return found


def chosen(text: str, among: Iterable[str], default: Iterable[str], what: str) -> list[str]:
    """The names in a comma-separated option; "all" is the default, "none" is none."""
    among = list(among)
    names = {"all": list(default), "none": []}.get(text, text.split(","))
    for name in names:
        if name not in among:
            raise BenchError(f"{what} {name!r} is unknown; there are {', '.join(among)}")
    return names


def find_peers(text: str, pythons: Mapping[str, str], on_cpu: bool) -> list[Side]:
    """The peers that are asked for. Of "all", those that are installed and on a like device."""
    sides = []
    usual = [name for name in PEERS if name not in SLOW_TO_START]
    for name in chosen(text, PEERS, usual, "peer"):
        python = pythons.get(name) or pythons.get("") or sys.executable
        try:
            side = Side(name, python, call(name, python, ["--about"], 120, on_cpu))
        except BenchError as error:
            if text != "all":
                raise BenchError(f"{name} cannot run: {error}") from None
            print(f"{name} left out: {error}")
            continue
        if text == "all" and not on_cpu and side.about["device"] == "cpu":
            print(f"{name} left out: on the CPU")
            continue
        sides.append(side)
    return sides


def _does(side: Side, case: Case) -> bool:
    """Whether a side has the case's work, and knows the model's layers."""
    layers = case.numbers.get("layers")
    known = layers is None or layers in side.about["layers"]
    return known and case.numbers["work"] in side.about["works"]


def measure(
    case: Case, sides: Sequence[Side], args: argparse.Namespace, on_cpu: bool
) -> list[dict[str, Any]]:
    """All sides in turn, several times. One result a side and part, ours first."""
    limit = args.limit
    answers: dict[str, list[Any]] = {side.name: [] for side in sides}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.npz"
        case.save(path)
        arguments = [str(path), f"--limit={limit}"]
        arguments += [f"--warm-up={args.warm_up}", f"--seconds={args.seconds}"]
        slow = set()
        for i in range(args.rounds):
            for side in sides:
                if side.name in failures or side.name in slow:
                    continue
                _progress(f"{case.name}, round {i + 1}: {side.name}")
                begin = time.perf_counter()
                try:
                    answer = call(side.name, side.python, arguments, 2 * limit + 60, on_cpu)
                    answers[side.name].append(answer)
                except BenchError as error:
                    failures[side.name] = str(error)
                if time.perf_counter() - begin > limit:
                    slow.add(side.name)  # one round must do
    _progress("")
    results: list[dict[str, Any]] = []
    for side in sides:
        if side.name in failures:
            results.append({"name": case.name, "peer": side.name, "failed": failures[side.name]})
        else:
            results += summarize(case, side.name, answers[side.name])
    ours = {r["name"]: r for r in results if r["peer"] == OURS and "ms" in r}
    for r in results:
        if "ms" in r and r["name"] in ours:
            r["ratio"] = r["ms"] / ours[r["name"]]["ms"]
            r["differs"] = differences(ours[r["name"]], r)
    return results


def summarize(case: Case, peer: str, answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One side's answers of all rounds as one result a part: medians of time, most memory."""

    def most(key: str) -> int | None:
        return max((a[key] for a in answers if a[key] is not None), default=None)

    results = []
    for part in answers[-1]["times"]:
        times = [1e3 * a["times"][part] for a in answers]
        ms = statistics.median(times)
        results.append(
            {
                "name": case.name if part == case.numbers["work"] else f"{case.name} {part}",
                "peer": peer,
                "ms": ms,
                "ms_by_round": times,
                "rate": 1e3 * case.amount / ms,
                "unit": case.unit,
                **{k: answers[-1][k] for k in ("checks", "loss_first", "loss_sixth")},
                "peak_rss": most("peak_rss"),
                "gpu_bytes": most("gpu_bytes"),
            }
        )
    return results


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def differences(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> list[str]:
    """Where a peer's results are not ours: one line each. Losses that it had no time for, and
    checks that only one side makes, are not compared."""
    pairs = {
        f"{which} loss": (ours[f"loss_{which}"], peer[f"loss_{which}"], 1.0)
        for which in ("first", "sixth")
    }
    for name, value in ours["checks"].items():
        pairs[name] = (value, peer["checks"].get(name), abs(value))
    return [
        f"{name} is {theirs:.7g}, ours {mine:.7g}"
        for name, (mine, theirs, scale) in pairs.items()
        if mine is not None and theirs is not None and not abs(mine - theirs) <= TOLERANCE * scale
    ]


def regressions(
    now: Mapping[str, Any], before: Mapping[str, Any], factor: float
) -> tuple[list[str], int]:
    """What takes more than `factor` times as long as in a stored run: a line each; and how many
    of our results have a counterpart there, by name and adapter."""
    old = {r["name"]: r["ms"] for r in before["results"] if r["peer"] == OURS and "ms" in r}
    if before["adapter"] != now["adapter"]:
        old = {}
    pairs = [
        (r["name"], r["ms"], old[r["name"]])
        for r in now["results"]
        if r["peer"] == OURS and "ms" in r and r["name"] in old
    ]
    slower = [
        f"{name}: {ms:.4g} ms, was {was:.4g} ms: {ms / was:.2f} times as long"
        for name, ms, was in pairs
        if ms > factor * was
    ]
    return slower, len(pairs)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results of one case as text."""
    lines = []
    for name in dict.fromkeys(r["name"] for r in results):
        rows = [r for r in results if r["name"] == name]
        if timed := [r for r in rows if "ms" in r]:
            head = f"{name:28}{'ms':>10}{'spread':>8}{'ratio':>8}{timed[0]['unit']:>11}"
            if timed[0]["loss_first"] is not None:
                head += f"{'peak RSS':>11}{'GPU':>11}{'first loss':>13}{'sixth loss':>12}"
            lines.append(head)
        for r in rows:
            if "failed" in r:
                lines.append(f"  {r['peer']:26}failed on {name}: {r['failed']}")
                continue
            spread = (max(r["ms_by_round"]) - min(r["ms_by_round"])) / r["ms"]
            ratio = f"{r['ratio']:.2f}" if "ratio" in r else "-"
            line = f"  {r['peer']:26}{r['ms']:10.3f}{spread:8.0%}{ratio:>8}{r['rate']:11,.2f}"
            if r["loss_first"] is not None:
                line += f"{_mebibytes(r['peak_rss']):>11}{_mebibytes(r['gpu_bytes']):>11}"
                line += f"{_loss(r['loss_first']):>13}{_loss(r['loss_sixth']):>12}"
            lines.append(line)
            lines += [f"    DIFFERS: {text}" for text in r.get("differs", [])]
    return "\n".join(lines)


def _mebibytes(n: int | None) -> str:
    return "-" if n is None else f"{n / 2**20:,.0f} MiB"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def _host() -> str:
    """The processor's name and how many of them."""
    cpuinfo = Path("/proc/cpuinfo")
    name = platform.processor() or platform.machine()
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((s.split(":")[1].strip() for s in lines if s.startswith("model name")), name)
    return f"{os.cpu_count()} x {name}"


def _parser() -> argparse.ArgumentParser:
    assert __doc__
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--configs",
        default="all",
        help=f"of {','.join(CONFIGS)}, each also with -{' or -'.join(LAYERS)} behind it; or none",
    )
    p.add_argument("--kernels", default="all", help="of " + ",".join(KERNELS) + "; or none")
    p.add_argument("--peers", default="all", help="of " + ",".join(PEERS) + "; or all, none")
    python = os.environ.get("WGSL_TRAIN_PEER_PYTHON", "")
    p.add_argument("--python", default=python, help="interpreters of peers: [PEER=]PATH,...")
    p.add_argument("--device", help="adapter: index or part of its name")
    p.add_argument("--activation-checkpointing", action="store_true", help="in our steps")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--warm-up", type=float, default=0.3, help="seconds, of each part, a round")
    p.add_argument("--seconds", type=float, default=3.0, help="to time each part for, a round")
    p.add_argument(
        "--limit", type=float, default=120.0, help="seconds for a side too slow for that"
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write results here")
    p.add_argument("--against", type=Path, metavar="FILE", help="compare with such a file")
    p.add_argument("--factor", type=float, default=1.2, help="a time that grew by more is an error")
    return p


def run(args: argparse.Namespace) -> int:
    """Do what is asked; the exit status. Raises BenchError."""
    before = None
    if args.rounds < 1:
        raise BenchError(f"--rounds is {args.rounds}, must be 1 or more")
    if args.against:
        try:
            before = json.loads(args.against.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BenchError(f"--against {args.against}: {error}") from None
    if args.device:
        os.environ["WGSL_TRAIN_ADAPTER"] = args.device
    ours = Side(OURS, sys.executable, call(OURS, sys.executable, ["--about"], 120, False))
    on_cpu = ours.about["kind"] == "CPU"
    configs = chosen(args.configs, step_configs(), DEFAULT_CONFIGS[on_cpu], "config")
    kernels = chosen(args.kernels, KERNELS, KERNELS, "kernel")
    peers = find_peers(args.peers, interpreters(args.python), on_cpu)
    report: dict[str, Any] = {
        "adapter": ours.about["device"],
        **{k: ours.about[k] for k in ("kind", "backend", "driver")},
        "wgpu": ours.about["versions"]["wgpu"],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": _host(),
        "platform": f"Python {platform.python_version()} on {platform.platform()}",
        "command": shlex.join(["tools/bench.py", *sys.argv[1:]]),
        "sides": {s.name: s.about for s in [ours, *peers]},
        "results": [],
    }
    print("{adapter} ({kind}, {backend}, {driver}), wgpu {wgpu}, {date}".format(**report))
    print("{host}, {platform}".format(**report))
    print("\n".join(map(str, [ours, *peers])), flush=True)
    cases = [c for k in kernels for c in kernel_cases(k, on_cpu, ours.about["largest_binding"])]
    cases += [step_case(name, args.activation_checkpointing) for name in configs]
    sound = True
    for case in cases:
        able = [s for s in [ours, *peers] if _does(s, case)]
        results = measure(case, able, args, on_cpu)
        print(f"\n{table(results)}", flush=True)
        sound &= not any(r.get("differs") for r in results) and "failed" not in results[0]
        report["results"] += results
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if before:
        slower, compared = regressions(report, before, args.factor)
        if not compared:
            raise BenchError(
                f"--against {args.against}: nothing of this run on {report['adapter']}"
            )
        print(f"\n{compared} results compared with {args.against}, {len(slower)} regressed")
        for line in slower:
            print(f"  {line}")
        sound &= not slower
    return 0 if sound else 1


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    try:
        return run(_parser().parse_args(argv))
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
