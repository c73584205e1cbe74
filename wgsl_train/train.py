"""Trainer: steps, schedule, evaluation, logging, saving, exact resume."""

from __future__ import annotations

import contextlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import checkpoint
from .config import TrainConfig
from .data import IGNORED, Batch, Dataset, Prefetcher
from .errors import CheckpointError, TrainingError
from .model import Model, find_checkpoint
from .ops.optimizer import LOG, HYPER, SCHEDULES, STATE

Array = np.ndarray[Any, Any]

TRAINER_STATE = "trainer_state.json"
MOMENTS = "optimizer.safetensors"
_CAPACITY = 1024  # steps whose loss and norm the GPU keeps until somebody looks


@dataclass
class StepResult:
    """One optimizer step. Its numbers are fetched from the GPU when one is first read."""

    step: int
    _trainer: Trainer = field(repr=False)

    @property
    def loss(self) -> float:
        """Mean loss in nats over the step's counted targets, before the update."""
        return self._trainer._logged(self.step)["loss"]

    @property
    def grad_norm(self) -> float:
        """Global L2 norm of the gradient before clipping."""
        return self._trainer._logged(self.step)["grad_norm"]

    @property
    def lr(self) -> float:
        """Learning rate of this step."""
        return self._trainer._logged(self.step)["lr"]

    @property
    def skipped(self) -> bool:
        """Whether the gradient was not finite, so that nothing moved."""
        return bool(self._trainer._logged(self.step)["skipped"])


@dataclass
class Evaluation:
    """Mean over all predicted tokens of a dataset."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_token(self) -> float:
        return self.loss / math.log(2)

    def record(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "eval_loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_token": self.bits_per_token,
            "eval_tokens": self.tokens,
        }


@dataclass
class Progress:
    """Where a run stands: what a checkpoint must hold besides weights and moments.

    step    optimizer steps called for, skipped ones included
    epoch   passes over the data begun, from 0
    batch   micro-batches of this epoch already used
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0


class Trainer:
    """Trains a model by AdamW, wholly on its device.

    Parameters
    ----------
    model    whose parameters are updated in place
    config   how

    A step reads nothing back: losses and norms of the last 1,024 steps stay on the GPU until a
    result is looked at, or `fit` logs.
    """

    def __init__(self, model: Model, config: TrainConfig) -> None:
        self.model, self.config = model, config
        self.progress = Progress()
        self._records: dict[int, dict[str, float]] = {}
        self._fetched = 0  # steps already fetched
        self._first_call = 0  # step at which the GPU's call counter was zero
        self._hyper_for: int | None = None
        self._optimizer: Any = None
        self._warned = False
        model.layout.set_decay(config.decays)

    # -- steps ---------------------------------------------------------------------------------

    def _encoder(self, batch: int, seqlen: int) -> Any:
        step = self.model.step_encoder(
            batch,
            seqlen,
            update=True,
            activation_checkpointing=self.config.activation_checkpointing,
            memory_budget=self.config.memory_budget,
        )
        self._optimizer = step.tensors.optimizer
        return step

    def _write_hyper(self, total_steps: int) -> None:
        """Write the constants of the run to the GPU, once."""
        if self._hyper_for == total_steps:
            return
        c = self.config
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

    def step(self, tokens: Array, targets: Array) -> StepResult:
        """One optimizer step on one batch.

        tokens    (batch, seqlen) integer ids below vocab_size
        targets   (batch, seqlen) ids already shifted; -100 is ignored
        """
        tokens = self.model.check_tokens(tokens)
        targets = self.model.check_targets(targets, tokens.shape)
        return self.step_batches([Batch(tokens, targets, int((targets != IGNORED).sum()))])

    def step_batches(self, batches: Sequence[Batch], total_steps: int | None = None) -> StepResult:
        """One optimizer step on several micro-batches, weighted by their tokens.

        A step whose targets are all ignored changes nothing, and warns.
        """
        count = sum(b.n_targets for b in batches)
        if count == 0:
            warnings.warn("all targets of a step are ignored: nothing is learnt from it", stacklevel=2)
        steps = [self._encoder(*b.inputs.shape) for b in batches]
        self._write_hyper(total_steps or self.config.steps or 0)
        for i, (step, batch) in enumerate(zip(steps, batches, strict=True)):
            self.model.load_batch(step, batch.inputs, batch.targets, count)
            sections = ["forward", "backward"]
            if i == len(batches) - 1 and count:
                sections.append("update")
            step.encoder.run(*sections, clear_grads=i == 0)
        self.progress.tokens += sum(b.inputs.size for b in batches)
        if count == 0:
            result = StepResult(self.progress.step, self)
            self._records[result.step] = {"loss": 0.0, "grad_norm": 0.0, "lr": 0.0, "skipped": 1.0}
            self._first_call += 1
        else:
            result = StepResult(self.progress.step, self)
        self.progress.step += 1
        if self.progress.step - self._fetched >= _CAPACITY:
            self._fetch()
        return result

    # -- the log -------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Bring the losses and norms of all steps since the last time back: one readback."""
        if self._fetched == self.progress.step:
            return
        log = self.model.buffers.read(self._optimizer.log)
        for step in range(self._fetched, self.progress.step):
            if step not in self._records:
                row = log[(step - self._first_call) % len(log)]
                self._records[step] = dict(zip(LOG, map(float, row), strict=False))
        self._fetched = self.progress.step
        for old in [s for s in self._records if s < self._fetched - 4 * _CAPACITY]:
            del self._records[old]
        self._check_skips()

    def _logged(self, step: int) -> dict[str, float]:
        if step >= self._fetched:
            self._fetch()
        return self._records[step]

    def _check_skips(self) -> None:
        """Say which tensor is not finite, once; stop after too many skips in a row."""
        in_a_row = 0
        for step in range(self._fetched - 1, -1, -1):
            if not self._records.get(step, {}).get("skipped"):
                break
            in_a_row += 1
        if not in_a_row:
            return
        stop = in_a_row >= self.config.max_skips
        if stop or not self._warned:
            name = self.first_non_finite() or "a gradient that is finite by now"
            message = f"step {self._fetched} skipped: non-finite at {name}"
            if stop:
                raise TrainingError(
                    f"{message}; {in_a_row} steps in a row were skipped. Lower the learning rate, "
                    "or resume from a checkpoint before this one."
                )
            self._warned = True
            warnings.warn(message, stacklevel=3)

    def first_non_finite(self) -> str | None:
        """Name of the first tensor with a NaN or infinity: a weight, else a gradient."""
        for kind, read in (("weight", self.model.state_dict), ("gradient of", self.model.read_grads)):
            for name, array in read().items():
                if not np.isfinite(array).all():
                    return f"{kind} {name}"
        return None

    # -- runs ----------------------------------------------------------------------------------

    def total_steps(self, dataset: Dataset) -> int:
        """Optimizer steps of the whole run on this dataset."""
        c = self.config
        return c.total_steps(dataset.n_batches(c.batch_size, c.seq_len))

    def _windows(self, dataset: Dataset) -> Iterator[tuple[list[Batch], int, int]]:
        """(micro-batches, epoch, batches used of it) of one optimizer step after another."""
        c = self.config
        epoch, used = self.progress.epoch, self.progress.batch
        while True:
            window: list[Batch] = []
            for batch in dataset.batches(c.batch_size, c.seq_len, c.seed, epoch, start=used):
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
    ) -> Progress:
        """Train until the configured number of steps or epochs is done.

        eval_dataset   evaluated every `eval_every` steps and at the end
        out            folder for metrics.jsonl and checkpoints; None saves nothing
        on_step        called after each optimizer step; reading the result waits for the GPU
        on_log         called with each record that goes to metrics.jsonl
        should_stop    asked after each step; True saves and returns

        Raises TrainingError after `max_skips` steps in a row without a finite gradient.
        """
        c, progress = self.config, self.progress
        total = self.total_steps(dataset)
        metrics = _Metrics(Path(out) if out else None, on_log, progress.step)
        since, tokens, first = time.perf_counter(), progress.tokens, progress.step
        with metrics, Prefetcher(self._windows(dataset)) as windows:
            for window, epoch, used in windows:
                if progress.step >= total:
                    break
                result = self.step_batches(window, total)
                progress.epoch, progress.batch = epoch, used
                if on_step:
                    on_step(result)
                step, stop = progress.step, should_stop()
                done = stop or step >= total
                if step - first >= c.log_every or done:
                    records = [{"step": s + 1, **self._logged(s)} for s in range(first, step)]
                    now = time.perf_counter()
                    rate = (progress.tokens - tokens) / max(now - since, 1e-9)
                    for record in records:
                        record["skipped"] = bool(record["skipped"])
                        metrics.write({**record, "tokens_per_s": round(rate, 1), "epoch": epoch})
                    since, tokens, first = now, progress.tokens, step
                if eval_dataset and (done or (c.eval_every and step % c.eval_every == 0)):
                    metrics.write(self.evaluate(eval_dataset).record(step))
                    since = time.perf_counter()
                if out and (done or (c.save_every and step % c.save_every == 0)):
                    self.save(out)
                    since = time.perf_counter()
                if done:
                    break
        return progress

    def evaluate(self, dataset: Dataset, batch_size: int | None = None) -> Evaluation:
        """Mean loss over every predicted token of a dataset. Changes nothing."""
        c, model = self.config, self.model
        return evaluate(model, dataset, batch_size or c.batch_size, c.seq_len)

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self, out: str | Path) -> Path:
        """Write `out`/checkpoint-STEP atomically, then drop old ones past `keep_checkpoints`.

        Raises CheckpointError where weights are not finite, or the disk is full.
        """
        self._fetch()
        state: dict[str, Any] = {"progress": vars(self.progress).copy()}
        state["train"] = self.config.to_dict()
        with checkpoint.new_checkpoint(out, self.progress.step) as folder:
            self.model.save_pretrained(folder)
            if self._optimizer is not None:
                counters = self.model.buffers.read(self._optimizer.state)
                state["optimizer"] = dict(zip(STATE, map(int, counters), strict=True))
                shapes = self._moment_shapes()
                moments = ((name, self.model.read_moment(name)) for name in shapes)
                checkpoint.save_tensors(folder / MOMENTS, moments, shapes=shapes)
            checkpoint.write_json(folder / TRAINER_STATE, state)
        checkpoint.rotate(out, self.config.keep_checkpoints)
        return Path(out) / f"checkpoint-{self.progress.step}"

    def _moment_shapes(self) -> dict[str, tuple[int, ...]]:
        specs = self.model.layout.specs
        return {f"{kind}.{n}": s.shape for kind in "mv" for n, s in specs.items() if s.trainable}

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint: weights, moments, step count, position in the data.

        Raises CheckpointError where it is damaged, or has no training state.
        """
        folder = find_checkpoint(path)
        state = checkpoint.read_json(folder / TRAINER_STATE)
        try:
            progress = Progress(**{k: int(v) for k, v in state["progress"].items()})
            counters = [int(state["optimizer"][name]) for name in STATE]
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise CheckpointError(f"{folder / TRAINER_STATE}: not a trainer's state: {err}") from None
        weights = checkpoint.model_tensors(folder, self.model.config.tie_embeddings)
        moments = checkpoint.load_tensors(folder / MOMENTS)
        checkpoint.check_names(self._moment_shapes(), moments.shapes, folder / MOMENTS)
        self.model.load_state_dict(weights, str(folder))
        self._encoder(self.config.batch_size, self.config.seq_len)
        for name in moments:
            self.model.write_moment(name, moments[name])
        self.model.buffers.write(self._optimizer.state, np.array(counters, np.uint32))
        self._first_call = progress.step - counters[STATE.index("calls")]
        self.progress, self._fetched = progress, progress.step


def evaluate(model: Model, dataset: Dataset, batch_size: int, seq_len: int) -> Evaluation:
    """Mean loss in nats over every predicted token of a dataset."""
    loss, count = 0.0, 0
    for batch in dataset.batches(batch_size, seq_len, seed=None, epoch=0):
        if batch.n_targets:
            loss += model.loss(batch.inputs, batch.targets) * batch.n_targets
            count += batch.n_targets
    return Evaluation(loss / max(1, count), count)


class _Metrics(contextlib.AbstractContextManager["_Metrics"]):
    """metrics.jsonl of a run folder: one JSON object a line, flushed at once."""

    def __init__(
        self, out: Path | None, on_log: Callable[[dict[str, Any]], None] | None, step: int
    ) -> None:
        self._on_log = on_log
        self._file = None
        if out:
            out.mkdir(parents=True, exist_ok=True)
            path = out / "metrics.jsonl"
            kept = list(_until(path, step)) if path.exists() else []
            self._file = path.open("w", encoding="utf-8")
            self._file.writelines(kept)

    def write(self, record: dict[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if self._on_log:
            self._on_log(record)

    def __exit__(self, *exc: object) -> None:
        if self._file:
            self._file.close()


def _until(path: Path, step: int) -> Iterable[str]:
    """Lines of a metrics file up to a step: what came after the checkpoint is done again."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                yield line
