"""The attention layer: causal, multi-head or grouped-query, with rotary positions where asked for.

Names of parameters, and the order of in_proj's rows, are those of mamba_ssm's `Block` and `MHA`.
"""

from __future__ import annotations

from ..config import MambaConfig
from ..errors import ConfigError
from ..kernel import Tensor
from ..ops.attention import Cache, advance, attention
from ..ops.linear import linear
from ..ops.rms_norm import rms_norm
from ..plan import ParamSpec, Plan


def _kv_heads(config: MambaConfig) -> int:
    return config.attn_kv_heads or config.attn_heads


def layer_parameters(config: MambaConfig, i: int) -> list[ParamSpec]:
    """The parameters of layer i. in_proj's rows: queries, keys, values, each head by head."""
    c, layer, mixer = config, f"backbone.layers.{i}", f"backbone.layers.{i}.mixer"
    d_qkv = (c.attn_heads + 2 * _kv_heads(c)) * c.attn_head_dim
    specs = [
        ParamSpec(f"{layer}.norm.weight", (c.d_model,), decay=False),
        ParamSpec(f"{mixer}.in_proj.weight", (d_qkv, c.d_model)),
        ParamSpec(f"{mixer}.out_proj.weight", (c.d_model, c.attn_heads * c.attn_head_dim)),
    ]
    if c.attn_bias:
        specs += [
            ParamSpec(f"{mixer}.in_proj.bias", (d_qkv,), decay=False),
            ParamSpec(f"{mixer}.out_proj.bias", (c.d_model,), decay=False),
        ]
    return specs


def layer_state(
    plan: Plan, config: MambaConfig, batch: int, i: int, capacity: int, prefix: str
) -> Cache:
    """Keys and values of the positions so far, at most `capacity`, of layer i.

    Raises ConfigError where the plan trains.
    """
    if plan.training:
        raise ConfigError(
            f"{prefix}: layer {i} is of type 'attention', whose keys and values are kept for "
            "generation only: a state is carried in training through layers of type 'mamba' and "
            "'mamba2' alone"
        )
    name, columns = f"{prefix}.{batch}.{i}", 2 * _kv_heads(config) * config.attn_head_dim
    return Cache(
        plan.persistent(f"{name}.kv", (batch, capacity, columns)),
        plan.persistent(f"{name}.position", (batch, 2), "u32"),
    )


def block(
    plan: Plan,
    config: MambaConfig,
    h: Tensor,
    i: int,
    state: Cache | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Plan h + out_proj(attention(in_proj(norm(h)))) with the parameters of layer i.

    h           (batch, seqlen, d_model) f32
    documents   (batch, seqlen) u32, or None: see `attention`
    returns     (batch, seqlen, d_model) f32
    """
    c = config

    def param(name: str) -> Tensor:
        return plan.param(f"backbone.layers.{i}.{name}")

    def bias(name: str) -> Tensor | None:
        return param(f"mixer.{name}.bias") if c.attn_bias else None

    n = rms_norm(plan, h, param("norm.weight"), c.norm_eps, storage=plan.storage)
    qkv = linear(plan, n, param("mixer.in_proj.weight"), bias("in_proj"), name="qkv")
    attended = attention(
        plan,
        qkv,
        n_heads=c.attn_heads,
        n_kv_heads=_kv_heads(c),
        rotary_dim=c.attn_rotary_dim,
        rope_theta=c.attn_rope_theta,
        documents=documents,
        cache=state,
    )
    if state:
        advance(plan, state, h.shape[1], documents)
    return linear(
        plan, attended, param("mixer.out_proj.weight"), bias("out_proj"), residual=h, name="h"
    )
