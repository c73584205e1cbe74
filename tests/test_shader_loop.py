"""The shader loop on a copy of the project: what it prints as files are saved."""

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from wgsl_train import cli
from wgsl_train.errors import ConfigError

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent
KERNEL = "swiglu_forward"  # an elementwise one
LINE = "    let up = i + i / {{ columns }}u * {{ columns }}u;"  # of its template
LOOP = "\n    for (var k = 0u; k < 2u; k += 0u) { out[i] += out[i]; }"
OK = rf"{KERNEL}  OK  \d+ cases, greatest relative error [\d.]+e-\d\d; took [\d.]+ s\n +in a step of "
SPEED = r"[\d.]+ ms, [\d.]+ GB/s \(\d+% of copying\), [\d.]+ GFLOP/s \(\d+% of arithmetic\)"


@pytest.fixture
def project(tmp_path):
    """A copy whose files may be edited."""
    ignored = shutil.ignore_patterns("__pycache__", "data", "peers")
    for name in ("wgsl_train", "shaders", "tests", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    return tmp_path


def command(project, *args):
    tool = project / "tools" / "shader_loop.py"
    return {"args": [sys.executable, str(tool), *args], "env": {**os.environ, "PYTHONPATH": ""}}


class Session:
    """A loop that runs, and the blocks that it prints."""

    def __init__(self, project, *args):
        self.project = project
        self.process = subprocess.Popen(
            **command(project, *args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)

    def end(self):
        self.process.terminate()
        self.process.wait(timeout=10)
        self._reader.join(timeout=10)

    def next(self, seconds=60):
        """The next block: what is printed at once."""
        block = self._lines.get(timeout=seconds)
        assert re.match(r"\d\d:\d\d:\d\d ", block), block
        while not self._lines.empty() or not self._still(0.5):
            if re.match(r"\d\d:\d\d:\d\d ", self._lines.queue[0]):
                break
            block += self._lines.get()
        return block[9:]

    def _still(self, seconds):
        """Whether nothing is printed for so long."""
        end = time.monotonic() + seconds
        while self._lines.empty() and time.monotonic() < end:
            time.sleep(0.01)
        return self._lines.empty()

    def expect(self, pattern):
        block = self.next()
        assert re.match(pattern, block), block

    def quiet(self, seconds):
        time.sleep(seconds)
        assert self._lines.empty(), self._lines.get()

    def edit(self, file, old, new):
        path = self.project / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        return path


@pytest.fixture
def session(project):
    # no second report of a check, however slow the machine
    running = Session(project, KERNEL, "--patience=20", "--soon=60")
    yield running
    running.end()


def test_a_kernel_is_broken_found_and_mended(session):
    shader, declaration = f"shaders/{KERNEL}.wgsl", "wgsl_train/ops/swiglu.py"
    first = session.next()
    assert re.match(OK, first), first
    assert re.search(SPEED, first), first
    assert "before" not in first

    typo = LINE.replace("= i +", "= j +")  # U1
    path = session.edit(shader, LINE, typo)
    fault = session.next()
    line = 1 + path.read_text().splitlines().index(typo)
    place = f"shaders/{KERNEL}.wgsl:{line}:{1 + typo.index('j +')}"
    assert fault.startswith(f"{KERNEL}  ERROR  {place}: {KERNEL} does not compile: no definition")
    assert f"shaders/{KERNEL}.wgsl:{line} │     let up = j + i / " in fault
    os.utime(path)
    session.quiet(1)  # told before

    session.edit(shader, typo, LINE.replace("= i +", "= i + 1u +"))
    assert re.match(
        rf"{KERNEL}  WRONG  rows=\d+,d_ff=\d+,two_d_ff=\d+: out\[0, 0\] is -?[\d.]+, expected -?[\d.]+; "
        r"\d+ of \d+ wrong; greatest relative error [\d.e+-]+\n$",
        session.next(),
    )

    session.edit(shader, LINE.replace("= i +", "= i + 1u +"), LINE)
    mended = session.next()
    assert re.match(OK, mended), mended
    assert re.search(rf"{SPEED}; (as|\d+% (faster|slower) than) before, [\d.]+ ms", mended)

    for _ in range(10):  # U2
        os.utime(path)
    session.expect(OK)
    session.quiet(1)

    session.edit("shaders/include/sigmoid.wgsl", "fn sigmoid", "fn sigmoit")
    assert re.match(rf"{KERNEL}  ERROR  shaders/{KERNEL}.wgsl:11:5: ", session.next())
    session.edit("shaders/include/sigmoid.wgsl", "fn sigmoit", "fn sigmoid")
    session.expect(OK)

    session.edit(declaration, '    "swiglu_forward",', '    "swiglu_forward"')
    number = 1 + (session.project / declaration).read_text().splitlines().index("FORWARD = Kernel(")
    fault = session.next()
    assert fault.startswith(f"declarations  ERROR  {declaration}:{number + 1}: SyntaxError"), fault
    session.edit(declaration, '    "swiglu_forward"', '    "swiglu_forward",')
    mended = session.next()
    assert re.match(OK, mended), mended
    assert "before" in mended


def test_what_takes_long_is_told_later(project):
    session = Session(project, KERNEL, "--soon=0")
    text = rf"{KERNEL}  OK  {{}} cases, greatest relative error "
    try:
        for old, new in ((LINE, LINE), (LINE, LINE + "  // again")):
            session.edit(f"shaders/{KERNEL}.wgsl", old, new) if new != old else None
            session.expect(text.format(r"1 of \d+") + r".*\n.*GB/s")
            session.expect(text.format(r"all \d+"))
        late = f"$$ if rows == 1100\n    let up = i;\n$$ else\n{LINE}\n$$ endif"
        session.edit(f"shaders/{KERNEL}.wgsl", LINE + "  // again", late)
        session.expect(text.format(r"1 of \d+"))
        session.expect(rf"{KERNEL}  WRONG  rows=1100,")
        session.edit(f"shaders/{KERNEL}.wgsl", late, LINE)
        session.expect(text.format(r"1 of \d+") + r".*\n.* before, ")
        session.expect(text.format(r"all \d+"))
    finally:
        session.end()


@pytest.mark.slow
def test_nothing_that_a_kernel_does_ends_the_loop(session):
    shader = f"shaders/{KERNEL}.wgsl"
    session.expect(OK)
    session.edit(shader, LINE, LINE + LOOP)
    assert session.next() == f"{KERNEL}  ERROR  no end after 20 s: is there a loop without one?\n"
    session.edit(shader, LINE + LOOP, LINE)
    session.expect(OK)
    oracle, line = "tests/oracle/swiglu.py", "def swiglu_forward(x, d_ff):\n"
    session.edit(oracle, line, f"{line}    __import__('os')._exit(134)\n")  # as a driver's abort
    assert session.next() == f"{KERNEL}  ERROR  the driver ended the process, exit code 134\n"
    session.edit(oracle, "    __import__('os')._exit(134)\n", "")
    session.expect(OK)
    session.edit(oracle, line, f"{line}    x = y\n")
    assert re.match(rf"{KERNEL}  ERROR  {oracle}:\d+: NameError: name 'y'", session.next())
    session.edit(oracle, "    x = y\n", "")
    session.expect(OK)
    session.process.send_signal(signal.SIGINT)
    assert session.process.wait(timeout=10) == 0


@pytest.mark.parametrize(
    "args, status, told",
    [
        (["swiglu_forwrd"], 1, "error: wgsl_train/ops has no 'swiglu_forwrd'; did you mean"),
        ([KERNEL, "--device=9"], 3, "error: no adapter 9"),
    ],
)
def test_what_makes_no_sense_ends_it(args, status, told):
    done = subprocess.run(**command(ROOT, *args, "--once"), capture_output=True, text=True)
    assert done.returncode == status
    assert done.stderr.startswith(told)


def test_without_a_checkout_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages" / "wgsl_train" / "cli.py"))
    with pytest.raises(ConfigError, match=r"clone the project, run `pip install -e"):
        cli.dev([KERNEL])
