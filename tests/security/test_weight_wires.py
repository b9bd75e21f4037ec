"""An attacker writes what publishers tell receivers: offers, lists, changes, catalogs."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rollway.errors import RollwayError, UsageError, WeightsError
from rollway.signed_calls import Verifier
from rollway.weights.layout import Box, check_covered
from rollway.weights.offer import Entry, Manifest, Offer, PlacedBox, read_manifest, read_offer
from rollway.weights.transports import collective
from rollway.weights.transports.delta import DeltaPublisher, DeltaReader
from rollway.weights.transports.delta.versions import (
    DELTA,
    MANIFEST,
    SNAPSHOT,
    DeltaManifest,
    DeltaVersions,
)
from rollway.weights.transports.nixl import catalog
from rollway.weights.transports.nixl.catalog import (
    ORDER_HEADER,
    Answer,
    Catalog,
    CatalogServer,
    check_bytes,
    read_order,
    sign_bytes,
)
from rollway.weights.transports.nixl.listing import Listing, SourceMemory, read_group
from rollway.weights.transports.nixl.modelexpress import open_catalog
from rollway.weights.transports.shm import ShmPublisher, ShmReader, group_by_tensor
from tests.unit.weights.deltas import write_manifest

DIGEST = "0" * 16


def listed(*entries: Entry, nbytes: int = 64) -> tuple[bytes, Offer]:
    """A list of tensors, and the offer that it belongs to."""
    manifest = Manifest(1, nbytes, list(entries))
    return manifest.encode(), Offer("shm", 1, manifest.identity, nbytes, {})


def deep(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(levels):
        inner = {"x": inner}
    return inner


@pytest.mark.parametrize(
    "change",
    [{"mac": "é" * 32}, {"mac": 7}, {"where": deep(100_000)}, {"where": {"x": "\ud800"}},
     {"where": {"x": object()}}, {"where": 7}, {"version": 2**64}, {"identity": "x"},
     {"where": {"x": "y" * (65 << 20)}}, {1: 2}],
    ids=range(10),
)  # fmt: skip
def test_an_offer_of_wrong_types(change: dict[Any, Any]) -> None:
    plain = Offer("shm", 1, "12345678", 0, {"slot": "x"}).sign("s").as_json()
    read_offer(plain, "s")
    with pytest.raises(WeightsError):
        read_offer(plain | change, "s")


@pytest.mark.parametrize("raw", [[1], ["ab"], 7, None, "offer"])
def test_an_offer_that_is_no_mapping(raw: Any) -> None:
    with pytest.raises(WeightsError, match="no offer of weights"):
        read_offer(raw, "s")


@pytest.mark.parametrize(
    "entry",
    [
        Entry("a", "F32", (0, 1 << 53, 1 << 53), 0, 0, DIGEST),
        Entry("a", "F99", (1,), 0, 4, DIGEST),
        Entry("a", "F32", (1,), 0, 8, DIGEST),
        Entry("a", "F32", (1,), 64, 4, DIGEST),
        Entry("a", "F32", (1,), 0, 4, "0x" + "_" * 14),
        Entry("a", "F32", (1,) * 17, 0, 4, DIGEST),
        Entry("a", "F32", (1,), 0, 4, DIGEST, (PlacedBox("x", (0, 0), (1,), (0,)),)),
        Entry("a", "F32", (1,), 0, 4, DIGEST, (PlacedBox("x", (1,), (0,), (0,)),)),
        Entry("a", "F32", (1,), 0, 4, DIGEST, (PlacedBox("x", (0,), (1,), (0, 0)),)),
        Entry("a", "F32", (1,), 0, 4, DIGEST, (PlacedBox("x", (0,), (1,), (0,), True),)),
        Entry("a", "F32", (1,), 0, 4, DIGEST, (PlacedBox("", (0,), (1,), (0,)),)),
    ],
    ids=range(11),
)
def test_an_impossible_list_of_tensors(entry: Entry) -> None:
    read_manifest(*listed(Entry("a", "F32", (1,), 0, 4, DIGEST)))
    with pytest.raises(WeightsError):
        read_manifest(*listed(entry))


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[Offer, Path]]:
    with ShmPublisher(directory=tmp_path) as publisher:
        offer = publisher.publish(1, [("a", torch.ones(3)), ("b", torch.ones(3))])
        yield offer, tmp_path / str(offer.where["ranks"][0]["slot"])


@pytest.mark.timeout(60)
def test_a_list_in_shared_memory_that_is_a_fifo(published: tuple[Offer, Path]) -> None:
    offer, slot = published
    reader = ShmReader(slot.parent)
    assert len(reader.headers(offer)) == 2
    file = slot.with_name(f"{slot.name}.json")
    secret = slot.parent / "secret"
    secret.write_bytes(file.read_bytes())
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(WeightsError, match="cannot be read"):
        reader.headers(offer)
    file.unlink()
    file.symlink_to(secret)
    with pytest.raises(WeightsError, match="cannot be read"):
        reader.headers(offer)


@pytest.mark.timeout(60)
def test_a_slot_that_is_a_fifo_or_no_name(published: tuple[Offer, Path]) -> None:
    offer, slot = published
    slot.unlink()
    os.mkfifo(slot)
    with pytest.raises(WeightsError):
        list(ShmReader(slot.parent).tensors(offer))
    for name in ("../x", "rollway-weights-\0", "rollway-weights-/x", "", 7, None, "x" * 5000):
        ranks = [{"slot": name, "identity": offer.identity}]
        odd = Offer("shm", 1, offer.identity, 0, {"ranks": ranks})
        with pytest.raises(WeightsError):
            ShmReader(slot.parent).headers(odd)


def test_a_tensor_that_begins_between_two_elements(published: tuple[Offer, Path]) -> None:
    offer, slot = published
    file = slot.with_name(f"{slot.name}.json")
    manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
    entries = [
        msgspec.structs.replace(entry, offset=entry.offset + 1) for entry in manifest.entries
    ]
    file.write_bytes(msgspec.structs.replace(manifest, entries=entries).encode())
    with pytest.raises(WeightsError, match="does not begin where an element can"):
        list(ShmReader(slot.parent).tensors(offer))


def test_boxes_that_all_name_the_same_bytes_make_no_huge_tensor() -> None:
    boxes = [PlacedBox("w", (n,), (n + 64,), (0,)) for n in range(0, 64 << 10, 64)]
    entry = Entry("shard", "F32", (64,), 0, 256, DIGEST, tuple(boxes))
    with pytest.raises(WeightsError, match="all ranks published 256"):
        group_by_tensor([Manifest(1, 256, [entry])])


@pytest.mark.timeout(60)
def test_a_matrix_of_many_columns_is_checked_quickly() -> None:
    """Every column was compared with every other: 20,000 took minutes."""
    columns = [Box((0, n), (2, n + 1)) for n in range(20_000)]
    check_covered("w", (2, 20_000), columns)
    with pytest.raises(UsageError, match="claimed twice"):
        check_covered("w", (2, 20_000), [*columns, Box((1, 7), (2, 9))])
    with pytest.raises(UsageError, match="not whole"):
        check_covered("w", (2, 20_000), columns[1:])


@pytest.mark.parametrize("ranks", [None, [], 7, [{}], [{"slot": "../x"}], [[]]])
def test_an_offer_with_invalid_ranks(ranks: Any) -> None:
    with pytest.raises(WeightsError, match="no offer of a trainer's ranks"):
        ShmReader().headers(Offer("shm", 1, "12345678", 0, {"ranks": ranks}))
    with pytest.raises(WeightsError, match="no offer of a trainer's ranks"):
        ShmReader().headers(Offer("shm", 1, "12345678", 0, {}))


@pytest.fixture
def deltas(tmp_path: Path) -> tuple[DeltaVersions, list[DeltaManifest]]:
    """Three versions: a snapshot and two deltas."""
    publisher = DeltaPublisher(tmp_path)
    for version in (1, 2, 3):
        publisher.publish(version, [("a", torch.full((64,), float(version)))])
    return publisher.versions, [publisher.versions.read_manifest(version) for version in (1, 2, 3)]


def read(versions: DeltaVersions, version: int) -> None:
    """Read what an attacker wrote, whose offer is signed."""
    identity = versions.read_manifest(version).identity
    offer = Offer("delta", version, identity, 0, {"root": str(versions.root)})
    for _ in DeltaReader().tensors(offer):
        pass


@pytest.mark.timeout(60)
def test_versions_that_follow_each_other_in_a_circle(
    deltas: tuple[DeltaVersions, list[DeltaManifest]],
) -> None:
    versions, (_, second, third) = deltas
    write_manifest(versions, msgspec.structs.replace(second, base=third.as_base()))
    with pytest.raises(WeightsError, match="Version 2 claims to follow 3"):
        versions.find_snapshot(third)
    with pytest.raises(WeightsError, match="Version 2 claims to follow 3"):
        versions.find_deltas(msgspec.structs.replace(third, version=0), third)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 28,), (0, 1 << 53, 1 << 53)])
def test_a_tensor_that_is_longer_than_its_file(
    shape: tuple[int, ...], deltas: tuple[DeltaVersions, list[DeltaManifest]]
) -> None:
    """No memory is taken before the file is known to hold it."""
    versions, (first, _, _) = deltas
    entry = msgspec.structs.replace(first.tensors["a"], shape=shape)
    write_manifest(versions, msgspec.structs.replace(first, tensors={"a": entry}))
    with pytest.raises(WeightsError, match=r"is cut short|is damaged"):
        read(versions, 1)


@pytest.mark.timeout(60)
def test_a_change_that_is_longer_than_its_tensor(
    deltas: tuple[DeltaVersions, list[DeltaManifest]],
) -> None:
    """A sparse file takes no disk, and would be read as a terabyte."""
    versions, (_, second, _) = deltas
    os.truncate(versions.path(2) / DELTA, 1 << 40)
    change = second.tensors["a"].change
    assert change is not None
    for fields in ({"nbytes": 1 << 40}, {"nbytes": 1 << 40, "plain_bytes": 1 << 40}):
        entry = msgspec.structs.replace(
            second.tensors["a"], change=msgspec.structs.replace(change, **fields)
        )
        write_manifest(versions, msgspec.structs.replace(second, tensors={"a": entry}))
        with pytest.raises(WeightsError, match="cannot have changed"):
            read(versions, 2)


def test_a_snapshot_of_another_model_before_the_deltas(
    deltas: tuple[DeltaVersions, list[DeltaManifest]],
) -> None:
    versions, (first, _, _) = deltas
    entry = msgspec.structs.replace(first.tensors["a"], shape=(1 << 20,))
    write_manifest(versions, msgspec.structs.replace(first, tensors={"a": entry}))
    with pytest.raises(WeightsError, match="another version than expected"):
        read(versions, 3)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [MANIFEST, SNAPSHOT])
def test_a_file_of_a_version_that_is_a_fifo(
    name: str, deltas: tuple[DeltaVersions, list[DeltaManifest]]
) -> None:
    versions, (first, _, _) = deltas
    path = versions.path(1) / name
    path.unlink()
    os.mkfifo(path)
    offer = Offer("delta", 1, first.identity, 0, {"root": str(versions.root)})
    with pytest.raises(WeightsError, match="not a plain file"):
        list(DeltaReader().tensors(offer))


@pytest.mark.parametrize("where", [{}, {"root": "\0"}, {"root": 7}, {"root": "x" * 10_000}])
def test_an_offer_with_missing_deltas(where: dict[str, Any]) -> None:
    with pytest.raises(WeightsError):
        DeltaReader().headers(Offer("delta", 1, "12345678", 0, where))


@pytest.mark.parametrize(
    "piece",
    [("x", (0,), (4,), (0,), False), ("x", (0,), (2,), (1,), False),
     ("x", (0,), (2,), (0, 0), False), ("x", (0,), (2,), (0,), True),
     ("x", (0, 0), (2, 1), (0, 0), False), ("x", (0,), (1,), (0,), False)],
    ids=range(6),
)  # fmt: skip
def test_a_piece_unlike_its_bytes(piece: Any) -> None:
    pieces = [Entry("a", "F32", (2,), 0, 8, boxes=(PlacedBox(*piece),))]
    raw = msgspec.msgpack.encode(SourceMemory(b"agent", "DRAM", 0, "none", pieces))
    with pytest.raises(WeightsError, match=r"x is outside of a|x cannot be stored in a|no piece"):
        read_group([Listing(1, "s", 0, 1, "trainer", raw)])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "change",
    [{"host": "a\0b"}, {"host": "x" * 300}, {"host": ""}, {"port": 0}, {"manifest_parts": 1000},
     {"receivers": 10**9}, {"bucket_bytes": 2**60}, {"step_seconds": 1e12}, {"prefix": "x" * 99}],
    ids=range(9),
)  # fmt: skip
def test_a_malformed_rendezvous(change: dict[str, Any]) -> None:
    where = {
        "host": "127.0.0.1", "port": 9, "receivers": 1, "backend": "gloo", "bucket_bytes": 1,
        "init_seconds": 1.0, "step_seconds": 1.0, "manifest_parts": 1, "prefix": "12345678",
    }  # fmt: skip
    collective.read_location(Offer("collective", 1, "12345678", 0, where))
    with pytest.raises(WeightsError, match="names no rendezvous"):
        collective.read_location(Offer("collective", 1, "12345678", 0, where | change))


class HostileStore:
    """A store in which a stranger wrote."""

    def __init__(self, part: bytes) -> None:
        self.part, self.reads = part, 0

    def wait(self, *_: Any) -> None: ...

    def check(self, _: list[str]) -> bool:
        return True

    def get(self, _: str) -> bytes:
        self.reads += 1
        return self.part


def test_a_list_in_the_store_that_never_ends() -> None:
    """Parts of 8 MiB where 4 are expected: no more is read than a list may have."""
    store = HostileStore(bytes(8 << 20))
    where = collective.Location(
        host="h", port=1, receivers=1, backend="gloo", bucket_bytes=1, init_seconds=1.0,
        step_seconds=1.0, manifest_parts=64, prefix="12345678",
    )  # fmt: skip
    with pytest.raises(WeightsError, match="too long"):
        collective.fetch_manifest(store, where, Offer("collective", 1, "12345678", 0, {}))
    assert store.reads <= 33


def test_a_reason_to_stop_of_megabytes() -> None:
    rendezvous = collective.Rendezvous.__new__(collective.Rendezvous)
    rendezvous.store, rendezvous._watch = HostileStore(b"x" * (8 << 20)), lambda: None
    with pytest.raises(WeightsError) as caught:
        rendezvous.check()
    assert len(str(caught.value)) <= 500


def test_a_catalog_request_whose_order_is_no_text() -> None:
    """One byte above 0x7f in a header was a bare 500, before any secret was asked for."""
    with CatalogServer(secret="s") as server:
        host, port = server.url.removeprefix("http://").split(":")
        for order in (b"\xff\xfe", b"[" * 5000, b"{}", b'{"mac":"\xff"}', b'"\\ud800"'):
            with socket.create_connection((host, int(port)), 10) as line:
                headers = f"{ORDER_HEADER}: ".encode() + order + b"\r\n"
                line.sendall(b"POST /v1/withdraw HTTP/1.1\r\nHost: x\r\n" + headers)
                line.sendall(b"Content-Length: 0\r\n\r\n")
                answer = http.client.HTTPResponse(line)
                answer.begin()
                assert answer.status in (400, 401)


def test_an_invalid_catalog_call() -> None:
    with CatalogServer(secret="s") as server:
        host, port = server.url.removeprefix("http://").split(":")
        for body in (b"", b"\x91" * 100_000, b"\xc1", b"\x80" * 3, b"\x86\xa4\xff"):
            line = http.client.HTTPConnection(host, int(port), timeout=10)
            headers = sign_bytes("s", "/v1/look_up", body)
            line.request("POST", "/v1/look_up", body, headers)
            response = line.getresponse()
            raw, number = response.read(), json.loads(headers[ORDER_HEADER])["number"]
            theirs = dict(response.headers)
            check_bytes(raw, read_order(Verifier("s"), f"answer {number}", theirs)[0])
            assert "no call to a catalog" in msgspec.msgpack.decode(raw, type=Answer).error
            line.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("body", [b"\xc1", b"\x91" * 100_000, b"", b"\x81\xa1x\x01"], ids=range(4))
def test_a_catalog_that_answers_nonsense(body: bytes) -> None:
    sealed = Answering(lambda number: (body, sign_bytes("s", f"answer {number}", body)))
    with sealed as url, pytest.raises(WeightsError, match="cannot be read"):
        Catalog(url, secret="s").withdraw(1, "r")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", ["head", "body"])
def test_a_catalog_that_answers_byte_by_byte(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline counts for the whole answer, and not for each byte: all of this one would
    take minutes."""
    monkeypatch.setattr(catalog, "_CALL_SECONDS", 0.5)
    slow = Answering(lambda _: (b"x" * 4000, {}), slow=part)
    with slow as url, pytest.raises(WeightsError, match="no answer within"):
        Catalog(url, secret="s").withdraw(1, "r")


class Answering:
    """A server that answers one request; of its answer, one part may be slow."""

    def __init__(self, answer: Any, slow: str = "") -> None:
        self._answer, self._slow = answer, slow
        self._ended = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._socket.close()
        self._thread.join(10)

    def _serve(self) -> None:
        line, _ = self._socket.accept()
        with line:
            request = line.recv(1 << 16).decode("latin-1")
            order = request.split(f"{ORDER_HEADER}: ")[1].split("\r\n")[0]
            body, headers = self._answer(json.loads(order)["number"])
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n"
            head += "".join(f"{name}: {text}\r\n" for name, text in headers.items())
            head += f"x-padding: {'x' * 2000}\r\n\r\n"
            for part, data in (("head", head.encode()), ("body", body)):
                pieces = [bytes([byte]) for byte in data] if part == self._slow else [data]
                for piece in pieces:
                    if self._slow == part and self._ended.wait(0.05):
                        return
                    try:
                        line.sendall(piece)
                    except OSError:
                        return


@pytest.mark.parametrize("url", ["http://[", "http://h:99999", "ftp://h", "http://", "x" * 5000])
def test_an_offer_with_an_unreachable_catalog(url: str) -> None:
    with pytest.raises(RollwayError):
        open_catalog({"catalog": url}, secret="s").withdraw(1, "r")


def test_a_listing_of_impossible_numbers() -> None:
    for change in ({"rank": -1}, {"world": 2**60}, {"version": 2**60}, {"source": "x" * 300}):
        plain: dict[str, Any] = {
            "version": 1, "source": "s", "rank": 0, "world": 1, "role": "trainer", "body": b"",
        }  # fmt: skip
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(plain | change, Listing)


def test_deltas_and_json_bombs(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    plain = json.dumps({"version": 1, "tensors": {}})
    (tmp_path / "v1" / MANIFEST).write_text(plain)
    DeltaVersions(tmp_path).read_manifest(1)
    for text in ("[" * 100_000, plain[:-2] + "{" * 100_000, "", "\0"):
        (tmp_path / "v1" / MANIFEST).write_text(text)
        with pytest.raises(WeightsError, match="damaged"):
            DeltaVersions(tmp_path).read_manifest(1)


def test_a_snapshot_that_lacks_a_tensor(tmp_path: Path) -> None:
    publisher = DeltaPublisher(tmp_path)
    publisher.publish(1, [("a", torch.ones(3)), ("b", torch.ones(3))])
    manifest = publisher.versions.read_manifest(1)
    entry = msgspec.structs.replace(manifest.tensors["a"], snapshot=None)
    tensors = {**manifest.tensors, "a": entry}
    write_manifest(publisher.versions, msgspec.structs.replace(manifest, tensors=tensors))
    with pytest.raises(WeightsError, match="No snapshot has a"):
        read(publisher.versions, 1)
