"""Starts a Dynamo worker whose admin routes accept only signed orders: `guard.py MODULE
ARGUMENTS…`.

Dynamo 1.6.1 serves its admin routes on a TCP port without credentials, and cannot serve them on a
Unix socket. But Python code registers all of them with one method. The guard wraps that method
before the worker's own module runs, so no route is ever open, and no proxy is needed.
`rollway/orders.py` draws the exchange.

It also adds orders of its own: `rollway_refit` runs a whole refit next to the engine (drawn in
`rollway/engine/core.py`), and `rollway_staging` returns what `collective_rpc` returns, which
Dynamo's routes do not.

This is a script, not a module of the package, because the engine's Python may lack Rollway.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import re
import runpy
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("rollway.guard")

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
LORA_ENDPOINTS = ("load_lora", "unload_lora")
"""Dynamo also serves these on the request plane, where they cannot be signed."""
LABELLING = ("set_weight_version", "update_weights_from_disk", "update_weights_from_distributed")
"""Routes that change the label of the worker."""
TAINTS = "update/model_taints"
STAMPS = "rollway_versions"
"""The extra field by which a request asks for the versions of its tokens."""


def _load_orders() -> Any:
    path = Path(__file__).resolve().parents[1] / "orders.py"
    spec = importlib.util.spec_from_file_location("rollway_orders", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


orders = _load_orders()


class Guard:
    """Verifies the orders of one process, and counts refusals."""

    def __init__(self, secret: str) -> None:
        self.verifier = orders.Verifier(secret, secrets.token_hex(16))
        self._refusals = 0

    def protect(self, route: str, handler: Handler) -> Handler:
        """Return a handler that runs `handler` only for signed orders."""

        async def run_order(body: dict[str, Any]) -> dict[str, Any]:
            order = body.get(orders.ORDER) if isinstance(body, dict) else None
            if order is None and route in orders.READ_ONLY:
                return await handler(body)
            try:
                arguments = self.verifier.open(route, order)
            except orders.OrderRefused as refusal:
                self._log_refusal(route, refusal)
                return {"status": "error", "message": str(refusal)}
            return await handler(arguments)

        return run_order

    async def answer_door(self, _: dict[str, Any]) -> dict[str, Any]:
        """Return the id of this process; an order for it is useless anywhere else."""
        return {"status": "ok", "process": self.verifier.process}

    def refuse_endpoint(self, name: str) -> Callable[..., AsyncIterator[dict[str, Any]]]:
        """Return a handler for an endpoint of the request plane that must not be served there."""

        async def refuse(*_: Any, **__: Any) -> AsyncIterator[dict[str, Any]]:
            self._log_refusal(name, orders.UNSIGNED)
            yield {"status": "error", "message": orders.UNSIGNED}

        return refuse

    def _log_refusal(self, route: str, reason: object) -> None:
        """Log at each power of two, so that endless refused calls do not fill the disk."""
        self._refusals += 1
        if self._refusals & (self._refusals - 1) == 0:
            log.warning("refused a call of %s (refusal %d): %s", route, self._refusals, reason)


class EngineOrders:
    """Orders that Rollway adds to one worker, beside Dynamo's own."""

    def __init__(self) -> None:
        self._handler: Any = None
        """Dynamo's object behind the RL routes; it holds the engine's client and the label."""
        self._set_taints: Handler | None = None
        self._is_enforced = False
        """Whether the engine refuses requests of other versions than its label."""
        self._running: set[asyncio.Task[dict[str, Any]]] = set()
        self._switches: dict[str, list[tuple[int, int]]] = {}
        """Requests in flight that were frozen during a refit: from which token on which version."""

    def wrap(self, route: str, handler: Handler) -> Handler:
        """Return the handler for one of Dynamo's routes, and remember what orders need of it."""
        if route == TAINTS:
            self._set_taints = handler
        owner = getattr(handler, "__self__", None)
        if all(hasattr(owner, name) for name in ("engine_client", "_pause_lock")):
            self._handler = owner
        if self._handler is None or owner is not self._handler:
            return handler
        if route in LABELLING:
            return self._label_engine_after(handler)
        if route == "get_weight_version":
            return self._read_label(handler)
        return handler

    def belongs_to(self, owner: object) -> bool:
        """Return whether these are the orders of the worker with this handler."""
        return self._handler is not None and owner is self._handler

    def list_own(self) -> dict[str, Handler]:
        """Return the orders that this worker can run."""
        if self._handler is None:
            return {}
        return {
            orders.REFIT: self.run_refit,
            orders.CANCEL: self.cancel_refit,
            orders.STAGING: self.read_staging,
        }

    async def run_refit(self, body: dict[str, Any]) -> dict[str, Any]:
        """Move this worker to staged weights: out of the routing, refit in the engine, back in."""
        # A task of its own: an order that has begun ends, also if the caller is gone.
        task = asyncio.create_task(self._refit(body))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _refit(self, body: dict[str, Any]) -> dict[str, Any]:
        handler = self._handler
        async with handler._pause_lock:
            label = read_label(handler)
            if label != body["label"]:
                return _refusal(f"its label is {label}, and not {body['label']}")
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
                _end_if_engine_is_dead(handler, error)
                return {"status": "error", "state": "in doubt", "message": str(error)}
            clock.lap("engine")
            if report["state"] != "served":
                handler._weight_version = label
                await self._route_to(body["taints_before"])
                return _refusal(report["error"])
            handler._paused = False
            self._is_enforced = True
            for request_id, tokens in report.pop("frozen").items():
                # vLLM appends a random part to Dynamo's id of the request.
                switches = self._switches.get(request_id.rpartition("-")[0])
                if switches is not None:
                    switches.append((tokens, body["version"]))
            await self._route_to(body["taints"])
            # Last: a worker that is labelled with a version serves it.
            handler._weight_version = body["version"]
            clock.lap("enter")
            return {"status": "ok", "report": report, "seconds": clock.seconds}

    async def cancel_refit(self, _: dict[str, Any]) -> dict[str, Any]:
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

    def _find_version(self, request: Any) -> int | None:
        """Return the version that a request names, if it asks for stamps and the engine enforces
        versions. The request then no longer asks for `engine_data`, which carries the stamps to the
        client: Dynamo would collect all tokens and log-probs there once more."""
        arguments = request.get("extra_args") if isinstance(request, dict) else None
        nvext = arguments.get("nvext") if isinstance(arguments, dict) else None
        fields = nvext.get("extra_fields") if isinstance(nvext, dict) else None
        if nvext is None or not isinstance(fields, list) or STAMPS not in fields:
            return None
        if not self._is_enforced:
            return None
        nvext["extra_fields"] = [name for name in fields if name not in (STAMPS, "engine_data")]
        match = re.match(r"v(\d+)(?::|$)", str(nvext.get("cache_salt") or ""))
        return int(match[1]) if match else None

    async def read_staging(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a staging in every rank, and whether `rollway_refit` works here."""
        results = await self._handler.engine_client.collective_rpc(
            "rollway_staging", kwargs={"identity": body["identity"]}
        )
        if not self._is_enforced:
            await self._label_engine()
        return {"status": "ok", "ranks": results, "refits": self._is_enforced}

    def _label_engine_after(self, handler: Handler) -> Handler:
        async def run(body: dict[str, Any]) -> dict[str, Any]:
            reply = await handler(body)
            await self._label_engine()
            return reply

        return run

    def _read_label(self, handler: Handler) -> Handler:
        async def run(body: dict[str, Any]) -> dict[str, Any]:
            return {**await handler(body), "enforced": self._is_enforced}

        return run

    async def _label_engine(self) -> None:
        """Have the engine refuse requests of other versions than the worker's label."""
        arguments = {"label": read_label(self._handler)}
        try:
            self._is_enforced = bool(await self._call_engine("rollway_label", arguments))
        except Exception as error:  # noqa: BLE001 (an engine without the extension, or a dead one)
            self._is_enforced = False
            log.debug("the engine has no label: %s", error)

    async def _call_engine(self, method: str, arguments: dict[str, Any]) -> Any:
        results = await self._handler.engine_client.collective_rpc(method, kwargs=arguments)
        return results[0]

    async def _route_to(self, taints: list[str]) -> None:
        if self._set_taints is not None:
            await self._set_taints({"taints": taints})


def read_label(handler: Any) -> int | None:
    """Return a worker's label; None if it has none, or one of another tool."""
    label = getattr(handler, "_weight_version", None)
    if isinstance(label, str) and re.fullmatch(r"-?\d+", label):
        return int(label)
    return label if isinstance(label, int) and not isinstance(label, bool) else None


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._began = now - self._began, now


def _refusal(reason: str) -> dict[str, Any]:
    return {"status": "error", "state": "refused", "message": reason}


def _end_if_engine_is_dead(handler: Any, error: Exception) -> None:
    if type(error).__name__ == "EngineDeadError":
        handler._shutdown_on_engine_dead(error)


def install(guard: Guard) -> None:
    """Guard every admin route that this process registers from now on."""
    core: Any = importlib.import_module("dynamo._core")
    register = core.DistributedRuntime.register_engine_route
    serve = core.Endpoint.serve_endpoint
    workers: list[tuple[Any, EngineOrders]] = []  # a process may hold several

    def register_engine_route(runtime: Any, route: str, handler: Handler) -> None:
        own = next((own for known, own in workers if known is runtime), None)
        if own is None:
            own = EngineOrders()
            workers.append((runtime, own))
            register(runtime, orders.DOOR, guard.answer_door)
        register(runtime, route, guard.protect(route, own.wrap(route, handler)))
        if route == "set_weight_version":
            for name, order in own.list_own().items():
                register(runtime, name, guard.protect(name, order))

    def serve_endpoint(endpoint: Any, handler: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(handler, "__name__", "")
        if name in LORA_ENDPOINTS:
            handler = guard.refuse_endpoint(name)
        owner = getattr(handler, "__self__", None)
        if name == "generate":
            for _, own in workers:
                if own.belongs_to(owner):
                    handler = own.stamp(handler)
        return serve(endpoint, handler, *args, **kwargs)

    core.DistributedRuntime.register_engine_route = register_engine_route
    core.Endpoint.serve_endpoint = serve_endpoint


def main() -> None:
    """Run MODULE like `python -m MODULE`, guarded."""
    if len(sys.argv) < 2:
        sys.exit("usage: guard.py MODULE ARGUMENTS…")
    sys.argv[:] = sys.argv[1:]
    sys.path[0] = str(Path.cwd())  # like `-m`, instead of this file's directory
    if os.environ.get(orders.SECRET_FILE) and not orders.read_stack_secret():
        sys.exit(f"The file of the stack's secret is gone: {os.environ[orders.SECRET_FILE]}")
    install(Guard(orders.read_stack_secret()))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
