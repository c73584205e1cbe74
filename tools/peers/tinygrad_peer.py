"""Mamba in tinygrad on its WEBGPU backend, as a user of its tensors writes it: the scan in
log2(seqlen) rounds, each a pass over whole tensors. Needs Dawn's library: dawn-python, or
WEBGPU_PATH."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["DEV"] = "WEBGPU"
os.environ["TRAINING"] = "1"
if dawn := find_spec("pydawn"):
    suffix = "dylib" if platform.system() == "Darwin" else "so"
    library = f"lib/libwebgpu_dawn_{platform.machine()}.{suffix}"
    os.environ.setdefault("WEBGPU_PATH", str(Path(str(dawn.origin)).parent / library))

from measure import Case, Peer, Work
from tinygrad import Device, Tensor, TinyJit, nn

Params = dict[str, Tensor]


def cut(x: Tensor) -> Tensor:
    """Ends a fused kernel here, in both directions."""
    return x.contiguous().contiguous_backward()


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x weightᵀ over the last axis of x."""
    flat = cut(x.reshape(-1, x.shape[-1]) @ weight.T)
    return flat.reshape(*x.shape[:-1], weight.shape[0])


def recurrence(decay: Tensor, h: Tensor) -> Tensor:
    """h[t] = decay[t] h[t-1] + h[t] along axis 1, in rounds that each look twice as far back."""
    seqlen, back = h.shape[1], 1
    while back < seqlen:
        earlier = ((0, 0), (back, 0), (0, 0), (0, 0))
        h = cut(h + decay * h.pad(earlier)[:, :seqlen])
        if back * 2 < seqlen:
            decay = cut(decay * decay.pad(earlier)[:, :seqlen])
        back *= 2
    return h


def scan(
    u: Tensor, delta: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor
) -> Tensor:
    """(y + D u) silu(z), where y[t] = C[t] h[t] and h[t] = exp(delta A) h[t-1] + delta B u."""
    decay = cut((delta.unsqueeze(-1) * cut(-A_log.exp())).exp())
    states = recurrence(decay, cut((delta * u).unsqueeze(-1) * B.unsqueeze(2)))
    y = cut((states * C.unsqueeze(2)).sum(-1))
    return cut((y + D * u) * z.silu())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight"""
    return cut(x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight)


def block(case: Case, p: Params, h: Tensor, name: str) -> Tensor:
    """h + mixer(norm(h)) of the layer of this name."""
    mixer, seqlen = f"{name}.mixer", h.shape[1]
    n = rms_norm(h, p[f"{name}.norm.weight"], case.norm_eps)
    x, z = matmul(n, p[f"{mixer}.in_proj.weight"]).chunk(2, -1)
    taps = p[f"{mixer}.conv1d.weight"]
    padded = x.pad(((0, 0), (taps.shape[-1] - 1, 0), (0, 0)))
    shifted = [padded[:, k : k + seqlen] * cut(taps[:, 0, k]) for k in range(taps.shape[-1])]
    u = cut((sum(shifted[1:], shifted[0]) + p[f"{mixer}.conv1d.bias"]).silu())
    x_dbl = matmul(u, p[f"{mixer}.x_proj.weight"])
    dt, B, C = map(cut, x_dbl.split([case.dt_rank, case.d_state, case.d_state], -1))
    delta = matmul(dt, p[f"{mixer}.dt_proj.weight"]) + p[f"{mixer}.dt_proj.bias"]
    g = scan(u, cut(delta.softplus()), p[f"{mixer}.A_log"], B, C, p[f"{mixer}.D"], z)
    return cut(h + matmul(g, p[f"{mixer}.out_proj.weight"]))


class Tinygrad(Peer):
    """tinygrad, on the WebGPU adapter that Dawn takes."""

    def about(self) -> dict[str, Any]:
        Tensor.ones(1).contiguous().realize()  # fails where Dawn or an adapter is missing
        return {"versions": {"tinygrad": version("tinygrad")}, "device": "WEBGPU"}

    def step(self, case: Case) -> dict[str, Work]:
        p = {name: Tensor(array).contiguous().realize() for name, array in case.weights.items()}
        tokens = Tensor(case.tokens.astype("int32")).realize()
        wanted = Tensor(case.tokens[:, 1:].reshape(-1).astype("int32")).realize()
        embeddings = p["backbone.embeddings.weight"]
        optimizer = nn.optim.AdamW(
            list(p.values()),
            lr=case.lr,
            b1=case.beta1,
            b2=case.beta2,
            eps=case.eps,
            weight_decay=case.weight_decay,
        )

        @TinyJit
        def train() -> Tensor:
            optimizer.zero_grad()
            h = embeddings[tokens]
            for i in range(case.n_layer):
                h = block(case, p, h, f"backbone.layers.{i}")
            logits = matmul(rms_norm(h, p["backbone.norm_f.weight"], case.norm_eps), embeddings)
            ahead = logits[:, :-1].reshape(-1, logits.shape[-1])
            loss = ahead.sparse_categorical_crossentropy(wanted)
            loss.backward()
            grads = [param.grad.contiguous() for param in optimizer.params]
            norm = sum(g.square().sum() for g in grads).sqrt()
            scale = cut((case.max_grad_norm / (norm + 1e-6)).clamp(max_=1.0))
            for param, grad in zip(optimizer.params, grads, strict=True):
                param.grad = grad * scale
            return loss.realize(*optimizer.schedule_step())

        return {"step": Work(train, lambda loss: {"loss": loss.item()}, _synchronize)}

    def matmul(self, case: Case) -> dict[str, Work]:
        t = {name: Tensor(array).realize() for name, array in case.matmul_inputs().items()}

        def work(name: str, product: Callable[[Tensor, Tensor], Tensor], a: str, b: str) -> Work:
            jitted = TinyJit(lambda a, b: product(a, b).realize())
            return Work(lambda: jitted(t[a], t[b]), lambda out: {name: out.numpy()}, _synchronize)

        return {
            "x_wt": work("out", lambda x, weight: x @ weight.T, "x", "weight"),
            "dy_w": work("dx", lambda dy, weight: dy @ weight, "dy", "weight"),
            "dyt_x": work("dweight", lambda dy, x: dy.T @ x, "dy", "x"),
        }


def _synchronize(_: Any) -> None:
    Device[Device.DEFAULT].synchronize()


if __name__ == "__main__":
    Tinygrad().main()
