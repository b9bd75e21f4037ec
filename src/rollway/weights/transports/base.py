"""The contract of every transport: a Publisher in the trainer, a Reader in each worker.

    trainer rank                                      worker
    publisher.publish(7, tensors) ──► Offer ──────►   reader.headers(offer)    names, shapes, dtypes
    publisher.wait(7)                                 reader.tensors(offer)    verified tensors

`rollway.weights.transports.choose` opens a publisher by name. `rollway.engine.receivers` finds the
reader of an offer. No other module distinguishes transports.
"""

# ruff: noqa: B027  (a default that does nothing is part of the contract)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from rollway.errors import UsageError

# No torch at run time: the command line imports this package.
if TYPE_CHECKING:
    from torch import Tensor

    from rollway.weights.checkpoint import TensorHeader
    from rollway.weights.offer import Offer, Transport
    from rollway.weights.slices import Slices
    from rollway.weights.sources import Held

NamedTensor: TypeAlias = "tuple[str, Tensor]"
Source: TypeAlias = "Iterable[NamedTensor] | Iterable[Held] | Iterable[NamedTensor | Held]"
"""Pairs of name and tensor, or the HeldTensors of `from_module` and `from_megatron`."""
T = TypeVar("T")


def never(_: str) -> bool:
    return False


class Publisher(ABC):
    """Publishes versions of the weights from one rank of the trainer.

    Publishers are context managers. Versions must grow.

        with ShmPublisher() as publisher:
            for step in range(1, steps):
                train()
                stack.refit(step, publisher.publish(step, model.named_parameters()))
                publisher.wait(step)   # before the optimizer changes the weights
    """

    transport: Transport

    @abstractmethod
    def publish(self, version: int, tensors: Source | None = None) -> Offer:
        """Publish a version and return its offer, which a refit distributes to the workers.

        Without `tensors`, publish the adopted ones. Transports that copy do so before they request
        the next tensor from an iterator, so a trainer may gather tensors one by one."""

    def adopt(self, tensors: Iterable[NamedTensor]) -> None:
        """Publish these parameters from their own memory from now on, without a copy."""
        raise UsageError(
            f"The {self.transport} transport copies tensors; it cannot adopt them.",
            "Pass the tensors to `publish`, or use shm, cuda_ipc or nixl.",
        )

    def expect(self, receivers: int) -> None:
        """Set how many ranks of workers will receive the next version."""

    def wait(self, version: int, seconds: float | None = None) -> None:
        """Wait until every receiver has the version; raise the error of a transfer that failed."""

    def cancel(self) -> None:
        """End the transfer in progress, for example after a refit that failed."""

    def close(self) -> None:
        """Release the published versions, with their memory and connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Reader(ABC):
    """Receives versions inside a worker. It keeps its mappings and connections between versions.

    reader = ShmReader()
    for name, tensor in reader.tensors(offer):
        parameters[name].copy_(tensor)   # valid until the next tensor is requested
    """

    can_restrict: bool = False
    """Whether `restrict` can do anything; computing the slices takes time."""

    @abstractmethod
    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        """Return names, dtypes and shapes of the offered tensors, without reading their bytes."""

    def sums(self, offer: Offer) -> Mapping[str, int]:
        """Return the publisher's word sums by tensor name; empty where it made none."""
        return {}

    @abstractmethod
    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors; each is valid until the next is requested.

        The iterator ends normally only if all bytes were exactly those published. The caller
        compares tensors for which `summed` is true with `sums` itself, so the reader need not read
        them a second time. `summed` is called after the tensor was used."""

    def restrict(self, offer: Offer, slices: Slices) -> Slices:
        """Receive only these parts from now on; return those that `tensors` will yield as parts.

        Tensors that are not in the returned slices are received whole, as all are by default."""
        return type(slices)()

    def release(self) -> None:
        """Serve peers nothing of a version that this worker will not serve."""

    def close(self) -> None:
        """Release mappings and connections."""


def peek(items: Iterable[T]) -> tuple[T | None, Iterator[T]]:
    """Return the first item, or None, and an iterator over all items.

    Neither this function nor the iterator holds the first item once it was yielded: a trainer that
    gathers tensors one by one must never have two of them in memory. The caller drops its own."""
    iterator = iter(items)
    first = list(islice(iterator, 1))

    def rest() -> Iterator[T]:
        yield first.pop()
        yield from iterator

    return (first[0], rest()) if first else (None, iter(()))


def named_tensors(tensors: Source) -> Iterator[NamedTensor]:
    """Yield (name, tensor) pairs, from pairs or from HeldTensors that hold whole tensors.

    HeldTensors are yielded whether or not this rank owns them: a transport that cannot carry shards
    publishes from a single rank."""
    for item in tensors:
        if isinstance(item, tuple):
            yield item
        elif is_whole(item):
            yield item.shard.name, item.tensor
        else:
            raise UsageError(
                f"This rank holds only a part of {item.shard.name}, or under another name than the "
                "checkpoint has.",
                "Publish shards by shm or nixl, or gather the tensors first.",
            )


def is_whole(held: Held) -> bool:
    """Tell whether a HeldTensor is a complete tensor of the checkpoint, under its own name."""
    if len(held.pieces) != 1:
        return False
    (piece,) = held.pieces
    return (
        piece.name == held.shard.name
        and not piece.transposed
        and piece.box.shape == held.shard.shape == tuple(held.tensor.shape)
    )
