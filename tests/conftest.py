import os

import numpy as np
import pytest

from wgsl_train.device import request_device
from wgsl_train.encoder import Buffers

MAX_PIPELINES = 300

os.environ["WGSL_TRAIN_NO_TUNING"] = "1"  # what this machine's user has tuned is no part of tests


@pytest.fixture(scope="session")
def device():
    """One device a process: software drivers leak devices. No adapter is an error, not a skip."""
    return request_device(quiet=True)


@pytest.fixture(scope="session")
def kernel_buffers(device):
    """Shared by all kernel tests, so that equal sources compile once."""
    return Buffers(device)


@pytest.fixture(autouse=True)
def few_pipelines(request):
    """Compiled shaders stay in memory, a megabyte each on a CPU, and the tests have thousands."""
    yield
    if "device" in request.fixturenames:
        pipelines = request.getfixturevalue("device").pipelines
        if len(pipelines) > MAX_PIPELINES:
            pipelines.clear()


@pytest.fixture
def rng():
    return np.random.default_rng(0)
