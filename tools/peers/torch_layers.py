"""Layers of Mamba-2 and of attention with a gated MLP in plain PyTorch, for torch_peer.py."""

from __future__ import annotations

import torch
from measure import Case
from torch.nn import functional

Tensor = torch.Tensor
CHUNK = 128  # steps of a chunk of the state-space dual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight"""
    return functional.rms_norm(x, weight.shape, weight, eps)


def conv_silu(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
    """silu of the causal convolution of each column over time: x (batch, seqlen, columns)."""
    pad = taps.shape[-1] - 1
    u = functional.conv1d(x.transpose(1, 2), taps, bias, padding=pad, groups=len(taps))
    return functional.silu(u[..., : x.shape[1]]).transpose(1, 2)


def dual(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """y[t] = C[t] h[t], where h[t] = exp(delta A) h[t-1] + delta B x, by products within chunks.

    x (batch, seqlen, n_heads, head_dim), delta (batch, seqlen, n_heads), A (n_heads,), B and C
    (batch, seqlen, d_state). Source: Dao & Gu (2024), section 6.
    """
    batch, seqlen, n_heads, head_dim = x.shape
    chunk = min(CHUNK, seqlen)
    if seqlen % chunk:
        raise ValueError(f"seqlen is {seqlen}, must be a multiple of {chunk}")
    shape = (batch, seqlen // chunk, chunk)
    inputs = (delta[..., None] * x).view(*shape, n_heads, head_dim).transpose(2, 3)
    B, C = B.view(*shape, -1), C.view(*shape, -1)
    # batch, chunks, heads, chunk
    cum = (delta * A).view(*shape, n_heads).transpose(2, 3).cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    left = (cum[..., :, None] - cum[..., None, :]).masked_fill(later, -torch.inf).exp()
    y = ((C @ B.transpose(2, 3))[:, :, None] * left) @ inputs
    left_at_end = (cum[..., -1:] - cum).exp()
    made = torch.einsum("bcsn,bchs,bchsp->bchnp", B, left_at_end, inputs)
    left_of_chunk = cum[..., -1, None, None].exp()
    state, starts = torch.zeros_like(made[:, 0]), []
    for c in range(shape[1]):
        starts.append(state)
        state = left_of_chunk[:, c] * state + made[:, c]
    y = y + cum.exp()[..., None] * (C[:, :, None] @ torch.stack(starts, 1))
    return y.transpose(2, 3).reshape(x.shape)


def mamba2(case: Case, p: dict[str, Tensor], h: Tensor, name: str) -> Tensor:
    """h + mixer(norm(h)) of the layer of this name, whose heads have one B and C."""
    mixer = f"{name}.mixer"
    n = rms_norm(h, p[f"{name}.norm.weight"], case.norm_eps)
    projected = functional.linear(n, p[f"{mixer}.in_proj.weight"])
    d_xBC = case.d_inner + 2 * case.d_state
    z, xBC, dt = projected.split([case.d_inner, d_xBC, case.n_heads], -1)
    xBC = conv_silu(xBC, p[f"{mixer}.conv1d.weight"], p[f"{mixer}.conv1d.bias"])
    x, B, C = xBC.split([case.d_inner, case.d_state, case.d_state], -1)
    x = x.unflatten(-1, (case.n_heads, case.head_dim))
    delta = functional.softplus(dt + p[f"{mixer}.dt_bias"])
    y = dual(x, delta, -torch.exp(p[f"{mixer}.A_log"]), B, C) + p[f"{mixer}.D"][:, None] * x
    gated = y.flatten(2) * functional.silu(z)
    g = rms_norm(gated, p[f"{mixer}.norm.weight"], case.norm_eps)
    return h + functional.linear(g, p[f"{mixer}.out_proj.weight"])


def attention(case: Case, p: dict[str, Tensor], h: Tensor, name: str) -> Tensor:
    """h + mixer(norm(h)), then the same with the gated MLP and its norm."""
    n = rms_norm(h, p[f"{name}.norm.weight"], case.norm_eps)
    qkv = functional.linear(n, p[f"{name}.mixer.in_proj.weight"])
    qkv = qkv.unflatten(-1, (3, case.attn_heads, case.attn_head_dim))
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    attended = attended.transpose(1, 2).flatten(2)
    h = h + functional.linear(attended, p[f"{name}.mixer.out_proj.weight"])
    n = rms_norm(h, p[f"{name}.norm2.weight"], case.norm_eps)
    up, gate = functional.linear(n, p[f"{name}.mlp.fc1.weight"]).chunk(2, -1)
    return h + functional.linear(up * functional.silu(gate), p[f"{name}.mlp.fc2.weight"])
