"""The whole model in NumPy float64, forward and backward, composed of the kernels' oracles' maths.

Written from the formulas, independently of the kernels' decomposition: a plain loop over time.
"""

import numpy as np


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def phi1(x):
    """(e^x - 1) / x."""
    small = np.abs(x) < 1e-4
    safe = np.where(small, 1.0, x)
    return np.where(small, 1 + x / 2 + x * x / 6, np.expm1(safe) / safe)


def dphi1(x):
    """Derivative of phi1."""
    small = np.abs(x) < 1e-2
    safe = np.where(small, 1.0, x)
    series = 0.5 + x / 3 + x**2 / 8 + x**3 / 30 + x**4 / 144 + x**5 / 840
    return np.where(small, series, (safe * np.exp(safe) - np.expm1(safe)) / safe**2)


def rms_norm(x, w, eps):
    inv = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * inv * w, inv


def rms_norm_backward(dout, x, w, inv):
    wd = dout * w
    dx = inv * (wd - x * inv**2 * (wd * x).mean(-1, keepdims=True))
    return dx, (dout * x * inv).sum((0, 1))


def scan(u, delta, A, B, C, D, zoh, h0=None):
    """y (batch, seqlen, d_inner) and all states h, of a plain loop."""
    batch, seqlen, d_inner = u.shape
    h = np.zeros((batch, d_inner, A.shape[1])) if h0 is None else h0.copy()
    y, states = np.zeros_like(u), [h]
    for t in range(seqlen):
        X = delta[:, t, :, None] * A
        b = delta[:, t, :, None] * (phi1(X) if zoh else 1.0) * B[:, t, None, :]
        h = np.exp(X) * h + b * u[:, t, :, None]
        states.append(h)
        y[:, t] = (h * C[:, t, None, :]).sum(-1) + D * u[:, t]
    return y, states


def scan_backward(dy, u, delta, A, B, C, D, states, zoh):
    """du, ddelta, dA, dB, dC, dD by the adjoint recurrence."""
    du, ddelta, dA = dy * D, np.zeros_like(delta), np.zeros_like(A)
    dB, dC = np.zeros_like(B), np.zeros_like(C)
    G = np.zeros_like(states[0])
    for t in reversed(range(u.shape[1])):
        d, ut = delta[:, t, :, None], u[:, t, :, None]
        X, Bt = d * A, B[:, t, None, :]
        a = np.exp(X)
        dC[:, t] = (dy[:, t, :, None] * states[t + 1]).sum(1)
        G = G + C[:, t, None, :] * dy[:, t, :, None]
        e = d * (phi1(X) if zoh else 1.0)
        du[:, t] += (G * e * Bt).sum(-1)
        dB[:, t] = (G * e * ut).sum(1)
        dX = G * states[t] * a + (G * Bt * ut * d * dphi1(X) if zoh else 0.0)
        dA += (dX * d).sum(0)
        ddelta[:, t] = (dX * A + G * Bt * ut * (phi1(X) if zoh else 1.0)).sum(-1)
        G = a * G
    return du, ddelta, dA, dB, dC, (dy * u).sum((0, 1))


class Weights(dict):
    """Weights by name in float64, and `grads`, into which backward passes add."""

    def __init__(self, weights):
        super().__init__({k: np.asarray(v, np.float64) for k, v in weights.items()})
        self.grads = {k: np.zeros_like(v) for k, v in self.items()}

    def linear(self, x, name):
        """x Wᵀ + bias, and its backward."""
        weight = name + ".weight" if name + ".weight" in self else name
        out = x @ self[weight].T + self.get(name + ".bias", 0.0)

        def backward(dout):
            self.grads[weight] += np.einsum("blo,bli->oi", dout, x)
            if name + ".bias" in self:
                self.grads[name + ".bias"] += dout.sum((0, 1))
            return dout @ self[weight]

        return out, backward

    def rms_norm(self, x, name, eps):
        """RMSNorm by the weight `name`, and its backward."""
        out, inv = rms_norm(x, self[name], eps)

        def backward(dout):
            dx, dw = rms_norm_backward(dout, x, self[name], inv)
            self.grads[name] += dw
            return dx

        return out, backward


def mamba(c, w, p, n):
    """The Mamba-1 mixer on n = norm(h), with weights under the prefix p; and its backward."""
    zoh, inner, N, K, R = c.discretization == "zoh", c.d_inner, c.d_state, c.d_conv, c.dt_rank
    batch, seqlen, _ = n.shape
    m = p + "mixer."
    xz, in_proj_backward = w.linear(n, m + "in_proj")
    x, z = xz[..., :inner], xz[..., inner:]
    padded = np.concatenate([np.zeros((batch, K - 1, inner)), x], 1)
    conv = w[m + "conv1d.weight"][:, 0]
    pre = sum(padded[:, k : k + seqlen] * conv[:, k] for k in range(K))
    pre = pre + w.get(m + "conv1d.bias", 0.0)
    u = pre * sigmoid(pre)
    x_dbl, x_proj_backward = w.linear(u, m + "x_proj")
    dt, B, C = np.split(x_dbl, [R, R + N], -1)
    full, dt_proj_backward = w.linear(dt, m + "dt_proj")
    delta = softplus(full)
    A_log, D = w[m + "A_log"], w[m + "D"]
    A = -np.exp(np.clip(A_log, *c.a_log_clamp) if c.a_log_clamp else A_log)
    y, states = scan(u, delta, A, B, C, D, zoh)
    gate = z * sigmoid(z)
    out, out_proj_backward = w.linear(y * gate, m + "out_proj")

    def backward(dout):
        g = w.grads
        dgated = out_proj_backward(dout)
        s = sigmoid(z)
        dz = dgated * y * s * (1 + z * (1 - s))
        du, ddelta, dA, dB, dC, dD = scan_backward(dgated * gate, u, delta, A, B, C, D, states, zoh)
        g[m + "D"] += dD
        dA_log = dA * A
        if c.a_log_clamp:
            low, high = c.a_log_clamp
            dA_log *= (A_log > low) & (A_log < high)
        g[m + "A_log"] += dA_log
        ddt = dt_proj_backward(ddelta * sigmoid(full))
        du += x_proj_backward(np.concatenate([ddt, dB, dC], -1))
        sp = sigmoid(pre)
        dpre = du * sp * (1 + pre * (1 - sp))
        dpadded = np.zeros_like(padded)
        for k in range(K):
            g[m + "conv1d.weight"][:, 0, k] += (dpre * padded[:, k : k + seqlen]).sum((0, 1))
            dpadded[:, k : k + seqlen] += dpre * conv[:, k]
        if m + "conv1d.bias" in w:
            g[m + "conv1d.bias"] += dpre.sum((0, 1))
        return in_proj_backward(np.concatenate([dpadded[:, K - 1 :], dz], -1))

    return out, backward


def mlp(c, w, p, n):
    """The gated MLP on n = norm2(h), with weights under the prefix p; and its backward."""
    up_gate, fc1_backward = w.linear(n, p + "mlp.fc1")
    up, gate = up_gate[..., : c.d_ff], up_gate[..., c.d_ff :]
    s = sigmoid(gate)
    out, fc2_backward = w.linear(up * gate * s, p + "mlp.fc2")

    def backward(dout):
        d = fc2_backward(dout)
        dgate = d * up * s * (1 + gate * (1 - s))
        return fc1_backward(np.concatenate([d * gate * s, dgate], -1))

    return out, backward


MIXERS = {"mamba": mamba}  # by layer type


def loss_and_grads(config, weights, tokens, targets):
    """(loss, {name: gradient}, logits) in float64; targets of -100 are ignored."""
    w, tape = Weights(weights), []
    embeddings = "backbone.embeddings.weight"

    def residual(h, norm, f, layer):
        p = f"backbone.layers.{layer.owner}."
        n, norm_backward = w.rms_norm(h, p + norm, config.norm_eps)
        out, backward = f(layer.config, w, p, n)
        tape.append(lambda dh: dh + norm_backward(backward(dh)))
        return h + out

    h = w[embeddings][tokens]
    for layer in config.schedule:
        h = residual(h, "norm.weight", MIXERS[layer.type], layer)
        if layer.config.mlp != "none":
            h = residual(h, "norm2.weight", mlp, layer)
    nf, norm_f_backward = w.rms_norm(h, "backbone.norm_f.weight", config.norm_eps)
    head = "backbone.embeddings.weight" if config.tie_embeddings else "lm_head.weight"
    logits, head_backward = w.linear(nf, head)
    logits = logits + w.get("lm_head.bias", 0.0)
    counted = targets != -100
    shifted = logits - logits.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    safe = np.where(counted, targets, 0)
    picked = np.take_along_axis(logp, safe[..., None], -1)[..., 0]
    count = max(1, counted.sum())
    loss = -(picked * counted).sum() / count
    dlogits = np.exp(logp)
    np.put_along_axis(
        dlogits, safe[..., None], np.take_along_axis(dlogits, safe[..., None], -1) - 1, -1
    )
    dlogits *= counted[..., None] / count
    if "lm_head.bias" in w:
        w.grads["lm_head.bias"] += dlogits.sum((0, 1))
    dh = norm_f_backward(head_backward(dlogits))
    for backward in reversed(tape):
        dh = backward(dh)
    np.add.at(w.grads[embeddings], tokens, dh)
    return loss, w.grads, logits
