"""`AdminAPI` of plain vLLM servers (`vllm serve`), over the routes of VLLM_SERVER_DEV_MODE=1.

The rules are Dynamo's, which does more on its side of the wire: a worker that is not paused is not
updated, and an update leaves neither an old cache block nor an undeclared version. Here these are
several calls, so one client must be in charge of a server. The server carries the routes it serves
from, on one port: whoever can send it prompts can replace its weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rollway.config import AdminTimeouts
from rollway.errors import AdminError, RequestFailed, RollwayError, Unreachable
from rollway.fleet.admin import (
    RENDEZVOUS_SECONDS,
    AdminAPI,
    NoSuchMethod,
    PauseMode,
    served_models,
    whole_version,
)
from rollway.fleet.discovery import Worker
from rollway.http import IDEMPOTENT, ONCE, Http, Retry, server_message

_UNDECLARED = "default"  # what vLLM says before anything was declared
# vLLM drops the connection after a 500. The next call on it would fail unheard, which one that is
# sent once must not: every call gets a connection of its own.
_OWN_CONNECTION = {"connection": "close"}
_LOAD_LORA, _UNLOAD_LORA = "v1/load_lora_adapter", "v1/unload_lora_adapter"
_NO_ROUTE = "Not Found"  # FastAPI's own words; vLLM's 404 for a missing adapter has others
_WRAPPED = re.compile(r"Worker failed with error '(.*?)(?:', please check the stack trace|$)", re.S)
_FAILED_CALL = re.compile(r"^Call to \w+ method failed: ")


class VllmAdmin:
    """`AdminAPI` of vLLM's own server; `Worker.admin_url` is its base URL."""

    taints = False

    def held(self) -> AbstractAsyncContextManager[AdminAPI]:
        """Nothing to hold: vLLM closes connections as it likes. Its servers are not restarted
        under our hands."""
        return nullcontext(self)

    def __init__(self, http: Http, timeouts: AdminTimeouts | None = None) -> None:
        self._http = http
        self._timeouts = timeouts or AdminTimeouts()

    async def health(self, worker: Worker) -> bool:
        """Whether the engine lives. One that is busy or stuck lives, too."""
        if worker.error is not None:
            return False
        try:
            await self._http.get_text(f"{worker.admin_url}/health", timeout=self._timeouts.probe)
        except RollwayError:
            return False
        return True

    async def models(self, openai_url: str) -> list[str]:
        return await served_models(self._http, openai_url, self._timeouts.probe)

    async def pause(
        self, worker: Worker, mode: PauseMode = "wait", *, clear_cache: bool = True
    ) -> None:
        """vLLM clears the cache in every mode (its documentation excepts `keep`): requests that
        `keep` froze are then computed anew from their tokens when they go on."""
        query = {"mode": mode, "clear_cache": str(clear_cache).lower()}
        await self._post(worker, "pause", query=query, timeout=self._timeouts.pause)

    async def resume(self, worker: Worker) -> None:
        await self._post(worker, "resume", timeout=self._timeouts.pause)

    async def flush_cache(self, worker: Worker) -> None:
        reply = await self._post(worker, "reset_prefix_cache")
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
        await self._ready_for_weights(worker)
        await self._run(worker, method, arguments, self._timeouts.update)
        await self.declare_version(worker, version)

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        await self._run(worker, method, arguments, self._timeouts.pause)

    async def init_group(
        self, worker: Worker, arguments: Mapping[str, Any], *, method: str | None = None
    ) -> None:
        """Without `method`, `init_broadcaster`, the name that Dynamo uses."""
        try:
            await self._run(worker, method or "init_broadcaster", arguments, RENDEZVOUS_SECONDS)
        except AdminError as error:
            if not isinstance(error.__cause__, Unreachable):
                raise
            raise AdminError(
                f"{worker} did not join the weight group: {error.message}",
                "Is the trainer joining the group, at an address the worker can reach, with the "
                "same world size? The engine does nothing else until the other side comes or the "
                "method gives up by itself; restart the server to have it back sooner.",
            ) from error.__cause__

    async def destroy_group(
        self, worker: Worker, arguments: Mapping[str, Any], *, method: str | None = None
    ) -> None:
        """Without `method`, `destroy_broadcaster`, the name that Dynamo uses."""
        await self._run(worker, method or "destroy_broadcaster", arguments, self._timeouts.probe)

    async def load_lora(
        self, worker: Worker, name: str, path: Path, *, fresh: bool = False
    ) -> int | None:
        body = {"lora_name": name, "lora_path": str(path.resolve()), "load_inplace": True}
        limit = self._timeouts.update
        await self._post(worker, _LOAD_LORA, body, timeout=limit, retry=ONCE, plain=True)
        if not fresh:
            # vLLM knows an adapter's cached blocks by its name and path, also after an unload: new
            # weights at a known path would meet old ones. Requests that hold some compute them
            # anew.
            query, limit = {"reset_running_requests": "true"}, self._timeouts.pause
            await self._post(worker, "reset_prefix_cache", query=query, timeout=limit)
        return None

    async def unload_lora(self, worker: Worker, name: str) -> None:
        body, limit = {"lora_name": name}, self._timeouts.pause
        await self._post(worker, _UNLOAD_LORA, body, timeout=limit, retry=ONCE, plain=True)

    async def weight_version(self, worker: Worker) -> int | None:
        reply = await self._get(worker, "weight_info")
        label = reply.get("weight_version")
        return None if label == _UNDECLARED else whole_version(label)

    async def declare_version(self, worker: Worker, version: int | None) -> None:
        """None takes a declaration back."""
        label = _UNDECLARED if version is None else str(version)
        await self._post(worker, "update_weight_version", {"new_version": label})

    async def set_taints(self, worker: Worker, taints: Sequence[str]) -> None:
        """Nothing: no router stands before a plain server, so nobody could read them. Requests come
        straight from the client, which knows what this worker serves."""

    async def abort(self, worker: Worker, request_id: str) -> None:
        """End a request by its `X-Request-Id` or by the `id` of its answer. vLLM answers alike
        whether or not there was such a request."""
        # The engine knows it by the id with the endpoint's prefix, and for completions with the
        # place of the prompt. It passes over ids that nobody has.
        ids = [request_id, f"{request_id}-0", f"cmpl-{request_id}-0"]
        ids += [f"chatcmpl-{request_id}", f"generate-tokens-{request_id}"]
        await self._post(worker, "abort_requests", {"request_ids": ids})

    async def sleep(self, worker: Worker, level: int = 1) -> None:
        """Ends running requests. Needs --enable-sleep-mode to free memory."""
        query = {"level": str(level)}
        await self._post(worker, "sleep", query=query, timeout=self._timeouts.pause, plain=True)

    async def wake(self, worker: Worker, tags: Sequence[str] | None = None) -> None:
        """Also resumes a worker that was paused, once all of its memory is back."""
        query = {"tags": list(tags or ())}
        await self._post(worker, "wake_up", query=query, timeout=self._timeouts.pause, plain=True)

    async def _ready_for_weights(self, worker: Worker) -> None:
        """Refuse before any weight has changed. Nothing is computed while paused, so what is
        flushed here is gone after the update, too. And a server that was told to wait for its
        requests calls itself paused while they still run: these hold blocks."""
        reply = await self._get(worker, "is_paused")
        if reply.get("is_paused") is not True:
            raise AdminError(f"{worker} must be paused before its weights are updated.")
        await self.flush_cache(worker)

    async def _run(
        self, worker: Worker, method: str, arguments: Mapping[str, Any], timeout: float
    ) -> None:
        """Run an engine method, once: it may change weights."""
        # The route takes a `timeout`, too, but an engine that gave up waiting for its workers takes
        # their late answer for that of the next call: from then on a failed load may read as done.
        body = {"method": method, "kwargs": dict(arguments)}
        try:
            await self._post(worker, "collective_rpc", body, method, timeout=timeout, retry=ONCE)
        except AdminError as error:
            missing = f"has no attribute '{method}'", f"Method '{method}' is not implemented"
            if any(words in error.message for words in missing):
                raise NoSuchMethod(f"{worker} has no engine method `{method}`.") from error
            raise

    async def _get(self, worker: Worker, route: str) -> dict[str, Any]:
        url = _url(worker, route)
        try:
            return _answer(worker, route, await self._http.get(url, timeout=self._timeouts.probe))
        except (RequestFailed, Unreachable) as error:
            raise _refused(worker, route, error) from error

    async def _post(
        self,
        worker: Worker,
        route: str,
        body: Mapping[str, Any] | None = None,
        name: str = "",
        *,
        query: Mapping[str, str | list[str]] | None = None,
        timeout: float | None = None,
        retry: Retry = IDEMPOTENT,
        plain: bool = False,
    ) -> dict[str, Any]:
        """`name` is what is asked for, where that is not the route; `plain` is for routes that
        answer with nothing or a sentence."""
        url = _url(worker, route) + (f"?{urlencode(query, doseq=True)}" if query else "")
        limit = timeout or self._timeouts.probe
        try:
            reply = await self._http.post(
                url, body, timeout=limit, retry=retry, headers=_OWN_CONNECTION
            )
        except (RequestFailed, Unreachable) as error:
            if plain and isinstance(error, RequestFailed) and error.status < 400:
                return {}
            raise _refused(worker, route, error, name) from error
        return _answer(worker, route, reply)


def _url(worker: Worker, route: str) -> str:
    if worker.error is not None:
        raise AdminError(f"{worker} is listed with an error: {worker.error}.")
    return f"{worker.admin_url}/{route}"


def _answer(worker: Worker, route: str, reply: Any) -> dict[str, Any]:
    if isinstance(reply, dict):
        return reply
    raise AdminError(f"{worker} answered `{route}` with {reply!r}.", "Is this a vLLM server?")


def _refused(
    worker: Worker, route: str, error: RequestFailed | Unreachable, name: str = ""
) -> AdminError:
    if isinstance(error, Unreachable) or error.status < 400:
        return AdminError(f"{worker}: {error.message}", error.hint)
    said = _FAILED_CALL.sub("", server_message(error.body))
    if error.status == 404 and said == _NO_ROUTE:
        switch = "VLLM_SERVER_DEV_MODE=1"
        if route.startswith("v1/"):
            switch = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
        return AdminError(f"{worker} has no route /{route}.", f"Start the server with {switch}.")
    wrapped = _WRAPPED.search(said)
    if wrapped:  # what the engine's method raised, without vLLM's words around it
        said = wrapped.group(1)
    return AdminError(f"{worker} refused `{name or route}`: {said.rstrip('.')}.")
