"""Run `rollway gateway`: open the stack and the store, listen, and serve until a signal."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rollway
from rollway.aio import Stack
from rollway.errors import UsageError
from rollway.gateway.connections import Listener, raise_connection_limit
from rollway.gateway.server import Gateway
from rollway.gateway.store import SessionStore
from rollway.gateway.template import Template
from rollway.gateway.tokens import Access
from rollway.gateway.upstream import CHAT, Upstream
from rollway.observe.record import Recorder
from rollway.rollout.wire import COMPLETIONS
from rollway.stack.ray import launcher
from rollway.stack.state import make_home

_COUNT_SECONDS = 2.0
_UNBOUNDED = 1_000_000  # the number of connections bounds it


@dataclass(slots=True)
class GatewayOptions:
    """What to serve, and where; the options of `rollway gateway`."""

    stack: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    rl_url: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    journal: Path | None = None
    journal_sync: bool = False
    bundle: str = "asked"
    routed_experts: bool = False
    json: bool = False


async def serve(options: GatewayOptions, access: Access, tls: ssl.SSLContext | None = None) -> None:
    """Serve until a signal arrives."""
    async with open_gateway(options, access) as (_, gateway):
        place = ListeningGateway(gateway, options.host, options.port)
        await serve_until_signal(place, tls=tls, as_json=options.json)


@asynccontextmanager
async def open_gateway(
    options: GatewayOptions, access: Access
) -> AsyncIterator[tuple[Stack, Gateway]]:
    """Open the stack and the store; yield the gateway, which does not listen yet."""
    if warning := raise_connection_limit():
        print(warning, file=sys.stderr)
    target = launcher.resolve_name(options.stack)
    async with rollway.attach(target, rl_url=options.rl_url) as stack:
        model = options.model or (stack.models[0] if len(stack.models) == 1 else None)
        tokenizer = options.tokenizer or find_model_path(stack, model)
        path = options.journal or make_home() / "gateway" / f"{stack.name or 'attached'}.sqlite"
        store = SessionStore(path, sync=options.journal_sync)
        try:
            gateway = await create_gateway(
                stack,
                Template(tokenizer),
                store,
                model,
                access=access,
                bundle=options.bundle,
                routed_experts=options.routed_experts,
            )
            tune_collector()
            async with record_counts(store, stack.run_recorder):
                yield stack, gateway
        finally:
            store.close()


@asynccontextmanager
async def record_counts(
    store: SessionStore, run: Recorder | None, seconds: float = _COUNT_SECONDS
) -> AsyncIterator[None]:
    """Add the counts of sessions, turns and forks to the record of the stack: every few seconds and
    at the end of the block, if they have changed."""
    if run is None:
        yield
        return
    written = (-1, 0)
    forks: Counter[str] = Counter()

    def write() -> None:
        nonlocal written, forks
        counts = len(store.sessions), store.turns
        if counts != written:
            run.write("gateway", sessions=counts[0], turns=counts[1])
        current = Counter(dict(store.forks))
        for reason, count in (current - forks).items():
            run.write("forks", reason=reason, count=count)
        written, forks = counts, current

    async def repeat() -> None:
        while True:
            await asyncio.sleep(seconds)
            write()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        write()


async def create_gateway(
    stack: Stack,
    template: Template,
    store: SessionStore,
    model: str | None = None,
    *,
    kind: type[Gateway] = Gateway,
    seconds: float = 3600.0,
    most_tokens: int | None = None,
    **options: Any,
) -> Gateway:
    """Create the gateway of one model of a running stack. A request may take `seconds`, with all
    retries, and have `most_tokens` with its answer, if that is less than the context."""
    chat, text = (
        stack.sender(Upstream, model, wire=wire, concurrency=_UNBOUNDED, timeout=seconds)
        for wire in (CHAT, COMPLETIONS)
    )
    length = await stack.context_length(chat.model)
    length = min(length, most_tokens or length)
    return kind(chat.model, template, store, chat, text, length, **options)


def tune_collector() -> None:
    """Exclude the objects that exist now from garbage collection, and collect less often.

    A request creates thousands of objects but hardly any cycles, and sessions stay in memory.
    Collections freed nothing and took a tenth of the time of a request."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def find_model_path(stack: Stack, model: str | None) -> str:
    """Return the directory of a served model, which has its tokenizer."""
    path = stack.find_checkpoint(model)
    if path is None:
        raise UsageError("The model's tokenizer is not known.", "Pass it with --tokenizer.")
    return path


def make_tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Load certificate and key; return None without either."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UsageError("TLS needs a certificate and a key.", "Pass --tls-cert and --tls-key.")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password function, OpenSSL would ask for one at the terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (OSError, ssl.SSLError, ValueError) as error:
        raise UsageError(
            f"TLS cannot be used with {certificate} and {key}: {error}.",
            "Pass PEM files of a certificate and of its key, without a password.",
        ) from error
    return context


@dataclass(frozen=True, slots=True)
class ListeningGateway:
    """A gateway, and where it listens."""

    gateway: Gateway
    host: str
    port: int

    def make_url(self, port: int, scheme: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{port}/v1"


async def serve_until_signal(
    place: ListeningGateway,
    admin: ListeningGateway | None = None,
    *,
    tls: ssl.SSLContext | None = None,
    as_json: bool = False,
) -> None:
    """Listen, print the addresses, and serve until SIGINT or SIGTERM."""
    # Before the addresses are printed: whoever reads them may stop the server at once.
    stop_requested = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(number, stop_requested.set)
    async with AsyncExitStack() as servers:
        urls = []
        for each in filter(None, (place, admin)):
            server = await listen(each.gateway, each.host, each.port, tls)
            servers.push_async_callback(server.close)
            urls.append(each.make_url(server.port, "https" if tls else "http"))
        ready = {"url": urls[0], "model": place.gateway.model}
        text = f"{urls[0]} serves {place.gateway.model}"
        if admin is not None:
            ready["admin_url"] = urls[1]
            text += f", {urls[1]} takes admin calls"
        print(json.dumps(ready) if as_json else text, flush=True)
        await stop_requested.wait()
        print("stopping", file=sys.stderr)


async def listen(
    gateway: Gateway, host: str, port: int, tls: ssl.SSLContext | None = None
) -> Listener:
    """Start serving a gateway, with bounds on its connections."""
    return await gateway.connections.listen(gateway.app(), host, port, tls)
