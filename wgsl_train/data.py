"""Text and token files as batches of token ids.

Files become documents of a `Tokens` (one long sequence, memory-mapped where it lies on disk as
token ids already), a `Dataset` cuts that into batches in an order that only the seed and the
epoch decide, and a `Prefetcher` makes batches ahead in a thread. Touches no GPU.
"""

from __future__ import annotations

import glob
import json
import numbers
import os
import threading
import zlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import ConfigError, DataError

IGNORED = 0xFFFFFF9C  # -100 as u32: a target that does not count
TOKENIZER = "tokenizer.json"  # in a run's folder; the name that Hugging Face uses
BYTES_NOTE = "wgsl_train_tokenizer.json"  # stands there instead where tokens are bytes
TOKEN_FILES = (".bin", ".npy")
_MASK = "allowed are 1, for real tokens, and 0, for padding"
LINES = ".jsonl"  # where documents are kept apart: one a line
BLOCK = 1 << 22  # elements looked at together while a large file is checked

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.uint32]
AnyPath = str | os.PathLike[str]
T = TypeVar("T")


# Tokenizers


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Every id is below this."""

    def encode(self, text: str) -> Array:
        """The token ids of a text: one axis, unsigned. Raises DataError where it has none."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. What is not UTF-8 becomes U+FFFD."""

    def encode_file(self, data: bytes) -> Array:
        """The token ids of a file's contents. Raises UnicodeDecodeError where it is not text."""

    def save(self, folder: Path) -> None:
        """Write what `load_tokenizer(folder)` needs."""


class ByteTokenizer:
    """A token is a byte: 256 of them, any file has a text, nothing to train or to download."""

    vocab_size = 256

    def encode(self, text: str) -> Array:
        return self.encode_file(_utf8(text))

    def decode(self, ids: Iterable[int]) -> str:
        # a padded vocabulary has ids that are no bytes; 0xFF is in no UTF-8 text
        return bytes(i if i < 256 else 0xFF for i in map(int, ids)).decode(errors="replace")

    def encode_file(self, data: bytes) -> Array:
        return np.frombuffer(data, np.uint8)

    def save(self, folder: Path) -> None:
        _write(folder / BYTES_NOTE, b'{"type": "bytes"}\n')


class FileTokenizer:
    """A tokenizer.json of the tokenizers package. Raises DataError where it cannot be loaded."""

    def __init__(self, path: AnyPath) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise DataError(
                f"{path}: reading it needs the tokenizers package: "
                "pip install wgsl-train[tokenizers]"
            ) from None
        self.json = _read(Path(path), "a tokenizer.json")
        try:
            self._backend = Backend.from_str(self.json.decode())
        except Exception as error:  # the package raises Exception itself
            raise DataError(f"{path}: not a tokenizer.json: {error}") from None
        self._backend.no_truncation()  # or the end of every long file would be lost
        self._backend.no_padding()
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1

    def encode(self, text: str) -> Array:
        _utf8(text)
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the package raises Exception itself
            raise DataError(f"the tokenizer cannot read this text: {error}") from None
        return np.array(ids, np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=False))

    def encode_file(self, data: bytes) -> Array:
        return self.encode(data.decode())

    def save(self, folder: Path) -> None:
        _write(folder / TOKENIZER, self.json)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # of a byte that the shell gave, or half a pair in JSON
        at = error.start
        raise DataError(
            f"character {at} of the text is U+{ord(text[at]):04X}, which UTF-8 cannot hold"
        ) from None


def find_tokenizer(folder: AnyPath) -> Path | None:
    """The file of the tokenizer that was saved in a folder; None where there is none.

    A checkpoint folder stands in its run's folder, so that is looked into as well.
    """
    given = Path(folder)
    places = [given]
    if given.name.startswith("checkpoint-"):
        places.append(given.absolute().parent)
    files = (place / name for place in places for name in (TOKENIZER, BYTES_NOTE))
    return next((file for file in files if file.is_file()), None)


def load_tokenizer(path: AnyPath | None = None) -> Tokenizer:
    """A tokenizer: bytes for None, a tokenizer's file, or that of a folder, as `find_tokenizer` says.

    Raises DataError naming the path.
    """
    if path is None:
        return ByteTokenizer()
    file = find_tokenizer(path) if Path(path).is_dir() else Path(path)
    if file is None:
        raise DataError(f"{path}: holds no {TOKENIZER}; pass one with --tokenizer")
    if file.name != BYTES_NOTE:
        return FileTokenizer(file)
    try:
        if json.loads(_read(file, "a tokenizer's note")) == {"type": "bytes"}:
            return ByteTokenizer()
    except ValueError:
        pass
    raise DataError(f"{file}: names no tokenizer that is known here")


# Files


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read as {what}: {error.strerror}") from None


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from None


@dataclass(frozen=True)
class Document:
    """The token ids of a file, or of a line of one: one axis, integers. They may lie on disk still."""

    source: str
    ids: Array


class Tokens:
    """Documents read as one sequence of token ids, in their order."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = tuple(documents)
        self._ends = list(accumulate(d.ids.size for d in self.documents))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> Ids:
        """Ids start..stop, copied. Their range must have been checked."""
        out = np.empty(stop - start, np.uint32)
        i, done = bisect_right(self._ends, start), 0
        while done < out.size:
            ids = self.documents[i].ids
            at = start + done - (self._ends[i] - ids.size)
            part = ids[at : at + out.size - done]
            out[done : done + part.size] = part
            done, i = done + part.size, i + 1
        return out

    def begins(self, start: int, stop: int) -> Array:
        """For each position start..stop, whether a document begins there; one of the first is left
        out."""
        ends = self._ends[bisect_left(self._ends, start) : bisect_left(self._ends, stop)]
        begins = np.zeros(stop - start, bool)
        begins[np.array(ends, np.int64) - start] = True
        return begins

    def check(self, vocab_size: int) -> None:
        """Raises DataError naming file, position and id where an id is not in [0, vocab_size)."""
        for document in self.documents:
            for first in range(0, document.ids.size, BLOCK):
                _check_range(
                    document.ids[first : first + BLOCK], vocab_size, document.source, first
                )


def _check_range(ids: Array, vocab_size: int, source: str, first: int = 0) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        flat = ids.reshape(-1)
        at = int(np.argmax((flat < 0) | (flat >= vocab_size)))
        raise DataError(
            f"{source}: token {int(flat[at])} at position {first + at}, "
            f"outside the vocabulary of {vocab_size} (ids 0 to {vocab_size - 1})"
        )


def find_files(paths: AnyPath | Iterable[AnyPath]) -> list[Path]:
    """The files that paths name: files, folders with all below them, and glob patterns.

    One path may stand by itself. Sorted, each once, so that one set of files is one sequence of
    tokens wherever it is read. In folders, hidden files are left out; empty ones have nothing to
    read, and are an error where they are named themselves. Raises DataError for a path that names
    nothing.
    """
    found: dict[Path, Path] = {}
    paths = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    for given in (os.fspath(p) for p in paths):
        path = Path(given)
        if path.is_dir():
            files = _below(path)
        elif path.exists():
            if not path.is_file():
                raise DataError(f"{given}: not a regular file")
            if not path.stat().st_size:
                raise DataError(f"{given}: the file is empty; leave it out")
            files = [path]
        elif glob.has_magic(given):
            matches = [Path(m) for m in glob.iglob(given, recursive=True)]
            files = [m for m in matches if m.is_file() and m.stat().st_size]
        else:
            raise DataError(f"{given}: no such file or folder")
        if not files:
            raise DataError(f"{given}: no file there that holds anything")
        found |= {f.resolve(): f for f in files}
    return sorted(found.values(), key=Path.as_posix)


def _below(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}")

    files = []
    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [f for f in folders if not f.startswith(".")]
        files += [Path(root, n) for n in names if not n.startswith(".")]
    return [f for f in files if f.is_file() and f.stat().st_size]


def load_tokens(
    paths: AnyPath | Iterable[AnyPath],
    tokenizer: Tokenizer | None = None,
    dtype: Literal["uint16", "uint32"] = "uint16",
    lines: bool = False,
) -> Tokens:
    """Files as token ids: text through the tokenizer (bytes by default), .npy and .bin as they are.

    dtype   of the ids in .bin files, which are raw and little-endian
    lines   read each line of a .jsonl file as a document, an object whose "text" it is

    Token files are memory-mapped. Raises DataError naming the file, and what to do, where one is
    missing, empty, unreadable, not text, or where text and token files are mixed, ConfigError for
    another dtype.
    """
    if dtype not in ("uint16", "uint32"):
        raise ConfigError(f"dtype is {dtype!r}; allowed: 'uint16' or 'uint32'")
    tokenizer = tokenizer or ByteTokenizer()
    files = find_files(paths)
    kinds = {f.suffix.lower() in TOKEN_FILES: f for f in files}
    if len(kinds) > 1:
        raise DataError(
            f"{kinds[True]} holds token ids and {kinds[False]} text; train on one kind, "
            "for instance by a pattern such as 'folder/**/*.txt'"
        )
    if True in kinds:
        return Tokens([_token_file(f, dtype) for f in files])
    documents: list[Document] = []
    for file in files:
        if lines and file.suffix.lower() == LINES:
            documents += _line_documents(file, tokenizer)
        else:
            documents.append(_text_file(file, tokenizer))
    return Tokens(documents)


def _line_documents(path: Path, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents of a .jsonl file; lines and texts that are empty are none."""
    for number, line in enumerate(_read(path, "text").splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError(
                f'{path}:{number}: not a JSON object with a string "text", as each line must be'
            ) from None
        try:
            ids = tokenizer.encode(text)
        except DataError as error:
            raise DataError(f"{path}:{number}: {error}") from None
        if ids.size:
            yield Document(f"{path}:{number}", ids)


def _text_file(path: Path, tokenizer: Tokenizer) -> Document:
    data = _read(path, "text")
    try:
        return Document(str(path), tokenizer.encode_file(data))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start} is not UTF-8 text; convert the file, leave it out, "
            "or train on bytes, without a tokenizer"
        ) from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def _token_file(path: Path, dtype: str) -> Document:
    raw = np.dtype(dtype).newbyteorder("<")
    if path.suffix.lower() == ".bin" and path.stat().st_size % raw.itemsize:
        raise DataError(
            f"{path}: {path.stat().st_size} bytes are no whole number of {dtype} ids; "
            "give the file's own dtype"
        )
    try:
        if path.suffix.lower() == ".npy":
            ids: Array = np.lib.format.open_memmap(path, mode="r")  # never unpickles
        else:
            ids = np.memmap(path, raw, "r")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # numpy's parser of headers raises several kinds
        raise DataError(f"{path}: not an array of token ids: {error}") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(
            f"{path}: holds {ids.dtype} {ids.shape}; token ids are integers along one axis"
        )
    return Document(str(path), ids)


# Ids that a caller gives


def token_ids(ids: npt.ArrayLike, vocab_size: int, name: str = "tokens") -> Ids:
    """Ids as u32. Raises DataError naming the first that is outside [0, vocab_size)."""
    array = _integers(ids, name)
    _check_range(array, vocab_size, name)
    return array.astype(np.uint32)


def target_ids(ids: npt.ArrayLike, vocab_size: int, name: str = "targets") -> Ids:
    """Targets as u32: as `token_ids`, but -100 (or IGNORED) marks one that does not count."""
    array = _integers(ids, name).astype(np.int64)
    ignored = (array == -100) | (array == IGNORED)
    _check_range(np.where(ignored, 0, array), vocab_size, name)
    return np.where(ignored, IGNORED, array).astype(np.uint32)


def document_ids(
    documents: npt.ArrayLike | None, attention_mask: npt.ArrayLike | None, shape: tuple[int, ...]
) -> Ids | None:
    """Which document each token is of, numbered 0, 1, ... along each row; None where all are one.

    documents        ids of `shape`: where the id changes, another document begins
    attention_mask   1 for real tokens, 0 for padding, which becomes documents of its own

    Raises DataError where a shape is another one, or the mask holds other numbers.
    """
    begins = np.zeros(shape, bool)
    for name, given, *form in (
        ("documents", documents),
        ("attention_mask", attention_mask, "iub", _MASK),
    ):
        if given is None:
            continue
        ids = np.atleast_2d(_integers(given, name, *form))
        if ids.shape != shape:
            raise DataError(f"{name}: {ids.shape}, but tokens are {shape}")
        if name == "attention_mask" and not np.isin(ids, (0, 1)).all():
            raise DataError(f"{name}: {_MASK}")
        begins[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    return begins.cumsum(1, dtype=np.uint32) if begins.any() else None


def _integers(
    ids: npt.ArrayLike, name: str, kinds: str = "iu", allowed: str = "only integers are ids"
) -> Array:
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise DataError(f"{name}: rows of one length are needed: {error}") from None
    if not array.size:
        return array.astype(np.uint32)
    if array.dtype.kind not in kinds:
        raise DataError(f"{name}: holds {array.dtype}; {allowed}")
    return array


# Batches


@dataclass(frozen=True)
class Batch:
    """Equally long pieces of a dataset. Arrays are (batch, seqlen) u32.

    targets     for each input the id that follows it; IGNORED where there is nothing to predict
    n_targets   how many of the targets count
    documents   which document each input is of: ids that do not decrease along a row, and begin
                with 0 where the first document goes on from before. None: a row is one document
    """

    inputs: Ids
    targets: Ids
    n_targets: int
    documents: Ids | None = None


class Dataset:
    """A sequence of token ids, cut into chunks: each id but the first is predicted once an epoch.

    Chunk c of seq_len L has inputs ids[cL : cL + L] and targets ids[cL + 1 : cL + L + 1]; what
    remains at the end is a chunk of its own, shorter, and a batch of its own.

    tokens      `Tokens`, or integers along one axis
    vocab_size  if given, ids outside [0, vocab_size) raise DataError here; see `check`
    pack        keep documents apart: batches say which document each id is of, and no document's
                last id has a target. A document may go on from one chunk to the next
    separator   where packed, an id that ends a document, and belongs to it; each document of
                `Tokens` is one, too

    Raises DataError for fewer than 2 tokens, ConfigError for a separator without packing.
    """

    def __init__(
        self,
        tokens: Tokens | npt.ArrayLike,
        vocab_size: int | None = None,
        *,
        pack: bool = False,
        separator: int | None = None,
    ) -> None:
        if not isinstance(tokens, Tokens):
            array = _integers(tokens, "tokens")
            if array.ndim != 1:
                raise DataError(f"tokens have shape {array.shape}; they must lie along one axis")
            tokens = Tokens([Document("tokens", array)])
        if not isinstance(separator, numbers.Integral | None):
            raise ConfigError(f"separator is {separator!r}; allowed: an id, or None")
        if separator is not None and not pack:
            raise ConfigError(f"separator is {separator}: it ends documents where pack is on only")
        self.tokens, self.pack = tokens, pack
        self.separator = None if separator is None else int(separator)
        self.vocab_size = vocab_size
        self._start, self._stop = 0, len(tokens)
        self._need_two("the data")
        if vocab_size is not None:
            if separator is not None and not 0 <= separator < vocab_size:
                raise ConfigError(
                    f"separator is {separator}; allowed: an id of the vocabulary, below {vocab_size}"
                )
            self.check(vocab_size)

    @classmethod
    def from_paths(
        cls,
        paths: AnyPath | Iterable[AnyPath],
        tokenizer: Tokenizer | None = None,
        dtype: Literal["uint16", "uint32"] = "uint16",
        vocab_size: int | None = None,
        *,
        pack: bool = False,
        separator: int | None = None,
    ) -> Self:
        """A dataset of files, folders and glob patterns: see `load_tokens`.

        Where packed, a document is a file, or a line of a .jsonl file.
        """
        tokens = load_tokens(paths, tokenizer, dtype, lines=pack)
        return cls(tokens, vocab_size, pack=pack, separator=separator)

    @classmethod
    def from_documents(
        cls, documents: Iterable[npt.ArrayLike], vocab_size: int | None = None
    ) -> Self:
        """A packed dataset of documents, each of integers along one axis."""
        arrays = [_integers(ids, f"document {i}") for i, ids in enumerate(documents)]
        for i, ids in enumerate(arrays):
            if ids.ndim != 1:
                raise DataError(f"document {i} has shape {ids.shape}; it must lie along one axis")
        named = [Document(f"document {i}", ids) for i, ids in enumerate(arrays) if ids.size]
        return cls(Tokens(named), vocab_size, pack=True)

    def __len__(self) -> int:
        """Number of tokens."""
        return self._stop - self._start

    def check(self, vocab_size: int) -> None:
        """Raises DataError naming file, position and id where an id is not in [0, vocab_size)."""
        self.tokens.check(vocab_size)

    @property
    def checksum(self) -> int:
        """CRC-32 of 64 stretches of 4,096 ids, spread evenly: of all, where there are few."""
        size, total = min(4096, len(self)), 0
        last = self._stop - size
        for start in dict.fromkeys(map(int, np.linspace(self._start, last, 64))):
            total = zlib.crc32(self.tokens.read(start, start + size).astype("<u4").tobytes(), total)
        return total

    def split(self, eval_fraction: float) -> tuple[Self, Self | None]:
        """(training, evaluation) parts: the last round(eval_fraction * len) tokens are held out.

        The parts share no token: the first of the evaluation part is predicted by neither.
        A fraction of 0 holds nothing out. Raises DataError where a part has fewer than 2 tokens.
        """
        if not 0 <= eval_fraction < 1:
            raise ConfigError(f"eval_fraction is {eval_fraction!r}; allowed: 0 to less than 1")
        if not eval_fraction:
            return self, None
        cut = self._stop - round(eval_fraction * len(self))
        train, held_out = self._part(self._start, cut), self._part(cut, self._stop)
        train._need_two("the training part")
        held_out._need_two("the evaluation part")
        return train, held_out

    def _part(self, start: int, stop: int) -> Self:
        part = type(self).__new__(type(self))
        part.tokens, part.pack, part.separator = self.tokens, self.pack, self.separator
        part.vocab_size = self.vocab_size
        part._start, part._stop = start, stop
        return part

    def _need_two(self, what: str) -> None:
        if len(self) < 2:
            raise DataError(
                f"{what} has {len(self)} token{'s' * (len(self) != 1)}; at least 2 are needed, "
                "one to read and one to predict"
            )

    def n_batches(self, batch_size: int, seq_len: int, streams: bool = False) -> int:
        """Batches in an epoch."""
        _at_least_one(batch_size=batch_size, seq_len=seq_len)
        if streams:
            return -(-self._stream(batch_size) // seq_len)
        chunks, tail = divmod(len(self) - 1, seq_len)
        return -(-chunks // batch_size) + (tail > 0)

    def _stream(self, batch_size: int) -> int:
        """Ids that a row reads where the whole is dealt out to rows."""
        return -(-(len(self) - 1) // batch_size)

    def batches(
        self,
        batch_size: int,
        seq_len: int,
        seed: int | None,
        epoch: int = 0,
        start: int = 0,
        streams: bool = False,
    ) -> Iterator[Batch]:
        """The batches of one epoch, from batch number `start` on.

        seed    decides, with the epoch, in which order the chunks come; None: as they lie.
                Order, and so the place to resume at, depend on nothing else. The shorter chunk
                comes last
        streams deal the ids out to batch_size rows of equal length instead: from one batch to the
                next, each row goes on where it was. What the last row lacks is ignored targets

        Raises ConfigError where batch_size or seq_len is below 1.
        """
        total = self.n_batches(batch_size, seq_len, streams)
        if streams:
            stream = self._stream(batch_size)
            places = [(n * seq_len, min(seq_len, stream - n * seq_len)) for n in range(total)]
            rows = range(0, batch_size * stream, stream)
            return (
                self._batch([row + place for row in rows], length)
                for place, length in places[start:]
            )
        chunks, tail = divmod(len(self) - 1, seq_len)
        if seed is None:
            order = np.arange(chunks)
        else:
            # by keys of the bit generator, whose stream no release of numpy changes
            keys = np.random.PCG64([seed, epoch]).random_raw(chunks)
            order = np.argsort(keys, kind="stable")

        def make() -> Iterator[Batch]:
            for number in range(start, total):
                chosen = order[number * batch_size : (number + 1) * batch_size]
                if chosen.size:
                    yield self._batch([int(c) * seq_len for c in chosen], seq_len)
                else:
                    yield self._batch([chunks * seq_len], tail)

        return make()

    def _batch(self, starts: list[int], length: int) -> Batch:
        ids = np.zeros((len(starts), length + 1), np.uint32)
        ignored = np.ones(ids.shape, bool)
        begins = np.zeros(ids.shape, bool)
        for row, start in enumerate(starts):
            first = self._start + start
            count = min(first + length + 1, self._stop) - first  # fewer at the end of a stream
            if count > 1:
                ids[row, :count] = self.tokens.read(first, first + count)
                ignored[row, :count] = False
                if self.pack:
                    begins[row, :count] = self._begins(first, ids[row, :count])
        targets = np.where((ignored | begins)[:, 1:], np.uint32(IGNORED), ids[:, 1:])
        documents = begins[:, :-1].cumsum(1, dtype=np.uint32) if self.pack else None
        inputs = np.ascontiguousarray(ids[:, :-1])
        return Batch(inputs, targets, int((targets != IGNORED).sum()), documents)

    def _begins(self, first: int, ids: Ids) -> Array:
        """For each of the ids from a position on, whether a document begins there."""
        begins = self.tokens.begins(first, first + ids.size)
        if self.separator is not None:
            begins[1:] |= ids[:-1] == self.separator
            if first > self._start:
                begins[0] |= self.tokens.read(first - 1, first)[0] == self.separator
        return begins


def _at_least_one(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} is {value!r}; allowed: 1 or more")


class Prefetcher(Generic[T]):
    """Iterates over items that a thread makes ahead, so that the GPU does not wait for them.

    depth   how many items may wait

    An exception in the making of an item is raised here, in its turn. Leave it by `close`, or use
    it in a `with` statement, where the loop may end early.
    """

    def __init__(self, items: Iterable[T], depth: int = 4) -> None:
        _at_least_one(depth=depth)
        self._waiting: deque[T] = deque()
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._fill, args=(iter(items), depth), name="wgsl-train data", daemon=True
        )
        self._thread.start()

    def _fill(self, items: Iterator[T], depth: int) -> None:
        error: BaseException | None = None
        try:
            for item in items:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._waiting) < depth or self._closed)
                    if self._closed:
                        break
                    self._waiting.append(item)
                    self._changed.notify_all()
        except BaseException as caught:  # raised again in the thread that asks for the item
            error = caught
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended or self._closed)
            if self._waiting and not self._closed:
                self._changed.notify_all()
                return self._waiting.popleft()
            error, self._error = self._error, None
        if error and not self._closed:
            raise error
        raise StopIteration

    def close(self) -> None:
        """End the thread, after the item that it is making. May be called again."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
