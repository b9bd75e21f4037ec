"""Weights through shared memory: exact, in place, and never half of two versions."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from rollway.errors import UsageError, WeightsError
from rollway.weights.offer import Offer, parse_offer, read_offer
from rollway.weights.transports.entries import prepare_directory
from rollway.weights.transports.shm import ShmPublisher, ShmReader
from tests.children import make_dead_writer_mark, start_child
from tests.tensors import receive, same
from tests.waiting import wait_until

Tensors = dict[str, torch.Tensor]


def tensors(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors_by_name = {
        f"w{number}": torch.randn(7, 5 + number, generator=generator).to(dtype)
        for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
    }
    tensors_by_name["fp8"] = torch.randn(3, 3, generator=generator).to(torch.float8_e4m3fn)
    tensors_by_name["flag"] = torch.tensor([True, False, True])
    tensors_by_name["scalar"] = torch.tensor(3.5)
    tensors_by_name["empty"] = torch.empty(0, 4)
    return tensors_by_name


def test_versions_are_read_as_they_were_published(tmp_path: Path) -> None:
    reader = ShmReader(tmp_path)
    with ShmPublisher(keep=2, directory=tmp_path) as publisher:
        offers = {v: publisher.publish(v, tensors(v).items()) for v in (1, 2)}
        for version, offer in offers.items():  # both are kept
            assert same(receive(reader, offer), tensors(version))
            assert reader.headers(offer).keys() == tensors(1).keys()
        third = publisher.publish(3, tensors(3).items())
        assert same(receive(reader, third), tensors(3))
        with pytest.raises(WeightsError, match="holds version 3"):
            receive(reader, offers[1])
        assert same(receive(reader, offers[2]), tensors(2))
        assert offers[1].identity != offers[2].identity
        assert publisher.publish(4, tensors(2).items()).identity == offers[2].identity
    with pytest.raises(WeightsError, match="not in the publisher's memory any more"):
        receive(reader, third)
    assert list(tmp_path.iterdir()) == []


def test_adopted_parameters_are_published_in_place(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 3)
    with ShmPublisher(directory=tmp_path) as publisher:
        publisher.adopt(layer.named_parameters())
        before = layer.weight.data_ptr()
        for version in (1, 2):
            with torch.no_grad():
                layer.weight += 1
            offer = publisher.publish(version)
            assert layer.weight.data_ptr() == before
            received = receive(ShmReader(tmp_path), offer)
            assert torch.equal(received["weight"], layer.weight)
        stepped = ShmReader(tmp_path).tensors(offer)
        next(stepped)
        with torch.no_grad():
            layer.weight += 1  # too early
            layer.bias += 1
        with pytest.raises(WeightsError, match="changed while it was read"):
            list(stepped)


def test_a_tensor_that_the_caller_sums_is_not_read_again(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 3)
    with ShmPublisher(directory=tmp_path) as publisher:
        publisher.adopt(layer.named_parameters())
        offer = publisher.publish(1)
        reading = ShmReader(tmp_path).tensors(offer, summed={"weight"}.__contains__)
        assert next(reading)[0] == "weight"
        with torch.no_grad():
            layer.weight += 1  # its reader will notice
        assert next(reading)[0] == "bias"
        with torch.no_grad():
            layer.bias += 1
        with pytest.raises(WeightsError, match="bias of version 1 changed"):
            next(reading)


def test_adopted_parameters_are_never_overwritten(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 3)
    with ShmPublisher(keep=1, directory=tmp_path) as publisher:
        publisher.adopt(layer.named_parameters())
        before = layer.weight.detach().clone()
        publisher.publish(1, [("weight", torch.zeros(3, 4)), ("bias", torch.zeros(3))])
        assert torch.equal(layer.weight, before)


def test_a_version_that_is_overwritten_while_it_is_read_is_refused(tmp_path: Path) -> None:
    with ShmPublisher(keep=1, directory=tmp_path) as publisher:
        reading = ShmReader(tmp_path).tensors(publisher.publish(1, tensors(1).items()))
        next(reading)
        publisher.publish(2, tensors(2).items())
        with pytest.raises(WeightsError, match="changed while it was read"):
            list(reading)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "manifest", "gone"])
def test_damage_is_an_error(tmp_path: Path, damage: str) -> None:
    with ShmPublisher(directory=tmp_path) as publisher:
        offer = publisher.publish(1, tensors(1).items())
        slot = tmp_path / offer.where["ranks"][0]["slot"]
        if damage == "truncated":
            os.truncate(slot, 100)
        elif damage == "flipped":
            with slot.open("r+b") as file:
                file.write(b"\x55")
        elif damage == "manifest":
            slot.with_name(f"{slot.name}.json").write_bytes(b'{"version": 1')
        else:
            slot.unlink()
        with pytest.raises(WeightsError):
            receive(ShmReader(tmp_path), offer)


@pytest.mark.parametrize("slot", ["../etc/passwd", "/etc/passwd", "other", ""])
def test_a_slot_elsewhere_is_not_opened(tmp_path: Path, slot: str) -> None:
    offer = Offer("shm", 1, "0" * 32, 10, {"ranks": [{"slot": slot, "identity": "0" * 32}]})
    with pytest.raises(WeightsError, match="is no slot"):
        list(ShmReader(tmp_path).tensors(offer))


def test_a_killed_publisher_leaves_nothing(tmp_path: Path) -> None:
    program = f"""
        import torch
        from pathlib import Path
        from rollway.weights.transports.shm import ShmPublisher
        publisher = ShmPublisher(directory=Path({str(tmp_path)!r}))
        publisher.publish(1, [("w", torch.ones(10))])
        print("ready", flush=True)
    """
    child, line = start_child(program)
    assert line == "ready"
    prepare_directory(tmp_path, "rollway-weights-")
    assert len(list(tmp_path.iterdir())) == 2  # it lives
    child.send_signal(signal.SIGKILL)
    child.wait()
    wait_until(lambda: not list(tmp_path.iterdir()), 20)


def test_leftovers_of_a_dead_publisher_are_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / f"rollway-weights-{make_dead_writer_mark()}-0123-0").write_bytes(b"old")
    with ShmPublisher(directory=tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_offers_are_signed_and_checked() -> None:
    offer = Offer("shm", 3, "a" * 32, 10, {"slot": "x"})
    signed = offer.sign("secret")
    assert read_offer(signed.as_json(), "secret") == signed
    assert parse_offer(offer.as_json()) == offer
    with pytest.raises(WeightsError, match="started without a secret"):
        read_offer(signed.as_json(), "")
    for unsigned in (
        offer,
        offer.sign("other"),
        signed.__class__(**{**signed.as_json(), "version": 4}),
    ):
        with pytest.raises(WeightsError, match="not signed with this stack's secret"):
            read_offer(unsigned.as_json(), "secret")
    for raw in ({}, {**offer.as_json(), "code": "x"}, {**offer.as_json(), "transport": "pickle"}):
        with pytest.raises(WeightsError, match="is no offer"):
            read_offer(raw, "")


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="At least one version"):
        ShmPublisher(keep=0, directory=tmp_path)
    with pytest.raises(UsageError, match="no shared memory"):
        ShmPublisher(directory=tmp_path / "nowhere")
    with ShmPublisher(directory=tmp_path) as publisher, pytest.raises(UsageError, match="no tens"):
        publisher.publish(1)
