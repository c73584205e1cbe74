"""What mkdocs.yml needs beside the pages of docs/: README and its like as pages of the site, a
reference of what the package's docstrings say, and those docstrings as Markdown.

Loaded by MkDocs as a hook, and by mkdocstrings as an extension of griffe, which reads the sources.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FRONT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE",
}


# Pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the modules' pages to the navigation."""
    assert config.nav
    config.nav.append({"Internals": [page for page in reference() if "/" in page]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    pages = {page: (ROOT / name).read_text("utf-8") for name, page in FRONT.items()}
    for name, text in {**pages, **reference()}.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links, which are those of the repository, to where their targets lie in the site."""
    return re.sub(r"\]\(([^)\s#:]+)(?=[)#])", lambda link: f"]({_place(link[1])}", markdown)


def _place(target: str) -> str:
    name = target.removeprefix("../").removeprefix("docs/")
    return FRONT.get(name, name)


@functools.cache
def reference() -> dict[str, str]:
    """{page: text}: one for the public names, one for each module."""
    package = griffe.load("wgsl_train", search_paths=[ROOT])
    public = sorted(
        map(str, package.exports or ()), key=lambda name: (name.endswith("Error"), name)
    )
    pages = {"api.md": "# Python\n\n" + "".join(f"::: wgsl_train.{name}\n\n" for name in public)}
    for name in _modules(package):
        options = "    options: {show_root_heading: false, show_root_toc_entry: false}\n"
        pages[f"internals/{name}.md"] = f"# {name}\n\n::: wgsl_train.{name}\n{options}"
    return pages


def _modules(package: griffe.Module) -> Iterator[str]:
    """Names of all modules below the package, without its own."""
    for name, module in sorted(package.modules.items()):
        if not module.is_alias and not name.startswith("_"):
            path = module.path.partition(".")[2]
            yield path
            yield from _modules(module)


# Docstrings


class HouseStyle(griffe.Extension):
    """Docstrings as this project writes them, to Markdown."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Lines of a name, two or more spaces and an explanation become lists; other columns stay."""
    text = re.sub(r"^(\w+)\n-{3,}\n", r"\1:\n\n", text, flags=re.M)
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n{2,}", text))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if not re.search(r"\S {2,}\S", text):
        return text if text.startswith("    ") else _escape(text)
    if all(re.match(r"\S.*? {2,}\S| {4}", line) for line in lines) and text[0] not in " *-":
        entries = re.sub(r"\n +", " ", text).splitlines()
        pairs = [re.split(r" {2,}", entry, maxsplit=1) for entry in entries]
        return "\n".join(f"- `{name}`: {_escape(meaning)}" for name, meaning in pairs)
    return f"```text\n{text}\n```"


def _escape(text: str) -> str:
    """Angles and asterisks as they are, except in code and at the start of a list's item."""
    parts = text.split("`")
    parts[::2] = [
        re.sub(r"(?<!^)\*(?! )|\*(?=\w)", r"\\*", p.replace("<", "&lt;"), flags=re.M)
        for p in parts[::2]
    ]
    return "`".join(parts)
