"""Refit in the engine's own loop, and refuse requests of other versions there.

    worker's process (`engine/refit_orders.py`)   engine's process (vLLM's EngineCore)
      │ collective_rpc("rollway_refit") ────────────► the staged weights are ready?   no: refused
      │                                               stop: abort, drain or freeze the requests
      │   its event loop may be busy with             reset the KV cache
      │   hundreds of streams meanwhile               `rollway_swap`
      │                                               label = the new version
      │ ◄── times, requests that were frozen ──────── resume

The engine's loop runs these steps one after the other between two of its own steps, so generation
stops only for the swap. A worker's Python process answers an admin call late when it carries many
streams (0.1 to 0.8 s with 256 of them), so no call stands between the stop and the resume.

A request names its version in its cache salt. The engine knows its own version, and aborts a
request of another version at once, without a token. Only the engine can do that exactly: a request
may wait anywhere in front of it while the weights change.

There are two ways into the engine's process. With one rank the model runs there, and vLLM imports
this module with the worker's extension. Several ranks have processes of their own; then vLLM loads
it as a plugin (`vllm.general_plugins`, which an installed Rollway declares). Where neither happens,
for example because `VLLM_PLUGINS` leaves it out, the fleet takes the worker for a foreign one.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rollway.engine import transferred

REFIT, CANCEL, LABEL = "rollway_refit", "rollway_cancel", "rollway_label"
"""What `collective_rpc` runs here, instead of in the worker."""
_ENGINE = "vllm.v1.engine.core"
# Dynamo puts a prefix in front of a salt. Rollway's salt is `v3`, or begins with `v3:`.
_SALT = re.compile(r"(?:dynamo-cache-salt:)?v(\d+)(?::|$)")
_LABEL_FIELD = "_rollway_label"
_OF_A_STACK = ("ROLLWAY_SECRET_FILE", "ROLLWAY_WEIGHTS_SECRET")
"""The variables of `rollway/signed_calls.py`; a process without both is none of a stack."""


def read_version(salt: str | None) -> int | None:
    """Return the version that a cache salt names; None if it names none."""
    match = _SALT.match(salt or "")
    return int(match[1]) if match else None


def load_as_plugin() -> None:
    """Add refits and the check of versions to the engine, if this is a process of a stack.

    vLLM calls this in all its processes, possibly twice; a fork has what its parent has."""
    if any(name in os.environ for name in _OF_A_STACK):
        install()


def install() -> bool:
    """Add them to the engine of this process; return whether it has one."""
    module = sys.modules.get(_ENGINE)
    core: Any = getattr(module, "EngineCore", None)
    process: Any = getattr(module, "EngineCoreProc", None)
    if core is None or process is None:
        return False
    if getattr(core, "_rollway_hook", False):
        return True
    add_request, collective_rpc = core.add_request, read_all_ranks(core.collective_rpc)

    def check_and_add(engine: Any, request: Any, request_wave: int = 0) -> None:
        transferred.watch(engine)
        if is_fatal(engine, request) and transferred.is_for_decode_worker(request):
            # The decode engine computes them itself, and refuses the request with an answer that
            # says so. Of a refusal here Dynamo would make an error 500 without a cause.
            request.sampling_params.prompt_logprobs = None
        if is_admitted(engine, request) and not is_fatal(engine, request):
            if getattr(engine, _LABEL_FIELD, None) is not None:
                setattr(request, transferred.VERSION_FIELD, read_version(request.cache_salt))
            add_request(engine, request, request_wave)
        else:
            transferred.refuse(engine, request, add_request)

    def run(
        engine: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if method == LABEL:
            setattr(engine, _LABEL_FIELD, (kwargs or {}).get("label"))
            return [True]
        if method == REFIT:
            engine._rollway_refit = Refit(engine, collective_rpc, **(kwargs or {}))
            return engine._rollway_refit.start()
        if method == CANCEL:
            if engine._rollway_refit is not None:
                engine._rollway_refit.cancel()
            return [True]
        return collective_rpc(engine, method, timeout, args, kwargs)

    core.add_request, core.collective_rpc, core._rollway_hook = check_and_add, run, True
    core._rollway_refit = None
    process.shutdown = stop_without_collecting(process.shutdown)
    handle_shutdown = process._handle_shutdown

    def release_and_stop(engine: Any) -> bool:
        """Stop, and release what is held for decode workers. vLLM waits until they have fetched
        their KV, or until its lease of 30 s is over, and has only 10 s to exit."""
        is_first_look = engine.shutdown_state.name == "REQUESTED"
        is_busy = bool(handle_shutdown(engine))
        if is_first_look and is_busy:
            transferred.release_held(engine, collective_rpc)
        return is_busy

    process._handle_shutdown = release_and_stop
    return True


def stop_without_collecting(shutdown: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a `shutdown` of the engine's process that does not search all objects for garbage.

    vLLM 0.31 does so on its way out, and Python again: 5 s of CPU time in an engine with NIXL, all
    for memory that the end of the process frees. A prefill and a decode worker on two cores stopped
    in 9.7 s, and now in 2.4 s; with other work on the cores, engines could outlast their 10 s."""

    def stop(engine: Any) -> None:
        gc.freeze()
        gc.unfreeze = lambda: None  # vLLM calls it, so that its collection finds everything
        shutdown(engine)
        gc.freeze()  # what the shutdown made; Python collects once more at the exit

    return stop


def is_fatal(engine: Any, request: Any) -> bool:
    """Return whether vLLM would die of a request. While an adapter is loaded, its CPU kernels need
    one row of logits for each request, and prompt log-probs have one for each token (0.31)."""
    params: Any = getattr(request, "sampling_params", None)
    config: Any = getattr(engine, "vllm_config", None)
    if getattr(params, "prompt_logprobs", None) is None or config is None:
        return False
    is_exposed = config.lora_config is not None and config.device_config.device_type == "cpu"
    return is_exposed and bool(engine.list_loras())


def read_all_ranks(collective_rpc: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return vLLM's `collective_rpc`, changed so that it reads the answers of all ranks.

    vLLM 0.31 raises at the first rank that failed, and leaves the answers of the ranks after it in
    their queues: the next call takes them for its own, and misses a rank whose swap failed."""

    def call(engine: Any, method: Any, timeout: Any, args: Any, kwargs: Any) -> list[Any]:
        executor: Any = getattr(engine, "model_executor", None)
        queues = getattr(executor, "response_mqs", None)
        if timeout is not None or not queues or not hasattr(executor, "futures_queue"):
            return collective_rpc(engine, method, timeout, args, kwargs)

        def read_all() -> list[Any]:
            answers = [queue.dequeue(timeout=None) for queue in queues]
            for status, answer in answers:
                if status.name != "SUCCESS":
                    raise RuntimeError(f"Worker failed with error '{answer}', please check its log")
            return [answer for _, answer in answers]

        future: Any = executor.collective_rpc(method, None, args, kwargs, non_block=True)
        future.get_response = read_all  # runs when the calls before this one are answered
        results: list[Any] = future.result()
        return results

    return call


def is_admitted(engine: Any, request: Any) -> bool:
    """Return whether the request names no version, or the one that the engine serves, and KV of
    another worker is of that version too. An engine without a label admits all: nobody has declared
    what it serves, and its answers are not stamped."""
    label, version = getattr(engine, _LABEL_FIELD, None), read_version(request.cache_salt)
    if label is None or version is None:
        return True
    return version == label and transferred.is_computed_for(request, version)


class Refit:
    """One refit in the engine. Everything here runs in the engine's own thread."""

    def __init__(
        self,
        engine: Any,
        collective_rpc: Callable[..., list[Any]],
        identity: str,
        mode: str,
        version: int,
        leaving: int,
        release: bool = False,
    ) -> None:
        """`version` is the label at the end, `leaving` the label until then. `release`: nobody
        reads the KV that this engine holds for decode workers."""
        self._engine = engine
        self._collective_rpc = collective_rpc
        self._identity, self._mode = identity, mode
        self._version, self._leaving, self._release = version, leaving, release
        self._before = getattr(engine, _LABEL_FIELD, None)
        self._was_paused = engine.is_scheduler_paused()
        """Whether somebody paused the engine, or a refit left it in doubt: it stays paused then
        unless this refit succeeds."""
        self._began = time.monotonic()
        self._result: Future[list[Any]] = Future()

    def start(self) -> Future[list[Any]]:
        """Stop the engine and swap as soon as it is idle. The result says `refused` if nothing was
        changed and the engine serves as before; an error means that its weights are unknown."""
        if "weights" in self._engine.model_executor.sleeping_tags:
            return self._refuse("its weights sleep")
        for staging in self._call("rollway_staging"):
            if staging["state"] != "ready":
                reason = staging.get("error") or f"the weights are {staging['state']}"
                return self._refuse(reason)
        setattr(self._engine, _LABEL_FIELD, self._leaving)
        try:
            if self._mode == "wait":
                transferred.drop_waiting(self._engine)
            if self._release:
                transferred.release_held(self._engine, self._collective_rpc)
            # `keep` freezes the requests. With the cache they lose their blocks, and compute them
            # again under the new weights.
            paused = self._engine.pause_scheduler(mode=self._mode, clear_cache=True)
        except Exception as error:  # noqa: BLE001 (whatever it is, the engine must continue)
            return self._restore(error)
        if paused is None:
            self._finish()
        else:
            paused.add_done_callback(self._finish_after)
        return self._result

    def cancel(self) -> None:
        """Continue with the old weights, if the engine still waits for running requests."""
        if not self._result.done():
            self._restore(RuntimeError("the refit was cancelled"))

    def _finish_after(self, paused: Future[None]) -> None:
        if self._result.done():
            return  # it was cancelled
        error = paused.exception()
        if error is None:
            self._finish()
        else:
            self._restore(error)

    def _finish(self) -> None:
        """Swap in every rank, and resume. If one rank fails, the engine stays paused: no sample is
        better than a wrong one."""
        stopped = time.monotonic()
        try:
            swaps = self._call("rollway_swap")
            # The ranks do the same; the slowest decides how long it takes.
            swap = max(swaps, key=lambda rank: sum(rank.get("seconds", {}).values()))
            frozen = self._count_tokens() if self._mode == "keep" else {}
            setattr(self._engine, _LABEL_FIELD, self._version)
            if self._mode != "keep":
                self._abort_others()
            if not self._engine.model_executor.is_sleeping:  # it resumes when its KV cache is back
                self._resume()
        except BaseException as error:  # noqa: BLE001 (the caller gets it)
            self._result.set_exception(error)
            return
        now = time.monotonic()
        # Requests that end by themselves are not part of the pause. Aborted or frozen requests
        # stop at the first moment, and the engine then finishes the step on the device.
        is_waiting = self._mode == "wait"
        report = {
            "state": "served",
            "paused_seconds": now - (stopped if is_waiting else self._began),
            "waited_seconds": stopped - self._began if is_waiting else 0.0,
            "stop_seconds": stopped - self._began,
            "swap_seconds": now - stopped,
            "swap": swap,
            "frozen": frozen,
        }
        self._result.set_result([report])

    def _restore(self, error: BaseException) -> Future[list[Any]]:
        """Continue with the old weights: none was changed."""
        if not self._was_paused:
            self._resume()
        return self._refuse(f"the engine could not be paused: {error}")

    def _resume(self) -> None:
        """Let the engine generate again, and wake its loop.

        Where steps overlap (on GPUs), vLLM finishes a pause inside of the loop that waits for work,
        and next waits for a message. Frozen requests are none: without one, they would stand still
        until somebody sends a request."""
        from vllm.v1.engine import EngineCoreRequestType

        self._engine.resume_scheduler()
        self._engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def _refuse(self, reason: str) -> Future[list[Any]]:
        setattr(self._engine, _LABEL_FIELD, self._before)
        self._result.set_result([{"state": "refused", "error": reason}])
        return self._result

    def _abort_others(self) -> None:
        """Abort requests of other versions that still wait: they were admitted before the stop, and
        had not begun, or were preempted."""
        from vllm.v1.request import RequestStatus

        scheduler = self._engine.scheduler
        requests = scheduler.requests.values()
        others = [r.request_id for r in requests if not is_admitted(self._engine, r)]
        aborted = scheduler.finish_requests(others, RequestStatus.FINISHED_ABORTED)
        self._engine._send_abort_outputs(aborted)

    def _count_tokens(self) -> dict[str, int]:
        """Return how many tokens each request has; its later tokens are of the new version."""
        requests = self._engine.scheduler.requests.values()
        return {request.request_id: request.num_output_tokens for request in requests}

    def _call(self, method: str) -> list[Any]:
        arguments = {"identity": self._identity}
        return self._collective_rpc(self._engine, method, None, (), arguments)
