"""Receive and verify new weights while the worker generates, so that the pause is only a swap.

    rollway_stage ─► background: read ─► stage ─► verify ─► prepare
    rollway_staging ─► running, failed or ready
    rollway_swap ─► (paused) serve the staged weights ─► background: pack layers (CPU)

There are two ways to swap. On CPU, the serving model exchanges its parameters with a second model
that was loaded beside it (`Exchange`). Elsewhere the parameters stay where they are and get new
contents (`rollway.engine.in_place`).
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from rollway.engine.background import BackgroundTask, release_frames
from rollway.engine.fingerprint import Proof
from rollway.engine.in_place import InPlace
from rollway.engine.incoming import Incoming, zero_pad_all
from rollway.engine.kv_scales import restore_scales
from rollway.engine.memory import HostBuffers, explain_exhaustion, read_host_memory
from rollway.engine.patching import NoPatch, Served, apply_changes, set_served
from rollway.engine.shadow import ParameterArena, Shadow, explain_no_swap, wait_until_packed
from rollway.engine.sleep_mode import refuse_sleeping
from rollway.weights.checkpoint import TensorHeader, differences, refuse_differences
from rollway.weights.offer import Offer

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows only loggers below its own name


class SwapMethod(Protocol):
    """A strategy that puts a version into service."""

    @property
    def strategy(self) -> str: ...
    @property
    def reason(self) -> str:
        """Why this strategy, as one sentence."""
        ...

    @property
    def nbytes(self) -> int:
        """How much memory the staged weights take."""
        ...

    @property
    def reloaded(self) -> list[str]:
        """The layers that vLLM itself loads during the pause."""
        ...

    def receive(self) -> None:
        """Stage and verify the weights; runs in the background."""
        ...

    def swap(self) -> dict[str, float]:
        """Serve them; the worker must be paused. Return the seconds of each step."""
        ...

    def release(self, *, wait: bool = True) -> None:
        """Give back the memory of what was staged; without `wait`, a device gets it later."""
        ...


@dataclass(slots=True)
class Staging:
    """A version that is being staged in this worker."""

    incoming: Incoming
    served: dict[str, TensorHeader] | None
    arena: ParameterArena
    """Memory for the second model, kept between versions."""
    host: HostBuffers
    allow_cast: bool = False
    _method: SwapMethod | None = None
    _task: BackgroundTask | None = None
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
        why_not = explain_no_swap(incoming.worker)
        host = read_host_memory(offer.nbytes, self.arena.nbytes)
        can_exchange = not why_not and host.holds(offer.nbytes)
        with self._explain_exhaustion():
            if incoming.draft is not None:
                incoming.draft.start(in_place=not can_exchange)
            if can_exchange:
                self._method = Exchange(incoming, self.arena)
            else:
                self._method = InPlace(incoming, self.host)
        log.info("staging version %d (%s)", offer.version, why_not or "swap")
        device = next(incoming.model.parameters()).device
        self._task = BackgroundTask(f"version {offer.version}", self._run, device)

    def _explain_exhaustion(self) -> AbstractContextManager[None]:
        nbytes = self.offer.nbytes
        return explain_exhaustion(self.offer.version, nbytes, lambda: read_host_memory(nbytes))

    def notify_when_done(self, name: str) -> None:
        """Notify a socket of this machine at the end."""
        self._get_task().notify_when_done(name)

    def check(self) -> None:
        """Raise while the weights are being staged, and the error if that failed."""
        self._get_task().check()

    def report(self) -> dict[str, Any]:
        """Return how far the staging is. It never raises: in the engine's log, every exception is
        an error with a stack trace."""
        task, method = self._get_task(), self._get_method()
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
        return self._get_task().has_failed

    def _get_task(self) -> BackgroundTask:
        assert self._task is not None
        return self._task

    def _get_method(self) -> SwapMethod:
        assert self._method is not None
        return self._method

    def swap(self) -> dict[str, Any]:
        """Serve the staged weights; the worker must be paused. Return what was done."""
        self.check()
        refuse_sleeping(self.incoming.model)
        method = self._get_method()
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
        and releases them itself."""
        self.incoming.reader.release()
        with self._lock:
            self.incoming.abandoned.set()
            has_ended = self._has_ended
        if has_ended:
            self._release()

    def stop(self, seconds: float) -> bool:
        """Discard the weights, and wait for the background task; return whether it has ended."""
        self.discard()
        return self._get_task().wait(seconds)

    def _release(self) -> None:
        self._get_method().release()
        if self.incoming.draft is not None:
            self.incoming.draft.discard()

    def _run(self) -> None:
        failed = True
        try:
            wait_until_packed(self.incoming.worker)
            with self._explain_exhaustion():
                self._get_method().receive()
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


class Exchange:
    """Loads a second model beside the serving one and exchanges their parameters."""

    strategy = "exchange"

    def __init__(self, incoming: Incoming, arena: ParameterArena) -> None:
        """Create the second model; runs on the serving thread."""
        self._incoming = incoming
        self._shadow: Shadow | None = Shadow(incoming.worker, arena)
        self._proof: Proof | None = None
        self.nbytes = 0
        self.reloaded: list[str] = []
        self.reason = "nothing holds on to the addresses of the parameters"

    def receive(self) -> None:
        incoming, shadow = self._incoming, self._shadow
        assert shadow is not None
        incoming.restrict(shadow.model)
        shadow.place()
        if not self._receive_changes(shadow):
            with incoming.measure("load"):
                sums = incoming.reader.sums(incoming.offer)
                proof = self._proof = Proof(shadow.model, sums, incoming.slices.boxes)
                tensors = incoming.tensors(proof.by_sum.__contains__)
                shadow.load(zero_pad_all(incoming.slices, proof.collect(tensors)))
            with incoming.measure("prove"):
                self._verify(proof, shadow.model)
        assert self._proof is not None
        incoming.note_non_finite(self._proof.list_non_finite(shadow.model))
        with incoming.measure("prepare"):
            shadow.prepare()
            if incoming.draft is not None:
                incoming.draft.load(incoming.ranks)
        self.nbytes = incoming.offer.nbytes

    def _receive_changes(self, shadow: Shadow) -> bool:
        """Apply what changed since the version that the second model still has from the last
        refit. Otherwise note why not: it is then loaded as a whole."""
        incoming, contents = self._incoming, shadow.arena.contents
        shadow.arena.contents = None  # until all of it is verified
        try:
            with incoming.measure("load"):
                proof, count = apply_changes(incoming, shadow.model, contents)
            with incoming.measure("prove"):
                proof.check(shadow.model)
        except NoPatch as refusal:
            why_not = f"{refusal}"
        except RuntimeError as error:
            if incoming.abandoned.is_set():
                raise
            why_not = f"{error}"
        else:
            self._proof = proof
            self.reason += f"; {count} elements changed since the served version"
            return True
        self.reason += f"; no patch, because {why_not}" if why_not else ""
        return False

    def swap(self) -> dict[str, float]:
        assert self._proof is not None and self._shadow is not None
        set_served(self._incoming.worker, None)  # a patch needs the parameters of `InPlace`
        # Several ranks sum their fingerprints only now: while they serve, their group is in use.
        began = time.perf_counter()
        self._proof.compare(self._incoming.reduced)
        verified = time.perf_counter()
        self._shadow.exchange()
        if self._incoming.draft is not None:
            self._incoming.draft.exchange()
        self._shadow.start_packing()
        self._shadow.arena.contents = Served(
            self._incoming.offer.identity, self._proof.list_fingerprints()
        )
        return {"verify": verified - began, "exchange": time.perf_counter() - verified}

    def release(self, *, wait: bool = True) -> None:
        self._shadow, self._proof, self.nbytes = None, None, 0

    def _verify(self, proof: Proof, model: torch.nn.Module) -> None:
        try:
            proof.measure(model)
            proof.compare_alone()
            if self._incoming.ranks == 1:
                proof.compare()
        except RuntimeError:
            if proof.by_sum:
                # Read once more: this raises if the publisher changed the tensors meanwhile.
                for _ in self._incoming.reader.tensors(self._incoming.offer):
                    pass
            raise
