"""A version in many shards: every trainer rank publishes what it owns, receivers put it together.

    rank 0 ─ publish_shards ─► slot 0 ─┐
    rank 1 ─ publish_shards ─► slot 1 ─┼─ joined ─► one offer ─► worker: box by box, in place
    …                                  ┘

Nothing is gathered on the trainer's side. Each shard says which boxes of which Hugging Face tensors
lie in it (`rollway.weights.sources` knows that for FSDP2, tensor parallel and Megatron models), so
a receiver needs no trainer installed and copies every element once.
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
from rollway.weights.coverage import check_covered
from rollway.weights.layout import ELEMENT_BYTES, Box
from rollway.weights.offer import Count, Entry, Lies, Manifest, Offer
from rollway.weights.transports.shm import ShmPublisher, ShmReader, check_unchanged

if TYPE_CHECKING:
    from rollway.weights.sources import Held


class RankSlot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank published."""

    slot: Annotated[str, msgspec.Meta(max_length=255)]
    identity: Annotated[str, msgspec.Meta(min_length=8, max_length=128)]
    nbytes: Count


def publish_shards(publisher: ShmPublisher, version: int, held: Sequence[Held]) -> Offer:
    """On every trainer rank: the shards that it owns. Bring all ranks' offers to one rank, and
    join them there."""
    mine = [one for one in held if one.owned_here]
    lies = {
        one.shard.name: [
            Lies(p.name, p.box.start, p.box.stop, p.at, p.transposed) for p in one.pieces
        ]
        for one in mine
    }
    return publisher.publish(version, [(one.shard.name, one.tensor) for one in mine], lies)


def joined(offers: Sequence[Offer]) -> Offer:
    """One offer from those of all ranks, in the order of the ranks."""
    versions = {offer.version for offer in offers}
    if len(versions) != 1:
        raise UsageError(f"Ranks offer different versions: {sorted(versions)}.")
    slots = [RankSlot(str(o.where["slot"]), o.identity, o.nbytes) for o in offers]
    identity = hashlib.sha256("".join(one.identity for one in slots).encode()).hexdigest()[:32]
    where = {"ranks": msgspec.to_builtins(slots)}
    return Offer("shm", versions.pop(), identity, sum(o.nbytes for o in offers), where)


_Slots = Annotated[list[RankSlot], msgspec.Meta(min_length=1, max_length=1 << 16)]


class _Part(NamedTuple):
    rank: int
    entry: Entry
    lies: Lies


class ShardReader:
    """Reads a joined offer as Hugging Face tensors."""

    def __init__(self, reader: ShmReader, offer: Offer) -> None:
        try:
            ranks = msgspec.convert(offer.where.get("ranks"), _Slots)
        except msgspec.ValidationError as error:
            raise WeightsError(
                f"This is no offer of a trainer's ranks: {error}.", "Publish the version again."
            ) from error
        self._reader = reader
        self._offers = [
            Offer("shm", offer.version, one.identity, one.nbytes, {"slot": one.slot})
            for one in ranks
        ]
        self._manifests = [reader.manifest(one) for one in self._offers]
        self._parts = _by_tensor(self._manifests)

    def headers(self) -> dict[str, TensorHeader]:
        return {
            name: TensorHeader(parts[0].entry.dtype, _shape(parts), "")
            for name, parts in self._parts.items()
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        pairs = zip(self._offers, self._manifests, strict=True)
        views = [self._reader.views(offer, manifest) for offer, manifest in pairs]
        left = Counter((p.rank, p.entry.name) for parts in self._parts.values() for p in parts)
        for name, parts in self._parts.items():
            yield name, _made(parts, views)
            for part in parts:
                left[part.rank, part.entry.name] -= 1
                if not left[part.rank, part.entry.name]:  # all of it has been taken
                    view = views[part.rank][part.entry.name]
                    check_unchanged(view, part.entry, self._offers[part.rank])
        for offer, manifest in zip(self._offers, self._manifests, strict=True):
            self._reader.check_there(offer, manifest)


def _by_tensor(manifests: Sequence[Manifest]) -> dict[str, list[_Part]]:
    """What makes up each Hugging Face tensor: all of it, exactly once, or an error."""
    found: dict[str, list[_Part]] = {}
    for rank, manifest in enumerate(manifests):
        for entry in manifest.entries:
            for lies in entry.lies:
                found.setdefault(lies.name, []).append(_Part(rank, entry, lies))
    published = sum(entry.nbytes for manifest in manifests for entry in manifest.entries)
    for name, parts in found.items():
        kinds = {(len(part.lies.stop), part.entry.dtype) for part in parts}
        if len(kinds) > 1:
            raise WeightsError(f"Ranks do not agree on the shape or dtype of {name}.")
        for part in parts:
            _check_inside(part)
        try:
            check_covered(name, _shape(parts), (Box(p.lies.start, p.lies.stop) for p in parts))
        except UsageError as error:
            raise WeightsError(error.message, error.hint) from error
        # Boxes that all lie in one place would make up a tensor of any size.
        nbytes = math.prod(_shape(parts)) * ELEMENT_BYTES[parts[0].entry.dtype]
        if nbytes > published:
            raise WeightsError(
                f"{name} would have {nbytes} bytes, and all ranks published {published}.",
                "Publish the version again.",
            )
    return found


def _shape(parts: Sequence[_Part]) -> tuple[int, ...]:
    """As far as the parts go; a worker compares it with what it serves."""
    return tuple(max(column) for column in zip(*(part.lies.stop for part in parts), strict=True))


def _check_inside(part: _Part) -> None:
    extents = Box(part.lies.start, part.lies.stop).shape
    extents = extents[::-1] if part.lies.transposed else extents
    ends = [a + n for a, n in zip(part.lies.at, extents, strict=False)]
    sizes = (len(part.lies.at), len(extents), len(part.entry.shape))
    if len(set(sizes)) > 1 or any(
        end > size for end, size in zip(ends, part.entry.shape, strict=True)
    ):
        raise WeightsError(f"{part.lies.name} is said to lie outside of {part.entry.name}.")


def _made(parts: Sequence[_Part], views: Sequence[dict[str, Tensor]]) -> Tensor:
    """One tensor; in place when it lies in one shard in one run."""
    if len(parts) == 1:
        return _cut(parts[0], views).contiguous()
    first = views[parts[0].rank][parts[0].entry.name]
    whole = torch.empty(_shape(parts), dtype=first.dtype)
    for part in parts:
        box = zip(part.lies.start, part.lies.stop, strict=True)
        whole[tuple(slice(a, b) for a, b in box)] = _cut(part, views)
    return whole


def _cut(part: _Part, views: Sequence[dict[str, Tensor]]) -> Tensor:
    extents = Box(part.lies.start, part.lies.stop).shape
    extents = extents[::-1] if part.lies.transposed else extents
    view = views[part.rank][part.entry.name]
    cut = view[tuple(slice(a, a + n) for a, n in zip(part.lies.at, extents, strict=True))]
    return cut.t() if part.lies.transposed else cut
