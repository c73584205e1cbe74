"""Trainer: steps, schedule, evaluation, logging, saving, exact resume."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from . import checkpoint
from .anomaly import first_anomaly
from .config import MambaConfig, TrainConfig
from .data import IGNORED, Batch, Dataset, Prefetcher
from .errors import CheckpointError, ConfigError, DataError, TrainingError
from .kernel import Tensor
from .model import Model, find_checkpoint, plan_step
from .models import lora
from .models.lora import Lora
from .ops.optimizer import (
    HYPER,
    INITIAL_SCALE,
    LOG,
    LOSS_SCALE,
    SCHEDULES,
    STATE,
    Optimizer,
)
from .plan import Layout
from .precision import check_f16
from .profile import Profile, profile_step
from .reload import HotReload
from .tuned import check_table

Array = np.ndarray[Any, Any]

STATES = "states.safetensors"
CARRIED = "carry_state"  # of the names of the states that a trainer carries
METRICS = "metrics.jsonl"
TUNING = "tuning.json"
_AHEAD = 64  # steps given to the GPU before one waits for it; its log holds more
# What decides which tokens the batch of a given number holds
_POSITION = (
    "seed",
    "batch_size",
    "seq_len",
    "gradient_accumulation",
    "carry_state",
    "eval_fraction",
)
_BAD_VALUES = (KeyError, TypeError, ValueError, AttributeError, OverflowError)  # of a damaged file
_T = TypeVar("_T")


@dataclass(eq=False)
class StepResult:
    """One optimizer step. Its numbers are fetched from the GPU when one is first read.

    step   its number, counted from 1, as in metrics.jsonl and the names of checkpoints
    """

    step: int
    _fetch: Callable[[], None] = field(repr=False)
    _row: dict[str, float] | None = field(default=None, repr=False)

    def _number(self, name: str) -> float:
        if self._row is None:
            self._fetch()
        assert self._row is not None
        return self._row[name]

    @property
    def loss(self) -> float:
        """Mean loss in nats over the step's counted targets, before the update."""
        return self._number("loss")

    @property
    def grad_norm(self) -> float:
        """Global L2 norm of the gradient before clipping."""
        return self._number("grad_norm")

    @property
    def lr(self) -> float:
        """Learning rate of this step."""
        return self._number("lr")

    @property
    def loss_scale(self) -> float:
        """What this step's gradients were multiplied by; 1 where precision is f32."""
        return self._number("loss_scale")

    @property
    def skipped(self) -> bool:
        """Whether nothing moved: the gradient was not finite, or no target counted."""
        return bool(self._number("skipped"))

    def record(self) -> dict[str, Any]:
        """What metrics.jsonl says of this step."""
        numbers = {name: self._number(name) for name in LOG}
        return {"step": self.step, **numbers, "skipped": self.skipped}


@dataclass
class Evaluation:
    """Means over all predicted tokens of a dataset.

    top1, top5   share of the tokens that were among the one, or five, held likeliest
    """

    loss: float
    tokens: int
    top1: float
    top5: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_token(self) -> float:
        return self.loss / math.log(2)

    def record(self) -> dict[str, Any]:
        """What metrics.jsonl says of it, beside the step."""
        return {
            "eval_loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_token": self.bits_per_token,
            "top1": self.top1,
            "top5": self.top5,
            "eval_tokens": self.tokens,
        }


@dataclass
class Progress:
    """Where a run stands: what a checkpoint must hold besides weights and moments.

    step          optimizer steps called for, skipped ones included
    epoch         passes over the data begun, from 0
    batch         micro-batches of this epoch already used
    tokens        read so far
    data_tokens   of the whole data; 0 before `fit`
    packed        1 where the data's documents are kept apart; None where that is not known: before
                  `fit`, or by a checkpoint that does not say
    separator     the id that ends one, -1 for none; None as above
    data_checksum `Dataset.checksum` of the data; None as above
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    data_tokens: int = 0
    packed: int | None = None
    separator: int | None = None
    data_checksum: int | None = None


class Trainer:
    """Trains a model by AdamW, wholly on its device.

    Parameters
    ----------
    model    whose parameters are updated in place; moments and counters start anew, so that a
             model has one trainer at a time: a step of an earlier one raises TrainingError
    config   how

    A step reads nothing back: its loss and norm stay on the GPU until a result is looked at,
    `fit` logs, or 64 steps have piled up.
    """

    def __init__(self, model: Model, config: TrainConfig) -> None:
        self.model, self.config = model, config
        self.progress = Progress()
        self._calls = 0  # of the GPU's optimizer: a step without targets is none
        self._pending: dict[int, StepResult] = {}  # by call: not fetched yet
        self._skips = 0  # in a row, as far as they are fetched
        self._warned = False
        self._hyper_for: int | None = None
        self._resumed: Path | None = None  # the folder of the run that this one goes on with
        if config.precision == "f16":
            check_f16(model.device)
        self._trained = self._prepare()
        model.set_trainable(self._trained, config.shard)
        model.layout.set_decay(config.decays)
        self._layout, self._adapter = model.layout, model.adapter
        self._held: dict[Tensor, Array] | None = None
        self._held_moments: dict[str, Array] = {}
        if model.trainer and (earlier := model.trainer()):
            earlier._collect()  # its log is this one's from now on
        model.trainer = weakref.ref(self)
        if config.carry_state:
            self._states  # noqa: B018 - which refuses layers that have none
            self.reset_states()

    def _prepare(self) -> Collection[str]:
        """Names of what trains: an adapter, which is added where it is asked for, or what matches."""
        model, config = self.model, self.config
        if config.lora_rank and model.adapter is None:
            model.add_adapter(config)
        base = config.lora_base or model.lora_base
        Lora.check_base(model.adapter, base)
        model.store_base(base)
        if model.adapter is None:
            return config.trained(model.layout.specs)
        if config.lora_rank and Lora.of(model.config, config) != model.adapter:
            raise ConfigError(
                "the model has an adapter of another rank, alpha or targets: merge it first, or "
                "leave lora_rank out to train on"
            )
        if config.train:
            raise ConfigError(
                "the model has an adapter, which alone trains: merge it, or omit train"
            )
        return [spec.name for spec in model.adapter.parameters(model.config)]

    @functools.cached_property
    def _states(self) -> dict[str, Tensor]:
        """What is carried from step to step, by name."""
        return self.model.carried_states(self.config.batch_size, CARRIED)

    def reset_states(self) -> None:
        """Have the next step begin with states of zero, where they are carried: `fit` does so at
        the start of each epoch."""
        self._settle()
        self.model.buffers.clear_named(f"{CARRIED}.")

    def owned_state(self) -> dict[str, Array]:
        """Copies of the parameters that this process updates: what the others of a sharded run
        give to `Model.update` after each step."""
        self._settle()
        return {name: self.model._read(name) for name in self.model.layout.owned}

    def hold(self) -> None:
        """Keep on the host what is lost where the parameters move: `Model` calls it before."""
        self._collect()
        if self.model.layout is not self._layout or "_optimizer" not in vars(self):
            return  # of an earlier move, or there is nothing yet
        optimizer, buffers = self._optimizer, self.model.buffers
        kept = [optimizer.state]
        kept += [optimizer.loss_scale] if optimizer.loss_scale else []
        kept += self._states.values() if self.config.carry_state else []
        self._held = {tensor: buffers.read(tensor) for tensor in kept}
        self._held_moments = {name: self.model.read_moment(name) for name in self._moment_shapes()}

    def _settle(self) -> None:
        """Go on where the parameters moved. Raises TrainingError where that means nothing."""
        model = self.model
        if not model.trainer or model.trainer() is not self:
            raise TrainingError(
                "this Trainer cannot go on: another one was made for its model, whose moments and "
                "settings are on the device now. Go on with that one, or make a new Trainer."
            )
        if model.layout is self._layout:
            return
        if model.adapter != self._adapter:
            raise TrainingError(
                "this Trainer cannot go on: the model's adapter was added, merged or replaced since "
                "it was made. Undo that (unmerge_adapter), or make a new Trainer."
            )
        model.set_trainable(self._trained, self.config.shard)
        model.layout.set_decay(self.config.decays)
        self._layout, self._hyper_for = model.layout, None
        held, self._held = self._held, None
        moments, self._held_moments = self._held_moments, {}
        vars(self).pop("_states", None)
        if held is None:
            return
        del self._optimizer
        self._optimizer  # noqa: B018 - which makes it anew, for these places
        for tensor, array in held.items():
            model.buffers.write(tensor, array)
        for name, array in moments.items():
            model.write_moment(name, array)

    # -- steps ---------------------------------------------------------------------------------

    @functools.cached_property
    def _optimizer(self) -> Optimizer:
        """The optimizer's tensors. An earlier trainer of this model may have filled them."""
        model, layout, buffers = self.model, self.model.layout, self.model.buffers
        planned = plan_step(
            model.config,
            layout,
            model.device.target,
            1,
            1,
            update=True,
            precision=self.config.precision,
        )
        assert planned.optimizer is not None
        buffers.clear(planned.optimizer.state, *_moments(layout))
        if planned.optimizer.loss_scale:
            buffers.write(planned.optimizer.loss_scale, np.array([INITIAL_SCALE, 0, 0]))
        for tensor, values in planned.plan.constants.items():
            buffers.write(tensor, np.array(values, np.uint32))
        return planned.optimizer

    def _encoder(self, shape: tuple[int, ...], documents: bool = False) -> Any:
        self._settle()
        batch, seqlen = shape
        return self.model.step_encoder(
            batch,
            seqlen,
            update=True,
            documents=documents,
            carried=CARRIED if self.config.carry_state else "",
            activation_checkpointing=self.config.activation_checkpointing,
            memory_budget=self.config.memory_budget,
            precision=self.config.precision,
        )

    def _compiled(self, batch: Batch) -> Any:
        return self._encoder(batch.inputs.shape, batch.documents is not None)

    def _write_hyper(self, total_steps: int) -> None:
        """Write the constants of the run to the GPU, once."""
        if self._hyper_for == total_steps:
            return
        c = self.config
        if not total_steps and c.schedule != "constant":
            raise ConfigError(f"TrainConfig.schedule is {c.schedule!r}: steps must say until when")
        values = {
            "lr": c.lr,
            "min_lr": c.min_lr,
            "warmup_steps": c.warmup_steps,
            "total_steps": total_steps,
            "schedule": SCHEDULES.index(c.schedule),
            "ln_beta1": math.log(c.beta1) if c.beta1 else -1e30,
            "ln_beta2": math.log(c.beta2) if c.beta2 else -1e30,
            "one_minus_beta1": 1 - c.beta1,
            "one_minus_beta2": 1 - c.beta2,
            "eps": c.eps,
            "weight_decay": c.weight_decay,
            "max_grad_norm": c.max_grad_norm,
            "max_delta": c.max_delta,
        }
        hyper = np.array([values[name] for name in HYPER], np.float32)
        self.model.buffers.write(self._optimizer.hyper, hyper)
        self._hyper_for = total_steps

    def step(
        self,
        tokens: Array,
        targets: Array,
        *,
        documents: Array | None = None,
        attention_mask: Array | None = None,
    ) -> StepResult:
        """One optimizer step on one batch; arguments as for `Model.loss_and_grads`."""
        rows = self.model.rows(tokens, documents, attention_mask)
        wanted = rows.targets(self.model.check_targets(targets, rows.ids.shape))
        count = int((wanted != IGNORED).sum())
        return self.step_batches([Batch(rows.ids, wanted, count, rows.documents)])

    def step_batches(self, batches: Sequence[Batch], total_steps: int | None = None) -> StepResult:
        """One optimizer step on several micro-batches, weighted by their tokens.

        total_steps   at which the schedule ends; by default the configuration's steps

        A step whose targets are all ignored changes nothing, and warns.
        """
        if not batches:
            raise DataError("a step needs at least one batch")
        rows = {len(batch.inputs) for batch in batches}
        if self.config.carry_state and rows != {self.config.batch_size}:
            raise DataError(
                f"a batch has {min(rows)} rows, batch_size is {self.config.batch_size}: where a state "
                "is carried, each row goes on from its own (carry_state)"
            )
        if len(self._pending) >= _AHEAD:
            self._fetch()
        steps = [self._compiled(b) for b in batches]
        self._write_hyper(total_steps or self.config.steps or 0)
        count = sum(b.n_targets for b in batches)
        result = StepResult(self.progress.step + 1, self._fetch)
        before: dict[Tensor, Array] = {}
        if self.config.detect_anomaly:
            states = {c.final for step in steps for c in step.tensors.states.values()}
            before = {state: self.model.buffers.read(state) for state in states}
        if count:
            for i, (step, batch) in enumerate(zip(steps, batches, strict=True)):
                self.model.load_batch(step, batch.inputs, batch.targets, count, batch.documents)
                last = ["update"] if i == len(batches) - 1 else []
                step.encoder.run("forward", "backward", *last, clear_grads=i == 0)
                if self.model.device.is_cpu:
                    # Its threads need the cores: beside what checks, encodes and loads, a short step takes longer.
                    self.model.device.wait()
            self._pending[self._calls] = result
            self._calls += 1
            if self.config.detect_anomaly:
                self._collect()
                # where the loss is scaled, gradients that pass f16's range are in the order of things
                wrong = result.skipped and self.config.precision == "f32"
                if wrong or not math.isfinite(result.loss):
                    for state, array in before.items():
                        self.model.buffers.write(state, array)
                    self._explain(result.step, batches, count)
        else:
            if self.config.carry_state:  # the states go on all the same
                for step, batch in zip(steps, batches, strict=True):
                    self.model.load_batch(step, batch.inputs, batch.targets, 1, batch.documents)
                    step.encoder.run("forward")
            result._row = {**dict.fromkeys(LOG, 0.0), "skipped": 1.0}
            warnings.warn(
                f"step {result.step}: all targets are ignored, nothing is learnt", stacklevel=2
            )
        self.progress.step += 1
        self.progress.tokens += sum(b.inputs.size for b in batches)
        return result

    def _explain(self, step: int, batches: Sequence[Batch], count: int) -> None:
        """Raise TrainingError that says where a skipped step, which moved nothing, went wrong."""
        for i, batch in enumerate(batches):
            compiled = self._compiled(batch)
            self.model.load_batch(compiled, batch.inputs, batch.targets, count, batch.documents)
            found = first_anomaly(compiled.encoder, "forward", "backward", clear_grads=i == 0)
            if found:
                raise TrainingError(f"step {step}: {found}")
        raise TrainingError(f"step {step}: all is finite but the norm of the gradients")

    # -- the log -------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Bring the numbers of all steps since the last time back, by one readback."""
        self._collect()
        self._check_skips()

    def _collect(self) -> None:
        if not self._pending:
            return
        log = self.model.buffers.read(self._optimizer.log)
        for call, result in self._pending.items():
            result._row = dict(zip(LOG, map(float, log[call % len(log)]), strict=True))
            self._skips = self._skips + 1 if result.skipped else 0
        self._pending.clear()

    def _check_skips(self) -> None:
        """Say which tensor is not finite, once; stop after too many skips in a row."""
        stop = self._skips >= self.config.max_skips
        if not stop and (self._warned or not self._skips):
            return
        name = self.first_non_finite() or "a gradient that is finite by now"
        step = self.progress.step
        narrow = ", or train with precision f32" if self.config.precision == "f16" else ""
        if stop:
            raise TrainingError(
                f"{self._skips} steps in a row were skipped, up to step {step}: non-finite at "
                f"{name}. Lower the learning rate{narrow}, or go on from an earlier checkpoint."
            )
        self._warned = True
        halved = "; the loss scale is halved" if self.config.precision == "f16" else ""
        warnings.warn(f"step {step} was skipped: non-finite at {name}{halved}", stacklevel=4)

    def first_non_finite(self) -> str | None:
        """Name of the first tensor with a NaN or infinity: a weight, else a gradient."""
        for kind, read in (
            ("weight", self.model.state_dict),
            ("weight", self.model.adapter_state),
            ("gradient of", self.model.read_grads),
        ):
            for name, array in read().items():
                if not np.isfinite(array).all():
                    return f"{kind} {name}"
        return None

    # -- runs ----------------------------------------------------------------------------------

    def total_steps(self, dataset: Dataset) -> int:
        """Optimizer steps of the whole run on this dataset."""
        c = self.config
        return c.total_steps(dataset.n_batches(c.batch_size, c.seq_len, c.carry_state))

    def _windows(self, dataset: Dataset) -> Iterator[tuple[list[Batch], int, int]]:
        """(micro-batches, epoch, batches used of it) of one optimizer step after another."""
        c = self.config
        epoch, used = self.progress.epoch, self.progress.batch
        while True:
            window: list[Batch] = []
            shape = c.batch_size, c.seq_len
            for batch in dataset.batches(*shape, c.seed, epoch, used, c.carry_state):
                window.append(batch)
                used += 1
                if len(window) == c.gradient_accumulation:
                    yield window, epoch, used
                    window = []
            if window:  # the last window of an epoch may be smaller, and steps all the same
                yield window, epoch, used
            epoch, used = epoch + 1, 0

    def fit(
        self,
        dataset: Dataset,
        *,
        eval_dataset: Dataset | None = None,
        out: str | Path | None = None,
        on_step: Callable[[StepResult], None] | None = None,
        on_log: Callable[[dict[str, Any]], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        hot_reload: Callable[[str], None] | None = None,
    ) -> Progress:
        """Train until the configured number of steps or epochs is done.

        eval_dataset   evaluated every `eval_every` steps and at the end
        out            folder for metrics.jsonl and checkpoints; None saves nothing
        on_step        called after each optimizer step; reading the result waits for the GPU
        on_log         called with each record that goes to metrics.jsonl
        should_stop    asked after each step; True saves and returns
        hot_reload     called with what became of each edit of a shader template, which is swapped
                       in between steps if it computes the same (`HotReload`); None: edits are
                       not looked for

        Raises TrainingError after `max_skips` steps in a row without a finite gradient, DataError
        where a run that is resumed began on other data, CheckpointError where `out` is in use, or
        holds a later checkpoint of another run.
        """
        c, progress = self.config, self.progress
        for data in (dataset,) if eval_dataset is None else (dataset, eval_dataset):
            if not isinstance(data, Dataset):
                raise DataError(f"fit takes a Dataset, not {type(data).__name__}")
            if data.vocab_size != self.model.config.vocab_size:  # else it was looked through
                data.check(self.model.config.vocab_size)
        if eval_dataset:  # rather than after the last step
            batches = eval_dataset.batches(c.batch_size, c.seq_len, seed=None)
            _need_targets(any(batch.n_targets for batch in batches))
        total = self.total_steps(dataset)
        if progress.data_tokens not in (0, len(dataset)):
            raise DataError(
                f"the run began on {progress.data_tokens:,} tokens, these data have "
                f"{len(dataset):,}: it can go on with the same data only"
            )
        if progress.packed not in (None, dataset.pack):
            raise DataError(
                f"the run began on {'packed' if progress.packed else 'unpacked'} documents, these "
                f"are {'packed' if dataset.pack else 'not'}: it can go on in the same way only"
            )
        separator = -1 if dataset.separator is None else dataset.separator
        if progress.separator not in (None, separator):
            before, now = ("none" if x == -1 else x for x in (progress.separator, separator))
            raise DataError(
                f"the run began with separator {before}, these data have {now}: it can go on in the "
                "same way only"
            )
        checksum = dataset.checksum
        if progress.data_checksum not in (None, checksum):
            raise DataError(
                "the run began on other data of the same length: it can go on with the same data only"
            )
        progress.data_tokens, progress.packed = len(dataset), int(dataset.pack)
        progress.separator, progress.data_checksum = separator, checksum
        unlogged: list[tuple[StepResult, int]] = []  # with their epochs
        clock, tokens, first = _Clock(), progress.tokens, progress.step + 1
        reload = HotReload(self.model, hot_reload) if hot_reload else None
        with (
            self._folder(out) if out else contextlib.nullcontext(),
            _Metrics(Path(out) if out else None, on_log, progress.step) as metrics,
            Prefetcher(self._windows(dataset)) as windows,
        ):
            if out:
                self._record_tuning(Path(out))
            for window, epoch, used in windows:
                if progress.step >= total:
                    break
                with clock.paused():  # a shape's first step compiles
                    encoders = [self._compiled(batch).encoder for batch in window]
                    if reload:
                        reload.before_step(encoders)
                if c.carry_state and used == len(window):
                    self.reset_states()
                unlogged.append((self.step_batches(window, total), epoch))
                if reload:
                    with clock.paused():
                        reload.after_step(progress.step)
                progress.epoch, progress.batch = epoch, used
                if on_step:
                    on_step(unlogged[-1][0])
                step, stop = progress.step, should_stop()
                done = step >= total
                evaluating = eval_dataset and not stop and (done or _due(step, c.eval_every))
                saving = done or stop or _due(step, c.save_every)
                full = len(unlogged) == _AHEAD or _due(step, c.log_every)
                # the first step, which compiles on some drivers, has a line and a speed of its own
                if step == first or full or evaluating or saving:
                    self._collect()
                    rate = round((progress.tokens - tokens) / clock.restart(), 1)
                    for result, its_epoch in unlogged:
                        metrics.write({**result.record(), "tokens_per_s": rate, "epoch": its_epoch})
                    tokens, unlogged = progress.tokens, []
                    self._check_skips()
                with clock.paused():
                    if eval_dataset and evaluating:
                        found = evaluate(
                            self.model, eval_dataset, c.batch_size, c.seq_len, should_stop
                        )
                        stop = should_stop()
                        if not stop:
                            metrics.write({"step": step, **found.record()})
                    if out and (saving or stop):
                        self.save(out)
                if done or stop:
                    break
        return progress

    @contextlib.contextmanager
    def _folder(self, out: str | Path) -> Iterator[None]:
        """Have a run's folder for this run alone, without what one that was killed left in it."""
        with checkpoint.lock(out):
            checkpoint.clean(out)
            if later := self._later(out):
                warnings.warn(
                    f"{out} holds {later.name}, of a later step than {self.progress.step}, which stays "
                    "the newest until this run comes so far",
                    stacklevel=4,
                )
            yield

    def _later(self, out: str | Path) -> Path | None:
        """A later checkpoint that this run has in a folder. Raises CheckpointError where it is another
        run's: what is written beside it would be taken for older."""
        later = checkpoint.later(out, self.progress.step)
        if later and Path(out).resolve() != self._resumed:
            raise CheckpointError(
                f"{out} holds {later.name}, of a later step than {self.progress.step}: go on from that "
                "one, or choose another folder"
            )
        return later

    def evaluate(self, dataset: Dataset, batch_size: int | None = None) -> Evaluation:
        """Mean loss over every predicted token of a dataset. Changes nothing."""
        c, model = self.config, self.model
        return evaluate(
            model, dataset, c.batch_size if batch_size is None else batch_size, c.seq_len
        )

    def profile(
        self, batch_size: int | None = None, seq_len: int | None = None, steps: int = 10
    ) -> Profile:
        """Where the time of a step goes, as the mean over `steps` steps on random tokens.

        batch_size, seq_len   by default the configuration's

        Changes nothing: weights, moments, counters and log are put back, by way of the host.
        """
        self._settle()
        c, buffers, optimizer = self.config, self.model.buffers, self._optimizer
        shape = batch_size or c.batch_size, seq_len or c.seq_len
        if steps < 1:
            raise ConfigError(f"steps is {steps}, must be 1 or more")
        if self._hyper_for is None:
            self._write_hyper(c.steps or 1)
        step = self._encoder(shape)
        changed = {
            tensor.root
            for d in step.encoder.plan.dispatches
            for _, tensor in d.bound("writes", "adds")
            if tensor.root.kind != "activation"
        }
        before = {tensor: buffers.read(tensor) for tensor in {*changed, optimizer.log}}
        try:
            return profile_step(self.model, step, steps)
        finally:
            for tensor, values in before.items():
                buffers.write(tensor, values)

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self, out: str | Path) -> Path:
        """Write `out`/checkpoint-STEP atomically, then drop old ones past `keep_checkpoints`.

        Raises CheckpointError where weights are not finite, the disk is full, or `out` holds a
        later checkpoint of another run.
        """
        self._settle()
        self._later(out)
        self._fetch()
        counters = self.model.buffers.read(self._optimizer.state)
        state = {
            "progress": vars(self.progress),
            "optimizer": dict(zip(STATE, map(int, counters), strict=True)),
            "train": self.config.to_dict(),
            "parameters": self._counts(),
        }
        if (scale := self._optimizer.loss_scale) is not None:
            values = map(float, self.model.buffers.read(scale))
            state["loss_scale"] = dict(zip(LOSS_SCALE, values, strict=True))
        shapes = self._moment_shapes()
        moments = ((name, self.model.read_moment(name)) for name in shapes)
        with checkpoint.new_checkpoint(out, self.progress.step) as folder:
            self.model.save_pretrained(folder)
            checkpoint.save_tensors(folder / checkpoint.MOMENTS, moments, shapes=shapes)
            if self.config.carry_state:
                read = self.model.buffers.read
                states = {name: read(tensor) for name, tensor in self._states.items()}
                # as the next step will find them
                states = {n: np.where(np.isfinite(a), a, np.float32(0)) for n, a in states.items()}
                checkpoint.save_tensors(folder / STATES, states)
            self._record_tuning(Path(out))
            files = sorted(path.name for path in folder.iterdir())
            checkpoint.write_json(folder / checkpoint.STATE, {**state, checkpoint.FILES: files})
        checkpoint.rotate(out, self.config.keep_checkpoints, self.progress.step)
        return Path(out) / f"checkpoint-{self.progress.step}"

    def _counts(self) -> dict[str, int]:
        """What a checkpoint records of the parameters: numbers, and bytes on the device."""
        layout = self.model.layout
        stored, as_f32 = layout.stored_bytes
        return {
            "total": layout.n_params,
            "trainable": layout.n_trainable,
            "optimizer_bytes": 8 * layout.n_owned,
            "base_bytes_saved": as_f32 - stored,
        }

    def _record_tuning(self, out: Path) -> None:
        """Write which choices the kernels run by, without which no run repeats to the bit."""
        device = self.model.device
        choices = {key: dict(values) for key, values in device.target.tuned.items()}
        record = {
            "adapter": device.identity,
            "choices": choices or "default",
            "precision": self.config.precision,
        }
        checkpoint.write_json(out / TUNING, record)

    def _use_recorded_tuning(self, file: Path) -> None:
        """Go on by the choices that a run recorded, where they are this adapter's."""
        if not file.exists():
            return
        record, device = checkpoint.read_json(file), self.model.device
        choices = record.get("choices")
        try:
            table = {} if choices == "default" else check_table(choices)
        except ValueError as error:
            raise CheckpointError(
                f"{file}: {error}; without this file the run goes on by today's choices"
            ) from None
        if record.get("adapter") == device.identity:
            self.model.use_tuning(table)
        elif table != device.target.tuned:
            warnings.warn(
                f"{file}: recorded for {record.get('adapter')}, not for {device.identity}, whose "
                "own choices are used: sums may round differently from here on",
                stacklevel=3,
            )

    def _moment_shapes(self) -> dict[str, tuple[int, ...]]:
        layout = self.model.layout
        return {f"{kind}.{n}": layout.specs[n].shape for kind in "mv" for n in layout.owned}

    def load(self, path: str | Path, *, checked: bool = False) -> None:
        """Continue from a checkpoint: weights, moments, step count, position in the data.

        checked   whether the caller knows that it is whole, as of one that `checkpoint.latest` found

        Kernels go on by the choices that the run's tuning.json records, where they are this
        adapter's, so that the run goes on to the bit.

        Raises CheckpointError where it is damaged, has no training state, or where its position
        in the data means nothing under this configuration.
        """
        self._settle()
        self._collect()  # what was asked for before is told by today's log
        folder = find_checkpoint(path)
        if folder == Path(path) and not checked:  # one found in a run's folder was looked through
            checkpoint.check_whole(folder)
        file = folder / checkpoint.STATE
        state, specs = checkpoint.read_json(file), self.model.layout.specs
        try:
            progress = _progress(state)
            counters = _counters(state)
            loss_scale = _loss_scale(state)
            settings = {"carry_state": False, **state["train"]}  # older ones did not know it
            fixed = {name: settings[name] for name in _POSITION}
            patterns, shard = state["train"].get("train", ()), state["train"].get("shard")
            before = TrainConfig(train=patterns, shard=shard)
            had: Collection[str] = before.trained(specs)
            adapter, added = None, dict[str, Array]()
            if (folder / lora.CONFIG).exists():
                adapter, added = lora.load(folder, self.model.config)
                had = added
            had = [name for name in specs if name in had]
            if before.shard:
                had = had[before.shard[0] :: before.shard[1]]
        except _BAD_VALUES as err:
            raise CheckpointError(f"{file}: not a trainer's state: {err}") from None
        for name, value in fixed.items():
            if progress.data_tokens and getattr(self.config, name) != value:
                raise CheckpointError(
                    f"{folder}: trained with {name} {value}, not {getattr(self.config, name)}, so "
                    "that its place in the data would be lost; start a new run from this model"
                )
        if adapter != self.model.adapter:
            raise CheckpointError(
                f"{folder}: trained with {'no' if adapter is None else 'another'} adapter; start a "
                "new run from this model"
            )
        weights = checkpoint.model_tensors(folder, self.model.config.tie_embeddings)
        moments = checkpoint.load_tensors(folder / checkpoint.MOMENTS)
        saved = {f"{kind}.{n}": s.shape for kind in "mv" for n, s in specs.items() if n in had}
        checkpoint.check_names(saved, moments.shapes, folder / checkpoint.MOMENTS)
        carried, states = dict[str, Tensor](), None
        if self.config.carry_state and (folder / STATES).exists():
            carried, states = self._states, checkpoint.load_tensors(folder / STATES)
            shapes = {name: tensor.shape for name, tensor in carried.items()}
            checkpoint.check_names(shapes, states.shapes, folder / STATES)
        self._use_recorded_tuning(folder.parent / TUNING)
        self.model.load_state_dict(weights, str(folder))
        if adapter:
            self.model.load_adapter(folder)
        optimizer = self._optimizer
        self.model.buffers.clear(*_moments(self.model.layout))
        for name in self._moment_shapes():
            if name in moments:
                self.model.write_moment(name, moments[name])
        if new := [name for name in self.model.layout.owned if name not in had]:
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            warnings.warn(
                f"{folder.name} was made without updating {new[0]}{more}: moments start at zero",
                stacklevel=2,
            )
        self.reset_states()
        if states:
            for name, tensor in carried.items():
                self.model.buffers.write(tensor, states[name])
        self.model.buffers.write(optimizer.state, np.array(list(counters.values()), np.uint32))
        if optimizer.loss_scale:
            self.model.buffers.write(optimizer.loss_scale, np.array(loss_scale))
        self._calls, self._skips = counters["calls"], counters["skipped_in_a_row"]
        self.progress, self._resumed = progress, folder.resolve().parent


def _moments(layout: Layout) -> list[Tensor]:
    return [t for page in layout.trained_pages if page.runs for t in (page.m, page.v)]


def _progress(state: Mapping[str, Any]) -> Progress:
    """Of a trainer's state, where the run stood. Raises what bad values do."""
    saved = dict(state["progress"])
    optional = ("packed", "separator", "data_checksum")
    known = {n: int(v) for n, v in saved.items() if v is not None or n not in optional}
    for name, value in known.items():
        if not -(name == "separator") <= value < 1 << 63:
            raise ValueError(f"{name} is {value}")
    return Progress(**known)


def _counters(state: Mapping[str, Any]) -> dict[str, int]:
    """Of a trainer's state, the numbers of `STATE`. Raises what bad values do."""
    counters = {name: int(state["optimizer"][name]) for name in STATE}
    for name, value in counters.items():
        if not 0 <= value < 1 << 32:
            raise ValueError(f"{name} is {value}")
    return counters


def _loss_scale(state: Mapping[str, Any]) -> list[float]:
    """The values of `LOSS_SCALE` in a trainer's state; those of the start where it has none."""
    saved = state.get("loss_scale") or dict.fromkeys(LOSS_SCALE, 0) | {"scale": INITIAL_SCALE}
    return [float(saved[name]) for name in LOSS_SCALE]


def _read_state(folder: Path, part: Callable[[Mapping[str, Any]], _T]) -> _T:
    """What `part` makes of a checkpoint's trainer state. Raises CheckpointError."""
    file = folder / checkpoint.STATE
    try:
        return part(checkpoint.read_json(file))
    except _BAD_VALUES as err:
        raise CheckpointError(f"{file}: not a trainer's state: {err}") from None


def saved_loss_scale(path: str | Path) -> float:
    """The loss scale that a checkpoint goes on with."""
    return _read_state(find_checkpoint(path), _loss_scale)[0]


def saved_packing(path: str | Path) -> dict[str, Any]:
    """How the data of a checkpoint's run were packed: pack, and separator, an id or None.

    What an older checkpoint does not record is left out. Raises CheckpointError where the file is
    no trainer's state.
    """
    progress = _read_state(find_checkpoint(path), _progress)
    found: dict[str, Any] = {}
    if progress.packed is not None:
        found["pack"] = bool(progress.packed)
    if progress.separator is not None:
        found["separator"] = None if progress.separator == -1 else progress.separator
    return found


def saved_config(path: str | Path) -> dict[str, Any]:
    """The fields of the TrainConfig that a checkpoint was trained with."""
    file = find_checkpoint(path) / checkpoint.STATE
    config = checkpoint.read_json(file).get("train")
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: not a trainer's state: it has no configuration")
    return config


def evaluate(
    model: Model,
    dataset: Dataset,
    batch_size: int,
    seq_len: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Mean loss in nats, and accuracy, over every predicted token of a dataset.

    should_stop   asked before each batch; True ends with the batches so far

    Raises DataError where there is no token to predict, as in packed documents of one token each.
    """
    loss, count, top1, top5 = 0.0, 0, 0, 0
    for batch in dataset.batches(batch_size, seq_len, seed=None, epoch=0):
        if should_stop():
            break
        scores = model.scores(batch.inputs, batch.targets, documents=batch.documents)
        loss += float(scores.loss.sum(dtype=np.float64))
        rank = np.where(np.isfinite(scores.loss), scores.rank, -1)  # of what is no number: none
        top1 += int((rank == 0).sum())
        top5 += int(((rank >= 0) & (rank < 5)).sum())
        count += batch.n_targets
    else:
        _need_targets(count)
    n = max(1, count)
    return Evaluation(loss / n, count, top1 / n, top5 / n)


@dataclass(frozen=True)
class Comparison:
    """Two models on the same tokens.

    loss_a, loss_b   mean losses in nats
    wins             share of the tokens that b foresaw better than a; equals count half
    tokens           predicted by each
    """

    loss_a: float
    loss_b: float
    wins: float
    tokens: int

    def record(self) -> dict[str, Any]:
        return {
            "loss_a": self.loss_a,
            "loss_b": self.loss_b,
            "difference": self.loss_b - self.loss_a,
            "wins": self.wins,
            "tokens": self.tokens,
        }


def compare(a: Model, b: Model, dataset: Dataset, batch_size: int, seq_len: int) -> Comparison:
    """Losses of two models over every predicted token of a dataset, and which one wins how often.

    Raises ConfigError where the models' vocabularies differ, DataError as `evaluate`.
    """
    check_same_vocabulary(a.config, b.config)
    losses, wins, count = np.zeros(2), 0.0, 0
    for batch in dataset.batches(batch_size, seq_len, seed=None, epoch=0):
        counted = batch.targets != IGNORED
        first, second = (
            m.scores(batch.inputs, batch.targets, documents=batch.documents).loss[counted]
            for m in (a, b)
        )
        losses += [first.sum(dtype=np.float64), second.sum(dtype=np.float64)]
        wins += float((second < first).sum() + 0.5 * (second == first).sum())
        count += batch.n_targets
    _need_targets(count)
    loss_a, loss_b = map(float, losses / count)
    return Comparison(loss_a, loss_b, wins / count, count)


def check_same_vocabulary(a: MambaConfig, b: MambaConfig) -> None:
    """Raises ConfigError where two models' losses cannot be compared."""
    if a.vocab_size != b.vocab_size:
        raise ConfigError(
            f"the models have {a.vocab_size} and {b.vocab_size} tokens: losses of different "
            "vocabularies cannot be compared"
        )


def _need_targets(count: int) -> None:
    if not count:
        raise DataError(
            "the data have no token to predict: of a packed document the first is only read"
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _Clock:
    """Seconds of training: what is done while it is paused does not count."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start

    def restart(self) -> float:
        """Seconds since it was started, above 0; and start it anew."""
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        return max(passed, 1e-9)


class _Metrics(contextlib.AbstractContextManager["_Metrics"]):
    """metrics.jsonl of a run folder: one JSON object a line, flushed at once.

    Records of steps after `step` are dropped first: these steps are done again.
    """

    def __init__(
        self, out: Path | None, on_log: Callable[[dict[str, Any]], None] | None, step: int
    ) -> None:
        self._on_log = on_log
        self._file = None
        self._path = (out or Path()) / METRICS
        if out:
            with self._writing():
                out.mkdir(parents=True, exist_ok=True)
                kept = _until(self._path, step) if self._path.exists() else ()
                temporary = out / f".{METRICS}.tmp-{os.getpid()}"
                temporary.write_text("".join(kept), encoding="utf-8")
                os.replace(temporary, self._path)
                self._file = self._path.open("a", encoding="utf-8")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise TrainingError(f"{self._path}: cannot be written: {reason}") from None

    def write(self, record: dict[str, Any]) -> None:
        if self._file:
            with self._writing():
                self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
                self._file.flush()
        if self._on_log:
            self._on_log(record)

    def __exit__(self, *exc: object) -> None:
        if self._file:
            with contextlib.suppress(OSError):  # what could not be flushed was reported
                self._file.close()


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """The record with null for numbers that JSON does not know."""
    return {k: None if v != v or v in (math.inf, -math.inf) else v for k, v in record.items()}


def _until(path: Path, step: int) -> Iterable[str]:
    """Lines of a metrics file up to a step."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                yield f"{line.rstrip()}\n"  # the last may have been cut off before its end
