import numpy as np

from . import case, oracle


def with_gaps(rng, shape, values):
    """Some are not finite: every fifth, infinite of either sign, or none at all."""
    array = rng.uniform(-1, 1, shape)
    array[::5] = np.resize([np.nan, np.inf, -np.inf], array[::5].shape)
    return array


@oracle(case(n=1001), case(n=1), draw={"state": with_gaps})
def carry_begin(state):
    return {"initial": np.where(np.isfinite(state), state, 0)}
