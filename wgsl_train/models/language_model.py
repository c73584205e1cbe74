"""The language model: embedding, the layers of the schedule, final norm, head.

A layer type is a module here that has the three functions of `LayerType`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

from ..config import Layer, MambaConfig
from ..kernel import Tensor
from ..ops.embedding import embedding
from ..ops.rms_norm import rms_norm
from ..ops.sum_partials import sum_partials
from ..plan import ParamSpec, Plan
from .mlp import mlp, mlp_parameters

EMBEDDING = "backbone.embeddings.weight"


class LayerType(Protocol):
    """What the module of a layer type has. The configuration is the layer's own."""

    def layer_parameters(self, config: MambaConfig, i: int) -> list[ParamSpec]:
        """The parameters of layer i, named "backbone.layers.{i}.…", in checkpoint order."""

    def block(
        self,
        plan: Plan,
        config: MambaConfig,
        h: Tensor,
        i: int,
        state: Any = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Plan the layer, which ends in a residual addition, with the parameters of layer i.

        h and what is returned are (batch, seqlen, d_model) f32. state is of `layer_state`,
        documents as `backbone` has them.
        """

    def layer_state(
        self, plan: Plan, config: MambaConfig, batch: int, i: int, capacity: int, prefix: str
    ) -> Any:
        """What layer i carries from token to token: persistent tensors "{prefix}.{batch}.{i}.…".

        capacity   tokens for which a state that grows must have room

        Raises ConfigError where the plan trains, and the state is for generation only.
        """


def layer_type(name: str) -> LayerType:
    """The module of a layer type."""
    return cast(LayerType, importlib.import_module(f".{name}", __package__))


def parameters(config: MambaConfig) -> list[ParamSpec]:
    """Every parameter, in checkpoint order. Layers that share parameters have them once."""
    c = config
    specs = [ParamSpec(EMBEDDING, (c.padded_vocab_size, c.d_model))]
    for i, layer in enumerate(c.schedule):
        if layer.owner == i:
            specs += layer_type(layer.type).layer_parameters(layer.config, i)
            specs += mlp_parameters(layer.config, i) if layer.config.mlp != "none" else []
    specs.append(ParamSpec("backbone.norm_f.weight", (c.d_model,), decay=False))
    if not c.tie_embeddings:
        specs.append(ParamSpec("lm_head.weight", (c.padded_vocab_size, c.d_model)))
    if c.lm_head_bias:
        specs.append(ParamSpec("lm_head.bias", (c.padded_vocab_size,), decay=False))
    return specs


def head(config: MambaConfig) -> tuple[str, str | None]:
    """Names of the head's weight and of its bias, if it has one."""
    weight = EMBEDDING if config.tie_embeddings else "lm_head.weight"
    return weight, "lm_head.bias" if config.lm_head_bias else None


def state_grows(config: MambaConfig) -> bool:
    """Whether some layer's state needs room for every token: only attention's does."""
    return any(layer.type == "attention" for layer in config.schedule)


def carried_state(
    plan: Plan, config: MambaConfig, batch: int, capacity: int = 0, prefix: str = "state"
) -> list[Any]:
    """Persistent state of every layer: for generation, or carried on where the plan trains.

    capacity   tokens for which a state that grows has room
    prefix     of the tensors' names, by which plans share them: what asks for the state

    Raises ConfigError where the plan trains, and a layer's state is for generation only.
    """
    return [
        layer_type(layer.type).layer_state(plan, layer.config, batch, i, capacity, prefix)
        for i, layer in enumerate(config.schedule)
    ]


def _layer(
    plan: Plan, layer: Layer, h: Tensor, i: int, state: Any, documents: Tensor | None
) -> Tensor:
    with plan.scope(f"layers.{i}"):
        if i % 2 == 0:  # one dispatch for two layers
            plan.tape(lambda: sum_partials(plan))
        h = layer_type(layer.type).block(plan, layer.config, h, layer.owner, state, documents)
        return h if layer.config.mlp == "none" else mlp(plan, layer.config, h, layer.owner)


def backbone(
    plan: Plan,
    config: MambaConfig,
    tokens: Tensor,
    state: Sequence[Any] | None = None,
    documents: Tensor | None = None,
    activation_checkpointing: bool = False,
) -> Tensor:
    """Plan the model up to its final norm; mirrors mamba_ssm's `MixerModel`.

    tokens      (batch, seqlen) u32, below the vocabulary's size
    documents   (batch, seqlen) u32, ids that do not decrease along a row: nothing passes from one
                document to the next. A state belongs to document 0. None: each row is one
    returns     (batch, seqlen, d_model) f32
    """
    plan.tape(lambda: sum_partials(plan))
    h = embedding(plan, tokens, EMBEDDING)
    for i, layer in enumerate(config.schedule):

        def planned(h: Tensor, i: int = i, layer: Layer = layer) -> Tensor:
            return _layer(plan, layer, h, i, state[i] if state else None, documents)

        h = plan.checkpoint(planned, h) if activation_checkpointing else planned(h)
    plan.tape(lambda: sum_partials(plan))
    return rms_norm(plan, h, plan.param("backbone.norm_f.weight"), config.norm_eps, name="norm_f")
