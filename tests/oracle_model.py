"""The whole model in NumPy float64, forward and backward, composed of the kernels' oracles' maths.

Written from the formulas, independently of the kernels' decomposition: a plain loop over time.
"""

import numpy as np

from wgsl_train.models.language_model import parameters


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


def ssd(x, delta, A, B, C, D, left=None, h0=None):
    """y (batch, seqlen, n_heads, head_dim) and all states, of a plain loop over time.

    x like y; delta (batch, seqlen, n_heads); B, C (batch, seqlen, n_heads, d_state); A, D (n_heads)
    left   (batch, seqlen), 0 where a document begins, else 1: what the state before is multiplied by
    h0     (batch, n_heads, d_state, head_dim), from which it starts
    """
    batch, seqlen, n_heads, head_dim = x.shape
    h = np.zeros((batch, n_heads, B.shape[-1], head_dim)) if h0 is None else h0
    y, states = np.zeros_like(x), [h]
    for t in range(seqlen):
        a = np.exp(delta[:, t] * A) * (1 if left is None else left[:, t, None])
        h = a[..., None, None] * h + np.einsum("bh,bhn,bhp->bhnp", delta[:, t], B[:, t], x[:, t])
        states.append(h)
        y[:, t] = np.einsum("bhn,bhnp->bhp", C[:, t], h) + D[:, None] * x[:, t]
    return y, states


def ssd_backward(dy, x, delta, A, B, C, D, states, left=None, dfinal=0.0):
    """dx, ddelta, dA, dB, dC, dD by the adjoint recurrence, and the gradient by the first state,
    given that by the last."""
    dx, ddelta, dA = dy * D[:, None], np.zeros_like(delta), np.zeros_like(A)
    dB, dC = np.zeros_like(B), np.zeros_like(C)
    G = np.zeros_like(states[0]) + dfinal
    for t in reversed(range(x.shape[1])):
        d = delta[:, t]
        a = np.exp(d * A) * (1 if left is None else left[:, t, None])
        dC[:, t] = np.einsum("bhp,bhnp->bhn", dy[:, t], states[t + 1])
        G = G + np.einsum("bhn,bhp->bhnp", C[:, t], dy[:, t])
        dx[:, t] += np.einsum("bh,bhn,bhnp->bhp", d, B[:, t], G)
        dB[:, t] = np.einsum("bh,bhp,bhnp->bhn", d, x[:, t], G)
        dX = a * (G * states[t]).sum((-2, -1))
        dA += (dX * d).sum(0)
        ddelta[:, t] = dX * A + np.einsum("bhn,bhp,bhnp->bh", B[:, t], x[:, t], G)
        G = a[..., None, None] * G
    return dx, ddelta, dA, dB, dC, (dy * x).sum((0, 1, 3)), G


class Weights(dict):
    """Weights by name in float64, and `grads`, into which backward passes add.

    states   what convolutions and scans start from, as "0.conv", "0.ssm", ...; left as what they
             end with
    layer    the number of the layer whose turn it is
    """

    def __init__(self, weights, states):
        super().__init__({k: np.asarray(v, np.float64) for k, v in weights.items()})
        self.grads = {k: np.zeros_like(v) for k, v in self.items()}
        self.states, self.layer = states, 0

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

    def conv1d_silu(self, x, name):
        """silu of x filtered over time by the weight and bias of `name`; and its backward."""
        seqlen, conv = x.shape[1], self[name + ".weight"][:, 0]
        taps = range(conv.shape[1])
        before = np.zeros((len(x), len(taps) - 1, x.shape[2]))
        padded = np.concatenate([self.states.get(f"{self.layer}.conv", before), x], 1)
        self.states[f"{self.layer}.conv"] = padded[:, seqlen:]
        pre = sum(padded[:, k : k + seqlen] * conv[:, k] for k in taps)
        pre = pre + self.get(name + ".bias", 0.0)
        s = sigmoid(pre)

        def backward(du):
            dpre = du * s * (1 + pre * (1 - s))
            dpadded = np.zeros_like(padded)
            for k in taps:
                product = dpre * padded[:, k : k + seqlen]
                self.grads[name + ".weight"][:, 0, k] += product.sum((0, 1))
                dpadded[:, k : k + seqlen] += dpre * conv[:, k]
            if name + ".bias" in self:
                self.grads[name + ".bias"] += dpre.sum((0, 1))
            return dpadded[:, len(taps) - 1 :]

        return pre * s, backward

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
    zoh, inner, N, R = c.discretization == "zoh", c.d_inner, c.d_state, c.dt_rank
    m = p + "mixer."
    xz, in_proj_backward = w.linear(n, m + "in_proj")
    x, z = xz[..., :inner], xz[..., inner:]
    u, conv1d_backward = w.conv1d_silu(x, m + "conv1d")
    x_dbl, x_proj_backward = w.linear(u, m + "x_proj")
    dt, B, C = np.split(x_dbl, [R, R + N], -1)
    full, dt_proj_backward = w.linear(dt, m + "dt_proj")
    delta = softplus(full)
    A_log, D = w[m + "A_log"], w[m + "D"]
    A = -np.exp(np.clip(A_log, *c.a_log_clamp) if c.a_log_clamp else A_log)
    y, states = scan(u, delta, A, B, C, D, zoh, w.states.get(f"{w.layer}.ssm"))
    w.states[f"{w.layer}.ssm"] = states[-1]
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
        return in_proj_backward(np.concatenate([conv1d_backward(du), dz], -1))

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


def mamba2(c, w, p, n):
    """The Mamba-2 mixer on n = norm(h), with weights under the prefix p; and its backward."""
    inner, N, groups, heads = c.d_inner, c.d_state, c.n_groups, c.n_heads
    batch, seqlen, _ = n.shape
    m = p + "mixer."
    zxbcdt, in_proj_backward = w.linear(n, m + "in_proj")
    z, xBC, dt = np.split(zxbcdt, [inner, 2 * inner + 2 * groups * N], -1)
    xBC, conv1d_backward = w.conv1d_silu(xBC, m + "conv1d")
    x, B, C = np.split(xBC, [inner, inner + groups * N], -1)
    x = x.reshape(batch, seqlen, heads, -1)
    B, C = (v.reshape(batch, seqlen, groups, N).repeat(heads // groups, 2) for v in (B, C))
    full = dt + w[m + "dt_bias"]
    low, high = c.time_step_limit
    delta = np.clip(softplus(full), low, high)
    A, D = -np.exp(w[m + "A_log"]), w[m + "D"]
    y, states = ssd(x, delta, A, B, C, D, h0=w.states.get(f"{w.layer}.ssm"))
    w.states[f"{w.layer}.ssm"] = states[-1]
    y = y.reshape(batch, seqlen, inner)
    a = y * z * sigmoid(z)
    grouped = a.reshape(batch, seqlen, groups if c.norm_per_group else 1, -1)
    normed, inv = rms_norm(grouped, 1.0, c.norm_eps)
    normed, weight = normed.reshape(a.shape), w[m + "norm.weight"]
    out, out_proj_backward = w.linear(normed * weight, m + "out_proj")

    def backward(dout):
        g = w.grads
        dnormed = out_proj_backward(dout)
        g[m + "norm.weight"] += (dnormed * normed).sum((0, 1))
        da, _ = rms_norm_backward((dnormed * weight).reshape(grouped.shape), grouped, 1.0, inv)
        da, s = da.reshape(a.shape), sigmoid(z)
        dz = da * y * s * (1 + z * (1 - s))
        dy = (da * z * s).reshape(x.shape)
        dx, ddelta, dA, dB, dC, dD, _ = ssd_backward(dy, x, delta, A, B, C, D, states)
        g[m + "D"] += dD
        g[m + "A_log"] += dA * A
        ddt = ddelta * sigmoid(full) * (delta > low) * (delta < high)
        g[m + "dt_bias"] += ddt.sum((0, 1))
        by_group = (batch, seqlen, groups, heads // groups, N)
        dB, dC = (v.reshape(by_group).sum(3).reshape(batch, seqlen, -1) for v in (dB, dC))
        dxBC = conv1d_backward(np.concatenate([dx.reshape(a.shape), dB, dC], -1))
        return in_proj_backward(np.concatenate([dz, dxBC, ddt], -1))

    return out, backward


def rotate(x, dim, theta, sign=1):
    """x (batch, seqlen, heads, head_dim) with the pairs (i, i + dim / 2) of each head turned by
    the angle t / theta^(2 i / dim)."""
    half = dim // 2
    angle = np.arange(x.shape[1])[:, None, None] * theta ** (-np.arange(half) / max(half, 1))
    cos, sin = np.cos(angle), sign * np.sin(angle)
    a, b = x[..., :half], x[..., half:dim]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., dim:]], -1)


def attention(c, w, p, n):
    """The attention mixer on n = norm(h), with weights under the prefix p; and its backward."""
    heads, dim, turned = c.attn_heads, c.attn_head_dim, (c.attn_rotary_dim, c.attn_rope_theta)
    kv_heads = c.attn_kv_heads or heads
    qkv, in_proj_backward = w.linear(n, p + "mixer.in_proj")
    split = qkv.reshape(*n.shape[:2], -1, dim)
    q, k, v = np.split(split, [heads, heads + kv_heads], 2)
    q, k = rotate(q, *turned), rotate(k, *turned)
    k, v = (np.repeat(x, heads // kv_heads, 2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(dim)
    scores[..., ~np.tri(n.shape[1], dtype=bool)] = -np.inf
    e = np.exp(scores - scores.max(-1, keepdims=True))
    weights = e / e.sum(-1, keepdims=True)
    mixed = np.einsum("bhts,bshd->bthd", weights, v).reshape(*n.shape[:2], -1)
    out, out_proj_backward = w.linear(mixed, p + "mixer.out_proj")

    def backward(dout):
        dmixed = out_proj_backward(dout).reshape(q.shape)
        dweights = np.einsum("bthd,bshd->bhts", dmixed, v)
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) / np.sqrt(dim)
        dv = np.einsum("bhts,bthd->bshd", weights, dmixed)
        dq = rotate(np.einsum("bhts,bshd->bthd", dscores, k), *turned, sign=-1)
        dk = rotate(np.einsum("bhts,bthd->bshd", dscores, q), *turned, sign=-1)
        dk, dv = (x.reshape(*n.shape[:2], kv_heads, -1, dim).sum(3) for x in (dk, dv))
        return in_proj_backward(np.concatenate([dq, dk, dv], 2).reshape(qkv.shape))

    return out, backward


MIXERS = {"mamba": mamba, "mamba2": mamba2, "attention": attention}  # by layer type


def loss_and_grads(config, weights, tokens, targets, states=None):
    """(loss, {name: gradient}, logits) in float64; targets of -100 are ignored.

    states   a dictionary, empty at a sequence's beginning, that its chunks hand on
    """
    w, tape = Weights(weights, {} if states is None else states), []
    embeddings = "backbone.embeddings.weight"

    def residual(h, norm, f, layer):
        p = f"backbone.layers.{layer.owner}."
        n, norm_backward = w.rms_norm(h, p + norm, config.norm_eps)
        out, backward = f(layer.config, w, p, n)
        tape.append(lambda dh: dh + norm_backward(backward(dh)))
        return h + out

    h = w[embeddings][tokens]
    for w.layer, layer in enumerate(config.schedule):
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


def lively(config, seed=0):
    """Weights at which every path carries gradient: uniform in +-0.3, A and D as initialised."""
    rng = np.random.default_rng(seed)
    weights = {}
    for spec in parameters(config):
        weights[spec.name] = rng.uniform(-0.3, 0.3, spec.shape)
        if spec.name.endswith("A_log"):
            weights[spec.name] = np.log(np.arange(1, spec.shape[-1] + 1)) + rng.uniform(
                -0.3, 0.3, spec.shape
            )
        if spec.name.endswith((".D", "norm.weight", "norm2.weight", "norm_f.weight")):
            weights[spec.name] = 1 + weights[spec.name]
    return {k: v.astype(np.float32) for k, v in weights.items()}


def batch(config, shape, seed=1, ignored=0):
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, config.vocab_size, (2, *shape))
    targets.flat[:ignored] = -100
    return tokens, targets


def relative(a, b):
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
