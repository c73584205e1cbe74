"""tools/bench.py: what it runs beside each other, what it checks, what it compares."""

import copy
import importlib
import json
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tests import oracle_model
from tools import bench
from wgsl_train import MambaConfig

SMALL = (11, 8, 2, 2, 6)  # vocab_size, d_model, n_layer, batch, seqlen


@pytest.fixture
def small(monkeypatch):
    """Cases that take no time."""
    monkeypatch.setattr(bench, "CONFIGS", {"small": SMALL})
    layers = {"mamba2": {"d_state": 5, "head_dim": 4}, "attention": {"attn_heads": 2}}
    monkeypatch.setattr(bench, "LAYERS", layers)
    monkeypatch.setattr(bench, "DEFAULT_CONFIGS", {True: ["small"], False: ["small"]})
    monkeypatch.setattr(bench, "MATMUL", {True: [20], False: [20]})
    monkeypatch.setattr(bench, "SCAN", {True: [(2, 9, 6, 5)], False: [(2, 9, 6, 5)]})
    monkeypatch.setattr(bench, "COPY", {True: 1000, False: 1000})
    monkeypatch.delenv("WGSL_TRAIN_PEER_PYTHON", raising=False)


@pytest.fixture
def peers(monkeypatch):
    """Imports a module of tools/peers."""
    monkeypatch.syspath_prepend(bench.ROOT / "tools" / "peers")
    yield importlib.import_module
    for name in ("measure", "numpy_peer"):
        sys.modules.pop(name, None)


@pytest.fixture
def stub(monkeypatch, small):
    """Ours and the peers answer at once, what the test sets: `about` and `answer`, by name."""
    about = {"versions": {"wgpu": "1"}, "device": "stub", "works": ["step"], "layers": ["mamba"]}
    about |= {"kind": "CPU", "backend": "none", "driver": "none", "largest_binding": 1 << 20}
    answer = {"times": {"step": 0.5}, "checks": {}, "loss_first": 3.0, "loss_sixth": 2.0}
    answer |= {"peak_rss": 1 << 20, "gpu_bytes": None}
    found = SimpleNamespace(
        about=dict.fromkeys(bench.SCRIPTS, about),
        answer={name: copy.deepcopy(answer) for name in bench.SCRIPTS},
    )

    def call(name, python, arguments, timeout, on_cpu):
        said = (found.about if "--about" in arguments else found.answer)[name]
        if isinstance(said, str):
            raise bench.BenchError(said)
        return said

    monkeypatch.setattr(bench, "call", call)
    return found


STEP = ["--kernels", "none", "--peers", "numpy"]


@pytest.mark.gpu
@pytest.mark.slow
def test_numpy_beside_ours(small, device, tmp_path, capsys):
    file = tmp_path / "new.json"
    quick = ["--rounds", "1", "--warm-up", "0", "--seconds", "0"]
    assert bench.main([*quick, "--peers", "numpy", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["adapter"] == device.name
    assert report["driver"] == device.info.driver
    assert report["sides"].keys() == {"wgsl_train", "numpy"}
    names = [
        *("matmul 20 x_wt", "matmul 20 dy_w", "matmul 20 dyt_x"),
        *("scan 2x9x6x5 forward", "scan 2x9x6x5 backward", "copy 1000", "step small"),
    ]
    results = {(r["name"], r["peer"]): r for r in report["results"]}
    assert results.keys() == {(name, peer) for name in names for peer in report["sides"]}
    for name in names:
        ours, theirs = results[name, "wgsl_train"], results[name, "numpy"]
        assert ours["ms"] > 0
        assert theirs["ratio"] == theirs["ms"] / ours["ms"]
        assert ours["checks"].keys() == theirs["checks"].keys()
        assert theirs["differs"] == []
    step = results["step small", "wgsl_train"]
    assert step["loss_first"] > step["loss_sixth"] > 0
    assert step["peak_rss"] > step["gpu_bytes"] > 0
    assert len(results["scan 2x9x6x5 backward", "numpy"]["checks"]) == 8
    text = capsys.readouterr().out
    assert device.name in text
    assert f"{step['loss_sixth']:.6f}" in text


@pytest.mark.gpu
def test_other_layers(small, device, capsys):
    quick = ["--rounds", "1", "--warm-up", "0", "--seconds", "0", "--kernels", "none"]
    configs = "small-mamba2,small-attention"
    assert bench.main([*quick, "--peers", "none", "--configs", configs]) == 0
    text = capsys.readouterr().out
    assert "step small-mamba2" in text
    assert "step small-attention" in text


def test_other_layers_are_for_those_who_know_them(stub, capsys):
    known = ["mamba", "mamba2"]
    stub.about["wgsl_train"] = {**stub.about["wgsl_train"], "layers": [*known, "attention"]}
    stub.about["torch"] = {**stub.about["torch"], "layers": known}
    options = ["--kernels", "none", "--peers", "torch,numpy"]
    assert bench.main([*options, "--configs", "small,small-mamba2,small-attention"]) == 0
    steps = capsys.readouterr().out.split("\nstep ")[1:]
    sides = [
        [name for name in ("wgsl_train", "torch", "numpy") if f"  {name} " in s] for s in steps
    ]
    assert sides == [["wgsl_train", "torch", "numpy"], ["wgsl_train", "torch"], ["wgsl_train"]]
    assert bench.main([*options, "--configs", "small-mamba3"]) == 2
    assert "'small-mamba3' is unknown; there are small, small-mamba2, " in capsys.readouterr().err


def test_a_regression_is_an_error(stub, tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    assert bench.main([*STEP, "--json", str(new)]) == 0
    report = json.loads(new.read_text())

    def status(factor, adapter="stub"):
        old.write_text(json.dumps({**report, "adapter": adapter}))
        return bench.main([*STEP, "--against", str(old), "--factor", str(factor)])

    stub.answer["wgsl_train"]["times"]["step"] = 0.55
    assert status(1.2) == 0
    assert "1 results compared" in capsys.readouterr().out
    assert status(1.05) == 1
    assert "step small: 550 ms, was 500 ms: 1.10 times as long" in capsys.readouterr().out
    assert status(1.05, "another adapter") == 2
    assert "nothing of this run on stub" in capsys.readouterr().err


@pytest.mark.parametrize("off, status", [(2e-5, 0), (2e-4, 1)])
def test_a_peer_must_compute_the_same(stub, capsys, off, status):
    stub.answer["numpy"]["loss_sixth"] += off
    assert bench.main(STEP) == status
    assert ("DIFFERS: sixth loss is 2.0002, ours 2" in capsys.readouterr().out) == status


@pytest.mark.parametrize("name, status", [("numpy", 0), ("wgsl_train", 1)])
def test_a_failure_is_told_of_and_is_an_error_where_it_is_ours(stub, capsys, name, status):
    stub.answer[name] = "out of memory"
    assert bench.main(STEP) == status
    assert "failed on step small: out of memory" in capsys.readouterr().out


def test_all_peers_are_those_installed(stub, capsys):
    stub.about["numpy"] = "no module"
    assert bench.main(["--kernels", "none"]) == 0
    text = capsys.readouterr().out
    assert "numpy left out: no module" in text
    assert "  jax  " in text
    assert "  numpy  " not in text
    assert bench.main(STEP) == 2
    assert "numpy cannot run: no module" in capsys.readouterr().err


def test_beside_a_gpu_stand_gpus(stub, capsys):
    stub.about["wgsl_train"] = {**stub.about["wgsl_train"], "kind": "DiscreteGPU"}
    stub.about["numpy"] = {**stub.about["numpy"], "device": "cpu"}
    assert bench.main(["--kernels", "none"]) == 0
    assert "numpy left out: on the CPU" in capsys.readouterr().out
    assert bench.main(STEP) == 0
    assert "  numpy  " in capsys.readouterr().out


def case(peers, tmp_path):
    path = tmp_path / "case.npz"
    bench.step_case("small").save(path)
    return peers("measure").Case.load(path)


def next_tokens(tokens):
    return np.concatenate([tokens[:, 1:], np.full((len(tokens), 1), -100)], 1)


def test_the_gradients_of_the_numpy_peer(small, peers, tmp_path):
    given = case(peers, tmp_path)
    loss, grads = peers("numpy_peer").Mamba(given).loss_and_grads()
    config = MambaConfig(vocab_size=SMALL[0], d_model=SMALL[1], n_layer=SMALL[2])
    expected, wanted, _ = oracle_model.loss_and_grads(
        config, given.weights, given.tokens, next_tokens(given.tokens)
    )
    assert loss == pytest.approx(expected, rel=1e-6)
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        assert grad.dtype == np.float32
        np.testing.assert_allclose(
            grad, wanted[name], rtol=1e-4, atol=1e-5 * np.abs(wanted[name]).max(), err_msg=name
        )


def test_time_is_taken_after_a_warm_up_by_blocks_with_one_wait(peers):
    done = []

    def start():
        done.append("run")
        time.sleep(0.005)

    work = peers("measure").Work(start, values=lambda _: {}, wait=lambda _: done.append("wait"))
    begin = time.perf_counter()
    assert work.seconds(0, warm_up=0.1) >= 0.005
    assert time.perf_counter() - begin > 0.1
    text = " ".join(done)
    assert text.startswith("run wait run")
    assert text.count("run run run wait") == 3


def test_a_slow_step_is_not_repeated_past_its_limit(peers, small, tmp_path):
    measure = peers("measure")

    class Slow(measure.Peer):
        def step(self, case):
            return {"step": measure.Work(lambda: time.sleep(0.05), lambda _: {"loss": 1.0})}

    given = case(peers, tmp_path)
    answer = Slow()._measure(given, warm_up=0, seconds=0.01, limit=0.12)
    assert answer["times"]["step"] == pytest.approx(0.05, rel=0.9)
    assert answer["loss_first"] == 1
    assert answer["loss_sixth"] is None


def test_what_differs():
    ours = {"loss_first": 5.0, "loss_sixth": 4.0, "checks": {"dx": 1e-3, "dz": 2.0}}
    assert bench.differences(ours, {**ours, "loss_sixth": None, "checks": {"dx": 1.00005e-3}}) == []
    assert bench.differences(ours, {**ours, "checks": {"dx": 1.1e-3}}) == [
        "dx is 0.0011, ours 0.001"
    ]
    assert bench.differences(ours, {**ours, "loss_sixth": float("nan")}) == [
        "sixth loss is nan, ours 4"
    ]


def test_what_regressed():
    def report(adapter, **ms):
        rows = [{"name": name, "peer": "wgsl_train", "ms": value} for name, value in ms.items()]
        rows.append({"name": "a", "peer": "numpy", "ms": 100.0 * len(rows)})
        rows.append({"name": "failed", "peer": "wgsl_train", "failed": "why"})
        return {"adapter": adapter, "results": rows}

    before = report("GPU", a=10.0, b=10.0, gone=1.0)
    now = report("GPU", a=11.9, b=12.1, new=1.0)
    assert bench.regressions(now, before, 1.2) == (["b: 12.1 ms, was 10 ms: 1.21 times as long"], 2)
    assert bench.regressions(now, before, 1.3) == ([], 2)
    assert bench.regressions(now, {**before, "adapter": "another"}, 1.2) == ([], 0)


def test_interpreters_of_peers():
    assert bench.interpreters("") == {}
    assert bench.interpreters("/a/python,jax=/b/python") == {"": "/a/python", "jax": "/b/python"}


def test_a_peers_environment_and_answer(monkeypatch, tmp_path):
    def script(text):
        path = tmp_path / "peer.py"
        path.write_text(text)
        monkeypatch.setitem(bench.SCRIPTS, "numpy", [str(path)])

    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    monkeypatch.setenv("OPENBLAS_L2_SIZE", "1")
    script("import json, os; print('chatter'); print(json.dumps(dict(os.environ)))")
    env = bench.call("numpy", sys.executable, [], 20, on_cpu=True)
    assert not {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"} & env.keys()
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    script("1 / 0")
    with pytest.raises(bench.BenchError, match="exit status 1: ZeroDivisionError"):
        bench.call("numpy", sys.executable, [], 20, on_cpu=True)
    script("import time; time.sleep(60)")
    with pytest.raises(bench.BenchError, match="no answer within 0 s"):
        bench.call("numpy", sys.executable, [], 0.2, on_cpu=True)
    with pytest.raises(bench.BenchError, match="/no/python: No such file"):
        bench.call("numpy", "/no/python", [], 20, on_cpu=True)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--configs", "XL"], "config 'XL' is unknown; there are small"),
        (["--kernels", "fft"], "kernel 'fft' is unknown"),
        (["--peers", "caffe"], "peer 'caffe' is unknown"),
        (["--python", "jaks=/b/python"], "--python names 'jaks'; peers are torch"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--against", "/no/such.json"], "--against /no/such.json"),
    ],
)
def test_a_request_that_makes_no_sense(stub, capsys, arguments, message):
    assert bench.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_cases_of_a_gpu():
    names = [c.name for kernel in bench.KERNELS for c in bench.kernel_cases(kernel, False, 1 << 28)]
    assert names == [
        *("matmul 4096", "scan 8x1024x1536x16", "scan 2x4096x1536x16", "scan 4x2048x2048x16"),
        f"copy {1 << 26}",  # as many as a binding holds
    ]
    assert bench.step_case("130m").numbers["dt_rank"] == 48
    assert bench.step_case("tiny", True).name == "step tiny checkpointed"
