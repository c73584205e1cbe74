"""Every declared kernel, against the oracle of its name, at every tuning choice."""

import numpy as np
import pytest

from tests import harness
from tests.oracle import ORACLES
from wgsl_train.kernel import KERNELS

VARIANTS = [v for name in sorted(ORACLES) if name in KERNELS for v in harness.variants(name)]
ADDS = [v for v in VARIANTS if v.kernel.adds]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_kernel_matches_oracle(kernel_buffers, rng, variant):
    harness.check(variant, kernel_buffers, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ADDS, ids=str)
def test_first_contribution_overwrites(kernel_buffers, rng, variant):
    harness.check(variant, kernel_buffers, rng, accumulate=False)


@pytest.mark.gpu
def test_the_harness_catches_wrong_results(kernel_buffers, rng):
    """Each kind of fault, planted in the result of a kernel that is right."""
    variant = harness.variants("linear_backward_x")[0]
    arrays = harness.draw(variant, rng)
    expected = harness.expect(variant, arrays)
    got, faults = harness.run(variant, kernel_buffers, arrays)
    assert not faults
    assert not harness.compare(variant, arrays, expected, got).faults
    for wrong in (np.nan, 0.0, 1e4):
        bad = {k: a.copy() for k, a in got.items()}
        bad["dx"].flat[-1] = wrong
        found = harness.compare(variant, arrays, expected, bad)
        assert found.faults
        assert found.error > 1e-3
    assigned = {"dx": got["dx"] - arrays["dx"]}  # `=` where `+=` was due
    assert harness.compare(variant, arrays, expected, assigned).faults
