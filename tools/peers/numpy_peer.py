"""Mamba in NumPy: forward and backward written by hand, the scan a loop over time."""

from __future__ import annotations

from typing import Any

import numpy as np
from measure import Array, Case, Peer, Work

Saved = tuple[Any, ...]
ZERO = np.float32(0)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))"""
    return 1 / (1 + np.exp(-x))


def matmul(x: Array, weight: Array) -> Array:
    """x weightᵀ over the last axis of x (..., d_in); weight (d_out, d_in)."""
    return (x.reshape(-1, x.shape[-1]) @ weight.T).reshape(*x.shape[:-1], -1)


def matmul_backward(dout: Array, x: Array, weight: Array) -> tuple[Array, Array]:
    """dx, dweight"""
    flat = dout.reshape(-1, dout.shape[-1])
    return (flat @ weight).reshape(x.shape), flat.T @ x.reshape(-1, x.shape[-1])


def rms_norm(x: Array, weight: Array, eps: float) -> tuple[Array, Saved]:
    """x / sqrt(mean(x²) + eps) * weight"""
    inv = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(eps))
    normed = x * inv
    return normed * weight, (normed, inv, weight)


def rms_norm_backward(dout: Array, saved: Saved) -> tuple[Array, Array]:
    """dx, dweight"""
    normed, inv, weight = saved
    dnormed = dout * weight
    dx = inv * (dnormed - normed * (dnormed * normed).mean(-1, keepdims=True))
    return dx, (dout * normed).sum((0, 1))


def conv1d_silu(x: Array, weight: Array, bias: Array) -> tuple[Array, Saved]:
    """silu of a causal depthwise convolution: x (batch, seqlen, d_inner), weight (d_inner, taps)."""
    seqlen, taps = x.shape[1], weight.shape[1]
    padded = np.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    total = sum(padded[:, k : k + seqlen] * weight[:, k] for k in range(taps)) + bias
    gate = sigmoid(total)
    return total * gate, (padded, weight, total, gate)


def conv1d_silu_backward(dout: Array, saved: Saved) -> tuple[Array, Array, Array]:
    """dx, dweight, dbias"""
    padded, weight, total, gate = saved
    seqlen, taps = dout.shape[1], weight.shape[1]
    dtotal = dout * gate * (1 + total * (1 - gate))
    dweight = np.stack([(dtotal * padded[:, k : k + seqlen]).sum((0, 1)) for k in range(taps)], -1)
    later = np.pad(dtotal, ((0, 0), (0, taps - 1), (0, 0)))
    dx = sum(later[:, taps - 1 - k : taps - 1 - k + seqlen] * weight[:, k] for k in range(taps))
    return dx, dweight, dtotal.sum((0, 1))


def scan(
    u: Array, delta: Array, A_log: Array, B: Array, C: Array, D: Array, z: Array
) -> tuple[Array, Saved]:
    """(y + D u) silu(z), where y[t] = C[t] h[t] and h[t] = exp(delta A) h[t-1] + delta B u."""
    batch, seqlen, _ = u.shape
    A = -np.exp(A_log)
    decay = np.exp(delta.swapaxes(0, 1)[..., None] * A)  # time first, as all that the loop reads
    du = delta * u
    states = np.empty((seqlen, batch, *A.shape), np.float32)
    y = np.empty_like(u)
    h: Any = ZERO
    for t in range(seqlen):
        h = np.add(decay[t] * h, du[:, t, :, None] * B[:, t, None], out=states[t])
        y[:, t] = (h @ C[:, t, :, None])[..., 0]
    y += D * u
    gate = sigmoid(z)
    return y * z * gate, (u, delta, A, B, C, D, z, decay, du, states, y, gate)


def scan_backward(dg: Array, saved: Saved) -> dict[str, Array]:
    """The gradients of u, dt (delta before its softplus), A_log, B, C, D and z."""
    u, delta, A, B, C, D, z, decay, weighted, states, y, gate = saved
    dz = dg * y * gate * (1 + z * (1 - gate))
    dy = dg * z * gate
    dweighted, ddelta, dA = np.empty_like(u), np.zeros_like(u), np.zeros_like(A)
    dB, dC = np.empty_like(B), np.empty_like(C)
    carry: Any = ZERO  # the gradient of h[t] by all that comes later
    for t in range(u.shape[1] - 1, -1, -1):
        dh = dy[:, t, :, None] * C[:, t, None] + carry
        dC[:, t] = (dy[:, t, None] @ states[t])[:, 0]
        dB[:, t] = (weighted[:, t, None] @ dh)[:, 0]
        dweighted[:, t] = (dh @ B[:, t, :, None])[..., 0]
        carry = dh * decay[t]
        if t:
            dexponent = carry * states[t - 1]
            ddelta[:, t] = (dexponent * A).sum(-1)
            dA += (dexponent * delta[:, t, :, None]).sum(0)
    du = dweighted * delta + dy * D
    ddt = (ddelta + dweighted * u) * -np.expm1(-delta)
    dA_log, dD = dA * A, (dy * u).sum((0, 1))
    return {"du": du, "ddt": ddt, "dA_log": dA_log, "dB": dB, "dC": dC, "dD": dD, "dz": dz}


class Mamba:
    """A model, and the moments of its AdamW."""

    def __init__(self, case: Case) -> None:
        self.case, self.params = case, {k: v.copy() for k, v in case.weights.items()}
        self.m = {k: np.zeros_like(v) for k, v in self.params.items()}
        self.v = {k: np.zeros_like(v) for k, v in self.params.items()}
        self.steps = 0

    def block(self, h: Array, name: str) -> tuple[Array, Saved]:
        case, p = self.case, self.params
        n, norm = rms_norm(h, p[f"{name}.norm.weight"], case.norm_eps)
        mixer = f"{name}.mixer"
        x, z = np.split(matmul(n, p[f"{mixer}.in_proj.weight"]), 2, -1)
        taps = p[f"{mixer}.conv1d.weight"][:, 0]
        u, conv = conv1d_silu(x, taps, p[f"{mixer}.conv1d.bias"])
        x_dbl = matmul(u, p[f"{mixer}.x_proj.weight"])
        dt, B, C = np.split(x_dbl, [case.dt_rank, case.dt_rank + case.d_state], -1)
        delta = matmul(dt, p[f"{mixer}.dt_proj.weight"]) + p[f"{mixer}.dt_proj.bias"]
        delta = np.logaddexp(ZERO, delta)
        g, scanned = scan(u, delta, p[f"{mixer}.A_log"], B, C, p[f"{mixer}.D"], z)
        out = h + matmul(g, p[f"{mixer}.out_proj.weight"])
        return out, (n, norm, u, conv, dt, g, scanned)

    def block_backward(
        self, dout: Array, name: str, saved: Saved, grads: dict[str, Array]
    ) -> Array:
        """dh; fills the block's own gradients."""
        n, norm, u, conv, dt, g, scanned = saved
        mixer = f"{name}.mixer"

        def through(dout: Array, x: Array, layer: str) -> Array:
            weight = f"{mixer}.{layer}.weight"
            dx, grads[weight] = matmul_backward(dout, x, self.params[weight])
            return dx

        d = scan_backward(through(dout, g, "out_proj"), scanned)
        grads[f"{mixer}.A_log"], grads[f"{mixer}.D"] = d["dA_log"], d["dD"]
        grads[f"{mixer}.dt_proj.bias"] = d["ddt"].sum((0, 1))
        dx_dbl = np.concatenate([through(d["ddt"], dt, "dt_proj"), d["dB"], d["dC"]], -1)
        du = d["du"] + through(dx_dbl, u, "x_proj")
        dx, dtaps, grads[f"{mixer}.conv1d.bias"] = conv1d_silu_backward(du, conv)
        grads[f"{mixer}.conv1d.weight"] = dtaps[:, None]
        dn = through(np.concatenate([dx, d["dz"]], -1), n, "in_proj")
        dh, grads[f"{name}.norm.weight"] = rms_norm_backward(dn, norm)
        return dout + dh

    def loss_and_grads(self) -> tuple[float, dict[str, Array]]:
        case, tokens = self.case, self.case.tokens
        embeddings = self.params["backbone.embeddings.weight"]
        names = [f"backbone.layers.{i}" for i in range(case.n_layer)]
        h, saved = embeddings[tokens], []
        for name in names:
            h, kept = self.block(h, name)
            saved.append(kept)
        f, norm = rms_norm(h, self.params["backbone.norm_f.weight"], case.norm_eps)
        logits = matmul(f, embeddings)
        loss, dlogits = cross_entropy(logits, tokens)
        grads: dict[str, Array] = {}
        df, dembeddings = matmul_backward(dlogits, f, embeddings)
        dh, grads["backbone.norm_f.weight"] = rms_norm_backward(df, norm)
        for name in reversed(names):
            dh = self.block_backward(dh, name, saved.pop(), grads)
        np.add.at(dembeddings, tokens, dh)
        grads["backbone.embeddings.weight"] = dembeddings
        return loss, grads

    def step(self) -> float:
        """One training step; the loss before it."""
        c = self.case
        loss, grads = self.loss_and_grads()
        self.steps += 1
        norm = np.sqrt(sum(float(np.square(g).sum()) for g in grads.values()))
        scale = np.float32(min(1.0, c.max_grad_norm / (norm + 1e-6)))
        unbias_m, unbias_v = 1 - c.beta1**self.steps, 1 - c.beta2**self.steps
        for name, p in self.params.items():
            g, m, v = grads[name] * scale, self.m[name], self.v[name]
            m += (1 - c.beta1) * (g - m)
            v += (1 - c.beta2) * (g * g - v)
            p *= 1 - c.lr * c.weight_decay
            p -= c.lr * (m / unbias_m) / (np.sqrt(v / unbias_v) + c.eps)
        return loss


def cross_entropy(logits: Array, tokens: Array) -> tuple[float, Array]:
    """Mean loss of each token after the first, and the gradient of the logits."""
    ahead, wanted = logits[:, :-1], tokens[:, 1:, None]
    ahead = ahead - ahead.max(-1, keepdims=True)
    log_sum = np.log(np.exp(ahead).sum(-1, keepdims=True))
    picked = np.take_along_axis(ahead, wanted, -1)
    dahead = np.exp(ahead - log_sum)
    np.put_along_axis(dahead, wanted, np.take_along_axis(dahead, wanted, -1) - 1, -1)
    dlogits = np.zeros_like(logits)
    dlogits[:, :-1] = dahead / np.float32(wanted.size)
    return float((log_sum - picked).mean(dtype=np.float64)), dlogits


class Numpy(Peer):
    """NumPy, on the CPU."""

    def about(self) -> dict[str, Any]:
        return {"versions": {"numpy": np.__version__}, "device": "cpu"}

    def step(self, case: Case) -> dict[str, Work]:
        return {"step": Work(Mamba(case).step, lambda loss: {"loss": loss})}

    def matmul(self, case: Case) -> dict[str, Work]:
        t = case.matmul_inputs()
        x, weight, dy = t["x"], t["weight"], t["dy"]
        return {
            "x_wt": Work(lambda: x @ weight.T, lambda out: {"out": out}),
            "dy_w": Work(lambda: dy @ weight, lambda out: {"dx": out}),
            "dyt_x": Work(lambda: dy.T @ x, lambda out: {"dweight": out}),
        }

    def scan(self, case: Case) -> dict[str, Work]:
        operands = case.scan_inputs()
        dg = operands.pop("dg")
        _, saved = scan(**operands)
        return {
            "forward": Work(lambda: scan(**operands), lambda result: {"g": result[0]}),
            "backward": Work(lambda: scan_backward(dg, saved), lambda grads: grads),
        }

    def copy(self, case: Case) -> dict[str, Work]:
        x = case.copy_input()
        out = np.empty_like(x)
        return {"copy": Work(lambda: np.copyto(out, x), lambda _: {"out": out})}


if __name__ == "__main__":
    Numpy().main()
