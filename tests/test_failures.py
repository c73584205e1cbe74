"""What a process meets that runs for long, or loses its device."""

import subprocess
import sys

import numpy as np
import pytest

import wgsl_train as wt

pytestmark = pytest.mark.gpu

CONFIG = wt.MambaConfig(vocab_size=23, d_model=8, n_layer=1, d_state=4)

DESTROYED = """
import numpy as np, wgsl_train as wt
device = wt.request_device(quiet=True)
config = wt.MambaConfig(vocab_size=23, d_model=8, n_layer=1, d_state=4)
trainer = wt.Trainer(wt.Model(config, device), wt.TrainConfig(steps=10))
batch = np.ones((2, 9), int), np.ones((2, 9), int)
print(trainer.step(*batch).loss > 0)
device.wgpu.destroy()
try:
    print(trainer.step(*batch).loss)
except wt.DeviceError as error:
    print("DeviceError:", error)
"""


def test_a_device_that_is_lost_in_mid_run_is_an_error_with_a_remedy():
    found = subprocess.run(
        [sys.executable, "-c", DESTROYED], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    before, after = found.stdout.splitlines()[:2]
    assert before == "True"
    assert after.startswith("DeviceError: ")
    assert "restart from the last checkpoint" in found.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thousand_calls_take_no_memory(device):  # D15
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    model = wt.Model(CONFIG, device)
    trainer = wt.Trainer(model, wt.TrainConfig(steps=2000))
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, CONFIG.vocab_size, (2, 2, 9))

    def call():
        trainer.step(tokens, targets)
        model.loss(tokens, targets)

    for _ in range(100):
        call()
    before, buffers = resident(), model.buffers.nbytes
    for _ in range(500):
        call()
    assert model.buffers.nbytes == buffers
    assert resident() - before < 16 << 20
