"""A version on its way into a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from rollway.engine.background import share_cores
from rollway.engine.drafts import Draft
from rollway.engine.slices import find_slices, rank_of
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Slices
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Reader, never


@dataclass(slots=True)
class Incoming:
    """A version that is offered to a worker, and how its tensors are received."""

    worker: Any
    reader: Reader
    offer: Offer
    headers: dict[str, TensorHeader]
    """The policy's tensors."""
    ranks: int
    reduced: Callable[[torch.Tensor], torch.Tensor]
    """Sums a tensor over the ranks; all of them must call it."""
    draft: Draft | None = None
    """The draft model whose weights are part of this version."""
    seconds: dict[str, float] = field(default_factory=dict)
    slices: Slices = field(default_factory=Slices)
    """What this rank receives; everything until `restrict` was called."""
    abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def model(self) -> torch.nn.Module:
        """The model that serves."""
        model: torch.nn.Module = self.worker.model_runner.get_model()
        return model

    def restrict(self, model: torch.nn.Module) -> None:
        """Receive only what this rank holds of the model, if the transport can."""
        if self.reader.can_restrict:
            mine = find_slices(rank_of(self.worker), self.headers, model)
            self.slices = self.reader.restrict(self.offer, mine)

    def tensors(self, summed: Callable[[str], bool] = never) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the policy's tensors, and keep those of the draft model."""
        tensors = self.reader.tensors(self.offer, summed)
        for pair in tensors if self.draft is None else self.draft.keep_draft(tensors):
            if self.abandoned.is_set():
                raise RuntimeError(f"version {self.offer.version} was discarded")
            yield pair

    def finish(self) -> None:
        """Let the reader know that the version is served and no view of it is used any more."""
        self.reader.finish(self.offer)

    def measure(self, name: str) -> Stopwatch:
        """Measure a part of the staging, and use as many cores as are free for it."""
        share_cores(alone=is_idle(self.worker))
        return Stopwatch(self.seconds, name)


@dataclass(slots=True)
class Stopwatch:
    """Writes the seconds of a `with` block into a dict."""

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
