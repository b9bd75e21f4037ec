"""`rollway.up` and `rollway.attach`: a stack as a context manager, sync and async.

    with rollway.up(model="/models/tiny", workers=2) as stack:          # blocking
        group = stack.rollouts().generate([1, 2, 3], n=4)

    async with rollway.up("stack.yaml") as stack:                       # the same, awaited
        group = await stack.rollouts().generate([1, 2, 3], n=4)

`up` owns the stack: leaving the block stops it, and so does the death of this process. `attach`
uses a stack that runs elsewhere, and leaves it running.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollway import sync
from rollway.errors import (
    RequestFailed,
    RollwayError,
    StackNotRunning,
    StartError,
    Unreachable,
    UsageError,
)
from rollway.fleet.workers import Source
from rollway.http import ONCE, Http
from rollway.spec import AdminTimeouts, StackSpec, is_loopback, load_spec
from rollway.stack import local
from rollway.stack.local import Progress, RunningStack
from rollway.stack.ray import launcher
from rollway.stack.ray.head_client import WatchedHttp
from rollway.stack.ray.launcher import RayStack
from rollway.stack.ray.placement import Placement
from rollway.stack.state import StackDir, StackState, list_stacks
from rollway.stack_handle import Stack
from rollway.weights.adapter import is_adapter

__all__ = ["Opening", "Stack", "attach", "make_spec", "up"]

DEFAULT_RL_PORT = 8001  # Dynamo's own default

SpecSource = StackSpec | Mapping[str, Any] | str | Path


class Opening:
    """A stack to be entered by `with` or by `async with`; `up` and `attach` return it."""

    def __init__(self, open_stack: Callable[[AsyncExitStack], Awaitable[Stack]]) -> None:
        self._open_stack = open_stack
        self._cleanup = AsyncExitStack()
        self._portal: sync.Portal | None = None

    async def __aenter__(self) -> Stack:
        try:
            return await self._open_stack(self._cleanup)
        except BaseException:
            await self._cleanup.aclose()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self._cleanup.aclose()

    def __enter__(self) -> sync.Stack:
        self._portal = sync.Portal()
        try:
            return sync.Stack(self._portal.run(self.__aenter__()), self._portal)
        except BaseException:
            self._portal.close()
            raise

    def __exit__(self, *_: object) -> None:
        assert self._portal is not None
        try:
            self._portal.run(self._cleanup.aclose())
        finally:
            self._portal.close()


def up(
    spec: SpecSource | None = None,
    *,
    model: str | Path | None = None,
    workers: int | None = None,
    on: str | None = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
    **fields: Any,
) -> Opening:
    """Start a stack; it is ready when the block is entered, and stopped when it is left.

    Args:
        spec: a YAML file, a mapping, or a `StackSpec`.
        model: the path of a checkpoint, instead of a spec.
        workers: how many workers serve the first model.
        on: "local", or "ray" for a Ray cluster; "ray=HOST:PORT" for the one at an address.
        overrides: changes of single fields, for example "router.mode=kv".
        progress: called with the state of the stack while it starts and stops.
        **fields: fields of the spec, for example `name="trainer"`.

    Returns:
        A context manager: `with` gives a `rollway.Stack`, `async with` a `rollway.aio.Stack`.

    Raises:
        SpecError: the spec is wrong.
        StartError: the stack did not start; the error has the end of the log. Raised on entering.

    Example:
        with rollway.up(model="/models/policy", workers=2) as stack:
            group = stack.rollouts().generate(prompt_ids, n=8)
    """
    full = make_spec(spec, model=model, workers=workers, on=on, overrides=overrides, **fields)
    return Opening(partial(_start, full, progress))


def up_placed(
    spec: StackSpec, placement: Placement, on_end: Callable[[StackNotRunning], None]
) -> Opening:
    """Start a stack on Ray whose replicas the caller has placed; `on_end` is called with the cause
    if it ends before the block does."""
    return Opening(partial(_start, spec, None, placement=placement, on_end=on_end))


def attach(
    target: str,
    *,
    rl_url: str | None = None,
    watch: bool = True,
    timeouts: AdminTimeouts | None = None,
    listing: Source | None = None,
    secret: str | None = None,
    record: bool = True,
) -> Opening:
    """Use a running stack; leaving the block does not stop it.

    Args:
        target: the name of a stack of this machine, or of one on Ray: in the cluster that this
            process is connected to or $RAY_ADDRESS names, or where this user started it from here;
            or the address of any Dynamo frontend. A plain vLLM server works as well (for refits
            with VLLM_SERVER_DEV_MODE=1). `dgd://NAMESPACE/NAME` is a DynamoGraphDeployment of the
            Kubernetes cluster: directly from a pod, elsewhere through the API server's proxy.
        rl_url: the address of the RL worker listing, if it is not the frontend's host, port 8001.
        watch: notice workers that join meanwhile, and bring them up to date.
        timeouts: limits of calls to the workers; by default those of the stack's spec.
        listing: where the workers of a stack at an address are listed, for deployments without
            the RL worker listing: a `rollway.fleet.workers.HealthListing`, for example.
        secret: what orders to the workers and offers of weights are signed with, for a stack at an
            address; by default $ROLLWAY_WEIGHTS_SECRET.
        record: record what this process does with a stack at an address that Rollway did not start:
            refits, rollouts, versions, steps. One that it started has its own `observe`.

    Returns:
        A context manager: `with` gives a `rollway.Stack`, `async with` a `rollway.aio.Stack`.

    Raises:
        StackNotRunning: no stack of that name runs.
        UsageError: the target is not an HTTP address.
        Unreachable: nothing answers at the address. Raised on entering.
        ClusterError: the Kubernetes cluster does not answer, or not to this user.

    Example:
        with rollway.attach("http://10.0.0.5:8000") as stack:
            stack.refit(3, "/checkpoints/step-3")
    """
    if "://" not in target and (stack := _find_on_ray(target)) is not None:
        return Opening(partial(_attach_on_ray, stack, watch, timeouts))
    options = {"timeouts": timeouts, "listing": listing, "secret": secret, "record": record}
    if target.startswith("dgd://"):
        return Opening(partial(_attach_graph, target, rl_url, watch, options))
    return Opening(partial(_attach, *_find_addresses(target, rl_url), watch, options))


def make_spec(
    spec: SpecSource | None = None,
    *,
    model: str | Path | None = None,
    workers: int | None = None,
    on: str | None = None,
    overrides: Sequence[str] = (),
    **fields: Any,
) -> StackSpec:
    """Return the spec that `up` would run; arguments and errors are those of `up`.

    Example:
        spec = rollway.make_spec("stack.yaml", workers=4)
        spec.models[0].replicas  # 4
    """
    if model is not None:
        fields["models"] = [{"path": str(model)}]
    if workers is not None:
        overrides = [*overrides, f"models.0.replicas={workers}"]
    if on is not None:
        launcher, address = parse_launcher(on)
        overrides = [*overrides, f"launcher={launcher}"]
        overrides += [f"ray.address={address}"] if address else []
    return load_spec(spec, overrides, **fields)


def parse_launcher(on: str) -> tuple[str, str | None]:
    """Return the launcher and the address of `local`, `ray` or `ray=ADDRESS`."""
    launcher, has_address, address = on.partition("=")
    if launcher not in ("local", "ray") or (has_address and (launcher == "local" or not address)):
        raise UsageError(
            f"`{on}` is nothing that a stack can run on.", "Use local, ray, or ray=HOST:PORT."
        )
    return launcher, address or None


# --- up ------------------------------------------------------------------------------------


async def _start(
    spec: StackSpec,
    progress: Progress | None,
    cleanup: AsyncExitStack,
    placement: Placement | None = None,
    on_end: Callable[[StackNotRunning], None] | None = None,
) -> Stack:
    http = await cleanup.enter_async_context(WatchedHttp(on_end))
    running = await _start_processes(spec, progress, cleanup, placement)
    if isinstance(running, RayStack):
        stack = _open_on_ray(http, running, None, cleanup)
    else:
        state = running.state
        stack = Stack(http, state.frontend, state.rl, state.models, state.name, Path(state.run_dir))
    # The process that started the frontend brings joining workers up to date.
    return await _begin(stack, cleanup, watch=spec.join is None)


async def _begin(stack: Stack, cleanup: AsyncExitStack, *, watch: bool) -> Stack:
    """Ask the workers what they serve, and have what that starts end with the block."""
    cleanup.callback(stack.close_history)
    cleanup.push_async_callback(stack.unwatch)
    await stack.learn(watch=watch)
    return stack


def _open_on_ray(
    http: WatchedHttp, running: RayStack, timeouts: AdminTimeouts | None, cleanup: AsyncExitStack
) -> Stack:
    watch = asyncio.create_task(http.watch(running.access))
    cleanup.callback(watch.cancel)
    state = running.state
    addresses = state.frontend, state.rl
    # Without its run directory, which is on the node of the services.
    return Stack(
        http, *addresses, state.models, state.name, timeouts=timeouts, access=running.access
    )


async def _start_processes(
    spec: StackSpec,
    progress: Progress | None,
    cleanup: AsyncExitStack,
    placement: Placement | None,
) -> RunningStack | RayStack:
    """Start in a thread. Cancelling this coroutine ends the start and waits for its end."""
    cancelled = threading.Event()

    def report(state: StackState) -> None:
        if cancelled.is_set():
            cancelled.clear()  # raise once: the stop that follows reports its progress here too
            raise StartError("The start was cancelled.")
        if progress is not None:
            progress(state)

    async def stop(running: RunningStack | RayStack) -> None:
        if isinstance(running, RayStack) and spec.ray.lifetime == "detached":
            running.close()  # `rollway down` ends it
            return
        await asyncio.shield(asyncio.to_thread(running.stop, progress))

    def launch() -> RunningStack | RayStack:
        if spec.launcher == "ray":
            return launcher.start(spec, report, placement=placement)
        return local.start(spec, report)

    start = asyncio.ensure_future(asyncio.to_thread(launch))
    try:
        running = await asyncio.shield(start)
    except asyncio.CancelledError:
        cancelled.set()
        with contextlib.suppress(RollwayError):
            # The start may have finished at the moment of the cancel: then it must be stopped.
            cleanup.push_async_callback(stop, await start)
        raise
    cleanup.push_async_callback(stop, running)
    return running


# --- attach --------------------------------------------------------------------------------


def _find_on_ray(name: str) -> RayStack | None:
    """Return the stack of the Ray cluster with this name, unless one of this machine has it."""
    state = None if "/" in name else StackDir(name).read()
    return None if state is not None and state.is_supervised else launcher.find(name)


async def _attach_on_ray(
    running: RayStack, watch: bool, timeouts: AdminTimeouts | None, cleanup: AsyncExitStack
) -> Stack:
    cleanup.callback(running.close)
    http = await cleanup.enter_async_context(WatchedHttp())
    return await _begin(_open_on_ray(http, running, timeouts, cleanup), cleanup, watch=watch)


async def _attach_graph(
    target: str, rl_url: str | None, watch: bool, options: dict[str, Any], cleanup: AsyncExitStack
) -> Stack:
    # By its name: that package is above this module, and needs an extra.
    address = importlib.import_module("rollway.kubernetes.address")
    frontend, listed_at = await cleanup.enter_async_context(address.reach_graph(target))
    # Its record has the graph's name: the frontend may be reached by a port of this moment.
    options = {**options, "label": target}
    return await _attach(frontend, rl_url or listed_at, "", watch, options, cleanup)


async def _attach(
    frontend: str,
    rl_url: str,
    name: str,
    watch: bool,
    options: dict[str, Any],
    cleanup: AsyncExitStack,
) -> Stack:
    http = await cleanup.enter_async_context(Http())
    models, plain_vllm = await _list_models(http, frontend)
    # A model whose only worker restarts is not listed by the frontend, but it is in the record.
    state = StackDir(name).read() if name else None
    models = models if state is None else state.models
    if not models:
        raise RollwayError(
            f"The frontend at {frontend} serves no model yet.",
            "Wait for its workers to register, then attach again.",
        )
    stack = Stack(http, frontend, rl_url, models, name, plain_vllm=plain_vllm, **options)
    return await _begin(stack, cleanup, watch=watch)


async def _list_models(http: Http, frontend: str) -> tuple[list[str], bool]:
    """Return the models of a frontend, and whether it is a plain vLLM server."""
    try:
        answer = await http.get(f"{frontend}/v1/models", timeout=10.0, retry=ONCE)
        names = [str(entry["id"]) for entry in answer["data"]]
        plain_vllm = any(entry.get("owned_by") == "vllm" for entry in answer["data"])
    except Unreachable as error:
        raise Unreachable(
            f"No Dynamo frontend answers at {frontend}: {error.message}",
            "Is it running, and is the address right? `rollway status` lists local stacks.",
        ) from error
    except (RequestFailed, KeyError, TypeError) as error:
        raise RequestFailed(
            f"The server at {frontend} is not a Dynamo frontend ({error}).",
            "Give the frontend's address, for example http://127.0.0.1:8000.",
            status=getattr(error, "status", 200),
        ) from error
    return [name for name in names if not is_adapter(name)], plain_vllm


def _find_addresses(target: str, rl_url: str | None) -> tuple[str, str, str]:
    """Return the addresses of frontend and RL listing, and the name of a stack of this machine."""
    if "://" not in target:
        state = StackDir(target).read()
        if state is None or not state.is_supervised:
            raise local.make_not_running_error(target)
        if state.phase == "starting":
            raise StackNotRunning(
                f"The stack `{target}` is still starting.",
                "Attach when it is ready: `rollway status` shows how far it is.",
            )
        return state.frontend, rl_url or state.rl, target
    frontend = target.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(frontend)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https"):
        raise UsageError(f"`{target}` is not an HTTP address.", "Use http://host:port.")
    state = _find_local_stack(frontend, host, port)
    if state is not None:
        return frontend, rl_url or state.rl, state.name
    default = f"http://{f'[{host}]' if ':' in host else host}:{DEFAULT_RL_PORT}"
    return frontend, rl_url or default, ""


def _find_local_stack(frontend: str, host: str, port: int | None) -> StackState | None:
    """Return the recorded stack of this user whose frontend has that address. One that has joined
    it has the same address, and no frontend."""
    for state in list_stacks():
        is_here = any(process.role == "frontend" for process in state.processes)
        is_same_port = is_loopback(host) and urlsplit(state.frontend).port == port
        if is_here and (is_same_port or state.frontend == frontend) and state.is_supervised:
            return state
    return None
