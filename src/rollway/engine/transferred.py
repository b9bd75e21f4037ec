"""KV that a prefill worker holds for a decode worker, when one of them refuses it or changes
weights.

    prefill engine                                decode engine
      computes a prompt, keeps its blocks           reads the blocks, then says "done"
      frees them after "done", or when their        a request that it drops without a word leaves
      lease of 30 s is over                         the blocks where they are

A pause of the prefill engine ends only when it holds no blocks. So a decode engine says "done" for
everything that it drops, and a prefill engine whose blocks nobody reads any more frees them itself.
`rollway/fleet/stages.py` has the whole protocol. All of this runs in the engine's own thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

EXPIRED = float("-inf")


def refuse(engine: Any, request: Any, add_request: Callable[[Any, Any, int], None]) -> None:
    """Take a request out at once, without a token."""
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
    aborted = scheduler.finish_requests(waiting, RequestStatus.FINISHED_ABORTED)
    engine._send_abort_outputs(aborted)


def release_held(engine: Any, collective_rpc: Callable[..., list[Any]]) -> None:
    """Free all blocks that are held for decode workers, of which none reads them any more."""
    if not _has_connector(engine):
        return
    scheduler = getattr(engine.scheduler.get_kv_connector(), "connector_scheduler", None)
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
    for request in leases or ():
        leases[request] = EXPIRED
    return len(leases or ())


def _has_connector(engine: Any) -> bool:
    return engine.scheduler.get_kv_connector() is not None
