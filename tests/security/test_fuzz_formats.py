"""Fuzz every weight format that we read, with damaged valid files and with plain noise.

A reader may return, or raise a `RollwayError` that can be printed. Anything else is a finding: an
untyped exception, a case that takes seconds, or more than half a gigabyte of memory.
"""

from __future__ import annotations

import contextlib
import json
import signal
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from rollway.errors import RollwayError
from rollway.weights import untrusted
from rollway.weights.adapter import Adapter, attach_adapter, check_config, detach_adapter
from rollway.weights.checkpoint import STABLE, check_checkpoint, publish_checkpoint
from rollway.weights.digest.checksums import word_sum
from rollway.weights.offer import Entry, Manifest, Offer, PlacedBox, read_manifest, read_offer
from rollway.weights.planning.scenario import read_model
from rollway.weights.transports import collective
from rollway.weights.transports.delta import DeltaPublisher, DeltaReader
from rollway.weights.transports.delta.unpacking import read_step
from rollway.weights.transports.delta.versions import (
    DELTA,
    MANIFEST,
    DeltaManifest,
    DeltaVersions,
    open_stored,
)
from rollway.weights.transports.nixl.catalog import _CALLS, ListedVersions, answer
from rollway.weights.transports.nixl.listing import Listing, SourceMemory, read_group
from rollway.weights.transports.shm import group_by_tensor
from tests.checkpoints import write_checkpoint
from tests.security.limits import limit_memory
from tests.soak import examples

CASES = examples(400)
DELTAS = DeltaVersions(Path())
ROOM = 512 << 20
SECONDS = 20.0
"""Limit of one case; the machine may be busy, but an endless loop takes longer."""
INDEX = "model.safetensors.index.json"
TENSORS = {"a": np.ones((2, 3), np.float32), "b": np.ones(0, np.float32), "c": np.ones(5, np.int8)}
CONFIG = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
HF_CONFIG = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8,
    "vocab_size": 8, "num_experts": 2, "moe_intermediate_size": 4, "intermediate_size": 4,
    "decoder_sparse_step": 1, "mlp_only_layers": [0], "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A reader, and a valid input for it."""

    read: Callable[[bytes], object]
    valid: bytes
    as_json: bool = True
    """Whether it can be changed by field; otherwise it is msgpack or plain bytes."""


def in_file(name: str, look: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Return a reader of a directory in which one file has the given bytes."""

    def read(raw: bytes) -> object:
        with tempfile.TemporaryDirectory() as directory:
            path = write_checkpoint(Path(directory))
            (path / "b.safetensors").write_bytes(save({"b": np.ones(3, np.float32)}))
            (path / name).write_bytes(raw)
            return look(path)

    return read


def read_weight_file(raw: bytes) -> None:
    """If we accept a file, safetensors accepts it too and reads the same tensors."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.safetensors"
        file.write_bytes(raw)
        tensors = untrusted.read_weight_file(file)
    names = {name for name, _ in safetensors.deserialize(raw)}
    assert names == tensors.keys()


def read_header(text: bytes) -> None:
    header_bytes = len(save(TENSORS)) - 8 - sum(tensor.nbytes for tensor in TENSORS.values())
    data = save(TENSORS)[8 + header_bytes :]
    read_weight_file(struct.pack("<Q", len(text)) + text + data)


def read_json_offer(raw: bytes) -> None:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        return  # the worker's HTTP server reads this
    with contextlib.suppress(TypeError, ValueError, OverflowError, RecursionError):
        fields = msgspec.convert(fields, Offer).sign("s").as_json()  # by one who may sign
    collective.read_location(read_offer(fields, "s"))


def read_adapter(raw: bytes) -> None:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        return
    if not isinstance(fields, dict):
        return
    check_config(fields)
    offer = Offer("shm", 1, "12345678", 0, {})
    detach_adapter(attach_adapter(offer, Adapter("style@1", fields, "here")))


def read_offered_adapter(raw: bytes) -> None:
    try:
        detach_adapter(Offer("shm", 1, "12345678", 0, {"adapter": json.loads(raw)}))
    except (ValueError, RecursionError):
        return


def read_list(raw: bytes) -> None:
    """The offer fits the list: an attacker who changes the list can change its identity too."""
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
        offer = Offer("shm", manifest.version, manifest.identity, 0, {})
    except (msgspec.DecodeError, UnicodeDecodeError):
        offer = Offer("shm", 1, "12345678", 0, {})
    group_by_tensor([read_manifest(raw, offer)])


def read_deltas(raw: bytes) -> None:
    """The offer fits the manifest: an attacker who changes it can change the identity too."""
    (DELTAS.path(2) / MANIFEST).write_bytes(raw)
    manifest = DELTAS.read_manifest(2)
    offer = Offer("delta", 2, manifest.identity, 0, {"root": str(DELTAS.root)})
    for _ in DeltaReader().tensors(offer):
        pass
    _unpack(manifest)


def _unpack(manifest: DeltaManifest) -> None:
    with open_stored(DELTAS.path(2) / DELTA) as file:
        for _ in read_step(file, manifest.tensors).move(torch.device("cpu")):
            pass


def read_change(raw: bytes) -> None:
    """The manifest fits the bytes: its sums are theirs."""
    path = DELTAS.path(2)
    (path / MANIFEST).write_bytes(FORMATS["delta manifest"].valid)
    (path / DELTA).write_bytes(raw)
    manifest = DELTAS.read_manifest(2)
    entry = manifest.tensors["a"]
    assert entry.change is not None
    packed = raw[: entry.change.nbytes]
    total = word_sum(torch.tensor(list(packed), dtype=torch.uint8))
    change = msgspec.structs.replace(entry.change, sum=total)
    entry = msgspec.structs.replace(entry, change=change)
    _unpack(msgspec.structs.replace(manifest, tensors={"a": entry}))


def read_call(raw: bytes) -> None:
    versions = ListedVersions()
    for name in _CALLS:
        assert answer(versions, name, raw) is not None


def read_source_memory(raw: bytes) -> None:
    group = read_group([Listing(1, "s", 0, 1, "trainer", raw)])
    assert group.identity
    assert group.nbytes >= 0


def _stable() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = publish_checkpoint(Path(directory) / "v1", lambda where: write_checkpoint(where))
        return (path / STABLE).read_bytes()


@pytest.fixture(scope="module", autouse=True)
def deltas(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A published version, whose manifest the cases replace."""
    DELTAS.root = tmp_path_factory.mktemp("deltas")
    old = torch.arange(1000, dtype=torch.int32)
    new = old.clone()
    new[::7] += 3
    with DeltaPublisher(DELTAS.root) as publisher:
        publisher.publish(1, [("a", old), ("b", torch.ones(2))])
        publisher.publish(2, [("a", new), ("b", torch.ones(2))])
    path = DELTAS.path(2)
    FORMATS["delta manifest"] = Format(read_deltas, (path / MANIFEST).read_bytes())
    FORMATS["packed change"] = Format(read_change, (path / DELTA).read_bytes(), False)


def _source_memory() -> bytes:
    boxes = (PlacedBox("w", (0, 0), (2, 3), (0, 0)),)
    pieces = [Entry("w 0", "F32", (2, 3), 0, 24, boxes=boxes)]
    return msgspec.msgpack.encode(SourceMemory(b"agent", "DRAM", 0, "none", pieces))


def _offer() -> bytes:
    where = {
        "host": "127.0.0.1", "port": 9, "receivers": 1, "backend": "gloo", "bucket_bytes": 1,
        "init_seconds": 1.0, "step_seconds": 1.0, "manifest_parts": 1, "prefix": "12345678",
    }  # fmt: skip
    return msgspec.json.encode(Offer("collective", 1, "12345678", 0, where).sign("s"))


WEIGHTS = save(TENSORS)
HEADER = WEIGHTS[8 : len(WEIGHTS) - sum(tensor.nbytes for tensor in TENSORS.values())]
LIST = Manifest(
    1, 64, [Entry("s", "F32", (2, 3), 0, 24, "0" * 16, (PlacedBox("w", (0, 0), (2, 3), (0, 0)),))]
).encode()
SHARDS = {"model.norm.weight": "model.safetensors", "b": "b.safetensors"}
FORMATS = {
    "weight file": Format(read_weight_file, WEIGHTS, False),
    "safetensors header": Format(read_header, HEADER),
    "index": Format(
        in_file(INDEX, check_checkpoint), json.dumps({"weight_map": SHARDS}).encode()
    ),
    "config": Format(in_file("config.json", check_checkpoint), b'{"a": [1, {"b": null}]}'),
    "model config": Format(in_file("x.json", lambda p: read_model(p / "x.json")),
                           json.dumps(HF_CONFIG).encode()),
    "STABLE": Format(in_file(STABLE, check_checkpoint), _stable()),
    "adapter config": Format(read_adapter, json.dumps(CONFIG).encode()),
    "adapter of an offer": Format(
        read_offered_adapter,
        json.dumps({"served": "style@1", "config": CONFIG, "place": "here"}).encode(),
    ),
    "offer": Format(read_json_offer, _offer()),
    "list of tensors": Format(read_list, LIST),
    "delta manifest": Format(read_deltas, b"{}"),  # the fixture has valid ones
    "packed change": Format(read_change, b"", False),
    "catalog listing": Format(
        read_call, msgspec.msgpack.encode([Listing(1, "s", 0, 1, "trainer", b"b")]), False
    ),
    "catalog look-up": Format(read_call, msgspec.msgpack.encode([1, ["x"], "r"]), False),
    "NIXL source": Format(read_source_memory, _source_memory(), False),
}  # fmt: skip


HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 255, 1 << 16, 10**9, 1 << 31, 1 << 32, 1 << 53, 1 << 63),
    *(1 << 64, 10**30, -(10**30), 0.0, 1.5, -0.0, 1e308, 1e-308, "", "0", "x", "x" * 5000, "é"),
    *(
        "\0",
        "\n",
        "..",
        "/",
        "../x",
        "a/b",
        "\ud800",
        "\u202e",
        "F32",
        "BF16",
        "F4",
        "__metadata__",
    ),
    *([], {}, [0], [0, 0], [[]], [None], ["x"], {"x": 1}, {"": {}}, {"files": {}}, [1] * 20),
    *([1 << 53] * 16, [0, 1 << 53, 1 << 53], [-1, -1], "9" * 50, float("inf"), float("nan")),
]
NOISE = [
    b"", b"\0", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"\xff" * 64, b"\x91" * 100_000,
    b"null", b"[]", b"{}", b"7", b'"x"', b"9" * 5000, b" " * 1000, b"\xef\xbb\xbf{}",
    struct.pack("<Q", 1 << 63) + b"{}", struct.pack("<Q", 2) + b"{}", b"RWD1\xff\xff\xff\x7f",
    b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
]  # fmt: skip
"""Inputs that have broken parsers before; those of msgpack announce 4 GiB each."""


@dataclass(frozen=True)
class Edit:
    """One change: where, as a part of the whole, and what."""

    kind: str
    at: float
    value: Any


edits = st.builds(
    Edit,
    st.sampled_from(["set", "drop", "rename", "twice", "flip", "cut", "insert", "repeat"]),
    st.floats(0, 1, exclude_max=True),
    st.one_of(st.sampled_from(HOSTILE), st.integers(), st.text(max_size=8)),
)


def damage(fmt: Format, changes: list[Edit]) -> bytes:
    """Apply changes of fields first, as long as it can be read, and of bytes then."""
    raw = fmt.valid
    by_field = [change for change in changes if change.kind in ("set", "drop", "rename", "twice")]
    if fmt.as_json and by_field:
        fields = json.loads(raw)
        for change in by_field:
            fields = change_field(fields, change)
        raw = json.dumps(fields).encode()
        if any(change.kind == "twice" for change in by_field):
            raw = raw.replace(b"}", b',"a":1,"a":1}', 1)
    for change in changes:
        if change not in by_field or not fmt.as_json:
            raw = change_bytes(raw, change)
    return raw


def change_field(fields: Any, change: Edit) -> Any:
    places = [(fields, key) for fields, key in walk(fields)]
    if not places or change.kind == "twice":
        return fields
    inside, key = places[int(change.at * len(places))]
    if change.kind == "set":
        inside[key] = change.value
    elif change.kind == "drop":
        del inside[key]
    elif isinstance(inside, dict) and isinstance(change.value, str):
        inside[change.value] = inside.pop(key)
    return fields


def walk(fields: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(fields) if isinstance(fields, dict) else range(len(fields))
    for key in keys:
        yield fields, key
        if isinstance(fields[key], dict | list):
            yield from walk(fields[key])


def change_bytes(raw: bytes, change: Edit) -> bytes:
    at = int(change.at * max(1, len(raw)))
    if change.kind == "cut":
        return raw[:at]
    if change.kind == "repeat":
        return raw[:at] + raw[at // 2 :]
    if change.kind == "insert" or not raw:
        return raw[:at] + str(change.value).encode(errors="replace") + raw[at:]
    flipped = bytearray(raw)
    flipped[at] ^= 1 + zlib.crc32(repr(change.value).encode(errors="replace")) % 255
    return bytes(flipped)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Limit a reader to half a gigabyte; beyond it is a MemoryError, which is untyped."""
    with limit_memory(ROOM):
        yield


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"a case took more than {SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def attack(fmt: Format, raw: bytes) -> None:
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        fmt.read(raw)
    except RollwayError as error:
        assert len(str(error)) < 10_000
        str(error).encode()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize("name", FORMATS)
def test_valid_inputs_are_read(name: str) -> None:
    """Control: the damage is what is refused."""
    FORMATS[name].read(FORMATS[name].valid)


@pytest.mark.parametrize("name", FORMATS)
def test_noise_raises_only_typed_errors(name: str) -> None:
    for raw in NOISE:
        attack(FORMATS[name], raw)
    for size in range(min(200, len(FORMATS[name].valid))):
        attack(FORMATS[name], FORMATS[name].valid[:size])


@pytest.mark.parametrize("name", FORMATS)
def test_hostile_values_in_every_field_raise_only_typed_errors(name: str) -> None:
    """The short way to most findings, without chance."""
    fmt = FORMATS[name]
    if not fmt.as_json:
        return
    count = sum(1 for _ in walk(json.loads(fmt.valid)))
    for number in range(0, count, max(1, count // 12)):
        for value in HOSTILE[:: 1 if count < 12 else 3]:
            attack(fmt, damage(fmt, [Edit("set", number / count, value)]))


@pytest.mark.parametrize("name", FORMATS)
def test_random_damage_raises_only_typed_errors(name: str) -> None:
    fmt = FORMATS[name]

    @settings(
        max_examples=CASES, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.one_of(st.lists(edits, min_size=1, max_size=4), st.binary(max_size=256)))
    @example(b"")
    def run(case: list[Edit] | bytes) -> None:
        attack(fmt, case if isinstance(case, bytes) else damage(fmt, case))

    run()
