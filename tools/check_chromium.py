"""Every kernel through a second compiler: Tint, by WebGPU in headless Chromium.

    python -m tools.check_chromium                                 all kernels
    python -m tools.check_chromium scan_forward linear_forward     these

Compiles every kernel, at every test case, at the tuning choices of every kind of adapter and at
every alternative that `wgsl-train tune` measures; equal sources once. The short ones of each kernel
are also run, on SwiftShader, and compared with their oracles, as tests/test_kernels.py does on
wgpu's adapter. The package itself compiles by naga, which lets pass what the language forbids, such
as a barrier that not every invocation reaches.

Chromium is the first of chromium, chromium-browser, google-chrome and google-chrome-stable on
PATH; WGSL_TRAIN_CHROMIUM names another. Exit status: 0; 1 where a shader is refused or a result
is wrong; 2 where there is no such kernel, or Chromium is missing or fails.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests import harness
from tests.oracle import ORACLES
from wgsl_train.kernel import ALIGN, PORTABLE, Rendered
from wgsl_train.plan import Dispatch

PAGE = Path(__file__).with_suffix(".html")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # which does not start for root; all it shows is our own page
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
)
PATIENCE = 300.0  # seconds without a word from the page
RUN = 6  # variants of a kernel, the shortest: SwiftShader takes minutes to prepare some longer ones
SUBGROUPS = replace(PORTABLE, lanes=8, features=frozenset({"subgroup"}))  # those of lavapipe


class ChromiumError(Exception):
    """Chromium is missing, or fails at what is no fault of a shader."""


@dataclass
class Shader:
    """One source to compile, and the variants that render to it."""

    rendered: Rendered
    uses: list[str] = field(default_factory=list)

    @property
    def source(self) -> str:
        """As Tint wants it here; lines keep their numbers. Subgroups are enabled by a directive,
        which naga refuses. SwiftShader has no halves: f16 is another name of f32."""
        text = self.rendered.source.replace("enable f16;", "alias f16 = f32;")
        return "enable subgroups; " + text if re.search(r"\bsubgroup[A-Z_]", text) else text


@dataclass
class Job:
    """A dispatch to run and to compare with its oracle; `shader` is an index."""

    shader: int
    variant: harness.Variant
    dispatch: Dispatch

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return harness.draw(self.variant, np.random.default_rng(0))

    def json(self) -> dict[str, Any]:
        """For the page: bindings in order, sizes in bytes."""
        reads = {name for name, _ in self.dispatch.bound("reads")}
        tensors = self.dispatch.tensors
        return {
            "shader": self.shader,
            "layout": ["read-only-storage" if name in reads else "storage" for name in tensors],
            "sizes": [tensor.root.nbytes for tensor in tensors.values()],
            "guard": 4 * ALIGN,
            "grid": self.dispatch.grid,
        }

    def inputs(self) -> bytes:
        """All buffers, one after another."""
        filled = harness.contents(self.dispatch, self.arrays)
        sizes = {name: tensor.root.nbytes for name, tensor in self.dispatch.tensors.items()}
        return b"".join(a.tobytes().ljust(sizes[name], b"\0") for name, a in filled.items())

    def faults(self, raw: bytes) -> list[str]:
        """What is wrong in the buffers after the dispatch."""
        after, start, arrays = {}, 0, self.arrays
        for name, tensor in self.dispatch.tensors.items():
            dtype = harness.NUMPY[tensor.dtype]
            after[name] = np.frombuffer(raw, dtype, tensor.root.size, start)
            start += tensor.root.nbytes
        got, faults = harness.results(self.dispatch, after)
        expected = harness.expect(self.variant, arrays)
        faults += harness.compare(self.variant, arrays, expected, got).faults
        return [f"{self.variant}\n  wrong result: {fault}" for fault in faults]


class Work:
    """What the page is to do: shaders to compile, and dispatches of them to run."""

    def __init__(self) -> None:
        self.shaders: list[Shader] = []
        self.jobs: list[Job] = []
        self._known: dict[str, int] = {}

    def compile(self, variant: harness.Variant, dispatch: Dispatch) -> int:
        """Have a dispatch's source compiled; the index of its shader."""
        rendered = dispatch.render()
        index = self._known.setdefault(rendered.source, len(self.shaders))
        if index == len(self.shaders):
            self.shaders.append(Shader(rendered))
        self.shaders[index].uses.append(str(variant))
        return index

    def json(self) -> bytes:
        sources = [shader.source for shader in self.shaders]
        return json.dumps({"sources": sources, "jobs": [job.json() for job in self.jobs]}).encode()


def gather(names: Iterable[str]) -> Work:
    """All there is to compile and to run for these kernels."""
    work = Work()
    for name in names:
        jobs = []
        for variant in harness.variants(name):
            for accumulate in (True, False) if variant.kernel.adds else (True,):
                (dispatch,) = harness.plan(variant, PORTABLE, accumulate).dispatches
                shader = work.compile(variant, dispatch)
                # choices that a case forces are for adapters that grant more; f16: see `Shader`
                if accumulate and not variant.case.choices and not variant.case.half:
                    jobs.append(Job(shader, variant, dispatch))
        jobs.sort(key=lambda job: len(work.shaders[job.shader].source))
        work.jobs += jobs[:RUN]
        for target, variants in (
            (SUBGROUPS, harness.variants(name, ("cpu",))),
            (PORTABLE, harness.alternatives(name, PORTABLE)),
            (SUBGROUPS, harness.alternatives(name, SUBGROUPS)),
        ):
            for variant in variants:
                work.compile(variant, harness.planned(variant, target))
    return work


class Server(http.server.ThreadingHTTPServer):
    """Hands the page its work, and passes on what it posts as (path, body) in `posts`."""

    def __init__(self, work: Work) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.work = work
        self.posts: queue.Queue[tuple[str, bytes]] = queue.Queue()


class Handler(http.server.BaseHTTPRequestHandler):
    """One request of the page."""

    server: Server

    def do_GET(self) -> None:
        work = self.server.work
        if self.path == "/":
            self._answer(PAGE.read_bytes(), "text/html")
        elif self.path == "/work":
            self._answer(work.json())
        elif self.path.startswith("/inputs/"):
            self._answer(work.jobs[int(self.path.rpartition("/")[2])].inputs())
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts.put((self.path, body))
        self._answer(b"")

    def _answer(self, body: bytes, kind: str = "application/octet-stream") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """No line for each request."""


def browser() -> str:
    """Chromium's path. Raises ChromiumError, with the remedy, where there is none."""
    chosen = os.environ.get("WGSL_TRAIN_CHROMIUM")
    names = (chosen,) if chosen else BROWSERS
    for name in names:
        if path := shutil.which(name):
            return path
    raise ChromiumError(f"{' or '.join(names)} is not on PATH; `apt-get install chromium`")


@contextmanager
def chromium(url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Chromium, showing a page, with a profile of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [browser(), *OPTIONS, f"--user-data-dir={profile}", url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # it complains of what a server lacks: D-Bus, a display
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def posts(work: Work) -> Iterator[tuple[str, bytes]]:
    """What the page posts, as (path, body), until it is done."""
    with Server(work) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with chromium(f"http://127.0.0.1:{server.server_port}/") as process:
                yield from iter(lambda: _next(server, process), ("/done", b""))
        finally:
            server.shutdown()
            thread.join()


def _next(server: Server, process: subprocess.Popen[bytes]) -> tuple[str, bytes]:
    """What the page posts next."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            return server.posts.get(timeout=1)
        except queue.Empty:
            if process.poll() is not None:
                raise ChromiumError(f"Chromium ended with status {process.returncode}") from None
    raise ChromiumError(f"not a word from the page in {PATIENCE:.0f} seconds")


def explain(shaders: list[Shader], messages: list[list[tuple[str, int, int, str]]]) -> list[str]:
    """What Tint says of each shader, as (kind, line, column, text): equal messages once, with the
    place in the templates and the first variant that has it."""
    told: dict[str, dict[str, None]] = {}
    for shader, said in zip(shaders, messages, strict=True):
        for kind, line, column, text in said:
            where = shader.rendered.place(line, column) if line else "pipeline"
            told.setdefault(f"{where}: {kind}: {text}", {}).update(dict.fromkeys(shader.uses))
    return [
        f"{message}\n  in {next(iter(uses))}"
        + (f" and {len(uses) - 1} more" if len(uses) > 1 else "")
        for message, uses in told.items()
    ]


def check(work: Work) -> tuple[str, list[str]]:
    """Do the work in Chromium: the adapter's name, and all faults found.

    Raises ChromiumError where Chromium is missing, or stops before all is done.
    """
    adapter, faults, left = "", [], set(range(len(work.jobs)))
    try:
        for path, body in posts(work):
            if path == "/progress":
                continue
            if path == "/compiled":
                report = json.loads(body)
                adapter = report["adapter"]
                refused = {i for i, said in enumerate(report["messages"]) if said}
                left = {job for job in left if work.jobs[job].shader not in refused}
                faults += explain(work.shaders, report["messages"])
            elif path.startswith("/outputs/"):
                job = int(path.rpartition("/")[2])
                faults += work.jobs[job].faults(body)
                left.remove(job)
            else:
                raise ChromiumError(body.decode().strip())
    except ChromiumError as err:
        names = "; ".join(str(work.jobs[job].variant) for job in sorted(left)[:4])
        raise ChromiumError(f"{err}\nnot run: {len(left)} dispatches, first {names}") from None
    return adapter, faults


def main() -> int:
    """Check, print the faults, give the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="default: all")
    parser.add_argument("--browser", action="store_true", help="print Chromium's path, no more")
    options = parser.parse_args()
    names = options.kernels or sorted(ORACLES)
    if unknown := [name for name in names if name not in ORACLES]:
        parser.error(f"no kernel {unknown[0]}; there are {', '.join(sorted(ORACLES))}")
    start = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that Chromium ends too
    try:
        if options.browser:
            print(browser())
            return 0
        work = gather(names)
        adapter, faults = check(work)
    except ChromiumError as err:
        print(f"check_chromium: {err}", file=sys.stderr)
        return 2
    print(
        *faults,
        f"{len(work.shaders)} shaders compiled by Tint, {len(work.jobs)} dispatches run on "
        f"{adapter}: {len(faults)} faults, in {time.monotonic() - start:.0f} s",
        sep="\n",
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
