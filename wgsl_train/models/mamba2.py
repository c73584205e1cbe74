"""The Mamba-2 layer (Dao & Gu 2024): parameters, and the forward pass as it is planned.

Names of parameters are Hugging Face's `Mamba2ForCausalLM`. See config.py for the glossary.
"""

from __future__ import annotations

from ..config import MambaConfig
from ..kernel import Tensor
from ..ops.carry import carried
from ..ops.conv1d import conv1d_silu
from ..ops.linear import Columns, linear
from ..ops.rms_norm import rms_norm
from ..ops.ssd import ssd
from ..plan import ParamSpec, Plan
from .mamba import LayerState, bias_parameters


def _conv_columns(config: MambaConfig) -> int:
    """Columns of x, B and C together, which the convolution filters."""
    return config.d_inner + 2 * config.n_groups * config.d_state


def layer_parameters(config: MambaConfig, i: int) -> list[ParamSpec]:
    """The parameters of layer i. No decay on A_log, D, norm weights and biases."""
    c, d_xBC = config, _conv_columns(config)
    layer, mixer = f"backbone.layers.{i}", f"backbone.layers.{i}.mixer"
    d_proj = c.d_inner + d_xBC + c.n_heads
    specs = [
        ParamSpec(f"{layer}.norm.weight", (c.d_model,), decay=False),
        ParamSpec(f"{mixer}.in_proj.weight", (d_proj, c.d_model)),
        ParamSpec(f"{mixer}.conv1d.weight", (d_xBC, 1, c.d_conv)),
        ParamSpec(f"{mixer}.dt_bias", (c.n_heads,), decay=False),
        ParamSpec(f"{mixer}.A_log", (c.n_heads,), decay=False),
        ParamSpec(f"{mixer}.D", (c.n_heads,), decay=False),
        ParamSpec(f"{mixer}.norm.weight", (c.d_inner,), decay=False),
        ParamSpec(f"{mixer}.out_proj.weight", (c.d_model, c.d_inner)),
    ]
    biases = {
        "in_proj": (c.use_bias, d_proj),
        "conv1d": (c.use_conv_bias, d_xBC),
        "out_proj": (c.use_bias, c.d_model),
    }
    return specs + bias_parameters(mixer, biases)


def layer_state(
    plan: Plan, config: MambaConfig, batch: int, i: int, capacity: int, prefix: str
) -> LayerState:
    """Persistent state of layer i, of one size, whatever the capacity.

    conv   (batch, d_conv - 1, d_xBC)
    ssm    (batch, n_heads, d_state, head_dim)
    """
    c, name = config, f"{prefix}.{batch}.{i}"
    conv = None
    if c.d_conv > 1:
        conv = carried(plan, f"{name}.conv", (batch, c.d_conv - 1, _conv_columns(c)))
    ssm = carried(plan, f"{name}.ssm", (batch, c.n_heads, c.d_state, c.head_dim))
    return LayerState(conv, ssm)


def block(
    plan: Plan,
    config: MambaConfig,
    h: Tensor,
    i: int,
    state: LayerState | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Plan h + mixer(norm(h)) with the parameters of layer i; mirrors mamba_ssm's `Mamba2`.

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
    zxbcdt = linear(
        plan, n, param("mixer.in_proj.weight"), bias("in_proj", c.use_bias), name="zxbcdt"
    )
    xBC = conv1d_silu(
        plan,
        Columns(zxbcdt, c.d_inner, _conv_columns(c)),
        param("mixer.conv1d.weight"),
        bias("conv1d", c.use_conv_bias),
        documents=documents,
        state=state.conv if state else None,
        name="xBC",
    )
    g = ssd(
        plan,
        zxbcdt,
        xBC,
        param("mixer.dt_bias"),
        param("mixer.A_log"),
        param("mixer.D"),
        param("mixer.norm.weight"),
        n_groups=c.n_groups,
        norm_groups=c.n_groups if c.norm_per_group else 1,
        eps=c.norm_eps,
        time_step_limit=c.time_step_limit,
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
