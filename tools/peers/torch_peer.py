"""Models in plain PyTorch, Mamba's scan a loop over time.

--autograd   differentiate the loop by autograd; by default its backward is written by hand
--compile    compile the step's loss, with --autograd, which takes minutes where sequences are long
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch_layers
from measure import Case, Work
from torch.nn import functional
from torch_layers import conv_silu, rms_norm
from torch_training import TorchPeer, next_token_loss, to_tensor, training_step, work

Tensor = torch.Tensor


class Recurrence(torch.autograd.Function):
    """h[t] = decay[t] h[t-1] + inputs[t] along the first axis, with its backward by hand."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, inputs: Tensor) -> Tensor:
        states = torch.empty_like(inputs)
        states[0] = inputs[0]
        for t in range(1, len(inputs)):
            torch.addcmul(inputs[t], decay[t], states[t - 1], out=states[t])
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    def backward(ctx: Any, dstates: Tensor) -> tuple[Tensor, Tensor]:
        decay, states = ctx.saved_tensors
        dinputs = dstates.clone()
        for t in range(len(dinputs) - 1, 0, -1):
            dinputs[t - 1].addcmul_(decay[t], dinputs[t])
        ddecay = torch.empty_like(decay)
        ddecay[0] = 0
        torch.mul(dinputs[1:], states[:-1], out=ddecay[1:])
        return ddecay, dinputs


def recurrence_by_autograd(decay: Tensor, inputs: Tensor) -> Tensor:
    """The same, for autograd to differentiate."""
    states = [inputs[0]]
    for decay_t, input_t in zip(decay.unbind()[1:], inputs.unbind()[1:], strict=True):
        states.append(torch.addcmul(input_t, decay_t, states[-1]))
    return torch.stack(states)


by_autograd = "--autograd" in sys.argv
recurrence = recurrence_by_autograd if by_autograd else Recurrence.apply


def scan(
    u: Tensor, delta: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor
) -> Tensor:
    """(y + D u) silu(z), where y[t] = C[t] h[t] and h[t] = exp(delta A) h[t-1] + delta B u."""
    du, time_first, B, C = (x.transpose(0, 1) for x in (delta * u, delta, B, C))
    decay = torch.exp(time_first[..., None] * -torch.exp(A_log))
    states = recurrence(decay, du[..., None] * B[:, :, None])
    y = (states @ C[..., None])[..., 0].transpose(0, 1) + D * u
    return y * functional.silu(z)


def mamba(case: Case, p: dict[str, Tensor], h: Tensor, name: str) -> Tensor:
    """h + mixer(norm(h)) of the layer of this name."""
    mixer = f"{name}.mixer"
    n = rms_norm(h, p[f"{name}.norm.weight"], case.norm_eps)
    x, z = functional.linear(n, p[f"{mixer}.in_proj.weight"]).chunk(2, -1)
    u = conv_silu(x, p[f"{mixer}.conv1d.weight"], p[f"{mixer}.conv1d.bias"])
    x_dbl = functional.linear(u, p[f"{mixer}.x_proj.weight"])
    dt, B, C = x_dbl.split([case.dt_rank, case.d_state, case.d_state], -1)
    delta = functional.softplus(
        functional.linear(dt, p[f"{mixer}.dt_proj.weight"], p[f"{mixer}.dt_proj.bias"])
    )
    g = scan(u, delta, p[f"{mixer}.A_log"], B, C, p[f"{mixer}.D"], z)
    return h + functional.linear(g, p[f"{mixer}.out_proj.weight"])


LAYERS = {"mamba": mamba, "mamba2": torch_layers.mamba2, "attention": torch_layers.attention}


class Loop(TorchPeer):
    """What depends on how the loop is differentiated."""

    layers = tuple(LAYERS)

    def step(self, case: Case) -> dict[str, Work]:
        p = {name: to_tensor(w).requires_grad_() for name, w in case.weights.items()}
        tokens = to_tensor(case.tokens)
        embeddings = p["backbone.embeddings.weight"]

        def loss() -> Tensor:
            h = embeddings[tokens]
            for i in range(case.n_layer):
                h = LAYERS[case.layers](case, p, h, f"backbone.layers.{i}")
            h = rms_norm(h, p["backbone.norm_f.weight"], case.norm_eps)
            return next_token_loss(functional.linear(h, embeddings), tokens)

        compiled = torch.compile(loss) if "--compile" in sys.argv else loss
        return training_step(case, p.values(), compiled)

    def scan(self, case: Case) -> dict[str, Work]:
        operands = {name: to_tensor(array) for name, array in case.scan_inputs().items()}
        dg = operands.pop("dg")
        for operand in operands.values():
            operand.requires_grad_()
        g = scan(**operands)

        def backward() -> dict[str, Tensor]:
            found = torch.autograd.grad(g, list(operands.values()), dg, retain_graph=True)
            grads = {f"d{name}": grad for name, grad in zip(operands, found, strict=True)}
            delta = operands["delta"].detach()
            grads["ddt"] = grads.pop("ddelta") * -torch.expm1(-delta)
            return grads

        return {
            "forward": work(lambda: scan(**operands), lambda g: {"g": g}),
            "backward": work(backward, lambda grads: grads),
        }


class Torch(Loop):
    """PyTorch without kernels of its own."""

    def matmul(self, case: Case) -> dict[str, Work]:
        t = {name: to_tensor(array) for name, array in case.matmul_inputs().items()}
        x, weight, dy = t["x"], t["weight"], t["dy"]
        return {
            "x_wt": work(lambda: x @ weight.T, lambda out: {"out": out}),
            "dy_w": work(lambda: dy @ weight, lambda out: {"dx": out}),
            "dyt_x": work(lambda: dy.T @ x, lambda out: {"dweight": out}),
        }

    def copy(self, case: Case) -> dict[str, Work]:
        x = to_tensor(case.copy_input())
        out = torch.empty_like(x)
        return {"copy": work(lambda: out.copy_(x), lambda out: {"out": out})}


if __name__ == "__main__":
    (Loop if by_autograd else Torch)().main()
