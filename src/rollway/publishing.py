"""Publishers for a stack: they know its secret, its machines, its workers and a directory.

`rollway.weights.transports.choose` opens them. This module finds what they must know, and lets
async code use them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypedDict, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from rollway.fleet.updates import Weights
from rollway.fleet.workers import Worker
from rollway.spec import is_loopback
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Publisher
from rollway.weights.transports.choose import LOOPBACK, Destination, TransportName, open_publisher

P = ParamSpec("P")
T = TypeVar("T")

Transport = TransportName | Literal["auto"]


class PublisherOptions(TypedDict, total=False):
    """Options of `Stack.publisher`, which describes them."""

    directory: str | Path
    checkpoint: str | Path
    bucket_bytes: int
    in_place: bool
    keep: int
    keep_recent: int
    max_off_policy_steps: int
    snapshot_every: int
    hold_on_cpu: bool
    compression: Literal["zstd", "none"]
    host: str
    port: int
    init_seconds: float
    step_seconds: float
    engine_ranks: int
    fanout: bool
    rank: int
    world: int
    catalog: str


def open_for_stack(
    transport: Transport,
    options: PublisherOptions,
    *,
    stack: str,
    secret: str,
    checkpoint: str,
    workers: Sequence[Worker],
    count_receivers: Callable[[], int],
    run_dir: Path | None,
) -> Publisher:
    """Open a publisher for the workers of a stack."""
    remaining: dict[str, Any] = dict(options)
    directory = remaining.pop("directory", None)
    checkpoint = remaining.pop("checkpoint", checkpoint)
    addresses, address = find_addresses([worker.admin_url for worker in workers])
    destination = Destination(
        stack=stack,
        secret=secret,
        model=Path(checkpoint),
        addresses=addresses,
        receivers=count_receivers,
        address=address,
        engine_ranks=max((worker.world_size for worker in workers), default=1),
    )
    temporary = directory is None and transport in ("files", "delta")
    if temporary:
        # Below the run directory it is removed with the stack, even if this process is killed.
        directory = tempfile.mkdtemp(prefix="rollway-weights-", dir=run_dir)
    return open_publisher(
        transport,
        destination,
        directory=None if directory is None else Path(directory),
        temporary=temporary,
        **remaining,
    )


def find_addresses(admin_urls: Sequence[str]) -> tuple[frozenset[str], str]:
    """Return the addresses of the workers' machines, and the address of this one among them.

    Every loopback address is this machine."""
    hosts = {urlsplit(url).hostname or LOOPBACK for url in admin_urls} or {LOOPBACK}
    elsewhere = sorted(host for host in hosts if not is_loopback(host))
    if not elsewhere:
        return frozenset({LOOPBACK}), LOOPBACK
    own = _find_own_address(elsewhere[0])
    return frozenset(own if is_loopback(host) else _resolve(host) for host in hosts), own


def _find_own_address(host: str) -> str:
    """Return the address by which this machine reaches another, and is reached from there."""
    family, _, _, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])


def _resolve(host: str) -> str:
    return str(socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0][4][0])


class OpenPublishers:
    """The publishers that a stack has opened, for as long as their users keep them."""

    def __init__(self) -> None:
        self._models: WeakKeyDictionary[Publisher, str] = WeakKeyDictionary()

    def add(self, publisher: Publisher, model: str) -> None:
        self._models[publisher] = model

    def find_next_version(self, model: str) -> int:
        """Return a number above all that were published for a model, also in vain: a refit may have
        been refused."""
        newest = (p.newest for p, name in self._models.items() if name == model)
        return max((version + 1 for version in newest if version is not None), default=0)

    @contextlib.asynccontextmanager
    async def complete(self, update: Weights | int, model: str) -> AsyncIterator[None]:
        """Complete the sending of weights whose refit the block runs.

        A publisher that sends while workers receive must learn that the refit failed, and the
        trainer must not change weights before they are sent."""
        sender = self._find_sender(update, model) if isinstance(update, Offer) else None
        try:
            yield
        except BaseException:
            if sender is not None:
                sender.cancel()
            raise
        if sender is not None and isinstance(update, Offer):
            await asyncio.to_thread(sender.wait, update.version)

    def _find_sender(self, offer: Offer, model: str) -> Publisher | None:
        """Return the publisher of an offer, if it was opened here and is still sending.

        The offer of any other transport is `repeatable`: all its bytes were written before
        `publish` returned."""
        if offer.repeatable:
            return None
        for publisher, publisher_model in reversed(list(self._models.items())):
            # An `AutomaticPublisher` has no transport before it has seen tensors.
            transport = getattr(publisher, "transport", None)
            if publisher_model == model and transport == offer.transport:
                return publisher
        return None


class AsyncPublisher:
    """Publishes weights from async code: the methods of `rollway.Publisher` as coroutines.

    Each call runs in a thread, so that the event loop goes on serving rollouts.

    Example:
        async with stack.publisher() as weights:
            offer = await weights.publish(step, model.named_parameters())
            await stack.refit(step, offer)
    """

    def __init__(self, open_publisher: Callable[[], Coroutine[Any, Any, Publisher]]) -> None:
        self._open = open_publisher
        self._publisher: Publisher | None = None

    async def __aenter__(self) -> Self:
        self._publisher = await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @staticmethod
    def _run_in_thread(
        method: Callable[Concatenate[Publisher, P], T],
    ) -> Callable[Concatenate[AsyncPublisher, P], Coroutine[Any, Any, T]]:
        """Return the coroutine method that runs a method of the publisher in a thread."""

        @functools.wraps(method)
        async def call(self: AsyncPublisher, /, *args: P.args, **kwargs: P.kwargs) -> T:
            if self._publisher is None:
                self._publisher = await self._open()
            bound: Callable[P, T] = getattr(self._publisher, method.__name__)
            return await asyncio.to_thread(_on_current_gpu(bound), *args, **kwargs)

        return call

    publish = _run_in_thread(Publisher.publish)
    adopt = _run_in_thread(Publisher.adopt)
    wait = _run_in_thread(Publisher.wait)
    cancel = _run_in_thread(Publisher.cancel)
    close = _run_in_thread(Publisher.close)


def _on_current_gpu(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function on this thread's current GPU: torch begins every thread on GPU 0."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return function
    device = torch.cuda.current_device()

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return call
