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


def loss_and_grads(config, weights, tokens, targets):
    """(loss, {name: gradient}, logits) in float64; targets of -100 are ignored."""
    c = config
    w = {k: np.asarray(v, np.float64) for k, v in weights.items()}
    zoh = c.discretization == "zoh"
    E = w["backbone.embeddings.weight"]
    inner, N, K = c.d_inner, c.d_state, c.d_conv
    R = w["backbone.layers.0.mixer.dt_proj.weight"].shape[1]
    batch, seqlen = tokens.shape
    g = {k: np.zeros_like(v) for k, v in w.items()}
    h, saved = E[tokens], []

    def bias(name):
        return w.get(name, 0.0)

    for i in range(c.n_layer):
        p = f"backbone.layers.{i}."
        m = p + "mixer."
        n, inv = rms_norm(h, w[p + "norm.weight"], c.norm_eps)
        xz = n @ w[m + "in_proj.weight"].T + bias(m + "in_proj.bias")
        x, z = xz[..., :inner], xz[..., inner:]
        padded = np.concatenate([np.zeros((batch, K - 1, inner)), x], 1)
        conv = w[m + "conv1d.weight"][:, 0]
        pre = sum(padded[:, k : k + seqlen] * conv[:, k] for k in range(K)) + bias(
            m + "conv1d.bias"
        )
        u = pre * sigmoid(pre)
        x_dbl = u @ w[m + "x_proj.weight"].T + bias(m + "x_proj.bias")
        dt, B, C = np.split(x_dbl, [R, R + N], -1)
        full = dt @ w[m + "dt_proj.weight"].T + w[m + "dt_proj.bias"]
        delta = softplus(full)
        A_log = w[m + "A_log"]
        A = -np.exp(np.clip(A_log, *c.a_log_clamp) if c.a_log_clamp else A_log)
        y, states = scan(u, delta, A, B, C, w[m + "D"], zoh)
        gate = z * sigmoid(z)
        gated = y * gate
        out = gated @ w[m + "out_proj.weight"].T + bias(m + "out_proj.bias")
        saved.append(
            (
                h,
                n,
                inv,
                x,
                z,
                padded,
                pre,
                u,
                x_dbl,
                dt,
                B,
                C,
                full,
                delta,
                A,
                y,
                states,
                gate,
                gated,
            )
        )
        h = h + out
    nf, inv_f = rms_norm(h, w["backbone.norm_f.weight"], c.norm_eps)
    head = "backbone.embeddings.weight" if c.tie_embeddings else "lm_head.weight"
    logits = nf @ w[head].T + bias("lm_head.bias")
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

    def linear_backward(dout, x, name):
        weight = name + ".weight" if name + ".weight" in w else name
        g[weight] += np.einsum("blo,bli->oi", dout, x)
        if name + ".bias" in w:
            g[name + ".bias"] += dout.sum((0, 1))
        return dout @ w[weight]

    dnf = linear_backward(dlogits, nf, head)
    if "lm_head.bias" in w:
        g["lm_head.bias"] = dlogits.sum((0, 1))
    dh, g["backbone.norm_f.weight"] = rms_norm_backward(dnf, h, w["backbone.norm_f.weight"], inv_f)
    for i in reversed(range(c.n_layer)):
        p = f"backbone.layers.{i}."
        m = p + "mixer."
        h, n, inv, x, z, padded, pre, u, x_dbl, dt, B, C, full, delta, A, y, states, gate, gated = (
            saved[i]
        )
        dgated = linear_backward(dh, gated, m + "out_proj")
        s = sigmoid(z)
        dz = dgated * y * s * (1 + z * (1 - s))
        du, ddelta, dA, dB, dC, g[m + "D"] = scan_backward(
            dgated * gate, u, delta, A, B, C, w[m + "D"], states, zoh
        )
        A_log = w[m + "A_log"]
        g[m + "A_log"] = dA * A
        if c.a_log_clamp:
            low, high = c.a_log_clamp
            g[m + "A_log"] *= (A_log > low) & (A_log < high)
        dfull = ddelta * sigmoid(full)
        ddt = linear_backward(dfull, dt, m + "dt_proj")
        du += linear_backward(np.concatenate([ddt, dB, dC], -1), u, m + "x_proj")
        sp = sigmoid(pre)
        dpre = du * sp * (1 + pre * (1 - sp))
        conv = w[m + "conv1d.weight"][:, 0]
        dpadded = np.zeros_like(padded)
        for k in range(K):
            g[m + "conv1d.weight"][:, 0, k] = (dpre * padded[:, k : k + seqlen]).sum((0, 1))
            dpadded[:, k : k + seqlen] += dpre * conv[:, k]
        if m + "conv1d.bias" in w:
            g[m + "conv1d.bias"] = dpre.sum((0, 1))
        dxz = np.concatenate([dpadded[:, K - 1 :], dz], -1)
        dn = linear_backward(dxz, n, m + "in_proj")
        dx, g[p + "norm.weight"] = rms_norm_backward(dn, h, w[p + "norm.weight"], inv)
        dh = dh + dx
    np.add.at(g["backbone.embeddings.weight"], tokens, dh)
    return loss, g, logits
