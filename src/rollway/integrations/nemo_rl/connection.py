"""The stack behind a `Generation`: started here, attached to, or reached again by a copy.

    driver                                     rollout actor
    Connection.open(config)                    Connection.reach(address)
      stack: starts it, stops it at close        attaches to the same frontend; never watches,
      frontend_url, dgd_name: attaches           refits or stops anything
             └── address ── pickled with the Generation ──►

NeMo-RL calls from several threads, each with an event loop of its own or none. So the stack lives
in the event loop of one thread, and calls are handed to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import rollway
from rollway.api import Opening
from rollway.errors import NoWorkers, Unreachable, UsageError
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import HealthListing, RlListing, Source
from rollway.integrations.nemo_rl.config import (
    WHERE,
    DynamoCfg,
    GenerationConfig,
    find_deployment_url,
    find_namespace,
    make_stack_fields,
)
from rollway.rollout.client import Rollouts
from rollway.spec import AdminTimeouts
from rollway.stack_handle import Stack
from rollway.sync import Portal

T = TypeVar("T")
_UNBOUNDED = 1_000_000
"""Requests in flight: NeMo-RL's own limits bound them."""


@dataclass(frozen=True)
class Address:
    """How a process of the same Ray cluster reaches the stack."""

    frontend_url: str
    model: str
    listing: Source
    context_length: int
    secret: str = field(repr=False, default="")
    """What orders to the workers are signed with."""


class Connection:
    """A stack in the event loop of a thread, and the policy's fleet and rollouts in it."""

    def __init__(self, opening: Opening, model: str, dynamo: DynamoCfg) -> None:
        """Enter the opening; a start that fails leaves nothing."""
        self._opening = opening
        self.portal = Portal()
        try:
            self.stack: Stack = self.portal.run(opening.__aenter__())
        except BaseException:
            self.portal.close()
            raise
        try:
            self._find_model(model)
            self.model = model
            self.fleet: Fleet = self.stack.fleet_of(model)
            self.secret = self.stack.weights_secret
            self.rollouts = self.portal.run(self._open_rollouts(dynamo.request_timeout_s))
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, config: GenerationConfig) -> Connection:
        """Start the stack of a recipe, or attach to the one that it names."""
        dynamo = config.dynamo_cfg
        if dynamo.stack is not None:
            opening = rollway.up(make_stack_fields(config))
        else:
            url = dynamo.frontend_url or find_deployment_url(dynamo)
            opening = rollway.attach(
                url,
                rl_url=dynamo.rl_url,
                timeouts=AdminTimeouts(pause=dynamo.control_timeout_s),
                listing=choose_listing(dynamo, url),
            )
        connection = cls(opening, config.model_name, dynamo)
        try:
            connection.portal.run(connection._check_workers())
        except BaseException:
            connection.close()
            raise
        return connection

    @classmethod
    def reach(cls, address: Address, dynamo: DynamoCfg) -> Connection:
        """Attach to the stack of another process, to generate and to flush caches."""
        opening = rollway.attach(
            address.frontend_url,
            rl_url=address.listing.url if isinstance(address.listing, RlListing) else None,
            watch=False,
            listing=address.listing,
            secret=address.secret,
        )
        return cls(opening, address.model, dynamo)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the stack's loop, from a thread without one."""
        return self.portal.run(work)

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the stack's loop, from another loop; a cancel reaches it."""
        return await asyncio.wrap_future(self.portal.start(work))

    def find_address(self) -> Address:
        """Return how other processes reach this stack."""
        return Address(
            frontend_url=self.stack.frontend_url,
            model=self.model,
            listing=self.fleet.membership.source,
            context_length=self.run(self.stack.context_length(self.model)),
            secret=self.secret,
        )

    def close(self) -> None:
        """Stop the stack if this process started it, and the thread."""
        try:
            self.portal.run(self._opening.__aexit__())
        finally:
            self.portal.close()

    async def _open_rollouts(self, seconds: float) -> Rollouts:
        return self.stack.rollouts(self.model, timeout=seconds, concurrency=_UNBOUNDED)

    def _find_model(self, model: str) -> None:
        if model in self.stack.models:
            return
        close = [name for name in self.stack.models if name.rstrip("/") == model.rstrip("/")]
        raise UsageError(
            f"The trainer's model is {model!r}, and the stack serves "
            f"{', '.join(map(repr, self.stack.models))}.",
            "The names must be equal to the byte: set policy.model_name"
            + (f" to {close[0]!r}." if close else ", or the served name of the stack's model."),
        )

    async def _check_workers(self) -> None:
        """Raise if the frontend lists no worker that can be refitted, and say where it looked."""
        listing = self.fleet.membership.source
        try:
            workers = await self.fleet.workers()
        except Unreachable as error:
            raise Unreachable(
                f"{self.stack.frontend_url} serves {self.model}, but its workers are not listed: "
                f"{error.message}",
                f"Start the frontend with DYN_ENABLE_RL=true and DYN_RL_PORT, give its address as "
                f"{WHERE}.rl_url, or name the workers' namespaces "
                f"({WHERE}.refit_worker_namespaces).",
            ) from error
        if workers:
            return
        seen = await self._list_namespaces()
        named = listing.namespaces if isinstance(listing, HealthListing) else ()
        wanted = ", ".join(named) or "the frontend's own"
        raise NoWorkers(
            f"{self.stack.frontend_url} lists no RL workers. Searched namespace: {wanted}; it sees "
            f"{', '.join(seen) or 'none'}.",
            "Workers of a deployment register in {namespace}-{deployment}, with a dash and eight "
            f"hex digits or without. Start them with --enable-rl, or set {WHERE}."
            "refit_worker_namespaces.",
        )

    async def _list_namespaces(self) -> list[str]:
        from rollway.http import Http

        async with Http() as http:
            answer = await http.get(f"{self.stack.frontend_url}/health", timeout=10.0)
        instances = answer.get("instances", []) if isinstance(answer, dict) else []
        return sorted({str(entry.get("namespace")) for entry in instances})


def choose_listing(dynamo: DynamoCfg, url: str) -> Source | None:
    """Return where the workers of a running stack are listed; None for the default place.

    The Service of a deployment's frontend has one port, so its list of RL workers is out of reach:
    its `/health` names the workers instead."""
    if dynamo.rl_url is not None:
        return RlListing(dynamo.rl_url, url)
    if dynamo.refit_worker_namespaces:
        return HealthListing(url, tuple(dynamo.refit_worker_namespaces), dynamo.dyn_system_port)
    if dynamo.dgd_name is not None:
        name = f"{find_namespace(dynamo)}-{dynamo.dgd_name.replace('.', '-')}"
        return HealthListing(url, (name,), dynamo.dyn_system_port)
    return None
