"""What can be known about every shader without a GPU."""

import re
from dataclasses import replace

import pytest

from tests import harness
from tests.oracle import ORACLES, case
from wgsl_train.kernel import KERNELS, PORTABLE, SHADER_DIR

SOURCES = sorted(SHADER_DIR.rglob("*.wgsl"))
VARIANTS = [v for name in sorted(ORACLES) if name in KERNELS for v in harness.variants(name)]


def render(variant: harness.Variant) -> str:
    return harness.planned(variant).render().source


def test_every_kernel_has_a_shader_and_an_oracle_and_none_is_left_over():
    assert KERNELS.keys() == ORACLES.keys() == {p.stem for p in SHADER_DIR.glob("*.wgsl")}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_fits_the_portable_limits(variant):
    source = render(variant)
    assert 1 <= len(re.findall(r"var<storage", source)) <= 8
    size = re.search(r"@workgroup_size\(([^)]*)\)", source)[1]
    invocations = 1
    for part in size.split(","):
        invocations *= int(part.strip().rstrip("u"))
    assert invocations <= 256
    # choices that a case forces are for adapters that grant more
    assert workgroup_bytes(source) <= (32768 if variant.case.choices else 16384)


@pytest.mark.parametrize(
    "features, d_out, d_in, words",
    [({"shader-int64"}, 40, 24, 2), ({"shader-int64"}, 40, 20, 1), ({"shader-int64"}, 36, 24, 0), (set(), 40, 24, 0)],
)  # fmt: skip
def test_operands_are_64_bit_words_where_device_and_sizes_allow(features, d_out, d_in, words):
    sizes = {"rows": 9, "d_out": d_out, "d_in": d_in, "dout_stride": d_out, "dx_stride": d_in}
    variant = harness.Variant(
        KERNELS["linear_backward_x"], case(("weight_scale", "dlow", "A"), **sizes), "cpu"
    )
    target = replace(PORTABLE, lanes=8, features=frozenset(features))
    source = harness.planned(variant, target).render().source
    assert source.count("array<vec4<u64>>") == words


def workgroup_bytes(source: str) -> int:
    widths = {
        "f32": 4,
        "u32": 4,
        "i32": 4,
        "vec4<f32>": 16,
        "vec4f": 16,
        "vec2f": 8,
        "vec2<f32>": 8,
        "vec3f": 16,
    }

    def width(kind: str) -> int:
        kind = kind.strip()
        if array := re.fullmatch(r"array<(.*),\s*(\d+)u?\s*>", kind):
            return width(array[1]) * int(array[2])
        if atomic := re.fullmatch(r"atomic<(.*)>", kind):
            return width(atomic[1])
        return widths[kind]

    return sum(width(kind) for kind in re.findall(r"var<workgroup>\s*\w+\s*:\s*([^;=]*)", source))


def test_workgroup_bytes_are_counted():
    text = "var<workgroup> a: array<vec4f, 100>; var<workgroup> b: array<array<f32, 16>, 17>;"
    assert workgroup_bytes(text) == 1600 + 4 * 16 * 17


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_text_rules(path):
    text = re.sub(r"//.*", "", path.read_text())
    assert path.read_text().startswith("//"), "the first line is the formula"
    assert not re.search(r"atomic<f32>", text), "float atomics: not in core WGSL, not deterministic"
    assert not re.search(r"0x7f8|0x1p128|\binf\b|\bnan\b", text, re.I), "infinity or NaN as a value"
    assert "enable " not in text, "features are declared per target, not in the template"


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_no_return_before_a_barrier(variant):
    """Every invocation reaches every barrier: a function that waits has no earlier return."""
    for body in re.findall(r"\bfn \w+[^{]*\{(.*?)\n\}", render(variant), re.S):
        text = re.sub(r"//.*", "", body)
        if "workgroupBarrier" in text and "return" in text:
            assert text.rindex("workgroupBarrier") < text.index("return")
