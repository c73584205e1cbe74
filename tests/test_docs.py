"""The documentation is true: its snippets run, its links lead somewhere, its tables are fresh.

In a page, a block is run where its language is python or bash, in order, all in one empty folder;
Python blocks of a page share their names. What stands before a block decides about it:

    <!-- not run: REASON -->    is not run
    <!-- file: PATH -->         is a file of the project; write-a-kernel.md's are built and tested
    <!-- output -->             is what the block before it prints, or the error it raises
"""

import contextlib
import doctest
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from wgsl_train import cli, doctor, errors, model

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
NOT_RUN_AT_MOST = 3
LANGUAGES = {"python", "bash", "wgsl", "text", "toml", "json", "mermaid"}
_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n)?^```(?P<lang>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    lang: str
    note: str
    text: str
    output: str | None

    @property
    def runs(self):
        return self.lang in ("python", "bash") and not self.note.startswith(("not run", "file"))

    def __str__(self):
        return f"{self.page.name}:{self.line}"


def blocks(page):
    """The code blocks of a page, in order."""
    text = page.read_text("utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        note = match["note"] or ""
        if note == "output":
            found[-1] = Block(**{**vars(found[-1]), "output": match["text"]})
            continue
        line = text.count("\n", 0, match.start("lang")) + 1
        found.append(Block(page, line, match["lang"], note, match["text"], None))
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]


class Shell:
    """Runs the blocks of one page. `wgsl-train` runs in this process, on the session's device."""

    def __init__(self):
        self.names = {"__name__": "__main__"}

    def run(self, block):
        """What the block printed, and the error it raised, if any, as its last line."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                if block.lang == "python":
                    code = "\n" * block.line + block.text
                    exec(compile(code, str(block.page), "exec"), self.names)
                else:
                    for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
                        self._command(line, printed)
            except errors.WgslTrainError as error:
                if block.output is None:
                    raise
                printed.write(f"{type(error).__name__}: {error}\n")
        return printed.getvalue()

    def _command(self, line, printed):
        if not line.startswith("wgsl-train"):
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(
                ["bash", "-euc", line],
                capture_output=True,
                text=True,
                env={**os.environ, "PATH": path},
            )
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            printed.write(done.stdout)
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", shlex.split(line, comments=True))
            try:
                cli.main()
            except SystemExit as end:
                if end.code:
                    raise errors.WgslTrainError(f"exit status {end.code}") from None


@pytest.fixture
def in_empty_folder(tmp_path, monkeypatch, device):
    monkeypatch.chdir(tmp_path)
    for module in (cli, doctor, model):
        monkeypatch.setattr(module, "request_device", lambda *a, **k: device)
    return tmp_path


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.runs for b in blocks(p))], ids=lambda p: p.name
)
def test_every_snippet_runs_and_prints_what_the_page_says(page, in_empty_folder):
    shell, checker = Shell(), doctest.OutputChecker()
    for block in blocks(page):
        if not block.runs:
            continue
        got = shell.run(block)
        if block.output is not None:
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            same = checker.check_output(block.output, got, flags)
            assert same, f"{block} prints\n{got}\nand the page says\n{block.output}"


def test_few_snippets_are_not_run():
    skipped = [b for b in BLOCKS if b.note.startswith("not run")]
    assert len(skipped) <= NOT_RUN_AT_MOST, [str(b) for b in skipped]
    assert all(re.fullmatch(r"not run: \w.*", b.note) for b in skipped)


def test_every_block_is_of_a_known_language():
    assert {b.lang for b in BLOCKS} <= LANGUAGES, [
        str(b) for b in BLOCKS if b.lang not in LANGUAGES
    ]


def _anchors(page):
    heads = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert ROOT in file.parents, f"{page.name}: {target} leaves the project"
        assert not anchor or anchor in _anchors(file), f"{page.name}: {target}"


def test_every_page_is_linked_from_the_readme():
    text = (ROOT / "README.md").read_text("utf-8")
    assert not [p.name for p in ROOT.glob("docs/*.md") if f"docs/{p.name}" not in text]


def test_generated_parts_are_fresh():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/make_docs.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_error_has_its_section():
    classes = {c.__name__ for c in vars(errors).values() if isinstance(c, type)}
    heads = re.findall(r"^## `(\w+)`$", (ROOT / "docs/errors.md").read_text("utf-8"), re.M)
    assert set(heads) == classes


@pytest.mark.gpu
def test_the_kernel_of_the_guide_is_built_and_passes(tmp_path):
    """Follows write-a-kernel.md in a copy of the project, from the first failure to the last pass."""
    for name in ("wgsl_train", "shaders", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "data")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def tests():
        files = (
            "tests/test_kernels.py",
            "tests/test_structure.py",
            *tmp_path.glob("tests/test_*_squared_relu.py"),
        )
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                *files,
                "-k",
                "squared_relu or every_kernel_has",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    files = [b for b in blocks(ROOT / "docs/write-a-kernel.md") if b.note.startswith("file: ")]
    for i, block in enumerate(files):
        path = tmp_path / block.note.removeprefix("file: ")
        assert not path.exists(), f"{block}: the project has such a file already"
        path.write_text(block.text, "utf-8")
        if i == 0:
            code, output = tests()
            assert code == 1, output
            assert "squared_relu_forward" in output
    code, output = tests()
    assert code == 0, output
    passed = re.search(r"(\d+) passed", output)
    assert passed, output
    assert int(passed[1]) > 20, output
