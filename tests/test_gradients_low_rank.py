from tests import finite_differences
from tests.oracle.low_rank import low_rank_backward, low_rank_forward


def test_low_rank(rng):
    arrays = {"A": rng.normal(size=(2, 4)), "B": rng.normal(size=(5, 2))}
    weight, dout = rng.normal(size=(5, 4)), rng.normal(size=(5, 4))

    def loss(A, B):
        return (dout * low_rank_forward(weight, A, B, scale=1.5)["out"]).sum()

    grads = low_rank_backward(dout, **arrays, scale=1.5)
    finite_differences.check(loss, arrays, {"A": grads["dA"], "B": grads["dB"]})
