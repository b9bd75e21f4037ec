"""Hostile checkpoints are refused before anything is loaded."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from rollway.errors import RollwayError, UsageError
from rollway.weights.adapter import check_config
from rollway.weights.checkpoint import (
    STABLE,
    check_checkpoint,
    publish_checkpoint,
    read_headers,
)
from rollway.weights.planning.scenario import read_model
from rollway.weights.untrusted import read_weight_file
from tests.checkpoints import write_checkpoint

INDEX = "model.safetensors.index.json"
BRACKETS = "[" * 100_000
Fields = dict[str, Any]


def weight_file(header: object, data: int, path: Path) -> Path:
    """Write a weight file with any header, as JSON or as text, and so many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return path


def field(start: int, stop: int, shape: object = None, dtype: object = "F32") -> Fields:
    size = [(stop - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": size, "data_offsets": [start, stop]}


HEADERS: dict[str, tuple[object, int]] = {
    "tensors that overlap": ({"a": field(0, 8), "b": field(4, 12)}, 12),
    "tensors in one place": ({"a": field(0, 8), "b": field(0, 8)}, 8),
    "a tensor inside another": ({"a": field(0, 16), "b": field(4, 8), "c": field(16, 20)}, 20),
    "a gap": ({"a": field(0, 4), "b": field(8, 12)}, 12),
    "a gap at the start": ({"a": field(4, 8)}, 8),
    "a negative start": ({"a": field(-8, 0), "b": field(0, 8)}, 8),
    "an end before the start": ({"a": field(8, 0, [2]), "b": field(0, 8)}, 8),
    "an end outside the file": ({"a": field(0, 400)}, 4),
    "offsets beyond 64 bits": ({"a": field(2**70, 2**70 + 4)}, 4),
    "offsets that are fractions": ({"a": {**field(0, 4), "data_offsets": [0, 4.0]}}, 4),
    "offsets that are truths": ({"a": {**field(0, 4), "data_offsets": [False, 4]}}, 4),
    "one offset": ({"a": {**field(0, 4), "data_offsets": [4]}}, 4),
    "three offsets": ({"a": {**field(0, 4), "data_offsets": [0, 2, 4]}}, 4),
    "too few bytes for the shape": ({"a": field(0, 4, [2])}, 4),
    "too many bytes for the shape": ({"a": field(0, 8, [0])}, 8),
    "negative sizes": ({"a": field(0, 4, [-1, -1])}, 4),
    "sizes whose product wraps to the right one": ({"a": field(0, 4, [3, 0xAAAAAAAAAAAAAAAB])}, 4),
    "an empty tensor whose strides overflow": ({"a": field(0, 0, [0, 2**40, 2**40])}, 0),
    "sizes that are truths": ({"a": field(0, 4, [True])}, 4),
    "sizes that are fractions": ({"a": field(0, 4, [1.0])}, 4),
    "17 dimensions": ({"a": field(0, 4, [1] * 17)}, 4),
    "a shape that is text": ({"a": field(0, 4, "1")}, 4),
    "an unknown dtype": ({"a": field(0, 4, dtype="F99")}, 4),
    "a dtype that is a list": ({"a": field(0, 4, dtype=["F32"])}, 4),
    "a field that is a number": ({"a": 4}, 4),
    "a field without a shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4),
    "a name twice": (
        b'{"a":%b,"a":%b}' % ((json.dumps(field(0, 4)).encode(),) * 2),
        4,
    ),
    "a name with a line end": ({"a\nb": field(0, 4)}, 4),
    "half of a surrogate pair": (b'{"\\ud800":%b}' % json.dumps(field(0, 4)).encode(), 4),
    "no name": ({"": field(0, 4)}, 4),
    "a name of a megabyte": ({"a" * (1 << 20): field(0, 4)}, 4),
    "metadata that is no text": ({"__metadata__": {"format": 1}, "a": field(0, 4)}, 4),
    "metadata that is a list": ({"__metadata__": ["pt"], "a": field(0, 4)}, 4),
    "a list": ([1, 2], 0),
    "100,000 brackets": (BRACKETS.encode(), 0),
    "100,000 brackets as a shape": (b'{"a":{"shape":' + BRACKETS.encode(), 0),
    "an integer of 5,000 digits": (b'{"a":%b}' % (b"9" * 5000), 0),
    "bytes that are no text": (b"\xff\xfe{}", 0),
}


@pytest.mark.parametrize("attack", HEADERS)
def test_a_weight_file_with_a_hostile_header_is_refused(attack: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    header, data = HEADERS[attack]
    weight_file(header, data, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="not a whole weight file") as caught:
        check_checkpoint(tmp_path)
    assert len(str(caught.value)) < 1000 + len(str(tmp_path))
    assert str(caught.value).isprintable()


def test_a_header_longer_than_the_file_or_the_bound_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for length in (2**64 - 1, 2**63, 9, 100_000_001):
        with file.open("wb") as opened:
            opened.write(struct.pack("<Q", length) + b"{}")
            if length == 100_000_001:
                opened.truncate(length + 8)  # it has room on disk, and takes none
        with pytest.raises(UsageError, match="its header would have"):
            read_weight_file(file)


def test_valid_files_of_other_writers_pass(tmp_path: Path) -> None:
    """Accept what safetensors accepts: any order of names, no bytes, no dimensions, odd dtypes."""
    headers: list[tuple[object, int]] = [
        ({"b": field(4, 8), "a": field(0, 4)}, 8),
        ({"a": field(0, 0, [0, 7]), "b": field(0, 4), "c": field(4, 4, [0])}, 4),
        ({"scalar": field(0, 4, []), "__metadata__": {"format": "pt"}}, 4),
        ({"a": field(0, 4, [8], "F4"), "b": field(4, 7, [4], "F6_E2M3")}, 7),
        ({"a": field(0, 8, [1], "C64"), "b": field(8, 9, [1], "F8_E4M3FNUZ")}, 9),
        ({}, 0),
        (json.dumps({"a": field(0, 4)}).encode() + b"      ", 4),
    ]
    for number, (header, data) in enumerate(headers):
        file = weight_file(header, data, tmp_path / f"{number}.safetensors")
        names = {name for name, _ in safetensors.deserialize(file.read_bytes())}
        assert read_weight_file(file).keys() == names


def shards(directory: Path, weight_map: object) -> Path:
    """Write a checkpoint in two files, `a` in the first and `b` in the second, with any index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    for name in "ab":
        save_file({name: np.ones(3, np.float32)}, directory / f"{name}.safetensors")
    index = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (directory / INDEX).write_text(index)
    return directory


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    shards(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})
    assert set(check_checkpoint(tmp_path).tensors) == {"a", "b"}
    save_file({"b": np.ones(3, np.float32), "a": np.zeros(3)}, tmp_path / "b.safetensors")
    with pytest.raises(UsageError, match=r"a in a\.safetensors and in b\.safetensors"):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../b.safetensors", "..", ".", "", "/etc/passwd", "x/b.safetensors", "b\0.safetensors",
     "b\n.safetensors", "x" * 300, 7, None, ["b.safetensors"], "\ud800"],
)  # fmt: skip
def test_an_index_with_paths_instead_of_file_names_is_refused(name: object, tmp_path: Path) -> None:
    shards(tmp_path / "v1", {"a": "a.safetensors", "b": name})
    save_file({"b": np.ones(3, np.float32)}, tmp_path / "b.safetensors")
    with pytest.raises(UsageError, match="names files elsewhere") as caught:
        check_checkpoint(tmp_path / "v1")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "text",
    [BRACKETS, '{"weight_map":' + BRACKETS, "{}", "[]", "null", '{"weight_map": []}', "\0", "",
     '{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}',
     '{"weight_map": {"a\\u0000": "a.safetensors"}}', '{"weight_map": ' + "9" * 5000 + "}"],
)  # fmt: skip
def test_an_invalid_index_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read as an index"):
        check_checkpoint(shards(tmp_path, text))


@pytest.mark.parametrize("text", [BRACKETS, '{"a":' + BRACKETS, "[1]", "7", "\0", "", "{"])
def test_an_invalid_config_is_refused(text: str, tmp_path: Path) -> None:
    (write_checkpoint(tmp_path) / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        check_checkpoint(tmp_path)
    with pytest.raises(UsageError, match=r"config\.json"):
        read_model(tmp_path)


def test_a_config_as_transformers_writes_it_passes(tmp_path: Path) -> None:
    """Mamba's has an Infinity; a hand-edited one may have a key twice, which readers accept."""
    text = '{"time_step_limit": [0.0, Infinity], "a": 1, "a": 2}'
    (write_checkpoint(tmp_path) / "config.json").write_text(text)
    check_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "config",
    [{"num_hidden_layers": 10**9}, {"num_experts": 10**9, "num_hidden_layers": 2},
     {"num_hidden_layers": "many"}, {"num_attention_heads": 0}, {"hidden_size": 1e400},
     {"text_config": 7}, {"num_key_value_heads": [1]}, {"decoder_sparse_step": "x"},
     {"mlp_only_layers": 7}, {"num_hidden_layers": 10**4, "num_experts": 10**4},
     {"torch_dtype": "\0"}, {"num_hidden_layers": -1}],
)  # fmt: skip
@pytest.mark.timeout(60)
def test_a_config_with_huge_sizes_is_refused(config: Fields, tmp_path: Path) -> None:
    plain: Fields = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "num_attention_heads": 2,
        "hidden_size": 8, "vocab_size": 8, "num_experts": 2, "moe_intermediate_size": 4,
        "intermediate_size": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(plain))
    read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(plain | config))
    with pytest.raises(UsageError):
        read_model(tmp_path)


STABLES: dict[str, str] = {
    "paths": json.dumps({"files": {"../secret": {"size": 1, "sha256": "0" * 64}}}),
    "an absolute path": json.dumps({"files": {"/etc/passwd": {"size": 1, "sha256": "0" * 64}}}),
    "its parent": json.dumps({"files": {"..": {"size": 1, "sha256": "0" * 64}}}),
    "a NUL": json.dumps({"files": {"a\0b": {"size": 1, "sha256": "0" * 64}}}),
    "no digests": json.dumps({"files": {"model.safetensors": {"size": 1}}}),
    "numbers for digests": json.dumps({"files": {"model.safetensors": 7}}),
    "a digest that is none": json.dumps(
        {"files": {"model.safetensors": {"size": 1, "sha256": ["x"]}}}
    ),
    "a list of files that is none": json.dumps({"files": ["model.safetensors"]}),
    "100,000 brackets": BRACKETS,
    "100,000 brackets below files": '{"files":' + BRACKETS,
    "a file twice": '{"files": {"a": 1, "a": 2}}',
    "half of it": '{"files": {"model.safete',
}


@pytest.mark.parametrize("attack", STABLES)
@pytest.mark.parametrize("whole", [True, False])
def test_a_hostile_stable_file_is_refused(attack: str, whole: bool, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s")
    write_checkpoint(tmp_path / "v1")
    (tmp_path / "v1" / STABLE).write_text(STABLES[attack])
    with pytest.raises(UsageError, match="STABLE cannot be read as a list of files"):
        check_checkpoint(tmp_path / "v1", whole=whole)


@pytest.mark.parametrize("text", ["", "\n", "done", "2026-01-01", "{}", '{"step": 7}'])
def test_a_stable_file_of_another_trainer_passes(text: str, tmp_path: Path) -> None:
    (write_checkpoint(tmp_path) / STABLE).write_text(text)
    check_checkpoint(tmp_path)


def test_links_out_of_the_roots_are_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", write_checkpoint(tmp_path / "elsewhere")
    for name in ("model.safetensors", "config.json", STABLE, INDEX):
        inside = write_checkpoint(root / name / "v1")
        (outside / name).touch()
        (inside / name).unlink(missing_ok=True)
        (inside / name).symlink_to(outside / name)
        with pytest.raises(UsageError, match="link to a file outside"):
            check_checkpoint(inside, roots=[root])
        (outside / INDEX).unlink(missing_ok=True)
    loop = write_checkpoint(root / "loop")
    (loop / "x").symlink_to("x")
    with pytest.raises(UsageError, match=r"leads nowhere|link to a file outside"):
        check_checkpoint(loop, roots=[root])


def test_links_inside_the_roots_pass(tmp_path: Path) -> None:
    """As the Hugging Face cache has them: snapshots/x/model.safetensors -> ../../blobs/y."""
    snapshot = write_checkpoint(tmp_path / "root" / "snapshots" / "x")
    (tmp_path / "root" / "blobs").mkdir()
    (snapshot / "model.safetensors").rename(tmp_path / "root" / "blobs" / "y")
    (snapshot / "model.safetensors").symlink_to("../../blobs/y")
    check_checkpoint(snapshot, roots=[tmp_path / "root"])
    check_checkpoint(snapshot)  # without roots, links lead wherever their owner likes


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", STABLE, INDEX])
@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "socket"])
def test_fifos_and_devices_are_refused(kind: str, name: str, tmp_path: Path) -> None:
    """A FIFO has no writer and /dev/zero has no end: the check waits for neither."""
    directory = write_checkpoint(tmp_path / "v1")
    (directory / name).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(directory / name)
    elif kind == "device":
        (directory / name).symlink_to("/dev/zero")
    elif kind == "directory":
        (directory / name).mkdir()
    else:
        os.mknod(directory / name, 0o140600)
    with pytest.raises(UsageError):
        check_checkpoint(directory)


def test_a_file_that_changes_after_it_was_published_is_refused(tmp_path: Path) -> None:
    """A control for STABLE: the files that it lists are compared."""
    target = publish_checkpoint(tmp_path / "v1", lambda path: write_checkpoint(path))
    check_checkpoint(target)
    (target / "config.json").unlink()
    (target / "config.json").mkdir()
    with pytest.raises(RollwayError):
        check_checkpoint(target)


@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-this-name/x"])
def test_an_invalid_path_is_refused(path: str) -> None:
    with pytest.raises(UsageError):
        check_checkpoint(Path(path))


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    "change",
    [{"r": "8"}, {"r": -1}, {"r": 10**9}, {"r": True}, {"r": None}, {"lora_alpha": "x"},
     {"lora_alpha": float("nan")}, {"target_modules": 7}, {"target_modules": [["q_proj"]]},
     {"x": nested(100_000)}, {"x": "\ud800"}, {"x": "y" * (2 << 20)}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_an_adapter_config_with_wrong_values_is_refused(change: Fields) -> None:
    plain: Fields = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    check_config(plain)
    with pytest.raises(UsageError, match="adapter's config"):
        check_config(plain | change)


def test_read_headers_refuses_what_check_checkpoint_refuses(tmp_path: Path) -> None:
    """Workers read headers alone before they load anything."""
    weight_file({"a": field(0, 8), "b": field(4, 12)}, 12, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="overlaps"):
        read_headers(tmp_path)
