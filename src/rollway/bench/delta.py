"""What it costs to publish only what changed, against a copy of the same memory in the same run.

Rates are of the full bytes of the tensors, whatever was packed of them. The carriers take part
from the publisher's tensors to the reader's live ones.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollway.weights import delta
from rollway.weights.digest.bits import DTYPES, digest, integers, raw_bytes
from rollway.weights.store import SharedMemory, Store
from rollway.weights.transports.delta import DeltaPublisher, DeltaReader

_REPEATS = 3
_TENSORS = 8


@dataclass(slots=True)
class DeltaFigures:
    """GB/s of full bytes, seconds of one version, and what part of the bytes moved."""

    dtype: str
    device: str
    gigabytes: float
    share_changed: float
    memcpy_gb_per_s: float
    digest_gb_per_s: float
    encode_gb_per_s: float
    apply_gb_per_s: float
    """Into a staging tensor, its checksum verified."""
    bytes_fraction: float
    """When the changed elements get new values of the same distribution."""
    bytes_fraction_small_steps: float
    """When they move to the neighbouring value, as in a small step of an optimizer."""
    publish_seconds: dict[str, float]
    stage_seconds: dict[str, float]
    install_seconds: dict[str, float]
    """What a pause has to cover."""

    def as_json(self) -> dict[str, Any]:
        return {key: _rounded(value) for key, value in asdict(self).items()}


def bench_delta(
    megabytes: int = 512, dtype: str = "BF16", share: float = 0.01, device: str = "cpu"
) -> DeltaFigures:
    """Change that share of the elements at random, and take the time of each part of the way."""
    old = _model(megabytes, DTYPES[dtype], device)
    new, stepped = _changed(old, share, _redrawn), _changed(old, share, _stepped)
    size = sum(tensor.nbytes for tensor in old.values())
    room = {name: torch.empty_like(tensor) for name, tensor in old.items()}
    before = {name: digest(tensor) for name, tensor in old.items()}

    def encode(state: dict[str, Tensor]) -> dict[str, delta.Encoded]:
        return {
            name: delta.encode(name, old[name], state[name], before=before[name]) for name in old
        }

    packed, small = encode(new), encode(stepped)
    rates = {
        "memcpy": lambda: [room[name].copy_(old[name]) for name in old],
        "digest": lambda: [digest(tensor) for tensor in new.values()],
        "encode": lambda: encode(new),
        "apply": lambda: [delta.apply(packed[name], old[name], room[name]) for name in old],
    }
    measured = {name: size / 1e9 / _best(work, device) for name, work in rates.items()}
    assert all(torch.equal(raw_bytes(room[name]), raw_bytes(new[name])) for name in old)
    ways = _carriers(old, new, room, device)
    return DeltaFigures(
        dtype=dtype,
        device=device,
        gigabytes=size / 1e9,
        share_changed=share,
        memcpy_gb_per_s=measured["memcpy"],
        digest_gb_per_s=measured["digest"],
        encode_gb_per_s=measured["encode"],
        apply_gb_per_s=measured["apply"],
        bytes_fraction=sum(len(each.to_bytes()) for each in packed.values()) / size,
        bytes_fraction_small_steps=sum(len(each.to_bytes()) for each in small.values()) / size,
        publish_seconds={name: seconds[0] for name, seconds in ways.items()},
        stage_seconds={name: seconds[1] for name, seconds in ways.items()},
        install_seconds={name: seconds[2] for name, seconds in ways.items()},
    )


def _carriers(
    old: dict[str, Tensor], new: dict[str, Tensor], room: dict[str, Tensor], device: str
) -> dict[str, tuple[float, float, float]]:
    """Seconds to publish, stage and install one version, over files and over shared memory."""
    found = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shared = stack.enter_context(SharedMemory("bench"))
        for name, store in (("files", Store(directory)), ("shared_memory", shared)):
            publisher = DeltaPublisher(store, snapshot_every=1 << 30)
            publisher.publish(1, old.items())
            for each, tensor in old.items():
                room[each].copy_(tensor)
            reader = DeltaReader(store)
            began = _now(device)
            publisher.publish(2, new.items())
            published = _now(device)
            staged = reader.stage(room, reader.chain(1, 2))
            ready = _now(device)
            staged.install()
            found[name] = (published - began, ready - published, _now(device) - ready)
            assert all(torch.equal(raw_bytes(room[each]), raw_bytes(new[each])) for each in old)
    return found


def _model(megabytes: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    count = (megabytes << 20) // _TENSORS // torch.empty(0, dtype=dtype).element_size()
    return {f"layer.{number}": _weights(count, dtype, generator) for number in range(_TENSORS)}


def _changed(
    old: dict[str, Tensor], share: float, change: Callable[[Tensor, torch.Generator], Tensor]
) -> dict[str, Tensor]:
    new = {}
    for name, tensor in old.items():
        generator = torch.Generator(tensor.device).manual_seed(1)
        chosen = torch.rand(tensor.shape, generator=generator, device=tensor.device) < share
        new[name] = torch.where(chosen, change(tensor, generator), tensor)
    return new


def _redrawn(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return _weights(tensor.numel(), tensor.dtype, generator)


def _stepped(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Each element's next or previous neighbour."""
    up = torch.rand(tensor.shape, generator=generator, device=tensor.device) < 0.5
    bits = integers(tensor)
    return torch.where(up, bits + 1, bits - 1).view(tensor.dtype)


def _weights(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    plain = torch.randn(count, generator=generator, device=generator.device)
    return plain.mul_(0.02).to(dtype)


def _best(work: Callable[[], object], device: str) -> float:
    times = []
    for _ in range(_REPEATS):
        began = _now(device)
        work()
        times.append(_now(device) - began)
    return min(times)


def _now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return round(value, 5) if isinstance(value, float) else value
