"""Receives and verifies new weights while the worker generates, so that the pause is only a swap.

    rollway_stage ─► background: read ─► load into a shadow ─► verify ─► prepare
    rollway_staged ─► running, failed or ready
    rollway_swap ─► (paused) exchange with the serving model

If the shadow's parameters cannot be swapped in, the background task copies the verified tensors
into memory, and vLLM loads them in place during the pause. If memory does not hold the weights
twice, vLLM reads them during the pause from where they were published.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from rollway.engine.background import BackgroundTask, share_cores
from rollway.engine.drafts import Draft
from rollway.engine.fingerprint import Proof
from rollway.engine.shadow import ParameterArena, Shadow, explain_no_swap
from rollway.engine.slices import find_slices, rank_of, zero_padded
from rollway.weights.checkpoint import TensorHeader, differences, refuse_differences
from rollway.weights.layout import Slices
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Reader, never

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows only loggers below its own name

SwapStrategy = Literal["exchange", "memory", "in place"]
_SPARE = 1.25
"""Free memory that is needed to hold the weights twice, as a multiple of their size."""


@dataclass(slots=True)
class Staging:
    """A version that is being staged in this worker."""

    worker: Any
    reader: Reader
    offer: Offer
    new: dict[str, TensorHeader]
    served: dict[str, TensorHeader] | None
    ranks: int
    reduced: Any
    arena: ParameterArena
    """Memory for the second model, kept between versions."""
    allow_cast: bool = False
    draft: Draft | None = None
    """The draft model whose weights are part of this version."""
    strategy: SwapStrategy = "exchange"
    seconds: dict[str, float] = field(default_factory=dict)
    _shadow: Shadow | None = None
    _proof: Proof | None = None
    _slices: Slices = field(default_factory=Slices)
    _tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    _task: BackgroundTask | None = None

    def start(self) -> None:
        """Raise if the weights do not fit this worker; otherwise start to receive them."""
        if self.served is not None:
            problems = differences(self.new, self.served, allow_cast=self.allow_cast)
            source = self.offer.where.get("path", f"version {self.offer.version}")
            refuse_differences(problems, source)
        why_not = explain_no_swap(self.worker)
        fits = free_bytes() + self.arena.nbytes > _SPARE * self.offer.nbytes
        self.strategy = "in place" if not fits else "memory" if why_not else "exchange"
        if self.draft is not None:
            self.draft.start(in_place=self.strategy != "exchange")
        if self.strategy == "exchange":
            self._shadow = Shadow(self.worker, self.arena)
        reason = why_not or "swap"
        log.info("staging version %d: %s (%s)", self.offer.version, self.strategy, reason)
        self._task = BackgroundTask(f"version {self.offer.version}", self._run)

    def notify_when_done(self, name: str) -> None:
        """Notify a socket of this machine at the end. Each poll that finds the task still running
        is an error in the engine's log, so callers should not poll often."""
        self._running_task().notify_when_done(name)

    def check(self) -> None:
        """Raise while the weights are being staged, and the error if that failed."""
        self._running_task().check()

    @property
    def has_failed(self) -> bool:
        return self._running_task().has_failed

    def _running_task(self) -> BackgroundTask:
        assert self._task is not None
        return self._task

    def swap(self) -> None:
        """Serve the staged weights; the worker must be paused."""
        self.check()
        began = time.perf_counter()
        if self._shadow is not None:
            assert self._proof is not None
            # Several ranks sum their fingerprints only now: while they serve, their group is in
            # use.
            self._proof.compare(self.reduced)
            self._shadow.exchange()
            if self.draft is not None:
                self.draft.exchange()
        else:
            self._load_in_place()
        self.seconds["swap"] = time.perf_counter() - began
        self._shadow, self._proof, self._tensors = None, None, []
        spent = ", ".join(f"{name} {value:.3f} s" for name, value in self.seconds.items())
        log.info("version %d is served (%s)", self.offer.version, spent)

    def discard(self) -> None:
        """Release the received weights. If the background task still runs, it ends by itself."""
        self._shadow, self._proof, self._tensors = None, None, []
        self.reader.release()
        if self.draft is not None:
            self.draft.discard()

    def _run(self) -> None:
        try:
            self._receive()
        except BaseException:
            self.discard()
            raise

    def _receive(self) -> None:
        if self.reader.can_restrict:
            model = self._shadow.model if self._shadow else self.worker.model_runner.get_model()
            mine = find_slices(rank_of(self.worker), self.new, model)
            self._slices = self.reader.restrict(self.offer, mine)
        if self._shadow is not None:
            with self._measure("load"):
                sums = self.reader.sums(self.offer)
                self._proof = Proof(self._shadow.model, sums, self._slices.boxes)
                tensors = self._policy_tensors(self._proof.by_sum.__contains__)
                self._shadow.load(zero_padded(self._slices, self._proof.collect(tensors)))
            with self._measure("prove"):
                self._verify(self._proof, self._shadow.model)
            with self._measure("prepare"):
                self._shadow.prepare()
                if self.draft is not None:
                    self.draft.load(self.ranks)
        elif self.strategy == "memory":
            with self._measure("load"):
                self._tensors = [(n, t.clone()) for n, t in self._policy_tensors()]

    def _verify(self, proof: Proof, model: torch.nn.Module) -> None:
        try:
            proof.measure(model)
            proof.compare_alone()
            if self.ranks == 1:
                proof.compare()
        except RuntimeError:
            if proof.by_sum:
                # Read once more: this raises if the publisher changed the tensors meanwhile.
                for _ in self.reader.tensors(self.offer):
                    pass
            raise

    def _load_in_place(self) -> None:
        model = self.worker.model_runner.get_model()
        proof = Proof(model, cuts=self._slices.boxes)
        tensors = iter(self._tensors) if self.strategy == "memory" else self._policy_tensors()
        self.worker.reload_weights(
            weights_iterator=zero_padded(self._slices, proof.collect(tensors))
        )
        proof.check(model, self.reduced)
        if self.draft is not None:
            self.draft.load_in_place(self.ranks)

    def _policy_tensors(
        self, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self.reader.tensors(self.offer, summed)
        return tensors if self.draft is None else self.draft.keep_draft(tensors)

    def _measure(self, name: str) -> Any:
        share_cores(alone=is_idle(self.worker))
        return _Stopwatch(self.seconds, name)


@dataclass(slots=True)
class _Stopwatch:
    into: dict[str, float]
    name: str
    began: float = 0.0

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        self.into[self.name] = time.perf_counter() - self.began


def is_idle(worker: Any) -> bool:
    """Return whether the worker generates nothing right now, as far as is visible here."""
    batch = getattr(worker.model_runner, "input_batch", None)
    return getattr(batch, "num_reqs", None) == 0


def free_bytes() -> int:
    """Return the free memory of this machine, within the limit of this container."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return free  # no limit
    return min(free, limit - used)
