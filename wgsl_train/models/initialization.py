"""Initial weights, on the host: the same bits for one seed on every device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..config import MambaConfig
from .language_model import parameters

Array = np.ndarray[Any, Any]


def initialize(config: MambaConfig, seed: int) -> Iterator[tuple[str, Array]]:
    """(name, float32 array) of every parameter.

    "official" is Hugging Face's `MambaForCausalLM` and `Mamba2ForCausalLM` (mamba_ssm's, but for
    the convolution's bias, which is zero, and Mamba-2's A_log); "memory_engine" is the browser
    engine's. Each parameter draws from a generator of its own, seeded by `seed` and its name, so
    that adding one changes no other.
    """
    draw = _memory_engine if config.init == "memory_engine" else _official
    for spec in parameters(config):
        rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(spec.name.encode())]))
        yield spec.name, draw(config, spec.name, spec.shape, rng).astype(np.float32)


def _common(name: str, shape: tuple[int, ...]) -> Array | None:
    if name.endswith(".A_log"):
        return np.broadcast_to(np.log(np.arange(1, shape[-1] + 1)), shape)
    if name.endswith((".D", "norm.weight", "norm2.weight", "norm_f.weight")):
        return np.ones(shape)
    return None


def _official(
    config: MambaConfig, name: str, shape: tuple[int, ...], rng: np.random.Generator
) -> Array:
    c = config
    if (fixed := _common(name, shape)) is not None:
        return fixed
    if name.endswith(("dt_proj.bias", "dt_bias")):
        low, high = math.log(c.time_step_min), math.log(c.time_step_max)
        dt = np.maximum(np.exp(rng.uniform(low, high, shape)), c.time_step_floor)
        return dt + np.log(-np.expm1(-dt))  # inverse of softplus
    if name.endswith(".bias"):
        return np.zeros(shape)
    if name.endswith(("embeddings.weight", "lm_head.weight")):
        return rng.normal(0, c.initializer_range, shape)
    if name.endswith("dt_proj.weight"):
        bound = shape[1] ** -0.5 * c.time_step_scale
        return rng.uniform(-bound, bound, shape)
    bound = math.prod(shape[1:]) ** -0.5
    weight = rng.uniform(-bound, bound, shape)
    if name.endswith(("out_proj.weight", "fc2.weight")) and c.rescale_prenorm_residual:
        weight /= math.sqrt(sum(1 + (layer.config.mlp != "none") for layer in c.schedule))
    return weight


def _memory_engine(
    config: MambaConfig, name: str, shape: tuple[int, ...], rng: np.random.Generator
) -> Array:
    if (fixed := _common(name, shape)) is not None:
        return fixed
    if name.endswith("bias"):
        return np.zeros(shape)
    if name.endswith(("embeddings.weight", "lm_head.weight")):
        return rng.normal(0, config.d_model**-0.5, shape)
    std = 0.01 if name.endswith(("conv1d.weight", "x_proj.weight")) else 0.02
    return rng.normal(0, std, shape)
