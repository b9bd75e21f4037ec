"""The admin calls to Dynamo's workers, over their `/engine` routes.

Dynamo answers HTTP 200 even when a call failed, with `status: error` in the body; here that raises
`AdminError`. Calls that are safe to repeat are retried. A call that changes weights is sent once:
if its answer was lost, the update may have been applied.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from rollway.errors import AdminError, RequestFailed, Unreachable
from rollway.fleet.admin import (
    AnotherProcess,
    Facts,
    NoSuchMethod,
    OtherSecret,
    PauseMode,
    RefitRefused,
    StageReply,
    StillAsleep,
    is_missing_method,
    parse_label,
    unwrap_engine_error,
)
from rollway.fleet.workers import Worker
from rollway.http import IDEMPOTENT, ONCE, Http, Retry
from rollway.signed_calls import (
    CANCEL,
    DISCARD,
    DOOR,
    MEMORY,
    ORDER,
    OTHER_PROCESS,
    READ_ONLY,
    REFIT,
    SECRET,
    SLEEP,
    STAGE,
    UNSIGNED,
    WAKE,
    sign,
)
from rollway.spec import AdminTimeouts

# A worker that waits longer than this for the other side of a weight group exits
# (DYN_RL_INIT_WEIGHTS_TIMEOUT_S).
RENDEZVOUS_SECONDS = 30.0
# Dynamo serves these routes, but does not list them.
_UNADVERTISED = {
    "model_taints": "update/model_taints",
    **{route: route for route in (REFIT, STAGE, CANCEL, DISCARD, SLEEP, WAKE, MEMORY)},
}


class DynamoAdmin:
    """The calls to Dynamo's workers: `POST {admin_url}/engine/<route>`. Each raises `AdminError`
    with the worker and the reason; an order `NoSuchMethod`, if the worker is a foreign one."""

    taints = True
    """Whether a router respects `set_taints`."""

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
        """Signs orders to the workers; empty for workers that accept unsigned calls."""
        self._processes: dict[str, str] = {} if processes is None else processes
        """The name of the process at each admin address; empty for a process without a guard."""

    def pin(self) -> AbstractAsyncContextManager[DynamoAdmin]:
        """Return a client for one worker that is pinned to one connection. Once that breaks, its
        calls fail: they never reach another process at the same address."""

        @asynccontextmanager
        async def pin() -> AsyncIterator[DynamoAdmin]:
            async with self._http.pin() as http:
                yield DynamoAdmin(http, self._timeouts, self._secret, self._processes)

        return pin()

    async def pause(
        self, worker: Worker, mode: PauseMode = "wait", *, clear_cache: bool = True
    ) -> None:
        """Stop generating. `wait` lets running requests finish, `keep` freezes them, `abort` ends
        running and queued ones. Blocks of one policy must not serve the next, so the KV cache is
        cleared by default."""
        body = {"mode": mode, "clear_cache": clear_cache}
        await self._post(worker, "pause_generation", body, self._timeouts.pause)

    async def resume(self, worker: Worker) -> None:
        await self._post(worker, "resume_generation", {}, self._timeouts.pause)

    async def flush_cache(self, worker: Worker) -> None:
        """Drop cached prefixes, except blocks that running requests hold."""
        await self._post(worker, "flush_cache", {})

    async def update_from_disk(self, worker: Worker, path: Path, version: int) -> None:
        """Load a checkpoint directory by the engine's own method. The worker must be paused."""
        body, limit = {"model_path": str(path), "weight_version": version}, self._timeouts.update
        await self._post(worker, "update_weights_from_disk", body, limit, retry=ONCE)

    async def update_distributed(
        self, worker: Worker, version: int, method: str, arguments: Mapping[str, Any]
    ) -> None:
        """Run an engine method that receives weights. The worker must be paused."""
        body = {**arguments, "engine_rpc": method, "weight_version": version}
        limit = self._timeouts.update
        await self._post(worker, "update_weights_from_distributed", body, limit, retry=ONCE)

    async def call(self, worker: Worker, method: str, arguments: Mapping[str, Any]) -> None:
        """Run an engine method that changes no weights; raise `NoSuchMethod` if it is missing."""
        # Without a version and without a cache reset, this route only runs the method.
        body = {**arguments, "engine_rpc": method}
        body |= {"allow_unpaused": True, "reset_prefix_cache": False}
        limit = self._timeouts.pause
        await self._post(worker, "update_weights_from_distributed", body, limit, retry=ONCE)

    async def init_group(
        self, worker: Worker, arguments: Mapping[str, Any], *, method: str | None = None
    ) -> None:
        """Join a group for weight transfer; the trainer must join it at the same time."""
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

    async def load_lora(
        self, worker: Worker, name: str, path: Path, *, fresh: bool = False
    ) -> int | None:
        """Load an adapter; reload it if the name is in use. `fresh` promises that this name and
        path never stood for other weights, so neither a reload nor a cache flush is needed. Return
        the engine's number of the adapter, or None if the engine does not report it."""
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

    async def read(self, worker: Worker) -> Facts:
        """Return the worker's label, and what state it is in."""
        reply = await self._post(worker, "get_weight_version", {})
        return Facts(
            parse_label(reply.get("version")),
            reply.get("enforced") is True,
            int(reply.get("asleep") or 0),
            reply.get("paused") is True,
        )

    async def declare_version(self, worker: Worker, version: int) -> None:
        """Set the label only; `IN_DOUBT` means that the worker's weights are unknown."""
        await self._post(worker, "set_weight_version", {"weight_version": version})

    async def set_taints(self, worker: Worker, taints: Sequence[str]) -> None:
        """Set the taints: the router sends requests here that require one of them, or none."""
        await self._post(worker, "model_taints", {"taints": list(taints)})

    async def stage(self, worker: Worker, order: Mapping[str, Any]) -> StageReply:
        """Have a worker stage weights, and return its answer when that has ended, or after the
        order's `seconds`. May be repeated. A worker that sleeps takes the memory of its weights
        back. Raise `NoSuchMethod` if the worker is a foreign one."""
        limit = self._timeouts.probe + order["seconds"]
        reply = await self._post_order(worker, STAGE, order, limit, retry=ONCE)
        if reply.get("refits") is not True:
            raise NoSuchMethod(f"The engine of {worker} has not loaded Rollway's plugin.")
        label = parse_label(reply.get("label"))
        return StageReply(label, list(reply["ranks"]), int(reply.get("asleep") or 0))

    async def refit(self, worker: Worker, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have a worker move to its staged weights, and return its report. Raise `RefitRefused` if
        it has not begun, `AnotherProcess` if it is gone, and `StillAsleep` if it has the weights
        and cannot serve them."""
        limit = self._timeouts.update + self._timeouts.pause
        return await self._post_order(worker, REFIT, order, limit, retry=ONCE)

    async def cancel_refit(self, worker: Worker) -> None:
        """End a refit that still waits for running requests; it is then refused."""
        await self._post_order(worker, CANCEL, {})

    async def discard(self, worker: Worker, identity: str) -> None:
        """Have a worker free weights that it staged; one that slept sleeps again."""
        await self._post_order(worker, DISCARD, {"identity": identity}, self._timeouts.pause)

    async def memory(self, worker: Worker, level: int = 0) -> list[dict[str, Any]]:
        """Return the memory of every rank; with a level, also why it may not sleep at it."""
        reply = await self._post_order(worker, MEMORY, {"level": level})
        return list(reply["ranks"])

    async def sleep(self, worker: Worker, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have a worker leave the routing, stop generating, drop its KV cache and release memory.
        Level 1 keeps the weights in the host's memory, level 2 forgets them. Return seconds, and
        the memory before and after."""
        return await self._post_order(worker, SLEEP, order, self._timeouts.pause, retry=ONCE)

    async def wake(self, worker: Worker) -> dict[str, Any]:
        """Have a worker take its memory back and serve the version from before its sleep. Return
        the same as `sleep` and the version; or `is_awake`, if there was nothing to do or nothing
        but a refit helps."""
        return await self._post_order(worker, WAKE, {}, self._timeouts.pause)

    async def _post_order(
        self,
        worker: Worker,
        name: str,
        body: Mapping[str, Any],
        timeout: float | None = None,
        retry: Retry = IDEMPOTENT,
    ) -> dict[str, Any]:
        """Call a route that Rollway's guard adds to a worker; raise `NoSuchMethod` without it."""
        try:
            return await self._post(worker, name, body, timeout, retry)
        except AdminError as error:
            cause = error.__cause__
            if isinstance(cause, RequestFailed) and cause.status == 404:
                raise refuse_order(worker) from error
            raise

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
            # Another process, with or without a guard, has the worker's address now.
            self._processes.pop(worker.admin_url, None)
            if route == REFIT:
                # This order is for the process that has staged the weights, and for no other.
                raise AnotherProcess(f"{worker} is gone: another process has its address.")
            # The worker refused before it did anything, so even an update may be sent again.
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
        process = self._processes.get(worker.admin_url)
        if process is None:
            url = f"{worker.admin_url}/engine/{DOOR}"
            limit, process = self._timeouts.probe, ""
            try:
                reply = await self._http.post(url, {}, timeout=limit, retry=IDEMPOTENT)
                process = str(reply.get("process") or "") if isinstance(reply, dict) else ""
            except RequestFailed as error:
                if error.status != 404:
                    raise
            self._processes[worker.admin_url] = process
        return process


def refuse_order(worker: Worker) -> NoSuchMethod:
    return NoSuchMethod(f"{worker} takes no orders of Rollway.", "Start the workers by Rollway.")


def _is_for_another_process(reply: Any) -> bool:
    """Return whether an order was refused because it is unsigned or signed for another process."""
    message = str(reply.get("message", "")) if isinstance(reply, dict) else ""
    return message.startswith((OTHER_PROCESS, UNSIGNED))


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
    state = reply.get("state") if isinstance(reply, dict) else None
    if state == "refused":
        return RefitRefused(f"{worker} refused `{name}`: {reason}.")
    if state == "asleep":
        return StillAsleep(f"{worker} cannot wake: {reason}.")
    if is_missing_method(method or name, reason):
        return NoSuchMethod(f"{worker} has no such engine method: {reason}.")
    if reason.startswith(UNSIGNED):
        return OtherSecret(
            f"{worker} refused `{name}`: {reason}.",
            "Attach to the stack by its name as the user who started it, or set "
            f"{SECRET} to the stack's secret.",
        )
    return AdminError(f"{worker} refused `{name}`: {reason}.")
