"""Mamba in JAX: the whole step under jit; the scan one lax.scan, unrolled by 4, whose backward
pass recomputes all but the state."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else memory cannot be told

import jax
import jax.numpy as jnp
from jax import lax
from measure import Case, Peer, Work

jax.config.update("jax_default_matmul_precision", "highest")  # float32 throughout

Array = jax.Array
Params = dict[str, Array]


def scan(u: Array, delta: Array, A_log: Array, B: Array, C: Array, D: Array, z: Array) -> Array:
    """(y + D u) silu(z), where y[t] = C[t] h[t] and h[t] = exp(delta A) h[t-1] + delta B u."""
    A = -jnp.exp(A_log)

    @jax.checkpoint
    def step(h: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        u, delta, B, C = inputs
        h = jnp.exp(delta[..., None] * A) * h + (delta * u)[..., None] * B[:, None]
        return h, jnp.einsum("bdn,bn->bd", h, C)

    h = jnp.zeros((u.shape[0], *A.shape), u.dtype)
    time_first = tuple(x.swapaxes(0, 1) for x in (u, delta, B, C))
    _, y = lax.scan(step, h, time_first, unroll=4)
    return (y.swapaxes(0, 1) + D * u) * jax.nn.silu(z)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) * weight"""
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * weight


def block(case: Case, p: Params, h: Array, name: str) -> Array:
    """h + mixer(norm(h)) of the layer of this name."""
    mixer, seqlen = f"{name}.mixer", h.shape[1]
    n = rms_norm(h, p[f"{name}.norm.weight"], case.norm_eps)
    x, z = jnp.split(n @ p[f"{mixer}.in_proj.weight"].T, 2, -1)
    taps = p[f"{mixer}.conv1d.weight"][:, 0]
    padded = jnp.pad(x, ((0, 0), (taps.shape[1] - 1, 0), (0, 0)))
    mixed = sum(padded[:, k : k + seqlen] * taps[:, k] for k in range(taps.shape[1]))
    u = jax.nn.silu(mixed + p[f"{mixer}.conv1d.bias"])
    x_dbl = u @ p[f"{mixer}.x_proj.weight"].T
    dt, B, C = jnp.split(x_dbl, [case.dt_rank, case.dt_rank + case.d_state], -1)
    delta = jax.nn.softplus(dt @ p[f"{mixer}.dt_proj.weight"].T + p[f"{mixer}.dt_proj.bias"])
    g = scan(u, delta, p[f"{mixer}.A_log"], B, C, p[f"{mixer}.D"], z)
    return h + g @ p[f"{mixer}.out_proj.weight"].T


def loss_of(p: Params, case: Case, tokens: Array) -> Array:
    """Mean loss of each token after the first."""
    embeddings = p["backbone.embeddings.weight"]
    h = embeddings[tokens]
    for i in range(case.n_layer):
        h = block(case, p, h, f"backbone.layers.{i}")
    h = rms_norm(h, p["backbone.norm_f.weight"], case.norm_eps)
    log_p = jax.nn.log_softmax((h @ embeddings.T)[:, :-1])
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()


def adamw(
    case: Case, steps: Array, p: Params, m: Params, v: Params, grads: Params
) -> tuple[Params, Params, Params]:
    """Parameters and moments after step number `steps`, counted from 1."""
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in grads.values()))
    scale = jnp.minimum(1.0, case.max_grad_norm / (norm + 1e-6))
    grads = {k: g * scale for k, g in grads.items()}
    m = {k: case.beta1 * m[k] + (1 - case.beta1) * g for k, g in grads.items()}
    v = {k: case.beta2 * v[k] + (1 - case.beta2) * g * g for k, g in grads.items()}
    unbias_m, unbias_v = 1 - case.beta1**steps, 1 - case.beta2**steps
    shrink = 1 - case.lr * case.weight_decay
    moves = {k: m[k] / unbias_m / (jnp.sqrt(v[k] / unbias_v) + case.eps) for k in p}
    return {k: p[k] * shrink - case.lr * moves[k] for k in p}, m, v


class Jax(Peer):
    """JAX, on its default device."""

    def about(self) -> dict[str, Any]:
        device = jax.local_devices()[0]
        name = "cpu" if device.platform == "cpu" else device.device_kind
        return {"versions": {"jax": jax.__version__}, "device": name}

    def gpu_bytes(self) -> int | None:
        stats = jax.local_devices()[0].memory_stats()
        return stats["peak_bytes_in_use"] if stats else None

    def step(self, case: Case) -> dict[str, Work]:
        p = {name: jnp.asarray(array) for name, array in case.weights.items()}
        zeros = partial(jax.tree.map, jnp.zeros_like)
        tokens = jnp.asarray(case.tokens.astype("int32"))

        @partial(jax.jit, donate_argnums=(0, 1, 2, 3))
        def train(p: Params, m: Params, v: Params, steps: Array) -> Any:
            loss, grads = jax.value_and_grad(loss_of)(p, case, tokens)
            steps = steps + 1
            return *adamw(case, steps, p, m, v, grads), steps, loss

        state = [p, zeros(p), zeros(p), jnp.float32(0)]

        def start() -> Array:
            *state[:], loss = train(*state)
            return loss

        return {"step": Work(start, lambda loss: {"loss": float(loss)}, jax.block_until_ready)}

    def matmul(self, case: Case) -> dict[str, Work]:
        t = {name: jnp.asarray(array) for name, array in case.matmul_inputs().items()}
        x_wt = jax.jit(lambda x, weight: x @ weight.T)
        dy_w = jax.jit(lambda dy, weight: dy @ weight)
        dyt_x = jax.jit(lambda dy, x: dy.T @ x)
        ready = jax.block_until_ready
        return {
            "x_wt": Work(lambda: x_wt(t["x"], t["weight"]), lambda out: {"out": out}, ready),
            "dy_w": Work(lambda: dy_w(t["dy"], t["weight"]), lambda out: {"dx": out}, ready),
            "dyt_x": Work(lambda: dyt_x(t["dy"], t["x"]), lambda out: {"dweight": out}, ready),
        }

    def scan(self, case: Case) -> dict[str, Work]:
        operands = {name: jnp.asarray(array) for name, array in case.scan_inputs().items()}
        dg = operands.pop("dg")

        def of(operands: dict[str, Array]) -> Array:
            return scan(**operands)

        forward = jax.jit(lambda operands: jax.vjp(of, operands))
        _, pull = forward(operands)

        @jax.jit
        def backward(pull: Any, dg: Array, delta: Array) -> dict[str, Array]:
            (found,) = pull(dg)
            grads = {f"d{name}": grad for name, grad in found.items()}
            grads["ddt"] = grads.pop("ddelta") * -jnp.expm1(-delta)
            return grads

        ready = jax.block_until_ready
        return {
            "forward": Work(lambda: forward(operands), lambda result: {"g": result[0]}, ready),
            "backward": Work(
                lambda: backward(pull, dg, operands["delta"]), lambda grads: grads, ready
            ),
        }

    def copy(self, case: Case) -> dict[str, Work]:
        x, copied = jnp.asarray(case.copy_input()), jax.jit(jnp.copy)
        return {"copy": Work(lambda: copied(x), lambda out: {"out": out}, jax.block_until_ready)}


if __name__ == "__main__":
    Jax().main()
