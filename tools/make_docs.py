"""Writes the generated parts of docs/: commands.md, and the plan that how-it-works.md shows.

python tools/make_docs.py            write them
python tools/make_docs.py --check    write nothing; exit status 1 where they are stale
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin

from wgsl_train import MambaConfig, cli
from wgsl_train.kernel import PORTABLE
from wgsl_train.model import plan_step
from wgsl_train.models.language_model import parameters
from wgsl_train.plan import Layout

DOCS = Path(__file__).resolve().parent.parent / "docs"
_MODEL_OPTIONS = {"preset", *(f.name for f in fields(MambaConfig))}
_TYPES = {"str": "TEXT", "int": "N", "float": "X", "Path": "PATH"}

# Command line


def _unwrapped(hint: Any) -> Any:
    """A type without `| None`."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return kinds[0] if type(None) in get_args(hint) else hint


def _value(hint: Any) -> str:
    """What follows an option: "N", "TEXT ..."; nothing for a switch."""
    hint = _unwrapped(hint)
    if hint is bool:
        return ""
    if get_origin(hint) is list:
        return _value(get_args(hint)[0]) + " ..."
    if get_origin(hint) is tuple:
        return " ".join(_value(kind) for kind in get_args(hint))
    if issubclass(hint, enum.Enum):
        return "|".join(hint)
    return _TYPES[hint.__name__]


def _is_option(parameter: inspect.Parameter) -> bool:
    return type(get_args(parameter.annotation)[1]).__name__ == "OptionInfo"


def _row(parameter: inspect.Parameter) -> str:
    hint, info = get_args(parameter.annotation)
    is_option = _is_option(parameter)
    name = parameter.name.upper()
    if is_option:
        flags = [*([info.default] if isinstance(info.default, str) else []), *info.param_decls]
        flag = " ".join(flags) or "--" + parameter.name.replace("_", "-")
        name = f"{flag} {_value(hint)}".strip()
    text, default = info.help, parameter.default
    if default is parameter.empty:
        text += " Required." if is_option else ""
    elif default is not None and default is not False and "[default:" not in text:
        text += f" [default: {default}]"
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in (f"`{name}`", text)) + " |"


def commands() -> str:
    """The page docs/commands.md."""
    lines = [
        "# Commands",
        "",
        "<!-- Written by tools/make_docs.py from the command line itself. Do not edit. -->",
        "",
        "`wgsl-train COMMAND --help` prints the same. `python -m wgsl_train` is the same program.",
        "",
        str(cli.app.info.epilog),
        "",
        "| environment | meaning |",
        "|---|---|",
        "| `WGSL_TRAIN_ADAPTER` | The adapter, where `--device` does not choose one. |",
        "| `WGSL_TRAIN_CACHE` | The folder for what `tune` measured. |",
        "| `WGSL_TRAIN_NO_TUNING` | 1: what `tune` measured is not used. |",
    ]
    for command in cli.app.registered_commands:
        callback = command.callback
        assert callback is not None
        name = command.name or callback.__name__
        given = list(inspect.signature(callback, eval_str=True).parameters.values())
        arguments = [p for p in given if not _is_option(p)]
        words = [
            p.name.upper() if p.default is p.empty else f"[{p.name.upper()}]" for p in arguments
        ]
        usage = " ".join(["wgsl-train", name, *words, "[OPTIONS]" if given else ""]).strip()
        lines += ["", f"## {name}", "", f"`{usage}`", "", inspect.getdoc(callback) or ""]
        whole = {p.name for p in given}.issuperset(_MODEL_OPTIONS) and name != "train"
        own = [p for p in given if not whole or p.name not in _MODEL_OPTIONS]
        if own:
            lines += ["", "| option | meaning |", "|---|---|", *map(_row, own)]
        if len(own) < len(given):
            lines += ["", "Also the options that describe a model, as of [train](#train)."]
    return "\n".join(lines) + "\n"


# The plan


def plan_excerpt() -> str:
    """A small model's plan, as `print` shows it, without the dims at the ends of lines."""
    config = MambaConfig(vocab_size=256, d_model=64, n_layer=1)
    layout = Layout(parameters(config), PORTABLE)
    planned = plan_step(config, layout, PORTABLE, batch=4, seqlen=64, update=True)
    lines = str(planned.plan).splitlines()
    return "\n".join(re.sub(r"( MFLOP).*", r"\1", line) for line in lines)


def how_it_works() -> str:
    """The page docs/how-it-works.md with today's plan in it."""
    text = (DOCS / "how-it-works.md").read_text("utf-8")
    block = f"<!-- plan -->\n```text\n{plan_excerpt()}\n```\n"
    return re.sub(r"<!-- plan -->\n```text\n.*?```\n", lambda _: block, text, flags=re.S)


def main() -> int:
    """Write or check the pages."""
    stale = []
    for name, text in (("commands.md", commands()), ("how-it-works.md", how_it_works())):
        page = DOCS / name
        if not page.exists() or page.read_text("utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                page.write_text(text, "utf-8")
    if "--check" in sys.argv and stale:
        print(f"stale: {', '.join(stale)}; run tools/make_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
