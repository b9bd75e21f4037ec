"""Time how one process publishes weights and another on the same device receives them.

Run as a program, this is the receiving process: it reads one offer per line, copies the tensors
into its own, as an engine does, and prints the seconds and the digests of its copies.
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
from rollway.weights.digest.checksums import DTYPES, digests
from rollway.weights.offer import Offer, parse_offer
from rollway.weights.transports.cuda_ipc import CudaIpcPublisher, CudaIpcReader

_VERSIONS = 6
_TIMEOUT_SECONDS = 180.0
"""Seconds after which the receiving process is killed."""


def hand_over(tensors: dict[str, Tensor], now: Callable[[], float]) -> dict[str, Any]:
    """Publish some versions of these tensors, and have another process copy each."""
    expected = digests(list(tensors.values()))
    size = sum(tensor.nbytes for tensor in tensors.values())
    published, received = [], []
    with _ReceivingProcess() as receiver, CudaIpcPublisher() as publisher:
        for version in range(1, _VERSIONS + 1):
            began = now()
            offer = publisher.publish(version, tensors.items())
            published.append(now() - began)
            received.append(receiver.receive(offer, expected))
        _hand_over_adopted(publisher, receiver, next(iter(tensors.values())).device)
        publisher.close()
        refused = "error" in receiver.send(offer)
    # The first version is reported apart: there the reader opens the handles.
    later = min(received[1:], key=lambda answer: float(answer["seconds"]))
    views = min(answer["as_views_seconds"] for answer in received[1:])
    return {
        "gigabytes": size / 1e9,
        "tensors": len(tensors),
        "buckets": len(offer.where["buckets"]),
        "offer_bytes": len(json.dumps(offer.as_json())),
        "publish_first_seconds": published[0],
        "publish_seconds": min(published[1:]),
        "publish_gb_per_s": size / 1e9 / min(published[1:]),
        "first_open_seconds": received[0]["parts"]["look"],
        "first_seconds": received[0]["seconds"],
        "first_gb_per_s": size / 1e9 / received[0]["seconds"],
        "seconds": later["seconds"],
        "gb_per_s": size / 1e9 / later["seconds"],
        **{f"{part.replace(' ', '_')}_seconds": spent for part, spent in later["parts"].items()},
        "as_views_seconds": views,
        "as_views_gb_per_s": size / 1e9 / views,
        "copies_equal": True,
        "adopted_equal": True,
        "closed_is_refused": refused,
    }


def _hand_over_adopted(
    publisher: CudaIpcPublisher, receiver: _ReceivingProcess, device: torch.device
) -> None:
    """Publish a module's own storages, changed in place between versions."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8)).to(device)
    publisher.adopt(module.named_parameters())
    for version in range(_VERSIONS + 1, _VERSIONS + 3):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(version)
        receiver.receive(publisher.publish(version), digests(list(module.parameters())))


class _ReceivingProcess:
    """The receiving process; every answer is compared with the published digests."""

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
        self._timer = threading.Timer(_TIMEOUT_SECONDS, self._process.kill)
        self._timer.start()

    def __enter__(self) -> _ReceivingProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.communicate(timeout=60)
        self._timer.cancel()

    def receive(self, offer: Offer, expected: list[str]) -> dict[str, Any]:
        """Return the receiver's times; raise if its copies are not the published tensors."""
        answer = self.send(offer)
        if answer.get("digests") != expected:
            raise RuntimeError(f"version {offer.version} did not arrive: {str(answer)[:500]}")
        return answer

    def send(self, offer: Offer) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(offer.as_json()) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the receiving process exited; its error is on stderr")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _receive_offers() -> None:
    if torch.cuda.is_available():
        # Compiling the digest kernel is done once per process and is no part of a transfer.
        digests([torch.zeros(9, device="cuda")])
    reader, own = CudaIpcReader(), dict[str, Tensor]()
    for line in sys.stdin:
        try:
            answer = _copy(reader, parse_offer(json.loads(line)), own)
        except RollwayError as error:
            answer = error.as_json()
        print(json.dumps(answer), flush=True)


def _copy(reader: CudaIpcReader, offer: Offer, own: dict[str, Tensor]) -> dict[str, Any]:
    """Copy all tensors together, then again one by one, as an engine that loads views does."""
    headers = reader.headers(offer)
    if own.keys() != headers.keys():
        device = "cpu" if offer.where["device"] == "cpu" else "cuda"
        own.clear()
        for name, header in headers.items():
            own[name] = torch.zeros(header.shape, dtype=DTYPES[header.dtype], device=device)
    began = _now()
    reader.copy_into(offer, own)
    copied = _now()
    sums = digests([own[name] for name in headers])
    for tensor in own.values():
        tensor.zero_()  # so that the second copy cannot pass with the first one's bytes
    cleared = _now()
    for name, view in reader.tensors(offer):
        own[name].copy_(view, non_blocking=True)
    return {
        "seconds": copied - began,
        "parts": reader.seconds,
        "as_views_seconds": _now() - cleared,
        "digests": sums if digests([own[name] for name in headers]) == sums else [],
    }


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    _receive_offers()
