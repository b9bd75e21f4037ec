"""How a version leaves a real GPU. Skipped without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollway.weights.digest.checksums import digest, word_sum
from rollway.weights.offer import Offer
from rollway.weights.transports.cuda_ipc import CudaIpcPublisher
from rollway.weights.transports.delta import DeltaPublisher, DeltaReader
from rollway.weights.transports.files import FilesPublisher, FilesReader
from rollway.weights.transports.shm import ShmPublisher, ShmReader
from tests.children import JsonChild

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
MIB = 1 << 20

# Keeps the views, as an engine does that copies from them later, and answers with their digests.
READER = """
import json, sys
from pathlib import Path
import torch
from rollway.errors import RollwayError
from rollway.weights.digest.checksums import digest, word_sums
from rollway.weights.offer import parse_offer
from rollway.weights.transports import cuda_ipc
from rollway.weights.transports.cuda_ipc import CudaIpcReader

opened, open_handle = [], cuda_ipc.open_handle
cuda_ipc.open_handle = lambda *arguments: opened.append(arguments) or open_handle(*arguments)
reader = CudaIpcReader(Path(sys.argv[1]))
for line in sys.stdin:
    offer = parse_offer(json.loads(line))
    try:
        before = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        views = dict(reader.tensors(offer))
        sums = dict(zip(views, word_sums(list(views.values()))))
        answer = {
            "digests": {name: digest(view) for name, view in views.items()},
            "sums": sums == dict(reader.sums(offer)),
            "shares": reader.shares_device(offer),
            "opened": len(opened),
            "allocated": torch.cuda.memory_allocated() - before,
        }
        del views
        reader.finish(offer)
        answer["open"] = sum(map(len, reader._open.values()))
        print(json.dumps(answer), flush=True)
    except RollwayError as error:
        print(json.dumps(error.as_json()), flush=True)
"""

TRAINER = """
import json, sys
from pathlib import Path
import torch
from rollway.weights.digest.checksums import digest
from rollway.weights.transports.cuda_ipc import CudaIpcPublisher

model = torch.nn.Linear(1024, 4096, device="cuda", dtype=torch.bfloat16)
waste = [torch.empty(64 << 20, device="cuda") for _ in range(4)]
del waste  # cached: what is allocated next could be a part of it
with CudaIpcPublisher(directory=Path(sys.argv[1]), in_place=True) as publisher:
    for version in (1, 2):
        offer = publisher.publish(version, model.named_parameters())
        digests = {name: digest(tensor) for name, tensor in model.named_parameters()}
        print(json.dumps([offer.as_json(), digests]), flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[JsonChild]:
    """Another process, which reads what it is offered."""
    # Without the setting that a test gives its trainer.
    environment = {k: v for k, v in os.environ.items() if not k.endswith("ALLOC_CONF")}
    process = JsonChild(READER, str(tmp_path), env=environment)
    yield process
    process.end()


def model() -> torch.nn.Module:
    """Small and large parameters: some share an allocation, others have their own."""
    layers = [torch.nn.Linear(512, 512), torch.nn.LayerNorm(512), torch.nn.Linear(512, 32768)]
    return torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)


def step(module: torch.nn.Module, version: int) -> dict[str, Tensor]:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * version)
    return {name: p.detach() for name, p in module.named_parameters()}


def digests(state: dict[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor.cpu()) for name, tensor in state.items()}


def test_parameters_are_read_in_place(tmp_path: Path, other: JsonChild) -> None:
    module = model()
    with CudaIpcPublisher(directory=tmp_path, in_place=True) as publisher:
        publisher.publish(1, module.named_parameters())  # compiles kernels
        before = torch.cuda.memory_allocated()
        for version in (2, 3, 4):
            state = step(module, version)
            offer = publisher.publish(version, module.named_parameters())
            assert (offer.where["copied_bytes"], offer.where["why_copied"]) == (0, "")
            answer = other.ask(offer.as_json())
            assert answer["digests"] == digests(state), answer
            assert answer["sums"] and answer["shares"]
            assert answer["opened"] == len(offer.where["buckets"]) < len(state)
            assert answer["open"] == answer["opened"]
            assert answer["allocated"] < 8 * MIB
        assert torch.cuda.memory_allocated() - before < 8 * MIB


def test_what_cannot_be_shared_is_copied(tmp_path: Path, other: JsonChild) -> None:
    module = model()
    turned = torch.nn.Parameter(torch.randn(256, 512, device="cuda").t())
    with CudaIpcPublisher(directory=tmp_path, in_place=True) as publisher:
        for version in (1, 2):
            state = {**step(module, version), "turned": turned.detach()}
            pairs = [*module.named_parameters(), ("turned", turned)]
            offer = publisher.publish(version, iter(pairs))
            assert offer.where["copied_bytes"] == turned.nbytes
            assert offer.where["why_copied"] == "1 tensors: not contiguous"
            assert other.ask(offer.as_json())["digests"] == digests(state)


def test_a_step_during_the_refit_is_noticed(tmp_path: Path, other: JsonChild) -> None:
    module = model()
    with CudaIpcPublisher(directory=tmp_path, in_place=True) as publisher:
        offer = publisher.publish(1, module.named_parameters())
        step(module, 2)
        torch.cuda.synchronize()
        assert "changed while it was read" in other.ask(offer.as_json())["message"]


def test_memory_is_given_back_between_refits(tmp_path: Path, other: JsonChild) -> None:
    """A trainer that offloads its parameters gets their memory back."""
    module = model()
    with CudaIpcPublisher(directory=tmp_path, in_place=True, keep_open=False) as publisher:
        for version in (1, 2):
            state = step(module, version)
            offer = publisher.publish(version, module.named_parameters())
            answer = other.ask(offer.as_json())
            assert (answer["digests"], answer["open"]) == (digests(state), 0)
            publisher.wait(version)
            before, size = torch.cuda.memory_allocated(), sum(t.nbytes for t in state.values())
            del state
            module.to("cpu")
            torch.cuda.ipc_collect()
            assert before - torch.cuda.memory_allocated() > 0.9 * size, "limbo"
            module.to("cuda")


def test_expandable_segments_are_copied_into_plain_memory(tmp_path: Path, other: JsonChild) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )
    assert trainer.stdin and trainer.stdout
    for _ in range(2):
        offer, expected = json.loads(trainer.stdout.readline())
        assert "expandable segment" in offer["where"]["why_copied"]
        assert other.ask(offer)["digests"] == expected
        trainer.stdin.write("\n")
        trainer.stdin.flush()
    trainer.communicate(timeout=60)


def same(received: dict[str, Tensor], state: dict[str, Tensor]) -> bool:
    return received.keys() == state.keys() and all(
        torch.equal(received[name], tensor.cpu()) for name, tensor in state.items()
    )


def test_shared_memory_is_written_through_chunks_and_then_directly() -> None:
    """In /dev/shm itself: the kernel pins no pages of files on a disk."""
    module, reader = model(), ShmReader()
    with ShmPublisher(keep=1) as publisher:
        (slot,) = publisher._slots
        for version in (1, 2, 3):
            state = step(module, version)
            tensors = iter(state.items()) if version == 3 else module.named_parameters()
            offer: Offer = publisher.publish(version, tensors)
            assert same({name: t.clone() for name, t in reader.tensors(offer)}, state)
            assert reader.sums(offer) == {n: word_sum(t.cpu()) for n, t in state.items()}
            assert slot.is_pinned(), "cudaHostRegister refused /dev/shm"


@pytest.mark.parametrize("hold_on_cpu", [False, True])
def test_files_and_deltas_of_a_gpu(tmp_path: Path, hold_on_cpu: bool) -> None:
    module, served = model(), tmp_path / "model"
    served.mkdir()
    (served / "config.json").write_text("{}")
    files, deltas = FilesReader(), DeltaReader()
    by_files = FilesPublisher(tmp_path / "files", served, shard_bytes=8 * MIB)
    by_deltas = DeltaPublisher(tmp_path / "deltas", hold_on_cpu=hold_on_cpu)
    state = step(module, 1)
    for version in (1, 2, 3):
        for tensor in state.values():
            tensor.view(-1)[:: 97 * version] += 1
        for publisher, reader in ((by_files, files), (by_deltas, deltas)):
            offer = publisher.publish(version, module.named_parameters())  # type: ignore[attr-defined]
            received = dict(reader.tensors(offer))  # type: ignore[attr-defined]
            assert same(received, state)
