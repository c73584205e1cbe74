"""The tools that render a kernel and check gradients: what they print, and how they end."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

import wgsl_train as wt
from tests import harness, oracle_model
from tests.oracle_model import dphi1, lively
from wgsl_train import kernel
from wgsl_train.encoder import Buffers
from wgsl_train.errors import ConfigError, KernelCompileError
from wgsl_train.kernel import SHADER_DIR, Templates

ROOT = Path(__file__).parent.parent
SIZES = ["d_model=8", "d_state=4", "n_layer=1", "d_conv=3", "dt_rank=2", "batch=2", "seqlen=9"]
LINE = "        squares += a * a;"  # of rms_norm_forward


@pytest.fixture
def tool(monkeypatch, capsys):
    """Runs a tool in this process: exit status, output, errors."""

    def run(name, *args, **patches):
        spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for attribute, value in patches.items():
            monkeypatch.setattr(module, attribute, value)
        monkeypatch.setattr("sys.argv", [name, *args])
        status = module.main()
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def edit(tmp_path, monkeypatch):
    """Replaces text of a template, for this process."""

    def replace(old, new, name="rms_norm_forward"):
        folder = tmp_path / "shaders"
        shutil.copytree(SHADER_DIR, folder)
        path = folder / f"{name}.wgsl"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        monkeypatch.setattr(kernel, "TEMPLATES", Templates(folder))

    return replace


# Cases from words


def test_a_case_from_words():
    given = harness.settings(["rows=3", "eps=1e-3"])
    variant = harness.variant_of("rms_norm_forward", given, "cpu")
    assert variant.case.values == {"rows": 3, "d_model": 23, "eps": 1e-3}
    variant = harness.variant_of("scan_forward", {"seqlen": 21, "d_state": 9}, "portable")
    assert (variant.dims["chunks"], variant.dims["d_x_dbl"]) == (6, 2 + 2 * 9)
    assert "state" not in variant.shapes
    assert "state" in harness.variant_of("scan_forward", {}, "portable", []).shapes


@pytest.mark.parametrize(
    "name, given, leave_out, told",
    [
        ("rms_norm", {}, None, "wgsl_train/ops has no 'rms_norm'; did you mean 'rms_norm_"),
        ("rms_norm_forward", {"row": 3}, None, "has no 'row'; did you mean 'rows'?"),
        ("rms_norm_forward", {"rows": 0}, None, r"x is \(\*rows d_model\), and rows is 0"),
        ("rms_norm_forward", {"rows": "x"}, None, "rows is 'x'"),
        ("scan_forward", {}, ["stat"], "may be left out, has no 'stat'; did you mean 'state'?"),
    ],
)
def test_words_that_are_no_case(name, given, leave_out, told):
    with pytest.raises(ConfigError, match=told):
        harness.variant_of(name, given, "portable", leave_out)


def test_words_have_names():
    with pytest.raises(ConfigError, match="'rows': sizes and options are given as NAME=VALUE"):
        harness.settings(["rows"])


# render


def test_render_tells_the_place_of_each_line(tool):
    sizes = ["rows=70", "d_model=256", "eps=1e-3"]
    status, out, _ = tool("render", "rms_norm_forward", *sizes, "--kind", "discrete")
    assert status == 0
    head, choices, *lines = out.splitlines()
    assert "rms_norm_forward" in head
    assert "rows=70 d_model=256" in head
    assert choices.startswith("// discrete: eps=0.001 ")
    assert choices.endswith(" workgroup=256 lanes=32 held=2")
    numbers, places, codes = zip(
        *(re.fullmatch(r" *(\d+)  (\S+) +(.*)", line).groups() for line in lines), strict=True
    )
    assert list(map(int, numbers)) == list(range(1, len(lines) + 1))
    assert codes[1] == "const rows: u32 = 70u;"
    assert set(places[:8]) == {"generated", "shaders/rms_norm_forward.wgsl:1"}
    assert "shaders/include/group_index.wgsl:3" in places
    for place, code in zip(places, codes, strict=True):
        if place != "generated":
            file, line = place.split(":")
            text = (ROOT / file).read_text().splitlines()[int(line) - 1]
            assert "{{" in text or code == text.strip()


@pytest.mark.parametrize(
    "args, told",
    [
        (["rms_norm_forwrd"], "has no 'rms_norm_forwrd'; did you mean 'rms_norm_forward'?"),
        (["rms_norm_forward", "d_modl=3"], "has no 'd_modl'; did you mean 'd_model'?"),
        (["rms_norm_forward", "eps=x"], "shaders/rms_norm_forward.wgsl:32:"),
    ],
)
def test_render_refuses(tool, args, told):
    status, out, err = tool("render", *args)
    assert status == 1
    assert out == ""
    assert err.startswith("error: ")
    assert told in err


# Errors of the compiler


@pytest.mark.gpu
@pytest.mark.parametrize(
    "old, new, name, place, told",
    [
        (LINE, LINE.replace("a;", "aa;"), "rms_norm_forward", "rms_norm_forward.wgsl:29:24", "no def"),
        (LINE, LINE.replace(";", ""), "rms_norm_forward", "rms_norm_forward.wgsl:30:5", "expected `;`"),
        ("+ {{ eps | f32 }}", "+ {{ rows }}u", "rms_norm_forward", "rms_norm_forward.wgsl:32:29", "invalid"),
        ("return value;", "return valu;", "include/lane_reduce", "include/lane_reduce.wgsl:6:81", "no def"),
    ],
)  # fmt: skip
def test_a_compile_error_names_the_place_in_the_template(device, edit, old, new, name, place, told):
    edit(old, new, name)
    dispatch = harness.planned(harness.variants("rms_norm_forward", ["cpu"])[0])
    buffers = Buffers(device)
    with pytest.raises(KernelCompileError) as raised:
        buffers.pipeline(
            dispatch.kernel,
            dispatch.render(),
            buffers.layout(dispatch.kernel, tuple(dispatch.tensors)),
        )
    head, *excerpt = str(raised.value).splitlines()
    assert head.startswith(f"shaders/{place}: rms_norm_forward does not compile: ")
    assert told in head
    file_and_line = place.rpartition(":")[0]
    assert any(line.startswith(f"shaders/{file_and_line} │ ") for line in excerpt)
    assert not any(re.match(r" *\d+ │", line) for line in excerpt)


# gradcheck


@pytest.fixture
def gradcheck(tool, device):
    return lambda *args: tool("gradcheck", *args, request_device=lambda *a, **k: device)


@pytest.mark.gpu
def test_gradcheck_of_a_kernel(gradcheck):
    status, out, err = gradcheck("rms_norm_backward", "rms_norm_forward")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("adapter ")
    assert all(
        re.match(r"ok    rms_norm_\w+ .*: greatest relative error [\d.e-]+$", line)
        for line in lines[1:]
    )
    assert any("overwriting" in line for line in lines)
    status, out, _ = gradcheck("rms_norm_forward", "rows=3", "d_model=7")
    assert status == 0
    assert "rows=3,d_model=7" in out


@pytest.mark.gpu
def test_gradcheck_finds_a_wrong_kernel(gradcheck, edit):
    edit(LINE, LINE.replace("a;", "a * 1.01;"))
    status, out, err = gradcheck("rms_norm_forward", "rows=3", "d_model=7")
    assert status == 1
    assert "WRONG rms_norm_forward rows=3,d_model=7" in out
    assert re.match(
        r"wrong: rms_norm_forward .*: out\[0, 0\] is \S+, expected \S+; 21 of 21 wrong\n", err
    )


@pytest.mark.gpu
def test_gradcheck_of_a_model(gradcheck):
    status, out, err = gradcheck("model", *SIZES)
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[3:]]
    assert {row[0] for row in rows} == {"ok"}
    assert "backbone.layers.0.mixer.A_log" in {row[1] for row in rows}
    assert all(float(row[3]) < 1e-5 and float(row[4]) < 1e-5 for row in rows)


@pytest.mark.gpu
def test_gradcheck_finds_a_wrong_gradient_of_a_model(gradcheck, monkeypatch):
    name = "backbone.layers.0.mixer.D"

    def wrong(self, tokens, targets):
        loss, grads, _ = oracle_model.loss_and_grads(
            self.config, lively(self.config), tokens, targets
        )
        grads[name][1] *= 1.01
        return 1.01 * loss, grads

    monkeypatch.setattr(wt.Model, "loss_and_grads", wrong)
    status, out, err = gradcheck("model", *SIZES)
    assert status == 1
    assert [line.split()[1] for line in out.splitlines() if line.startswith("WRONG")] == [
        "loss",
        name,
    ]
    assert re.match(r"wrong: loss is \S+, expected \S+: off by 1.0e-02, 1e-05 is allowed\n", err)
    assert re.search(
        rf"^wrong: gradient of {name}\[1\] is \S+, expected \S+; the tensor ", err, re.M
    )


@pytest.mark.gpu
def test_gradcheck_finds_a_wrong_slope_of_the_oracle(gradcheck, monkeypatch):
    monkeypatch.setattr(oracle_model, "dphi1", lambda x: 1.01 * dphi1(x))
    status, _, err = gradcheck("model", *SIZES, "discretization=zoh")
    assert status == 1
    assert "wrong: the oracle's gradient of backbone.layers.0.mixer.A_log is " in err


@pytest.mark.parametrize(
    "args, status, told",
    [
        (["nope"], 1, "error: wgsl_train/ops has no 'nope'; "),
        (["d_model=3"], 1, "error: sizes and options are those of one kernel, or of the model"),
        (["model", "d_model=0"], 1, "error: MambaConfig.d_model is 0; allowed"),
        (["linear_forward", "d_in=64"], 1, "error: linear_forward's oracle cannot compute"),
    ],
)
@pytest.mark.gpu
def test_gradcheck_refuses(gradcheck, args, status, told):
    got, _, err = gradcheck(*args)
    assert got == status
    assert err.startswith(told)
