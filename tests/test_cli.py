"""The command line: what each command does, and what it says where it cannot."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import typer
from tensorboardX.proto import event_pb2

import wgsl_train as wt
from wgsl_train import checkpoint, cli
from wgsl_train.config import MambaConfig, TrainConfig
from wgsl_train.device import AdapterInfo, with_target
from wgsl_train.errors import ConfigError, DeviceError

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

TEXT = b"the quick brown fox jumps over the lazy dog. " * 40
COMMANDS = (
    "train", "eval", "compare", "generate", "embed", "merge", "plot", "profile", "tune", "dev",
    "devices", "doctor",
)  # fmt: skip
SIZES = ("--d-model=8", "--n-layer=1", "--d-state=4", "--batch-size=2", "--seq-len=16")


class Result:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys, monkeypatch, tmp_path, device):
    """Calls the command line in this process, in an empty folder, on the session's device."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "request_device", lambda *a, **k: device)
    (tmp_path / "text.txt").write_bytes(TEXT)

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["wgsl-train", *map(str, args)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        seen = capsys.readouterr()
        assert "Traceback" not in seen.out + seen.err
        return Result(code, seen.out, seen.err)

    return call


@pytest.fixture
def train(run):
    """`wgsl-train train` of a tiny model on text.txt."""

    def call(*args, data="text.txt", out="run", steps=3):
        return run("train", "--data", data, "--out", out, *SIZES, f"--steps={steps}", *args)

    return call


def spawn(*args, **env):
    """The command line in a process of its own; None removes a variable."""
    merged = {k: v for k, v in {**os.environ, **env}.items() if v is not None}
    done = subprocess.run(
        [sys.executable, "-m", "wgsl_train", *map(str, args)],
        capture_output=True,
        text=True,
        env=merged,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return Result(done.returncode, done.stdout, done.stderr)


def refuses(result, message, code=1):
    """One message, at the end of the error output, and the exit code that is documented."""
    assert result.code == code, result.err
    assert re.search(message, result.err), result.err
    assert result.err.lower().count("error: ") == 1


def log(out="run"):
    with open(f"{out}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


# Training


def test_training_says_what_it_does_and_keeps_the_log(train):
    done = train("--eval-fraction=0.1", "--log-every=2", steps=5)
    assert done.code == 0, done.err
    assert re.search(r"^adapter    .*(Vulkan|Metal|D3D12)", done.err, re.M)
    assert "parameters: d_model 8, 1 layers, vocabulary 256, euler" in done.err
    assert "precision  f32" in done.err
    assert "1,620 tokens, 180 held out; 5 steps of 2 x 16 tokens" in done.err
    assert re.search(r"memory     [\d.]+ MiB planned: parameters", done.err)
    shown = re.findall(
        r"^step (\d)/5  loss [\d.]+  lr \S+  norm \S+  [\d,]+ tokens/s", done.err, re.M
    )
    assert shown == ["1", "2", "4", "5"]
    assert re.search(r"^step 4/5 .*  left \d+:\d\d:\d\d$", done.err, re.M)
    assert re.search(
        r"^step 5: eval loss [\d.]+, perplexity [\d.]+, [\d.]+ bits a token, top-1 [\d.]+%$",
        done.err,
        re.M,
    )
    assert "saved      run/checkpoint-5" in done.err
    assert done.out == ""
    records = log()
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 5]
    assert {"step", "loss", "lr", "grad_norm", "tokens_per_s"} <= records[0].keys()
    assert {"eval_loss", "perplexity", "bits_per_token"} <= records[-1].keys()
    assert records[0]["loss"] == pytest.approx(np.log(256), rel=0.05)
    files = {p.name for p in checkpoint.latest("run").iterdir()}
    assert files == {
        "config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "trainer_state.json",
    }


def test_a_run_says_its_precision(train, device, monkeypatch):  # U7
    done = train("--precision=f16", steps=2)
    assert done.code == 0, done.err
    said = "precision  f16 storage, f32 arithmetic and master weights, loss scale 65536\n"
    assert said in done.err
    assert [r["loss_scale"] for r in log()] == [65536, 65536]
    assert json.loads(Path("run/tuning.json").read_text())["precision"] == "f16"
    state = checkpoint.latest("run") / "trainer_state.json"
    saved = json.loads(state.read_text())
    assert saved["loss_scale"] == {"scale": 65536, "clean_steps": 2, "overflows": 0}
    saved["loss_scale"]["scale"] = 4096
    state.write_text(json.dumps(saved))
    again = train("--resume", steps=3)
    assert "loss scale 4096\n" in again.err, again.err
    assert log()[-1]["loss_scale"] == 4096
    masked = with_target(device, features=device.target.features - {"shader-f16"})
    monkeypatch.setattr("wgsl_train.cli.request_device", lambda *a, **k: masked)
    refuses(train("--precision=f16", out="other"), "needs the feature shader-f16", 3)
    refuses(train("--precision=bf16", out="other"), "precision is 'bf16'")


def test_several_paths_and_patterns(run, train, tmp_path):
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / name).write_bytes(TEXT[:100])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "d.txt").write_bytes(TEXT[:50])
    for paths, count in [
        (["--data", "a.txt", "b.txt", "c.md"], 300),
        (["--data", "[ab].txt", "folder", "--data", "c.md"], 350),
        (["--data=a.txt", "b.txt"], 200),
    ]:
        done = run("train", *paths, "--dry-run", *SIZES)
        assert done.code == 0, done.err
        assert f"data       {count} tokens" in done.err


def test_epochs_are_one_by_default(run):
    done = run("train", "--data", "text.txt", "--dry-run", *SIZES)
    assert "; 57 steps of" in done.err  # 112 chunks by 2, and the rest
    done = run("train", "--data", "text.txt", "--dry-run", *SIZES, "--epochs=3")
    assert "; 171 steps of" in done.err


def test_dry_run_prints_the_plan_and_trains_nothing(train, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "Model", None)
    done = train("--dry-run", "--weight-decay=0.05")
    assert done.code == 0, done.err
    for section in ("forward: ", "backward: ", "update: "):
        assert section in done.out
    assert "scan_forward" in done.out
    decayed, spared = done.out.split("weight decay 0.05: ")[1].split("weight decay 0.0: ")
    assert "mixer.in_proj.weight (32, 8)" in decayed
    assert "embeddings.weight" in decayed
    for name in ("A_log", "mixer.D", "norm.weight", "norm_f.weight", "conv1d.bias", "dt_proj.bias"):
        assert name in spared
        assert name not in decayed
    assert re.search(r"memory: [\d.]+ MiB planned", done.out)
    assert not (tmp_path / "run").exists()


def test_settings_come_from_files_and_flags_override_them(run, tmp_path):
    (tmp_path / "run.toml").write_text(
        "[model]\nd_model = 8\nn_layer = 1\nd_state = 4\n[train]\nepochs = 2\nseq_len = 16\n"
        'batch_size = 2\nmemory_budget = "1 GiB"\n[data]\npaths = "text.txt"\ndtype = "uint32"\n'
    )
    done = run("train", "--config", "run.toml", "--dry-run")
    assert "; 114 steps of 2 x 16" in done.err
    done = run(
        "train", "--config", "run.toml", "--dry-run", "--steps=9", "--batch-size=4", "--d-state=3"
    )
    assert "; 9 steps of 4 x 16" in done.err
    (tmp_path / "ids.bin").write_bytes(np.arange(100, dtype="<u4").tobytes())
    done = run("train", "--config", "run.toml", "--dry-run", "--data", "ids.bin")
    assert "data       100 tokens" in done.err


def test_token_files(run):
    np.save("ids.npy", np.arange(200) % 30)
    (np.arange(300) % 30).astype("<u2").tofile("ids.bin")
    for name, count in (("ids.npy", 200), ("ids.bin", 300)):
        done = run("train", "--data", name, "--vocab-size=30", "--dry-run", *SIZES)
        assert f"data       {count} tokens" in done.err


def test_a_tokenizer_is_kept_with_the_run(run, train, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {w: i for i, w in enumerate(["[UNK]", *sorted({*TEXT.decode().split()})])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save("words.json")
    assert train("--tokenizer=words.json").code == 0
    shutil.move("words.json", "elsewhere.json")
    done = run("generate", "run", "--prompt", "quick", "--max-new-tokens=3", "--temperature=0")
    assert done.code == 0, done.err
    assert len(done.out.split()) == 4
    assert set(done.out.split()) <= {*words}
    assert run("eval", "run", "--data", "text.txt", "--seq-len=16").code == 0
    assert train("--resume", "--steps=4").code == 0
    kept = Path("run/tokenizer.json").read_bytes()
    Path("elsewhere.json").write_bytes(kept.replace(b"quick", b"quack"))
    refuses(train("--resume", "--steps=5", "--tokenizer=elsewhere.json"), "began on other data")
    assert Path("run/tokenizer.json").read_bytes() == kept


# Resuming


def test_resuming_goes_on_under_the_run_s_own_settings(run, train):
    assert train("--lr=0.003", "--stop-after=2").code == 0
    assert [r["step"] for r in log()] == [1, 2]
    done = run("train", "--data", "text.txt", "--out=run", "--resume")
    assert done.code == 0, done.err
    assert "resuming   run/checkpoint-2" in done.err
    assert [r["step"] for r in log()] == [1, 2, 3]
    assert [r["lr"] for r in log()] == pytest.approx([0.003] * 3)
    done = run("train", "--data", "text.txt", "--out=run", "--resume")
    assert done.code == 0
    assert "nothing to do: step 3 of 3 is reached" in done.err
    done = run("train", "--data", "text.txt", "--out=run", "--resume", "--steps=5", "--lr=0.001")
    assert done.code == 0
    assert log()[-1]["lr"] == pytest.approx(0.001)
    assert log()[-1]["step"] == 5


def test_what_resuming_refuses(run, train, tmp_path):
    refuses(train("--resume"), "run has no whole checkpoint to resume from")
    assert train().code == 0
    refuses(train(), "run holds a run already: .*--resume")
    refuses(train("--resume", "--d-model=16"), "d_model is 16, but run/checkpoint-3 has 8")
    refuses(train("--resume", "--seq-len=8"), "trained with seq_len 16, not 8")
    refuses(train("--resume", "--seed=3"), "trained with seed 0, not 3")
    refuses(train("--resume", "--eval-fraction=0.1"), "trained with eval_fraction 0.0, not 0.1")
    (tmp_path / "other.txt").write_bytes(TEXT[:-1])
    refuses(train("--resume", "--steps=9", data="other.txt"), "1,800 tokens, these data have 1,799")
    refuses(train("--resume", "--from-pretrained=run"), "either --resume or", code=2)
    assert train("--resume", steps=4).code == 0
    weights = tmp_path / "run" / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    done = train("--resume", steps=5)  # goes on from the one before
    assert done.code == 0, done.err
    assert "warning: checkpoint-4 is passed over: " in done.err
    assert "resuming   run/checkpoint-3" in done.err
    for folder in checkpoint.checkpoints("run"):
        (folder / "model.safetensors").write_bytes(b"")
    refuses(train("--resume", steps=6), "no whole checkpoint")


def test_fine_tuning_starts_from_a_model(run, train):
    assert train("--lr=0.01", steps=20).code == 0
    done = train("--from-pretrained=run", out="tuned")
    assert done.code == 0, done.err
    assert log("tuned")[0]["loss"] < log("run")[0]["loss"] - 0.2
    assert log("tuned")[0]["step"] == 1
    refuses(train("--from-pretrained=run", "--n-layer=2", out="x"), "n_layer is 2, but .* has 1")
    refuses(train("--from-pretrained=nowhere", out="x"), "nowhere: no such folder")
    shutil.copytree("run/checkpoint-20", "models/base")
    Path("models/tokenizer.json").write_text("of another model")
    done = train("--from-pretrained=models/base", steps=1, out="bytes")
    assert done.code == 0, done.err
    assert Path("bytes/wgsl_train_tokenizer.json").is_file()


def test_narrow_training_and_widening_again(run, train):
    assert train(out="base").code == 0
    base = wt.checkpoint.load_tensors(checkpoint.latest("base"))
    done = train("--from-pretrained=base", "--write-through", "--lr=1e-2", out="narrow")
    assert done.code == 0, done.err
    assert re.search(
        r"trained    144 trainable of [\d,]+ \([\d.]+%\); optimizer state 1,152 bytes, [\d,]+ fewer",
        done.err,
    )
    narrow = wt.checkpoint.load_tensors(checkpoint.latest("narrow"))
    for name in base:
        assert ("x_proj" in name) != np.array_equal(base[name], narrow[name]), name
    wide = run(
        "train", "--data=text.txt", "--out=narrow", "--resume", "--steps=4", "--train=*.D",
        "--train=*.x_proj.*",
    )  # fmt: skip
    assert wide.code == 0, wide.err
    assert "warning: checkpoint-3 was made without updating backbone.layers.0.mixer.D" in wide.err
    unknown = train("--train=q_proj", out="other")
    refuses(unknown, r"TrainConfig.train is 'q_proj'; allowed: patterns that match some of back")


def sentences(words, count, seed):
    """Words in an order that nobody has seen."""
    return " ".join(np.random.default_rng(seed).choice(words.split(), count)).encode()


@pytest.mark.parametrize("lora_base", ["f32", "int8"])
def test_an_adapter_beats_its_base_on_text_that_neither_has_seen(run, train, tmp_path, lora_base):
    """Both know English letters; only the adapter has met these words."""
    words = "pack my box with five dozen liquor jugs"
    for name, seed in (("new.txt", 0), ("unseen.txt", 1)):
        (tmp_path / name).write_bytes(sentences(words, 300, seed))
    assert train("--lr=1e-2", out="base", steps=20).code == 0
    done = train(
        "--from-pretrained=base", "--lora-rank=4", "--lora-alpha=8", "--lr=1e-2",
        f"--lora-base={lora_base}", "--lora-targets=in_proj,out_proj,embeddings,conv1d",
        data="new.txt", out="lora", steps=40,
    )  # fmt: skip
    assert done.code == 0, done.err
    seen = run("compare", "base", "lora", "--data=unseen.txt", "--batch-size=2", "--seq-len=16")
    found = json.loads(seen.out)
    assert found["loss_b"] < found["loss_a"] - 0.2
    assert found["wins"] > 0.6


def test_merging_keeps_to_folders_of_its_own(run, train):
    """A merged model beside an adapter would have it twice; in a run's folder, hide the run."""
    assert train("--lora-rank=2").code == 0
    before = Path("run/checkpoint-3/model.safetensors").read_bytes()
    refuses(
        run("merge", "run", "--out", "run/checkpoint-3"), "run/checkpoint-3 is in use: it holds"
    )
    refuses(run("merge", "run", "--out", "run"), "run is in use: it holds checkpoint-3")
    assert Path("run/checkpoint-3/model.safetensors").read_bytes() == before
    with checkpoint.lock("busy"):
        refuses(run("merge", "run", "--out", "busy"), "busy: in use by process")
    assert run("merge", "run", "--out", "whole").code == 0
    refuses(train("--from-pretrained=whole", out="whole"), "whole is in use: it holds config.json")
    Path("run/checkpoint-3/adapter_config.json").unlink()
    refuses(run("embed", "run/checkpoint-3", "--text=x"), "holds adapter_model.safetensors, but no")


def test_a_run_does_not_read_its_own_files(run, train):
    Path("data").mkdir()
    shutil.move("text.txt", "data")
    for more in ((), ("--resume", "--steps=4")):
        done = train(*more, data="data", out="data/run")
        assert done.code == 0, done.err
        assert "data       1,800 tokens" in done.err
    refuses(train("--resume", data="data/run", out="data/run"), "nothing but the run in data/run")
    shutil.copy("data/text.txt", "data/run")
    assert train("--resume", data="data/run", out="data/run", steps=5).code == 0
    assert train(data="data/run/metrics.jsonl", out="data/run2").code == 0  # where it is named


def test_a_base_in_fewer_bits(run, train, tmp_path):
    (tmp_path / "new.txt").write_bytes(b"pack my box with five dozen liquor jugs. " * 40)
    assert train("--lr=1e-2", out="base", steps=3).code == 0
    given = ("--from-pretrained=base", "--lora-base=int8")
    refuses(train(*given, out="other"), "lora_base is 'int8'.*there is none: set lora_rank")
    refuses(
        train(*given[:1], "--lora-base=int4", out="other"), "lora_base is 'int4'; allowed: 'f32'"
    )
    done = train(*given, "--lora-rank=2", data="new.txt", out="lora", steps=4)
    assert done.code == 0, done.err
    weights = 256 * 8 + 32 * 8 + 9 * 16 + 16 * 1 + 8 * 16
    saved = 4 * weights - (weights + 4 * (256 + 32 + 9 + 16 + 8))
    assert f"base       int8: {weights:,} weights in {4 * weights - saved:,} bytes" in done.err
    assert f"{saved:,} fewer than as f32" in done.err
    state = json.loads((checkpoint.latest(tmp_path / "lora") / "trainer_state.json").read_text())
    assert state["parameters"]["base_bytes_saved"] == saved
    assert state["train"]["lora_base"] == "int8"
    again = run("train", "--data=new.txt", "--out=lora", "--resume", "--steps=5")
    assert again.code == 0, again.err
    assert "base       int8" in again.err
    assert run("merge", "lora", "--out=merged").code == 0

    def loss(model):
        seen = run("eval", model, "--data=new.txt", "--batch-size=2", "--seq-len=16")
        return json.loads(seen.out)["eval_loss"]

    assert loss("merged") == pytest.approx(loss("lora"), rel=1e-5)


def test_an_adapter_learns_new_text_better_than_its_base_knows_it(run, train, tmp_path):
    (tmp_path / "new.txt").write_bytes(b"pack my box with five dozen liquor jugs. " * 40)
    assert train("--lr=1e-2", out="base", steps=20).code == 0
    done = train(
        "--from-pretrained=base", "--lora-rank=4", "--lora-alpha=8", "--lr=1e-2",
        data="new.txt", out="lora", steps=20,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert re.search(
        r"trained    adapted 1 of 1 layers, 373 trainable of [\d,]+ \([\d.]+%\); optimizer state "
        r"2,984 bytes, [\d,]+ fewer than for all", done.err
    )  # fmt: skip

    def loss(model):
        seen = run("eval", model, "--data=new.txt", "--batch-size=2", "--seq-len=16")
        assert seen.code == 0, seen.err
        return json.loads(seen.out)["eval_loss"]

    assert loss("lora") < loss("base") - 0.1
    assert run("merge", "lora", "--out=merged").code == 0
    assert loss("merged") == pytest.approx(loss("lora"), rel=1e-5)
    weights = [wt.checkpoint.load_tensors(checkpoint.latest(d)) for d in ("base", "lora")]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
    refuses(run("merge", "base", "--out=other"), "has no adapter")
    again = run("train", "--data=new.txt", "--out=lora", "--resume", "--steps=21")
    assert again.code == 0, again.err
    assert "adapted 1 of 1 layers" in again.err
    unknown = train("--lora-rank=4", "--lora-targets=q_proj,in_proj", out="other")
    refuses(unknown, r"lora_targets is 'q_proj'; allowed .*: embeddings, in_proj, conv1d, x_proj")


# What is refused

USAGE = 2
BAD = [
    (["--data=nowhere.txt"], "nowhere.txt: no such file or folder", 1),
    (["--data=*.none"], r"\*.none: no file there that holds anything", 1),
    (["--data=empty.txt"], "empty.txt: the file is empty", 1),
    (["--data=one.txt"], "has 1 token; at least 2 are needed", 1),
    (["--data=text.txt", "--tokenizer=none.json"], "none.json: cannot be read as a tokenizer", 1),
    (["--data=text.txt", "--tokenizer=text.txt"], "text.txt: not a tokenizer.json", 1),
    (["--data=latin1.txt", "--tokenizer=words.json"], "latin1.txt: byte 2 is not UTF-8 text", 1),
    (["--data=ids.npy"], "ids.npy: token 256 at position 7, outside the vocabulary of 256", 1),
    (["--data=text.txt", "--vocab-size=100"], r"text.txt: token \d+ at position \d+, outside", 1),
    (["--data=floats.npy"], "floats.npy: holds float64", 1),
    (["--data=odd.bin"], "odd.bin: 3 bytes are no whole number of uint16 ids", 1),
    (["--data=ids.npy", "text.txt"], "holds token ids and .* text; train on one kind", 1),
    (["--data=ids.npy", "--dtype=uint8"], "uint8", USAGE),
    (["--data=text.txt", "--steps=1", "--epochs=1"], "steps is 1 and epochs is 1", 1),
    (["--data=text.txt", "--lr=-1"], "lr is -1.0; allowed: a number from 0.0 to 10.0", 1),
    (["--data=text.txt", "--lr=fast"], "Invalid value for '--lr'", USAGE),
    (["--data=text.txt", "--schedule=step"], "schedule is 'step'; allowed: 'constant' or", 1),
    (["--data=text.txt", "--dt-rank=big"], "dt_rank is 'big'; allowed: an integer", 1),
    (["--data=text.txt", "--d-model=0"], "d_model is 0; allowed: an integer from 1", 1),
    (["--data=text.txt", "--a-log-clamp", "5", "-10"], "a_log_clamp is .*low < high", 1),
    (["--data=text.txt", "--gradient-accumulation=0"], "gradient_accumulation is 0", 1),
    (["--data=text.txt", "--eval-fraction=0.0001"], "the evaluation part has 0 tokens", 1),
    (["--data=text.txt", "--memory-budget=lots"], "memory_budget is 'lots'; allowed: bytes", 1),
    (["--data=text.txt", "--memory-budget=10kB"], r"memory budget is 10,000: [\d,]+ bytes are miss", 3),
    (["--data=text.txt", "--learning-rate=1"], "No such option: --learning-rate", USAGE),
    (["--data=text.txt", "--stop-after=0"], "Invalid value for '--stop-after'", USAGE),
    (["--data=text.txt", "stray", "--steps=1", "stray"], "Got unexpected extra argument", USAGE),
    ([], "--data: files to train on are needed", USAGE),
    (["--data=text.txt", "--out=text.txt"], "text.txt: cannot be written: File exists", 1),
    (["--data=text.txt", "--out=text.txt/run"], "cannot be written: Not a directory", 1),
    (["--data=text.txt", "--config=none.toml"], "none.toml: cannot be read", 1),
    (["--data=text.txt", "--config=text.txt"], "text.txt: not TOML", 1),
    (["--data=text.txt", "--config=key.toml"], "has no 'learning_rate'; known: lr", 1),
    (["--data=text.txt", "--config=near.toml"], "has no 'warmup_step'; did you mean 'warmup_steps'", 1),
    (["--data=text.txt", "--config=table.toml"], "has no 'optimizer'; ", 1),
    (["--data=text.txt", "--config=value.toml"], "log_every is 'often'; allowed: an integer", 1),
    (["--config=data.toml"], r"\[data\] has no 'path'; did you mean 'paths'", 1),
    (["--config=dtype.toml"], r"\[data\] dtype is 'int8'; allowed: 'uint16' or 'uint32'", 1),
    (["--config=paths.toml"], r"\[data\] paths is 5; allowed: a list of paths", 1),
    (["--config=pack.toml"], r"\[data\] pack is 1; allowed: true or false", 1),
]  # fmt: skip
FILES = {
    "empty.txt": b"",
    "one.txt": b"x",
    "latin1.txt": b"ab\xe9cd",
    "odd.bin": b"abc",
    "words.json": b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}',
    "key.toml": b"[train]\nlearning_rate = 1\n",
    "near.toml": b"[train]\nwarmup_step = 1\n",
    "table.toml": b"[optimizer]\nlr = 1\n",
    "value.toml": b'[train]\nlog_every = "often"\n',
    "data.toml": b'[data]\npath = "text.txt"\n',
    "dtype.toml": b'[data]\npaths = ["text.txt"]\ndtype = "int8"\n',
    "paths.toml": b"[data]\npaths = 5\n",
    "pack.toml": b'[data]\npaths = "text.txt"\npack = 1\n',
}


@pytest.mark.parametrize(
    "args, message, code", BAD, ids=lambda v: " ".join(v) if isinstance(v, list) else ""
)
def test_bad_input_is_one_message(run, tmp_path, args, message, code):
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    np.save("ids.npy", np.array([0, 1, 2, 3, 4, 5, 6, 256]))
    np.save("floats.npy", np.zeros(5))
    small = [o for o in SIZES if o.split("=")[0] not in " ".join(args)]
    before = sorted(tmp_path.iterdir())
    refuses(run("train", *args, *small), message, code)
    assert sorted(tmp_path.iterdir()) == before  # not even an empty run folder is left


def test_a_log_that_cannot_be_written(train, tmp_path):
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    refuses(train(), r"run/metrics.jsonl: cannot be written: ")


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_models_that_cannot_be_loaded(run, train, tmp_path, command):
    rest = ["--data", "text.txt"] if command == "eval" else ["--prompt", "a"]
    refuses(run(command, "nowhere", *rest), "nowhere: no such folder")
    (tmp_path / "empty").mkdir()
    refuses(run(command, "empty", *rest), "empty")
    assert train().code == 0
    weights = tmp_path / "run" / "checkpoint-3" / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:100])
    refuses(run(command, "run", *rest), "none of its checkpoints is whole")
    refuses(run(command, "run/checkpoint-3", *rest), "model.safetensors: damaged")
    weights.write_bytes(data)
    config = tmp_path / "run" / "checkpoint-3" / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"state_size": 5}))
    refuses(
        run(command, "run", *rest), r"is \(9, 16\), the configuration makes it \(11, 16\).*d_state"
    )
    config.write_text(json.dumps({k: v for k, v in fields.items() if k != "hidden_size"}))
    refuses(run(command, "run", *rest), "run/checkpoint-3: config.json has no 'hidden_size'")


# The other commands


def test_evaluating(run, train):
    assert train("--eval-fraction=0.25", "--lr=0.01").code == 0
    Path("part.txt").write_bytes(TEXT[-450:])
    done = run("eval", "run", "--data", "part.txt", "--seq-len=16", "--batch-size=2")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    wanted = {k: v for k, v in log()[-1].items() if k != "step"}
    assert found == pytest.approx(wanted)
    assert found["eval_tokens"] == 449
    (weights,) = Path("run").glob("checkpoint-*/model.safetensors")
    damaged = bytearray(weights.read_bytes())
    damaged[-4:] = np.float32(np.nan).tobytes()
    weights.write_bytes(damaged)
    refuses(run("eval", "run", "--data", "part.txt"), "the loss is nan: the model's weights")
    refuses(run("eval", "run"), "Missing option '--data'", USAGE)
    refuses(run("eval", "--data", "part.txt"), "(?i)missing argument 'model'", USAGE)
    refuses(run("eval", "run", "--data", "none.txt"), "none.txt: no such file")


def test_generating(run, train, monkeypatch):
    assert train("--lr=0.02", steps=30).code == 0
    ask = ("generate", "run", "--prompt", "the ", "--max-new-tokens", "20")
    done = run(*ask, "--seed=7")
    assert done.code == 0, done.err
    assert done.out.startswith("the ")
    assert done.out.endswith("\n")
    assert run(*ask, "--seed=7").out == done.out
    assert run(*ask, "--seed=8").out != done.out
    assert run(*ask, "--temperature=0").out == run(*ask, "--temperature=0", "--seed=5").out
    assert run("generate", "run", "--prompt", "the ", "--max-new-tokens=0").out == "the \n"

    def from_input(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return run("generate", "run", "--prompt", "-", "--max-new-tokens=20", "--seed=7")

    assert from_input(b"the ").out == done.out
    refuses(from_input(b"th\xff"), "standard input: byte 2 is not UTF-8")
    refuses(from_input(b""), "the prompt is empty")
    refuses(run("generate", "run", "--prompt", ""), "the prompt is empty")
    refuses(run("generate", "run"), "Missing option '--prompt'", USAGE)
    for option, message in {
        "--temperature=-1": "temperature is -1.0, must be a finite number",
        "--temperature=nan": "temperature is nan",
        "--top-p=0": r"top_p is 0.0, must be in \(0, 1\]",
        "--top-k=-1": "top_k is -1",
    }.items():
        done = run(*ask, option)
        refuses(done, message)
        assert done.out == ""  # not even the prompt


def test_text_that_has_no_tokens(run, train, monkeypatch):
    from tokenizers import Tokenizer, models, pre_tokenizers

    assert train().code == 0
    for given in (("generate", "run", "--prompt"), ("embed", "run", "--text")):
        refuses(run(*given, "a\udcff"), "character 1 of the text is U[+]DCFF, which UTF-8 cannot")
        refuses(run(*given, ""), "is empty: one token at least")
        monkeypatch.setattr(sys, "stdin", None)
        refuses(run(*given, "-"), "standard input is closed")
    Path("half.jsonl").write_text('{"text": "ab"}\n{"text": "c\\ud800"}\n')
    refuses(train("--pack", data="half.jsonl", out="x"), "half.jsonl:2: character 1 .* U[+]D800")
    words = Tokenizer(models.WordLevel({"the": 0, "fox": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save("words.json")
    done = train("--tokenizer=words.json", out="x")
    assert "error: text.txt: the tokenizer cannot read this text: WordLevel error" in done.err


def test_closed_streams(train, tmp_path):
    """The next file that is opened must not be taken for one of them, and hold what is said."""
    command = f"{sys.executable} -m wgsl_train train --data text.txt --steps 3 {' '.join(SIZES)}"
    done = subprocess.run(
        f"{command} <&- >&- 2>&-; echo $?", shell=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert [record["step"] for record in log()] == [1, 2, 3]


def test_a_stray_tokenizer_is_not_taken_for_the_run_s(train):
    Path("run").mkdir()
    Path("run/tokenizer.json").write_text("{}")
    refuses(train(), "run holds a tokenizer.json, but the tokens are bytes: give it as --tokenizer")


def test_characters_of_several_bytes_come_whole():
    ids = "aé€😀z".encode()

    def pieces(prompt, data):
        return [p for p in cli._pieces(wt.data.ByteTokenizer(), list(prompt), iter(data)) if p]

    assert pieces("über€".encode(), ids) == ["a", "é", "€", "😀", "z"]
    assert "".join(pieces(b"", ids[:-2])) == "aé€\ufffd"
    assert "".join(pieces(b"a", bytes([0xFF]) * 20 + b"ok")) == "\ufffd" * 20 + "ok"


def test_devices_and_doctor(run, device):
    done = run("devices")
    assert done.code == 0
    assert re.match(r"0: .+ \(\w+, (Vulkan|Metal|D3D12)", done.out)
    done = run("doctor")
    assert done.code == 0, done.out
    for part in (
        "python 3.",
        "wgpu 0.",
        "adapters",
        "chosen",
        "max_binding",
        "shader-f16",
        "AdamW step",
    ):
        assert part in done.out
    tests = 6 + ("shader-f16" in device.target.features)
    assert len(re.findall(r"^  \S.* {2,}right$", done.out, re.M)) == tests
    assert done.out.endswith("all is well\n")


def test_the_doctor_sees_a_wrong_kernel(run, monkeypatch):
    from wgsl_train import doctor

    monkeypatch.setitem(doctor._TESTS, "norm", lambda device: (np.array([1.0]), np.array([1.1])))
    done = run("doctor")
    assert done.code == 3
    assert "norm             WRONG: [1.0], must be [1.1]" in done.out
    assert "not sound: update the driver" in done.out


def test_wrong_f16_leaves_the_rest_sound(run, monkeypatch, device):
    with_f16 = with_target(device, features=device.target.features | {"shader-f16"})
    monkeypatch.setattr("wgsl_train.doctor.request_device", lambda *a, **k: with_f16)
    failing = Mock(side_effect=DeviceError("stores 1 as 0"))
    monkeypatch.setattr("wgsl_train.doctor.check_f16", failing)
    done = run("doctor")
    assert done.code == 0
    assert "f16 storage      WRONG: stores 1 as 0" in done.out
    assert done.out.endswith("all is well\n")


def test_the_doctor_does_not_trust_adapters_known_to_be_wrong(run, monkeypatch, device):  # D16
    monkeypatch.setattr(device, "name", "Apple Paravirtual device")
    monkeypatch.setattr("wgsl_train.doctor.request_device", lambda *a, **k: device)
    done = run("doctor")
    assert done.code == 3
    assert "not trusted" in done.out


def test_version_and_help(run):
    assert run("--version").out.strip() == wt.__version__
    for command in COMMANDS:
        done = run(command, "--help")
        assert done.code == 0
        assert done.out.startswith(f"Usage: wgsl-train {command}")
    assert "Ends with 0 where all went well" in run("--help").out
    refuses(run("trian"), "No such command 'trian'", USAGE)
    assert run().code in (0, 2)


def test_every_option_has_help(run):
    """A field of a configuration that its docstring does not describe is found here."""
    for cls in (MambaConfig, TrainConfig):
        described = cli._field_help(cls)
        assert [f.name for f in fields(cls) if not described.get(f.name)] == []
    commands = typer.main.get_command(cli.app).commands
    assert set(commands) == set(COMMANDS)
    for name, command in commands.items():
        assert [p.name for p in command.params if not p.help] == [], name
    for name in commands:
        text = run(name, "--help").out
        assert "None" not in text
        assert max(map(len, text.splitlines())) <= 80


# Adapters


def test_no_adapter(tmp_path):  # D01
    """One message: what is missing, what to install, and that the environment has a say in it."""
    empty = tmp_path / "empty.json"
    empty.write_text("")
    (tmp_path / "text.txt").write_bytes(TEXT)
    variables = {"VK_DRIVER_FILES": str(empty), "VK_ICD_FILENAMES": str(empty)}
    for args in (
        ["train", "--data", tmp_path / "text.txt", "--out", tmp_path / "run"],
        ["devices"],
    ):
        done = spawn(*args, **variables)
        refuses(done, "no WebGPU adapter was found.*\n.*Linux", code=3)
        assert "mesa-vulkan-drivers" in done.err
        assert "VK_DRIVER_FILES, VK_ICD_FILENAMES" in done.err
        assert done.out == ""
    assert not (tmp_path / "run").exists()
    done = spawn("doctor", **variables)
    assert done.code == 3
    assert "mesa-vulkan-drivers" in done.out
    assert "VK_DRIVER_FILES" in done.out


def adapters(*kinds):
    return [AdapterInfo(i, f"Card {i} of {k}", k, "Vulkan", "", None) for i, k in enumerate(kinds)]


def test_choosing_an_adapter(run, monkeypatch):  # D02, D03
    monkeypatch.setattr(cli, "request_device", wt.device.request_device)
    monkeypatch.setattr("wgsl_train.device.list_adapters", lambda: adapters("CPU", "CPU"))
    command = ("train", "--data", "text.txt")
    refuses(run(*command, "--require-gpu"), "Card 0 of CPU is a CPU adapter, and a GPU is req", 3)
    refuses(run(*command, "--device=2"), r"no adapter 2; there are 0..1:\n  0: Card 0", 3)
    refuses(run(*command, "--device=card"), "several adapters' names contain 'card'; choose by", 3)
    refuses(run(*command, "--device=geforce"), "no adapter's name contains 'geforce'; choose", 3)
    monkeypatch.setenv("WGSL_TRAIN_ADAPTER", "radeon")
    refuses(run(*command), "no adapter's name contains 'radeon'", 3)
    refuses(run("doctor", "--device=9"), "no adapter 9", 3)


def test_a_cpu_adapter_gets_one_warning_line(tmp_path):  # D02
    (tmp_path / "text.txt").write_bytes(TEXT)
    command = ("train", "--data", tmp_path / "text.txt", "--dry-run", *SIZES)
    loud, quiet = spawn(*command), spawn(*command, "--allow-cpu-adapter")
    assert loud.code == quiet.code == 0
    if re.search(r"^adapter .*\(CPU,", loud.err, re.M):
        assert loud.err.count("warning: ") == 1
        assert "emulates a GPU on the CPU" in loud.err
    assert "warning" not in quiet.err


# Parts


def test_sizes_in_bytes():
    for text, size in {
        "1073741824": 1 << 30, "8GiB": 8 << 30, "8 GiB": 8 << 30, "1.5gib": 3 << 29, "2GB": 2 * 10**9,
        "500MB": 500 * 10**6, "64k": 64000, "64KiB": 65536, "1TiB": 1 << 40, "12B": 12,
    }.items():  # fmt: skip
        assert cli.parse_bytes(text) == size, text
    for text in ("", "8GiBs", "-1", "GiB", "1e9", "8PiB", "nan"):
        with pytest.raises(ConfigError, match="memory_budget"):
            cli.parse_bytes(text)


def test_spreading_data():
    assert cli._spread_data(["train", "--data", "a", "b", "--out", "x", "y"]) == [
        "train", "--data", "a", "--data", "b", "--out", "x", "y",
    ]  # fmt: skip
    assert cli._spread_data(["--data=a", "b", "-", "--steps=1"]) == [
        "--data=a", "--data", "b", "--data", "-", "--steps=1",
    ]  # fmt: skip


def test_a_reader_that_goes_away(tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m wgsl_train train --help | head -1",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("Usage")
    assert "Traceback" not in done.stderr


# Measuring and drawing


def test_comparing_embedding_and_drawing(run, train, tmp_path, monkeypatch):
    train("--eval-fraction=0.1", out="a")
    train("--lr=1e-2", out="b", steps=20)
    done = run("compare", "a", "b", "--data=text.txt", "--batch-size=2", "--seq-len=16")
    assert done.code == 0, done.err
    seen = json.loads(done.out)
    assert seen["difference"] == pytest.approx(seen["loss_b"] - seen["loss_a"])
    assert seen["difference"] < -0.5
    assert 0.5 < seen["wins"] <= 1
    assert seen["tokens"] == len(TEXT) - 1
    self = run("compare", "a", "a", "--data=text.txt", "--batch-size=2", "--seq-len=16")
    assert json.loads(self.out) == {
        **seen, "loss_b": seen["loss_a"], "difference": 0.0, "wins": 0.5
    }  # fmt: skip
    shutil.copytree("b", "damaged")
    (weights,) = Path("damaged").glob("checkpoint-*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4] + np.float32(np.nan).tobytes())
    for pair in (("a", "damaged"), ("damaged", "a")):
        done = run("compare", *pair, "--data=text.txt")
        refuses(done, "damaged: the loss is nan: the model's weights are damaged")
        assert done.out == ""
    refuses(run("embed", "damaged", "--text=x"), "damaged: the embedding is not finite")
    assert train("--vocab-size=300", out="c").code == 0
    for pair, sizes in ((("a", "c"), "256 and 300"), (("c", "a"), "300 and 256")):
        refuses(run("compare", *pair, "--data=text.txt"), f"the models have {sizes} tokens: losses")
    vector = json.loads(run("embed", "b", "--text=the quick fox").out)
    assert len(vector) == 8
    assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-5)
    for file in ("c.png", "c.svg"):
        assert run("plot", "a", "b", f"--out={file}").code == 0
    assert Path("c.png").read_bytes().startswith(b"\x89PNG")
    svg = Path("c.svg").read_text()
    assert all(label in svg for label in ("a, held out", "gradient norm", "tokens/s"))
    refuses(run("plot", "a", "--out=c.bmp"), "c.bmp: its suffix is '.bmp'; allowed: .png, .svg")
    refuses(run("plot", "nowhere", "--out=c.png"), "nowhere/metrics.jsonl: cannot be read")
    (tmp_path / "a/metrics.jsonl").write_text("{")
    refuses(run("plot", "a", "--out=c.png"), "metrics.jsonl: damaged")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refuses(run("plot", "b", "--out=c.png"), r"need matplotlib: pip install 'wgsl-train\[plot\]'")


def test_event_files_hold_what_the_log_holds(run, train, monkeypatch):
    assert train("--tensorboard").code == 0
    (file,) = Path("run").glob("events.out.tfevents.*")
    data, events = file.read_bytes(), []
    while data:  # length, its checksum, an event, its checksum
        length = int.from_bytes(data[:8], "little")
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    written = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
    for line in log():
        if "loss" in line:
            assert written[line["step"], "train/loss"] == np.float32(line["loss"])
            assert written[line["step"], "train/lr"] == np.float32(line["lr"])
        else:
            assert written[line["step"], "eval/top1"] == np.float32(line["top1"])
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    refuses(train("--out=other", "--tensorboard"), r"pip install 'wgsl-train\[tensorboard\]'")


# Profile and tune


def test_profile(run, train):
    train(steps=1)
    shape = ("--batch-size=2", "--seq-len=16", "--steps=1")
    done = run("profile", "run", *shape, "--json=p.json", "--trace=t.json")
    assert done.code == 0, done.err
    assert "batch 2 x 16 tokens, timed by timestamp queries" in done.out
    assert re.search(r"^linear_forward +\d+ +[\d.]+ +[\d.]+%", done.out, re.M)
    assert json.loads(Path("p.json").read_text())["seqlen"] == 16
    assert json.loads(Path("t.json").read_text())["traceEvents"]
    assert run("profile", *SIZES, "--steps=1", "--activation-checkpointing").code == 0
    refuses(run("profile", "run", "--d-model=16"), "d_model is 16, but run/checkpoint-1 has 8")
    refuses(run("profile", "nowhere"), "nowhere: no such folder")
    for flag in ("--json", "--trace"):
        done = run("profile", "run", *shape, f"{flag}=none/p.json")
        refuses(done, "none/p.json: there is no folder none")
        assert not done.out


def test_tune(run, monkeypatch, tmp_path, device):
    monkeypatch.setenv("WGSL_TRAIN_CACHE", str(tmp_path / "cache"))
    given = ("tune", *SIZES, "--kernel=rms_norm_forward")
    done = run(*given, "--dry-run")
    assert done.code == 0, done.err
    assert re.search(r"^rms_norm_forward +[\d.]+ +[\d.]+ +[\d.]+%  .*; rows=32", done.out, re.M)
    assert "1 measured: " in done.out
    assert re.search(r"^measuring  rms_norm_forward, \d+ choices, 1 of 1$", done.err, re.M)
    assert not (tmp_path / "cache").exists()
    done = run(*given)
    assert "stored     " in done.err
    assert list(json.loads((tmp_path / "cache" / "tuning.json").read_text())) == [device.identity]
    refuses(run(*given[:-1], "--kernel=sum"), "no kernel of this step that 'sum' names has")


# Schedules of layers


def test_trains_and_resumes_a_schedule_of_layers(run, train):
    sizes = (
        "--layers",
        "mamba*2,attention:attn_heads=2:attn_head_dim=4",
        "--mlp=swiglu",
        "--d-ff=6",
    )
    args = ("--d-model=8", "--d-state=4", "--batch-size=2", "--seq-len=16", "--steps=3", *sizes)
    done = run("train", "--data", "text.txt", "--out", "run", *args, "--stop-after=1")
    assert done.code == 0, done.err
    assert "3 layers (2 mamba, 1 attention)" in done.err
    done = run("train", "--data", "text.txt", "--out", "run", "--resume")
    assert done.code == 0, done.err
    config = json.loads(Path("run/checkpoint-3/config.json").read_text())
    assert config["layers"] == ["mamba", "mamba", "attention:attn_heads=2:attn_head_dim=4"]
    again = run("generate", "run", "--prompt=the", "--max-new-tokens=3")
    assert again.code == 0, again.err
    refuses(
        run("train", "--data", "text.txt", "--out", "x", "--from-pretrained=run", "--layers=mamba"),
        r"layers is \['mamba'\], but .* has \('mamba', 'mamba', 'attention",
    )


def test_refuses_options_of_the_training_that_have_no_effect(train):
    refuses(
        train("--eval-every=2"), "eval_every has no effect: set eval_fraction to more than 0, or"
    )
    refuses(
        train("--lora-alpha=2"), "lora_alpha has no effect: set lora_rank to 1 or more, or leave"
    )
    Path("run.toml").write_text("[train]\nmin_lr = 1e-5\n")
    refuses(
        train("--config=run.toml"), "min_lr has no effect: set schedule to linear or cosine, or"
    )
    assert train("--config=run.toml", "--schedule=cosine", "--eval-every=0").code == 0
    done = train("--resume", "--schedule=constant", steps=4)  # min_lr is what it was saved with
    assert done.code == 0, done.err


def test_refuses_options_of_the_model_that_have_no_effect(run, train):
    refuses(train("--attn-heads=4"), "attn_heads has no effect: .* of type 'attention'")
    refuses(run("profile", "--d-model=8", "--d-ff=12"), "d_ff has no effect: .* mlp 'swiglu'")
    Path("run.toml").write_text('[model]\npreset = "memory_engine"\nattn_heads = 2\n')
    refuses(train("--config=run.toml"), "attn_heads has no effect: .* of type 'attention'")
    done = train("--preset=memory_engine", "--layers=mamba2", "--head-dim=4", "--dry-run")
    assert done.code == 0, done.err  # a preset's fields are for any layers


def test_presets(run):
    refuses(run("profile", "--preset=jumbo"), "preset is 'jumbo'; allowed: memory_engine, jamba")
    args = ("--d-model=8", "--d-state=2", "--batch-size=1", "--seq-len=4", "--steps=1", "--dry-run")
    done = run("train", "--data", "text.txt", *args, "--preset=jamba")
    assert done.code == 0, done.err
    assert "8 layers (7 mamba, 1 attention)" in done.err
    done = run("train", "--data", "text.txt", *args, "--preset=zamba", "--mlp=swiglu")
    assert "14 layers (12 mamba, 2 attention)" in done.err
    assert "layers.12.mlp.fc1" in done.out
    refuses(
        run("train", "--data", "text.txt", *args, "--preset=jamba", "--n-layer=4"),
        "n_layer is 4; allowed: multiples of 8",
    )
    refuses(
        run("train", "--data", "text.txt", *args, "--layers=mamba,atention"),
        "no layer is of type 'atention'; did you mean 'attention'[?] known: mamba, mamba2, attention",
    )


# Variable length


def test_packs_the_lines_of_a_file_and_goes_on_packed(run):
    lines = [json.dumps({"text": TEXT.decode()[:n]}) for n in (20, 3, 90, 41) * 4]
    Path("lines.jsonl").write_text("\n".join(lines))
    args = ("train", "--data", "lines.jsonl", "--out", "run", *SIZES, "--steps=4")
    done = run(*args, "--pack", "--stop-after=2", "--eval-fraction=0.2")
    assert done.code == 0, done.err
    assert "tokens, documents kept apart, " in done.err
    refuses(run(*args, "--resume", "--no-pack"), "pack is False, but the run began with True")
    refuses(run(*args, "--resume", "--separator=1"), "separator is 1, but the run began with None")
    Path("pack.toml").write_text('[data]\npaths = "lines.jsonl"\npack = true\n')
    done = run("train", "--config", "pack.toml", "--out", "run", "--resume")
    assert done.code == 0, done.err
    sizes = ("--batch-size=2", "--seq-len=16")
    apart, together = (
        json.loads(run("eval", "run", "--data", "text.txt", *sizes, *more).out)
        for more in (["--pack", "--separator=32"], [])
    )
    assert apart["eval_tokens"] == together["eval_tokens"] - TEXT.count(b" ") + 1
    assert apart["eval_loss"] != together["eval_loss"]
    refuses(run("eval", "run", "--data", "text.txt", "--separator=32"), "where pack is on only")
    refuses(run(*args, "--pack", "--separator=256", "--dry-run"), "separator is 256; allowed")


@pytest.mark.parametrize("repeated", [(), ("--pack", "--separator=32")])
def test_resumes_a_packed_run_as_it_was_packed(run, train, repeated, monkeypatch):
    packing = ("--pack", "--separator=32")
    assert train(*packing, out="straight").code == 0
    assert train(*packing, "--stop-after=2").code == 0
    refuses(
        train("--resume", "--separator=46"), "separator is 46, but the run began with 32: leave"
    )
    checks = Mock(wraps=checkpoint.check_whole)
    monkeypatch.setattr(checkpoint, "check_whole", checks)
    done = run("train", "--data=text.txt", "--out=run", "--resume", *repeated)
    assert done.code == 0, done.err
    assert checks.call_count == 1
    a, b = (
        checkpoint.load_tensors(f"{o}/checkpoint-3/model.safetensors") for o in ("straight", "run")
    )
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])
    assert [r["loss"] for r in log("straight")] == [r["loss"] for r in log()]


def test_resumes_a_packed_run_that_does_not_say_how(train):
    """Checkpoints of earlier versions record less: what is given is taken."""
    packing = ("--pack", "--separator=32")
    assert train(*packing, "--stop-after=2").code == 0
    file = Path("run/checkpoint-2/trainer_state.json")
    state = json.loads(file.read_text())
    del state["progress"]["separator"]
    file.write_text(json.dumps(state))
    refuses(train("--resume", "--no-pack"), "pack is False, but the run began with True")
    done = train("--resume", *packing)
    assert done.code == 0, done.err
    last = json.loads(Path("run/checkpoint-3/trainer_state.json").read_text())["progress"]
    assert (last["packed"], last["separator"]) == (1, 32)


def test_carries_states_and_resumes(run, train):
    done = train("--carry-state", "--stop-after=2", steps=4)
    assert done.code == 0, done.err
    assert Path("run/checkpoint-2/states.safetensors").exists()
    done = run("train", "--data", "text.txt", "--out", "run", "--resume")
    assert done.code == 0, done.err
    done = train("--carry-state", "--dry-run", out="other")
    assert done.code == 0, done.err
    assert done.out.count("carry_begin") == 2
    attention = ("--layers=attention,mamba", "--n-layer=2", "--attn-heads=2", "--attn-head-dim=4")
    refuses(
        train("--carry-state", *attention, out="third"),
        "carry_state: layer 0 is of type 'attention', whose keys and values are kept for generation",
    )


def test_an_entry_s_own_width_of_heads_is_resumed(run):
    def train(layers, steps, *more):
        sizes = ("--d-model=8", "--batch-size=2", "--seq-len=16", f"--steps={steps}")
        return run("train", "--data=text.txt", *sizes, f"--layers={layers}", *more)

    done = train("attention:attn_head_dim=4", 1)
    assert done.code == 0, done.err
    saved = json.loads(Path("run/checkpoint-1/config.json").read_text())
    assert saved["layers"] == ["attention:attn_head_dim=4:attn_heads=2"]
    done = train("attention:attn_head_dim=4", 2, "--resume")
    assert done.code == 0, done.err
    refuses(train("attention:attn_head_dim=2", 2, "--resume"), "layers is ")


# Every option of a configuration


def spelled(f):
    """Arguments for a field's option, and the value that they mean."""
    kind = str(f.type).removesuffix(" | None")
    flag = "--" + f.name.replace("_", "-")
    if kind == "bool":
        return [flag if not f.default else f"--no-{flag[2:]}"], not f.default
    if kind == "tuple[str, ...]":
        value = ("conv1d",) if f.name == "lora_targets" else ("mamba",)
        return [flag, *value], value
    if kind == "tuple[int, int]":
        return [flag, "1", "3"], (1, 3)
    if kind == "tuple[float, float]":
        return [flag, str(f.metadata["low"]), "0.5"], (f.metadata["low"], 0.5)
    if kind in ("int", "float"):
        value = f.metadata["low"]
        return [flag, str(value)], value
    value = f.metadata["among"][-1]
    return [flag, value], value


TRAIN = typer.main.get_command(cli.app).commands["train"]
NEEDS = {"lora_targets": {"lora_rank": 1}, "time_step_max": {"time_step_min": 1e-12}}


@pytest.mark.parametrize(
    ("cls", "name"), [(cls, f.name) for cls in (MambaConfig, TrainConfig) for f in fields(cls)]
)
def test_every_option_of_a_configuration_takes_a_value(cls, name):
    args, value = spelled(next(f for f in fields(cls) if f.name == name))
    parsed = TRAIN.make_context("train", args).params
    given = {k: None if v == () else v for k, v in parsed.items()}  # as typer hands them on
    flags = cli._flags(cls, given)
    assert list(flags) == [name]
    needs = NEEDS.get(name, {})
    if cls is MambaConfig:
        sizes = {"vocab_size": 8, "d_model": 64, "n_layer": 1}
        config = MambaConfig.from_dict({**sizes, **needs, **flags})
    else:
        config = cli._train_config(needs, flags)
    assert getattr(config, name) == value


@pytest.mark.parametrize(("high", "limit"), [("0.1", [0.0, 0.1]), ("inf", None)])
def test_limits_of_delta_on_the_command_line(run, high, limit):
    args = ("--layers=mamba2", "--head-dim=4", "--time-step-limit", "0.0", high)
    done = run("train", "--data=text.txt", "--steps=1", *SIZES, *args)
    assert done.code == 0, done.err
    config = json.loads(Path("run/checkpoint-1/config.json").read_text())
    assert config.get("time_step_limit") == limit  # the default is left out
