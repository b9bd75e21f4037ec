"""Weights pulled over NIXL into a worker: its own part of them, and given on when that is asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from rollway.engine.slices import Slices
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.offer import Offer
from rollway.weights.planning.transfers import Total
from rollway.weights.planning.wants import hf_slices

if TYPE_CHECKING:
    from rollway.weights.transports.nixl_reader import NixlReader

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is below its own name


class NixlReceiver:
    """Keeps a reader, with its connections and plans, as long as the same is asked of it."""

    def __init__(self) -> None:
        self._reader: NixlReader | None = None
        self._slices = Slices()
        self._made_for: tuple[bool, Slices] | None = None

    def narrow(self, offer: Offer, slices: Slices) -> Slices:
        """Bring no more than this from now on, as far as parts can be proved; what was settled
        on is returned. The tensors of `tensors` are then such parts."""
        pieces = self._reader_for(offer).pieces(offer) if slices.boxes else {}
        self._slices = slices.made_of(pieces)
        return self._slices

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self._reader_for(offer).headers(offer)

    def sums(self, offer: Offer) -> Mapping[str, int]:
        return {}  # digests are compared

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        reader = self._reader_for(offer)
        yield from reader.tensors(offer)
        log.info(
            "version %d over nixl: %d bytes moved, %d needed, %d offered, from %s",
            offer.version,
            reader.total.moved,
            reader.total.needed,
            offer.nbytes,
            ", ".join(reader.total.sources),
        )

    @property
    def total(self) -> Total | None:
        """Of the last version: bytes needed, bytes moved, and from whom."""
        return self._reader.total if self._reader is not None else None

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def let_go(self) -> None:
        """Give others nothing of a version that is not going to be served."""
        if self._reader is not None:
            self._reader.stop_serving()

    def _reader_for(self, offer: Offer) -> NixlReader:
        from rollway.weights.transports.nixl import FANOUT
        from rollway.weights.transports.nixl_reader import NixlReader

        cut = bool(self._slices.boxes)
        # Whoever has a part of a version cannot give it to others.
        wanted = bool(offer.where.get(FANOUT)) and not cut, self._slices
        if self._reader is None or self._made_for != wanted:
            if self._reader is not None:
                self._reader.close()
            wants = partial(hf_slices, cuts=self._slices.boxes) if cut else None
            self._reader, self._made_for = NixlReader(wants=wants, serve=wanted[0]), wanted
        return self._reader
