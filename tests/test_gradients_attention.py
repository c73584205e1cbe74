import numpy as np
import pytest

from tests import finite_differences
from tests.oracle import attention as oracle


@pytest.mark.parametrize(
    "batch, seqlen, n_heads, n_kv_heads, head_dim, packed",
    [(2, 5, 2, 2, 3, False), (1, 6, 4, 2, 2, True), (1, 4, 3, 1, 1, False), (1, 1, 1, 1, 4, False)],
)
def test_attention(rng, batch, seqlen, n_heads, n_kv_heads, head_dim, packed):
    qkv = rng.uniform(-1, 1, (batch, seqlen, (n_heads + 2 * n_kv_heads) * head_dim))
    dout = rng.uniform(-1, 1, (batch, seqlen, n_heads * head_dim))
    documents = np.sort(rng.integers(0, 3, (batch, seqlen)), -1) if packed else None
    heads = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "scale": 0.8}

    def forward(qkv):
        return oracle.attention_forward(qkv, documents, None, None, **heads)

    def loss(qkv):
        return (dout * forward(qkv)["out"]).sum()

    out, lse = forward(qkv)["out"], forward(qkv)["lse"]
    delta = oracle.attention_backward_delta(dout, out, n_heads)["delta"]
    given = (qkv, dout, lse, delta, documents)
    dq = oracle.attention_backward_q(*given, **heads)["dqkv"]
    dkv = oracle.attention_backward_kv(*given, **heads)["dqkv"]
    assert (np.isnan(dq) != np.isnan(dkv)).all(), "each writes what the other does not"
    finite_differences.check(loss, {"qkv": qkv}, {"qkv": np.where(np.isnan(dq), dkv, dq)})


def test_rotary(rng):
    """Its backward is the rotation backwards."""
    qkv, dout = rng.uniform(-1, 1, (2, 1, 5, 3 * 8))
    documents = np.array([[0, 0, 3, 3, 3]])
    options = {"heads": 2, "head_dim": 8, "rotary_dim": 6, "theta": 50.0}

    def rotate(x, reverse):
        return oracle.rotary(x, documents, None, **options, reverse=reverse)["qkv"]

    def loss(qkv):
        return (dout * rotate(qkv, False)).sum()

    finite_differences.check(loss, {"qkv": qkv}, {"qkv": rotate(dout, True)})
