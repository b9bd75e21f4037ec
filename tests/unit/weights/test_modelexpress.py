"""Versions on a ModelExpress server. The server is a stand-in that speaks gRPC
(tests/modelexpress_server.py), the messages are those of ModelExpress 0.7.0's own client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import UsageError, WeightsError
from rollway.weights.transports.nixl import modelexpress
from rollway.weights.transports.nixl.catalog import CatalogServer, Listing, MemoryCatalog, NotYet
from rollway.weights.transports.nixl.modelexpress import (
    ModelExpressCatalog,
    Recorder,
    RefitClient,
    State,
    decode,
    encode,
    open_catalog,
)
from tests.modelexpress_server import ModelExpressServer, make_messages

WORD = "a secret of this test"
UID = "org/model-r-v1"
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


def test_calls_are_those_of_modelexpress_own_client(mx: ModelExpressServer) -> None:
    client = RefitClient(mx.address)
    assert client.create("org/model", UID, ["rank-0", "rank-1"]) == State.STAGING
    assert client.get_state(UID) == State.STAGING
    assert client.update_state(UID, State.READY) == State.READY
    assert client.delete(UID) == State.RELEASING
    client.close()
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
    catalog = ModelExpressCatalog(listings, mx.address, "qwen", "run")
    catalog.announce(make_listing(source="t0", rank=0, world=2))
    with pytest.raises(NotYet, match="not ready"):
        catalog.look_up(1, "r")
    catalog.announce(make_listing(source="t1", rank=1, world=2))
    assert len(catalog.look_up(1, "r")) == 2
    assert list(mx.versions["qwen-run-v1"].expected_source_slots) == ["rank-0", "rank-1"]
    catalog.acknowledge(1, "r")
    assert catalog.list_receivers(1) == ["r"]
    catalog.withdraw(1, "t0")
    with pytest.raises(WeightsError, match="releasing version 1"):
        catalog.look_up(1, "r")
    with pytest.raises(WeightsError, match=r"failed in GetWeightVersion: .* not found"):
        catalog.look_up(2, "r")
    again = open_catalog(catalog.where(), secret=WORD)
    assert isinstance(again, ModelExpressCatalog)
    assert again.where() == catalog.where() | {"modelexpress": mx.address, "run": "run"}
    catalog.announce(make_listing(2, "t0"))
    assert mx.list_states() == {"qwen-run-v1": "RELEASING", "qwen-run-v2": "READY"}
    catalog.leave("t0")
    assert set(mx.list_states().values()) == {"RELEASING"}
    catalog.close()


def test_a_second_run_does_not_meet_the_versions_of_the_first(
    mx: ModelExpressServer, listings: CatalogServer
) -> None:
    first = Recorder(mx.address, "qwen", "a").wrap(listings)
    first.announce(make_listing())
    first.leave("t0")
    second = Recorder(mx.address, "qwen", "b").wrap(listings)
    second.announce(make_listing())
    assert len(second.look_up(1, "r")) == 1


def test_a_token_is_sent_if_the_pod_has_one(
    mx: ModelExpressServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = RefitClient(f"http://{mx.address}")
    client.create("qwen", "v1", ["rank-0"])
    (tmp_path / "token").write_text("of this pod\n")
    monkeypatch.setenv("MX_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    client.get_state("v1")
    assert mx.tokens == ["", "Bearer of this pod"]


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelexpress, "SECONDS", 1.0)
    with ModelExpressServer() as ended:
        address = ended.address
    catalog = ModelExpressCatalog(MemoryCatalog(), address, "qwen")
    with pytest.raises(
        WeightsError, match=rf"ModelExpress at {address} failed in Create"
    ) as caught:
        catalog.announce(make_listing())
    assert "0.7.0" in caught.value.hint
    with pytest.raises(UsageError, match="is not the address of a ModelExpress server"):
        RefitClient("modelexpress-server")
    with pytest.raises(UsageError, match="by model"):
        ModelExpressCatalog(MemoryCatalog(), address, "")


def test_a_server_of_another_version_is_refused() -> None:
    with ModelExpressServer(is_old=True) as server:
        client = RefitClient(server.address)
        with pytest.raises(WeightsError, match="answered CreateWeightVersion without a version"):
            client.create("org/model", UID, ["rank-0"])


def test_weights_arrive_while_the_server_calls_them_ready(mx: ModelExpressServer) -> None:
    pytest.importorskip("nixl_cu12")
    from rollway.weights.transports.nixl import NixlPublisher, NixlReader

    recorder = Recorder(mx.address, "qwen", "run")
    with (
        NixlPublisher(secret=WORD, modelexpress=recorder) as trainer,
        NixlReader(secret=WORD) as reader,
    ):
        for version in (1, 2, 3):
            weights = {"w": torch.full((4, 4), float(version))}
            offer = trainer.publish(version, weights.items())
            assert offer.where["modelexpress"] == mx.address
            for name, tensor in reader.tensors(offer):
                assert torch.equal(tensor, weights[name])
        # The publisher keeps two versions.
        states = {"qwen-run-v1": "RELEASING", "qwen-run-v2": "READY", "qwen-run-v3": "READY"}
        assert mx.list_states() == states
        mx.versions["qwen-run-v3"].state = State.RELEASING
        with pytest.raises(WeightsError, match="releasing version 3"):
            list(reader.tensors(offer))
    assert set(mx.list_states().values()) == {"RELEASING"}
