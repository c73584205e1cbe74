"""Low-rank adapters (LoRA): the parameters they add to a model, and PEFT's form of them on disk.

A weight W (rows, columns) becomes W + alpha / rank * B A, with A (rank, columns) and B (rows, rank).
Only A and B train. Source: Hu et al. 2021, arXiv:2106.09685.

A module is what PEFT calls so: a weight's name without ".weight". A_log, a parameter that belongs
to no module of its own, is treated as one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import checkpoint
from ..config import LORA_TARGETS, LoraBase, MambaConfig, TrainConfig
from ..errors import CheckpointError, ConfigError
from ..kernel import DType
from ..plan import LowRank, ParamSpec
from .language_model import EMBEDDING, parameters

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of PEFT's tensor names

Array = np.ndarray[Any, Any]

STORED: dict[LoraBase, DType] = {"f16": "f16", "int8": "i8"}

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
        """The adapter that a training configuration asks for.

        Raises ConfigError, listing the model's own targets, where it has one of other names.
        """
        modules = _modules(model)
        targets = dict.fromkeys(map(_kind, modules))
        default = train.lora_targets == LORA_TARGETS  # which are those of them that it has
        for target in train.lora_targets:
            if target not in targets and not default:
                hint = "; the head is tied to the embeddings" if target == "lm_head" else ""
                raise ConfigError(
                    f"TrainConfig.lora_targets is {target!r}; allowed for this model: "
                    f"{', '.join(targets)}{hint}"
                )
        ranks = {
            module: min(train.lora_rank, *matrix)
            for module, matrix in modules.items()
            if _kind(module) in train.lora_targets
        }
        if not ranks:
            raise ConfigError(
                f"no adapter by default; set lora_targets to some of {', '.join(targets)}"
            )
        return cls(train.lora_rank, train.lora_alpha, ranks)

    @staticmethod
    def check_base(adapter: Lora | None, base: LoraBase) -> None:
        """Raises ConfigError where matrices are stored as they do not train, without an adapter."""
        if adapter is None and base != "f32":
            raise ConfigError(
                f"lora_base is {base!r}, the storage of frozen weights under an adapter, and there "
                "is none: set lora_rank, or lora_base to 'f32'"
            )

    def summary(self, model: MambaConfig) -> str:
        """How much of a model it changes: "24 of 24 layers, embeddings"."""
        owners = {int(m[1]) for name in self.ranks if (m := re.search(r"\.layers\.(\d+)\.", name))}
        layers = sum(layer.owner in owners for layer in model.schedule)
        others = [_kind(name) for name in self.ranks if ".layers." not in name]
        return ", ".join([f"{layers} of {model.n_layer} layers", *others])

    def low_rank(self) -> dict[str, LowRank]:
        """What is added to weights, by their names."""
        return {
            module if _kind(module) == "A_log" else f"{module}.weight": LowRank(
                *_names(module), self.alpha / rank
            )
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
        kinds = dict.fromkeys(map(_kind, self.ranks))
        whole = {m for m in _modules(model) if _kind(m) in kinds} == self.ranks.keys()
        chosen = sorted(kinds if whole else self.ranks)
        config: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": [name for name in chosen if _kind(name) != "A_log"],
            "rank_pattern": {m: rank for m, rank in self.ranks.items() if rank != self.rank},
            "lora_dropout": 0.0,
            "inference_mode": True,
            "init_lora_weights": True,
            **_UNKNOWN,
        }
        if "A_log" in kinds:  # by the end of its name, as PEFT looks for parameters
            config["target_parameters"] = (
                ["mixer.A_log"] if whole else [name for name in chosen if _kind(name) == "A_log"]
            )
        if "embeddings" in kinds and model.tie_embeddings:
            # PEFT ties the two where it meets a name that it knows; Mamba's table has another
            config["target_modules"].append("lm_head")
            config["ensure_weight_tying"] = True
        tensors = {
            theirs: weights[ours].T if turned else weights[ours]
            for ours, (theirs, turned) in _peft_names(self.ranks).items()
        }
        checkpoint.save_tensors(folder / WEIGHTS, tensors)
        checkpoint.write_json(folder / CONFIG, config)


def _kind(module: str) -> str:
    """What a configuration calls a module: the last part of its name."""
    return module.rpartition(".")[2]


def _modules(model: MambaConfig) -> dict[str, tuple[int, int]]:
    """By module that can have an adapter: (rows, columns) of its weight as a matrix."""
    return {
        spec.name.removesuffix(".weight"): (spec.shape[0], spec.shape[-1])
        for spec in parameters(model)
        if len(spec.shape) == 2 or spec.name.endswith(".conv1d.weight")
    }


def _names(module: str) -> tuple[str, str]:
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _peft_names(modules: Mapping[str, int]) -> dict[str, tuple[str, bool]]:
    """By the names of A and B, PEFT's, and whether PEFT's tensor is the transpose.

    PEFT's two tensors of an embedding are those of its transpose. The adapter of a parameter is
    that of the module it is in, whose other modules then move below a base_layer.
    """
    wrapped = {m.removesuffix(".A_log") for m in modules if _kind(m) == "A_log"}
    names = dict[str, tuple[str, bool]]()
    for module in modules:
        a, b = _names(module)
        owner, _, kind = module.rpartition(".")
        if kind == "embeddings":
            stem = f"{_PREFIX}{module}.lora_embedding_"
            names |= {a: (f"{stem}B", True), b: (f"{stem}A", True)}
            continue
        if kind == "A_log":
            place = owner
        else:
            place = f"{owner}.base_layer.{kind}" if owner in wrapped else module
        theirs = _names(f"{_PREFIX}{place}")
        names |= {a: (theirs[0], False), b: (theirs[1], False)}
    return names


def adapted(model: MambaConfig, adapter: Lora | None, base: LoraBase = "f32") -> list[ParamSpec]:
    """The parameters of a model, and with an adapter its own, which alone train.

    base   how the matrices that products or lookups read are stored; those that are not f32 are
           frozen, adapter or not
    """
    specs = parameters(model)
    if base != "f32":
        specs = [
            replace(spec, trainable=False, dtype=STORED[base])
            if len(spec.shape) == 2 and spec.name.endswith(".weight")
            else spec
            for spec in specs
        ]
    if adapter is None:
        return specs
    return [replace(spec, trainable=False) for spec in specs] + adapter.parameters(model)


def is_in(folder: Path) -> bool:
    """Whether a folder holds an adapter. Raises CheckpointError where it holds half of one."""
    described, stored = (folder / CONFIG).exists(), (folder / WEIGHTS).exists()
    if stored and not described:
        raise CheckpointError(f"{folder}: holds {WEIGHTS}, but no {CONFIG}")
    return described


def remove(folder: Path) -> None:
    """Remove the adapter that a folder may hold. Raises CheckpointError where that is refused."""
    for name in (CONFIG, WEIGHTS):
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{folder / name}: cannot be removed, and would be added to the model: "
                f"{error.strerror}"
            ) from None


def load(
    path: str | Path,
    model: MambaConfig,
    is_base: Callable[[str, Array], bool] = lambda name, array: True,
) -> tuple[Lora, dict[str, Array]]:
    """An adapter in PEFT's form, and its weights by name, float32.

    is_base   whether the base model's weight of this name equals an array, up to rounding: PEFT
              may save that of embeddings or head with their adapter

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
    if not isinstance(patterns, dict):
        raise refuse(f"rank_pattern is {patterns!r}; an object is needed")
    modules, ranks, found = _modules(model), dict[str, int](), dict(tensors.shapes)
    for name, shape in tensors.shapes.items():
        if (base := re.fullmatch(re.escape(_PREFIX) + r"(.+)\.base_layer\.weight", name)) and (
            f"{base[1]}.weight" in (EMBEDDING, "lm_head.weight")
        ):
            if not is_base(f"{base[1]}.weight", tensors[name]):
                raise CheckpointError(f"{folder / WEIGHTS}: {name} is not that of this base model")
            del found[name]
            continue
        match = re.fullmatch(
            re.escape(_PREFIX) + r"(.+)\.lora_(?:([AB])\.weight|embedding_([AB]))", name
        )
        module = match[1].replace(".base_layer", "") if match else ""
        module = module if module in modules else f"{module}.A_log"
        if not match or module not in modules or len(shape) != 2:
            targets = ", ".join(dict.fromkeys(map(_kind, modules)))
            raise CheckpointError(
                f"{folder / WEIGHTS}: {name} {shape} is no adapter of this model, which has layers "
                f"0 to {model.n_layer - 1} with {targets}"
            )
        if "A" in (match[2], match[3]):
            ranks[module] = shape[0]
            if shape[0] != rank and shape[0] not in patterns.values():
                raise refuse(f"r is {rank}, but {name} is {shape}")
    ranks = {module: ranks[module] for module in modules if module in ranks}
    if not ranks:
        raise CheckpointError(f"{folder / WEIGHTS}: holds no adapter")
    tying = config.get("ensure_weight_tying") and "lm_head" in (config.get("target_modules") or ())
    if model.tie_embeddings and EMBEDDING.removesuffix(".weight") in ranks and not tying:
        raise refuse(
            "PEFT applied this adapter to the embeddings and not to the head, which are one table "
            "here; it ties them where target_modules has lm_head too and ensure_weight_tying is set"
        )
    lora = Lora(int(rank), float(alpha), ranks, config.get("base_model_name_or_path"))
    names, expected = _peft_names(ranks), dict[str, tuple[int, ...]]()
    for spec in lora.parameters(model):
        theirs, turned = names[spec.name]
        expected[theirs] = spec.shape[::-1] if turned else spec.shape
    checkpoint.check_names(expected, found, folder / WEIGHTS)
    weights = {
        ours: tensors[theirs].T if turned else tensors[theirs]
        for ours, (theirs, turned) in names.items()
    }
    return lora, weights
