"""Model: parameters on a device, and what can be asked of them."""

from __future__ import annotations

import copy
import functools
import math
import numbers
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import checkpoint
from .config import LoraBase, MambaConfig, Precision, TrainConfig
from .data import IGNORED, document_ids, target_ids, token_ids
from .device import Device, request_device, with_target
from .encoder import Buffers, Encoder
from .errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeviceError,
    TrainingError,
    WgslTrainError,
)
from .kernel import Tensor, Values
from .models import language_model, lora
from .models.initialization import initialize
from .ops.carry import Carried
from .ops.cross_entropy import head_logits, language_model_loss
from .ops.mean_pool import mean_pool
from .ops.optimizer import LOSS_SCALE, Optimizer, optimizer
from .plan import Layout, Plan
from .quantize import dequantize, quantize

Array = np.ndarray[Any, Any]

_BASE = "wgsl_train.lora_base"  # key of a weights file's metadata: its matrices are such values
_PREFILL = 64  # tokens of a prompt taken in one submit; the rest go one by one
_CAPACITY = 256  # tokens that a state has room for at first, where it grows


@dataclass(frozen=True)
class StepPlan:
    """A plan of one batch shape, and the tensors the host writes and reads.

    row_loss, row_rank   see `language_model_loss`; kept for the host where the plan does not train
    """

    plan: Plan
    tokens: Tensor
    targets: Tensor
    documents: Tensor | None
    batch_scale: Tensor
    loss: Tensor
    row_loss: Tensor
    row_rank: Tensor | None
    optimizer: Optimizer | None
    states: dict[str, Carried]


@dataclass(frozen=True)
class Chunk:
    """What a chunk of a longer sequence gives; see `Model.loss_and_grads_from`.

    loss          mean in nats over the targets that count
    grads         its gradient by every trainable parameter
    state         what each layer carries on, by name: "0.conv" (batch, d_conv - 1, channels), the
                  convolution's last inputs, and "0.ssm", the state h: of Mamba-1
                  (batch, ceil(d_state / 4), d_inner, 4), of Mamba-2
                  (batch, n_heads, d_state, head_dim)
    state_grads   by the state that the chunk began with; empty where it is detached
    """

    loss: float
    grads: dict[str, Array]
    state: dict[str, Array]
    state_grads: dict[str, Array]


@dataclass(frozen=True)
class Scores:
    """How well each target of a batch was foreseen; both (batch, seqlen).

    loss   in nats; 0 where the target is ignored
    rank   how many tokens were held likelier: 0 where it was the likeliest; -1 where it is ignored
    """

    loss: Array
    rank: Array


@dataclass(frozen=True)
class _Step:
    """A compiled `StepPlan`."""

    encoder: Encoder
    tensors: StepPlan


@dataclass(frozen=True)
class _Forward:
    """A compiled forward pass: `out` is the logits, in chunks of rows."""

    encoder: Encoder
    tokens: Tensor
    documents: Tensor | None
    out: list[Tensor]


@dataclass(frozen=True)
class _Embedder:
    """A compiled pass to one vector a sequence, the mean of what is counted."""

    encoder: Encoder
    tokens: Tensor
    documents: Tensor | None
    counted: Tensor | None
    out: Tensor


@dataclass(frozen=True)
class Rows:
    """Checked tokens (batch, seqlen), which documents they are of, and which are no padding."""

    ids: Array
    documents: Array | None
    real: Array | None

    def targets(self, wanted: Array) -> Array:
        """The targets without those of padding."""
        return wanted if self.real is None else np.where(self.real, wanted, np.uint32(IGNORED))


@dataclass(frozen=True)
class _Merged:
    """What it takes to undo a merge: the adapter, its weights, the weights it changed, and how
    these were stored."""

    adapter: lora.Lora
    added: Mapping[str, Array]
    before: Mapping[str, Array]
    base: LoraBase


def plan_step(
    config: MambaConfig,
    layout: Layout,
    target: Any,
    batch: int,
    seqlen: int,
    *,
    training: bool = True,
    update: bool = False,
    documents: bool = False,
    activation_checkpointing: bool = False,
    precision: Precision = "f32",
    carried: str = "",
    chained: bool = False,
) -> StepPlan:
    """Plan one step on `batch` sequences of `seqlen` tokens. Touches no GPU.

    training    plan the backward pass too
    update      plan gradient norm, clip and AdamW too
    documents   let rows hold several documents, of which no one sees another
    carried     start from the state of this name, which says what asks for it, and leave it brought
                up to date; "": from zeros
    chained     make the gradient by that state, given the one by the state that is left
    precision   storage of activations, where the plan trains; where they are f16 and it updates,
                the gradients are multiplied by the optimizer's loss scale

    Raises DeviceError where the target has no f16.
    """
    plan = Plan(layout, target, training, precision if training else "f32")
    tokens = _rows(plan, "tokens", batch, seqlen)
    targets = _rows(plan, "targets", batch, seqlen)
    ids = _rows(plan, "documents", batch, seqlen) if documents else None
    batch_scale = plan.persistent("batch_scale", (1,))
    loss = plan.persistent("loss", (1,))
    plan.clear_first.append(loss)
    states = language_model.carried_state(plan, config, batch, prefix=carried) if carried else None
    if states and chained:
        states = [state.chained(plan) for state in states]
    x = language_model.backbone(
        plan,
        config,
        tokens,
        states,
        ids,
        activation_checkpointing=activation_checkpointing and training,
    )
    weight, bias = language_model.head(config)
    loss_scale = None
    if precision == "f16" and update:
        loss_scale = plan.persistent("loss_scale", (len(LOSS_SCALE),))
    row_loss, row_rank = language_model_loss(
        plan, x, targets, batch_scale, loss, weight, bias, loss_scale
    )
    if row_rank:
        plan.keep += [row_loss, row_rank]
    if training:
        plan.backward()
    planned = optimizer(plan, loss_scale=loss_scale) if update else None
    plan.prune()
    plan.check_adapters()
    return StepPlan(
        plan,
        tokens,
        targets,
        ids,
        batch_scale,
        loss,
        row_loss,
        row_rank,
        planned,
        _by_name(states or []),
    )


def _rows(plan: Plan, what: str, batch: int, seqlen: int) -> Tensor:
    """A persistent u32 for each position, which plans of this shape share and the host writes."""
    return plan.persistent(f"{what}.{batch}x{seqlen}", (batch, seqlen), "u32")


def _by_name(states: Sequence[Any]) -> dict[str, Carried]:
    """What layers carry, as "0.conv", "0.ssm", …"""
    return {
        f"{i}.{field.name}": value
        for i, state in enumerate(states)
        for field in fields(state)
        if (value := getattr(state, field.name))
    }


def find_checkpoint(path: str | Path) -> Path:
    """The folder to load from: the one given, or the newest whole checkpoint of a run's folder."""
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if not (folder / checkpoint.CONFIG).exists() and checkpoint.checkpoints(folder):
        newest = checkpoint.latest(folder)
        if newest is None:
            raise CheckpointError(f"{folder}: none of its checkpoints is whole")
        return newest
    if (folder / checkpoint.CONFIG).exists() and checkpoint.checkpoints(folder):
        warnings.warn(
            f"{folder} holds a model, which is taken, and checkpoints; name one of these to have it",
            stacklevel=2,
        )
    return folder


def read_config(folder: Path) -> MambaConfig:
    """The model that a folder's config.json describes. Raises CheckpointError or ConfigError,
    naming the folder."""
    values = checkpoint.read_json(folder / checkpoint.CONFIG)
    try:
        return MambaConfig.from_hugging_face(values)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None


def saved_base(folder: Path) -> LoraBase:
    """How the matrices were stored on the device when this folder was saved."""
    return _base(checkpoint.load_tensors(folder))


def _base(tensors: checkpoint.Tensors) -> LoraBase:
    known = tensors.metadata.get(_BASE)
    return known if known in lora.STORED else "f32"


def _shapes(state: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: np.shape(array) for name, array in state.items()}


def _check_real(
    state: Mapping[str, Array], where: str, error: type[WgslTrainError] = CheckpointError
) -> None:
    """Raises an error that names the first tensor which holds no real numbers."""
    for name, array in state.items():
        dtype = np.asarray(array).dtype
        if not np.can_cast(dtype, np.float32, "same_kind"):
            raise error(f"{where}: {name} holds {dtype}; allowed: real numbers")


def _stored(
    layout: Layout, name: str, array: Array, of: Callable[[Tensor], Tensor] = lambda t: t
) -> Iterator[tuple[Tensor, Array]]:
    """What a parameter's array is in the tensors that hold it, narrower where these are.

    of   what is written in a piece's place: its moments, say

    Raises CheckpointError where a value does not fit.
    """
    for first, piece in layout.pieces[name]:
        rows, tensor = array[first : first + piece.shape[0]], of(piece)
        if tensor.dtype != "f32":
            rows, factors = quantize(rows, tensor.dtype, name)
            if factors is not None:
                yield layout.scales[piece], factors
        yield tensor, rows


class Model:
    """A Mamba language model whose parameters live on a device.

    Parameters
    ----------
    config   what model
    device   an open device; by default the best one of this machine
    seed     of the initial weights

    Raises DeviceError where the device cannot hold it, ConfigError for a negative seed.
    """

    def __init__(self, config: MambaConfig, device: Device | None = None, seed: int = 0) -> None:
        if seed < 0:
            raise ConfigError(f"seed is {seed}, must be 0 or more")
        self._setup(config, device)
        for name, array in initialize(config, seed):
            self._write(name, array)

    def _setup(
        self, config: MambaConfig, device: Device | None, lora_base: LoraBase = "f32"
    ) -> None:
        self.config = config
        self.lora_base: LoraBase = lora_base  # how the matrices under an adapter are stored
        self.device = device or request_device()
        self.buffers = Buffers(self.device)
        self.adapter: lora.Lora | None = None
        self.source: str | None = None  # where it was loaded from
        self._merged: _Merged | None = None
        self.trainer: weakref.ref[Any] | None = None  # who is told before parameters move
        self._turn = 0  # grows with each stream, which alone may use the carried state, and layout
        self._lay_out(self._layout(self.adapter, self.lora_base))

    def _layout(self, adapter: lora.Lora | None, lora_base: LoraBase) -> Layout:
        """Places for the model's parameters and an adapter's, before it is chosen which train."""
        specs = lora.adapted(self.config, adapter, lora_base)
        return Layout(specs, self.device.target, adapter.low_rank() if adapter else {})

    def _lay_out(self, layout: Layout) -> None:
        """Use these places; whatever was compiled for others is forgotten."""
        self.layout = layout
        self._turn += 1
        self._steps: dict[tuple[Any, ...], _Step] = {}
        self._embedders: dict[tuple[Any, ...], _Embedder] = {}
        self._forwards: dict[tuple[Any, ...], _Forward] = {}
        self._decoders: dict[tuple[int, int], tuple[Encoder, Tensor, Tensor | None]] = {}
        self._capacity = _CAPACITY

    @property
    def encoders(self) -> list[Encoder]:
        """All that was compiled so far; what trains comes first."""
        steps = [step.encoder for step in self._steps.values()]
        passes = [p.encoder for p in self._forwards.values()]
        passes += [p.encoder for p in self._embedders.values()]
        decoders = [encoder for encoder, *_ in self._decoders.values()]
        return sorted([*steps, *passes, *decoders], key=lambda e: not e.plan.training)

    def __repr__(self) -> str:
        return f"Model({self.config}, {self.n_params:,} parameters on {self.device})"

    @property
    def n_params(self) -> int:
        """Number of parameters."""
        return self.layout.n_params

    def set_trainable(self, names: Collection[str], shard: tuple[int, int] | None = None) -> None:
        """Train only the parameters of these names: the others get no gradient and no moments.

        shard   (index, count): update only every count-th of them, from index on

        Weights stay bit for bit; gradients and moments are forgotten. Raises ConfigError where
        nothing would train.
        """
        specs = [replace(s, trainable=s.name in names) for s in self.layout.specs.values()]
        if not any(s.trainable for s in specs):
            raise ConfigError("no parameter would train")
        if specs != list(self.layout.specs.values()) or shard != self.layout.shard:
            low_rank = self.adapter.low_rank() if self.adapter else {}
            layout = Layout(specs, self.device.target, low_rank, shard)
            self._move(layout, self.adapter, self.lora_base)

    def _move(
        self,
        layout: Layout,
        adapter: lora.Lora | None,
        lora_base: LoraBase,
        changed: Mapping[str, Array] | None = None,
    ) -> None:
        """Place the parameters anew; but for those changed, the ones that were there stay.

        Nothing changes where a weight cannot be stored so, or the device has no room. Raises
        CheckpointError, DeviceError.
        """
        before = {name: self._read(name) for name in self.layout.specs}
        own = copy.copy(self.layout), self.adapter, self.lora_base
        weights = {n: a for n, a in before.items() if n in layout.specs} | dict(changed or {})
        stored = [pair for n, array in weights.items() for pair in _stored(layout, n, array)]
        if self.trainer and (trainer := self.trainer()):
            trainer.hold()
        try:
            self._place(layout, adapter, lora_base, stored)
        except DeviceError:
            pairs = [pair for n, array in before.items() for pair in _stored(own[0], n, array)]
            self._place(*own, pairs)
            raise

    def _place(
        self,
        layout: Layout,
        adapter: lora.Lora | None,
        lora_base: LoraBase,
        stored: Iterable[tuple[Tensor, Array]],
    ) -> None:
        """Have these parameters and no others on the device."""
        self.buffers.free()
        self.adapter, self.lora_base = adapter, lora_base
        self._lay_out(layout)
        for tensor, rows in stored:
            self.buffers.write(tensor, rows)

    def _adapt(
        self, adapter: lora.Lora | None, lora_base: LoraBase, changed: Mapping[str, Array]
    ) -> None:
        """Take this adapter, this storage of what is under it, and these weights."""
        self._move(self._layout(adapter, lora_base), adapter, lora_base, changed)

    def use_tuning(self, tuned: Mapping[str, Values]) -> None:
        """Run kernels by these choices, as `Target.tuned` has them, from now on."""
        if tuned != self.device.target.tuned:
            self.device = self.buffers.device = with_target(self.device, tuned=tuned)
            self._drop_states()
            self._lay_out(self.layout)

    # -- weights -----------------------------------------------------------------------------

    def _write(self, name: str, array: Array, of: Callable[[Tensor], Tensor] = lambda t: t) -> None:
        for tensor, rows in _stored(self.layout, name, array, of):
            self.buffers.write(tensor, rows)

    def _write_all(self, state: Mapping[str, Array]) -> None:
        """Write parameters: none, where one cannot be stored as it is here. Raises CheckpointError."""
        names: dict[bool, list[str]] = {True: [], False: []}  # by whether they are stored as f32
        for name in state:
            names[self.layout.specs[name].dtype == "f32"].append(name)
        narrow = [
            pair
            for name in names[False]
            for pair in _stored(self.layout, name, np.asarray(state[name], np.float32))
        ]
        for tensor, rows in narrow:
            self.buffers.write(tensor, rows)
        for name in names[True]:  # which cannot fail, and are read one at a time
            self._write(name, np.asarray(state[name], np.float32))

    def _read(self, name: str, of: Callable[[Tensor], Tensor] = lambda t: t) -> Array:
        pieces = []
        for _, piece in self.layout.pieces[name]:
            factors = self.layout.scales.get(of(piece))
            stored = self.buffers.read(of(piece))
            pieces.append(dequantize(stored, self.buffers.read(factors) if factors else None))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def state_dict(self) -> dict[str, Array]:
        """Copies of all parameters but an adapter's, float32, by Hugging Face's names."""
        return {name: self._read(name) for name in self._shapes}

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters but an adapter's."""
        return {spec.name: spec.shape for spec in language_model.parameters(self.config)}

    def load_state_dict(self, state: Mapping[str, Array], where: str = "the state") -> None:
        """Replace all parameters but an adapter's. Nothing is written unless every name and shape fits.

        Raises CheckpointError naming missing, extra and mis-shaped tensors, one that holds no real
        numbers, and a value that the model's lora_base cannot hold.
        """
        if isinstance(state, checkpoint.Tensors):  # of which none is read before all fit
            checkpoint.check_names(self._shapes, state.shapes, where)
            for name, entry in state.entries.items():
                if "F" not in entry.dtype:
                    raise CheckpointError(f"{where}: {name} holds {entry.dtype}; allowed: floats")
        else:
            checkpoint.check_names(self._shapes, _shapes(state), where)
            _check_real(state, where)
        self._write_all(state)
        self._merged = None

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: Device | None = None, lora_base: LoraBase | None = None
    ) -> Model:
        """Load a folder with config.json and model.safetensors: ours, Hugging Face's, mamba_ssm's.

        An adapter that lies beside them is loaded too.
        A run's folder stands for its newest whole checkpoint. Raises CheckpointError or
        ConfigError naming what does not fit.

        lora_base   how matrices are stored on the device, as in TrainConfig; by default as they
                    were when the folder was saved
        """
        if lora_base not in (None, "f32", *lora.STORED):
            allowed = " or ".join(map(repr, ("f32", *lora.STORED)))
            raise ConfigError(f"lora_base is {lora_base!r}; allowed: {allowed}")
        folder = find_checkpoint(path)
        config = read_config(folder)
        tensors = checkpoint.model_tensors(folder, config.tie_embeddings)
        model = cls.__new__(cls)
        model._setup(config, device, lora_base or _base(tensors))
        model.load_state_dict(tensors, str(folder))
        model.source = str(path)
        if lora.is_in(folder):
            model.load_adapter(folder)
        return model

    def save_pretrained(self, path: str | Path) -> None:
        """Write config.json and model.safetensors, as `transformers` reads them.

        An adapter is written beside them, and not added to the weights: see `merge_adapter`.
        Matrices that are stored as f16 or int8 are written as float32, of the values that they
        have there: not those that were rounded once. The file's metadata say so.
        An adapter that lies there is removed where the model has none. Raises CheckpointError where
        a weight is not finite, the disk refuses, or the folder is a checkpoint of a trainer, whose
        state belongs to the weights that it holds.
        """
        folder = checkpoint.make_folder(path)
        if (folder / checkpoint.STATE).exists():
            raise CheckpointError(
                f"{folder} is a trainer's checkpoint, with a state that belongs to its weights; "
                "choose another folder"
            )
        checkpoint.write_json(folder / checkpoint.CONFIG, self.config.to_hugging_face())
        weights = ((name, self._read(name)) for name in self._shapes)  # one at a time
        metadata = {"format": "pt"} | ({_BASE: self.lora_base} if self.lora_base != "f32" else {})
        checkpoint.save_tensors(folder / checkpoint.WEIGHTS, weights, metadata, self._shapes)
        if self.adapter:
            self.save_adapter(folder)
        else:
            lora.remove(folder)

    # -- adapters ----------------------------------------------------------------------------

    def add_adapter(self, train: TrainConfig) -> None:
        """Add the low-rank adapter that a configuration asks for; it changes nothing yet, but for
        the rounding of a narrower lora_base.

        Raises ConfigError where the model has one already, CheckpointError where a weight does not
        fit that lora_base; the model then is unchanged.
        """
        if self.adapter:
            raise ConfigError("the model has an adapter: merge it before another one is added")
        adapter = replace(lora.Lora.of(self.config, train), base=self.source)
        base = train.lora_base or self.lora_base
        self._adapt(adapter, base, dict(adapter.initialize(self.config, train.seed)))

    def store_base(self, lora_base: LoraBase) -> None:
        """Store the matrices under an adapter in another way, as in TrainConfig.

        A narrower one rounds them; a wider one keeps the values that they have.
        Raises CheckpointError where one does not fit; the model then is unchanged.
        """
        if lora_base != self.lora_base:
            self._adapt(self.adapter, lora_base, {})

    def load_adapter(self, path: str | Path) -> None:
        """Load an adapter in PEFT's form, in place of the one that the model has.

        Raises CheckpointError where it does not fit the model, which then is unchanged.
        """
        adapter, weights = lora.load(path, self.config, self._resembles)
        if adapter == self.adapter:
            self._write_all(weights)
        else:
            self._adapt(adapter, self.lora_base, weights)

    def _resembles(self, name: str, array: Array) -> bool:
        """Whether a weight is this array, but for rounding to some narrower form."""
        own = self._read(name)
        if array.shape != own.shape:
            return False
        return bool(np.linalg.norm(own - array) <= 0.02 * np.linalg.norm(own))

    def save_adapter(self, path: str | Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors, as PEFT reads them.

        Raises ConfigError where there is no adapter, CheckpointError where the disk refuses.
        """
        adapter = self._own_adapter()
        folder = checkpoint.make_folder(path)
        adapter.save(folder, self.config, self.adapter_state())

    def adapter_state(self) -> dict[str, Array]:
        """Copies of the adapter's parameters, float32, by name; empty where there is none."""
        specs = self.adapter.parameters(self.config) if self.adapter else []
        return {spec.name: self._read(spec.name) for spec in specs}

    def _own_adapter(self) -> lora.Lora:
        if self.adapter is None:
            raise ConfigError("the model has no adapter")
        return self.adapter

    def merge_adapter(self) -> None:
        """Add the adapter to the weights: no work more than without one.

        All parameters can train then, and are stored as f32, in the values that the adapter was
        trained with. Raises ConfigError where there is no adapter.
        """
        adapter, added, base = self._own_adapter(), self.adapter_state(), self.lora_base
        low_rank = adapter.low_rank()
        before = {name: self._read(name) for name in low_rank}
        merged = dict[str, Array]()
        for name, low in low_rank.items():
            product = low.scale * (added[low.b].astype(np.float64) @ added[low.a])
            whole = before[name] + product.reshape(before[name].shape)
            merged[name] = whole.astype(np.float32)
        self._adapt(None, "f32", merged)
        self._merged = _Merged(adapter, added, before, base)

    def unmerge_adapter(self) -> None:
        """Take the adapter out again: weights and adapter are those before `merge_adapter`.

        Raises ConfigError where none is merged, or weights were loaded since.
        """
        if self._merged is None:
            raise ConfigError("no adapter is merged")
        merged = self._merged
        self._adapt(merged.adapter, merged.base, {**merged.added, **merged.before})
        self._merged = None

    # -- forward and backward ------------------------------------------------------------------

    def step_encoder(
        self, batch: int, seqlen: int, *, memory_budget: int | None = None, **options: Any
    ) -> _Step:
        """The compiled step for a batch shape; see `plan_step` for options. Made once.

        Raises DeviceError where the plan exceeds the budget (bytes).
        """
        key = (batch, seqlen, *sorted(options.items()))
        if key not in self._steps:
            planned = plan_step(
                self.config, self.layout, self.device.target, batch, seqlen, **options
            )
            planned.plan.memory().require(memory_budget)
            self._steps[key] = _Step(Encoder(self.buffers, planned.plan), planned)
        return self._steps[key]

    def check_tokens(self, tokens: npt.ArrayLike) -> Array:
        """(batch, seqlen) ids as uint32. Raises DataError for one outside the vocabulary."""
        array = np.atleast_2d(token_ids(tokens, self.config.vocab_size))
        if array.ndim != 2 or array.size == 0:
            raise DataError(f"tokens are {array.shape}, must be (batch, seqlen) and not empty")
        return array

    def check_targets(self, targets: npt.ArrayLike, shape: tuple[int, ...]) -> Array:
        """Targets as uint32, ignored ones (-100) as `IGNORED`. Raises DataError."""
        array = np.atleast_2d(target_ids(targets, self.config.vocab_size))
        if array.shape != shape:
            raise DataError(f"targets are {array.shape}, tokens are {shape}")
        return array

    def rows(
        self,
        tokens: npt.ArrayLike,
        documents: npt.ArrayLike | None,
        attention_mask: npt.ArrayLike | None,
    ) -> Rows:
        """What a caller gives, checked. Raises DataError."""
        ids = self.check_tokens(tokens)
        own = document_ids(documents, attention_mask, ids.shape)
        real = None if attention_mask is None else np.atleast_2d(np.asarray(attention_mask)) == 1
        return Rows(ids, own, real)

    def load_batch(
        self,
        step: _Step,
        tokens: Array,
        targets: Array,
        count: int,
        documents: Array | None = None,
    ) -> None:
        """Write a batch whose loss and gradients are divided by `count` targets."""
        buffers, t = self.buffers, step.tensors
        buffers.write(t.tokens, tokens)
        buffers.write(t.targets, targets)
        if t.documents and documents is not None:
            buffers.write(t.documents, documents)
        buffers.write(t.batch_scale, np.array([1 / max(1, count)], np.float32))

    def loss(
        self,
        tokens: npt.ArrayLike,
        targets: npt.ArrayLike,
        *,
        documents: npt.ArrayLike | None = None,
        attention_mask: npt.ArrayLike | None = None,
    ) -> float:
        """Mean loss in nats over the targets that count. Arguments as for `loss_and_grads`.

        Raises DataError, besides, where no target counts.
        """
        rows = self.rows(tokens, documents, attention_mask)
        step = self._run(rows, targets, training=False)
        return float(step.encoder.read(step.tensors.loss)[0])

    def scores(
        self,
        tokens: npt.ArrayLike,
        targets: npt.ArrayLike,
        *,
        documents: npt.ArrayLike | None = None,
        attention_mask: npt.ArrayLike | None = None,
    ) -> Scores:
        """Loss and rank of every target. Arguments as for `loss_and_grads`."""
        rows = self.rows(tokens, documents, attention_mask)
        step = self._run(rows, targets, count=1, training=False)
        assert step.tensors.row_rank
        loss = step.encoder.read(step.tensors.row_loss).reshape(rows.ids.shape)
        rank = step.encoder.read(step.tensors.row_rank).reshape(rows.ids.shape).astype(np.int32)
        return Scores(loss, rank)

    def _step_for(self, rows: Rows, **options: Any) -> _Step:
        return self.step_encoder(*rows.ids.shape, documents=rows.documents is not None, **options)

    def _run(
        self, rows: Rows, targets: npt.ArrayLike, count: int | None = None, **options: Any
    ) -> _Step:
        """Run a step's forward pass, and its backward pass where it trains, on given rows.

        count   what the loss is divided by; by default how many targets count
        """
        ids = rows.ids
        wanted = rows.targets(self.check_targets(targets, ids.shape))
        count = int((wanted != IGNORED).sum()) if count is None else count
        if not count and not options.get("carried"):  # a chunk of a longer sequence may have none
            raise DataError("all targets are ignored, or of padding: there is no loss")
        step = self._step_for(rows, **options)
        self.load_batch(step, ids, wanted, count, rows.documents)
        step.encoder.run("forward", "backward")
        return step

    def embed(
        self,
        tokens: npt.ArrayLike,
        *,
        documents: npt.ArrayLike | None = None,
        attention_mask: npt.ArrayLike | None = None,
    ) -> Array:
        """(batch, d_model) float32: the final norm's output, its mean over time, of length 1.

        tokens           (batch, seqlen) integer ids below vocab_size
        documents        see `loss_and_grads`; the mean is over all of a row's
        attention_mask   (batch, seqlen), 1 for real tokens, over which the mean is, 0 for padding
        """
        rows = self.rows(tokens, documents, attention_mask)
        shape, real = rows.ids.shape, rows.real
        key = (*shape, rows.documents is not None, real is not None)
        if key not in self._embedders:
            self._embedders[key] = self._embedder(*key)
        embedder = self._embedders[key]
        embedder.encoder.write(embedder.tokens, rows.ids)
        if embedder.documents and rows.documents is not None:
            embedder.encoder.write(embedder.documents, rows.documents)
        if embedder.counted and real is not None:
            embedder.encoder.write(embedder.counted, real)
        embedder.encoder.run("forward")
        return embedder.encoder.read(embedder.out)

    def _embedder(self, batch: int, seqlen: int, documents: bool, masked: bool) -> _Embedder:
        plan, tokens, own = self._forward_plan(batch, seqlen, documents)
        counted = _rows(plan, "counted", batch, seqlen) if masked else None
        x = language_model.backbone(plan, self.config, tokens, documents=own)
        pooled = mean_pool(plan, x, counted)
        plan.keep.append(pooled)
        plan.prune()
        return _Embedder(Encoder(self.buffers, plan), tokens, own, counted, pooled)

    def _forward_plan(
        self, batch: int, seqlen: int, documents: bool = False
    ) -> tuple[Plan, Tensor, Tensor | None]:
        """A plan for inference, its tokens and its documents, if it has any."""
        plan = Plan(self.layout, self.device.target, training=False)
        own = _rows(plan, "documents", batch, seqlen) if documents else None
        return plan, _rows(plan, "tokens", batch, seqlen), own

    def loss_and_grads(
        self,
        tokens: npt.ArrayLike,
        targets: npt.ArrayLike,
        *,
        documents: npt.ArrayLike | None = None,
        attention_mask: npt.ArrayLike | None = None,
        activation_checkpointing: bool = False,
    ) -> tuple[float, dict[str, Array]]:
        """Mean loss in nats, and its gradient by every trainable parameter.

        tokens           (batch, seqlen) integer ids below vocab_size
        targets          (batch, seqlen) ids already shifted; -100 is ignored. Where a document ends
                         inside a row, its last target is not the next token
        documents        (batch, seqlen) integers: where the number changes along a row, another
                         document begins, and sees nothing of what is before it
        attention_mask   (batch, seqlen), 1 for real tokens, 0 for padding, which no real token sees
                         and whose targets are ignored
        activation_checkpointing   less memory for one more forward pass; the same bits

        Raises DataError where an id is outside its range, shapes differ, or no target counts.
        """
        rows = self.rows(tokens, documents, attention_mask)
        step = self._run(rows, targets, activation_checkpointing=activation_checkpointing)
        return float(step.encoder.read(step.tensors.loss)[0]), self.read_grads()

    def loss_and_grads_from(
        self,
        state: Mapping[str, Array] | None,
        tokens: npt.ArrayLike,
        targets: npt.ArrayLike,
        *,
        detached: bool = True,
        final_grads: Mapping[str, Array] | None = None,
        documents: npt.ArrayLike | None = None,
        attention_mask: npt.ArrayLike | None = None,
        activation_checkpointing: bool = False,
    ) -> Chunk:
        """Loss and gradients of a chunk of longer sequences, which goes on from a state.

        state         of the chunk before, as `Chunk.state` has it; None: zeros, the beginning
        detached      no gradient leaves the chunk; else `Chunk.state_grads` are made
        final_grads   gradients by the state that the chunk leaves: `state_grads` of the chunk
                      after it, times what that chunk's loss counts in the whole

        The state belongs to each row's first document. Other arguments as for `loss_and_grads`.
        Raises DataError where arrays do not fit, ConfigError where a layer carries no state.
        """
        if detached and final_grads is not None:
            raise ConfigError("final_grads pass through a state that is not detached only")
        rows = self.rows(tokens, documents, attention_mask)
        options: dict[str, Any] = {
            "activation_checkpointing": activation_checkpointing,
            "carried": "loss_and_grads_from",
            "chained": not detached,
        }
        carried = self._step_for(rows, **options).tensors.states
        self._write_states({n: c.final for n, c in carried.items()}, state, "state")
        if not detached:
            grads = {n: c.dfinal for n, c in carried.items() if c.dfinal}
            self._write_states(grads, final_grads, "final_grads")
        step = self._run(rows, targets, **options)
        read = self.buffers.read
        return Chunk(
            float(step.encoder.read(step.tensors.loss)[0]),
            self.read_grads(),
            {name: read(c.final) for name, c in carried.items()},
            {name: read(c.dinitial) for name, c in carried.items() if c.dinitial},
        )

    def _write_states(
        self, tensors: Mapping[str, Tensor], given: Mapping[str, Array] | None, what: str
    ) -> None:
        """Write arrays by name, or zeros where none are given. Raises DataError."""
        if given is None:
            self.buffers.clear(*tensors.values())
            return
        found, wanted = _shapes(given), {n: t.shape for n, t in tensors.items()}
        if found != wanted:
            raise DataError(f"{what}: arrays are {found}, must be {wanted}")
        _check_real(given, what, DataError)
        arrays = {name: np.asarray(given[name], np.float32) for name in tensors}
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise DataError(f"{what}: {name} is not finite")
        for name, tensor in tensors.items():
            self.buffers.write(tensor, arrays[name])

    def carried_states(self, batch: int, prefix: str) -> dict[str, Tensor]:
        """The persistent tensors that training steps of this batch size carry on, by name."""
        plan = Plan(self.layout, self.device.target)
        states = language_model.carried_state(plan, self.config, batch, prefix=prefix)
        return {name: carried.final for name, carried in _by_name(states).items()}

    def update(self, state: Mapping[str, Array]) -> None:
        """Replace some parameters, an adapter's among them. Nothing is written unless all fit.

        Raises CheckpointError naming those that are not the model's, mis-shaped, or no real numbers,
        and a value that the model's lora_base cannot hold.
        """
        specs = self.layout.specs
        expected = {name: specs[name].shape for name in state if name in specs}
        checkpoint.check_names(expected, _shapes(state), "the state")
        _check_real(state, "the state")
        self._write_all(state)

    def read_grads(self) -> dict[str, Array]:
        """Gradients as the last backward pass left them, by parameter name."""
        return {n: self._read(n, self._grad) for n, s in self.layout.specs.items() if s.trainable}

    def _grad(self, piece: Tensor) -> Tensor:
        grad = self.layout.grad(piece)
        assert grad is not None
        return grad

    def read_moment(self, key: str) -> Array:
        """One of AdamW's moments: "m.NAME" or "v.NAME"."""
        kind, name = key.split(".", 1)
        return self._read(name, lambda piece: self.layout.moments(piece)["mv".index(kind)])

    def write_moment(self, key: str, array: Array) -> None:
        kind, name = key.split(".", 1)
        self._write(name, array, lambda piece: self.layout.moments(piece)["mv".index(kind)])

    def logits(
        self,
        tokens: npt.ArrayLike,
        *,
        documents: npt.ArrayLike | None = None,
        attention_mask: npt.ArrayLike | None = None,
    ) -> Array:
        """(batch, seqlen, vocab_size) float32 logits of the next token at every position.

        Arguments as for `loss_and_grads`; what the logits at padding are means nothing.
        """
        rows = self.rows(tokens, documents, attention_mask)
        shape, own = rows.ids.shape, rows.documents
        key = (*shape, own is not None)
        if key not in self._forwards:
            self._forwards[key] = self._forward(*key)
        forward = self._forwards[key]
        encoder = forward.encoder
        encoder.write(forward.tokens, rows.ids)
        if forward.documents and own is not None:
            encoder.write(forward.documents, own)
        encoder.run("forward")
        logits = np.concatenate([encoder.read(chunk) for chunk in forward.out])
        return logits.reshape(*shape, -1)[..., : self.config.vocab_size]

    def _forward(self, batch: int, seqlen: int, documents: bool) -> _Forward:
        plan, tokens, own = self._forward_plan(batch, seqlen, documents)
        x = language_model.backbone(plan, self.config, tokens, documents=own)
        out = head_logits(plan, x, *language_model.head(self.config))
        plan.prune()
        return _Forward(Encoder(self.buffers, plan), tokens, own, out)

    # -- generation ----------------------------------------------------------------------------

    def _decoder(self, batch: int, seqlen: int) -> tuple[Encoder, Tensor, Tensor | None]:
        """A forward pass that carries the state on; logits only for a single token."""
        if (batch, seqlen) not in self._decoders:
            plan, ids, _ = self._forward_plan(batch, seqlen)
            state = language_model.carried_state(plan, self.config, batch, self._capacity)
            x = language_model.backbone(plan, self.config, ids, state)
            logits = None
            if seqlen == 1:
                (logits,) = head_logits(plan, x, *language_model.head(self.config))
            plan.prune()
            self._decoders[batch, seqlen] = Encoder(self.buffers, plan), ids, logits
        return self._decoders[batch, seqlen]

    def _make_room(self, tokens: int) -> None:
        """See to it that a state that grows has room for so many tokens."""
        if tokens > self._capacity and language_model.state_grows(self.config):
            self._drop_states()
            self._decoders.clear()
            while self._capacity < tokens:
                self._capacity *= 2

    def _drop_states(self) -> None:
        for encoder, _, _ in self._decoders.values():
            self.buffers.drop(*_states(encoder.plan))

    def stream(
        self,
        prompt: npt.ArrayLike,
        max_new_tokens: int = 256,
        *,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 0.9,
        seed: int = 0,
        eos_token_id: int | None = None,
    ) -> Iterator[int]:
        """Sampled token ids, one at a time; the work a token is constant, attention aside.

        prompt        (seqlen,) ids, at least one
        temperature   0 takes the likeliest token
        top_k         0 keeps all
        top_p         of the full distribution's mass; 1 keeps all

        One stream at a time: the state is the model's, and the next stream starts it anew.

        Raises at once ConfigError for an option out of range, DataError for a bad prompt; at a
        token TrainingError, where the model gives logits that are not finite, or another stream
        has begun, or parameters moved (another adapter, others that train), since the last one.
        """
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ConfigError(f"temperature is {temperature}, must be a finite number, 0 or more")
        for name, value in (("top_k", top_k), ("max_new_tokens", max_new_tokens)):
            if not isinstance(value, numbers.Integral):
                raise ConfigError(f"{name} is {value!r}, must be an integer")
        if top_k < 0:
            raise ConfigError(f"top_k is {top_k}, must be 0 (all) or more")
        if not 0 < top_p <= 1:
            raise ConfigError(f"top_p is {top_p}, must be in (0, 1]")
        if max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}, must be 0 or more")
        if seed < 0:
            raise ConfigError(f"seed is {seed}, must be 0 or more")
        ids = self.check_tokens(prompt)
        if ids.shape[0] != 1:
            raise DataError(f"one prompt at a time, not {ids.shape[0]}")
        rng = np.random.Generator(np.random.PCG64(seed))
        choose = functools.partial(
            _sample, temperature=temperature, top_k=top_k, top_p=top_p, rng=rng
        )
        return self._stream(ids, max_new_tokens, choose, eos_token_id)

    def _stream(
        self, ids: Array, max_new_tokens: int, choose: Callable[[Array], int], end: int | None
    ) -> Iterator[int]:
        """What `choose` makes of the logits after ids (1, seqlen), and so on, up to `end`."""
        self._turn += 1
        turn = self._turn
        self._make_room(ids.shape[1] + max_new_tokens)
        step, step_ids, logits = self._decoder(1, 1)
        assert logits is not None
        self.buffers.clear(*_states(step.plan))
        done = 0
        while ids.shape[1] - done > _PREFILL:
            prefill, prefill_ids, _ = self._decoder(1, _PREFILL)
            prefill.write(prefill_ids, ids[:, done : done + _PREFILL])
            prefill.run("forward")
            done += _PREFILL
        given = ids[0, done:]
        for _ in range(max_new_tokens):
            if turn != self._turn:
                raise TrainingError(
                    "this stream cannot go on: another one has begun, or the model's parameters "
                    "moved. Use one stream at a time, or a second Model."
                )
            for token in given:
                step.write(step_ids, np.array([[token]], np.uint32))
                step.run("forward")
            scores = step.read(logits).reshape(-1)[: self.config.vocab_size]
            if not np.isfinite(scores).all():
                raise TrainingError("the logits are not finite: the model's weights are damaged")
            token = choose(scores)
            yield token
            if token == end:
                return
            given = np.array([token])

    def generate(
        self, prompt: npt.ArrayLike, max_new_tokens: int = 256, **options: Any
    ) -> list[int]:
        """The prompt's continuation as token ids; options as for `stream`."""
        return list(self.stream(prompt, max_new_tokens, **options))


def _states(plan: Plan) -> set[Tensor]:
    """The tensors of a plan that hold what is carried from token to token."""
    roots = {t.root for d in plan.dispatches for t in d.tensors.values()}
    return {t for t in roots if t.name.startswith("state.")}


def _sample(
    logits: Array, temperature: float, top_k: int, top_p: float, rng: np.random.Generator
) -> int:
    """One id from logits (vocab_size,): temperature, then top-k, then top-p."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / max(temperature, 1e-7)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k:
        order = order[:top_k]
    # the likeliest tokens whose mass before them is below top_p: at least one is kept
    order = order[np.cumsum(p[order]) - p[order] < top_p]
    kept = p[order] / p[order].sum()
    return int(rng.choice(order, p=kept))
