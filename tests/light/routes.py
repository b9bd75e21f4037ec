"""The admin routes of a `dynamo.vllm --enable-rl` worker: same bodies, same answers, same faults.

An error is an answer with `status: error`. What the routes do not notice is left unnoticed: a
refused flush, an incomplete checkpoint, a version nobody checks.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from tests.light.engine import Engine
from tests.light.orders import EngineClient

Body = dict[str, Any]
Route = Callable[[Body], Awaitable[Body]]
R = TypeVar("R", bound="AdminRoutes")

_UNDECLARED = object()
_NOT_KWARGS = {"allow_unpaused", "engine_rpc", "reset_prefix_cache", "weight_version"}
_MUST_BE_PAUSED = (
    "Worker must be paused via pause_generation() before updating weights. Call "
    "pause_generation() first, then update, then resume_generation()."
)


def _route(
    handler: Callable[[R, Body], Awaitable[Body]],
) -> Callable[[R, Body | None], Awaitable[Body]]:
    """Give a handler the body check and the error answer that all routes have."""

    @functools.wraps(handler)
    async def checked(self: R, body: Body | None) -> Body:
        if body is not None and not isinstance(body, dict):
            return _error("request body must be a JSON object")
        try:
            return await handler(self, body or {})
        except Exception as error:  # noqa: BLE001 - whatever it is, it goes into the answer
            return _error(str(error))

    return checked


class AdminRoutes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        if os.environ.get("LIGHT_FOREIGN") != "1":
            self.engine_client = EngineClient(engine)  # by which Rollway's guard knows it
        self._pause_lock = asyncio.Lock()
        self._paused = False
        self._weight_version: Any = _UNDECLARED
        self._load_seconds = float(os.environ.get("LIGHT_LOAD_SECONDS", "0"))

    async def generate(self, request: Body, context: Any) -> AsyncIterator[Body]:
        """Generate by the object that has the routes, as in Dynamo's vLLM workers: the guard stamps
        the answers of that object's `generate`."""
        async for chunk in self._engine.generate(request, context):
            yield chunk

    def table(self) -> dict[str, Route]:
        names = [
            "liveness_probe",
            "pause_generation",
            "resume_generation",
            "flush_cache",
            "abort_request",
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "init_weights_update_group",
            "destroy_weights_update_group",
            "get_weight_version",
            "set_weight_version",
        ]
        return {name: getattr(self, name) for name in names}

    @_route
    async def liveness_probe(self, body: Body) -> Body:
        return {"status": "ok", "alive": True}  # also with destroyed weights

    @_route
    async def pause_generation(self, body: Body) -> Body:
        mode, clear_cache = body.get("mode", "keep"), bool(body.get("clear_cache", False))
        if mode not in ("keep", "wait", "abort"):
            return _error(f"Invalid mode '{mode}'; expected keep|wait|abort")
        async with self._pause_lock:
            await self._engine.pause(mode, clear_cache)
            self._paused = True
        return {
            "status": "ok",
            "message": "Engine paused",
            "mode": mode,
            "clear_cache": clear_cache,
        }

    @_route
    async def resume_generation(self, body: Body) -> Body:
        async with self._pause_lock:
            self._engine.resume()
            self._paused = False
        return {"status": "ok", "message": "Engine resumed"}

    @_route
    async def flush_cache(self, body: Body) -> Body:
        async with self._pause_lock:
            self._engine.reset_prefix_cache()
        return {"status": "ok", "message": "Cache flushed"}  # also when it was refused

    @_route
    async def abort_request(self, body: Body) -> Body:
        request_id = body.get("request_id")
        if not request_id:
            return _error("Missing 'request_id' in body")
        self._engine.abort(request_id)
        return {"status": "ok", "request_id": request_id}

    @_route
    async def get_weight_version(self, body: Body) -> Body:
        declared = self._weight_version is not _UNDECLARED
        version = self._weight_version if declared else None
        return {"status": "ok", "version": version, "version_declared": declared}

    @_route
    async def set_weight_version(self, body: Body) -> Body:
        if "weight_version" not in body:
            return _error("Missing 'weight_version' in body")
        self._weight_version = body["weight_version"]
        return {"status": "ok", "version": self._weight_version}

    @_route
    async def update_weights_from_disk(self, body: Body) -> Body:
        async with self._pause_lock:
            if not self._paused:
                return _error(_MUST_BE_PAUSED)
            path = body.get("model_path")
            if not path:
                return _error("Missing 'model_path' in body")
            rpc = body.get("engine_rpc", "reload_weights")
            keyword = "weights_path" if rpc == "reload_weights" else "weight_path"
            return await self._update(rpc, {keyword: path}, body, reset=True)

    @_route
    async def update_weights_from_distributed(self, body: Body) -> Body:
        unpaused, reset = body.get("allow_unpaused", False), body.get("reset_prefix_cache", True)
        if not isinstance(unpaused, bool):
            return _error("'allow_unpaused' must be a boolean")
        if not isinstance(reset, bool):
            return _error("'reset_prefix_cache' must be a boolean")
        if unpaused and reset:
            return _error(
                "Unpaused weight updates cannot reset the prefix cache. "
                "Set 'reset_prefix_cache' to false or pause generation first."
            )
        async with self._pause_lock:
            if not self._paused and not unpaused:
                return _error(_MUST_BE_PAUSED)
            rpc = body.get("engine_rpc", "update_weights_from_path")
            kwargs = {name: value for name, value in body.items() if name not in _NOT_KWARGS}
            return await self._update(rpc, kwargs, body, reset=reset)

    @_route
    async def update_weights_from_tensor(self, body: Body) -> Body:
        return _error("update_weights_from_tensor is not implemented")

    @_route
    async def init_weights_update_group(self, body: Body) -> Body:
        return await self._group(body, "init_broadcaster", "initialized")

    @_route
    async def destroy_weights_update_group(self, body: Body) -> Body:
        return await self._group(body, "destroy_broadcaster", "destroyed")

    async def _update(self, rpc: str, kwargs: Body, body: Body, *, reset: bool) -> Body:
        if not body.get("allow_unpaused"):  # then it may load nothing
            await asyncio.sleep(self._load_seconds)  # the time to load a real model
        self._engine.worker.call(rpc, kwargs)
        if reset:
            self._engine.reset_prefix_cache()  # a refusal is not noticed here either
        declared = "weight_version" in body
        version = body.get("weight_version", "unknown")
        if declared:
            self._weight_version = version
        return {"status": "ok", "version": version, "version_declared": declared}

    async def _group(self, body: Body, default: str, done: str) -> Body:
        kwargs = {name: value for name, value in body.items() if name != "engine_rpc"}
        async with self._pause_lock:
            self._engine.worker.call(body.get("engine_rpc", default), kwargs)
        return {"status": "ok", "message": f"Weight update group {done}"}


def _error(message: str) -> Body:
    return {"status": "error", "message": message}
