"""Starts a Dynamo worker whose admin routes accept only signed orders: `guard.py MODULE
ARGUMENTS…`.

Dynamo 1.6.1 serves its admin routes on a TCP port without credentials, and cannot serve them on a
Unix socket. But Python code registers all of them with one method. The guard wraps that method
before the worker's own module runs, so no route is ever open, and no proxy is needed.
`rollway/orders.py` draws the exchange.

This is a script, not a module of the package, because the engine's Python may lack Rollway.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import runpy
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("rollway.guard")

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
LORA_ENDPOINTS = ("load_lora", "unload_lora")
"""Dynamo also serves these on the request plane, where they cannot be signed."""


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


def install(guard: Guard) -> None:
    """Guard every admin route that this process registers from now on."""
    core: Any = importlib.import_module("dynamo._core")
    register = core.DistributedRuntime.register_engine_route
    serve = core.Endpoint.serve_endpoint
    doors: list[Any] = []

    def register_engine_route(runtime: Any, route: str, handler: Handler) -> None:
        if not any(runtime is known for known in doors):  # a process may hold several workers
            doors.append(runtime)
            register(runtime, orders.DOOR, guard.answer_door)
        register(runtime, route, guard.protect(route, handler))

    def serve_endpoint(endpoint: Any, handler: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(handler, "__name__", "")
        if name in LORA_ENDPOINTS:
            handler = guard.refuse_endpoint(name)
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
