"""The orders of a refit in a worker's process: stage weights, then move to them.

`rollway_stage` has the engine stage weights, and answers with all that a refit needs to know once
that is done. `rollway_refit` runs a whole refit next to the engine (drawn in
`rollway/engine/core.py`). A worker with many streams answers late, so a refit takes these two calls
and no other. Weights that are staged and not served are freed by `rollway_discard`. Since it knows
when the engine switched, it also stamps tokens with their versions.

A worker that sleeps gets the memory of its weights back before it stages, and that of its KV cache
last: until then the memory may hold the staged weights. After a refusal it sleeps again.

The guard adds the orders to the worker. This file uses the standard library only: the guard loads
it by its path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

log = logging.getLogger("rollway.guard")

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
LABELLING = ("set_weight_version", "update_weights_from_disk", "update_weights_from_distributed")
"""Routes that change the label of the worker."""
STAMPS = "rollway_versions"
"""The extra field by which a request asks for the versions of its tokens."""
_ASK_SECONDS = 0.5
"""The first wait before a rank that sent no notification is asked; later waits are longer."""


class RefitOrders:
    """The label of one engine, and the orders that change its weights."""

    def __init__(
        self, handler: Any, sleep: Any, route_to: Callable[[list[str]], Awaitable[None]]
    ) -> None:
        """`sleep` is the `SleepOrders` of the same engine; `route_to` sets the worker's taints."""
        self._handler = handler
        """Dynamo's object behind the RL routes; it holds the engine's client and the label."""
        self._sleep = sleep
        self._route_to = route_to
        self._get_version: Handler | None = None
        self._is_hooked = False
        """Whether the engine has `rollway/engine/core.py`: it takes refits, and refuses requests of
        other versions than its label."""
        self._engine_label: int | None = None
        """The label that the engine has for certain. Without one it admits every request, so
        nobody knows which version samples it."""
        self._running: set[asyncio.Task[dict[str, Any]]] = set()
        self._staging: set[asyncio.Task[list[Any]]] = set()
        self._switches: dict[str, list[tuple[int, int]]] = {}
        """Requests in flight that were frozen during a refit: from which token on which version."""

    def wrap(self, route: str, handler: Handler) -> Handler:
        """Return the handler for a route of Dynamo that reads or changes the label."""
        if route in LABELLING:
            return self._label_engine_after(handler)
        if route == "get_weight_version":
            self._get_version = handler
            return self._add_facts(handler)
        return handler

    async def run(self, body: dict[str, Any]) -> dict[str, Any]:
        """Move this worker to staged weights: out of the routing, refit in the engine, back in."""
        # A task of its own: an order that has begun ends, also if the caller is gone.
        task = asyncio.create_task(self._refit(body))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _refit(self, body: dict[str, Any]) -> dict[str, Any]:
        handler, sleep = self._handler, self._sleep
        async with handler._pause_lock:
            label = read_label(handler)
            if label != body["label"]:
                return _make_refusal(f"its label is {label}, and not {body['label']}")
            clock = _Clock()
            handler._weight_version = body["leaving"]
            await self._route_to([])
            clock.lap("leave")
            arguments = {name: body[name] for name in ("identity", "mode", "version", "leaving")}
            arguments["release"] = bool(body.get("release"))
            try:
                report = await self._call_engine("rollway_refit", arguments)
            except Exception as error:  # noqa: BLE001 (the caller decides)
                handler._paused = True
                sleep.kept = None  # a wake must not restore weights that may be half written
                _end_if_engine_is_dead(handler, error)
                return {"status": "error", "state": "in doubt", "message": str(error)}
            clock.lap("engine")
            if report["state"] != "served":
                handler._weight_version = label
                # A worker that was paused before stays paused, and gets no requests.
                await self._route_to([] if handler._paused else body["taints_before"])
                return _make_refusal(report["error"])
            self._engine_label = body["version"]
            memory = {}
            if sleep.level:
                try:
                    memory = await sleep.wake_cache()
                except Exception as error:  # noqa: BLE001 (it goes into the answer)
                    return {"status": "error", "state": "asleep", "message": str(error)}
                clock.lap("wake")
            handler._paused = False
            for request_id, tokens in report.pop("frozen").items():
                # vLLM appends a random part to Dynamo's id of the request.
                switches = self._switches.get(request_id.rpartition("-")[0])
                if switches is not None:
                    switches.append((tokens, body["version"]))
            await self._route_to(body["taints"])
            # Last: a worker that is labelled with a version serves it.
            handler._weight_version = body["version"]
            clock.lap("enter")
            reply = {"status": "ok", "report": report, "seconds": clock.seconds}
            return reply | ({"memory": memory} if memory else {})

    async def cancel(self, _: dict[str, Any]) -> dict[str, Any]:
        """End a refit that still waits for running requests."""
        # Without the lock, which that refit holds.
        await self._call_engine("rollway_cancel", {})
        return {"status": "ok"}

    def stamp(self, generate: Callable[..., AsyncIterator[Any]]) -> Callable[..., Any]:
        """Return Dynamo's `generate`, with the versions of the tokens in its last chunk for
        requests that ask for them. The engine refuses a request of another version, so the first
        token is of the version that the request names."""

        async def run(request: Any, context: Any) -> AsyncIterator[Any]:
            version = self._find_version(request)
            if version is None:
                async for chunk in generate(request, context):
                    yield chunk
                return
            request_id = context.id()
            switches = self._switches[request_id] = [(0, version)]
            try:
                async for chunk in generate(request, context):
                    if isinstance(chunk, dict) and chunk.get("finish_reason"):
                        # A refit that is running may have frozen this request.
                        await asyncio.gather(*self._running, return_exceptions=True)
                        data = chunk.get("engine_data") or {}
                        chunk["engine_data"] = {**data, STAMPS: switches}
                    yield chunk
            finally:
                del self._switches[request_id]

        return run

    def is_stamped(self, request_id: str) -> bool:
        """Return whether a running request gets stamps: only Rollway's own clients ask for them."""
        return request_id in self._switches

    def _find_version(self, request: Any) -> int | None:
        """Return the version that a request names, if it asks for stamps and the engine has a
        label. The request then no longer asks for `engine_data`, which carries the stamps to the
        client: Dynamo would collect all tokens and log-probs there once more."""
        arguments = request.get("extra_args") if isinstance(request, dict) else None
        nvext = arguments.get("nvext") if isinstance(arguments, dict) else None
        fields = nvext.get("extra_fields") if isinstance(nvext, dict) else None
        if nvext is None or not isinstance(fields, list) or STAMPS not in fields:
            return None
        if self._engine_label is None:
            return None
        nvext["extra_fields"] = [name for name in fields if name not in (STAMPS, "engine_data")]
        match = re.match(r"v(\d+)(?::|$)", str(nvext.get("cache_salt") or ""))
        return int(match[1]) if match else None

    async def stage(self, body: dict[str, Any]) -> dict[str, Any]:
        """Have the engine stage weights. Return the state of every rank once that has ended, or
        after `seconds`; the label; and whether `rollway_refit` works here. Where it does not,
        nothing is staged. With `needs_label`, do nothing in a worker without a label: it is still
        starting."""
        ranks: list[Any] = []
        if not self._is_hooked:
            await self._label_engine()
        is_starting = body["needs_label"] and await self._read_version() is None
        if self._is_hooked and not is_starting:
            # An engine may take longer to begin than a caller waits to see that the worker lives.
            # The caller then repeats the order, and the engine continues what it has begun.
            task = asyncio.create_task(self._stage(body))
            self._staging.add(task)
            task.add_done_callback(self._staging.discard)
            task.add_done_callback(lambda t: t.cancelled() or t.exception())  # it may be late
            is_done = (await asyncio.wait({task}, timeout=body["seconds"]))[0]
            try:
                ranks = task.result() if is_done else [{"state": "running", "error": ""}]
            except Exception as error:  # noqa: BLE001 (the caller decides)
                _end_if_engine_is_dead(self._handler, error)
                return {"status": "error", "message": str(error)}
        # At the end: the refit that follows is refused unless the worker still has this label.
        facts = {"label": await self._read_version(), "asleep": self._sleep.level}
        return {"status": "ok", "ranks": ranks, "refits": self._is_hooked, **facts}

    async def discard(self, body: dict[str, Any]) -> dict[str, Any]:
        """Free staged weights that will not be served; a worker that slept sleeps again."""
        await self._call_engine("rollway_unstage", {"identity": body["identity"]})
        await self._sleep.sleep_again()
        return {"status": "ok"}

    async def _stage(self, body: dict[str, Any]) -> list[Any]:
        await self._sleep.wake_weights()
        wait, call = _ASK_SECONDS, self._handler.engine_client.collective_rpc
        with _open_notifications() as (socket_name, notifications):
            arguments = {name: body[name] for name in ("offer", "allow_cast")}
            ranks = await call("rollway_stage", kwargs={**arguments, "tell": socket_name})
            missing = len(ranks)
            while True:
                # A rank on another machine cannot reach the socket, so it is asked repeatedly.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        for _ in range(max(1, missing)):
                            await notifications.get()
                            missing -= 1
                states = await call("rollway_staging", kwargs={"identity": body["identity"]})
                if all(state["state"] != "running" for state in states):
                    return list(states)
                wait = min(2.0, 2 * wait)

    async def _read_version(self) -> Any:
        """Return the label as Dynamo's own route does."""
        if self._get_version is None:
            return read_label(self._handler)
        return (await self._get_version({})).get("version")

    def _label_engine_after(self, handler: Handler) -> Handler:
        async def run(body: dict[str, Any]) -> dict[str, Any]:
            reply = await handler(body)
            if reply.get("status") == "ok":
                await self._label_engine()
            return reply

        return run

    def _add_facts(self, handler: Handler) -> Handler:
        async def run(body: dict[str, Any]) -> dict[str, Any]:
            reply = await handler(body)
            # Refits and sleep pause the engine, too, and take its label away.
            is_paused = self._handler._paused and (read_label(self._handler) or 0) >= 0
            facts = {"enforced": self._is_hooked, "asleep": self._sleep.level}
            return {**reply, **facts, "paused": bool(is_paused)}

        return run

    async def _label_engine(self) -> None:
        """Have the engine refuse requests of other versions than the worker's label."""
        label, self._engine_label = read_label(self._handler), None
        try:
            self._is_hooked = bool(await self._call_engine("rollway_label", {"label": label}))
        except Exception as error:  # noqa: BLE001 (an engine without the extension, or a dead one)
            self._is_hooked = False
            log.debug("the engine has no label: %s", error)
        self._engine_label = label if self._is_hooked else None

    async def _call_engine(self, method: str, arguments: dict[str, Any]) -> Any:
        results = await self._handler.engine_client.collective_rpc(method, kwargs=arguments)
        return results[0]


def read_label(handler: Any) -> int | None:
    """Return a worker's label; None if it has none, and -1, in doubt, for one of another tool."""
    label = getattr(handler, "_weight_version", None)
    if isinstance(label, str):
        return int(label) if re.fullmatch(r"-?\d+", label) else -1
    return label if isinstance(label, int) and not isinstance(label, bool) else None


@contextlib.contextmanager
def _open_notifications() -> Iterator[tuple[str, asyncio.Queue[None]]]:
    """Yield the name of a Unix socket, and a queue with an entry for each connection to it.

    The event loop watches the socket itself: a server of asyncio takes five turns of the loop
    until its handler runs, and with many streams each turn takes tens of milliseconds."""
    name = f"rollway/staged/{secrets.token_hex(8)}"
    queue: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def accept() -> None:
        with contextlib.suppress(BlockingIOError):  # somebody else accepted it
            server.accept()[0].close()
            queue.put_nowait(None)

    with socket.socket(socket.AF_UNIX) as server:
        server.setblocking(False)
        server.bind(f"\0{name}")
        server.listen()
        loop.add_reader(server, accept)
        try:
            yield name, queue
        finally:
            loop.remove_reader(server)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._began = now - self._began, now


def _make_refusal(reason: str) -> dict[str, Any]:
    return {"status": "error", "state": "refused", "message": reason}


def _end_if_engine_is_dead(handler: Any, error: Exception) -> None:
    if type(error).__name__ == "EngineDeadError":
        handler._shutdown_on_engine_dead(error)
