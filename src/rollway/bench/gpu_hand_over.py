"""One process hands weights over to another on the same device, and both say how long it took.

As a program this is the other process: it reads an offer per line, copies what is offered into
tensors of its own, as an engine would, and answers with the seconds and the digests of its copies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollway.errors import RollwayError
from rollway.weights.digest.bits import DTYPES, digests
from rollway.weights.offer import Offer, parse_offer
from rollway.weights.transports.cuda_ipc import CudaIpcPublisher, CudaIpcReader

_VERSIONS = 6
_PATIENCE = 180.0
"""Seconds after which the other process is given up."""


def hand_over(tensors: dict[str, Tensor], now: Callable[[], float]) -> dict[str, Any]:
    """Publish some versions of these tensors, and have another process copy each."""
    wanted = digests(list(tensors.values()))
    size = sum(tensor.nbytes for tensor in tensors.values())
    published, read = [], []
    with _Other() as other, CudaIpcPublisher() as publisher:
        for version in range(1, _VERSIONS + 1):
            began = now()
            offer = publisher.publish(version, tensors.items())
            published.append(now() - began)
            read.append(other.take(offer, wanted))
        adopted = _adopted(publisher, other, next(iter(tensors.values())).device)
        publisher.close()
        refused = "error" in other.ask(offer)
    later = min(read[1:], key=lambda one: float(one["seconds"]))
    views = min(one["as_views_seconds"] for one in read[1:])
    return {
        "gigabytes": size / 1e9,
        "tensors": len(tensors),
        "buckets": len(offer.where["buckets"]),
        "offer_bytes": len(json.dumps(offer.as_json())),
        "publish_first_seconds": published[0],
        "publish_seconds": min(published[1:]),
        "publish_gb_per_s": size / 1e9 / min(published[1:]),
        "first_open_seconds": read[0]["parts"]["look"],
        "first_seconds": read[0]["seconds"],
        "first_gb_per_s": size / 1e9 / read[0]["seconds"],
        "seconds": later["seconds"],
        "gb_per_s": size / 1e9 / later["seconds"],
        **{f"{part.replace(' ', '_')}_seconds": spent for part, spent in later["parts"].items()},
        "as_views_seconds": views,
        "as_views_gb_per_s": size / 1e9 / views,
        "copies_equal": True,
        "adopted_equal": adopted,
        "closed_is_refused": refused,
    }


def _adopted(publisher: CudaIpcPublisher, other: _Other, device: torch.device) -> bool:
    """A module's own storages, changed in place between versions."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8)).to(device)
    publisher.adopt(module)
    for version in range(1, 3):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(version)
        other.take(publisher.publish(version), digests(list(module.parameters())))
    return True


class _Other:
    """The other process."""

    def __init__(self) -> None:
        home = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollway.bench.gpu_hand_over"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._timer = threading.Timer(_PATIENCE, self._process.kill)
        self._timer.start()

    def __enter__(self) -> _Other:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.communicate(timeout=60)
        self._timer.cancel()

    def take(self, offer: Offer, wanted: list[str]) -> dict[str, Any]:
        """Its times, if what it copied is what was published."""
        answer = self.ask(offer)
        if answer.get("digests") != wanted:
            raise RuntimeError(f"version {offer.version} did not arrive: {str(answer)[:500]}")
        return answer

    def ask(self, offer: Offer) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(offer.as_json()) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the other process ended; its words are on stderr")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _read_offers() -> None:
    if torch.cuda.is_available():
        digests([torch.zeros(9, device="cuda")])  # what is made once in a process is not the way
    reader, own = CudaIpcReader(), dict[str, Tensor]()
    for line in sys.stdin:
        try:
            answer = _copied(reader, parse_offer(json.loads(line)), own)
        except RollwayError as error:
            answer = error.as_json()
        print(json.dumps(answer), flush=True)


def _copied(reader: CudaIpcReader, offer: Offer, own: dict[str, Tensor]) -> dict[str, Any]:
    """All at once, and once more tensor by tensor, as an engine does that loads views."""
    headers = reader.manifest(offer).headers()
    if own.keys() != headers.keys():
        device = "cpu" if offer.where["device"] == "cpu" else "cuda"
        made = {
            name: torch.zeros(one.shape, dtype=DTYPES[one.dtype], device=device)
            for name, one in headers.items()
        }
        own.clear()
        own.update(made)
    began = _now()
    reader.copy_into(offer, own)
    copied = _now()
    found = digests([own[name] for name in headers])
    for tensor in own.values():
        tensor.zero_()
    loaded = _now()
    for name, view in reader.tensors(offer):
        own[name].copy_(view, non_blocking=True)
    return {
        "seconds": copied - began,
        "parts": reader.seconds,
        "as_views_seconds": _now() - loaded,
        "digests": found if digests([own[name] for name in headers]) == found else [],
    }


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    _read_offers()
