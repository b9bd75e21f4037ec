"""Measure what a delta's seconds consist of, without an engine, on a CPU or on a GPU.

publish   compare and pack ─► write
refit     read and decompress ─► unpack on the device ─► write where it changed ─► sum
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_load import synchronize
from benchmarks.real_model import Weights
from rollway.weights.digest.checksums import integers, word_sums
from rollway.weights.offer import Offer
from rollway.weights.transports.delta import DeltaPublisher, DeltaReader
from rollway.weights.transports.delta.packing import Chunk, split_in_chunks, start_packing
from rollway.weights.transports.delta.versions import DELTA

ROUNDS = 3


def measure_parts(
    weights: Weights, change: Callable[[Weights, int], None], scratch: Path
) -> dict[str, Any]:
    """Return the median seconds of each part, for a delta of `weights` on their own device."""
    parts = _Parts(weights, next(iter(weights.values())).device)
    options: dict[str, Any] = {"snapshot_every": 1000, "temporary": True, "compression": "none"}
    with DeltaPublisher(scratch, **options) as publisher:
        before = publisher.publish(1, weights.items())
        for version in range(2, ROUNDS + 3):  # the first of them compiles and maps memory
            old = {name: tensor.clone() for name, tensor in weights.items()}
            change(weights, version)
            publish = partial(publisher.publish, version, weights.items())
            offer = parts.measure("publish", publish)
            parts.measure("compare", _prepare_packing(old, weights))
            parts.receive(before, offer, old)
            before = offer
            written = (publisher.versions.path(version) / DELTA).stat().st_size
        parts.measure("sum", lambda: word_sums(list(weights.values())))
    seconds = {name: median(times[1:] or times) for name, times in parts.seconds.items()}
    return {"seconds": seconds, "delta_bytes": written}


class _Parts:
    def __init__(self, weights: Weights, device: torch.device) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._weights, self._device = weights, device

    def measure(self, name: str, work: Callable[[], Any]) -> Any:
        synchronize(self._device)
        began = time.perf_counter()
        result = work()
        synchronize(self._device)
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    def receive(self, before: Offer, offer: Offer, old: Weights) -> None:
        """Read a delta, and write it into `old`; raise unless that gives the new weights."""
        reader = DeltaReader()
        reader.headers(before)
        reader.finish(before)  # a reader sends changes since the version that is served
        every = sum(tensor.numel() for tensor in old.values())
        changes = self.measure("read", lambda: reader.changes(offer, before.identity, every))
        (step,) = changes.steps
        moved = self.measure("unpack", lambda: list(step.move(self._device)))
        live = {name: integers(old[name]) for name, _ in moved}

        def write() -> None:
            for name, (positions, bits, relative) in moved:
                new = bits + live[name].index_select(0, positions) if relative else bits
                live[name].scatter_(0, positions, new)

        self.measure("write", write)
        if any(not torch.equal(integers(old[n]), integers(self._weights[n])) for n in old):
            raise RuntimeError("a delta does not lead to the weights that were published")


def _prepare_packing(old: Weights, new: Weights) -> Callable[[], object]:
    """Return a function that compares and packs as a publisher does."""
    chunks = []
    for names in split_in_chunks(old):
        held, latest = (Chunk({name: weights[name] for name in names}) for weights in (old, new))
        for number, name in enumerate(names):
            held.put(number, old[name])
            latest.put(number, new[name])
        chunks.append((held, latest))
    return lambda: [start_packing(held, latest)() for held, latest in chunks]
