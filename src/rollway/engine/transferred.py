"""Free or discard the KV that a prefill worker holds for a decode worker, when weights change.

    prefill engine                                decode engine
      computes a prompt, keeps its blocks           reads the blocks, then says "done"
      frees them after "done", or when their        if it drops a request and says nothing, the
      lease of 30 s is over                         blocks stay where they are

A decode engine that stands still for longer than the lease (a stopped process, a router that
stalls, seconds in UCX on a starved machine) would read blocks that hold other KV by then, and vLLM
does not notice. So the prefill engine adds to the hand-over when it computed the blocks, and a
decode engine uses only what it has read before the lease was over.

A pause of the prefill engine ends only when it holds no blocks. So a decode engine says "done" for
everything that it drops, and a prefill engine whose blocks nobody reads any more frees them itself.
`rollway/fleet/stages.py` has the whole protocol. All of this runs in the engine's own thread.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

EXPIRED = float("-inf")
POLL_MICROSECONDS = 1000
"""After this time NIXL's thread looks for work even without an event; it rounds up to 1 ms."""
COMPUTED_AT = "rollway_computed_at"
"""The field of vLLM's `kv_transfer_params` with the time at which the blocks were computed."""
COMPUTED_FOR = "rollway_computed_for"
"""The field with the version that computed them. An engine without a label names none."""
VERSION_FIELD = "rollway_version"
"""Where vLLM's `Request` has the version of which the engine was when it admitted the request."""


def rest_between_polls() -> None:
    """Have NIXL's thread of this process wait for events, on a machine without CUDA.

    NIXL's Python API gives its progress thread no delay, so the thread takes a whole core, also
    when nothing is transferred. A prefill and a decode worker then leave two cores nothing for the
    model: transfers of 70 KB took 43 ms. With a delay the thread sleeps until UCX has an event."""
    if "VLLM_NIXL_SIDE_CHANNEL_PORT" not in os.environ:
        return
    import torch

    if torch.cuda.is_available():
        return  # there are cores to spare, and microseconds count
    try:
        api: Any = importlib.import_module("nixl._api")
    except ImportError:  # the connector is of another kind, or vLLM says what is missing
        return
    bindings = getattr(api, "nixlBind", None)
    make_agent = getattr(bindings, "nixlAgent", None)
    if bindings is None or make_agent is None or hasattr(make_agent, "rollway_delay"):
        return

    def make_resting_agent(name: str, config: Any) -> Any:
        config.pthrDelay = config.pthrDelay or POLL_MICROSECONDS
        return make_agent(name, config)

    make_resting_agent.rollway_delay = POLL_MICROSECONDS  # type: ignore[attr-defined]
    bindings.nixlAgent = make_resting_agent


def watch(engine: Any) -> None:
    """Have this engine use no KV of another worker that may have been freed before it was read."""
    scheduler: Any = getattr(_get_connector(engine), "connector_scheduler", None)
    lease = getattr(scheduler, "_kv_lease_duration", None)
    if lease is None or hasattr(scheduler, "_rollway_lease"):
        return
    scheduler._rollway_lease = lease
    finish, match = scheduler.request_finished, scheduler.get_num_new_matched_tokens
    update = scheduler.update_connector_output

    def request_finished(request: Any, blocks: Any) -> Any:
        held, params = finish(request, blocks)
        if params:
            params[COMPUTED_AT] = time.time()
            params[COMPUTED_FOR] = getattr(request, VERSION_FIELD, None)
        return held, params

    def get_num_new_matched_tokens(request: Any, computed: int) -> Any:
        # Without KV from elsewhere this engine computes the prompt itself, and vLLM tells the
        # prefill worker that the blocks are not needed.
        return (0, False) if get_age(request) > lease / 2 else match(request, computed)

    def update_connector_output(output: Any) -> None:
        late = [name for name in output.finished_recving or () if _is_late(engine, name, lease)]
        if late:
            log.warning("dropped KV of %d requests that may have been freed before", len(late))
            _abort(engine, late)
        update(output)

    scheduler.request_finished = request_finished
    scheduler.get_num_new_matched_tokens = get_num_new_matched_tokens
    scheduler.update_connector_output = update_connector_output


def get_age(request: Any) -> float:
    """Return how many seconds ago the KV of a request was computed by another worker; 0 if none
    was."""
    computed_at = (request.kv_transfer_params or {}).get(COMPUTED_AT)
    return 0.0 if computed_at is None else time.time() - computed_at


def is_computed_for(request: Any, version: int) -> bool:
    """Return whether this engine computes the prompt itself, or gets KV of that version."""
    params = request.kv_transfer_params or {}
    return not params.get("do_remote_prefill") or params.get(COMPUTED_FOR) == version


def is_for_decode_worker(request: Any) -> bool:
    """Return whether this engine only computes the prompt, for a decode worker."""
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


def _is_late(engine: Any, name: str, lease: float) -> bool:
    request = engine.scheduler.requests.get(name)
    return request is not None and not request.is_finished() and get_age(request) > lease


def _abort(engine: Any, requests: list[str]) -> None:
    from vllm.v1.request import RequestStatus

    aborted = engine.scheduler.finish_requests(requests, RequestStatus.FINISHED_ABORTED)
    engine._send_abort_outputs(aborted)


def refuse(engine: Any, request: Any, add_request: Callable[[Any, Any, int], None]) -> None:
    """Abort a request at once, without a token."""
    if _has_connector(engine) and (request.kv_transfer_params or {}).get("do_remote_prefill"):
        # vLLM's own way for requests that end before they begin: its connector then tells the
        # prefill worker to free the blocks.
        request.abort_immediately = True
        add_request(engine, request, 0)
    # As vLLM does with requests that arrive while it shuts down.
    engine._send_abort_outputs_to_client([request.request_id], request.client_index)


def drop_waiting(engine: Any) -> None:
    """Abort requests that have not begun, if some may wait for KV of another worker: vLLM pauses
    without waiting for those transfers, and then fails to clear the cache they write to."""
    if not _has_connector(engine):
        return
    from vllm.v1.request import RequestStatus

    scheduler = engine.scheduler
    waiting = [
        request.request_id
        for request in scheduler.requests.values()
        if request.status != RequestStatus.RUNNING and not request.is_finished()
    ]
    _abort(engine, waiting)


def release_held(engine: Any, collective_rpc: Callable[..., list[Any]]) -> None:
    """Free all blocks that are held for decode workers, of which none reads them any more."""
    if not _has_connector(engine):
        return
    scheduler = getattr(_get_connector(engine), "connector_scheduler", None)
    # Requests that ended in the last step: the workers hear of them at the next one.
    expire(getattr(scheduler, "_reqs_need_send", None))
    collective_rpc(engine, "rollway_release_kv", None, (), {})


def release_in_worker() -> int:
    """Let the leases of all held blocks of this worker end now; return their number."""
    from vllm.distributed import kv_transfer

    if not kv_transfer.has_kv_transfer_group():
        return 0
    worker = getattr(kv_transfer.get_kv_transfer_group(), "connector_worker", None)
    return expire(getattr(worker, "_reqs_to_send", None))


def expire(leases: dict[str, float] | None) -> int:
    """Let leases end at the next step; return their number. Without any, as with a connector of
    another kind, they end when their time is over."""
    leases = {} if leases is None else leases
    for request in leases:
        leases[request] = EXPIRED
    return len(leases)


def _has_connector(engine: Any) -> bool:
    return _get_connector(engine) is not None


def _get_connector(engine: Any) -> Any:
    """Return vLLM's KV connector; None if the engine, or this vLLM's scheduler, has none."""
    return getattr(engine.scheduler, "get_kv_connector", lambda: None)()
