"""`rollway prime-rl serve`: open the stack, make the gateway with prime-rl's routes, listen."""

from __future__ import annotations

import math
import os
import secrets
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rollway import private_files
from rollway.aio import Stack
from rollway.errors import UsageError
from rollway.gateway.command import (
    GatewayOptions,
    ListeningGateway,
    find_model_path,
    open_gateway,
    serve_until_signal,
)
from rollway.gateway.connections import ServerConnections
from rollway.gateway.server import Gateway
from rollway.gateway.tokens import Access
from rollway.http import Http
from rollway.integrations.prime_rl.directories import BroadcastRules, Marker
from rollway.integrations.prime_rl.engine_metrics import EngineMetrics
from rollway.integrations.prime_rl.groups import Broadcaster, BroadcastType
from rollway.integrations.prime_rl.lora import AdapterAliases
from rollway.integrations.prime_rl.memory import Memory, find_file, hold_alone
from rollway.integrations.prime_rl.routes import PrimeRl
from rollway.integrations.prime_rl.updates import GATE_SECONDS, WeightUpdates
from rollway.stack.state import StackDir, make_home
from rollway.weights.checkpoint import read_config, read_headers
from rollway.weights.layout import ELEMENT_BYTES

API_KEY = "VLLM_API_KEY"
"""The variable with the token that prime-rl sends to both addresses (`client.api_key_var`)."""


@dataclass(slots=True)
class ServeOptions:
    """The options of `rollway prime-rl serve` beyond those of the gateway."""

    gateway: GatewayOptions
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    """None serves admin calls on the address of the rollouts."""
    output_dir: Path | None = None
    marker: Marker = "either"
    gate_seconds: float = GATE_SECONDS
    weight_broadcast: BroadcastType = "auto"


async def serve(options: ServeOptions, access: Access, tls: ssl.SSLContext | None = None) -> None:
    """Serve until a signal arrives."""
    where = options.gateway
    async with (
        open_gateway(where, access) as (stack, plain),
        extend(stack, plain, options) as gateway,
    ):
        if options.admin_port is None:
            place = ListeningGateway(gateway, where.host, where.port)
            await serve_until_signal(place, tls=tls, as_json=where.json)
            return
        rollouts, admin = split_planes(gateway)
        await serve_until_signal(
            ListeningGateway(rollouts, where.host, where.port),
            ListeningGateway(admin, options.admin_host, options.admin_port),
            tls=tls,
            as_json=where.json,
        )


@asynccontextmanager
async def extend(stack: Stack, gateway: Gateway, options: ServeOptions) -> AsyncIterator[Gateway]:
    """Yield the gateway with prime-rl's routes, which admit nobody without a token."""
    gateway = replace(gateway, access=require_token(gateway.access))
    fleet = stack.fleet_of(gateway.model)
    state = StackDir(stack.name).read() if stack.name else None
    roots = [Path(root) for root in state.checkpoint_roots] if state else []
    output_dir = options.output_dir and options.output_dir.expanduser().resolve()
    rules = BroadcastRules(roots, output_dir, options.marker)
    file, run = find_file(stack.name, gateway.model), state.run_id if state else stack.frontend_url
    path = options.gateway.tokenizer or find_model_path(stack, gateway.model)
    experts = None
    if gateway.routed_experts:
        from rollway.rollout.experts import count_experts  # needs numpy

        experts = count_experts(read_config(Path(path) / "config.json"))
    with hold_alone(file):
        memory = Memory(file, run)
        broadcaster = Broadcaster(
            fleet,
            memory,
            stack.weights_secret,
            partial(count_model_bytes, stack.find_checkpoint(gateway.model)),
            options.weight_broadcast,
        )
        async with Http() as http:
            extension = PrimeRl(
                stack,
                gateway.model,
                str(Path(path).absolute()) if Path(path).is_dir() else path,
                gateway.context_length,
                WeightUpdates(fleet, rules, memory, options.gate_seconds, broadcaster=broadcaster),
                AdapterAliases(fleet, rules, memory, partial(stack.publisher, model=gateway.model)),
                EngineMetrics(http, fleet),
                experts,
            )
            extension.gateway = replace(gateway, extension=extension)
            try:
                yield extension.gateway
            finally:
                await extension.close()


def require_token(access: Access) -> Access:
    """Return who may call, with an operator's token in any case: admin calls load weights into all
    workers, and every user of this machine can reach a loopback address. The token is that of the
    environment, as prime-rl reads it, or one that this user's servers keep in a private file."""
    if access.operators:
        return access
    token = os.environ.get(API_KEY, "").encode(errors="surrogateescape")
    if token in (b"", b"EMPTY", *access.agents):
        token = ensure_token()
        print(f"Admin calls need a token. For prime-rl: {make_export()}", file=sys.stderr)
    if b"/" in token:
        raise UsageError(
            f"{API_KEY} contains a slash, which separates tokens from sessions.",
            f"Choose another: export {API_KEY}=$(openssl rand -hex 32)",
        )
    return replace(access, operators=(token,))


def find_token_file() -> Path:
    return make_home() / "prime-rl" / "token"


def make_export() -> str:
    """Return the line of a shell that gives the token to prime-rl."""
    return f'export {API_KEY}="$(cat {find_token_file()})"'


def ensure_token() -> bytes:
    """Return the token of this user's servers; the first one makes it."""
    file = find_token_file()
    try:
        private_files.make_directory(file.parent)
        if not file.exists():
            private_files.replace_file(file, secrets.token_hex(32).encode())
        if not (token := private_files.read_file(file, 1 << 10).strip()):
            raise ValueError("it is empty")  # an empty token would admit everybody
        return token
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The token of admin calls cannot be read from {file}: {error}.",
            f"Remove the file, or set {API_KEY}.",
        ) from error


def split_planes(gateway: Gateway) -> tuple[Gateway, Gateway]:
    """Return one gateway for rollouts and one for admin calls, which share everything but their
    connections."""
    assert isinstance(gateway.extension, PrimeRl)
    rollouts = replace(gateway, extension=replace(gateway.extension, plane="rollouts"))
    admin = replace(gateway.extension, plane="admin")
    return rollouts, replace(gateway, extension=admin, connections=ServerConnections())


def count_model_bytes(path: str | None) -> int:
    """Return the size of the served model's tensors."""
    if path is None or not Path(path).is_dir():
        raise UsageError(
            "The size of the model is unknown, because its checkpoint directory is.",
            "Start the stack from a checkpoint directory, or broadcast by files.",
        )
    headers = read_headers(Path(path)).values()
    return sum(math.prod(header.shape) * ELEMENT_BYTES[header.dtype] for header in headers)
