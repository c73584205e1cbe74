"""What ends a process from outside: signals, a terminal that is closed, streams that nobody reads."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def _signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have SIGINT, SIGTERM and SIGHUP call `handle`, and none be lost."""
    wanted = [signal.SIGINT, signal.SIGTERM]
    hangup: Any = getattr(signal, "SIGHUP", None)  # a terminal that is closed
    if hangup and signal.getsignal(hangup) != signal.SIG_IGN:  # as nohup has it
        wanted.append(hangup)
    old = {s: signal.signal(s, handle) for s in wanted}
    hook, sys.unraisablehook = sys.unraisablehook, _again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in old.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    raise Signalled(number)


class Signalled(SystemExit):
    """A signal ends the process."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def _again(dropped: Any) -> None:
    """Raise a signal anew that fell into a destructor or callback, where Python drops exceptions."""
    if isinstance(dropped.exc_value, Signalled):
        threading.Timer(0.01, os.kill, [os.getpid(), dropped.exc_value.number]).start()
    else:
        sys.__unraisablehook__(dropped)


def _leave_terminal() -> None:
    """Say no more to a terminal that is gone, nor to what reads there: each word would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if not stat.S_ISREG(os.fstat(stream).st_mode):  # isatty is false by now
            os.dup2(nowhere, stream)
    os.close(nowhere)


@contextlib.contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Collects signals instead of dying by them; a second one is not held up."""
    caught: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        hung_up = number not in (signal.SIGINT, signal.SIGTERM)
        if caught and not hung_up:  # both a shell and the system tell of a closed terminal
            _end(number, frame)
        caught.append(number)
        if hung_up:
            _leave_terminal()
        # not by `err`: what it writes may be half-written just now
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping after this step; the checkpoint is saved first\n")

    with _signals(handle):
        yield caught


@contextlib.contextmanager
def unread(caught: list[int]) -> Iterator[None]:
    """What nobody reads any more does not keep a run from saving that a signal has stopped, as in
    `train | tee log`, where Ctrl-C ends both."""
    try:
        yield
    except (OSError, SystemExit) as error:  # rich makes the latter of a broken pipe
        if not caught or isinstance(error, Signalled):
            raise


@contextlib.contextmanager
def ending_by_signals() -> Iterator[None]:
    """Have a signal end the process by SystemExit(128 + its number), so that all is cleaned up."""
    with _signals(_end):
        yield


def open_streams() -> None:
    """Have all three standard streams open: those that the caller closed read and write nothing."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # closed: the next file that is opened would be taken for it
    os.close(fd)
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
