"""Read a version in many shards: each trainer rank publishes what it owns, readers assemble it.

    rank 0 ─ publish ─► slot 0 ─┐
    rank 1 ─ publish ─► slot 1 ─┼─ join_offers ─► one offer ─► worker: box by box, in place
    …                           ┘

The trainer gathers nothing. Each shard lists the boxes of Hugging Face tensors that it contains
(`rollway.weights.sources` finds them for FSDP2, tensor parallel and Megatron models), so a reader
needs no trainer installed and copies every element once.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import torch
from torch import Tensor

from rollway.errors import UsageError, WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import word_sum
from rollway.weights.layout import ELEMENT_BYTES, Box, check_covered
from rollway.weights.offer import Count, Entry, Manifest, Offer, PlacedBox

if TYPE_CHECKING:
    from rollway.weights.transports.shm import ShmReader


class RankSlot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The slot that one rank published."""

    slot: Annotated[str, msgspec.Meta(max_length=255)]
    identity: Annotated[str, msgspec.Meta(min_length=8, max_length=128)]
    nbytes: Count


_Slots = Annotated[list[RankSlot], msgspec.Meta(min_length=1, max_length=1 << 16)]


def join_offers(offers: Sequence[Offer]) -> Offer:
    """Join the offers of all ranks of a trainer into one, for one refit.

    Args:
        offers: what each rank's shm publisher returned, in the order of the ranks.

    Raises:
        UsageError: the ranks offer different versions.

    Returns:
        One offer for `Stack.refit`.

    Example:
        stack.refit(step, rollway.join_offers(offers))
    """
    versions = {offer.version for offer in offers}
    if len(versions) != 1:
        raise UsageError(
            f"Ranks offer different versions: {sorted(versions)}.", "Publish one on all of them."
        )
    slots = [slot for offer in offers for slot in _read_slots(offer)]
    identity = hashlib.sha256("".join(slot.identity for slot in slots).encode()).hexdigest()[:32]
    where = {"ranks": msgspec.to_builtins(slots)}
    return Offer("shm", versions.pop(), identity, sum(slot.nbytes for slot in slots), where)


def _read_slots(offer: Offer) -> list[RankSlot]:
    if "ranks" not in offer.where:
        return [RankSlot(str(offer.where["slot"]), offer.identity, offer.nbytes)]
    try:
        return msgspec.convert(offer.where["ranks"], _Slots)
    except msgspec.ValidationError as error:
        raise WeightsError(
            f"This is no offer of a trainer's ranks: {error}.", "Publish the version again."
        ) from error


def check_unchanged(view: Tensor, entry: Entry, offer: Offer) -> None:
    if word_sum(view) != entry.word_sum:
        raise WeightsError(
            f"{entry.name} of version {offer.version} changed while it was read.",
            "Publish the version again, and change nothing before the refit has ended.",
        )


class _Part(NamedTuple):
    """A box of a Hugging Face tensor, inside a shard of a rank."""

    rank: int
    entry: Entry
    placed: PlacedBox

    def cut_from(self, views: Sequence[dict[str, Tensor]]) -> Tensor:
        sizes = zip(self.placed.at, self.placed.extent, strict=True)
        box = views[self.rank][self.entry.name][tuple(slice(a, a + n) for a, n in sizes)]
        return box.t() if self.placed.transposed else box


class ShardReader:
    """Reads a joined offer as Hugging Face tensors."""

    def __init__(self, reader: ShmReader, offer: Offer) -> None:
        self._reader = reader
        self._offers = [
            Offer("shm", offer.version, rank.identity, rank.nbytes, {"slot": rank.slot})
            for rank in _read_slots(offer)
        ]
        self._manifests = [reader.manifest(rank_offer) for rank_offer in self._offers]
        self._parts = group_by_tensor(self._manifests)

    def headers(self) -> dict[str, TensorHeader]:
        return {
            name: TensorHeader(parts[0].entry.dtype, _find_shape(parts), "")
            for name, parts in self._parts.items()
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        ranks = list(zip(self._offers, self._manifests, strict=True))
        views = [self._reader.views(offer, manifest) for offer, manifest in ranks]
        unread = Counter((p.rank, p.entry.name) for parts in self._parts.values() for p in parts)
        for name, parts in self._parts.items():
            yield name, assemble(parts, views)
            for part in parts:
                unread[part.rank, part.entry.name] -= 1
                # A shard has one sum for all tensors in it, so compare it after the last of them.
                if not unread[part.rank, part.entry.name]:
                    view = views[part.rank][part.entry.name]
                    check_unchanged(view, part.entry, self._offers[part.rank])
        for offer, manifest in ranks:
            self._reader.check_unreplaced(offer, manifest)


def group_by_tensor(manifests: Sequence[Manifest]) -> dict[str, list[_Part]]:
    """Return the parts of each Hugging Face tensor; raise unless they cover it exactly once."""
    parts_by_name: dict[str, list[_Part]] = {}
    for rank, manifest in enumerate(manifests):
        for entry in manifest.entries:
            for placed in entry.placed:
                parts_by_name.setdefault(placed.name, []).append(_Part(rank, entry, placed))
    published = sum(entry.nbytes for manifest in manifests for entry in manifest.entries)
    for name, parts in parts_by_name.items():
        if len({(len(part.placed.stop), part.entry.dtype) for part in parts}) > 1:
            raise WeightsError(f"Ranks do not agree on the shape or dtype of {name}.")
        shape = _find_shape(parts)
        try:
            check_covered(name, shape, (Box(p.placed.start, p.placed.stop) for p in parts))
        except UsageError as error:
            raise WeightsError(error.message, error.hint) from error
        # Boxes that all refer to the same bytes could describe a tensor of any size.
        nbytes = math.prod(shape) * ELEMENT_BYTES[parts[0].entry.dtype]
        if nbytes > published:
            raise WeightsError(
                f"{name} would have {nbytes} bytes, and all ranks published {published}.",
                "Publish the version again.",
            )
    return parts_by_name


def _find_shape(parts: Sequence[_Part]) -> tuple[int, ...]:
    """Return the smallest shape that contains all parts; a worker compares it with its own."""
    return tuple(max(column) for column in zip(*(part.placed.stop for part in parts), strict=True))


def assemble(parts: Sequence[_Part], views: Sequence[dict[str, Tensor]]) -> Tensor:
    """Return the whole tensor: in place, if it is contiguous in one shard."""
    if len(parts) == 1:
        return parts[0].cut_from(views).contiguous()
    dtype = views[parts[0].rank][parts[0].entry.name].dtype
    whole = torch.empty(_find_shape(parts), dtype=dtype)
    for part in parts:
        box = zip(part.placed.start, part.placed.stop, strict=True)
        whole[tuple(slice(a, b) for a, b in box)] = part.cut_from(views)
    return whole
