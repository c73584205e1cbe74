"""The gated MLP that may follow any layer's mixer.

Names of parameters, and the order of fc1's rows, are those of mamba_ssm's `Block` and `GatedMLP`.
"""

from __future__ import annotations

from ..config import MambaConfig
from ..kernel import Tensor
from ..ops.linear import linear
from ..ops.rms_norm import rms_norm
from ..ops.swiglu import swiglu
from ..plan import ParamSpec, Plan


def mlp_parameters(config: MambaConfig, i: int) -> list[ParamSpec]:
    """The parameters of layer i's MLP. fc1's rows: first what is gated, then the gates."""
    c, layer = config, f"backbone.layers.{i}"
    return [
        ParamSpec(f"{layer}.norm2.weight", (c.d_model,), decay=False),
        ParamSpec(f"{layer}.mlp.fc1.weight", (2 * c.d_ff, c.d_model)),
        ParamSpec(f"{layer}.mlp.fc2.weight", (c.d_model, c.d_ff)),
    ]


def mlp(plan: Plan, config: MambaConfig, h: Tensor, i: int) -> Tensor:
    """Plan h + fc2(up * silu(gate)), [up | gate] = fc1(norm2(h)), with the weights of layer i.

    h         (batch, seqlen, d_model) f32
    returns   (batch, seqlen, d_model) f32
    """

    def param(name: str) -> Tensor:
        return plan.param(f"backbone.layers.{i}.{name}.weight")

    n = rms_norm(plan, h, param("norm2"), config.norm_eps, name="norm2", storage=plan.storage)
    up_gate = linear(plan, n, param("mlp.fc1"), name="up_gate", storage=plan.storage)
    gated = swiglu(plan, up_gate)
    return linear(plan, gated, param("mlp.fc2"), residual=h, name="h_mlp")
