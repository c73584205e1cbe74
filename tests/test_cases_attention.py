"""Attention as a whole, forward and backward, with a cache, and where others have failed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.oracle import attention as oracle
from wgsl_train.encoder import Encoder
from wgsl_train.errors import ShapeError
from wgsl_train.kernel import PORTABLE
from wgsl_train.ops.attention import Cache, advance, attention
from wgsl_train.plan import Layout, Plan

DATA = Path(__file__).parent / "data"
KINDS = ["portable", "cpu"]


def plan_attention(target, shape, training=True, packed=False, **options):
    """A plan of one attention, forward and backward, of qkv with this shape."""
    plan = Plan(Layout([], target), target, training)
    documents = plan.persistent("documents", shape[:2], "u32") if packed else None
    out = attention(plan, plan.persistent("qkv", shape), documents=documents, **options)
    plan.grad(out).kind = "persistent"  # the host writes it
    plan.backward()
    return plan, out


@pytest.fixture
def run(kernel_buffers):
    """Runs the op on qkv. Returns out, and after a backward pass from dout the gradient of qkv."""

    def run(qkv, dout=None, documents=None, kind=None, **options):
        target = kernel_buffers.device.target
        target = replace(target, kind=kind or target.kind)
        packed, training = documents is not None, dout is not None
        plan, out = plan_attention(target, qkv.shape, training, packed, **options)
        encoder = Encoder(kernel_buffers, plan, share_memory=False)
        encoder.poison()
        encoder.write(plan["qkv"], qkv)
        if packed:
            encoder.write(plan["documents"], documents)
        encoder.run("forward")
        result = encoder.read(out)
        if training:
            encoder.write(plan.grad(out), dout)
            encoder.run("backward")
            result = result, encoder.read(plan.grad(plan["qkv"]))
        for tensor in (plan["qkv"], plan.grad(out), *([plan["documents"]] if packed else [])):
            kernel_buffers.drop(tensor)
        return result

    return run


def close(actual, expected, rtol=1e-5):
    np.testing.assert_allclose(actual, expected, rtol, rtol * np.abs(expected).max())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_pytorch(run, kind):
    """Made with torch 2.13 and transformers 5.24 from qkv and dout, float32, 4 heads, 2 of keys:

    q, k, v = qkv.view(2, 9, 8, 8).split([4, 2, 2], 2), transposed to (2, heads, 9, 8);
    plain: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True);
    packed: after transformers' apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(x, place))
    with rope_theta 100 and places from each document's start, the same with attn_mask= the causal
    mask inside documents; dqkv by out.backward(dout).
    """
    saved = np.load(DATA / "attention_torch.npz")
    heads = {"n_heads": 4, "n_kv_heads": 2, "kind": kind}
    out, dqkv = run(saved["qkv"], saved["dout"], **heads)
    close(out, saved["out_plain"])
    close(dqkv, saved["dqkv_plain"])
    rotary = {"rotary_dim": 8, "rope_theta": 100.0}
    out, dqkv = run(saved["qkv"], saved["dout"], saved["documents"], **heads, **rotary)
    close(out, saved["out_packed"])
    close(dqkv, saved["dqkv_packed"])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_large_products(run, rng, kind):
    """Products of 1e4 and more: exponentials neither overflow nor leave a row without weight."""
    qkv = rng.uniform(-1, 1, (1, 70, 3 * 8)) * np.repeat([300, 300, 1], 8)
    dout = rng.uniform(-1, 1, (1, 70, 8))
    qkv[0, 40:, 8:16] = -qkv[0, 40:, :8]  # late keys that are far below all others
    qkv = qkv.astype(np.float32)
    out, dqkv = run(qkv, dout, n_heads=1, scale=1.0, kind=kind)
    heads = oracle.split_heads(qkv.astype(np.float64), 1, 1)
    products = np.abs(heads[0] @ heads[1].swapaxes(-1, -2))
    assert np.median(products) > 1e4
    expected, _ = oracle.attend(*heads, np.zeros((1, 70), int), [0], 1.0)
    # a product of 1e5 has errors of 1e-2 in float32
    np.testing.assert_allclose(out, oracle.join_heads(expected), atol=0.05)
    assert np.isfinite(dqkv).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_t16_packed_documents_are_as_alone(run, rng, kind):
    """Two in a row are as two rows; and whatever stands in the one, the other has the same bits."""
    options = {"n_heads": 2, "n_kv_heads": 1, "rotary_dim": 4, "kind": kind}
    qkv, dout = rng.uniform(-1, 1, (1, 58, 4 * 4)), rng.uniform(-1, 1, (1, 58, 2 * 4))
    documents = np.repeat([[3, 5]], 29, 1)
    out, dqkv = run(qkv, dout, documents, **options)
    alone, dalone = run(qkv.reshape(2, 29, -1), dout.reshape(2, 29, -1), **options)
    close(out, alone.reshape(out.shape))
    close(dqkv, dalone.reshape(dqkv.shape))
    for changed, kept in ((slice(29), slice(29, None)), (slice(29, None), slice(29))):
        other = qkv.copy()
        other[:, changed] = rng.uniform(-9, 9, (1, 29, 16))
        got, dgot = run(other, dout, documents, **options)
        np.testing.assert_array_equal(got[:, kept], out[:, kept])
        np.testing.assert_array_equal(dgot[:, kept], dqkv[:, kept])


@pytest.mark.gpu
def test_t15_padding(run, rng):
    """Five positions alone, padded on the left, and padded on the right."""
    options = {"n_heads": 1, "rotary_dim": 4}
    qkv, dout = rng.uniform(-1, 1, (1, 5, 12)), rng.uniform(-1, 1, (1, 5, 4))
    out, dqkv = run(qkv, dout, **options)
    for before, after in ((3, 0), (0, 3)):
        pad = ((0, 0), (before, after), (0, 0))
        documents = np.pad(np.ones((1, 5)), pad[:2], constant_values=((0, 0), (0, 2)))
        padded = np.pad(qkv, pad, constant_values=9.0)
        got, dgot = run(padded, np.pad(dout, pad), documents, **options)
        close(got[:, before : before + 5], out)
        close(dgot[:, before : before + 5], dqkv)
        assert not np.delete(dgot, np.s_[before : before + 5], 1).any()


@pytest.mark.gpu
def test_a_run_repeats_to_the_bit(run, rng):
    qkv, dout = rng.uniform(-1, 1, (2, 40, 6 * 8)), rng.uniform(-1, 1, (2, 40, 4 * 8))
    first = run(qkv, dout, n_heads=4, n_kv_heads=1)
    second = run(qkv, dout, n_heads=4, n_kv_heads=1)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def plan_cache(plan, batch, capacity, columns):
    kv = plan.persistent("test.kv", (batch, capacity, columns))
    return Cache(kv, plan.persistent("test.position", (batch, 2), "u32"))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_a_cache_gives_what_the_whole_sequence_does(kernel_buffers, run, rng, packed):
    """A prompt, then single positions, then several at once; whatever an earlier use has left in
    the cache. With padding on the left: the pads are a document of their own."""
    options = {"n_heads": 4, "n_kv_heads": 2, "rotary_dim": 4}
    batch, capacity, steps = 2, 24, [17, 1, 1, 3]
    seqlen = sum(steps)
    qkv = rng.uniform(-1, 1, (batch, seqlen, 8 * 4))
    documents = (np.arange(seqlen) >= np.array([[0], [5]])).astype(int) if packed else None
    expected = run(qkv, documents=documents, **options)
    target = kernel_buffers.device.target
    got, first = [], 0
    for n in steps:
        plan = Plan(Layout([], target), target, training=False)
        cache = plan_cache(plan, batch, capacity, columns=4 * 4)
        ids = plan.persistent("test.ids", (batch, n), "u32") if packed and first == 0 else None
        x = plan.persistent("qkv", (batch, n, 8 * 4))
        out = attention(plan, x, cache=cache, documents=ids, **options)
        advance(plan, cache, n, ids)
        encoder = Encoder(kernel_buffers, plan, share_memory=False)
        if first == 0:
            encoder.write(cache.kv, np.full(cache.kv.shape, np.nan))
        encoder.write(x, qkv[:, first : first + n])
        if ids:
            encoder.write(ids, documents[:, :n])
        encoder.run("forward")
        got.append(encoder.read(out))
        first += n
        kernel_buffers.drop(x)
    for tensor in (cache.kv, cache.position):
        kernel_buffers.drop(tensor)
    close(np.concatenate(got, 1), expected)


def test_no_attention_matrix_is_kept():
    """What the forward pass leaves for the backward pass grows by the sequence, not its square."""

    def kept(seqlen):
        plan, _ = plan_attention(PORTABLE, (1, seqlen, 3 * 64), n_heads=1)
        written = {t for d in plan.sections["forward"] for _, t in d.bound("writes")}
        assert plan.memory().total < 4 * 64 * seqlen * 8
        return sum(t.size for t in written)

    assert kept(4096) == 4096 * (64 + 1)
    assert kept(8192) == 2 * kept(4096)


@pytest.mark.parametrize("kind", [*KINDS, "integrated"])
@pytest.mark.parametrize("head_dim", [1, 7, 64, 80, 128, 256, 512])
def test_every_head_dim_has_tiles(kind, head_dim):
    plan, _ = plan_attention(replace(PORTABLE, kind=kind), (1, 8, 3 * head_dim), n_heads=1)
    for d in plan.dispatches:
        assert d.values["workgroup"] <= 256


def test_what_cannot_be_planned_says_why():
    shape = (1, 8, 48)
    with pytest.raises(ShapeError, match="n_kv_heads is 3, must divide n_heads, which is 4"):
        plan_attention(PORTABLE, shape, n_heads=4, n_kv_heads=3)
    with pytest.raises(ShapeError, match=r"qkv \(1, 8, 48\) does not divide into 15 heads, 5 of"):
        plan_attention(PORTABLE, shape, n_heads=5)
    with pytest.raises(ShapeError, match="rotary_dim is 6, must be even and at most head_dim, 4"):
        plan_attention(PORTABLE, shape, n_heads=4, rotary_dim=6)
    with pytest.raises(ShapeError, match=r"rope_theta is 0.5, must be at least 1"):
        plan_attention(PORTABLE, shape, n_heads=4, rotary_dim=4, rope_theta=0.5)
    with pytest.raises(ShapeError, match="head_dim is 2000, for which 16,384 bytes of workgroup"):
        plan_attention(PORTABLE, (1, 8, 6000), n_heads=1)
    plan = Plan(Layout([], PORTABLE), PORTABLE, training=False)
    qkv, position = plan.persistent("qkv", shape), plan.persistent("position", (1, 2), "u32")
    for size, message in (
        ((1, 9, 16), "must hold 32 elements"),
        ((1, 7, 32), "8 positions at once"),
    ):
        cache = Cache(plan.persistent(f"kv{size[1]}", size), position)
        with pytest.raises(ShapeError, match=message):
            attention(plan, qkv, n_heads=1, cache=cache)
    cache = Cache(plan.persistent("kv", (1, 9, 32)), position)
    with pytest.raises(ShapeError, match="inference only"):
        plan_attention(PORTABLE, shape, n_heads=1, cache=cache)
