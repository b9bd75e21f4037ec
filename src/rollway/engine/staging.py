"""New weights are brought to a worker and checked while it generates; the pause is only a swap.

    rollway_stage ─► a thread: read ─► load into a shadow ─► prove ─► prepare
    rollway_staged ─► still at it, or wrong, or ready
    rollway_swap ─► (paused) exchange with the served model

Where a shadow cannot be exchanged, the thread brings the tensors into memory and proves their
bytes, and the swap has vLLM load them in place. Where memory does not hold them twice, the swap
reads them straight from where they were published.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from rollway.engine.drafts import Draft
from rollway.engine.errand import Errand, share_cores
from rollway.engine.fingerprint import Proof
from rollway.engine.shadow import Room, Shadow, exchangeable
from rollway.engine.slices import WHOLE, Slices, rank_of, slices
from rollway.weights.checkpoint import TensorHeader, differences, refuse_differences
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Reader, never

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is below its own name

Way = Literal["exchange", "memory", "in place"]
_SPARE = 1.25
"""How much more memory than the weights take must be free to hold them twice."""


@dataclass(slots=True)
class Staging:
    """One version on its way into one worker."""

    worker: Any
    receiver: Reader
    offer: Offer
    new: dict[str, TensorHeader]
    served: dict[str, TensorHeader] | None
    ranks: int
    reduced: Any
    room: Room
    """For the second model; kept between versions."""
    allow_cast: bool = False
    draft: Draft | None = None
    """Weights of a draft model that come with these."""
    way: Way = "exchange"
    seconds: dict[str, float] = field(default_factory=dict)
    _shadow: Shadow | None = None
    _proof: Proof | None = None
    _slices: Slices = WHOLE
    _tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    _errand: Errand | None = None

    def start(self) -> None:
        """Refuse what does not fit here; bring the rest."""
        if self.served is not None:
            words = differences(self.new, self.served, allow_cast=self.allow_cast)
            source = self.offer.where.get("path", f"version {self.offer.version}")
            refuse_differences(words, source)
        why_not = exchangeable(self.worker)
        enough = free_bytes() + self.room.nbytes > _SPARE * self.offer.nbytes
        self.way = "in place" if not enough else "memory" if why_not else "exchange"
        if self.draft is not None:
            self.draft.start(in_place=self.way != "exchange")
        if self.way == "exchange":
            self._shadow = Shadow(self.worker, self.room)
        log.info("staging version %d: %s (%s)", self.offer.version, self.way, why_not or "swap")
        self._errand = Errand(f"version {self.offer.version}", self._run)

    def when_done(self, name: str) -> None:
        """Knock at a socket of this machine then; whoever listens need not ask again and again,
        which the engine's log would be full of."""
        self._started().when_done(name)

    def check(self) -> None:
        """Raise while it is not ready, and for ever if it failed."""
        self._started().check()

    @property
    def failed(self) -> bool:
        return self._started().failed

    def _started(self) -> Errand:
        assert self._errand is not None
        return self._errand

    def swap(self) -> None:
        """Serve the staged weights; the worker must be paused."""
        self.check()
        began = time.perf_counter()
        if self._shadow is not None:
            assert self._proof is not None
            # Here for several ranks: while they serve, their groups are in use.
            self._proof.judge(self.reduced)
            self._shadow.exchange()
            if self.draft is not None:
                self.draft.exchange()
        else:
            self._load_in_place()
        self.seconds["swap"] = time.perf_counter() - began
        self._shadow, self._proof, self._tensors = None, None, []
        spent = ", ".join(f"{name} {value:.3f} s" for name, value in self.seconds.items())
        log.info("version %d is served (%s)", self.offer.version, spent)

    def drop(self) -> None:
        """Let go of what was brought; the thread, if it still runs, ends by itself."""
        self._shadow, self._proof, self._tensors = None, None, []
        self.receiver.release()
        if self.draft is not None:
            self.draft.drop()

    def _run(self) -> None:
        try:
            self._bring()
        except BaseException:
            self.drop()
            raise

    def _bring(self) -> None:
        if self.receiver.can_restrict:
            model = self._shadow.model if self._shadow else self.worker.model_runner.get_model()
            mine = slices(rank_of(self.worker), self.new, model)
            self._slices = self.receiver.restrict(self.offer, mine)
        if self._shadow is not None:
            with self._timed("load"):
                sums = self.receiver.sums(self.offer)
                self._proof = Proof(self._shadow.model, sums, self._slices.boxes)
                tensors = self._policy(self._proof.by_sum.__contains__)
                self._shadow.load(self._slices.hollowed(self._proof.watching(tensors)))
            with self._timed("prove"):
                self._prove(self._proof, self._shadow.model)
            with self._timed("prepare"):
                self._shadow.prepare()
                if self.draft is not None:
                    self.draft.load(self.ranks)
        elif self.way == "memory":
            with self._timed("load"):
                self._tensors = [(n, t.clone()) for n, t in self._policy()]

    def _prove(self, proof: Proof, model: torch.nn.Module) -> None:
        try:
            proof.look(model)
            proof.judge_alone()
            if self.ranks == 1:
                proof.judge()
        except RuntimeError:
            if proof.by_sum:  # were they still what was published? It is known if not
                for _ in self.receiver.tensors(self.offer):
                    pass
            raise

    def _load_in_place(self) -> None:
        model = self.worker.model_runner.get_model()
        proof = Proof(model, cuts=self._slices.boxes)
        brought = iter(self._tensors) if self.way == "memory" else self._policy()
        self.worker.reload_weights(weights_iterator=self._slices.hollowed(proof.watching(brought)))
        proof.check(model, self.reduced)
        if self.draft is not None:
            self.draft.load_in_place(self.ranks)

    def _policy(self, summed: Callable[[str], bool] = never) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self.receiver.tensors(self.offer, summed)
        return tensors if self.draft is None else self.draft.beside(tensors)

    def _timed(self, name: str) -> Any:
        share_cores(alone=idle(self.worker))
        return _Timed(self.seconds, name)


@dataclass(slots=True)
class _Timed:
    into: dict[str, float]
    name: str
    began: float = 0.0

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        self.into[self.name] = time.perf_counter() - self.began


def idle(worker: Any) -> bool:
    """Whether it generates nothing right now, as far as can be seen."""
    batch = getattr(worker.model_runner, "input_batch", None)
    return getattr(batch, "num_reqs", None) == 0


def free_bytes() -> int:
    """Of memory, on this machine and in this container."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return free  # no limit
    return min(free, limit - used)
