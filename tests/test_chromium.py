"""Every kernel through a second compiler, Tint, in headless Chromium; and that the check can fail."""

import os
import re
from dataclasses import replace

import pytest

from tests.oracle import ORACLES
from tools import check_chromium
from tools.check_chromium import ChromiumError, Job, check, gather
from wgsl_train.kernel import KERNELS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("WGSL_TRAIN_SKIP_CHROMIUM") == "1", reason="WGSL_TRAIN_SKIP_CHROMIUM is 1"
    ),
]


def planted(name, old, new):
    """The work of a kernel, with text replaced in those of its sources that have it."""
    work = gather([name])
    found = 0
    for shader in work.shaders:
        found += old in shader.rendered.source
        source = shader.rendered.source.replace(old, new)
        shader.rendered = replace(shader.rendered, source=source)
    assert found
    return work


@pytest.mark.timeout(1800)
def test_tint_takes_every_shader_and_results_are_right():
    work = gather(sorted(ORACLES))
    assert {job.variant.kernel.name for job in work.jobs} == KERNELS.keys()
    adapter, faults = check(work)
    assert adapter == "google swiftshader"
    assert not faults, "\n".join(faults)


SUM = "var sum = 0.0;"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "workgroupBarrier();",
            "if (lane < 3u) { workgroupBarrier(); }",
            "'workgroupBarrier' must only be called from uniform control flow",
        ),
        (
            SUM,
            f"{SUM} if (lane < 3u) {{ sum = subgroupAdd(1.0); }}",
            "'subgroupAdd' must only be called from subgroup uniform control flow",
        ),
        (SUM, "var sum = f32(1u >> 2u | 4u);", "mixing '>>' and '|' requires parenthesis"),
    ],
)
def test_what_naga_lets_pass_is_refused(old, new, message, device):
    work = planted("loss_sum", old, new)
    for shader in work.shaders:
        device.wgpu.create_shader_module(code=shader.rendered.source)
    _, faults = check(work)
    assert faults
    for fault in faults:
        assert re.match(r"shaders/(include/lane_reduce|loss_sum)\.wgsl:\d+:\d+: error: ", fault)
        assert message in fault
        assert "loss_sum-rows=" in fault


def test_a_wrong_result_is_found():
    work = planted("probe_copy", "= x[i]", "= 1.5 * x[i]")
    _, faults = check(work)
    assert len(faults) == len(work.jobs)
    assert all("wrong result: out[" in fault for fault in faults)


def main(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["check_chromium", *arguments])
    return check_chromium.main()


def test_one_kernel_from_the_command_line(monkeypatch, capsys):
    assert main(monkeypatch, "mean_pool") == 0
    assert "dispatches run on google swiftshader: 0 faults" in capsys.readouterr().out
    monkeypatch.setattr(Job, "faults", lambda job, raw: [f"{job.variant}: planted"])
    assert main(monkeypatch, "probe_fma") == 1
    assert "probe_fma-" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(monkeypatch, "no_such_kernel")
    assert "no kernel no_such_kernel; there are adamw, " in capsys.readouterr().err


@pytest.mark.parametrize(
    "path, message",
    [
        ("no-such-browser", "no-such-browser is not on PATH; `apt-get install chromium`"),
        ("true", "Chromium ended with status 0"),
    ],
)
def test_a_browser_that_does_not_work_is_an_error(path, message, monkeypatch, capsys):
    monkeypatch.setenv("WGSL_TRAIN_CHROMIUM", path)
    assert main(monkeypatch, "probe_fma") == 2
    assert message in capsys.readouterr().err


def test_what_the_page_cannot_do_is_an_error():
    work = gather(["probe_fma"])
    work.jobs[0].dispatch = replace(work.jobs[0].dispatch, grid=(1 << 20, 1, 1))
    with pytest.raises(ChromiumError, match=r"(?s)Dispatch.* exceeds .*not run: \d dispatch"):
        check(work)
