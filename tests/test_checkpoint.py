"""Tensors in and out of files, and folders of checkpoints that are whole or absent."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from wgsl_train import checkpoint
from wgsl_train.checkpoint import (
    EMBEDDING,
    HEAD,
    check_names,
    check_unused,
    check_whole,
    checkpoints,
    clean,
    later,
    latest,
    load_tensors,
    lock,
    model_tensors,
    new_checkpoint,
    read_json,
    rotate,
    save_tensors,
    write_json,
)
from wgsl_train.errors import CheckpointError

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and limits")


def tiny(**changes):
    """A model's tensors, by their names: vocab_size 7, d_model 4, 2 layers, d_state 3."""
    shapes = {EMBEDDING: (7, 4)}
    for i in range(2):
        layer = f"backbone.layers.{i}."
        shapes |= {
            f"{layer}norm.weight": (4,),
            f"{layer}mixer.in_proj.weight": (16, 4),
            f"{layer}mixer.conv1d.weight": (8, 1, 4),
            f"{layer}mixer.conv1d.bias": (8,),
            f"{layer}mixer.x_proj.weight": (7, 8),
            f"{layer}mixer.dt_proj.weight": (8, 1),
            f"{layer}mixer.dt_proj.bias": (8,),
            f"{layer}mixer.A_log": (8, 3),
            f"{layer}mixer.D": (8,),
            f"{layer}mixer.out_proj.weight": (4, 8),
        }
    shapes["backbone.norm_f.weight"] = (4,)
    rng = np.random.default_rng(0)
    return {n: rng.uniform(-1, 1, s).astype(np.float32) for n, s in shapes.items()} | changes


def shapes(tensors):
    return {n: a.shape for n, a in tensors.items()}


def same(a, b):
    return list(a) == list(b) and all(
        a[n].dtype == b[n].dtype and a[n].tobytes() == b[n].tobytes() for n in a
    )


def left_over(folder):
    return [p.name for p in folder.rglob("*") if ".tmp-" in p.name or ".old-" in p.name]


# Files of tensors


def test_there_and_back(tmp_path):
    tensors = tiny()
    save_tensors(tmp_path / "a.safetensors", tensors)
    loaded = load_tensors(tmp_path / "a.safetensors")
    assert same(dict(loaded), tensors)
    assert loaded.shapes == shapes(tensors)
    assert loaded.metadata == {"format": "pt"}
    assert os.listdir(tmp_path) == ["a.safetensors"]
    with pytest.raises(KeyError):
        loaded["none"]


def test_golden_bytes(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"b": np.array([[1, -2.5]], np.float32), "é": np.array(7, np.uint8)})
    header = (
        b'{"__metadata__":{"format":"pt"},'
        b'"b":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},'
        b'"\\u00e9":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}'
    )
    header += b" " * (-len(header) % 8)
    data = b"\0\0\x80\x3f\0\0\x20\xc0\x07"
    assert path.read_bytes() == len(header).to_bytes(8, "little") + header + data


def test_the_library_reads_what_is_written_and_writes_what_is_read(tmp_path):
    tensors = tiny(
        i8=np.arange(-3, 3, dtype=np.int8),
        u32=np.array([[2**32 - 1]], np.uint32),
        i64=np.array([-(2**63)]),
        flag=np.array([True, False]),
        scalar=np.array(1.5, np.float32),
        empty=np.zeros((0, 3), np.float32),
        odd=np.arange(3, dtype=np.uint8),
    )
    path = tmp_path / "a.safetensors"
    save_tensors(path, tensors)
    assert same(
        dict(sorted(safetensors.numpy.load_file(path).items())), dict(sorted(tensors.items()))
    )
    safetensors.numpy.save_file(tensors, path)
    assert same(dict(sorted(load_tensors(path).items())), dict(sorted(tensors.items())))


@pytest.mark.parametrize("form", ["f16", "bf16", "f64"])
def test_floats_of_any_width_arrive_as_f32(tmp_path, form):  # C06
    values = np.array([0, -0.0, 1, -2.5, 1e-3, 3e4, 6e-8], np.float32)
    if form == "bf16":
        stored = (values.view(np.uint32) >> 16).astype(np.uint16)
        expected = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        stored = values.astype(form.replace("f", "float"))
        expected = stored.astype(np.float32)
    header = {"w": {"dtype": form.upper(), "shape": [7, 1], "data_offsets": [0, stored.nbytes]}}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + stored.tobytes())
    loaded = load_tensors(path)["w"]
    assert loaded.dtype == np.float32
    assert loaded.shape == (7, 1)
    assert loaded.ravel().tobytes() == expected.tobytes()
    weight = loaded.ravel()[2:3]  # 1.0: steps that a master weight in the file's form would lose
    for _ in range(1000):
        weight = weight - np.float32(1e-4)
    assert weight[0] == pytest.approx(0.9, abs=1e-4)


def test_layouts_in_memory_do_not_matter(tmp_path):
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for name, a in {"t": array.T, "cut": array[::2, ::3], "big": array.astype(">f4")}.items():
        save_tensors(tmp_path / name, {"w": a})
        assert load_tensors(tmp_path / name)["w"].tolist() == a.tolist()


def test_one_at_a_time(tmp_path):
    tensors = tiny()
    save_tensors(tmp_path / "a", tensors)
    save_tensors(tmp_path / "b", iter(tensors.items()), shapes=shapes(tensors))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    "pairs",
    [
        [("a", np.zeros(2, np.float32))],
        [("b", np.zeros(3, np.float32)), ("a", np.zeros(2, np.float32))],
        [("a", np.zeros(3, np.float32)), ("b", np.zeros(3, np.float32))],
        [("a", np.zeros(2, np.int32)), ("b", np.zeros(3, np.float32))],
        [("a", np.zeros(2, np.float32)), ("b", np.zeros(3, np.float32)), ("b", np.zeros(3))],
    ],
)
def test_tensors_that_come_otherwise_than_announced(tmp_path, pairs):
    with pytest.raises(CheckpointError, match=r"announced|no form"):
        save_tensors(tmp_path / "a", iter(pairs), shapes={"a": (2,), "b": (3,)})
    assert not os.listdir(tmp_path)


def test_memory_while_loading_and_saving(tmp_path):  # P6
    largest = 4 << 20
    names = [f"w{i}" for i in range(8)]

    def make():
        for name in names:
            yield name, np.ones(largest // 4, np.float32)

    tracemalloc.start()
    try:
        save_tensors(tmp_path / "a", make(), shapes={n: (largest // 4,) for n in names})
        saving = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        for tensor in load_tensors(tmp_path / "a").values():
            assert tensor[-1] == 1
            del tensor
        loading = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(saving, loading) < 2.5 * largest  # the one in hand and the next; never all 8


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_replace_nothing(tmp_path, bad):  # T08
    tensors = tiny()
    save_tensors(tmp_path / "a", tensors)
    before = (tmp_path / "a").read_bytes()
    tensors["backbone.layers.1.mixer.A_log"][7, 2] = bad
    with pytest.raises(CheckpointError, match=r"layers\.1\.mixer\.A_log\[7, 2\] is -?(nan|inf)"):
        save_tensors(tmp_path / "a", tensors)
    assert (tmp_path / "a").read_bytes() == before
    assert not left_over(tmp_path)
    save_tensors(tmp_path / "ids", {"pattern": np.array([0x7FC00000], np.uint32)})


def test_dtypes_without_a_form(tmp_path):
    for a in (np.zeros(1, np.complex64), np.array(["a"]), np.array([None])):
        with pytest.raises(CheckpointError, match=r"w: .* has no form"):
            save_tensors(tmp_path / "a", {"w": a})


# Damage


def write_file(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def form(dtype="F32", shape=(2,), at=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(at)}


@pytest.mark.parametrize(
    "header",
    [
        {"w": form(shape=(3,))},
        {"w": form(shape=(-2,))},
        {"w": form(shape=(2.0,))},
        {"w": form(shape=(1 << 40, 1 << 40))},
        {"w": form(shape=(1 << 63, 2))},
        {"w": form(at=(4, 12))},
        {"w": form(at=(8, 0))},
        {"w": form(at=(-8, 0))},
        {"w": form(at=(0, 16))},
        {"w": form("F33")},
        {"w": form("F8_E4M3", shape=(8,))},
        {"w": {"dtype": "F32"}},
        {"w": 3},
        {"a": form(), "b": form()},
        {"a": form(shape=(1,), at=(0, 4))},
        {"w": form(), "__metadata__": {"a": 3}},
        [],
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
    ],
    ids=lambda header: str(header)[:60],
)
def test_headers_that_lie(tmp_path, header):
    path = tmp_path / "bad.safetensors"
    write_file(path, header, bytes(8))
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: "):
        load_tensors(path)


def test_a_file_cut_off_anywhere(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"w": np.arange(3, dtype=np.float32), "b": np.ones(2, np.uint8)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"a\.safetensors: "):
            load_tensors(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError):
        load_tensors(path)


def test_a_file_cut_off_after_it_was_opened(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"w": np.arange(3, dtype=np.float32)})
    loaded = load_tensors(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="w: the file was cut off"):
        loaded["w"]
    path.unlink()
    with pytest.raises(CheckpointError, match="w: cannot be read"):
        loaded["w"]


def test_mutated_files_are_refused_or_read_as_their_header_says(tmp_path, rng):
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"w": np.ones((2, 3), np.float32), "b": np.arange(4, dtype=np.int16)})
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    marks = [
        b"0",
        b"9",
        b"-",
        b"[",
        b"}",
        b'"',
        b",",
        b"1e9",
        b"F16",
        b"null",
        b"99999999999999999999",
    ]
    refused = 0
    for _ in range(10_000):
        bad = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(start if rng.random() < 0.9 else len(bad)))
            at = min(at, len(bad) - 1)
            match rng.integers(4):
                case 0:
                    bad[at] ^= 1 << rng.integers(8)
                case 1:
                    bad[at] = rng.integers(256)
                case 2:
                    mark = marks[rng.integers(len(marks))]
                    bad[at : at + rng.integers(3)] = mark
                case 3 if len(bad) > 20:
                    del bad[at : at + rng.integers(1, 9)]
        if rng.random() < 0.5:  # the length put right, so that the mutation reaches the parser
            size = start - 8 + len(bad) - len(whole)
            bad[:8] = max(size, 0).to_bytes(8, "little")
        path.write_bytes(bad)
        try:
            found = load_tensors(path)
            arrays = dict(found)
        except CheckpointError:
            refused += 1
            continue
        length = int.from_bytes(bad[:8], "little")
        header = json.loads(bytes(bad[8 : 8 + length]))
        header.pop("__metadata__", None)
        assert arrays.keys() == header.keys()
        covered = 0
        for name, array in arrays.items():
            dtype, shape = header[name]["dtype"], tuple(header[name]["shape"])
            begin, end = header[name]["data_offsets"]
            assert array.shape == shape
            assert checkpoint._NAMES[array.dtype.newbyteorder("<").str] == (
                "F32" if dtype in ("F16", "BF16", "F64") else dtype
            )
            if dtype not in ("F16", "BF16", "F64"):
                assert array.tobytes() == bytes(bad[8 + length + begin : 8 + length + end])
            covered += end - begin
        assert 8 + length + covered == len(bad)
    assert 5000 < refused < 10_000


def test_what_is_no_file_of_tensors(tmp_path):
    (tmp_path / "empty").mkdir()
    for given, message in (
        ("none.safetensors", "cannot be read"),
        ("empty", r"holds no model\.safetensors"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_tensors(tmp_path / given)


@pytest.mark.parametrize("given", ["", "pytorch_model.bin"])
def test_pickles_are_refused_with_the_way_out(tmp_path, given):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: a pickle.* convert") as caught:
        load_tensors(tmp_path / given)
    code = re.search(r'python -c "(.*)"$', str(caught.value))[1]
    compile(code, "advice", "exec")


# Shards


def write_shards(folder, tensors, parts=3):
    names = list(tensors)
    where = {n: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, n in enumerate(names)}
    for file in set(where.values()):
        save_tensors(folder / file, {n: tensors[n] for n in names if where[n] == file})
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    return where


def test_shards(tmp_path):
    tensors = tiny()
    write_shards(tmp_path, tensors)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        assert same(dict(sorted(load_tensors(path).items())), dict(sorted(tensors.items())))


def test_shards_that_do_not_fit_their_index(tmp_path):
    tensors = tiny()
    where = write_shards(tmp_path, tensors)
    index = tmp_path / "model.safetensors.index.json"
    first = next(iter(where))

    def refused(message, **change):
        write_json(index, {"weight_map": where} | change)
        with pytest.raises(CheckpointError, match=message):
            load_tensors(tmp_path)

    refused("no weight_map", weight_map=None)
    refused("no weight_map", weight_map={"a": 3})
    refused("has no tensor ghost", weight_map=where | {"ghost": where[first]})
    refused("unknown to the index", weight_map={n: f for n, f in where.items() if n != first})
    refused("no file beside it", weight_map=where | {"a": "../a.safetensors"})
    refused("no file beside it", weight_map=where | {"a": str(tmp_path / "a.safetensors")})
    (tmp_path / where[first]).unlink()
    refused(f"{where[first]}: cannot be read")


# Names


@pytest.mark.parametrize("tied", [True, False])
def test_names_of_mamba_ssm(tmp_path, tied):
    tensors = tiny()
    theirs = {n.replace("embeddings", "embedding"): a for n, a in tensors.items()}
    theirs[HEAD] = tensors[EMBEDDING] if tied else tensors[EMBEDDING] + 1
    save_tensors(tmp_path / "model.safetensors", theirs)
    expected = tensors if tied else tensors | {HEAD: theirs[HEAD]}
    assert same(dict(model_tensors(tmp_path, tied)), expected)


def test_tied_and_untied_heads(tmp_path):  # C01, C02
    tensors = tiny()
    table = tensors[EMBEDDING]
    rest = {n: a for n, a in tensors.items() if n != EMBEDDING}

    def load(stored, tied):
        save_tensors(tmp_path / "model.safetensors", stored)
        found = model_tensors(tmp_path, tied)
        check_names(shapes(tensors) | ({} if tied else {HEAD: table.shape}), found.shapes)
        return dict(found)

    assert same(load(tensors, tied=True), tensors)
    assert same(load(tensors | {HEAD: table.copy()}, tied=True), tensors)
    only_head = load({HEAD: table, **rest}, tied=True)
    assert same(dict(sorted(only_head.items())), dict(sorted(tensors.items())))
    both = tensors | {HEAD: table * 2}
    assert same(load(both, tied=False), both)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs .*tie_word_embeddings"):
        load(both, tied=True)
    with pytest.raises(CheckpointError, match=r"differs"):
        load(tensors | {HEAD: table[:-1]}, tied=True)
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight; check tie_embeddings"):
        load(tensors, tied=False)
    with pytest.raises(CheckpointError, match="two names"):
        load(tensors | {"backbone.embedding.weight": table}, tied=True)


def test_equal_copies_are_found_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "BLOCK", 7)
    a = np.arange(10, dtype=np.float32)
    b = a.copy()
    b[-1] = 0
    save_tensors(tmp_path / "a", {"a": a, "b": b, "c": a, "d": a.reshape(2, 5)})
    loaded = load_tensors(tmp_path / "a")
    assert loaded.same("a", "c")
    assert not loaded.same("a", "b")
    assert not loaded.same("a", "d")


@pytest.mark.parametrize("name", tiny())
def test_each_missing_tensor_is_named(tmp_path, name):  # C02
    tensors = tiny()
    save_tensors(tmp_path / "model.safetensors", {n: a for n, a in tensors.items() if n != name})
    with pytest.raises(CheckpointError, match=rf"model: missing: {re.escape(name)}"):
        check_names(shapes(tensors), model_tensors(tmp_path, True).shapes, "model")


def test_extra_tensors_are_listed():
    expected = shapes(tiny())
    found = expected | {"backbone.layers.0.mixer.x_proj.bias": (7,), "a.b": (1,)}
    with pytest.raises(CheckpointError) as caught:
        check_names(expected, found, "model")
    assert str(caught.value) == (
        "model: not of this model: backbone.layers.0.mixer.x_proj.bias, a.b; check x_proj_bias"
    )
    check_names(expected, expected)
    with pytest.raises(CheckpointError, match="and 12 more"):
        check_names({}, {str(i): (1,) for i in range(20)})


@pytest.mark.parametrize(
    "name, shape, keys",
    [
        (EMBEDDING, (8, 4), "vocab_size"),
        (EMBEDDING, (7, 5), "d_model (hidden_size)"),
        (EMBEDDING, (8, 5), "d_model (hidden_size)"),
        ("backbone.layers.1.mixer.in_proj.weight", (24, 4), "expand"),
        ("backbone.layers.1.mixer.conv1d.weight", (8, 1, 3), "d_conv (conv_kernel)"),
        ("backbone.layers.1.mixer.conv1d.weight", (8, 4), "which model the file is of"),
        ("backbone.layers.1.mixer.dt_proj.weight", (8, 2), "dt_rank (time_step_rank)"),
        ("backbone.layers.0.mixer.A_log", (8, 16), "d_state (state_size)"),
        (
            "backbone.layers.0.mixer.x_proj.weight",
            (33, 8),
            "dt_rank (time_step_rank) and d_state (state_size)",
        ),
        ("backbone.norm_f.weight", (5,), "d_model (hidden_size)"),
    ],
)
def test_another_shape_names_both_and_the_key(name, shape, keys):  # C03
    expected = shapes(tiny())
    with pytest.raises(CheckpointError) as caught:
        check_names(expected, expected | {name: shape}, "model")
    assert str(caught.value) == (
        f"model: {name} is {shape}, the configuration makes it {expected[name]}; check {keys}"
    )


def test_a_whole_model_of_another_size_takes_one_line():  # C03
    expected = {f"backbone.layers.{i}.norm.weight": (768,) for i in range(24)}
    found = {f"backbone.layers.{i}.norm.weight": (2560,) for i in range(64)}
    with pytest.raises(CheckpointError) as caught:
        check_names(expected, found, "model")
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    assert "norm.weight is (2560,), the configuration makes it (768,) (and 23 more" in text
    assert "check d_model (hidden_size)" in text
    assert "check n_layer (num_hidden_layers)" in text


# JSON


def test_json(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1, None]})
    assert read_json(tmp_path / "a.json") == {"a": [1, None]}
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"a": float("nan")})
    assert read_json(tmp_path / "a.json") == {"a": [1, None]}
    for content in (b"", b"[]", b"{", b"\xff", b"[" * 100_000):
        (tmp_path / "b.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"b\.json: "):
            read_json(tmp_path / "b.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json(tmp_path / "none.json")
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b.json"]


# Folders


def save(folder, step, value=None, **extra):
    with new_checkpoint(folder, step) as path:
        write_json(path / "config.json", {"step": step})
        tensors = tiny(step=np.array([value or step], np.float32), **extra)
        save_tensors(path / "model.safetensors", tensors)


def step_of(path):
    return int(load_tensors(path)["step"][0])


def test_newest_by_number(tmp_path):
    assert latest(tmp_path / "none") is None
    assert latest(tmp_path) is None
    for step in (9, 10, 100):
        save(tmp_path, step)
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-7.bak").mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == [f"checkpoint-{n}" for n in (9, 10, 100)]
    assert step_of(latest(tmp_path)) == 100
    assert sorted(p.name for p in latest(tmp_path).iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_equal_contents_are_equal_bytes(tmp_path):  # P9
    for name in "ab":
        save(tmp_path / name, 1)
    for file in ("config.json", "model.safetensors"):
        assert len({(tmp_path / n / "checkpoint-1" / file).read_bytes() for n in "ab"}) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: (p / "model.safetensors").unlink(),
        lambda p: (p / "config.json").unlink(),
        lambda p: (p / "config.json").write_text('{"step": '),
        lambda p: (p / "trainer_state.json").write_text(""),
        lambda p: os.truncate(p / "model.safetensors", 200),
        lambda p: (p / "optimizer.safetensors").write_bytes(b"\0" * 100),
    ],
)
def test_a_damaged_one_is_passed_over_aloud(tmp_path, damage):
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage(tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError, match="checkpoint-2"):
        check_whole(tmp_path / "checkpoint-2")
    with pytest.warns(UserWarning, match="checkpoint-2 is passed over"):
        assert step_of(latest(tmp_path)) == 1


def test_only_a_trainer_s_own_files_say_whether_it_is_whole(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "checkpoint-1"
    (folder / "vocab.json").write_text('{"files": 3}')
    (folder / "merges.json").write_text("[]")
    check_whole(folder)
    shutil.copy(folder / "model.safetensors", folder / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"trainer_state.json is missing"):
        check_whole(folder)
    (folder / "trainer_state.json").write_text('{"files": 5}')
    with pytest.raises(CheckpointError, match="files is 5, not a list of names"):
        check_whole(folder)


def test_a_folder_that_holds_something_is_in_use(tmp_path):
    check_unused(tmp_path / "none")
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="is in use: it holds checkpoint-1; choose another"):
        check_unused(tmp_path)
    with pytest.raises(CheckpointError, match=r"is in use: it holds config.json"):
        check_unused(tmp_path / "checkpoint-1")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"is in use: it holds adapter_model"):
        check_unused(tmp_path / "lora")


def test_a_failure_names_the_checkpoint_and_not_where_it_is_made(tmp_path):
    with (
        pytest.raises(CheckpointError, match=r"run/checkpoint-2/model.safetensors: w\["),
        new_checkpoint(tmp_path / "run", 2) as path,
    ):
        save_tensors(path / "model.safetensors", {"w": np.array([np.nan], np.float32)})


def test_a_body_that_raises_leaves_nothing(tmp_path):
    save(tmp_path, 1)

    def fail():
        with new_checkpoint(tmp_path, 2) as path:
            write_json(path / "config.json", {})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def test_a_step_may_be_saved_again(tmp_path):
    save(tmp_path, 1, value=5)
    save(tmp_path, 1, value=6)
    assert step_of(tmp_path / "checkpoint-1") == 6
    assert os.listdir(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_rename_that_fails_brings_the_old_one_back(tmp_path, monkeypatch, failing):
    save(tmp_path, 1, value=5)
    rename, calls = os.rename, []

    def fail(a, b):
        calls.append(a)
        if len(calls) == failing:
            raise OSError(5, "Input/output error")
        rename(a, b)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(
        CheckpointError, match="checkpoint-1: cannot be written: Input/output error"
    ):
        save(tmp_path, 1, value=6)
    assert step_of(tmp_path / "checkpoint-1") == 5
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def test_clean_removes_what_was_left_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / ".checkpoint-3.tmp-77").mkdir()
    (tmp_path / ".checkpoint-3.tmp-77" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".config.json.tmp-77").write_text("{")
    os.rename(tmp_path / "checkpoint-2", tmp_path / ".checkpoint-2.old-77")  # killed between
    (tmp_path / ".checkpoint-1.old-77").mkdir()  # killed after the new one had come
    others = [".lock", "metrics.jsonl", ".checkpoint-3.tmp-x", "checkpoint-3.tmp-77"]
    for kept in others:
        (tmp_path / kept).touch()
    clean(tmp_path)
    clean(tmp_path / "none")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "checkpoint-1", "checkpoint-2"])
    assert step_of(latest(tmp_path)) == 2


def test_rotation(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step)
    rotate(tmp_path, 5, 10)
    assert len(checkpoints(tmp_path)) == 4
    rotate(tmp_path, 2, 10)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-3"]
    save(tmp_path, 5)
    rotate(tmp_path, 1, 5)  # what was just written stays, where a later one is there, too
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-5"]
    with pytest.raises(CheckpointError, match="at least one"):
        rotate(tmp_path, 0, 10)


def test_which_is_later(tmp_path):
    save(tmp_path, 9)
    save(tmp_path, 12)
    assert later(tmp_path, 12) is None
    assert later(tmp_path, 9).name == "checkpoint-12"
    assert later(tmp_path, 3).name == "checkpoint-9"
    (tmp_path / "checkpoint-12" / "config.json").unlink()
    assert later(tmp_path, 9) is None  # nobody goes on from a damaged one


@posix
def test_a_full_disk(tmp_path):  # C08
    import resource

    save(tmp_path, 1)
    save_tensors(tmp_path / "model.safetensors", tiny())
    before = (tmp_path / "model.safetensors").read_bytes()
    large = np.zeros(1 << 20, np.float32)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match=r"safetensors: cannot be written: .*unchanged"):
            save(tmp_path, 2, extra=large)
        with pytest.raises(CheckpointError, match="cannot be written"):
            save_tensors(tmp_path / "model.safetensors", {"w": large})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "model.safetensors"]
    assert step_of(latest(tmp_path)) == 1


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    for act in (
        lambda: save(tmp_path / "file", 1),
        lambda: save_tensors(tmp_path / "none" / "a.safetensors", tiny()),
        lambda: lock(tmp_path / "file").__enter__(),
    ):
        with pytest.raises(CheckpointError, match="cannot be written"):
            act()
    assert os.listdir(tmp_path) == ["file"]


ENDLESS = """
import os, sys
import numpy as np
from wgsl_train.checkpoint import *
folder = sys.argv[1]
with lock(folder):
    clean(folder)
    print("left:", [n for n in os.listdir(folder) if ".tmp-" in n], flush=True)
    step = int(sys.argv[2])
    while True:
        with new_checkpoint(folder, step) as path:
            write_json(path / "config.json", {"step": step})
            for name in ("model", "other"):
                save_tensors(path / f"{name}.safetensors", {"w": np.full(1 << 18, step, np.float32)})
        rotate(folder, 2, step)
        print(step, flush=True)
        step += 1
"""


@posix
def test_killed_at_any_moment(tmp_path, rng):  # C08
    """Whatever was complete before the kill loads, and the next start removes the rest."""
    done = 0
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(tmp_path), str(done + 1)], stdout=subprocess.PIPE
        )
        assert child.stdout.readline() == b"left: []\n"
        done = int(child.stdout.readline())
        time.sleep(rng.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate()
        assert child.returncode == -signal.SIGKILL
        done = max([done, *map(int, re.findall(rb"(\d+)\n", rest))])
        newest = latest(tmp_path)
        step = read_json(newest / "config.json")["step"]
        assert newest.name == f"checkpoint-{step}"
        assert step >= done
        for name in ("model", "other"):
            assert (load_tensors(newest / f"{name}.safetensors")["w"] == step).all()
        done = step
    with lock(tmp_path):  # the dead hold no lock
        clean(tmp_path)
    assert not left_over(tmp_path)


# Lock


def test_a_folder_has_one_writer(tmp_path):
    folder = tmp_path / "run"
    with lock(folder):
        with pytest.raises(CheckpointError, match=rf"run: in use by process {os.getpid()} on "):
            lock(folder).__enter__()
        with lock(tmp_path / "other"):
            pass
    with lock(folder):
        pass


def test_another_process_is_refused(tmp_path):
    code = "import sys\nfrom wgsl_train.checkpoint import *\nlock(sys.argv[1]).__enter__()"
    with lock(tmp_path):
        child = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
        )
    assert child.returncode
    assert f"in use by process {os.getpid()}" in child.stderr


def test_paths_may_be_strings(tmp_path):
    save(str(tmp_path), 1)
    assert latest(str(tmp_path)) == Path(tmp_path, "checkpoint-1")
    assert len(load_tensors(str(tmp_path / "checkpoint-1"))) == len(tiny()) + 1
