"""The Mamba-1 layer (Gu & Dao 2023): parameters, and the forward pass as it is planned.

Names of parameters are Hugging Face's `MambaForCausalLM`. See config.py for the glossary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import MambaConfig
from ..kernel import Tensor, ceil_div
from ..ops.carry import Carried, carried
from ..ops.conv1d import conv1d_silu
from ..ops.linear import Columns, linear
from ..ops.rms_norm import rms_norm
from ..ops.selective_scan import selective_scan
from ..plan import ParamSpec, Plan


def layer_parameters(config: MambaConfig, i: int) -> list[ParamSpec]:
    """The parameters of layer i. No decay on A_log, D, the norm's weight and biases."""
    c, inner = config, config.d_inner
    layer, mixer = f"backbone.layers.{i}", f"backbone.layers.{i}.mixer"
    specs = [
        ParamSpec(f"{layer}.norm.weight", (c.d_model,), decay=False),
        ParamSpec(f"{mixer}.in_proj.weight", (2 * inner, c.d_model)),
        ParamSpec(f"{mixer}.conv1d.weight", (inner, 1, c.d_conv)),
        ParamSpec(f"{mixer}.x_proj.weight", (c.dt_rank + 2 * c.d_state, inner)),
        ParamSpec(f"{mixer}.dt_proj.weight", (inner, c.dt_rank)),
        ParamSpec(f"{mixer}.dt_proj.bias", (inner,), decay=False),
        ParamSpec(f"{mixer}.A_log", (inner, c.d_state), decay=False),
        ParamSpec(f"{mixer}.D", (inner,), decay=False),
        ParamSpec(f"{mixer}.out_proj.weight", (c.d_model, inner)),
    ]
    biases = {
        "in_proj": (c.use_bias, 2 * inner),
        "conv1d": (c.use_conv_bias, inner),
        "x_proj": (c.x_proj_bias, c.dt_rank + 2 * c.d_state),
        "out_proj": (c.use_bias, c.d_model),
    }
    return specs + bias_parameters(mixer, biases)


def bias_parameters(mixer: str, biases: Mapping[str, tuple[bool, int]]) -> list[ParamSpec]:
    """Those of a mixer's biases, given by module as (used, size), that are used."""
    return [
        ParamSpec(f"{mixer}.{name}.bias", (size,), decay=False)
        for name, (used, size) in biases.items()
        if used
    ]


@dataclass(frozen=True)
class LayerState:
    """What a layer carries from token to token, and in training from chunk to chunk.

    conv   the last inputs of the convolution, (batch, d_conv - 1, channels); None for d_conv 1
    ssm    the state h
    """

    conv: Carried | None
    ssm: Carried

    def chained(self, plan: Plan) -> LayerState:
        """The same, with tensors for gradients."""
        return LayerState(self.conv and self.conv.chained(plan), self.ssm.chained(plan))


def layer_state(
    plan: Plan, config: MambaConfig, batch: int, i: int, capacity: int, prefix: str
) -> LayerState:
    """Persistent state of layer i, of one size, whatever the capacity.

    conv   (batch, d_conv - 1, d_inner)
    ssm    (batch, ceil(d_state / 4), d_inner, 4)
    """
    c, name = config, f"{prefix}.{batch}.{i}"
    conv = None
    if c.d_conv > 1:
        conv = carried(plan, f"{name}.conv", (batch, c.d_conv - 1, c.d_inner))
    groups = ceil_div(c.d_state, 4)
    return LayerState(conv, carried(plan, f"{name}.ssm", (batch, groups, c.d_inner, 4)))


def block(
    plan: Plan,
    config: MambaConfig,
    h: Tensor,
    i: int,
    state: LayerState | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Plan h + mixer(norm(h)) with the parameters of layer i; mirrors mamba_ssm's `Block`.

    h           (batch, seqlen, d_model) f32
    documents   (batch, seqlen) u32, or None: see `language_model.backbone`
    returns     (batch, seqlen, d_model) f32
    """
    c = config

    def param(name: str) -> Tensor:
        return plan.param(f"backbone.layers.{i}.{name}")

    def bias(name: str, used: bool) -> Tensor | None:
        return param(f"mixer.{name}.bias") if used else None

    n = rms_norm(plan, h, param("norm.weight"), c.norm_eps, storage=plan.storage)
    xz = linear(
        plan,
        n,
        param("mixer.in_proj.weight"),
        bias("in_proj", c.use_bias),
        name="xz",
        storage=plan.storage,
    )
    u = conv1d_silu(
        plan,
        Columns(xz, 0, c.d_inner),
        param("mixer.conv1d.weight"),
        bias("conv1d", c.use_conv_bias),
        documents=documents,
        state=state.conv if state else None,
    )
    x_dbl = linear(
        plan, u, param("mixer.x_proj.weight"), bias("x_proj", c.x_proj_bias), name="x_dbl"
    )
    delta = linear(
        plan,
        Columns(x_dbl, 0, c.dt_rank),
        param("mixer.dt_proj.weight"),
        param("mixer.dt_proj.bias"),
        activation="softplus",
        name="delta",
    )
    g = selective_scan(
        plan,
        u,
        delta,
        x_dbl,
        xz,
        param("mixer.A_log"),
        param("mixer.D"),
        dt_rank=c.dt_rank,
        d_state=c.d_state,
        discretization=c.discretization,
        a_log_clamp=c.a_log_clamp,
        documents=documents,
        state=state.ssm if state else None,
    )
    return linear(
        plan,
        g,
        param("mixer.out_proj.weight"),
        bias("out_proj", c.use_bias),
        residual=h,
        name="h",
    )
