"""Versions on a ModelExpress server. The server is a stand-in that speaks gRPC
(tests/modelexpress_server.py), the messages are those of ModelExpress 0.7.0's own client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import UsageError, WeightsError
from rollway.signed_calls import SECRET
from rollway.weights.transports.nixl import modelexpress
from rollway.weights.transports.nixl.catalog import CatalogServer, NotYet
from rollway.weights.transports.nixl.listing import Listing
from rollway.weights.transports.nixl.modelexpress import (
    ModelExpressCatalog,
    State,
    decode,
    encode,
    open_catalog,
)
from tests.modelexpress_server import ModelExpressServer, make_messages

WORD = "a secret of this test"
# What modelexpress_rl.ModelExpressControlClient 0.7.0 sent for the same calls.
SENT_BY_THEIR_CLIENT = {
    "CreateWeightVersion": "0a096f72672f6d6f64656c120e6f72672f6d6f64656c2d722d763118012a0672616e6b"
    "2d302a0672616e6b2d313801420e6f72672f6d6f64656c2d722d7631",
    "GetWeightVersion": "0a0e6f72672f6d6f64656c2d722d7631",
    "UpdateWeightVersionState": "0a0e6f72672f6d6f64656c2d722d76311002",
    "DeleteWeightVersion": "0a0e6f72672f6d6f64656c2d722d7631",
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@pytest.fixture
def mx() -> Iterator[ModelExpressServer]:
    with ModelExpressServer() as server:
        yield server


@pytest.fixture
def listings() -> Iterator[CatalogServer]:
    with CatalogServer(secret=WORD) as catalog:
        yield catalog


def make_listing(version: int = 1, source: str = "t0", rank: int = 0, world: int = 1) -> Listing:
    return Listing(version, source, rank, world, "trainer", b"body of " + source.encode())


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, WORD)


def record(listings: CatalogServer, server: str, run: str = "r") -> ModelExpressCatalog:
    return ModelExpressCatalog(listings.url, server, "org/model", run)


def test_calls_are_those_of_modelexpress_own_client(
    mx: ModelExpressServer, listings: CatalogServer
) -> None:
    catalog = record(listings, mx.address)
    for rank in range(2):
        catalog.announce(make_listing(source=f"t{rank}", rank=rank, world=2))
    catalog.look_up(1)
    catalog.withdraw(1, "t0")
    assert {name: raw.hex() for name, raw in mx.requests} == SENT_BY_THEIR_CLIENT


@given(TEXT, TEXT, st.lists(TEXT), st.integers(1, 3))
def test_messages_are_read_by_protobuf_and_back(
    uid: str, model: str, slots: list[str], state: int
) -> None:
    message = make_messages()["WeightVersion"]
    fields = {"uid": uid, "model_name": model, "expected_source_slots": slots, "state": state}
    raw = encode({1: uid, 2: model, 6: slots, 8: state})
    assert message.FromString(raw) == message(**fields)
    read = list(decode(message(**fields).SerializeToString()))
    assert dict(read)[8] == state and dict(read)[1] == uid.encode()
    assert [value for number, value in read if number == 6] == [slot.encode() for slot in slots]


@given(st.binary())
def test_any_bytes_are_fields_or_no_message(raw: bytes) -> None:
    try:
        fields = list(decode(raw))
    except ValueError:
        return
    assert all(isinstance(value, int | bytes) for _, value in fields)


def test_the_server_decides_which_versions_exist(
    mx: ModelExpressServer, listings: CatalogServer
) -> None:
    recorder = {"server": mx.address, "model": "qwen", "run": "run"}
    catalog = open_catalog({"catalog": listings.url, "modelexpress": recorder})
    catalog.announce(make_listing(source="t0", rank=0, world=2))
    with pytest.raises(NotYet, match="not ready"):
        catalog.look_up(1)
    catalog.announce(make_listing(source="t1", rank=1, world=2))
    assert len(catalog.look_up(1)) == 2
    assert list(mx.versions["qwen-run-v1"].expected_source_slots) == ["rank-0", "rank-1"]
    catalog.withdraw(1, "t0")
    with pytest.raises(WeightsError, match="releasing version 1"):
        catalog.look_up(1)
    with pytest.raises(WeightsError, match=r"failed in GetWeightVersion: .* not found"):
        catalog.look_up(2)
    catalog.announce(make_listing(2, "t0"))
    assert mx.list_states() == {"qwen-run-v1": "RELEASING", "qwen-run-v2": "READY"}
    catalog.withdraw(2, "t0")
    assert set(mx.list_states().values()) == {"RELEASING"}


def test_a_second_run_does_not_meet_the_versions_of_the_first(
    mx: ModelExpressServer, listings: CatalogServer
) -> None:
    first = record(listings, mx.address, "a")
    first.announce(make_listing())
    first.withdraw(1, "t0")
    second = record(listings, mx.address, "b")
    second.announce(make_listing())
    assert len(second.look_up(1)) == 1


def test_a_token_is_sent_if_the_pod_has_one(
    mx: ModelExpressServer,
    listings: CatalogServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catalog = record(listings, f"http://{mx.address}")
    catalog.announce(make_listing())
    (tmp_path / "token").write_text("of this pod\n")
    monkeypatch.setenv("MX_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    catalog.look_up(1)
    assert mx.tokens == ["", "", "Bearer of this pod"]


def test_a_server_that_is_not_there_is_named(
    listings: CatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modelexpress, "SECONDS", 1.0)
    with ModelExpressServer() as ended:
        address = ended.address
    with pytest.raises(
        WeightsError, match=rf"ModelExpress at {address} failed in Create"
    ) as caught:
        record(listings, address).announce(make_listing())
    assert "0.7.0" in caught.value.hint
    with pytest.raises(UsageError, match="is not the address of a ModelExpress server"):
        record(listings, "modelexpress-server")


def test_a_server_of_another_version_is_refused(listings: CatalogServer) -> None:
    with (
        ModelExpressServer(is_old=True) as server,
        pytest.raises(WeightsError, match="answered CreateWeightVersion without a version"),
    ):
        record(listings, server.address).announce(make_listing())


def test_weights_arrive_while_the_server_calls_them_ready(mx: ModelExpressServer) -> None:
    pytest.importorskip("nixl_cu12")
    from rollway.weights.transports.nixl import NixlPublisher, NixlReader

    recorder = {"server": mx.address, "model": "qwen", "run": "run"}
    with NixlPublisher(modelexpress=recorder) as trainer, closing(NixlReader()) as reader:
        for version in (1, 2, 3):
            weights = {"w": torch.full((4, 4), float(version))}
            offer = trainer.publish(version, weights.items())
            assert offer.where["modelexpress"] == recorder
            for name, tensor in reader.tensors(offer):
                assert torch.equal(tensor, weights[name])
        # The publisher keeps two versions.
        states = {"qwen-run-v1": "RELEASING", "qwen-run-v2": "READY", "qwen-run-v3": "READY"}
        assert mx.list_states() == states
        mx.versions["qwen-run-v3"].state = State.RELEASING
        with pytest.raises(WeightsError, match="releasing version 3"):
            list(reader.tensors(offer))
    assert set(mx.list_states().values()) == {"RELEASING"}
