"""Find the reader of an offer inside a worker."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rollway.errors import WeightsError
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Reader

__all__ = ["reader_for", "warm_up"]

_READERS = {
    "files": ("rollway.weights.transports.files", "FilesReader"),
    "delta": ("rollway.weights.transports.delta", "DeltaReader"),
    "shm": ("rollway.weights.transports.shm", "ShmReader"),
    "cuda_ipc": ("rollway.weights.transports.cuda_ipc", "CudaIpcReader"),
    "collective": ("rollway.weights.transports.collective", "CollectiveReader"),
    "nixl": ("rollway.weights.transports.nixl", "NixlReader"),
    "verl_buckets": ("rollway.engine.verl_buckets", "VerlBucketsReceiver"),
}


_WARMED_UP = ("shm", "files", "delta", "cuda_ipc")
"""Transports without packages of their own; a worker meets the others when it is offered one."""


def warm_up() -> None:
    """Import readers and compile their kernels now, so that the first refit does not wait."""
    for transport in _WARMED_UP:
        module, name = _READERS[transport]
        reader: Reader = getattr(import_module(module), name)()
        reader.warm_up()
        reader.close()


def reader_for(offer: Offer, readers: dict[str, Reader]) -> Reader:
    """Return the reader of the offer's transport from `readers`; add a new one if there is none."""
    if offer.transport not in readers:
        if offer.transport not in _READERS:
            raise WeightsError(f"This worker cannot receive weights by {offer.transport}.")
        # Imported only now: a worker needs the packages of one transport, not of all.
        module, name = _READERS[offer.transport]
        reader: type[Any] = getattr(import_module(module), name)
        readers[offer.transport] = reader(*_find_arguments(offer))
    return readers[offer.transport]


def _find_arguments(offer: Offer) -> tuple[Any, ...]:
    if offer.transport != "verl_buckets":
        return ()
    from vllm.distributed import get_tensor_model_parallel_rank

    return (get_tensor_model_parallel_rank,)
