"""The wheel: what it holds, and that it trains from an environment of its own."""

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow

TWO_STEPS = """
import json, sys
import wgsl_train as wt

model = wt.Model(wt.MambaConfig(vocab_size=16, d_model=8, n_layer=1, d_state=4), wt.request_device(quiet=True))
trainer = wt.Trainer(model, wt.TrainConfig(steps=2, lr=1e-2))
tokens = [[1, 2, 3, 4, 5, 6, 7, 8]]
losses = [trainer.step(tokens, tokens).loss for _ in range(2)]
heavy = [name for name in ("torch", "transformers", "tokenizers", "matplotlib") if name in sys.modules]
print(json.dumps({"losses": losses, "file": wt.__file__, "heavy": heavy}))
"""


def call(*command, cwd):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    call(sys.executable, "-m", "pip", "wheel", *options, ROOT, cwd=folder)
    [path] = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_the_shaders_and_no_tests(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    for path in ROOT.joinpath("wgsl_train").rglob("*.py"):
        assert path.relative_to(ROOT).as_posix() in names
    for path in ROOT.joinpath("shaders").rglob("*.wgsl"):
        assert f"wgsl_train/{path.relative_to(ROOT).as_posix()}" in names
    assert "wgsl_train/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "test" in name or "oracle" in name or "pycache" in name]


@pytest.mark.gpu
def test_two_steps_from_an_environment_of_its_own(wheel, tmp_path):
    """The package comes from the wheel alone; only its dependencies are lent."""
    home = tmp_path / "env"
    venv.create(home, with_pip=False, symlinks=sys.platform != "win32")
    places = {"base": str(home), "platbase": str(home)}
    python = Path(sysconfig.get_path("scripts", "venv", places)) / Path(sys.executable).name
    site = Path(sysconfig.get_path("purelib", "venv", places))
    install = ("-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    call(sys.executable, *install, wheel, cwd=tmp_path)
    # a folder that a .pth file adds comes last, and its own .pth files do not count
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    found = json.loads(call(python, "-c", TWO_STEPS, cwd=empty))
    assert Path(found["file"]).is_relative_to(site)
    assert found["losses"][1] < found["losses"][0]
    assert found["heavy"] == []
    assert list(empty.iterdir()) == []
    script = python.with_name("wgsl-train.exe" if sys.platform == "win32" else "wgsl-train")
    assert call(script, "--version", cwd=empty).strip() == "0.1.0"
    (empty / "text.txt").write_text("to be or not to be, that is the question. " * 9)
    options = ("--d-model=8", "--n-layer=1", "--d-state=4", "--batch-size=1", "--seq-len=8")
    call(script, "train", "--data=text.txt", "--steps=2", *options, cwd=empty)
    assert (empty / "run" / "checkpoint-2" / "model.safetensors").exists()
