"""Two kernels that do one thing only: the ceilings that a profile compares with."""

from ..kernel import Kernel, by_kind, ceil_div, elementwise, spread

COPY = Kernel(
    "probe_copy",
    reads={"x": "n"},
    writes={"out": "n"},
    grid=elementwise(lambda v: ceil_div(v["n"], 4)),
    vec4=lambda v: ("x", "out"),
    half=frozenset({"x", "out"}),
)

FMA = Kernel(
    "probe_fma",
    reads={"x": "n"},
    writes={"out": "n"},
    options={"rounds": 64},
    choose=by_kind({"workgroup": 256, "chains": 8}),
    grid=lambda v: spread(ceil_div(v["n"], 4 * v["workgroup"])),
    vec4=lambda v: ("x", "out"),
    flops=lambda v: 2 * v["n"] * v["chains"] * 16 * v["rounds"],
)
