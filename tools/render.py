"""Prints a kernel's WGSL as it is compiled, each line beside the template's line that it comes from.

    python tools/render.py rms_norm_forward
    python tools/render.py rms_norm_forward rows=2048 d_model=768 eps=1e-5 --kind discrete

Dims and options that are not given are those of the kernel's first case in tests/oracle. Needs no
adapter. Exit status: 0; 1 where the kernel does not render, or has no such dim or option.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import harness  # noqa: E402
from wgsl_train.errors import WgslTrainError  # noqa: E402


def main() -> int:
    """Print the rendered kernel."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="dims and options")
    parser.add_argument("--kind", choices=harness.KINDS, default="portable", help="of adapter")
    parser.add_argument(
        "--leave-out", nargs="*", metavar="BINDING", help="optional bindings that are not bound"
    )
    args = parser.parse_intermixed_args()
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    try:
        given = harness.settings(args.settings)
        dispatch = harness.planned(
            harness.variant_of(args.kernel, given, args.kind, args.leave_out)
        )
        rendered = dispatch.render()
    except WgslTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"// {str(dispatch).strip()}")
    choices = {k: v for k, v in dispatch.values.items() if k not in dispatch.dims}
    print(f"// {args.kind}: " + " ".join(f"{k}={v}" for k, v in choices.items()))
    lines = rendered.source.splitlines()
    places = [
        rendered.place(i, 1 + len(line) - len(line.lstrip())).rpartition(":")[0]
        for i, line in enumerate(lines, 1)
    ]
    places = [place if place.startswith("shaders/") else "generated" for place in places]
    width = max(map(len, places))
    for i, (place, line) in enumerate(zip(places, lines, strict=True), 1):
        print(f"{i:4}  {place:{width}}  {line}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
