"""Start a Dynamo worker whose admin routes accept only signed orders: `guard.py MODULE ARGUMENTS…`.

Dynamo 1.6.1 serves its admin routes on a TCP port without credentials, and cannot serve them on a
Unix socket. But Python code registers all of them with one method. The guard wraps that method
before the worker's own module runs, so no route is ever open, and no proxy is needed.
`rollway/signed_calls.py` draws the exchange.

It also adds orders of its own: those of a refit (`rollway/engine/refit_orders.py`), and sleep and
wake (`rollway/engine/sleep_orders.py`). And a worker that starts after a refit stays out of routing
until it is refitted, too: it has the base weights, and plain requests require no version.

This is a script, not a module of the package, because the engine's Python may lack Rollway.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import runpy
import secrets
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("rollway.guard")

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
LORA_ENDPOINTS = ("load_lora", "unload_lora")
"""Dynamo also serves these on the request plane, where they cannot be signed."""
TAINTS = "update/model_taints"
UPDATES = ("update_weights_from_disk", "update_weights_from_distributed")
BASE_TAINT = "rollway-v0"
"""The taint of workers with the weights that they started with (`rollway.versions.taint_of`)."""
STOP_SECONDS = 10.0
"""How long the engine's process may take to exit. Requests are aborted first, so this is the time
to free memory; a stack waits 20 s before it kills a worker (`stop_seconds`)."""


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


orders = _load("rollway_orders", Path(__file__).resolve().parents[1] / "signed_calls.py")
sleep_orders = _load("rollway_sleep_orders", Path(__file__).resolve().with_name("sleep_orders.py"))
refit_orders = _load("rollway_refit_orders", Path(__file__).resolve().with_name("refit_orders.py"))


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

    def open_door(self, own: EngineOrders) -> Handler:
        """Return the handler that names this process; an order for it is useless anywhere else."""

        async def answer(_: dict[str, Any]) -> dict[str, Any]:
            return {"status": "ok", "process": self.verifier.process, "held": own.is_held}

        return answer

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
        self._sleep: Any = None
        """`SleepOrders` of the engine behind the handler."""
        self.refit: Any = None
        """`RefitOrders` of the same engine."""
        self._entry: asyncio.Future[bool] | None = None
        """While the worker is held: whether it is to serve in the end."""

    def wrap(self, route: str, handler: Handler) -> Handler:
        """Return the handler for one of Dynamo's routes, and remember what orders need of it."""
        wrapped = self._add_orders(route, handler)
        if route not in (TAINTS, *UPDATES):
            return wrapped

        async def follow_refit(body: dict[str, Any]) -> dict[str, Any]:
            """Let a held worker serve that has got other weights: by calls, which update it while
            it is paused, or by an order, which sets its taint. Record for workers that start later
            that there was a refit."""
            taints, refitted = body.get("taints"), os.environ.get(orders.REFITTED_FILE)
            has_entered = bool(taints) and taints != [BASE_TAINT]
            if refitted and has_entered:
                Path(refitted).touch()
            reply = await wrapped(body)
            is_updated = "weight_version" in body and reply.get("status") == "ok"
            if has_entered or is_updated:
                self.end_hold(serves=True)
            return reply

        if route == TAINTS:
            self._set_taints = follow_refit
        return follow_refit

    def _add_orders(self, route: str, handler: Handler) -> Handler:
        owner: Any = getattr(handler, "__self__", None)
        if all(hasattr(owner, name) for name in ("engine_client", "_pause_lock")):
            self._handler = owner
            give_time_to_stop(owner.engine_client)
            self._sleep = self._sleep or sleep_orders.SleepOrders(owner, self._route_to)
            self.refit = self.refit or refit_orders.RefitOrders(owner, self._sleep, self._route_to)
        if self._handler is None or owner is not self._handler:
            return handler
        wrapped: Handler = self.refit.wrap(route, self._sleep.protect(route, handler))
        return wrapped

    def belongs_to(self, owner: object) -> bool:
        """Return whether these are the orders of the worker with this handler."""
        return self._handler is not None and owner is self._handler

    def list_own(self) -> dict[str, Handler]:
        """Return the orders that this worker can run."""
        if self._handler is None:
            return {}
        return {
            orders.REFIT: self.refit.run,
            orders.CANCEL: self.refit.cancel,
            orders.STAGE: self.refit.stage,
            orders.DISCARD: self.refit.discard,
            orders.SLEEP: self._sleep.sleep,
            orders.WAKE: self._sleep.wake,
            orders.MEMORY: self._sleep.read_memory,
        }

    @property
    def is_held(self) -> bool:
        """Whether the worker is kept out of routing until it is refitted."""
        return self._entry is not None and not self._entry.done()

    async def hold(self, serve: Callable[[], Awaitable[Any]]) -> None:
        """Serve requests once the worker is refitted."""
        log.warning("other workers were refitted: this one is out of routing until it is, too")
        self._entry = asyncio.get_running_loop().create_future()
        if await self._entry:
            await serve()

    def end_hold(self, *, serves: bool) -> None:
        if self._entry is not None and not self._entry.done():
            self._entry.set_result(serves)

    async def _route_to(self, taints: list[str]) -> None:
        if self._set_taints is not None:
            await self._set_taints({"taints": taints})


def give_time_to_stop(engine_client: Any) -> None:
    """Let the engine's process end by itself when the worker stops.

    Dynamo 1.6.1 passes vLLM's time for draining requests, which is 0, as the time for the process
    to exit, and vLLM 0.31 then kills it at once, except on ROCm."""
    shutdown = getattr(engine_client, "shutdown", None)
    if shutdown is None or hasattr(engine_client, "_rollway_stop"):
        return

    def stop(timeout: float | None = None) -> None:
        shutdown(timeout=STOP_SECONDS if timeout == 0 else timeout)

    engine_client.shutdown = engine_client._rollway_stop = stop


def cache_environment() -> None:
    """Have vLLM read its environment variables once in this process, as it does in the engine's.

    It reads some for every chunk of tokens that it sends: a quarter of the time of that work."""
    envs = sys.modules.get("vllm.envs")
    if envs is not None and hasattr(envs, "enable_envs_cache"):
        envs.enable_envs_cache()


def freeze_heap() -> None:
    """Exempt everything that exists from garbage collection, as vLLM does in its own processes.

    Dynamo's worker does not. With vLLM imported it has 680,000 objects, and whenever Python
    searches all of them, its event loop stands still for 0.4 s: streams, and the calls of a
    refit."""
    gc.collect()
    gc.freeze()


def send_plain_logprobs(engine_client: Any, is_own: Callable[[str], bool]) -> None:
    """Let the log-probs of sampled tokens reach Dynamo as numbers, for requests of Rollway's own
    clients, which ask for no others.

    Dynamo 1.6.1 decodes each of these tokens to text and describes it in a dictionary, for the
    alternatives that nobody asked for. With 256 rollouts at once, 16,000 tokens come at a time, and
    the event loop answers nothing else meanwhile. It accepts numbers as they are."""
    generate = getattr(engine_client, "generate", None)
    if generate is None:
        return  # not vLLM's client: a worker of another engine, which takes the same orders

    def run(prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        is_plain = (
            getattr(sampling_params, "logprobs", None) == 0
            and getattr(sampling_params, "prompt_logprobs", None) is None
            and hasattr(sampling_params, "flat_logprobs")
        )
        if not is_plain or not is_own(request_id):
            return generate(prompt, sampling_params, request_id, *args, **kwargs)
        sampling_params.flat_logprobs = True
        return _pass_numbers(generate(prompt, sampling_params, request_id, *args, **kwargs))

    engine_client.generate = run


async def _pass_numbers(outputs: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
    async with contextlib.aclosing(outputs):
        async for result in outputs:
            for output in result.outputs:
                numbers = getattr(output.logprobs, "logprobs", None)
                if numbers is not None and len(numbers) == len(output.token_ids):
                    output.logprobs = numbers
            yield result


def install(guard: Guard) -> None:
    """Guard every admin route that this process registers from now on."""
    core: Any = importlib.import_module("dynamo._core")
    register = core.DistributedRuntime.register_engine_route
    serve = core.Endpoint.serve_endpoint
    unregister = core.Endpoint.unregister_endpoint_instance
    workers: list[tuple[Any, EngineOrders]] = []  # a process may hold several

    def register_engine_route(runtime: Any, route: str, handler: Handler) -> None:
        own = next((own for known, own in workers if known is runtime), None)
        if own is None:
            own = EngineOrders()
            workers.append((runtime, own))
            register(runtime, orders.DOOR, guard.open_door(own))
        register(runtime, route, guard.protect(route, own.wrap(route, handler)))
        if route == "set_weight_version":
            for name, order in own.list_own().items():
                register(runtime, name, guard.protect(name, order))

    def serve_endpoint(endpoint: Any, handler: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(handler, "__name__", "")
        if name in LORA_ENDPOINTS:
            handler = guard.refuse_endpoint(name)
        owner: Any = getattr(handler, "__self__", None)
        if name == "generate":
            for _, own in workers:
                if own.belongs_to(owner):
                    send_plain_logprobs(owner.engine_client, own.refit.is_stamped)
                    handler = own.refit.stamp(handler)
                    cache_environment()  # the engine has started, so nothing sets variables now
                    freeze_heap()
            if Path(os.environ.get(orders.REFITTED_FILE, "/nowhere")).exists():
                # The routes of a worker are registered before its endpoint.
                return workers[-1][1].hold(lambda: serve(endpoint, handler, *args, **kwargs))
        return serve(endpoint, handler, *args, **kwargs)

    def unregister_endpoint_instance(endpoint: Any) -> Any:
        # Dynamo does this when the process is to end.
        for _, own in workers:
            own.end_hold(serves=False)
        return unregister(endpoint)

    core.DistributedRuntime.register_engine_route = register_engine_route
    core.Endpoint.serve_endpoint = serve_endpoint
    core.Endpoint.unregister_endpoint_instance = unregister_endpoint_instance


def main() -> None:
    """Run MODULE like `python -m MODULE`, guarded."""
    if len(sys.argv) < 2:
        sys.exit("usage: guard.py MODULE ARGUMENTS…")
    sys.argv[:] = sys.argv[1:]
    sys.path[0] = str(Path.cwd())  # like `-m`, instead of this file's directory
    if os.environ.get(orders.SECRET_FILE) and not orders.read_stack_secret():
        sys.exit(f"The file of the stack's secret is gone: {os.environ[orders.SECRET_FILE]}")
    install(Guard(orders.read_stack_secret()))
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        # Python would search all objects for garbage before it exits: 2 s of CPU time.
        gc.freeze()


if __name__ == "__main__":
    main()
