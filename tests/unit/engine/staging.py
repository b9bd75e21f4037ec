"""Staging of tensors of this process, and what a worker serves after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rollway.engine.companions import KvScales, split_headers
from rollway.engine.incoming import Incoming
from rollway.engine.staging import Staging
from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import word_sum
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Reader, never
from tests.unit.engine.vllm_models import Tensors, headers_of
from tests.waiting import wait_until


class FakeReader(Reader):
    """Yields tensors of this process."""

    def __init__(self, tensors: Tensors, *, shares: bool = False, has_sums: bool = False) -> None:
        self.tensors_here = tensors
        self.shares = shares
        self.has_sums = has_sums
        self.published = {name: word_sum(tensor) for name, tensor in tensors.items()}
        self.before_each: Callable[[str], None] = lambda name: None
        self.released = 0
        self.finished: list[int] = []

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return headers_of(self.tensors_here)

    def sums(self, offer: Offer) -> Mapping[str, int]:
        return self.published if self.has_sums else {}

    def shares_device(self, offer: Offer) -> bool:
        return self.shares

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors_here.items():
            self.before_each(name)
            if self.shares:
                yield name, tensor
            else:
                lent = tensor.clone()
                yield name, lent
                lent.fill_(7)  # valid only until the next is requested
            if not summed(name) and word_sum(tensor) != self.published[name]:
                raise WeightsError(f"{name} changed while it was read.")

    def finish(self, offer: Offer) -> None:
        self.finished.append(offer.version)

    def release(self) -> None:
        self.released += 1


def parameters_of(model: Any) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def is_serving(worker: Any, expected: Tensors) -> bool:
    actual = parameters_of(worker.model_runner.get_model())
    return all(torch.equal(actual[name], expected[name]) for name in expected)


def make_offer(tensors: Tensors) -> Offer:
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Offer("shm", 3, "identity-of-3", nbytes, {})


def start_staging(
    worker: Any, reader: FakeReader, host: list[torch.Tensor] | None = None
) -> Staging:
    offer = make_offer(reader.tensors_here)
    headers, _, scales = split_headers(reader.headers(offer))
    cache = KvScales(worker, scales) if scales else None
    incoming = Incoming(worker, reader, offer, headers, torch.clone, scales=cache)
    return Staging(incoming, headers, [] if host is None else host)


def stage(staging: Staging) -> dict[str, Any]:
    """Wait until a staging has ended, and return how."""
    wait_until(lambda: staging.report()["state"] != "running")
    return staging.report()
