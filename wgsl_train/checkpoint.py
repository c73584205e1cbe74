"""Tensors in and out of safetensors files, and folders of checkpoints that are whole or absent.

Everything is written under a temporary name, forced to the disk, and renamed: a process may be
killed, or a disk be full, at any moment, and what was there before is there still. Tensors are
read one at a time. Touches no GPU.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError

CONFIG = "config.json"
STATE = "trainer_state.json"  # of a checkpoint that a trainer can go on from
MOMENTS = "optimizer.safetensors"  # and what it needs besides
FILES = "files"  # key of a trainer's state: what else lies in its checkpoint
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
LOCK = ".lock"
BLOCK = 1 << 24  # bytes compared at a time

EMBEDDING = "backbone.embeddings.weight"
HEAD = "lm_head.weight"
_OTHER_NAMES = {"backbone.embedding.weight": EMBEDDING}  # mamba_ssm's

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
AnyPath = str | os.PathLike[str]

# safetensors' names of dtypes, as they lie in the file and as they are in memory
_STORED = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _STORED.items() if name != "BF16"}


# Reading


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: its file, its form there, and the bytes from the file's start."""

    path: Path
    dtype: str
    shape: Shape
    offset: int

    @property
    def stored(self) -> np.dtype[Any]:
        return np.dtype(_STORED[self.dtype])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.stored.itemsize


class Tensors(Mapping[str, Array]):
    """Tensors of one or several files, by name. Each access reads that tensor from the disk.

    Floats of any width arrive as float32, other dtypes as they are.
    """

    def __init__(self, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> None:
        self.entries = dict(entries)
        self.metadata = dict(metadata)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes by name, without reading a tensor."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def __getitem__(self, name: str) -> Array:
        entry = self.entries[name]
        count = math.prod(entry.shape)
        try:
            raw = np.fromfile(entry.path, entry.stored, count, offset=entry.offset)
        except OSError as error:
            raise CheckpointError(f"{entry.path}: {name}: cannot be read: {error}") from None
        if raw.size != count:
            raise CheckpointError(f"{entry.path}: {name}: the file was cut off after it was opened")
        if entry.dtype == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        elif entry.dtype in ("F16", "F64"):
            raw = raw.astype(np.float32)
        return raw.reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def same(self, a: str, b: str) -> bool:
        """Whether two tensors have the same bytes. Compares block by block."""
        first, second = self.entries[a], self.entries[b]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        with open(first.path, "rb") as left, open(second.path, "rb") as right:
            left.seek(first.offset)
            right.seek(second.offset)
            sizes = [min(BLOCK, first.nbytes - at) for at in range(0, first.nbytes, BLOCK)]
            return all(left.read(size) == right.read(size) for size in sizes)


def load_tensors(path: AnyPath) -> Tensors:
    """The tensors of a .safetensors file, or of a folder: model.safetensors, or shards by an index.

    Raises CheckpointError naming the file where one is missing, cut off or damaged: headers and
    offsets are checked here, wholly, before any tensor is read.
    """
    given = Path(path)
    if given.is_dir():
        if (given / WEIGHTS).exists():
            return _open(given / WEIGHTS)
        if (given / INDEX).exists():
            return _open_shards(given / INDEX)
        for name in PICKLES:
            if (given / name).exists():
                _refuse_pickle(given / name)
        raise CheckpointError(f"{given}: holds no {WEIGHTS} and no {INDEX}")
    if given.name.endswith(".index.json"):
        return _open_shards(given)
    if given.suffix in (".bin", ".pt", ".pth"):
        _refuse_pickle(given)
    return _open(given)


def _refuse_pickle(path: Path) -> None:
    raise CheckpointError(
        f"{path}: a pickle, which can run code of its author's; convert it where torch is "
        'installed: python -c "import torch, safetensors.torch as s; '
        "w = torch.load('pytorch_model.bin', weights_only=True, map_location='cpu'); "
        "s.save_file({k: v.clone() for k, v in w.items()}, 'model.safetensors')\""
    )


def _open(path: Path) -> Tensors:
    """One file. The library checks that the header covers the file's bytes exactly, without
    holes or overlaps; what it found must then equal what is read here."""
    try:
        with safe_open(str(path), "numpy") as file:
            found = {}
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                view = file.get_slice(name)
                found[name] = (view.get_dtype(), tuple(view.get_shape()))
        with open(path, "rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(length), object_pairs_hook=_no_repeats)
        metadata = header.pop("__metadata__", None) or {}
        entries = {
            name: Entry(path, d["dtype"], tuple(d["shape"]), 8 + length + d["data_offsets"][0])
            for name, d in header.items()
        }
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged, or no safetensors file: {error}") from None
    if {name: (e.dtype, e.shape) for name, e in entries.items()} != found:
        raise CheckpointError(f"{path}: damaged: its header can be read in two ways")
    for name, entry in entries.items():
        if entry.dtype not in _STORED:
            known = ", ".join(_STORED)
            raise CheckpointError(f"{path}: {name} has dtype {entry.dtype}; known are {known}")
    return Tensors(entries, metadata)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands twice in the header")
    return made


def _open_shards(index: Path) -> Tensors:
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(f, str) for f in where.values()):
        raise CheckpointError(f"{index}: has no weight_map from tensors to files")
    entries: dict[str, Entry] = {}
    for name in sorted(set(where.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index}: names {name!r}, which is no file beside it")
        shard = _open(index.parent / name)
        listed = {tensor for tensor, file in where.items() if file == name}
        for tensor in sorted(listed ^ set(shard)):
            fault = "has no" if tensor in listed else "has, unknown to the index,"
            raise CheckpointError(f"{index.parent / name}: {fault} tensor {tensor}")
        entries |= shard.entries
    return Tensors(entries, {})


def model_tensors(path: AnyPath, tie_embeddings: bool) -> Tensors:
    """A model's tensors under this package's names, whichever program wrote them.

    mamba_ssm's name of the embeddings is translated. Where the head is tied to them, one of the
    two is enough, and an equal copy is dropped; a head that differs raises CheckpointError.
    """
    found = load_tensors(path)
    entries = {_OTHER_NAMES.get(name, name): entry for name, entry in found.entries.items()}
    if len(entries) < len(found):
        raise CheckpointError(f"{path}: holds the embeddings under two names")
    tensors = Tensors(entries, found.metadata)
    if tie_embeddings and HEAD in tensors:
        if EMBEDDING in tensors and not tensors.same(EMBEDDING, HEAD):
            raise CheckpointError(
                f"{path}: {HEAD} differs from {EMBEDDING}, but the configuration ties them: "
                "set tie_word_embeddings (tie_embeddings) to false in config.json"
            )
        head = tensors.entries.pop(HEAD)
        tensors.entries.setdefault(EMBEDDING, head)
    return tensors


# What decides each axis: this package's field, and Hugging Face's key where it differs
_VOCAB = "vocab_size"
_MODEL = "d_model (hidden_size)"
_INNER = "expand"
_HEADS = "attn_heads, attn_kv_heads, attn_head_dim"
_MLP = "d_ff"
_STATE = "d_state (state_size)"
_CONV = "d_conv (conv_kernel)"
_RANK = "dt_rank (time_step_rank)"
_AXES = {
    "embeddings.weight": (_VOCAB, _MODEL),
    "lm_head.weight": (_VOCAB, _MODEL),
    "lm_head.bias": (_VOCAB,),
    "norm.weight": (_MODEL,),
    "norm_f.weight": (_MODEL,),
    "norm2.weight": (_MODEL,),
    "in_proj.weight": (_INNER, _MODEL),
    "in_proj.bias": (_INNER,),
    "conv1d.weight": (_INNER, _INNER, _CONV),
    "conv1d.bias": (_INNER,),
    "x_proj.weight": (f"{_RANK} and {_STATE}", _INNER),
    "x_proj.bias": (f"{_RANK} and {_STATE}",),
    "dt_proj.weight": (_INNER, _RANK),
    "dt_proj.bias": (_INNER,),
    "A_log": (_INNER, _STATE),
    "D": (_INNER,),
    "out_proj.weight": (_MODEL, _INNER),
    "out_proj.bias": (_MODEL,),
    "attention in_proj.weight": (_HEADS, _MODEL),
    "attention in_proj.bias": (_HEADS,),
    "attention out_proj.weight": (_MODEL, _HEADS),
    "attention out_proj.bias": (_MODEL,),
    "fc1.weight": (_MLP, _MODEL),
    "fc2.weight": (_MODEL, _MLP),
}
_PRESENCE = {
    "lm_head.weight": "tie_embeddings (tie_word_embeddings)",
    "lm_head.bias": "lm_head_bias",
    "in_proj.bias": "use_bias",
    "out_proj.bias": "use_bias",
    "attention in_proj.bias": "attn_bias",
    "attention out_proj.bias": "attn_bias",
    "A_log": "layers",
    "fc1.weight": "mlp",
    "x_proj.bias": "x_proj_bias",
    "conv1d.bias": "use_conv_bias",
}


def check_names(
    expected: Mapping[str, Shape], found: Mapping[str, Shape], where: AnyPath = "the checkpoint"
) -> None:
    """Raises CheckpointError, one line, unless names and shapes are the expected ones.

    It says which tensors are missing, which are left over, the first whose shape differs with
    both shapes, and which keys of config.json decide these.
    """
    missing = [n for n in expected if n not in found]
    extra = [n for n in found if n not in expected]
    wrong = [n for n, shape in expected.items() if n in found and tuple(found[n]) != tuple(shape)]
    faults = []
    if wrong:
        name = wrong[0]
        want, got = tuple(expected[name]), tuple(found[name])
        more = f" (and {len(wrong) - 1} more of another shape)" if len(wrong) > 1 else ""
        keys = _axis(_role(name, expected), want, got)
        faults.append(f"{name} is {got}, the configuration makes it {want}{more}; check {keys}")
    other_depth = _layers(expected) != _layers(found)
    for what, names in (("missing", missing), ("not of this model", extra)):
        if names:
            own = [n for n in names if not (other_depth and n.startswith("backbone.layers."))]
            roles = {_role(name, expected) for name in own}
            checks = {_PRESENCE[role] for role in roles if role in _PRESENCE}
            checks |= {"n_layer (num_hidden_layers)"} if other_depth else set()
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            hint = f"; check {', '.join(sorted(checks))}" if checks else ""
            faults.append(f"{what}: {', '.join(names[:8])}{more}{hint}")
    if faults:
        raise CheckpointError(f"{where}: " + "; ".join(faults))


def _role(name: str, expected: Collection[str]) -> str:
    """What a parameter is: "in_proj.weight", "A_log", "attention in_proj.weight"."""
    owner, _, suffix = name.rpartition(".")
    if suffix in ("weight", "bias"):
        owner, _, module = owner.rpartition(".")
        suffix = f"{module}.{suffix}"
    attends = suffix.startswith(("in_proj", "out_proj")) and f"{owner}.A_log" not in expected
    return f"attention {suffix}" if attends else suffix


def _layers(names: Iterable[str]) -> set[str]:
    """The numbers of the layers that names belong to."""
    return {m[1] for n in names if (m := re.match(r"backbone\.layers\.(\d+)\.", n))}


def _axis(role: str, want: Shape, got: Shape) -> str:
    """The keys that decide the axes in which two shapes of a parameter differ."""
    keys = _AXES.get(role, ())
    if not len(want) == len(got) == len(keys):
        return "which model the file is of"
    # where the model is wider, everything is: the axis that d_model decides alone says so
    differ = [key for key, a, b in zip(keys, want, got, strict=True) if a != b]
    return _MODEL if _MODEL in differ else ", ".join(dict.fromkeys(differ))


def read_json(path: AnyPath) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming it."""
    try:
        value = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged, or no JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}, not an object")
    return value


# Writing


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the name `path` once it is written and on the disk, or never."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror or error}; "
            "what was there before is unchanged"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk, where the system can."""
    if os.name == "posix":
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_folder(path: AnyPath) -> Path:
    """A folder, made with those above it where they are missing. Raises CheckpointError."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be made: {error.strerror}") from None
    return folder


def write_json(path: AnyPath, value: Mapping[str, Any]) -> None:
    """A JSON object to a file, whole or not at all."""
    with _replacing(Path(path)) as file:
        file.write((json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def save_tensors(
    path: AnyPath,
    tensors: Mapping[str, Array] | Iterable[tuple[str, Array]],
    metadata: Mapping[str, str] | None = None,
    shapes: Mapping[str, Shape] | None = None,
) -> None:
    """Tensors to a .safetensors file, whole or not at all, in the order given.

    tensors   by name; or pairs, made one at a time, for which `shapes` must tell all names and
              shapes, in their order, and which are float32
    metadata  strings; {"format": "pt"} by default, which transformers asks for

    Raises CheckpointError naming the tensor that has a non-finite value, or that is not as
    announced, and the path where writing fails. What was at `path` is unchanged then.
    """
    if isinstance(tensors, Mapping):
        forms = {name: (_stored_name(name, a), tuple(a.shape)) for name, a in tensors.items()}
        pairs: Iterable[tuple[str, Array]] = tensors.items()
    elif shapes is None:
        raise TypeError("save_tensors needs shapes where tensors come one at a time")
    else:
        forms = {name: ("F32", tuple(shape)) for name, shape in shapes.items()}
        pairs = tensors
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    end = 0
    for name, (dtype, shape) in forms.items():
        start, end = end, end + math.prod(shape) * np.dtype(_STORED[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that data start at a multiple of 8 bytes
    awaited = iter(forms.items())
    with _replacing(Path(path)) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, array in pairs:
            form = (name, (_stored_name(name, array), tuple(array.shape)))
            if form != (announced := next(awaited, None)):
                raise CheckpointError(f"{path}: {form} came where {announced} was announced")
            _check_finite(path, name, array)
            little = np.ascontiguousarray(array).astype(_STORED[form[1][0]], copy=False)
            file.write(little.reshape(-1).view(np.uint8).data)
        if (left := next(awaited, None)) is not None:
            raise CheckpointError(f"{path}: {left} was announced and did not come")


def _stored_name(name: str, array: Array) -> str:
    dtype = array.dtype.newbyteorder("<").str
    if dtype not in _NAMES:
        raise CheckpointError(f"{name}: {array.dtype} has no form in a safetensors file")
    return _NAMES[dtype]


def _check_finite(path: AnyPath, name: str, array: Array) -> None:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = ~np.isfinite(array)
        at = [int(i) for i in np.argwhere(bad)[0]]
        raise CheckpointError(
            f"{path}: {name}{at} is {array[tuple(at)]}, one of {bad.sum()} non-finite values; "
            "refused, so that it replaces no good checkpoint"
        )


# Folders of checkpoints


_NAMED = re.compile(r"checkpoint-(\d+)")
_LEFT = re.compile(r"\..+\.tmp-\d+")  # being written, or removed, when the process ended
_ASIDE = re.compile(r"\.(checkpoint-\d+)\.old-\d+")  # to be replaced by another of its name


@contextmanager
def new_checkpoint(folder: AnyPath, step: int) -> Iterator[Path]:
    """A folder to fill in a `with` statement, which then becomes folder/checkpoint-<step> at once.

    If the body raises, or anything cannot be written, nothing of it remains, and what was there
    before is unchanged. Raises CheckpointError for what the disk refuses.
    """
    parent = Path(folder)
    final = parent / f"checkpoint-{step}"
    temporary = parent / f".{final.name}.tmp-{os.getpid()}"
    aside = parent / f".{final.name}.old-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.iterdir():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        _sync_folder(temporary)
        if final.exists():
            os.rename(final, aside)
        os.rename(temporary, final)
        _sync_folder(parent)
        shutil.rmtree(aside, ignore_errors=True)
    except CheckpointError as error:  # of a file in it: by the name that it would have had
        raise CheckpointError(str(error).replace(str(temporary), str(final))) from None
    except OSError as error:
        raise CheckpointError(
            f"{final}: cannot be written: {error.strerror or error}; "
            "earlier checkpoints are unchanged"
        ) from None
    finally:
        if aside.exists() and not final.exists():
            os.rename(aside, final)
        shutil.rmtree(temporary, ignore_errors=True)


def clean(folder: AnyPath) -> None:
    """Remove what a process that was killed has left half-written or half-removed.

    Call it at a run's start, under `lock`: another process may be writing otherwise.
    """
    for path in _listed(folder):
        if aside := _ASIDE.fullmatch(path.name):
            if (path.parent / aside[1]).exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.rename(path, path.parent / aside[1])
        elif _LEFT.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def check_unused(folder: AnyPath) -> None:
    """Raises CheckpointError where a folder holds a model, a checkpoint, or a run with some."""
    parent = Path(folder)
    names = (CONFIG, WEIGHTS, INDEX, STATE, f"adapter_{CONFIG}", f"adapter_{WEIGHTS}")
    found = [*checkpoints(parent), *(parent / name for name in names)]
    if held := [path for path in found if path.exists()]:
        raise CheckpointError(f"{folder} is in use: it holds {held[0].name}; choose another folder")


def _listed(folder: AnyPath) -> list[Path]:
    return sorted(Path(folder).iterdir()) if Path(folder).is_dir() else []


def checkpoints(folder: AnyPath) -> list[Path]:
    """The checkpoints in a run's folder, oldest first."""
    return sorted((p for p in _listed(folder) if _NAMED.fullmatch(p.name)), key=_step)


def _step(path: Path) -> int:
    """Of a checkpoint's name."""
    return int(path.name.rpartition("-")[2])


def latest(folder: AnyPath) -> Path | None:
    """The newest checkpoint in a run's folder that is whole, or None.

    A damaged one is passed over with a warning that says what is wrong with it.
    """
    for path in reversed(checkpoints(folder)):
        try:
            check_whole(path)
        except CheckpointError as error:
            warnings.warn(f"{path.name} is passed over: {error}", stacklevel=2)
        else:
            return path
    return None


def check_whole(path: AnyPath) -> None:
    """Raises CheckpointError unless a checkpoint has tensors, and each of their files is whole.

    Where a trainer saved it, no file that it lists is missing.
    """
    folder = Path(path)
    tensors = list(folder.glob("*.safetensors"))
    if not tensors:
        raise CheckpointError(f"{folder}: holds no .safetensors file")
    described = [path for path in (folder / CONFIG, folder / f"adapter_{CONFIG}") if path.exists()]
    if not described:
        raise CheckpointError(f"{folder}: holds no {CONFIG}")
    for file in described:
        read_json(file)
    for file in tensors:
        _open(file)
    listed = [STATE] if (folder / MOMENTS).exists() else []
    if (folder / STATE).exists():
        names = read_json(folder / STATE).get(FILES, [])
        if not isinstance(names, list):
            raise CheckpointError(f"{folder / STATE}: {FILES} is {names!r}, not a list of names")
        listed += map(str, names)
    if missing := [name for name in listed if not (folder / name).exists()]:
        raise CheckpointError(f"{folder}: {missing[0]} is missing")


def later(folder: AnyPath, step: int) -> Path | None:
    """The first whole checkpoint of a run's folder that is of a later step, or None."""
    for path in [p for p in checkpoints(folder) if _step(p) > step]:
        try:
            check_whole(path)
        except CheckpointError:
            continue  # nobody goes on from it
        return path
    return None


def rotate(folder: AnyPath, keep: int, step: int) -> None:
    """Remove all but the newest `keep` checkpoints up to a step. Call it once that one is complete."""
    if keep < 1:
        raise CheckpointError(f"{folder}: {keep} checkpoints to keep; at least one must stay")
    for path in [p for p in checkpoints(folder) if _step(p) <= step][:-keep]:
        # out of the list first: a folder that is removed in part must not look like a checkpoint
        going = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        try:
            os.rename(path, going)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be removed: {error.strerror}") from None
        shutil.rmtree(going, ignore_errors=True)


def check_unlocked(folder: AnyPath) -> None:
    """Raises CheckpointError where a process holds a run's folder; the folder stays as it is."""
    if (Path(folder) / LOCK).exists():
        with lock(folder):
            pass


@contextmanager
def lock(folder: AnyPath) -> Iterator[None]:
    """Hold a run's folder for this process in a `with` statement; the folder is made if needed.

    The system drops the lock when the process ends, however it ends. Raises CheckpointError
    naming the process that holds it already.
    """
    parent = Path(folder)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        file = open(parent / LOCK, "a+b")  # noqa: SIM115 - held by the statement below
    except OSError as error:
        raise CheckpointError(f"{parent}: cannot be written: {error.strerror}") from None
    with file:
        try:
            held = _try_lock(file)
        except OSError as error:
            raise CheckpointError(f"{parent}: cannot be locked: {error.strerror}") from None
        if not held:
            file.seek(0)
            holder = file.read(200).decode(errors="replace").strip()
            raise CheckpointError(
                f"{parent}: in use by {holder or 'another process'}; "
                "wait for it to end, or choose another folder"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        file.flush()
        yield


if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: IO[bytes]) -> bool:
        file.seek(1 << 20)  # past the text, which others may read
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
