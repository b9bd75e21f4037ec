"""The admin calls to plain vLLM servers (`vllm serve`), over the routes of VLLM_SERVER_DEV_MODE=1.

This module keeps the rules that Dynamo enforces: a worker must be paused for an update, and an
update leaves no old cache block and declares its version. Dynamo does this in one call. Here it
takes several calls, so only one client may control a server. The server has these routes on the
port of its OpenAI API: everyone who can send prompts can replace the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rollway.errors import AdminError, RequestFailed, Unreachable
from rollway.fleet.admin import (
    Facts,
    NoSuchMethod,
    PauseMode,
    is_missing_method,
    parse_label,
    unwrap_engine_error,
)
from rollway.fleet.dynamo_admin import DynamoAdmin, refuse_order
from rollway.fleet.workers import Worker
from rollway.http import IDEMPOTENT, ONCE, Http, Retry, read_error_message
from rollway.spec import AdminTimeouts

_UNDECLARED = "default"  # vLLM's label until one is declared
# vLLM drops the connection after a 500. The next call on it would fail without having reached the
# server, and a call that is sent once is not retried: so every call gets a new connection.
_NEW_CONNECTION = {"connection": "close"}
_NO_ROUTE = "Not Found"  # FastAPI's text


class VllmAdmin(DynamoAdmin):
    """The same calls to vLLM's own server, whose base URL is `Worker.admin_url`."""

    taints = False

    def __init__(self, http: Http, timeouts: AdminTimeouts | None = None) -> None:
        self._http = http
        self._timeouts = timeouts or AdminTimeouts()

    def pin(self) -> AbstractAsyncContextManager[DynamoAdmin]:
        """Return this client: vLLM closes connections at any time, so none can be pinned. No
        supervisor of ours restarts its servers."""
        return nullcontext(self)

    async def pause(
        self, worker: Worker, mode: PauseMode = "wait", *, clear_cache: bool = True
    ) -> None:
        """Stop generating. vLLM clears the cache in every mode, although its documentation excepts
        `keep`: it recomputes frozen requests from their tokens at the resume."""
        query = {"mode": mode, "clear_cache": str(clear_cache).lower()}
        await self._call(worker, "pause", query=query, timeout=self._timeouts.pause)

    async def resume(self, worker: Worker) -> None:
        await self._call(worker, "resume", timeout=self._timeouts.pause)

    async def flush_cache(self, worker: Worker) -> None:
        reply = await self._call(worker, "reset_prefix_cache")
        if reply.get("success") is not True:
            raise AdminError(
                f"{worker} did not flush its cache: requests hold blocks, and none was dropped.",
                "Pause it with clear_cache first, or wait until nothing runs.",
            )

    async def update_from_disk(self, worker: Worker, path: Path, version: int) -> None:
        arguments = {"weights_path": str(path)}
        await self.update_distributed(worker, version, "reload_weights", arguments)

    async def update_distributed(
        self, worker: Worker, version: int, method: str, arguments: Mapping[str, Any]
    ) -> None:
        await self._check_ready(worker)
        await self._run(worker, method, arguments, self._timeouts.update)
        await self.declare_version(worker, version)

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        await self._run(worker, method, arguments, self._timeouts.pause)

    async def read(self, worker: Worker) -> Facts:
        """Return the label. Whether the worker is paused knows only the process that paused it."""
        reply = await self._get(worker, "weight_info")
        label = reply.get("weight_version")
        return Facts(None if label == _UNDECLARED else parse_label(label))

    async def declare_version(self, worker: Worker, version: int | None) -> None:
        """Set the label; None removes it."""
        label = _UNDECLARED if version is None else str(version)
        await self._call(worker, "update_weight_version", {"new_version": label})

    async def set_taints(self, worker: Worker, taints: Sequence[str]) -> None:
        """Do nothing: there is no router in front of a plain server. The client itself knows what
        the worker serves."""

    async def _post(self, worker: Worker, *_: Any, **__: Any) -> dict[str, Any]:
        """Refuse the calls that only Dynamo's workers take."""
        raise refuse_order(worker)

    async def _check_ready(self, worker: Worker) -> None:
        """Raise unless the worker is paused and its cache is empty, before any weight changes."""
        # Flushing before the update is enough, because a paused worker computes nothing. The flush
        # also finds running requests, which hold blocks: after a pause in mode `wait` the server
        # calls itself paused while they still run.
        reply = await self._get(worker, "is_paused")
        if reply.get("is_paused") is not True:
            raise AdminError(f"{worker} must be paused before its weights are updated.")
        await self.flush_cache(worker)

    async def _run(
        self, worker: Worker, method: str, arguments: Mapping[str, Any], timeout: float
    ) -> None:
        """Run an engine method, once: it may change weights."""
        # The route also accepts a `timeout`, which must not be used: an engine that stopped waiting
        # reads its workers' late answer as the answer to the next call, and from then on a failed
        # load may look like a success.
        body = {"method": method, "kwargs": dict(arguments)}
        try:
            await self._call(worker, "collective_rpc", body, method, timeout=timeout, retry=ONCE)
        except AdminError as error:
            if is_missing_method(method, error.message):
                raise NoSuchMethod(f"{worker} has no engine method `{method}`.") from error
            raise

    async def _get(self, worker: Worker, route: str) -> dict[str, Any]:
        url = _url(worker, route)
        try:
            reply = await self._http.get(url, timeout=self._timeouts.probe)
        except (RequestFailed, Unreachable) as error:
            raise _make_refusal(worker, route, error) from error
        return _check_reply(worker, route, reply)

    async def _call(
        self,
        worker: Worker,
        route: str,
        body: Mapping[str, Any] | None = None,
        name: str = "",
        *,
        query: Mapping[str, str] | None = None,
        timeout: float | None = None,
        retry: Retry = IDEMPOTENT,
    ) -> dict[str, Any]:
        """Call a route. `name` stands for the route in errors."""
        url = _url(worker, route) + (f"?{urlencode(query)}" if query else "")
        limit = timeout or self._timeouts.probe
        try:
            reply = await self._http.post(
                url, body, timeout=limit, retry=retry, headers=_NEW_CONNECTION
            )
        except (RequestFailed, Unreachable) as error:
            raise _make_refusal(worker, route, error, name) from error
        return _check_reply(worker, route, reply)


def _url(worker: Worker, route: str) -> str:
    if worker.error is not None:
        raise AdminError(f"{worker} is listed with an error: {worker.error}.")
    return f"{worker.admin_url}/{route}"


def _check_reply(worker: Worker, route: str, reply: Any) -> dict[str, Any]:
    if isinstance(reply, dict):
        return reply
    raise AdminError(f"{worker} answered `{route}` with {reply!r}.", "Is this a vLLM server?")


def _make_refusal(
    worker: Worker, route: str, error: RequestFailed | Unreachable, name: str = ""
) -> AdminError:
    if isinstance(error, Unreachable) or error.status < 400:
        return AdminError(f"{worker}: {error.message}", error.hint)
    message = read_error_message(error.body)
    if error.status == 404 and message == _NO_ROUTE:
        fix = "Start the server with VLLM_SERVER_DEV_MODE=1."
        return AdminError(f"{worker} has no route /{route}.", fix)
    reason = unwrap_engine_error(message).rstrip(".")
    return AdminError(f"{worker} refused `{name or route}`: {reason}.")
