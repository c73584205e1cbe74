"""Checks and times kernels each time that one of their files is saved.

    python tools/shader_loop.py rms_norm_forward 'scan_*'
    wgsl-train dev rms_norm_forward 'scan_*'

At a save in shaders/, wgsl_train/ops/ or tests/oracle/, the kernels are rendered, compiled,
compared with their oracles at every case, and timed in turns with their last right versions, at
the sizes of a training step, or of --at. Printed are OK, or the first wrong element; the greatest relative
error; time, bytes and operations a second, beside what the adapter reaches in copying and in
arithmetic; and the change. The same fault is not printed twice.

The work is done in a process of its own, which is started anew where a driver ends it, or a kernel
does not end within --patience. So no shader ends the loop.

Exit status: 0 at Ctrl-C, or with --once where all kernels are right; 1 where one is not, or there
is no such kernel; 3 where there is no such adapter.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHADERS = ROOT / "shaders"
WATCHED = (SHADERS, ROOT / "wgsl_train" / "ops", ROOT / "tests" / "oracle")
REST = 100  # milliseconds without another save, before one is looked at: editors write in pieces


# The process that works. It alone imports what may be broken.


def work(connection: Connection, args: argparse.Namespace) -> None:
    """Answer requests (number, declare, changed), as `Loop.check` makes them.

    Every answer begins with the request's number. ("about", kernel) and ("done", kernel, right,
    text) tell of one kernel after another, then ("soon",). Cases that took too long for that
    follow: again about and done, then ("all",), unless another request has come. ("gone",) ends
    this process, so that a new one goes on; ("fatal", text, exit status) ends the loop.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    checker: Any = None
    stale = False  # whether declarations were changed since they were read
    while True:
        try:
            number, declare, changed = connection.recv()
        except EOFError:
            return
        try:
            if checker is None:
                checker = _checker(args)
                names = checker.names(args.kernels)
            elif stale := stale or declare:
                changed = None
                checker.declare()
                names, stale = checker.names(args.kernels), False
        except Exception as error:
            status = {"ConfigError": 1, "DeviceError": 3}.get(type(error).__name__)
            if status and not stale:
                connection.send((number, "fatal", str(error), status))
                return
            connection.send((number, "done", "declarations", False, f"ERROR  {place(error)}"))
            connection.send((number, "all" if stale else "gone"))
            if stale:
                continue
            return
        later = []
        for name in names:
            if changed is None or name in changed:
                reports = checker.check(name)
                if _tell(connection, number, name, reports, soon=True):
                    later.append((name, reports))
        connection.send((number, "soon"))
        for name, reports in later:
            if not connection.poll():
                _tell(connection, number, name, reports, soon=False)
            reports.close()
        if not connection.poll():
            connection.send((number, "all"))


def _tell(connection: Connection, number: int, name: str, reports: Any, soon: bool) -> bool:
    """Pass on reports: up to the first, or all until another request comes. Whether more may."""
    connection.send((number, "about", name))
    try:
        for report in reports:
            if report:
                connection.send((number, "done", name, *report))
            if soon and report:
                return True
            if not soon and connection.poll():
                return True
    except Exception as error:  # an oracle's, or a declaration's
        connection.send((number, "done", name, False, f"ERROR  {place(error)}"))
    return False


def _checker(args: argparse.Namespace) -> Any:
    from shader_check import Checker

    from wgsl_train.device import request_device

    device, timer = (request_device(args.device, quiet=True) for _ in range(2))
    small = device.is_cpu
    return Checker(
        device,
        timer,
        batch=args.batch_size or (4 if small else 8),
        seqlen=args.seq_len or (128 if small else 1024),
        d_model=args.d_model or (128 if small else 768),
        at=args.at,
        soon=args.soon,
    )


def place(error: Exception) -> str:
    """An error of the project's own Python, with its file and line."""
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno))
    own = [(Path(name), line) for name, line in frames if Path(name).is_relative_to(ROOT)]
    file, line = own[-1]
    return f"{file.relative_to(ROOT)}:{line}: {type(error).__name__}: {error}"


# The process that watches


class LoopError(Exception):
    """The loop makes no sense; what to say, and the exit status."""


class Loop:
    """Has kernels checked, and prints what is new about them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._worker: Any = None
        self._connection: Any = None
        self._number = 0  # of the last request
        self._about = ""  # what the process is at; nothing: it waits for a request
        self._heard = 0.0  # when it last said something
        self._faults: dict[str, str] = {}  # by kernel: printed, and not mended since

    @property
    def right(self) -> bool:
        """Whether nothing is known to be wrong."""
        return not self._faults

    def check(self, declare: bool = False, changed: set[str] | None = None) -> None:
        """Have kernels checked, and print what is known soon. What takes longer, `listen` tells.

        declare   whether files of Python have changed
        changed   kernels whose templates have; None: any
        """
        if self._worker is not None and not self._worker.is_alive():
            self.stop()
        if self._worker is None:
            context = multiprocessing.get_context("spawn")
            self._connection, other = context.Pipe()
            self._worker = context.Process(target=work, args=(other, self._args), daemon=True)
            self._worker.start()
            other.close()
            changed = None
        self._number += 1
        self._about, self._heard = "declarations", time.monotonic()
        self._connection.send((self._number, declare, changed))
        self.listen("soon")

    def listen(self, until: str = "") -> None:
        """Print what the process tells: until it has said so, or what it has told so far."""
        while self._about:
            left = self._heard + self._args.patience - time.monotonic()
            try:
                if not self._connection.poll(max(left, 0.0) if until else 0.0):
                    if left <= 0:
                        about = self.stop()
                        text = f"ERROR  no end after {self._args.patience:g} s: is there a loop"
                        self._print(about, False, f"{text} without one?")
                    return
                number, answer, *rest = self._connection.recv()
            except (EOFError, OSError):
                self._worker.join()
                code = self._worker.exitcode
                text = f"ERROR  the driver ended the process, exit code {code}"
                self._print(self.stop(), False, text)
                return
            self._heard = time.monotonic()
            if number != self._number:
                continue
            if answer == "fatal":
                raise LoopError(*rest)
            if answer == "about":
                (self._about,) = rest
            elif answer == "done":
                self._print(*rest)
            elif answer == "all":
                self._about = ""
            elif answer == "gone":
                self.stop()
            if answer == until:
                return

    def _print(self, kernel: str, right: bool, text: str) -> None:
        if right or self._faults.get(kernel) != text:
            print(f"{time.strftime('%H:%M:%S')} {kernel}  {text}", flush=True)
        if right:
            self._faults.pop(kernel, None)
        else:
            self._faults[kernel] = text
        if kernel != "declarations":
            self._faults.pop("declarations", None)

    def stop(self) -> str:
        """End the process that works. Returns what it was at."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.join()
            self._connection.close()
            self._worker = None
        about, self._about = self._about, ""
        return about


def run(args: argparse.Namespace) -> int:
    """Check once, or at every save. Returns the exit status."""
    loop = Loop(args)
    try:
        if args.once:
            loop.check()
            loop.listen("all")
            return 0 if loop.right else 1
        from watchfiles import watch

        saves = watch(
            *WATCHED,
            watch_filter=lambda _, path: path.endswith((".wgsl", ".py")),
            step=REST,
            rust_timeout=200,
            yield_on_timeout=True,
        )
        next(saves)  # which is none: what is saved from now on is seen
        loop.check()
        for save in saves:
            paths = [Path(path) for _, path in save]
            templates = {path for path in paths if path.suffix == ".wgsl"}
            alone = all(path.parent == SHADERS for path in paths)  # and no include, no Python
            loop.listen()
            if paths:
                loop.check(
                    declare=len(templates) < len(paths),
                    changed={path.stem for path in templates} if alone else None,
                )
        return 0
    except KeyboardInterrupt:
        return 0
    except LoopError as end:
        text, status = end.args
        print(f"error: {text}", file=sys.stderr)
        return int(status)
    finally:
        loop.stop()


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="+", metavar="KERNEL", help="name, or pattern: scan_*")
    parser.add_argument("--once", action="store_true", help="check once, and end")
    parser.add_argument("--device", help="adapter: index or part of its name")
    for size, meaning in (
        ("batch-size", "sequences"),
        ("seq-len", "tokens of a sequence"),
        ("d-model", "width"),
    ):
        parser.add_argument(f"--{size}", type=int, help=f"{meaning} of the step to time")
    parser.add_argument(
        "--at", default="", metavar="'NAME=VALUE ...'", help="sizes to time at instead"
    )
    parser.add_argument(
        "--soon",
        type=float,
        default=1.0,
        help="seconds of comparing, before the speed is measured; other cases follow [default: 1]",
    )
    parser.add_argument(
        "--patience", type=float, default=30.0, help="seconds a kernel may take [default: 30]"
    )
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # the first is ignored in a shell's background
        signal.signal(number, signal.default_int_handler)
    if not (ROOT / "tests" / "oracle").is_dir():
        print(f"error: {ROOT}: no tests/oracle, so no checkout of the project", file=sys.stderr)
        return 1
    if not args.once and importlib.util.find_spec("watchfiles") is None:
        print("error: watchfiles is needed: pip install 'wgsl-train[loop]'", file=sys.stderr)
        return 1
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
