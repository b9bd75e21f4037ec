"""Which transport an offer came by, and the receiver that reads it inside a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import safe_open

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader, check_checkpoint, read_headers
from rollway.weights.offer import Offer

if TYPE_CHECKING:
    from rollway.weights.transports.shards import ShardReader


def nothing(_: str) -> bool:
    return False


class Receiver(Protocol):
    """Reads versions by one transport. Kept between versions: so are connections and mappings."""

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        """What is offered, before any byte of it is read."""
        ...

    def sums(self, offer: Offer) -> Mapping[str, int]:
        """Sums of tensors' words that the publisher made, by name; empty when it made none."""
        ...

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = nothing
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face tensors, valid until the next is asked for; ends only if all of them were
        exactly what was published. Those that are `summed`, asked when the next is wanted, are
        compared with `sums` by whoever copied them, and need not be read once more here."""
        ...


class FilesReader:
    """Checkpoint directories."""

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return read_headers(_directory(offer))

    def tensors(self, offer: Offer) -> Iterator[tuple[str, torch.Tensor]]:
        directory, whole = _directory(offer), bool(offer.where.get("whole", True))
        with ThreadPoolExecutor(1) as pool:
            # Beside reading, since hashing takes about as long.
            intact = pool.submit(check_checkpoint, directory, whole=whole)
            yield from checkpoint_tensors(directory)
            found = intact.result()
        now = check_checkpoint(directory, whole=False)
        if not found.identity == now.identity == offer.identity:
            raise WeightsError(f"{directory} changed while it was read.", "Write it again.")


def _directory(offer: Offer) -> Path:
    path = offer.where.get("path")
    if not isinstance(path, str) or "\0" in path:
        raise WeightsError("An offer of files names no directory.", "Publish the version again.")
    return Path(path)


class ShmReceiver:
    """Whole tensors of one publisher, or the shards of many."""

    def __init__(self) -> None:
        from rollway.weights.transports.shm import ShmReader

        self._reader = ShmReader()

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        if "ranks" in offer.where:
            return self._shards(offer).headers()
        return self._reader.manifest(offer).headers()

    def sums(self, offer: Offer) -> Mapping[str, int]:
        return {} if "ranks" in offer.where else self._reader.sums(offer)

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = nothing
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if "ranks" in offer.where:
            return self._shards(offer).tensors()
        return self._reader.tensors(offer, summed)

    def _shards(self, offer: Offer) -> ShardReader:
        from rollway.weights.transports.shards import ShardReader

        return ShardReader(self._reader, offer)


class Reader(Protocol):
    """Of a transport that compares digests, not sums."""

    def headers(self, offer: Offer) -> dict[str, TensorHeader]: ...
    def tensors(self, offer: Offer) -> Iterator[tuple[str, torch.Tensor]]: ...


class ByReader:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self._reader.headers(offer)

    def sums(self, offer: Offer) -> Mapping[str, int]:
        return {}

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = nothing
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return self._reader.tensors(offer)


def _cuda_ipc() -> Receiver:
    from rollway.weights.transports.cuda_ipc import CudaIpcReader

    return ByReader(CudaIpcReader())


def _collective() -> Receiver:
    from rollway.weights.transports.collective import CollectiveReader

    return ByReader(CollectiveReader())


def _nixl() -> Receiver:
    from rollway.engine.nixl_receiver import NixlReceiver

    return NixlReceiver()


def _delta() -> Receiver:
    from rollway.weights.transports.delta import DeltaReceiver

    return ByReader(DeltaReceiver())


def _verl_buckets() -> Receiver:
    from vllm.distributed import get_tensor_model_parallel_rank

    from rollway.engine.verl_buckets import VerlBucketsReceiver

    return VerlBucketsReceiver(get_tensor_model_parallel_rank)


_KNOWN: dict[str, Callable[[], Receiver]] = {
    "files": lambda: ByReader(FilesReader()),
    "delta": _delta,
    "shm": ShmReceiver,
    "cuda_ipc": _cuda_ipc,
    "collective": _collective,
    "nixl": _nixl,
    "verl_buckets": _verl_buckets,
}


def receiver_for(offer: Offer, kept: dict[str, Receiver]) -> Receiver:
    if offer.transport not in _KNOWN:
        raise WeightsError(f"This worker cannot receive weights by {offer.transport}.")
    if offer.transport not in kept:
        kept[offer.transport] = _KNOWN[offer.transport]()
    return kept[offer.transport]


def checkpoint_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted({header.file for header in read_headers(directory).values()}):
        with safe_open(str(directory / file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                yield name, opened.get_tensor(name)
