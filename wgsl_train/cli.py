"""The command line: wgsl-train train | eval | compare | generate | embed | and more."""

from __future__ import annotations

import contextlib
import enum
import inspect
import json
import math
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from . import __version__, checkpoint, tuned
from .config import (
    LORA_TARGETS,
    NO_DECAY,
    PRESETS,
    WRITE_THROUGH,
    LoraBase,
    MambaConfig,
    TrainConfig,
    check_keys,
    expand_preset,
    load_toml,
)
from .data import (
    BYTES_NOTE,
    TOKENIZER,
    ByteTokenizer,
    Dataset,
    Tokenizer,
    find_files,
    find_tokenizer,
    load_tokenizer,
)
from .device import Device, list_adapters, no_adapter, request_device
from .doctor import diagnose
from .errors import ConfigError, DataError, DeviceError, TrainingError, WgslTrainError
from .interrupts import collected_signals, ending_by_signals, open_streams, unread
from .kernel import Target
from .model import Model, StepPlan, find_checkpoint, plan_step, read_config, saved_base
from .models import lora
from .models.language_model import parameters
from .models.lora import Lora
from .ops.optimizer import INITIAL_SCALE
from .plan import Layout, Memory
from .plot import plot
from .tensorboard import event_writer
from .train import (
    CARRIED,
    METRICS,
    TUNING,
    Trainer,
    check_same_vocabulary,
    compare,
    evaluate,
    saved_config,
    saved_loss_scale,
    saved_packing,
)
from .tune import Tuned
from .tune import tune as measure_choices

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train Mamba language models on any GPU, through WebGPU.",
    epilog="Ends with 0 where all went well; 1: bad input, or a run that failed; 2: wrong usage; "
    "3: no adapter that could do it; 128 + N: stopped by signal N.",
)
out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
err = Console(highlight=False, soft_wrap=True, markup=False, emoji=False, stderr=True)

# What a run writes to its folder
_OF_A_RUN = re.compile(
    r"checkpoint-\d+|events\.out\..*|"
    + "|".join(map(re.escape, (METRICS, TUNING, TOKENIZER, BYTES_NOTE)))
)

# Sizes of the model that `train` makes where neither flag nor file says; layers say how many
DEFAULT_MODEL = {"d_model": 128, "n_layer": 4}
DEFAULT_EPOCHS = 1


class Dtype(enum.StrEnum):
    """Of raw token files."""

    uint16 = "uint16"
    uint32 = "uint32"


_DATA_HELP = "Files, folders and glob patterns; several may follow."
DataOption = Annotated[list[str], typer.Option("--data", help=_DATA_HELP)]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="Adapter: index or part of its name, as `devices` lists them."),
]
RequireOption = Annotated[
    bool, typer.Option("--require-gpu", help="Refuse an adapter that a CPU emulates.")
]
AllowOption = Annotated[
    bool, typer.Option("--allow-cpu-adapter", help="No warning about an adapter on the CPU.")
]
PackOption = Annotated[
    bool | None,
    typer.Option(
        "--pack/--no-pack",
        help="Keep documents apart, in the state and in the loss: each file is one, and of a .jsonl "
        'file each line\'s "text".',
    ),
]
SeparatorOption = Annotated[
    int | None, typer.Option(min=0, help="With --pack, an id that ends a document, too.")
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(help="A tokenizer.json; by default the model's own, or bytes for a new model."),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset", help=f"Options of a kind of model, which others override: {', '.join(PRESETS)}."
    ),
]
ModelArgument = Annotated[
    Path | None,
    typer.Argument(help="A run's folder, or a checkpoint; by default a new model of the sizes."),
]
BatchSizeOption = Annotated[int, typer.Option(min=1, help="Sequences in a batch.")]
SeqLenOption = Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")]
CheckpointingOption = Annotated[
    bool,
    typer.Option("--activation-checkpointing", help="Recompute each layer in the backward pass."),
]
DtypeOption = Annotated[
    Dtype | None, typer.Option(help="Of the ids in .bin files. [default: uint16]")
]


# Options from configurations


def _field_help(cls: type) -> dict[str, str]:
    """The description of each field, from the class's docstring: lines "name    what it is"."""
    names = {f.name for f in fields(cls)}
    text: dict[str, str] = {}
    name = None
    for line in (inspect.getdoc(cls) or "").splitlines():
        first, _, rest = line.partition(" ")
        if first in names:
            name = first
            text[name] = rest.strip()
        elif name and line.startswith("  "):
            text[name] += " " + line.strip()
        else:
            name = None
    return text


_HELP_ENDS = {  # where a default is no plain value, or the option takes more than the field
    "vocab_size": "[default: the tokenizer's]",
    "layers": "As in mamba*3,mamba:d_state=8; see docs/features.md.",
    "epochs": f"[default: {DEFAULT_EPOCHS}, without --steps]",
    "memory_budget": "A unit may follow, as in 8GiB.",
    "train": "May be given again.",
    "lora_targets": f"May be given again. [default: {' '.join(LORA_TARGETS)}]",
    "no_decay": f"May be given again. [default: {' '.join(NO_DECAY)}]",
}


def _help(f: Field[Any], described: str) -> str:
    """A field's help: its description as a sentence, and its default."""
    default = DEFAULT_MODEL.get(f.name, f.default)
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, tuple):
        default = " ".join(map(str, default))  # as the option takes it
    end = "" if default in (None, MISSING) else f"[default: {default}]"
    return f"{described[0].upper()}{described[1:]}. {_HELP_ENDS.get(f.name, end)}".strip()


_TYPES = (int, float, tuple[float, float], tuple[int, int])  # that typer reads


def _option_type(f: Field[Any], hint: Any) -> Any:
    if f.name in ("dt_rank", "memory_budget"):  # a number, or "auto"; a number with a unit
        return str
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    if hint == tuple[str, ...]:
        return list[str]
    if hint in (bool, *_TYPES):
        return hint
    return kinds[0] if len(kinds) == 1 and kinds[0] in _TYPES else str


def _options(cls: type) -> Iterator[inspect.Parameter]:
    """A command-line option for every field of a configuration, and for a model's presets; None
    where it is not given."""
    hints, described = get_type_hints(cls), _field_help(cls)
    if cls is MambaConfig:
        yield inspect.Parameter(
            "preset", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=PresetOption
        )
    for f in fields(cls):
        kind = _option_type(f, hints[f.name])
        flag = "--" + f.name.replace("_", "-")
        if kind is bool:
            flag = f"{flag}/--no-{flag[2:]}"
        option = typer.Option(flag, help=_help(f, described[f.name]))
        annotation: Any = Annotated[kind | None, option]
        yield inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )


def _with_options(*classes: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of configurations as options; it gets them as **given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
        extra = [option for cls in classes for option in _options(cls)]
        command.__signature__ = signature.replace(parameters=[*own, *extra])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in [*own, *extra]}
        return command

    return decorate


def _given(cls: type, given: Mapping[str, Any]) -> list[str]:
    """Names of the fields of a configuration that the command line gives by options of their own."""
    return [f.name for f in fields(cls) if given[f.name] not in (None, [])]


def _flags(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that the command line gives."""
    values = {name: given[name] for name in _given(cls, given)}
    if cls is MambaConfig and given["preset"]:
        values = expand_preset({"preset": given["preset"], **values})
    if re.fullmatch(r"\d+", str(values.get("dt_rank"))):
        values["dt_rank"] = int(values["dt_rank"])
    if "lora_targets" in values:
        values["lora_targets"] = [t for text in values["lora_targets"] for t in text.split(",")]
    return values


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of which later ones replace earlier ones: steps replace epochs, and vice versa."""
    merged: dict[str, Any] = {}
    for layer in layers:
        if "steps" in layer or "epochs" in layer:
            merged = {k: v for k, v in merged.items() if k not in ("steps", "epochs")}
        merged |= layer
    return merged


def _train_config(*layers: Mapping[str, Any]) -> TrainConfig:
    settings = _merged({"epochs": DEFAULT_EPOCHS}, *layers)
    if isinstance(settings.get("memory_budget"), str):
        settings["memory_budget"] = parse_bytes(settings["memory_budget"])
    return TrainConfig.from_dict(settings)


def parse_bytes(text: str) -> int:
    """A size such as "8GiB", "500 MB" or "1073741824", in bytes. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([kmgt])(i?))?b?", text.strip().lower())
    if not match:
        raise ConfigError(
            f"memory_budget is {text!r}; allowed: bytes, or a number with a unit, such as 8GiB"
        )
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" kmgt".index(prefix or " ")))


# Commands


def _open(device: str | None, require_gpu: bool, allow_cpu: bool) -> Device:
    opened = request_device(device, require_gpu=require_gpu, quiet=allow_cpu)
    err.print(f"adapter    {opened}")
    return opened


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 28 else f"{nbytes / 2**20:.1f} MiB"


def _memory_line(memory: Memory) -> str:
    kinds = ", ".join(f"{k} {_size(n)}" for k, n in memory.by_kind().items() if n)
    return f"{_size(memory.total)} planned: {kinds}"


@app.command()
@_with_options(MambaConfig, TrainConfig)
def train(
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help=f"{_DATA_HELP} Needed, unless [data] of --config has paths."),
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="The run's folder.")] = Path("run"),
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file with tables [model] and [train], whose keys are the options below, "
            "and [data], whose keys are paths, tokenizer, dtype, pack and separator. Options "
            "override it."
        ),
    ] = None,
    from_pretrained: Annotated[
        Path | None,
        typer.Option(help="Start from this model: a folder with config.json and weights."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the run in --out, under its own settings by default."
        ),
    ] = False,
    stop_after: Annotated[
        int | None,
        typer.Option(min=1, help="End after this step as an interrupt would; for tests."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print plan, parameters and memory; train nothing."),
    ] = False,
    write_through: Annotated[
        bool,
        typer.Option("--write-through", help="The same as --train '*.x_proj.*' --max-delta 0.05."),
    ] = False,
    hot_reload: Annotated[
        bool,
        typer.Option(
            "--hot-reload",
            help="Swap in shader templates that are edited meanwhile, if they compute the same.",
        ),
    ] = False,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", help="Write event files for TensorBoard, too, to OUT."),
    ] = False,
    pack: PackOption = None,
    separator: SeparatorOption = None,
    tokenizer: TokenizerOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    require_gpu: RequireOption = False,
    allow_cpu_adapter: AllowOption = False,
    **given: Any,
) -> None:
    """Train a model on text or token files.

    Writes OUT/metrics.jsonl and OUT/checkpoint-N. Ctrl-C, SIGTERM and SIGHUP save first; a second one
    does not wait.
    """
    if resume and from_pretrained:
        raise typer.BadParameter("either --resume or --from-pretrained")
    tables = load_toml(config) if config else {"model": {}, "train": {}, "data": {}}
    if resume and not dry_run:  # a run in progress drops old checkpoints as they are read
        checkpoint.check_unlocked(out_dir)
    start = checkpoint.latest(out_dir) if resume else None
    if resume and start is None:
        raise ConfigError(f"{out_dir} has no whole checkpoint to resume from")
    _check_free(out_dir, resume or dry_run)
    before = {k: v for k, v in saved_config(start).items() if v is not None} if start else {}
    preset = WRITE_THROUGH if write_through else {}
    train_config = _train_config(before, tables["train"], preset, _flags(TrainConfig, given))
    train_config.check_effect([*tables["train"], *_given(TrainConfig, given)])
    source = start or (find_checkpoint(from_pretrained) if from_pretrained else None)
    paths, tokenizer, kind = _data_settings(tables["data"], config, data, tokenizer, dtype)
    packed = saved_packing(start) if start else {}
    packing = _packing(tables["data"], config, pack, separator, packed)
    tokens = load_tokenizer(tokenizer or (find_tokenizer(source) if source else None))
    if not start and isinstance(tokens, ByteTokenizer) and (out_dir / TOKENIZER).exists():
        raise ConfigError(
            f"{out_dir} holds a {TOKENIZER}, but the tokens are bytes: give it as --tokenizer, or "
            "choose another --out"
        )
    sizes = {**expand_preset(tables["model"]), **_flags(MambaConfig, given)}
    model_config = _model_config(sizes, source, tokens)
    model_config.check_effect([*tables["model"], *_given(MambaConfig, given)])
    files = _without_own(paths, out_dir)
    dataset = Dataset.from_paths(files, tokens, kind, model_config.vocab_size, **packing)
    training, held_out = dataset.split(train_config.eval_fraction)
    opened = _open(device, require_gpu, allow_cpu_adapter)
    base = train_config.lora_base or (saved_base(source) if source else "f32")
    adapter = _adapter(model_config, train_config, source)
    Lora.check_base(adapter, base)
    layout = _layout(model_config, train_config, adapter, base, opened.target)
    layout.set_decay(train_config.decays)
    planned = _plan(model_config, train_config, layout, opened.target, training)
    memory = planned.plan.memory()
    scale = saved_loss_scale(start) if start else INITIAL_SCALE
    for line in _description(
        model_config, train_config, layout, adapter, base, memory, training, held_out, scale
    ):
        err.print(line)
    if dry_run:
        _print_plan(planned, layout, train_config)
    memory.require(train_config.memory_budget)
    if dry_run:
        return
    with checkpoint.lock(out_dir):
        _check_free(out_dir, resume)
        if source:
            model = Model.from_pretrained(source, opened, base)
        else:
            model = Model(model_config, opened, train_config.seed)
        if not start or not find_tokenizer(out_dir):
            tokens.save(out_dir)
        trainer = Trainer(model, train_config)
        if start:
            trainer.load(start, checked=True)
            err.print(f"resuming   {start}")
    _run(trainer, training, held_out, out_dir, stop_after, hot_reload, tensorboard)


def _check_free(out_dir: Path, resume: bool) -> None:
    if resume:
        return
    if checkpoint.checkpoints(out_dir):
        raise ConfigError(
            f"{out_dir} holds a run already: choose another --out, or go on with --resume"
        )
    checkpoint.check_unused(out_dir)  # a model there would be taken for the run's own


def _without_own(paths: list[str], out_dir: Path) -> list[Path]:
    """The files of the data, without what the run itself writes in a folder among them."""
    own, named = out_dir.resolve(), {Path(path).resolve() for path in paths}

    def written(file: Path) -> bool:
        place = file.resolve()
        if place in named or own not in place.parents:
            return False
        first = place.relative_to(own).parts[0]
        return bool(_OF_A_RUN.fullmatch(first))

    files = [file for file in find_files(paths) if not written(file)]
    if not files:
        raise DataError(f"{' '.join(paths)}: holds nothing but the run in {out_dir}; name its data")
    return files


def _data_settings(
    table: Mapping[str, Any],
    config: Path | None,
    data: list[str] | None,
    tokenizer: Path | None,
    dtype: Dtype | None,
) -> tuple[list[str], Path | None, Any]:
    """Paths, tokenizer and dtype: of the command line, else of the table [data]."""
    known = ["paths", "tokenizer", "dtype", "pack", "separator"]
    check_keys(table, known, f"{config}: [data]")
    paths = table.get("paths", [])
    paths = [paths] if isinstance(paths, str) else paths
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ConfigError(f"{config}: [data] paths is {paths!r}; allowed: a list of paths")
    if not isinstance(table.get("tokenizer", ""), str):
        raise ConfigError(f"{config}: [data] tokenizer is {table['tokenizer']!r}; allowed: a path")
    if table.get("dtype", "uint16") not in list(Dtype):
        allowed = " or ".join(map(repr, map(str, Dtype)))
        raise ConfigError(f"{config}: [data] dtype is {table['dtype']!r}; allowed: {allowed}")
    if not (data or paths):
        raise typer.BadParameter("files to train on are needed", param_hint="--data")
    if tokenizer is None and "tokenizer" in table:
        tokenizer = Path(table["tokenizer"])
    return data or paths, tokenizer, dtype.value if dtype else table.get("dtype", "uint16")


def _packing(
    table: Mapping[str, Any],
    config: Path | None,
    pack: bool | None,
    separator: int | None,
    before: Mapping[str, Any],
) -> dict[str, Any]:
    """Whether documents are kept apart, and by what: of the command line, else of [data].

    before   what the run that is resumed recorded, which the others must not contradict
    """
    for name, kind, allowed in (("pack", bool, "true or false"), ("separator", int, "an id")):
        if name in table and type(table[name]) is not kind:
            raise ConfigError(f"{config}: [data] {name} is {table[name]!r}; allowed: {allowed}")
    given = {"pack": pack, "separator": separator}
    given = {k: table.get(k) if v is None else v for k, v in given.items()}
    given = {k: v for k, v in given.items() if v is not None}
    for name, value in before.items():
        if given.get(name, value) != value:
            raise ConfigError(
                f"{name} is {given[name]!r}, but the run began with {value!r}: leave it out to go on "
                "in the same way, or start a new run in another --out"
            )
    return {"pack": False, "separator": None, **before, **given}


def _model_config(
    sizes: Mapping[str, Any], source: Path | None, tokenizer: Tokenizer
) -> MambaConfig:
    """Of the source, where there is one, which the given sizes must not contradict."""
    if source is None:
        made = {"vocab_size": tokenizer.vocab_size, **DEFAULT_MODEL, **sizes}
        if "layers" in sizes and "n_layer" not in sizes:
            del made["n_layer"]
        return MambaConfig.from_dict(made)
    found = read_config(source)
    for name, value in sizes.items():
        others = found.to_dict()
        if name == "n_layer":
            del others["layers"]
        if name == "layers" and found.attn_heads == found.auto_heads:
            others["attn_heads"] = "auto"  # so that entries mean what they did for a new model
        wanted = MambaConfig.from_dict({**others, name: value})
        if getattr(wanted, name) != getattr(found, name):
            raise ConfigError(f"{name} is {value!r}, but {source} has {getattr(found, name)!r}")
    return found


def _adapter(model: MambaConfig, config: TrainConfig, source: Path | None) -> Lora | None:
    """The adapter that will train: the source's own, or a new one."""
    adapter = Lora.of(model, config) if config.lora_rank else None
    if source and lora.is_in(source):
        adapter = lora.load(source, model)[0]
    return adapter


def _layout(
    model: MambaConfig,
    config: TrainConfig,
    adapter: Lora | None,
    base: LoraBase,
    target: Target,
) -> Layout:
    if adapter:
        specs = lora.adapted(model, adapter, base)
        return Layout(specs, target, adapter.low_rank(), config.shard)
    specs = parameters(model)
    trained = config.trained(spec.name for spec in specs)
    return Layout(
        [replace(s, trainable=s.name in trained) for s in specs], target, None, config.shard
    )


def _plan(
    model: MambaConfig, config: TrainConfig, layout: Layout, target: Target, data: Dataset
) -> StepPlan:
    return plan_step(
        model,
        layout,
        target,
        config.batch_size,
        config.seq_len,
        update=True,
        documents=data.pack,
        carried=CARRIED if config.carry_state else "",
        activation_checkpointing=config.activation_checkpointing,
        precision=config.precision,
    )


def _description(
    model: MambaConfig,
    config: TrainConfig,
    layout: Layout,
    adapter: Lora | None,
    base: LoraBase,
    memory: Memory,
    data: Dataset,
    held_out: Dataset | None,
    loss_scale: float,
) -> Iterator[str]:
    types = Counter(layer.type for layer in model.schedule)
    kinds = ", ".join(f"{n} {kind}" for kind, n in types.items())
    layers = "layers" if len(types) == 1 else f"layers ({kinds})"
    yield (
        f"model      {layout.n_params:,} parameters: d_model {model.d_model}, {model.n_layer} "
        f"{layers}, vocabulary {model.vocab_size}, {model.discretization}"
    )
    if config.precision == "f16":
        yield (
            "precision  f16 storage, f32 arithmetic and master weights, loss scale "
            f"{loss_scale:.0f}"
        )
    else:
        yield "precision  f32"
    shape = config.batch_size, config.seq_len
    steps = config.total_steps(data.n_batches(*shape, config.carry_state))
    yield (
        f"data       {len(data):,} tokens"
        + (", documents kept apart" if data.pack else "")
        + (f", {len(held_out):,} held out" if held_out else "")
        + f"; {steps:,} steps of {config.batch_size * config.gradient_accumulation} x "
        f"{config.seq_len} tokens"
    )
    n, trainable, owned = layout.n_params, layout.n_trainable, layout.n_owned
    saved = f", {8 * (n - owned):,} fewer than for all" if n > owned else ""
    yield (
        "trained    "
        + (f"adapted {adapter.summary(model)}, " if adapter else "")
        + f"{trainable:,} trainable of {n:,} ({trainable / n:.2%}); optimizer state "
        f"{8 * owned:,} bytes{saved}"
    )
    stored, as_f32 = layout.stored_bytes
    if stored:
        yield (
            f"base       {base}: {as_f32 // 4:,} weights in {stored:,} bytes, "
            f"{as_f32 - stored:,} fewer than as f32"
        )
    yield f"memory     {_memory_line(memory)}"


def _print_plan(planned: StepPlan, layout: Layout, config: TrainConfig) -> None:
    out.print(str(planned.plan))
    flops = sum(d.flops for d in planned.plan.dispatches)
    out.print(f"{len(planned.plan.dispatches)} dispatches, {flops / 1e9:.3f} GFLOP a micro-batch")
    for decays in (True, False):
        group = [s for s in layout.specs.values() if s.trainable and s.decay == decays]
        rate = config.weight_decay if decays else 0.0
        out.print(f"\nweight decay {rate}: {len(group)} parameters")
        for spec in group:
            out.print(f"  {spec.name} {spec.shape}")
    out.print(f"\nmemory: {_memory_line(planned.plan.memory())}")


class _Display:
    """How a run's records are shown: a bar on a terminal, a line every `log_every` steps else."""

    def __init__(self, trainer: Trainer, total: int) -> None:
        self._trainer, self._total = trainer, total
        self._first = trainer.progress.step
        self._tokens = trainer.progress.tokens
        self._shown = -1
        text = "step {task.completed}/{task.total}  {task.fields[numbers]}"
        numbers = TextColumn(text, markup=False, table_column=Column(overflow="fold"))
        self.bar = Progress(
            numbers,
            *([BarColumn()] if err.width >= 130 else []),  # which would cut the numbers off
            console=err,
            disable=not err.is_terminal,
        )
        self._task = self.bar.add_task("train", total=total, completed=self._first, numbers="")

    def show(self, record: dict[str, Any]) -> None:
        step = record["step"]
        if "eval_loss" in record:
            err.print(
                "step {step}: eval loss {eval_loss:.4f}, perplexity {perplexity:.3f}, "
                "{bits_per_token:.3f} bits a token, top-1 {top1:.1%}".format(**record)
            )
            return
        numbers = (
            "loss {loss:.4f}  lr {lr:.1e}  norm {grad_norm:.3g}  {tokens_per_s:,.0f} tokens/s"
        ).format(**record)
        if step > self._first + 1:  # the first step's speed tells nothing
            numbers += f"  left {self._left(record)}"
        numbers += "  SKIPPED" * record["skipped"]
        self.bar.update(self._task, completed=step, numbers=numbers)
        group = step // self._trainer.config.log_every
        if not err.is_terminal and (group != self._shown or step == self._total):
            self._shown = group
            err.print(f"step {step}/{self._total}  {numbers}")

    def _left(self, record: dict[str, Any]) -> str:
        """Time to the run's end at today's speed, evaluations and checkpoints aside."""
        progress = self._trainer.progress
        a_step = (progress.tokens - self._tokens) / (progress.step - self._first)
        seconds = (self._total - record["step"]) * a_step / max(record["tokens_per_s"], 1e-9)
        return str(timedelta(seconds=round(seconds)))


def _run(
    trainer: Trainer,
    data: Dataset,
    held_out: Dataset | None,
    out_dir: Path,
    stop_after: int | None,
    hot_reload: bool,
    tensorboard: bool,
) -> None:
    total, first = trainer.total_steps(data), trainer.progress.step
    if first >= total or (stop_after and first >= stop_after):
        err.print(f"nothing to do: step {first} of {total} is reached")
        return
    display = _Display(trainer, total)
    watchers: list[Callable[[dict[str, Any]], None]] = [display.show]

    with collected_signals() as caught:
        with display.bar, contextlib.ExitStack() as stack:

            def on_log(record: dict[str, Any]) -> None:
                if tensorboard and len(watchers) == 1:  # by now the folder is this run's
                    watchers.append(stack.enter_context(event_writer(out_dir, first)))
                for show in watchers:
                    with unread(caught):
                        show(record)

            trainer.fit(
                data,
                eval_dataset=held_out,
                out=out_dir,
                on_log=on_log,
                should_stop=lambda: bool(caught) or trainer.progress.step == stop_after,
                hot_reload=err.print if hot_reload else None,
            )
        with unread(caught):
            err.print(f"saved      {out_dir}/checkpoint-{trainer.progress.step}")
    if caught:
        raise SystemExit(128 + caught[0])


@app.command("eval")
def evaluate_command(
    model: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint.")],
    data: DataOption,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 8,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 256,
    pack: PackOption = None,
    separator: SeparatorOption = None,
    tokenizer: TokenizerOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    require_gpu: RequireOption = False,
    allow_cpu_adapter: AllowOption = False,
) -> None:
    """Loss, perplexity, bits a token and accuracy of a model on text or token files. Prints JSON."""
    source = find_checkpoint(model)
    tokens = load_tokenizer(tokenizer or source)
    vocab_size = _model_config({}, source, tokens).vocab_size
    kind: Any = (dtype or Dtype.uint16).value
    packing = _packing({}, None, pack, separator, {})
    dataset = Dataset.from_paths(data, tokens, kind, vocab_size, **packing)
    loaded = Model.from_pretrained(source, _open(device, require_gpu, allow_cpu_adapter))
    found = evaluate(loaded, dataset, batch_size, seq_len)
    _check_finite(model, found.loss)
    out.print(json.dumps(found.record()))


def _check_finite(model: Path, loss: float) -> None:
    if not math.isfinite(loss):
        raise TrainingError(f"{model}: the loss is {loss}: the model's weights are damaged")


@app.command("compare")
def compare_command(
    a: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    data: DataOption,
    batch_size: BatchSizeOption = 8,
    seq_len: SeqLenOption = 256,
    pack: PackOption = None,
    separator: SeparatorOption = None,
    tokenizer: TokenizerOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    require_gpu: RequireOption = False,
    allow_cpu_adapter: AllowOption = False,
) -> None:
    """Losses of two models on the same text or token files, and how often the second wins.

    Prints JSON; "wins" is the share of the tokens that B foresees better than A. The text becomes
    tokens by A's tokenizer.
    """
    sources = [find_checkpoint(path) for path in (a, b)]
    tokens = load_tokenizer(tokenizer or sources[0])
    configs = [_model_config({}, source, tokens) for source in sources]
    check_same_vocabulary(*configs)
    vocab_size = configs[0].vocab_size
    kind: Any = (dtype or Dtype.uint16).value
    packing = _packing({}, None, pack, separator, {})
    dataset = Dataset.from_paths(data, tokens, kind, vocab_size, **packing)
    opened = _open(device, require_gpu, allow_cpu_adapter)
    first, second = (Model.from_pretrained(source, opened) for source in sources)
    found = compare(first, second, dataset, batch_size, seq_len)
    _check_finite(a, found.loss_a)
    _check_finite(b, found.loss_b)
    out.print(json.dumps(found.record()))


@app.command("plot")
def plot_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    file: Annotated[Path, typer.Option("--out", help="The file to draw: .png, .svg or .pdf.")],
) -> None:
    """Draw loss, learning rate, gradient norm and throughput of runs. Needs matplotlib."""
    plot(runs, file)


@app.command()
def embed(
    model: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint.")],
    text: Annotated[str, typer.Option(help="Text to embed; - reads standard input.")],
    tokenizer: TokenizerOption = None,
    device: DeviceOption = None,
    require_gpu: RequireOption = False,
    allow_cpu_adapter: AllowOption = False,
) -> None:
    """Print a text's embedding as a JSON list: d_model numbers, of length 1 as a vector."""
    source = find_checkpoint(model)
    ids = _encoded(load_tokenizer(tokenizer or source), _given_text(text), "text")
    loaded = Model.from_pretrained(source, _open(device, require_gpu, allow_cpu_adapter))
    vector = loaded.embed(ids)[0]
    if not all(map(math.isfinite, vector)):
        raise TrainingError(
            f"{model}: the embedding is not finite: the model's weights are damaged"
        )
    out.print(json.dumps(vector.tolist()))


@app.command()
def merge(
    model: Annotated[Path, typer.Argument(help="A LoRA run's folder, or a checkpoint of it.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the merged model.")],
    device: DeviceOption = None,
    require_gpu: RequireOption = False,
    allow_cpu_adapter: AllowOption = False,
) -> None:
    """Add a model's adapter to its weights, and save them as a plain model."""
    source = find_checkpoint(model)
    checkpoint.check_unused(out_dir)
    checkpoint.check_unlocked(out_dir)  # by a run that has saved nothing yet
    loaded = Model.from_pretrained(source, _open(device, require_gpu, allow_cpu_adapter))
    loaded.merge_adapter()
    loaded.save_pretrained(out_dir)
    if file := find_tokenizer(source):
        load_tokenizer(file).save(out_dir)


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Tokens to add, at most.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="Of the sampling; 0 takes the likeliest token.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample of so many likeliest tokens; 0: of all.")] = 50,
    top_p: Annotated[
        float, typer.Option(help="Sample of the likeliest with this probability; 1: of all.")
    ] = 0.9,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    tokenizer: TokenizerOption = None,
    device: DeviceOption = None,
    require_gpu: RequireOption = False,
    allow_cpu_adapter: AllowOption = False,
) -> None:
    """Continue a text."""
    source = find_checkpoint(model)
    tokens = load_tokenizer(tokenizer or source)
    text = _given_text(prompt)
    ids = _encoded(tokens, text, "prompt")
    loaded = Model.from_pretrained(source, _open(device, require_gpu, allow_cpu_adapter))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not know every character
    stream = loaded.stream(
        ids,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_token_id=loaded.config.eos_token_id,
    )
    sys.stdout.write(text)
    for piece in _pieces(tokens, ids.tolist(), stream):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _encoded(tokenizer: Tokenizer, text: str, what: str) -> Any:
    """The ids of a text, at least one."""
    ids = tokenizer.encode(text)
    if not ids.size:
        raise DataError(f"the {what} is empty: one token at least is needed to start from")
    return ids


def _given_text(text: str) -> str:
    """The text, or that of standard input for "-"."""
    if text != "-":
        return text
    if sys.stdin is None:
        raise DataError("standard input is closed")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"standard input: byte {error.start} is not UTF-8 text") from None


def _pieces(tokenizer: Tokenizer, prompt: list[int], ids: Iterator[int]) -> Iterator[str]:
    """Text as tokens arrive; a character of several tokens waits until it is whole.

    Tokens are decoded behind some before them, on which the spaces between them may depend.
    """
    before, new = prompt[-8:], list[int]()

    def text() -> str:
        return tokenizer.decode(before + new)[len(tokenizer.decode(before)) :]

    for token in ids:
        new.append(token)
        piece = text()
        if not piece.endswith("\ufffd") or len(new) >= 8:
            yield piece
            before, new = (before + new)[-8:], []
    yield text()


@app.command()
@_with_options(MambaConfig)
def profile(
    model: ModelArgument = None,
    batch_size: BatchSizeOption = 8,
    seq_len: SeqLenOption = 256,
    activation_checkpointing: CheckpointingOption = False,
    steps: Annotated[int, typer.Option(min=1, help="Steps to take the mean of.")] = 10,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers to this file.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a trace for Perfetto or chrome://tracing to this file."),
    ] = None,
    device: DeviceOption = None,
    require_gpu: RequireOption = False,
    allow_cpu_adapter: AllowOption = False,
    **given: Any,
) -> None:
    """Show where the time of a training step goes, by kernel, on random tokens.

    GPU time by timestamp queries, beside the adapter's measured rates of copying and arithmetic;
    whole sections by the host's clock where the adapter has none. Nothing is saved but --json
    and --trace.
    """
    source, config = _model_to_measure(model, given)
    opened = _open(device, require_gpu, allow_cpu_adapter)
    loaded = Model.from_pretrained(source, opened) if source else Model(config, opened)
    settings = TrainConfig(
        batch_size=batch_size, seq_len=seq_len, activation_checkpointing=activation_checkpointing
    )
    for file in filter(None, (json_file, trace)):
        if not file.absolute().parent.is_dir():  # before minutes go by
            raise ConfigError(f"{file}: there is no folder {file.parent}")
    found = Trainer(loaded, settings).profile(steps=steps)
    out.print(str(found))
    if json_file:
        checkpoint.write_json(json_file, found.to_dict())
    if trace:
        found.write_trace(trace)


def _model_to_measure(
    model: Path | None, given: Mapping[str, Any]
) -> tuple[Path | None, MambaConfig]:
    source = find_checkpoint(model) if model else None
    tokens = load_tokenizer(find_tokenizer(source) if source else None)
    config = _model_config(_flags(MambaConfig, given), source, tokens)
    config.check_effect(_given(MambaConfig, given))
    return source, config


@app.command()
@_with_options(MambaConfig)
def tune(
    model: ModelArgument = None,
    batch_size: BatchSizeOption = 8,
    seq_len: SeqLenOption = 256,
    activation_checkpointing: CheckpointingOption = False,
    kernel: Annotated[
        str, typer.Option(help="Only kernels whose name contains this. [default: all]")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure and print; store nothing.")
    ] = False,
    device: DeviceOption = None,
    require_gpu: RequireOption = False,
    allow_cpu_adapter: AllowOption = False,
    **given: Any,
) -> None:
    """Measure which tuning choices are fastest on this adapter, and keep them.

    For the kernels of one training step of these sizes. The fastest are stored in the user's cache
    folder (or WGSL_TRAIN_CACHE), by adapter, driver and version; every later run on this adapter
    uses them where its sizes are the same, unless WGSL_TRAIN_NO_TUNING is 1, and notes them in
    its folder's tuning.json. What is found is stored kernel by kernel, so that it may be stopped.
    """
    _, config = _model_to_measure(model, given)
    if not dry_run:
        checkpoint.make_folder(tuned.cache_folder())  # before hours go by
    opened = _open(device, require_gpu, allow_cpu_adapter)
    found: dict[str, Any] = {}
    saved = total = 0.0
    out.print(f"{'kernel':32}{'default us':>11}{'best us':>11}{'gain':>8}  choice; dims")
    for row in measure_choices(
        opened,
        config,
        batch_size,
        seq_len,
        activation_checkpointing=activation_checkpointing,
        only=kernel,
        announce=lambda text: err.print(f"measuring  {text}"),
    ):
        out.print(_tuned_line(row))
        found[row.key] = row.choices
        if not dry_run:
            file = tuned.store(opened.identity, {row.key: row.choices})
        total += row.dispatches * row.default
        saved += row.dispatches * (row.default - row.best)
    if not found:
        raise ConfigError(f"no kernel of this step that {kernel!r} names has alternatives")
    out.print(
        f"{len(found)} measured: {saved * 1e3:.3f} ms of {total * 1e3:.3f} ms a step are saved"
    )
    if not dry_run:
        err.print(f"stored     {file}")


def _tuned_line(row: Tuned) -> str:
    name, _, dims = row.key.partition(" ")
    choice = " ".join(f"{k}={v}" for k, v in row.choices.items()) if row.choices else "default"
    times = f"{row.default * 1e6:11.1f}{row.best * 1e6:11.1f}{row.gain:8.1%}"
    return f"{name:32}{times}  {choice}; {dims}"


@app.command()
def dev(
    kernels: Annotated[list[str], typer.Argument(help="Names, or patterns such as 'scan_*'.")],
    once: Annotated[bool, typer.Option("--once", help="Check once, and end.")] = False,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Of the step to time.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Of the step to time.")] = None,
    d_model: Annotated[int | None, typer.Option(min=1, help="Of the step to time.")] = None,
    at: Annotated[
        str, typer.Option(help="Sizes to time at instead, such as 'rows=4096 d_model=512'.")
    ] = "",
    soon: Annotated[
        float,
        typer.Option(min=0, help="Seconds of comparing before the speed; other cases follow."),
    ] = 1.0,
    patience: Annotated[float, typer.Option(min=1, help="Seconds that a kernel may take.")] = 30.0,
    device: DeviceOption = None,
) -> None:
    """Check kernels against their oracles, and time them, each time that their files are saved.

    Needs a checkout of the project, where the oracles are, and the extra "loop". Ctrl-C ends it;
    with --once, the exit status is 1 where a kernel is not right.
    """
    tool = Path(__file__).parent.parent / "tools" / "shader_loop.py"
    if not tool.exists():
        raise ConfigError(
            "the oracles of the kernels are not installed: clone the project, run "
            "`pip install -e '.[loop]'` in it, and use that"
        )
    given: dict[str, Any] = {"batch-size": batch_size, "seq-len": seq_len, "d-model": d_model}
    given |= {"device": device, "at": at or None, "soon": soon, "patience": patience}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    command = [sys.executable, str(tool), *kernels, *options, *["--once"] * once]
    process = subprocess.Popen(command)
    try:
        raise SystemExit(process.wait())
    finally:  # by a signal too
        process.terminate()
        process.wait()


@app.command()
def devices() -> None:
    """List the adapters of this machine."""
    rows = list_adapters()
    if not rows:
        raise DeviceError(no_adapter())
    for row in rows:
        out.print(str(row))


@app.command()
def doctor(device: DeviceOption = None) -> None:
    """Check adapter, driver, limits and features, and a few kernels against known values."""
    sound = diagnose(device, out.print)
    if not sound:
        raise SystemExit(3)


def _version(shown: bool) -> None:
    if shown:
        out.print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


def _spread_data(args: Sequence[str]) -> list[str]:
    """`--data A B C` as `--data A --data B --data C`."""
    spread: list[str] = []
    values: int | None = None  # of --data, so far; None behind another option
    for arg in args:
        if arg == "--data" or arg.startswith("--data="):
            values = int(arg != "--data")
        elif arg.startswith("-") and len(arg) > 1:
            values = None
        elif values is not None:
            if values:
                spread.append("--data")
            values += 1
        spread.append(arg)
    return spread


def main() -> None:
    """Run the command line; an error becomes one message and a non-zero exit code.

    1: bad input or a failed run; 2: wrong usage; 3: no adapter, or none that can do it;
    128 + N: signal N.
    """
    open_streams()

    def warn(message: Warning | str, *rest: Any, **more: Any) -> None:
        err.print(f"warning: {message}")

    try:
        with warnings.catch_warnings(), ending_by_signals():
            warnings.showwarning = warn
            app(_spread_data(sys.argv[1:]), prog_name="wgsl-train")
    except WgslTrainError as error:
        err.print(f"error: {error}")
        raise SystemExit(3 if isinstance(error, DeviceError) else 1) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        err.print(f"error: {where}{error.strerror or error}")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
