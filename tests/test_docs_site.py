"""tools/docs_site.py, by which the site is built: its pages, links and docstrings. `.ci/run` builds it."""

from pathlib import Path

import griffe
import pytest

import wgsl_train
from tools import docs_site

ROOT = Path(__file__).parent.parent


def test_the_reference_has_every_public_name_and_every_module():
    pages = docs_site.reference()
    for name in wgsl_train.__all__:
        assert f"::: wgsl_train.{name}\n" in pages["api.md"]
    modules = [p.relative_to(ROOT / "wgsl_train") for p in ROOT.glob("wgsl_train/**/*.py")]
    names = {".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in modules}
    assert {f"internals/{n}.md" for n in names if not n.startswith("_")} == pages.keys() - {
        "api.md"
    }


def test_every_page_is_in_the_navigation():
    text = (ROOT / "tools/mkdocs.yml").read_text("utf-8")
    assert not [p.name for p in ROOT.glob("docs/*.md") if f"- {p.name}\n" not in text]


@pytest.mark.parametrize(
    "link, place",
    [
        ("docs/limits.md#adapters", "limits.md#adapters"),
        ("../README.md#five-minutes", "index.md#five-minutes"),
        ("CONTRIBUTING.md", "contributing.md"),
        ("errors.md", "errors.md"),
        ("#here", "#here"),
        ("https://example.org/docs/x.md", "https://example.org/docs/x.md"),
    ],
)
def test_links_of_the_repository_become_those_of_the_site(link, place):
    assert docs_site.on_page_markdown(f"[a]({link})", None, None, None) == f"[a]({place})"


def test_docstrings_become_markdown():
    text = """One line about `a < b`, of shaders/<name>.wgsl, "*rows d_in".

Parameters
----------
config    what model
rows, x   of a batch;
          or <none>

* a point

    as = it + stands < here

name  shape
x     (2, 3)
  y   (1,)
"""
    assert docs_site.markdown(text.rstrip()) == (
        'One line about `a < b`, of shaders/&lt;name>.wgsl, "\\*rows d_in".\n'
        "\n"
        "Parameters:\n"
        "\n"
        "- `config`: what model\n"
        "- `rows, x`: of a batch; or &lt;none>\n"
        "\n"
        "* a point\n"
        "\n"
        "    as = it + stands < here\n"
        "\n"
        "```text\nname  shape\nx     (2, 3)\n  y   (1,)\n```"
    )


def test_griffe_is_given_markdown():
    package = griffe.load(
        "wgsl_train",
        search_paths=[ROOT],
        extensions=griffe.load_extensions(docs_site.HouseStyle),
    )
    assert "- `kind`: which column of the tables" in package["kernel.Target"].docstring.value
