"""Receive and verify new weights while the worker generates, so that the pause is only a copy, or
on CPU vLLM's load.

    rollway_stage ─► background: read ─► stage ─► verify ─► prepare
    rollway_staging ─► running, failed or ready
    rollway_swap ─► (paused) serve the staged weights

The parameters stay where they are and get new contents, by whichever strategy of
`rollway.engine.in_place` the worker allows.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from rollway.engine.background import BackgroundTask, release_frames
from rollway.engine.in_place import InPlace
from rollway.engine.incoming import Incoming
from rollway.engine.kv_scales import restore_scales
from rollway.engine.memory import HostBuffers
from rollway.engine.sleep_mode import refuse_sleeping
from rollway.weights.checkpoint import TensorHeader, differences, refuse_differences
from rollway.weights.offer import Offer

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows only loggers below its own name


@dataclass(slots=True)
class Staging:
    """A version that is being staged in this worker."""

    incoming: Incoming
    served: dict[str, TensorHeader] | None
    host: HostBuffers
    allow_cast: bool = False
    _method: InPlace = field(init=False)
    _task: BackgroundTask = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _has_ended: bool = False
    """Whether the background task uses the staged memory no more."""

    @property
    def offer(self) -> Offer:
        return self.incoming.offer

    def start(self) -> None:
        """Raise if the weights do not fit this worker; otherwise start to receive them."""
        incoming, offer = self.incoming, self.offer
        if self.served is not None:
            problems = differences(incoming.headers, self.served, allow_cast=self.allow_cast)
            source = offer.where.get("path", f"version {offer.version}")
            refuse_differences(problems, source)
        self._method = InPlace(incoming, self.host)
        log.info("staging version %d", offer.version)
        device = next(incoming.model.parameters()).device
        self._task = BackgroundTask(f"version {offer.version}", self._run, device)

    def notify_when_done(self, name: str) -> None:
        """Notify a socket of this machine at the end."""
        self._task.notify_when_done(name)

    def check(self) -> None:
        """Raise while the weights are being staged, and the error if that failed."""
        self._task.check()

    def report(self) -> dict[str, Any]:
        """Return how far the staging is. It never raises: in the engine's log, every exception is
        an error with a stack trace."""
        task, method = self._task, self._method
        state = "running" if not task.is_done else "failed" if task.has_failed else "ready"
        known = task.is_done and not task.has_failed
        return {
            "state": state,
            "error": task.error,
            "strategy": method.strategy if known else "",
            "reason": method.reason if known else "",
            "seconds": dict(self.incoming.seconds),
            "bytes": method.nbytes,
            "digest": self.incoming.reader.get_digest(self.offer) if known else "",
        }

    @property
    def has_failed(self) -> bool:
        return self._task.has_failed

    def swap(self) -> dict[str, Any]:
        """Serve the staged weights; the worker must be paused. Return what was done."""
        self.check()
        refuse_sleeping(self.incoming.model)
        method = self._method
        began = time.perf_counter()
        steps = method.swap()
        clear_kv_after_non_finite(self.incoming)
        if self.incoming.scales is not None:
            self.incoming.scales.install()
        else:
            restore_scales(self.incoming.worker)
        report = {
            "strategy": method.strategy,
            "reason": method.reason,
            "seconds": steps,
            "staged_bytes": method.nbytes,
            "reloaded": method.reloaded,
        }
        seconds = self.incoming.seconds
        seconds |= {f"swap/{name}": value for name, value in steps.items()}
        seconds["swap"] = time.perf_counter() - began
        # Without waiting: a device takes longer to free memory than to copy the weights.
        method.release(wait=False)
        self.incoming.finish()
        spent = ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items())
        log.info("version %d: %s, because %s", self.offer.version, *list(report.values())[:2])
        log.info("version %d is served (%s)", self.offer.version, spent)
        return report

    def discard(self) -> None:
        """Release the received weights. A background task that still runs stops at its next tensor
        (with deltas, once the version is written), and releases them itself."""
        self.incoming.reader.release()
        with self._lock:
            self.incoming.abandoned.set()
            has_ended = self._has_ended
        if has_ended:
            self._release()

    def stop(self, seconds: float) -> bool:
        """Discard the weights, and wait for the background task; return whether it has ended."""
        self.discard()
        return self._task.wait(seconds)

    def _release(self) -> None:
        self._method.release()
        if self.incoming.draft is not None:
            self.incoming.draft.discard()

    def _run(self) -> None:
        failed = True
        try:
            self._method.receive()
            failed = False
        except BaseException as error:
            release_frames(error)  # their variables hold staged tensors
            self.incoming.reader.release()
            raise
        finally:
            with self._lock:
                self._has_ended = True
                unwanted = failed or self.incoming.abandoned.is_set()
            if unwanted:
                self._release()


def clear_kv_after_non_finite(incoming: Incoming) -> None:
    """Clear the memory of the KV cache if the version that leaves may have filled it with NaN.

    vLLM's attention on CPU multiplies what lies behind the end of a sequence by zero, and that is
    NaN: blocks of a later version would be spoilt by what was freed there."""
    worker = incoming.worker
    if getattr(worker, "_rollway_kv_in_doubt", False):
        with torch.inference_mode():
            for memory in tree_leaves(getattr(worker.model_runner, "kv_caches", [])):
                memory.zero_()
    worker._rollway_kv_in_doubt = not incoming.is_finite
