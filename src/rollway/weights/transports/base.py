"""The contract of every transport: a Publisher in the trainer, a Reader in each worker.

    trainer rank                                      worker
    publisher.publish(7, tensors) ──► Offer ──────►   reader.headers(offer)    names, shapes, dtypes
    publisher.wait(7)                                 reader.tensors(offer)    verified tensors

`rollway.weights.transports.choose` opens a publisher by name. `rollway.engine.incoming` finds the
reader of an offer. No other module distinguishes transports.
"""

# ruff: noqa: B027  (a default that does nothing is part of the contract)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias

from rollway.errors import UsageError

# No torch at run time: the command line imports this package.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rollway.weights.checkpoint import TensorHeader
    from rollway.weights.layout import Slices
    from rollway.weights.offer import Offer, Transport
    from rollway.weights.sources import HeldTensor

NamedTensor: TypeAlias = "tuple[str, Tensor]"
Source: TypeAlias = (
    "Mapping[str, Tensor] | Iterable[NamedTensor] | Iterable[HeldTensor]"
    " | Iterable[NamedTensor | HeldTensor]"
)
"""Pairs of name and tensor, or the HeldTensors of `from_module` and `from_megatron`."""


def never(_: str) -> bool:
    return False


class Publisher(ABC):
    """Publishes versions of the weights from one rank of the trainer.

    Publishers are context managers. Versions must grow.

    Example:
        with ShmPublisher() as publisher:
            for step in range(1, steps):
                train()
                stack.refit(step, publisher.publish(step, model.named_parameters()))
                publisher.wait(step)  # before the optimizer changes the weights
    """

    transport: Transport
    newest: int | None = None
    """The last version that was published."""
    _closed = False

    def publish(self, /, version: int, tensors: Source | None = None) -> Offer:
        """Publish a version and return its offer, which a refit distributes to the workers.

        Transports that copy do so before they request the next tensor from an iterator, so a
        trainer may gather tensors one by one.

        Args:
            version: the number of the version, higher than all before.
            tensors: pairs of name and tensor, for example `model.named_parameters()`, or the
                result of `from_module` or `from_megatron`; None for the adopted tensors.

        Raises:
            UsageError: no tensors, an old version, tensors that this transport cannot publish, or
                a publisher that is closed.
            WeightsError: the version cannot be written.
        """
        if self._closed:
            raise UsageError("This publisher is closed.", "Publish inside its `with` block.")
        check_next(version, self.newest)
        offer = self._publish(version, tensors)
        self.newest = version
        return offer

    @abstractmethod
    def _publish(self, version: int, tensors: Source | None) -> Offer:
        """Publish a version that is known to be new."""

    def adopt(self, tensors: Iterable[NamedTensor]) -> None:
        """Publish these parameters from their own memory from now on, without a copy.

        Args:
            tensors: pairs of name and tensor. They must not change between `publish` and the end
                of the refit.

        Raises:
            UsageError: the transport copies tensors and cannot adopt them.
        """
        raise UsageError(
            f"The {self.transport} transport cannot adopt tensors.",
            "Pass the tensors to `publish` (with in_place=True by cuda_ipc), or use shm or nixl.",
        )

    def expect(self, receivers: int) -> None:
        """Set how many ranks of workers will receive the next version. `Stack.publisher` counts
        them itself.

        Args:
            receivers: every rank of every worker counts.
        """

    def wait(self, version: int, seconds: float | None = None) -> None:
        """Wait until every receiver has the version. `Stack.refit` does it.

        Args:
            version: the version that was published last.
            seconds: how long to wait; None for as long as the transport's own limits.

        Raises:
            WeightsError: the transfer failed, or the time has passed.
        """

    def cancel(self) -> None:
        """End the transfer in progress, for example after a refit that failed. Its version may be
        published again."""
        self.newest = None if self.newest is None else self.newest - 1

    def close(self) -> None:
        """Release the published versions, with their memory and connections."""
        if not self._closed:
            self._closed = True
            self._close()

    def _close(self) -> None:
        """Release them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Reader(ABC):
    """Receives versions inside a worker. It keeps its mappings and connections between versions.

    Example:
        reader = ShmReader()
        for name, tensor in reader.tensors(offer):
            parameters[name].copy_(tensor)  # valid until the next tensor is requested
    """

    can_restrict: bool = False
    """Whether `restrict` can do anything; computing the slices takes time."""
    rank: int = 0
    """The worker's rank in its engine, for fabrics that connect like ranks alone."""

    @abstractmethod
    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        """Return names, dtypes and shapes of the offered tensors, without reading their bytes."""

    def sums(self, offer: Offer) -> Mapping[str, int]:
        """Return the publisher's word sums by tensor name; empty where it made none."""
        return {}

    def get_digest(self, offer: Offer) -> str:
        """Return a digest of the bytes that arrived, where the publisher sends none: the ranks that
        received them must agree. Empty otherwise."""
        return ""

    def shares_device(self, offer: Offer) -> bool:
        """Return whether `tensors` yields views of the publisher's own memory, on its device.

        Such views stay valid until `tensors` is called with another offer, or `finish`, `release`
        or `close`. So a caller may keep all of them, verify them, and copy from them later. What
        it copies then is what was published only if it has the word sums of `sums`."""
        return False

    @abstractmethod
    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors; each is valid until the next is requested.

        The iterator ends normally only if all bytes were exactly those published. The caller
        compares tensors for which `summed` is true with `sums` itself, so the reader need not read
        them a second time. `summed` is called after the tensor was used."""

    def changes(self, offer: Offer, served: str, at_most: int) -> Changes | None:
        """Return what changed since the weights with the identity `served`.

        The caller verifies the result by `sums`. The changes have a refusal if nothing leads from
        there to the offered version, or if more than `at_most` elements changed. Return None if
        this transport sends no changes."""
        return None

    def restrict(self, offer: Offer, slices: Slices) -> Slices:
        """Receive only these parts from now on; return those that `tensors` will yield as parts.

        Tensors that are not in the returned slices are received whole, as all are by default."""
        return type(slices)()

    def finish(self, offer: Offer) -> None:
        """Note that the version is served: no view of its tensors is used any more."""

    def release(self) -> None:
        """Serve peers nothing of a version that this worker will not serve."""

    def close(self) -> None:
        """Release mappings and connections."""


@dataclass(frozen=True)
class InspectedSource:
    """The tensors of a Source, of which only the first has been requested yet."""

    tensors: Iterator[NamedTensor]
    shards: Sequence[HeldTensor]
    """Set instead of `tensors`, where this rank holds parts of tensors or does not own all."""
    on_gpu: bool
    """Whether the first tensor is on a GPU."""
    is_stream: bool = False
    """Whether tensors come from an iterator: the trainer may gather each into the same memory."""

    def pairs(self) -> Iterator[NamedTensor]:
        """Yield (name, tensor) pairs, for a transport that cannot carry shards.

        Such a transport publishes from a single rank, so it does not matter which rank owns a
        tensor. Raise UsageError for a tensor of which this rank holds only a part."""
        return named_tensors(self.shards) if self.shards else self.tensors


def inspect_source(tensors: Source | None) -> InspectedSource:
    """Look at the first tensor to tell pairs from HeldTensors, and a GPU from a CPU."""
    tensors = list_items(tensors or ())
    iterator = iter(tensors)
    is_stream = iterator is tensors
    first = list(islice(iterator, 1))
    if not first:
        raise UsageError("There are no tensors to publish.", "Pass them, or `adopt` them.")

    def all_items() -> Iterator[NamedTensor | HeldTensor]:
        # `pop`: a trainer that gathers tensors one by one must not have two of them in memory.
        yield first.pop()
        yield from iterator

    if isinstance(first[0], tuple):
        on_gpu = bool(first[0][1].is_cuda)
        return InspectedSource(named_tensors(all_items()), [], on_gpu, is_stream)
    on_gpu = bool(first[0].tensor.is_cuda)
    # HeldTensors are views of the trainer's own memory: a list of them costs nothing.
    items = [item for item in all_items() if not isinstance(item, tuple)]
    if all(item.owned_here and is_whole(item) for item in items):
        return InspectedSource(named_tensors(items), [], on_gpu)
    return InspectedSource(iter(()), items, on_gpu)


def list_items(tensors: Source) -> Iterable[NamedTensor | HeldTensor]:
    """Return the items of a source, or of a mapping such as `model.state_dict()`."""
    if isinstance(tensors, Mapping):
        return tensors.items()
    if not isinstance(tensors, Iterable):
        raise UsageError(
            f"A {type(tensors).__name__} has no names and tensors to publish.",
            "Pass (name, tensor) pairs, such as model.named_parameters().",
        )
    return tensors


def named_tensors(tensors: Source) -> Iterator[NamedTensor]:
    """Yield (name, tensor) pairs, from pairs or from HeldTensors that hold whole tensors."""
    for item in list_items(tensors):
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


def is_whole(item: HeldTensor) -> bool:
    """Return whether a HeldTensor is a complete tensor of the checkpoint, under its own name."""
    if len(item.pieces) != 1:
        return False
    (piece,) = item.pieces
    return (
        piece.name == item.shard.name
        and not piece.transposed
        and not any(piece.at)
        and piece.box.shape == item.shard.shape == tuple(item.tensor.shape)
    )


class ChangedElements(NamedTuple):
    """The changed elements of one tensor, on a device."""

    positions: Tensor
    """Flat positions in the tensor, in order."""
    bits: Tensor
    """Integers of the elements' size."""
    relative: bool
    """Whether the bits must be added to the old ones."""


class TensorChange(Protocol):
    """What changed in one tensor from a version to the next, in host memory."""

    @property
    def name(self) -> str: ...
    @property
    def count(self) -> int:
        """How many elements changed."""
        ...

    @property
    def element_bytes(self) -> int: ...


class ChangedStep(Protocol):
    """What changed from one version to the next; each tensor at most once."""

    @property
    def changes(self) -> Sequence[TensorChange]: ...
    def move(self, device: torch.device) -> Iterator[tuple[str, ChangedElements]]:
        """Yield the changed elements of each tensor, in any order."""
        ...


@dataclass(frozen=True, slots=True)
class Changes:
    """What leads from the served version to another, or why nothing does."""

    steps: Sequence[ChangedStep] = ()
    """In the order in which they apply."""
    refusal: str = ""

    def __iter__(self) -> Iterator[TensorChange]:
        for step in self.steps:
            yield from step.changes


def check_retention(keep_recent: int, max_off_policy_steps: int) -> None:
    """Refuse to keep fewer versions than the trainer may still request."""
    if keep_recent < max(1, max_off_policy_steps):
        raise UsageError(
            f"keep_recent is {keep_recent}, and a rollout may be {max_off_policy_steps} steps old.",
            f"Set keep_recent to {max(1, max_off_policy_steps)} or more.",
        )


def check_next(version: int, latest: int | None) -> None:
    """Refuse a version that does not grow: readers regard the highest as the newest."""
    if type(version) is not int:
        raise UsageError(f"A version is a whole number, and not {version!r}.", "Count upwards.")
    if version < 0 or (latest is not None and version <= latest):
        raise UsageError(
            f"Version {version} cannot follow version {latest}.",
            "Count upwards, and give a run that starts again a new directory.",
        )
