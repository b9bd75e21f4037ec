"""Receive weights over NIXL inside a worker: only its own part, and served to peers on request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from rollway.weights.checkpoint import TensorHeader
from rollway.weights.offer import Offer
from rollway.weights.planning.transfers import Total
from rollway.weights.planning.wants import hf_slices
from rollway.weights.slices import WHOLE, Slices
from rollway.weights.transports.base import Reader, never

if TYPE_CHECKING:
    from rollway.weights.transports.nixl_reader import NixlReader

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows only loggers below its own name


class NixlReceiver(Reader):
    """Keeps a NixlReader, with its connections and plans, as long as the request stays the same."""

    can_restrict = True

    def __init__(self) -> None:
        self._reader: NixlReader | None = None
        self._slices = WHOLE
        self._opened_for: tuple[bool, Slices] | None = None

    def restrict(self, offer: Offer, slices: Slices) -> Slices:
        """Receive only these parts, as far as they consist of whole pieces, which have digests."""
        pieces = self._find_reader(offer).pieces(offer) if slices.boxes else {}
        self._slices = slices.made_of(pieces)
        return self._slices

    def headers(self, offer: Offer) -> dict[str, TensorHeader]:
        return self._find_reader(offer).headers(offer)

    def tensors(
        self, offer: Offer, summed: Callable[[str], bool] = never
    ) -> Iterator[tuple[str, torch.Tensor]]:
        reader = self._find_reader(offer)
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
        """The bytes needed and moved for the last version, and their sources."""
        return self._reader.total if self._reader is not None else None

    def release(self) -> None:
        if self._reader is not None:
            self._reader.stop_serving()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    narrow, let_go = restrict, release  # temporary

    def _find_reader(self, offer: Offer) -> NixlReader:
        from rollway.weights.transports.nixl import FANOUT
        from rollway.weights.transports.nixl_reader import NixlReader

        is_restricted = bool(self._slices.boxes)
        # A worker that has only a part of a version cannot serve it to peers.
        request = bool(offer.where.get(FANOUT)) and not is_restricted, self._slices
        if self._reader is None or self._opened_for != request:
            if self._reader is not None:
                self._reader.close()
            wants = partial(hf_slices, cuts=self._slices.boxes) if is_restricted else None
            self._reader, self._opened_for = NixlReader(wants=wants, serve=request[0]), request
        return self._reader
