"""Offers: the small JSON messages that announce a version of the weights to the workers.

An offer says which version it is, how many bytes, and where they are; the list of tensors is
stored with the bytes. An offer reaches a worker over its admin port, so it is signed with the
secret that the stack gave its workers. A worker accepts no unsigned offer, and a worker without a
secret accepts none at all. Offers contain no code and are never unpickled. docs/security.md lists
what else the admin port accepts, and from whom.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from rollway.errors import WeightsError
from rollway.signed_calls import SECRET, is_same, make_mac, read_stack_secret
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import ELEMENT_BYTES, Box, Piece
from rollway.weights.untrusted import MAX_DIMS, MAX_NAME, check_shape

STILL = "still staging"  # A worker's answer while it has not received all weights
Transport = Literal[
    "files", "delta", "shm", "cuda_ipc", "collective", "nixl", "verl_buckets", "prime_rl_broadcast"
]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Dims = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMS)]
MAX_MANIFEST_BYTES = 1 << 28  # The largest list of tensors that is read, from any place
_MAX_OFFER_BYTES = 64 << 20
_MAX_TENSORS = 1 << 22
_PUBLISH_AGAIN = "Publish the version again."


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of the weights, as its publisher announces it: a few hundred bytes of JSON.

    Example:
        offer = weights.publish(1, model.named_parameters())
        offer.transport, offer.version, offer.nbytes
    """

    transport: Transport
    version: Count
    identity: Annotated[str, msgspec.Meta(min_length=8, max_length=128)]  # Equal for equal weights
    nbytes: Count
    where: dict[str, Any]  # Where the bytes are; only the transport reads it
    repeatable: bool = True  # Whether a receiver that comes later can still receive this version
    mac: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""

    def sign(self, secret: str) -> Offer:
        """Return this offer with a signature, or unchanged if the secret is empty."""
        return msgspec.structs.replace(self, mac=_compute_mac(self, secret)) if secret else self

    def as_json(self) -> dict[str, Any]:
        """Return plain values, for another process of the same job."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


def parse_offer(raw: Mapping[str, Any]) -> Offer:
    """Return an offer from a trusted place, for example a rank of the same job; the signature is
    not checked."""
    try:
        offer = msgspec.convert(dict(raw), Offer)
        # `where` may contain anything, so this also refuses values that have no JSON.
        size = len(msgspec.json.encode(offer))
        if size > _MAX_OFFER_BYTES:
            raise ValueError(f"it takes {size} bytes, more than {_MAX_OFFER_BYTES}")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WeightsError(
            f"This is no offer of weights: {str(error)[:300]}.", _PUBLISH_AGAIN
        ) from error
    return offer


def read_offer(raw: Mapping[str, Any], secret: str | None = None) -> Offer:
    """Return an offer if it is signed with `secret`, or by default with this stack's secret."""
    offer = parse_offer(raw)
    secret = read_stack_secret() if secret is None else secret
    if not secret:
        raise WeightsError(
            "This worker was started without a secret, so it accepts no offer of weights.",
            f"Start it by `rollway up`, or set {SECRET} for the worker and for the trainer.",
        )
    if not is_same(offer.mac, _compute_mac(offer, secret)):
        raise WeightsError(
            "An offer of weights is not signed with this stack's secret.",
            f"Attach to the stack by its name, or set {SECRET} to the one its workers have.",
        )
    return offer


def _compute_mac(offer: Offer, secret: str) -> str:
    plain = msgspec.structs.replace(offer, mac="")
    body = msgspec.json.encode(plain, order="deterministic")
    return make_mac(secret, body)


class PlacedBox(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of a Hugging Face tensor, and where it starts in a shard: a `Piece`, for the wire."""

    name: Text
    start: Dims
    stop: Dims
    at: Dims
    transposed: bool = False

    @property
    def extent(self) -> tuple[int, ...]:
        """The box's shape, as it is stored in the shard."""
        shape = Box(self.start, self.stop).shape
        return shape[::-1] if self.transposed else shape


def list_boxes(pieces: Iterable[Piece]) -> tuple[PlacedBox, ...]:
    """Return pieces of a tensor as they are listed in its entry."""
    return tuple(PlacedBox(p.name, p.box.start, p.box.stop, p.at, p.transposed) for p in pieces)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a version: its dtype and shape, where its bytes start, and their digest."""

    name: Text
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Dims
    offset: Count
    nbytes: Count
    digest: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{16}|[0-9a-f]{32})?\Z")] = ""
    """Hexadecimal: 32 digits of `digest`, or 16 digits of the checksum `word_sum`."""
    boxes: tuple[PlacedBox, ...] = ()
    """The boxes that a shard contains; empty if this is a Hugging Face tensor itself."""

    @property
    def placed(self) -> tuple[PlacedBox, ...]:
        """The boxes that it contains; a Hugging Face tensor contains all of itself."""
        start = (0,) * len(self.shape)
        return self.boxes or (PlacedBox(self.name, start, self.shape, start),)

    @property
    def word_sum(self) -> int | None:
        return int(self.digest, 16) if len(self.digest) == 16 else None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tensors of a version, in the order of their bytes."""

    version: Count
    nbytes: Count
    entries: Annotated[list[Entry], msgspec.Meta(max_length=_MAX_TENSORS)]

    @property
    def identity(self) -> str:
        """A digest of names, dtypes, shapes and digests; offsets do not count."""
        facts = [(e.name, e.dtype, e.shape, e.digest, e.boxes) for e in self.entries]
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def headers(self) -> dict[str, TensorHeader]:
        return {e.name: TensorHeader(e.dtype, tuple(e.shape), "") for e in self.entries}


def read_manifest(raw: bytes, offer: Offer) -> Manifest:
    """Return a manifest if it is the offered one and its tensors are within its bytes."""
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(
            f"The list of tensors of version {offer.version} is damaged.", _PUBLISH_AGAIN
        ) from error
    if (manifest.version, manifest.identity) != (offer.version, offer.identity):
        raise WeightsError(
            f"Version {offer.version} is gone: its place holds version {manifest.version}.",
            "Offer the newest version, or let the publisher keep more.",
        )
    check_entries(manifest.entries, manifest.nbytes)
    return manifest


def check_entries(entries: Sequence[Entry], nbytes: int) -> None:
    """Raise `WeightsError` unless all entries are well-formed and within `nbytes`."""
    for entry in entries:
        try:
            check_shape(entry.shape)
        except ValueError as error:
            raise WeightsError(f"{entry.name}: {error}.", _PUBLISH_AGAIN) from error
        for placed in entry.boxes:
            _check_placed(entry, placed)
        expected = math.prod(entry.shape) * ELEMENT_BYTES.get(entry.dtype, 0)
        if entry.dtype not in ELEMENT_BYTES or expected != entry.nbytes:
            raise WeightsError(
                f"{entry.name} is said to be {entry.dtype} in {entry.nbytes} bytes.",
                _PUBLISH_AGAIN,
            )
        if entry.offset + entry.nbytes > nbytes:
            raise WeightsError(
                f"{entry.name} is outside of the bytes that were published.", _PUBLISH_AGAIN
            )
    if len({entry.name for entry in entries}) != len(entries):
        raise WeightsError("A tensor is listed twice.", _PUBLISH_AGAIN)


def _check_placed(entry: Entry, placed: PlacedBox) -> None:
    """Raise unless the box is a box, has as many dimensions as its shard, and is inside of it."""
    dims = {len(placed.start), len(placed.stop), len(placed.at), len(entry.shape)}
    if (
        len(dims) > 1
        or (placed.transposed and len(entry.shape) != 2)
        or any(a > b for a, b in zip(placed.start, placed.stop, strict=True))
    ):
        raise WeightsError(
            f"{placed.name} cannot be stored in {entry.name} as the list says.", _PUBLISH_AGAIN
        )
    ends = zip(placed.at, placed.extent, entry.shape, strict=True)
    if any(start + extent > size for start, extent, size in ends):
        raise WeightsError(f"{placed.name} is outside of {entry.name}, its shard.", _PUBLISH_AGAIN)
