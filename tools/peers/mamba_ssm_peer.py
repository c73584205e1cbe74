"""The official mamba_ssm with its CUDA kernels: the model, and its selective scan alone."""

from __future__ import annotations

import torch
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from measure import Case, Work
from torch_training import DEVICE, TorchPeer, next_token_loss, to_tensor, training_step, work

Tensor = torch.Tensor


class MambaSsm(TorchPeer):
    """mamba_ssm, on PyTorch and CUDA."""

    packages = ("mamba_ssm",)

    def step(self, case: Case) -> dict[str, Work]:
        config = MambaConfig(
            vocab_size=case.vocab_size,
            d_model=case.d_model,
            n_layer=case.n_layer,
            ssm_cfg={"d_state": case.d_state, "dt_rank": case.dt_rank},
            residual_in_fp32=True,
            pad_vocab_size_multiple=1,
        )
        model = MambaLMHeadModel(config, device=DEVICE, dtype=torch.float32)
        weights = {
            name.replace("embeddings", "embedding"): to_tensor(array)
            for name, array in case.weights.items()
        }
        weights["lm_head.weight"] = weights["backbone.embedding.weight"]
        model.load_state_dict(weights)
        model.tie_weights()
        tokens = to_tensor(case.tokens)
        return training_step(
            case, model.parameters(), lambda: next_token_loss(model(tokens).logits, tokens)
        )

    def scan(self, case: Case) -> dict[str, Work]:
        """Its own order of axes, (batch, d_inner, seqlen), and its own softplus."""
        given = case.scan_inputs()

        def operand(name: str) -> Tensor:
            return to_tensor(given[name]).transpose(1, 2).contiguous().requires_grad_()

        u, delta, B, C, z = map(operand, ("u", "delta", "B", "C", "z"))
        dt = delta.detach().expm1().log().requires_grad_()  # the inverse of softplus
        A = (-to_tensor(given["A_log"]).exp()).requires_grad_()
        D = to_tensor(given["D"]).requires_grad_()
        dg = to_tensor(given["dg"]).transpose(1, 2).contiguous()

        def forward() -> Tensor:
            return selective_scan_fn(u, dt, A, B, C, D, z, delta_softplus=True)

        g = forward()

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(g, (u, dt, A, B, C, D, z), dg, retain_graph=True)

        def named(grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
            du, ddt, dA, dB, dC, dD, dz = grads
            return {
                "du": du, "ddt": ddt, "dA_log": dA * A, "dB": dB, "dC": dC, "dD": dD, "dz": dz,
            }  # fmt: skip

        return {"forward": work(forward, lambda g: {"g": g}), "backward": work(backward, named)}


if __name__ == "__main__":
    MambaSsm().main()
