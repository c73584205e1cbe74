"""The command line: wgsl-train train | eval | generate | doctor | devices."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import __version__, checkpoint
from .config import MambaConfig, TrainConfig, load_toml
from .data import Dataset, Tokenizer, load_tokenizer
from .device import Device, list_adapters, request_device
from .doctor import diagnose
from .errors import ConfigError, DeviceError, WgslTrainError
from .kernel import Target
from .model import Model, find_checkpoint, plan_step
from .models.mamba import parameters
from .plan import Layout, Memory
from .train import Trainer, evaluate

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train Mamba language models on any GPU, through WebGPU.",
)
out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)

# Sizes of the model that `train` makes where neither flag nor file says
DEFAULT_MODEL = {"d_model": 128, "n_layer": 4}

DataOption = Annotated[
    list[str],
    typer.Option("--data", help="Files, folders and glob patterns; several may follow."),
]
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
TokenizerOption = Annotated[
    Path | None, typer.Option(help="A tokenizer.json; bytes by default.")
]
DtypeOption = Annotated[str, typer.Option(help="Of .bin token files: uint16 or uint32.")]


def _field_help(cls: type) -> dict[str, str]:
    """The description of each field, from the class's docstring: "name    what it is"."""
    text: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.getdoc(cls).splitlines() if inspect.getdoc(cls) else []:  # type: ignore[union-attr]
        if start := re.match(r"([a-z0-9_*/, ]+?) {1,}(?=[^ ])(.*)", line):
            head = [n.strip() for n in re.split(r"[,/]", start[1].split("  ")[0])]
            if all(re.fullmatch(r"[a-z0-9_*]+", n) for n in head) and "  " in line + "  ":
                names = head
                for name in names:
                    text[name] = line[len(line.split("  ")[0]) :].strip()
                continue
        if line.startswith("    ") and names:
            for name in names:
                text[name] += " " + line.strip()
    return text


def _options(cls: type, skip: Sequence[str] = ()) -> list[inspect.Parameter]:
    """A command-line option for every field of a configuration; None where it is not given."""
    hints, described = get_type_hints(cls), _field_help(cls)
    made = []
    for f in fields(cls):
        if f.name in skip:
            continue
        kind = hints[f.name]
        given = [a for a in get_args(kind) if a is not type(None)]
        flag = "--" + f.name.replace("_", "-")
        if kind is bool:
            annotation: Any = bool | None
            flag = f"{flag}/--no-{flag[2:]}"
        elif f.name == "no_decay":
            annotation = list[str] | None
        elif f.name == "a_log_clamp":
            annotation = tuple[float, float] | None
        elif kind in (int, float) or int in given:
            annotation = (float if kind is float else str if "auto" in str(kind) else int) | None
        else:
            annotation = str | None
        help_text = described.get(f.name, "")
        option = typer.Option(flag, help=help_text, rich_help_panel=cls.__name__)
        made.append(
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[annotation, option],
            )
        )
    return made


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


def _given(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    values = {f.name: given[f.name] for f in fields(cls) if given.get(f.name) is not None}
    if str(values.get("dt_rank", "auto")) != "auto":
        try:
            values["dt_rank"] = int(values["dt_rank"])
        except ValueError:
            raise ConfigError(f"dt_rank is {values['dt_rank']!r}; allowed: an integer, or 'auto'") from None
    return values


def _open(device: str | None, require_gpu: bool, allow_cpu: bool) -> Device:
    opened = request_device(device, require_gpu=require_gpu, quiet=allow_cpu)
    err.print(f"adapter    {opened}")
    return opened


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 28 else f"{nbytes / 2**20:.1f} MiB"


def _memory_line(memory: Memory) -> str:
    kinds = ", ".join(f"{k} {_gib(n)}" for k, n in memory.by_kind().items() if n)
    return f"{_gib(memory.total)} planned: {kinds}"


@app.command()
@_with_options(MambaConfig, TrainConfig)
def train(
    data: DataOption,
    out_dir: Annotated[Path, typer.Option("--out", help="The run's folder.")] = Path("run"),
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with tables [model], [train], [data].")
    ] = None,
    from_pretrained: Annotated[
        Path | None, typer.Option(help="Start from this model instead of a new one.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    stop_after: Annotated[
        int | None, typer.Option(help="End after this step as an interrupt would; for tests.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print plan, parameters, memory; train nothing.")
    ] = False,
    tokenizer: TokenizerOption = None,
    dtype: DtypeOption = "uint16",
    device: DeviceOption = None,
    require_gpu: RequireOption = False,
    allow_cpu_adapter: AllowOption = False,
    **given: Any,
) -> None:
    """Train a model on text or token files.

    Writes OUT/metrics.jsonl and OUT/checkpoint-N. Ctrl-C and SIGTERM save first.
    """
    tables = load_toml(config) if config else {"model": {}, "train": {}}
    settings = {**tables["train"], **_given(TrainConfig, given)}
    if "steps" not in settings and "epochs" not in settings:
        settings["epochs"] = 1
    train_config = TrainConfig.from_dict(settings)
    model_flags = {**tables["model"], **_given(MambaConfig, given)}
    start = checkpoint.latest(out_dir) if resume else None
    if resume and start is None:
        raise ConfigError(f"{out_dir} has no whole checkpoint to resume from")
    source = start or (find_checkpoint(from_pretrained) if from_pretrained else None)
    tokens = load_tokenizer(tokenizer or (source if source and _has_tokenizer(source) else None))
    if source:
        model_config = MambaConfig.from_hugging_face(checkpoint.read_json(source / "config.json"))
        for name, value in model_flags.items():
            if getattr(model_config, name) != MambaConfig.from_dict(
                {**model_config.to_dict(), name: value}
            ).__dict__[name]:
                raise ConfigError(
                    f"{name} is {value!r}, but {source} has {getattr(model_config, name)!r}"
                )
    else:
        sizes = {"vocab_size": tokens.vocab_size, **DEFAULT_MODEL, **model_flags}
        model_config = MambaConfig.from_dict(sizes)
    dataset = Dataset.from_paths(data, tokens, dtype, model_config.vocab_size)  # type: ignore[arg-type]
    training, held_out = dataset.split(train_config.eval_fraction)
    opened = _open(device, require_gpu, allow_cpu_adapter)
    _describe(opened, model_config, train_config, training, held_out)
    if dry_run:
        _print_plan(opened.target, model_config, train_config)
        return
    with checkpoint.lock(out_dir):
        checkpoint.clean(out_dir)
        if not resume and checkpoint.checkpoints(out_dir):
            raise ConfigError(
                f"{out_dir} holds a run already: choose another --out, or go on with --resume"
            )
        if source:
            model = Model.from_pretrained(source, opened)
        else:
            model = Model(model_config, opened, train_config.seed)
        tokens.save(out_dir)
        trainer = Trainer(model, train_config)
        if start:
            trainer.load(start)
            err.print(f"resuming   {start} at step {trainer.progress.step}")
        _run(trainer, training, held_out, out_dir, stop_after)


def _has_tokenizer(source: Path) -> bool:
    names = ("tokenizer.json", "wgsl_train_tokenizer.json")
    return any((folder / n).exists() for folder in (source, source.parent) for n in names)


def _describe(
    device: Device, model: MambaConfig, config: TrainConfig, data: Dataset, held_out: Dataset | None
) -> None:
    layout = Layout(parameters(model), device.target)
    planned = plan_step(
        model, layout, device.target, config.batch_size, config.seq_len, update=True,
        activation_checkpointing=config.activation_checkpointing,
    )  # fmt: skip
    memory = planned.plan.memory()
    memory.require(config.memory_budget)
    batches = data.n_batches(config.batch_size, config.seq_len)
    err.print(
        f"model      {layout.n_params:,} parameters: d_model {model.d_model}, {model.n_layer} layers, "
        f"vocabulary {model.vocab_size}, {model.discretization}"
    )
    err.print("precision  f32")
    err.print(
        f"data       {len(data):,} tokens"
        + (f", {len(held_out):,} held out" if held_out else "")
        + f"; {config.total_steps(batches):,} steps of "
        f"{config.batch_size * config.gradient_accumulation} x {config.seq_len} tokens"
    )
    err.print(f"memory     {_memory_line(memory)}")


def _print_plan(target: Target, model: MambaConfig, config: TrainConfig) -> None:
    layout = Layout(parameters(model), target)
    layout.set_decay(config.decays)
    planned = plan_step(
        model, layout, target, config.batch_size, config.seq_len, update=True,
        activation_checkpointing=config.activation_checkpointing,
    )  # fmt: skip
    out.print(str(planned.plan), markup=False)
    flops = sum(d.flops for d in planned.plan.dispatches)
    out.print(f"{len(planned.plan.dispatches)} dispatches, {flops / 1e9:.3f} GFLOP a micro-batch")
    for decays in (True, False):
        group = [s for s in layout.specs.values() if s.decay == decays]
        rate = config.weight_decay if decays else 0.0
        out.print(f"\nweight decay {rate}: {len(group)} parameters")
        for spec in group:
            out.print(f"  {spec.name} {spec.shape}", markup=False)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying by them; a second one is not held up."""
    caught: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if caught:
            raise SystemExit(128 + number)
        caught.append(number)
        err.print("stopping after this step; the checkpoint is saved first")

    old = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _run(
    trainer: Trainer, data: Dataset, held_out: Dataset | None, out_dir: Path, stop_after: int | None
) -> None:
    total = trainer.total_steps(data)
    bar = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
        console=err,
        disable=not err.is_terminal,
    )
    task = bar.add_task("train", total=total, completed=trainer.progress.step, numbers="")
    latest: dict[str, Any] = {}

    def log(record: dict[str, Any]) -> None:
        if "eval_loss" in record:
            line = "step {step}: eval loss {eval_loss:.4f}, perplexity {perplexity:.3f}, {bits_per_token:.3f} bits a token"
            err.print(line.format(**record))
            return
        numbers = "loss {loss:.4f}  lr {lr:.2e}  norm {grad_norm:.3f}  {tokens_per_s:,.0f} tokens/s".format(**record)
        bar.update(task, completed=record["step"], numbers=numbers)
        latest.update(record, text=numbers)

    shown = -1

    def on_log(record: dict[str, Any]) -> None:
        nonlocal shown
        log(record)
        step = record["step"]
        if not err.is_terminal and "loss" in record and step // trainer.config.log_every != shown:
            shown = step // trainer.config.log_every
            err.print(f"step {step}/{total}  {latest['text']}")

    with _interrupts() as caught, bar:
        trainer.fit(
            data,
            eval_dataset=held_out,
            out=out_dir,
            on_log=on_log,
            should_stop=lambda: bool(caught) or trainer.progress.step == stop_after,
        )
    err.print(f"saved      {out_dir}/checkpoint-{trainer.progress.step}")
    if caught:
        raise SystemExit(128 + caught[0])


@app.command("eval")
def evaluate_command(
    model: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint.")],
    data: DataOption,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    seq_len: Annotated[int, typer.Option(min=1)] = 256,
    tokenizer: TokenizerOption = None,
    dtype: DtypeOption = "uint16",
    device: DeviceOption = None,
    require_gpu: RequireOption = False,
    allow_cpu_adapter: AllowOption = False,
) -> None:
    """Loss, perplexity and bits a token of a model on text or token files. Prints JSON."""
    source = find_checkpoint(model)
    loaded = Model.from_pretrained(source, _open(device, require_gpu, allow_cpu_adapter))
    tokens = load_tokenizer(tokenizer or source)
    dataset = Dataset.from_paths(data, tokens, dtype, loaded.config.vocab_size)  # type: ignore[arg-type]
    result = evaluate(loaded, dataset, batch_size, seq_len)
    record = result.record(0)
    del record["step"]
    out.print(json.dumps(record), markup=False)


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=0)] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 50,
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = 0.9,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    tokenizer: TokenizerOption = None,
    device: DeviceOption = None,
    require_gpu: RequireOption = False,
    allow_cpu_adapter: AllowOption = False,
) -> None:
    """Continue a text."""
    source = find_checkpoint(model)
    tokens = load_tokenizer(tokenizer or source)
    loaded = Model.from_pretrained(source, _open(device, require_gpu, allow_cpu_adapter))
    text = sys.stdin.read() if prompt == "-" else prompt
    sys.stdout.write(text)
    stream = loaded.stream(
        tokens.encode(text),
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_token_id=loaded.config.eos_token_id,
    )
    for piece in _pieces(tokens, stream):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _pieces(tokenizer: Tokenizer, ids: Iterator[int]) -> Iterator[str]:
    """Text as tokens arrive; a character of several tokens waits until it is whole."""
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = tokenizer.decode(pending)
        if not text.endswith("\ufffd") or len(pending) > 8:
            yield text
            pending = []
    yield tokenizer.decode(pending)


@app.command()
def devices() -> None:
    """List the adapters of this machine."""
    rows = list_adapters()
    if not rows:
        raise DeviceError("no adapter; `wgsl-train doctor` says what to install")
    for row in rows:
        out.print(str(row), markup=False)


@app.command()
def doctor(device: DeviceOption = None) -> None:
    """Check adapter, driver, limits and features, and a few kernels against known values."""
    sound = diagnose(device, lambda line: out.print(line, markup=False))
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
    values = -1
    for arg in args:
        if arg == "--data":
            values = 0
        elif arg.startswith("-") and len(arg) > 1:
            values = -1
        elif values >= 0:
            if values:
                spread.append("--data")
            values += 1
        spread.append(arg)
    return spread


def main() -> None:
    """Run the command line; an error becomes one message and a non-zero exit code.

    1: bad input or a failed run; 2: wrong usage; 3: no usable adapter; 128 + N: signal N.
    """
    warnings.showwarning = lambda message, *rest: err.print(f"warning: {message}", markup=False)
    try:
        app(_spread_data(sys.argv[1:]), prog_name="wgsl-train")
    except WgslTrainError as error:
        err.print(f"error: {error}", markup=False)
        raise SystemExit(3 if isinstance(error, DeviceError) else 1) from None
    except BrokenPipeError:
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
