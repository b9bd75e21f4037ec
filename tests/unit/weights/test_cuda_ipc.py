"""Weights from one process to another on one device: with a GPU, and the same way without."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from rollway.engine.incoming import get_reader
from rollway.errors import UsageError, WeightsError
from rollway.weights.digest.checksums import digest
from rollway.weights.offer import Offer, parse_offer, read_offer
from rollway.weights.transports import cuda_ipc, device_memory
from rollway.weights.transports.cuda_ipc import CudaIpcPublisher, CudaIpcReader
from tests.children import JsonChild, make_dead_writer_mark
from tests.waiting import wait_until

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
each_device = pytest.mark.parametrize("device", DEVICES)

READER = """
import json, sys
from pathlib import Path
import torch
from rollway.errors import RollwayError
from rollway.weights.digest.checksums import digest
from rollway.weights.offer import parse_offer
from rollway.weights.transports import cuda_ipc
from rollway.weights.transports.cuda_ipc import CudaIpcReader

opened, open_handle = [], cuda_ipc.open_handle
cuda_ipc.open_handle = lambda *arguments: opened.append(arguments) or open_handle(*arguments)
reader = CudaIpcReader(Path(sys.argv[1]))
for line in sys.stdin:
    try:
        copies = {n: t.clone() for n, t in reader.tensors(parse_offer(json.loads(line)))}
        facts = {
            n: [digest(t), str(t.dtype), list(t.shape), t.device.type] for n, t in copies.items()
        }
        print(json.dumps({"tensors": facts, "opened": len(opened)}), flush=True)
    except RollwayError as error:
        print(json.dumps(error.as_json()), flush=True)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[JsonChild]:
    """Another process, which reads what it is offered."""
    process = JsonChild(READER, str(tmp_path))
    yield process
    process.end()


def model(device: str, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "embed": torch.randn(300, 64, generator=generator).bfloat16(),
        "norm": torch.randn(7, generator=generator),
        "scale": torch.randn((), generator=generator),
        "bytes": torch.randint(0, 255, (5, 3), dtype=torch.uint8, generator=generator),
        "turned": torch.randn(32, 48, generator=generator).t(),
        "large": torch.randn(128, 128, generator=generator),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def facts(tensors: dict[str, Tensor], device: str) -> dict[str, Any]:
    return {n: [digest(t), str(t.dtype), list(t.shape), device] for n, t in tensors.items()}


@each_device
def test_another_process_reads_what_was_published(
    device: str, tmp_path: Path, other: JsonChild
) -> None:
    with CudaIpcPublisher(bucket_bytes=40_000, directory=tmp_path) as publisher:
        for version in range(1, 4):
            tensors = model(device, version)
            offer = publisher.publish(version, tensors.items())
            assert offer.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())
            answer = other.ask(offer.as_json())
            assert answer["tensors"] == facts(tensors, device)
            assert answer["opened"] == len(offer.where["buckets"]) == 3  # also for later versions
    assert "any more" in other.ask(offer.as_json())["message"]
    assert not list(tmp_path.iterdir())


@each_device
def test_offers_are_plain_and_private(device: str, tmp_path: Path) -> None:
    with CudaIpcPublisher(directory=tmp_path) as publisher:
        offer = publisher.publish(1, model(device).items())
        text = json.dumps(offer.sign("secret").as_json())
        assert read_offer(json.loads(text), "secret").where == offer.where
        (directory,) = tmp_path.iterdir()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
        repeated = publisher.publish(2, model(device).items())
        assert repeated.identity == offer.identity  # equal for equal weights


def test_an_overwritten_version_is_refused(tmp_path: Path) -> None:
    reader = CudaIpcReader(tmp_path)
    with CudaIpcPublisher(keep=2, directory=tmp_path) as publisher:
        first, second = (publisher.publish(v, model("cpu", v).items()) for v in (1, 2))
        assert len(list(reader.tensors(first))) == len(list(reader.tensors(second)))
        third = publisher.publish(3, model("cpu", 3).items())
        publisher.publish(4, model("cpu", 4).items())
        with pytest.raises(WeightsError, match="Version 1 is gone"):
            list(reader.tensors(first))
        list(reader.tensors(third))


def change_a_byte(offer: Offer, directory: Path) -> None:
    """Change the published memory, which is a file on a CPU."""
    path = directory / offer.where["directory"] / offer.where["buckets"][0]["file"]
    with path.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))


def test_a_change_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    reader = CudaIpcReader(tmp_path)
    with CudaIpcPublisher(directory=tmp_path) as publisher:
        offer = publisher.publish(1, model("cpu").items())
        with pytest.raises(WeightsError, match="embed of version 1 changed while it was read"):
            for name, _ in reader.tensors(offer):
                if name == "embed":
                    change_a_byte(offer, tmp_path)
        offer = publisher.publish(2, model("cpu").items())
        with pytest.raises(WeightsError, match=r"any more|overwritten|gone"):
            for name, _ in reader.tensors(offer):
                if name == "large":
                    publisher.publish(3, model("cpu").items())


def test_another_model_gets_new_buckets(tmp_path: Path) -> None:
    reader = CudaIpcReader(tmp_path)
    with CudaIpcPublisher(directory=tmp_path) as publisher:
        for version, shape in enumerate(((4,), (4000,), (8, 8))):
            offer = publisher.publish(version, [("a", torch.full(shape, float(version)))])
            ((_, tensor),) = reader.tensors(offer)
            assert tensor.shape == shape and bool((tensor == version).all())
        assert len(list(next(tmp_path.iterdir()).iterdir())) == 2
        assert [len(slot) for slot in reader._open.values()] == [1]


def changed(offer: Offer, **fields: Any) -> Offer:
    return msgspec.structs.replace(offer, where={**offer.where, **fields})


def test_false_offers_are_refused(tmp_path: Path) -> None:
    reader = CudaIpcReader(tmp_path)
    with CudaIpcPublisher(directory=tmp_path) as publisher:
        offer = publisher.publish(1, model("cpu").items())
        (bucket,) = offer.where["buckets"]
        for false_offer, message in (
            (changed(offer, device="0123-4567"), "which this worker does not see"),
            (changed(offer, directory="../elsewhere"), "no directory of a publisher"),
            (changed(offer, directory="rollway-ipc-other"), "any more"),
            (changed(offer, buckets=[]), "names no memory"),
            (changed(offer, buckets=[{**bucket, "nbytes": 8}]), "not as long as"),
            (changed(offer, buckets=[{**bucket, "file": "../0.json"}]), "no file of a publisher"),
            (changed(offer, buckets=[{**bucket, "file": "0.json"}]), "does not hold"),
            (changed(offer, surprise=1), "no offer by CUDA IPC"),
            (msgspec.structs.replace(offer, identity="0" * 32), "gone"),
        ):
            with pytest.raises(WeightsError, match=message):
                list(reader.tensors(false_offer))
        list(reader.tensors(offer))


def test_a_full_device_is_a_refusal_and_its_memory_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mock: only a GPU that is full raises this error."""
    publisher = CudaIpcPublisher(bucket_bytes=1 << 10, directory=tmp_path)
    model = {f"layer.{number}": torch.ones(300) for number in range(4)}
    calls = iter(range(9))

    def fail_at_third(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return device_memory.allocate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(cuda_ipc, "allocate", fail_at_third)
        with pytest.raises(WeightsError, match=r"version 1.*GB are free.*in_place=True"):
            publisher.publish(1, model)
    assert not list(tmp_path.rglob("*.*")) and all(not slot.buckets for slot in publisher._slots)
    assert publisher.publish(2, model).version == 2
    publisher.close()


def test_a_publisher_that_dies_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from rollway.weights.transports.cuda_ipc import CudaIpcPublisher\n"
        "import json, os\n"
        "offer = CudaIpcPublisher(directory=Path(sys.argv[1])).publish(1, [('a', torch.ones(4))])\n"
        "print(json.dumps(offer.as_json()), flush=True); os._exit(1)\n"
    )
    run = [sys.executable, "-c", code, str(tmp_path)]
    offer = parse_offer(json.loads(subprocess.run(run, capture_output=True, check=False).stdout))
    with pytest.raises(WeightsError, match="Its publisher has closed"):
        list(CudaIpcReader(tmp_path).tensors(offer))
    wait_until(lambda: not list(tmp_path.iterdir()), 20)


def test_leftovers_of_a_dead_publisher_are_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / f"rollway-ipc-{make_dead_writer_mark()}-0123"
    left.mkdir()
    (left / "0.json").write_text("{}")
    CudaIpcPublisher(directory=tmp_path).close()
    assert not left.exists()


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep nothing"):
        CudaIpcPublisher(keep=0, directory=tmp_path)
    with pytest.raises(UsageError, match="no shared memory"):
        CudaIpcPublisher(directory=tmp_path / "none")
    with CudaIpcPublisher(directory=tmp_path) as publisher:
        with pytest.raises(UsageError, match="no tensors"):
            publisher.publish(1)
        with pytest.raises(UsageError, match="with in_place=True by cuda_ipc"):
            publisher.adopt(torch.nn.ReLU().named_parameters())
        with pytest.raises(UsageError, match="on cpu, meta"):
            publisher.publish(1, [("a", torch.ones(1)), ("b", torch.ones(1, device="meta"))])


def test_a_worker_finds_its_reader() -> None:
    tensors = model("cpu")
    with CudaIpcPublisher() as publisher:
        offer = publisher.publish(1, tensors.items())
        reader = get_reader(offer, {})
        assert {name: header.shape for name, header in reader.headers(offer).items()} == {
            name: tuple(tensor.shape) for name, tensor in tensors.items()
        }
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in reader.tensors(offer))


def test_handles_reach_torch_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: one process opens exactly what the other shares, on its own device."""
    shared = (0, b"\x00memory\xff", 4096, 512, b"/counter", 3, b"\x01event\xfe", True)

    class Shared:
        device = torch.device("cuda", 0)

        def untyped_storage(self) -> Shared:
            return self

        def _share_cuda_(self) -> tuple[Any, ...]:
            return shared

    calls: list[tuple[Any, ...]] = []

    def refuse(*arguments: Any) -> None:
        calls.append(arguments)
        raise RuntimeError("invalid device context\nmore")

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuse)
    handle = device_memory.export(Shared(), Path())  # type: ignore[arg-type]
    wired = msgspec.json.decode(msgspec.json.encode(handle), type=device_memory.Handle)
    with pytest.raises(WeightsError, match=r"cannot be opened: invalid device context The"):
        device_memory.open_handle(wired, torch.device("cuda", 1), Path())
    assert calls == [(1, *shared[1:])]
    broken = msgspec.structs.replace(handle, memory="no base64!")
    with pytest.raises(WeightsError, match="handle in the offer is malformed"):
        device_memory.open_handle(broken, torch.device("cuda", 1), Path())
