"""Open a publisher of weights for a stack; "auto" chooses its transport:

engines run                the trainer has         transport
only on this machine       tensors on a GPU        cuda_ipc   (shm, if this rank holds shards)
                           tensors on a CPU        shm
also on other machines     a shared directory      files      (nixl, if this rank holds shards)
                           NIXL installed          nixl
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollway.errors import UsageError
from rollway.weights.transports.base import NamedTensor, Publisher, Source, inspect_source

if TYPE_CHECKING:
    from rollway.weights.offer import Offer

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
TransportName = Literal["shm", "cuda_ipc", "files", "delta", "collective", "nixl"]
"""The transports that `open_publisher` can open."""
_PUBLISHERS: dict[TransportName, tuple[str, str]] = {
    "shm": ("rollway.weights.transports.shm", "ShmPublisher"),
    "cuda_ipc": ("rollway.weights.transports.cuda_ipc", "CudaIpcPublisher"),
    "files": ("rollway.weights.transports.files", "FilesPublisher"),
    "delta": ("rollway.weights.transports.delta", "DeltaPublisher"),
    "collective": ("rollway.weights.transports.collective", "CollectivePublisher"),
    "nixl": ("rollway.weights.transports.nixl", "NixlPublisher"),
}


@dataclass(frozen=True)
class Destination:
    """What a publisher must know about the stack that receives its versions."""

    stack: str
    """The name of the stack."""
    secret: str = field(repr=False)
    """The secret that the stack gave its workers; the NIXL catalog asks for it."""
    model: str | Path
    """The directory of the model that its engines started from."""
    addresses: frozenset[str] = frozenset({LOOPBACK})
    """The addresses of the machines that its engines run on."""
    receivers: int | Callable[[], int] = 1
    """How many ranks receive a version: every tensor-parallel rank of every worker. A function is
    called at each publish, since workers come and go."""
    address: str = LOOPBACK
    """The address of this machine, as the engines' machines reach it."""
    engine_ranks: int = 1
    """The tensor parallelism of the engines, so that NIXL can send each rank only its part."""

    @property
    def is_local(self) -> bool:
        """Whether all engines run on this machine."""
        return self.addresses == {self.address}


@dataclass(frozen=True)
class Choice:
    """A transport, and the reason for it."""

    transport: TransportName
    reason: str


def choose_transport(
    requested: TransportName | Literal["auto"],
    destination: Destination,
    *,
    on_gpu: bool = False,
    is_sharded: bool = False,
    directory: Path | None = None,
) -> Choice:
    """Choose a transport for tensors on this kind of device.

    `is_sharded` says that this rank holds parts of tensors; `directory` is one that the trainer and
    all engines see. Raise UsageError if the requested transport cannot reach the engines, or if
    "auto" finds none that can.

    Example: `choose_transport("auto", destination, on_gpu=True)` returns
    `Choice("cuda_ipc", "the tensors are on a GPU of the engines' machine")`."""
    if not destination.is_local and requested in ("shm", "cuda_ipc"):
        raise UsageError(
            f"The {requested} transport uses the memory of one machine, and engines are on others.",
            "Use files or delta in a directory that all of them see, or collective, or nixl.",
        )
    if requested != "auto":
        return Choice(requested, "it was requested")
    if destination.is_local:
        if is_sharded:
            return Choice("shm", "this rank holds shards, for engines on this machine")
        if on_gpu:
            return Choice("cuda_ipc", "the tensors are on a GPU of the engines' machine")
        return Choice("shm", "the tensors are in CPU memory of the engines' machine")
    if directory is not None and not is_sharded:
        return Choice("files", f"engines are on other machines, and all share {directory}")
    from rollway.weights.transports.nixl.agent import import_nixl

    try:
        import_nixl()
    except UsageError as error:
        raise UsageError(
            "Engines are on other machines, and no transport that reaches them is configured.",
            "Give a directory that all of them see, or install NIXL with the trainer "
            "(pip install rollway[nixl]).",
        ) from error
    return Choice("nixl", "engines are on other machines, and NIXL is installed")


def open_publisher(
    transport: TransportName | Literal["auto"],
    destination: Destination,
    *,
    directory: Path | None = None,
    temporary: bool = False,
    bucket_bytes: int | None = None,
    **options: Any,
) -> Publisher:
    """Open a publisher of that transport; "auto" decides at the first publish.

    `directory` is where files and delta store versions. With `temporary` they remove it when the
    publisher closes or its process ends, even if it is killed. `bucket_bytes` limits the memory
    that cuda_ipc and files need for tensors in transit, and is the size of collective's chunks.
    `options` are more arguments for the transport's own publisher.

    Example:
        destination = Destination(stack="s1", secret=secret, model=path)
        with open_publisher("auto", destination) as publisher:
            offer = publisher.publish(1, model.named_parameters())
    """
    if transport == "auto":
        if options:
            raise UsageError(
                f"Transports differ in their options: {', '.join(sorted(options))}.",
                'Name the transport instead of "auto".',
            )
        return AutomaticPublisher(
            destination, directory=directory, temporary=temporary, bucket_bytes=bucket_bytes
        )
    choose_transport(transport, destination)  # raises if it cannot reach the engines
    arguments = _find_arguments(transport, destination, directory, temporary, bucket_bytes)
    # Import only the one that is needed: all import torch, and NIXL is not installed everywhere.
    module, name = _PUBLISHERS[transport]
    publisher_class: type[Publisher] = getattr(import_module(module), name)
    known = inspect.signature(publisher_class).parameters
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise UsageError(
            f"The {transport} transport has no option {unknown[0]}.",
            f"Its options are {', '.join(sorted(known))}.",
        )
    return publisher_class(**{**arguments, **options})


def _find_arguments(
    transport: TransportName,
    destination: Destination,
    directory: Path | None,
    temporary: bool,
    bucket_bytes: int | None,
) -> dict[str, Any]:
    """Return the arguments of the publisher's constructor that follow from the destination."""
    host = LOOPBACK if destination.is_local else destination.address
    match transport:
        case "shm":
            return {}
        case "cuda_ipc":
            return {"bucket_bytes": bucket_bytes} if bucket_bytes else {}
        case "collective":
            from rollway.weights.transports.collective import BUCKET_BYTES

            size = min(bucket_bytes or BUCKET_BYTES, BUCKET_BYTES)
            return {"host": host, "receivers": destination.receivers, "bucket_bytes": size}
        case "nixl":
            ranks = destination.engine_ranks
            return {"host": host, "secret": destination.secret, "engine_ranks": ranks}
    if directory is None:
        raise UsageError(
            f"The {transport} transport needs a directory.",
            "Give one that the trainer and all engines see.",
        )
    arguments: dict[str, Any] = {"temporary": True} if temporary else {}
    if transport == "delta":
        # Compressing takes longer than copying the bytes within one machine.
        if temporary and destination.is_local:
            arguments["compression"] = "none"
        return arguments | {"root": directory}
    if bucket_bytes:
        arguments["shard_bytes"] = bucket_bytes
    return arguments | {"root": directory, "model": Path(destination.model)}


class AutomaticPublisher(Publisher):
    """A publisher that chooses its transport when it sees the first tensors, and then keeps it."""

    def __init__(self, destination: Destination, **options: Any) -> None:
        """Pass `options` to `open_publisher` when the first tensors arrive."""
        self._destination, self._options = destination, options
        self._publisher: Publisher | None = None
        self.choice: Choice | None = None
        """The transport and the reason for it; None before the first tensors."""

    def _publish(self, version: int, tensors: Source | None = None) -> Offer:
        publisher = self._publisher
        if publisher is None:
            publisher, tensors = self._open(tensors)
        return publisher.publish(version, tensors)

    def adopt(self, tensors: Iterable[NamedTensor]) -> None:
        parameters = list(tensors)
        publisher = self._publisher or self._open(parameters)[0]
        publisher.adopt(parameters)

    def wait(self, version: int, seconds: float | None = None) -> None:
        if self._publisher is not None:
            self._publisher.wait(version, seconds)

    def cancel(self) -> None:
        if self._publisher is not None:
            self._publisher.cancel()

    def _close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _open(self, tensors: Source | None) -> tuple[Publisher, Source]:
        """Open the publisher for these tensors; return it and the tensors, because inspecting
        an iterator consumes its start."""
        source = inspect_source(tensors)
        self.choice = choose_transport(
            "auto",
            self._destination,
            on_gpu=source.on_gpu,
            is_sharded=bool(source.shards),
            directory=self._options.get("directory"),
        )
        log.info("publishing weights by %s: %s", self.choice.transport, self.choice.reason)
        self.transport = self.choice.transport
        self._publisher = open_publisher(self.choice.transport, self._destination, **self._options)
        return self._publisher, source.shards or source.tensors
