"""What can be asked of one worker, whatever serves it: `AdminAPI`, and Dynamo's way of it.

Dynamo answers HTTP 200 also when a call failed, with `status: error` in the body; here that is an
`AdminError`. Calls that may be repeated without harm are retried; a call that changes weights is
sent once, since one whose answer was lost may have been applied.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from rollway.config import AdminTimeouts
from rollway.errors import AdminError, RequestFailed, RollwayError, Unreachable
from rollway.fleet.discovery import Worker
from rollway.http import IDEMPOTENT, ONCE, Http, Retry
from rollway.orders import DOOR, ORDER, OTHER_PROCESS, READ_ONLY, SECRET, UNSIGNED, sign

T = TypeVar("T")

PauseMode = Literal["wait", "keep", "abort"]
MAX_PARALLEL_CALLS = 128
IN_DOUBT = -1
"""The label of a worker while its weights change, and after a change that failed. Any negative
label means that; see `unproven` and `leaving`."""
# A worker that waits longer than this for the other side of a weight group ends itself
# (DYN_RL_INIT_WEIGHTS_TIMEOUT_S).
RENDEZVOUS_SECONDS = 30.0

# There, but on no list of routes.
_UNADVERTISED = {
    "sleep": "control/sleep",
    "wake_up": "control/wake_up",
    "model_taints": "update/model_taints",
}
_WRAPPED = re.compile(r"Worker failed with error '(.*?)'(?:, please check|$)", re.DOTALL)
_NO_METHOD = "has no attribute '{0}'", "Method '{0}' is not implemented"


class NoSuchMethod(AdminError):
    """The worker has no such route, or its engine no such method: no code of ours runs in it."""


class AdminAPI(Protocol):
    """The admin surface of a worker. Every call raises `AdminError` with the worker and reason."""

    taints: bool
    """Whether a router heeds what `set_taints` says."""

    def held(self) -> AbstractAsyncContextManager[AdminAPI]:
        """The same for one worker, as long as it is one and the same process: calls fail once the
        connection breaks, rather than reach a successor at its address."""
        ...

    async def health(self, worker: Worker) -> bool: ...

    async def models(self, openai_url: str) -> list[str]:
        """What the server at its OpenAI address serves; admin calls go elsewhere."""
        ...

    async def pause(
        self, worker: Worker, mode: PauseMode = "wait", *, clear_cache: bool = True
    ) -> None:
        """Stop generating. `wait` lets running requests finish, `keep` freezes them, `abort` ends
        them and those that queue. The KV cache is cleared unless told otherwise: blocks of one
        policy must not serve the next."""
        ...

    async def resume(self, worker: Worker) -> None: ...

    async def flush_cache(self, worker: Worker) -> None:
        """Drop cached prefixes. Sure only when nothing runs: held blocks stay."""
        ...

    async def update_from_disk(self, worker: Worker, path: Path, version: int) -> None:
        """Have the engine load a checkpoint directory that it can read, by its own method. The
        worker must be paused."""
        ...

    async def update_distributed(
        self, worker: Worker, version: int, method: str, arguments: Mapping[str, Any]
    ) -> None:
        """Have an engine method receive weights; the worker must be paused."""
        ...

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        """Run an engine method that changes no weights; `NoSuchMethod` when there is none."""
        ...

    async def init_group(
        self, worker: Worker, arguments: Mapping[str, Any], *, method: str | None = None
    ) -> None:
        """Join a group for weight transfer: the trainer must be joining it at the same time."""
        ...

    async def destroy_group(
        self, worker: Worker, arguments: Mapping[str, Any], *, method: str | None = None
    ) -> None: ...

    async def load_lora(
        self, worker: Worker, name: str, path: Path, *, fresh: bool = False
    ) -> int | None:
        """Load an adapter, or load it anew when the name is taken. `fresh` says that name and path
        never meant anything else: then it is not, and no cache is flushed. Returns the engine's
        number for it, where that is told."""
        ...

    async def unload_lora(self, worker: Worker, name: str) -> None: ...

    async def weight_version(self, worker: Worker) -> int | None:
        """The version the worker declares; None when it never declared one, negative when it is
        between two."""
        ...

    async def declare_version(self, worker: Worker, version: int) -> None:
        """Set the label alone; `IN_DOUBT` says that what the worker holds is not known."""
        ...

    async def set_taints(self, worker: Worker, taints: Sequence[str]) -> None:
        """Say which requests the router may send here: those that require one of these, and those
        that require none."""
        ...

    async def abort(self, worker: Worker, request_id: str) -> None: ...

    async def sleep(self, worker: Worker, level: int = 1) -> None: ...

    async def wake(self, worker: Worker, tags: Sequence[str] | None = None) -> None: ...


class DynamoAdmin:
    """`AdminAPI` of Dynamo's workers: `POST {admin_url}/engine/<route>`."""

    taints = True

    @asynccontextmanager
    async def held(self) -> AsyncIterator[AdminAPI]:
        async with self._http.one_connection() as http:
            yield DynamoAdmin(http, self._timeouts, self._secret, self._processes)

    def __init__(
        self,
        http: Http,
        timeouts: AdminTimeouts | None = None,
        secret: str = "",
        processes: dict[str, str] | None = None,
    ) -> None:
        self._http = http
        self._timeouts = timeouts or AdminTimeouts()
        self._secret = secret
        """What orders to the workers are signed with; empty for workers that take any."""
        self._processes = {} if processes is None else processes
        """The name of the process behind each admin address; empty for one without a guard."""

    async def health(self, worker: Worker) -> bool:
        try:
            reply = await self._post(worker, "liveness_probe", {}, retry=ONCE)
        except RollwayError:
            return False
        return reply.get("alive") is True

    async def models(self, openai_url: str) -> list[str]:
        return await served_models(self._http, openai_url, self._timeouts.probe)

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
        body = {"model_path": str(path), "weight_version": version}
        await self._post(
            worker, "update_weights_from_disk", body, self._timeouts.update, retry=ONCE
        )

    async def update_distributed(
        self, worker: Worker, version: int, method: str, arguments: Mapping[str, Any]
    ) -> None:
        body = {**arguments, "engine_rpc": method, "weight_version": version}
        await self._post(
            worker, "update_weights_from_distributed", body, self._timeouts.update, retry=ONCE
        )

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        # Without a version and with the cache left alone, this route just runs the method.
        body = {
            **arguments,
            "engine_rpc": method,
            "allow_unpaused": True,
            "reset_prefix_cache": False,
        }
        await self._post(
            worker, "update_weights_from_distributed", body, self._timeouts.pause, retry=ONCE
        )

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
                f"A worker that waits {RENDEZVOUS_SECONDS:g} s for the other side of the group "
                "ends itself (DYN_RL_INIT_WEIGHTS_TIMEOUT_S). Is the trainer joining the group, "
                "at an address the worker can reach, with the same world size?",
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
            # Without hot-swap Dynamo says success and keeps the old adapter.
            await self.unload_lora(worker, name)
            reply = await self._post(worker, "load_lora", body, self._timeouts.update, retry=ONCE)
        if not fresh:
            # What the old adapter computed is cached under the same name and path.
            await self.flush_cache(worker)
        number = reply.get("lora_id")
        return number if isinstance(number, int) else None

    async def unload_lora(self, worker: Worker, name: str) -> None:
        body = {"lora_name": name}
        await self._post(worker, "unload_lora", body, self._timeouts.pause, retry=ONCE)

    async def weight_version(self, worker: Worker) -> int | None:
        reply = await self._post(worker, "get_weight_version", {})
        return whole_version(reply.get("version"))

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
                "It is hung or dead; a supervised worker is restarted by its stack.",
            )
        route = _route(worker, name)
        limit = timeout or self._timeouts.probe
        try:
            reply = await self.send(worker, route, body, limit, retry)
        except (RequestFailed, Unreachable) as error:
            raise AdminError(f"{worker}: {error.message}", error.hint) from error
        if not isinstance(reply, dict) or reply.get("status") not in ("ok", "success"):
            raise _refused(worker, name, str(body.get("engine_rpc", "")), reply)
        return reply

    async def send(
        self,
        worker: Worker,
        route: str,
        body: Mapping[str, Any],
        timeout: float,
        retry: Retry = ONCE,
    ) -> Any:
        """Call a route, and return the worker's answer, whatever it says."""
        reply = await self._order(worker, route, body, timeout, retry)
        if self._secret and _for_another_process(reply):
            # Refused before anything was done, so it may be sent again: another process has the
            # worker's address now, with or without a guard.
            self._processes.pop(worker.admin_url, None)
            reply = await self._order(worker, route, body, timeout, retry)
        return reply

    async def _order(
        self, worker: Worker, route: str, body: Mapping[str, Any], timeout: float, retry: Retry
    ) -> Any:
        """Send a call, signed where the worker asks for that."""
        url = f"{worker.admin_url}/engine/{route}"
        process = ""
        if self._secret and route not in READ_ONLY:
            process = await self._process_of(worker)
        if not process:
            return await self._http.post(url, body, timeout=timeout, retry=retry)

        def sign_body() -> dict[str, Any]:
            return {ORDER: sign(self._secret, route, process, body)}

        return await self._http.post(url, sign_body, timeout=timeout, retry=retry)

    async def _process_of(self, worker: Worker) -> str:
        """Ask a worker once which process it is; empty for one that has no guard."""
        process = self._processes.get(worker.admin_url)
        if process is None:
            url = f"{worker.admin_url}/engine/{DOOR}"
            try:
                reply = await self._http.post(
                    url, {}, timeout=self._timeouts.probe, retry=IDEMPOTENT
                )
                process = str(reply.get("process") or "") if isinstance(reply, dict) else ""
            except RequestFailed as error:
                if error.status != 404:
                    raise
                process = ""
            self._processes[worker.admin_url] = process
        return process


def _for_another_process(reply: Any) -> bool:
    """Whether an order was refused because of who it was signed for, or not signed at all."""
    message = str(reply.get("message", "")) if isinstance(reply, dict) else ""
    return message.startswith((OTHER_PROCESS, UNSIGNED))


async def served_models(http: Http, openai_url: str, timeout: float) -> list[str]:
    """The model names at an OpenAI base URL, with or without its /v1."""
    base = openai_url.rstrip("/").removesuffix("/v1")
    answer = await http.get(f"{base}/v1/models", timeout=timeout)
    try:
        return [str(entry["id"]) for entry in answer["data"]]
    except (KeyError, TypeError) as error:
        raise RequestFailed(f"{base}/v1/models answered without models.", status=200) from error


async def on_all(
    workers: Iterable[Worker], call: Callable[[Worker], Awaitable[T]]
) -> list[T | BaseException]:
    """One call on every worker at once, bounded; failures are in the list, in place."""
    slots = asyncio.Semaphore(MAX_PARALLEL_CALLS)

    async def bounded(worker: Worker) -> T:
        async with slots:
            return await call(worker)

    return await asyncio.gather(*map(bounded, workers), return_exceptions=True)


def not_answering(silent: Sequence[Worker], of: int) -> AdminError:
    return AdminError(
        f"{len(silent)} of {of} workers do not answer: "
        + "; ".join(f"{worker}: {worker.error}" for worker in silent)
        + ".",
        "Wait for them to recover or leave (a dead one is listed for about 10 s).",
    )


def unproven(version: int) -> int:
    """The label of a worker that has loaded a version and is not in service with it yet: should
    nobody live to finish that, it is still in doubt."""
    return IN_DOUBT - 1 - 2 * version


def leaving(version: int) -> int:
    """The label of a worker that is out of service to be changed, and has served nothing since."""
    return IN_DOUBT - 2 - 2 * version


def whole_version(said: Any) -> int | None:
    """A label as a version; one that is not a number (another tool's) says nothing of ours."""
    if said is None:
        return None
    whole = isinstance(said, int) and not isinstance(said, bool)
    digits = isinstance(said, str) and re.fullmatch(r"-?\d+", said) is not None
    return int(said) if whole or digits else IN_DOUBT


def _route(worker: Worker, name: str) -> str:
    """The path of a route in the style that the worker advertises."""
    styles = (name, f"control/{name}", f"update/{name}")
    advertised = next((path for path in styles if path in worker.routes), None)
    if advertised is not None:
        return advertised
    if name in _UNADVERTISED:
        return _UNADVERTISED[name]
    if not worker.routes:  # found in a way that does not tell: flat is what vLLM workers have
        return name
    raise NoSuchMethod(
        f"{worker} does not offer `{name}`.",
        "Start it with --enable-rl (Rollway does so for engine: vllm).",
    )


def _refused(worker: Worker, name: str, method: str, reply: Any) -> AdminError:
    said = str((reply.get("message") if isinstance(reply, dict) else reply) or "no reason given")
    wrapped = _WRAPPED.search(said)
    if wrapped:  # what the engine's method raised, without vLLM's words around it
        said = wrapped.group(1)
    if method and any(words.format(method) in said for words in _NO_METHOD):
        return NoSuchMethod(f"{worker} has no such engine method: {said.rstrip('.')}.")
    hint = ""
    if said.startswith(UNSIGNED):
        hint = (
            "Attach to the stack by its name as the user who started it, or set "
            f"{SECRET} to the stack's secret."
        )
    return AdminError(f"{worker} refused `{name}`: {said.rstrip('.')}.", hint)
