"""Central differences in float64: the proof that a backward oracle is its forward's derivative."""

import numpy as np
import pytest

EPS = 1e-6


def gradient(loss, array):
    """d loss() / d array, element by element; loss reads the array that is changed in place."""
    grad = np.empty_like(array)
    for i in np.ndindex(array.shape):
        middle = array[i]
        array[i] = middle + EPS
        above = loss()
        array[i] = middle - EPS
        below = loss()
        array[i] = middle
        grad[i] = (above - below) / (2 * EPS)
    return grad


def check(loss, arrays, grads, rtol=1e-5):
    """Assert that grads[name] is the derivative of loss(**arrays) by arrays[name], for all names.

    And that a derivative that is wrong in one element would not pass.
    """
    for name, claimed in grads.items():
        numeric = gradient(lambda: loss(**arrays), arrays[name])
        claimed = claimed.reshape(numeric.shape)
        scale = np.abs(numeric).max()
        assert scale > 0, name
        np.testing.assert_allclose(claimed, numeric, rtol=rtol, atol=rtol * scale, err_msg=name)
        wrong = claimed.copy()
        wrong.flat[np.abs(numeric).argmax()] *= 1.001
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(wrong, numeric, rtol=rtol, atol=rtol * scale)
