"""The admin calls of one worker: the `AdminAPI` protocol, and its implementation for Dynamo.

Dynamo answers HTTP 200 even when a call failed, with `status: error` in the body; here that raises
`AdminError`. Calls that are safe to repeat are retried. A call that changes weights is sent once:
if its answer was lost, the update may have been applied.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from rollway.config import AdminTimeouts
from rollway.errors import AdminError, NoWorkers, RequestFailed, RollwayError, Unreachable
from rollway.fleet.discovery import Worker
from rollway.http import IDEMPOTENT, ONCE, Http, Retry
from rollway.orders import (
    CANCEL,
    DOOR,
    ORDER,
    OTHER_PROCESS,
    READ_ONLY,
    REFIT,
    SECRET,
    STAGING,
    UNSIGNED,
    sign,
)

T = TypeVar("T")
W = TypeVar("W")

PauseMode = Literal["wait", "keep", "abort"]
MAX_PARALLEL_CALLS = 128
IN_DOUBT = -1
"""The label of a worker whose weights are unknown. Every negative label means that no version is
served; see `unverified_label` and `leaving_label`."""
# A worker that waits longer than this for the other side of a weight group exits
# (DYN_RL_INIT_WEIGHTS_TIMEOUT_S).
RENDEZVOUS_SECONDS = 30.0

# Dynamo serves these routes, but does not list them.
_UNADVERTISED = {
    "sleep": "control/sleep",
    "wake_up": "control/wake_up",
    "model_taints": "update/model_taints",
    REFIT: REFIT,
    STAGING: STAGING,
    CANCEL: CANCEL,
}
_FAILED_CALL = re.compile(r"^Call to \w+ method failed: ")
# The end is missing where a long message was cut.
_WRAPPED = re.compile(r"Worker failed with error '(.*?)(?:'(?:, please check|$)|$)", re.DOTALL)
_NO_METHOD = "has no attribute '{0}'", "Method '{0}' is not implemented"


class NoSuchMethod(AdminError):
    """The worker lacks the route, or its engine lacks the method (no worker extension)."""


class RefitRefused(AdminError):
    """The worker did not begin a refit: it serves what it served before."""


class AdminAPI(Protocol):
    """The admin calls of a worker. Each raises `AdminError` with the worker and the reason."""

    taints: bool
    """Whether a router respects `set_taints`."""

    def pinned(self) -> AbstractAsyncContextManager[AdminAPI]:
        """Return a client for one worker that is pinned to one connection. Once that breaks, its
        calls fail: they never reach another process at the same address."""
        ...

    async def health(self, worker: Worker) -> bool: ...

    async def models(self, openai_url: str) -> list[str]:
        """Return the model names at an OpenAI base URL (admin calls use another address)."""
        ...

    async def pause(
        self, worker: Worker, mode: PauseMode = "wait", *, clear_cache: bool = True
    ) -> None:
        """Stop generating. `wait` lets running requests finish, `keep` freezes them, `abort` ends
        running and queued ones. Blocks of one policy must not serve the next, so the KV cache is
        cleared by default."""
        ...

    async def resume(self, worker: Worker) -> None: ...

    async def flush_cache(self, worker: Worker) -> None:
        """Drop cached prefixes, except blocks that running requests hold."""
        ...

    async def update_from_disk(self, worker: Worker, path: Path, version: int) -> None:
        """Load a checkpoint directory by the engine's own method. The worker must be paused."""
        ...

    async def update_distributed(
        self, worker: Worker, version: int, method: str, arguments: Mapping[str, Any]
    ) -> None:
        """Run an engine method that receives weights. The worker must be paused."""
        ...

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        """Run an engine method that changes no weights; raise `NoSuchMethod` if it is missing."""
        ...

    async def init_group(
        self, worker: Worker, arguments: Mapping[str, Any], *, method: str | None = None
    ) -> None:
        """Join a group for weight transfer; the trainer must join it at the same time."""
        ...

    async def destroy_group(
        self, worker: Worker, arguments: Mapping[str, Any], *, method: str | None = None
    ) -> None: ...

    async def load_lora(
        self, worker: Worker, name: str, path: Path, *, fresh: bool = False
    ) -> int | None:
        """Load an adapter; reload it if the name is in use. `fresh` promises that this name and
        path never stood for other weights, so neither a reload nor a cache flush is needed. Return
        the engine's number of the adapter, or None if the engine does not report it."""
        ...

    async def unload_lora(self, worker: Worker, name: str) -> None: ...

    async def weight_version(self, worker: Worker) -> int | None:
        """Return the worker's label: its version, None if it never declared one, or a negative
        number while it serves no known version."""
        ...

    def enforces_versions(self, worker: Worker) -> bool:
        """Return whether the worker's engine refuses requests of other versions than its own, as
        its last answer to `weight_version` or `staging` says."""
        ...

    def takes_refits(self, worker: Worker) -> bool:
        """Return whether the worker runs a whole `refit`, as its last answer to `staging` says."""
        ...

    async def staging(self, worker: Worker, identity: str) -> list[dict[str, Any]]:
        """Return the state of staged weights in every rank; raise `NoSuchMethod` where a worker
        cannot report it."""
        ...

    async def refit(self, worker: Worker, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have a worker move to its staged weights, and return its report. Raise `RefitRefused` if
        it has not begun."""
        ...

    async def cancel_refit(self, worker: Worker) -> None:
        """End a refit that still waits for running requests; it is then refused."""
        ...

    async def declare_version(self, worker: Worker, version: int) -> None:
        """Set the label only; `IN_DOUBT` means that the worker's weights are unknown."""
        ...

    async def set_taints(self, worker: Worker, taints: Sequence[str]) -> None:
        """Set the taints: the router sends requests here that require one of them, or none."""
        ...

    async def abort(self, worker: Worker, request_id: str) -> None: ...

    async def sleep(self, worker: Worker, level: int = 1) -> None: ...

    async def wake(self, worker: Worker, tags: Sequence[str] | None = None) -> None: ...


@dataclass(slots=True)
class _Known:
    """What the clients of one fleet know of its workers."""

    processes: dict[str, str] = field(default_factory=dict)
    """The name of the process at each admin address; empty for a process without a guard."""
    enforcing: set[int] = field(default_factory=set)
    refitting: set[int] = field(default_factory=set)

    def note(self, workers: set[int], worker: Worker, is_so: object) -> None:
        (workers.add if is_so is True else workers.discard)(worker.instance_id)


class DynamoAdmin:
    """`AdminAPI` of Dynamo's workers: `POST {admin_url}/engine/<route>`."""

    taints = True

    def __init__(
        self,
        http: Http,
        timeouts: AdminTimeouts | None = None,
        secret: str = "",
        known: _Known | None = None,
    ) -> None:
        self._http = http
        self._timeouts = timeouts or AdminTimeouts()
        self._secret = secret
        """Signs orders to the workers; empty for workers that accept unsigned calls."""
        self._known = known or _Known()

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[AdminAPI]:
        async with self._http.pinned() as http:
            yield DynamoAdmin(http, self._timeouts, self._secret, self._known)

    async def health(self, worker: Worker) -> bool:
        try:
            reply = await self._post(worker, "liveness_probe", {}, retry=ONCE)
        except RollwayError:
            return False
        return reply.get("alive") is True

    async def models(self, openai_url: str) -> list[str]:
        return await list_models(self._http, openai_url, self._timeouts.probe)

    async def pause(
        self, worker: Worker, mode: PauseMode = "wait", *, clear_cache: bool = True
    ) -> None:
        body = {"mode": mode, "clear_cache": clear_cache}
        await self._post(worker, "pause_generation", body, self._timeouts.pause)

    async def resume(self, worker: Worker) -> None:
        await self._post(worker, "resume_generation", {}, self._timeouts.pause)

    async def flush_cache(self, worker: Worker) -> None:
        await self._post(worker, "flush_cache", {})

    async def update_from_disk(self, worker: Worker, path: Path, version: int) -> None:
        body, limit = {"model_path": str(path), "weight_version": version}, self._timeouts.update
        await self._post(worker, "update_weights_from_disk", body, limit, retry=ONCE)

    async def update_distributed(
        self, worker: Worker, version: int, method: str, arguments: Mapping[str, Any]
    ) -> None:
        body = {**arguments, "engine_rpc": method, "weight_version": version}
        limit = self._timeouts.update
        await self._post(worker, "update_weights_from_distributed", body, limit, retry=ONCE)

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        # Without a version and without a cache reset, this route only runs the method.
        body = {**arguments, "engine_rpc": method}
        body |= {"allow_unpaused": True, "reset_prefix_cache": False}
        limit = self._timeouts.pause
        await self._post(worker, "update_weights_from_distributed", body, limit, retry=ONCE)

    async def init_group(
        self, worker: Worker, arguments: Mapping[str, Any], *, method: str | None = None
    ) -> None:
        body = {**arguments, **({"engine_rpc": method} if method else {})}
        limit = RENDEZVOUS_SECONDS + self._timeouts.probe
        try:
            await self._post(worker, "init_weights_update_group", body, limit, retry=ONCE)
        except AdminError as error:
            if not isinstance(error.__cause__, Unreachable):
                raise
            raise AdminError(
                f"{worker} did not join the weight group: {error.message}",
                "Check that the trainer joins the group with the same world size, at an address "
                f"the worker can reach. A worker that waits {RENDEZVOUS_SECONDS:g} s for the other "
                "side exits (DYN_RL_INIT_WEIGHTS_TIMEOUT_S).",
            ) from error

    async def destroy_group(
        self, worker: Worker, arguments: Mapping[str, Any], *, method: str | None = None
    ) -> None:
        body = {**arguments, **({"engine_rpc": method} if method else {})}
        await self._post(worker, "destroy_weights_update_group", body, retry=ONCE)

    async def load_lora(
        self, worker: Worker, name: str, path: Path, *, fresh: bool = False
    ) -> int | None:
        body = {"lora_name": name, "source": {"uri": path.resolve().as_uri()}}
        reply = await self._post(worker, "load_lora", body, self._timeouts.update, retry=ONCE)
        if "already loaded" in str(reply.get("message", "")) and not fresh:
            # Dynamo reports success and keeps the old adapter.
            await self.unload_lora(worker, name)
            reply = await self._post(worker, "load_lora", body, self._timeouts.update, retry=ONCE)
        if not fresh:
            # The old adapter's blocks are cached under the same name and path.
            await self.flush_cache(worker)
        number = reply.get("lora_id")
        return number if isinstance(number, int) else None

    async def unload_lora(self, worker: Worker, name: str) -> None:
        body = {"lora_name": name}
        await self._post(worker, "unload_lora", body, self._timeouts.pause, retry=ONCE)

    async def weight_version(self, worker: Worker) -> int | None:
        reply = await self._post(worker, "get_weight_version", {})
        self._known.note(self._known.enforcing, worker, reply.get("enforced"))
        return parse_label(reply.get("version"))

    def enforces_versions(self, worker: Worker) -> bool:
        return worker.instance_id in self._known.enforcing

    def takes_refits(self, worker: Worker) -> bool:
        return worker.instance_id in self._known.refitting

    async def staging(self, worker: Worker, identity: str) -> list[dict[str, Any]]:
        try:
            reply = await self._post(worker, STAGING, {"identity": identity})
        except AdminError as error:
            cause = error.__cause__
            if isinstance(cause, RequestFailed) and cause.status == 404:
                raise NoSuchMethod(f"{worker} has no route `{STAGING}`.") from error
            raise
        self._known.note(self._known.refitting, worker, reply.get("refits"))
        self._known.note(self._known.enforcing, worker, reply.get("refits"))
        return list(reply["ranks"])

    async def refit(self, worker: Worker, order: Mapping[str, Any]) -> dict[str, Any]:
        limit = self._timeouts.update + self._timeouts.pause
        return await self._post(worker, REFIT, order, limit, retry=ONCE)

    async def cancel_refit(self, worker: Worker) -> None:
        await self._post(worker, CANCEL, {})

    async def declare_version(self, worker: Worker, version: int) -> None:
        await self._post(worker, "set_weight_version", {"weight_version": version})

    async def set_taints(self, worker: Worker, taints: Sequence[str]) -> None:
        await self._post(worker, "model_taints", {"taints": list(taints)})

    async def abort(self, worker: Worker, request_id: str) -> None:
        await self._post(worker, "abort_request", {"request_id": request_id})

    async def sleep(self, worker: Worker, level: int = 1) -> None:
        await self._post(worker, "sleep", {"level": level}, self._timeouts.pause)

    async def wake(self, worker: Worker, tags: Sequence[str] | None = None) -> None:
        body = {} if tags is None else {"tags": list(tags)}
        await self._post(worker, "wake_up", body, self._timeouts.pause)

    async def _post(
        self,
        worker: Worker,
        name: str,
        body: Mapping[str, Any],
        timeout: float | None = None,
        retry: Retry = IDEMPOTENT,
    ) -> dict[str, Any]:
        if worker.error is not None:
            raise AdminError(
                f"{worker} is listed with an error: {worker.error}.",
                "It hangs or is dead; a stack restarts the workers that it supervises.",
            )
        route = _find_route(worker, name)
        limit = timeout or self._timeouts.probe
        try:
            reply = await self.send(worker, route, body, limit, retry)
        except (RequestFailed, Unreachable) as error:
            raise AdminError(f"{worker}: {error.message}", error.hint) from error
        if not isinstance(reply, dict) or reply.get("status") not in ("ok", "success"):
            raise _make_refusal(worker, name, str(body.get("engine_rpc", "")), reply)
        return reply

    async def send(
        self,
        worker: Worker,
        route: str,
        body: Mapping[str, Any],
        timeout: float,
        retry: Retry = ONCE,
    ) -> Any:
        """Call a route and return the worker's answer, errors included."""
        reply = await self._send_order(worker, route, body, timeout, retry)
        if self._secret and _is_for_another_process(reply):
            # The worker refused before it did anything, so even an update may be sent again:
            # another process, with or without a guard, has the worker's address now.
            self._known.processes.pop(worker.admin_url, None)
            reply = await self._send_order(worker, route, body, timeout, retry)
        return reply

    async def _send_order(
        self, worker: Worker, route: str, body: Mapping[str, Any], timeout: float, retry: Retry
    ) -> Any:
        """Send a call, signed if the worker demands it."""
        url = f"{worker.admin_url}/engine/{route}"
        process = ""
        if self._secret and route not in READ_ONLY:
            process = await self._get_process(worker)
        if not process:
            return await self._http.post(url, body, timeout=timeout, retry=retry)

        def sign_body() -> dict[str, Any]:
            # Sign again for each attempt: a worker accepts the number of an order only once.
            return {ORDER: sign(self._secret, route, process, body)}

        return await self._http.post(url, sign_body, timeout=timeout, retry=retry)

    async def _get_process(self, worker: Worker) -> str:
        """Fetch the name of the worker's process, once; empty for a worker without a guard."""
        process = self._known.processes.get(worker.admin_url)
        if process is None:
            url = f"{worker.admin_url}/engine/{DOOR}"
            limit, process = self._timeouts.probe, ""
            try:
                reply = await self._http.post(url, {}, timeout=limit, retry=IDEMPOTENT)
                process = str(reply.get("process") or "") if isinstance(reply, dict) else ""
            except RequestFailed as error:
                if error.status != 404:
                    raise
            self._known.processes[worker.admin_url] = process
        return process


def _is_for_another_process(reply: Any) -> bool:
    """Return whether an order was refused because it is unsigned or signed for another process."""
    message = str(reply.get("message", "")) if isinstance(reply, dict) else ""
    return message.startswith((OTHER_PROCESS, UNSIGNED))


async def list_models(http: Http, openai_url: str, timeout: float) -> list[str]:
    """Return the model names at an OpenAI base URL, with or without its /v1."""
    base = openai_url.rstrip("/").removesuffix("/v1")
    answer = await http.get(f"{base}/v1/models", timeout=timeout)
    try:
        return [str(entry["id"]) for entry in answer["data"]]
    except (KeyError, TypeError) as error:
        raise RequestFailed(f"{base}/v1/models answered without models.", status=200) from error


async def call_all(
    workers: Iterable[W], call: Callable[[W], Awaitable[T]]
) -> list[T | BaseException]:
    """Make one call on every worker, a bounded number at once. Return the results in order; the
    result of a call that failed is its exception."""
    slots = asyncio.Semaphore(MAX_PARALLEL_CALLS)

    async def call_one(worker: W) -> T:
        async with slots:
            return await call(worker)

    return await asyncio.gather(*map(call_one, workers), return_exceptions=True)


def silent_workers_error(silent: Sequence[Worker], listed: int) -> AdminError:
    reasons = "; ".join(f"{worker}: {worker.error}" for worker in silent)
    return AdminError(
        f"{len(silent)} of {listed} workers do not answer: {reasons}.",
        "Wait until they recover or leave (a dead worker is listed for about 10 s).",
    )


def no_workers_error(source: object) -> NoWorkers:
    return NoWorkers(
        f"No RL worker is listed at {source}.",
        "Start workers with --enable-rl; the mocker engine has no admin routes.",
    )


def unverified_label(version: int) -> int:
    """Return the label of a worker that has loaded a version and has not entered service yet."""
    return IN_DOUBT - 1 - 2 * version


def leaving_label(version: int) -> int:
    """Return the label of a worker that left service and has generated nothing since `version`."""
    return IN_DOUBT - 2 - 2 * version


def parse_label(label: Any) -> int | None:
    """Return a label as a version; a label that is no number was set by another tool."""
    if label is None:
        return None
    is_int = isinstance(label, int) and not isinstance(label, bool)
    has_digits = isinstance(label, str) and re.fullmatch(r"-?\d+", label) is not None
    return int(label) if is_int or has_digits else IN_DOUBT


def unwrap_engine_error(message: str) -> str:
    """Return the message that an engine method raised, without vLLM's text around it."""
    message = _FAILED_CALL.sub("", message)
    wrapped = _WRAPPED.search(message)
    return wrapped.group(1) if wrapped else message


def is_missing_method(method: str, message: str) -> bool:
    return any(text.format(method) in message for text in _NO_METHOD)


def _find_route(worker: Worker, name: str) -> str:
    """Return the path of a route in the style that the worker advertises."""
    styles = (name, f"control/{name}", f"update/{name}")
    advertised = next((path for path in styles if path in worker.routes), None)
    if advertised is not None:
        return advertised
    if name in _UNADVERTISED:
        return _UNADVERTISED[name]
    if not worker.routes:  # the listing has no routes; vLLM workers serve flat ones
        return name
    raise NoSuchMethod(
        f"{worker} does not offer `{name}`.",
        "Start it with --enable-rl (Rollway does so for engine: vllm).",
    )


def _make_refusal(worker: Worker, name: str, method: str, reply: Any) -> AdminError:
    message = str((reply.get("message") if isinstance(reply, dict) else reply) or "no reason given")
    reason = unwrap_engine_error(message).rstrip(".")
    if isinstance(reply, dict) and reply.get("state") == "refused":
        return RefitRefused(f"{worker} refused `{name}`: {reason}.")
    if method and is_missing_method(method, reason):
        return NoSuchMethod(f"{worker} has no such engine method: {reason}.")
    hint = ""
    if reason.startswith(UNSIGNED):
        hint = (
            "Attach to the stack by its name as the user who started it, or set "
            f"{SECRET} to the stack's secret."
        )
    return AdminError(f"{worker} refused `{name}`: {reason}.", hint)
