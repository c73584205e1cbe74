"""Low-rank adapters (LoRA): the parameters they add to a model, and PEFT's form of them on disk.

A weight W (rows, columns) becomes W + alpha / rank * B A, with A (rank, columns) and B (rows, rank).
Only A and B train. Source: Hu et al. 2021, arXiv:2106.09685.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import checkpoint
from ..config import LORA_TARGETS, MambaConfig, TrainConfig
from ..errors import CheckpointError
from ..plan import LowRank, ParamSpec
from .language_model import parameters

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of PEFT's tensor names

Array = np.ndarray[Any, Any]

# What PEFT can do with an adapter and this package cannot, and the values that ask for nothing
_UNKNOWN = {
    "alpha_pattern": {},
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
}


@dataclass(frozen=True)
class Lora:
    """An adapter: which modules it changes, and how much.

    rank    as asked for
    alpha   the scale of a module is alpha over its rank in use
    ranks   by module's name, rank in use: no larger than the module's rows and columns
    base    where the base model came from, for PEFT
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    base: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, model: MambaConfig, train: TrainConfig) -> Lora:
        """The adapter that a training configuration asks for."""
        ranks = {
            module: min(train.lora_rank, *shape)
            for module, shape in _modules(model).items()
            if module.rpartition(".")[2] in train.lora_targets
        }
        return cls(train.lora_rank, train.lora_alpha, ranks)

    @property
    def layers(self) -> int:
        """How many layers it changes."""
        return len({module.partition(".mixer.")[0] for module in self.ranks})

    def low_rank(self) -> dict[str, LowRank]:
        """What is added to weights, by their names."""
        return {
            f"{module}.weight": LowRank(*_names(module), self.alpha / rank)
            for module, rank in self.ranks.items()
        }

    def parameters(self, model: MambaConfig) -> list[ParamSpec]:
        """A and B of each module, which train."""
        modules, specs = _modules(model), list[ParamSpec]()
        for module, rank in self.ranks.items():
            rows, columns = modules[module]
            a, b = _names(module)
            specs += [ParamSpec(a, (rank, columns)), ParamSpec(b, (rows, rank))]
        return specs

    def initialize(self, model: MambaConfig, seed: int) -> Iterator[tuple[str, Array]]:
        """(name, float32 array): A from N(0, 1 / columns), each drawn by itself; B zero."""
        for spec in self.parameters(model):
            array = np.zeros(spec.shape, np.float32)
            if spec.name.endswith("lora_A.weight"):
                rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(spec.name.encode())]))
                array = rng.normal(0, spec.shape[1] ** -0.5, spec.shape).astype(np.float32)
            yield spec.name, array

    def save(self, folder: Path, model: MambaConfig, weights: Mapping[str, Array]) -> None:
        """Write adapter_config.json and adapter_model.safetensors into a folder that exists."""
        kinds = {module.rpartition(".")[2] for module in self.ranks}
        whole = {m for m in _modules(model) if m.rpartition(".")[2] in kinds}
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": sorted(kinds if whole == self.ranks.keys() else self.ranks),
            "rank_pattern": {m: rank for m, rank in self.ranks.items() if rank != self.rank},
            "lora_dropout": 0.0,
            "inference_mode": True,
            "init_lora_weights": True,
            **_UNKNOWN,
        }
        checkpoint.save_tensors(
            folder / WEIGHTS, {_PREFIX + name: array for name, array in weights.items()}
        )
        checkpoint.write_json(folder / CONFIG, config)


def _modules(model: MambaConfig) -> dict[str, tuple[int, ...]]:
    """(rows, columns) of each module that can have an adapter, by name."""
    suffixes = tuple(f".{target}.weight" for target in LORA_TARGETS)
    return {
        spec.name.removesuffix(".weight"): spec.shape
        for spec in parameters(model)
        if spec.name.endswith(suffixes)
    }


def _names(module: str) -> tuple[str, str]:
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def adapted(model: MambaConfig, lora: Lora) -> list[ParamSpec]:
    """The parameters of a model with an adapter: only the adapter's train."""
    frozen = [replace(spec, trainable=False) for spec in parameters(model)]
    return frozen + lora.parameters(model)


def load(path: str | Path, model: MambaConfig) -> tuple[Lora, dict[str, Array]]:
    """An adapter in PEFT's form, and its weights by name, float32.

    Raises CheckpointError where it is damaged, does not fit the model, or asks for what this
    package does not compute.
    """
    folder = Path(path)
    config = checkpoint.read_json(folder / CONFIG)
    tensors = checkpoint.load_tensors(folder / WEIGHTS)

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{folder / CONFIG}: {what}")

    if config.get("peft_type") != "LORA":
        raise refuse(f"peft_type is {config.get('peft_type')!r}; only 'LORA' is known")
    for key, plain in _UNKNOWN.items():
        if config.get(key) and config[key] != plain:
            raise refuse(f"{key} is {config[key]!r}; only {plain!r} is known")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    for key, value in (("r", rank), ("lora_alpha", alpha)):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise refuse(f"{key} is {value!r}; a positive number is needed")
    assert isinstance(rank, (int, float))
    assert isinstance(alpha, (int, float))
    patterns = config.get("rank_pattern") or {}
    modules, ranks = _modules(model), dict[str, int]()
    for name, shape in tensors.shapes.items():
        match = re.fullmatch(re.escape(_PREFIX) + r"(.+)\.lora_[AB]\.weight", name)
        if not match or match[1] not in modules or len(shape) != 2:
            raise CheckpointError(
                f"{folder / WEIGHTS}: {name} {shape} is no adapter of this model, which has layers "
                f"0 to {model.n_layer - 1} with {', '.join(LORA_TARGETS)}"
            )
        if "lora_A" in name:
            ranks[match[1]] = shape[0]
            if shape[0] != rank and shape[0] not in patterns.values():
                raise refuse(f"r is {rank}, but {name} is {shape}")
    ranks = {module: ranks[module] for module in modules if module in ranks}
    lora = Lora(int(rank), float(alpha), ranks, config.get("base_model_name_or_path"))
    expected = {_PREFIX + spec.name: spec.shape for spec in lora.parameters(model)}
    checkpoint.check_names(expected, tensors.shapes, folder / WEIGHTS)
    if not ranks:
        raise CheckpointError(f"{folder / WEIGHTS}: holds no tensor")
    return lora, {name.removeprefix(_PREFIX): tensors[name] for name in expected}
