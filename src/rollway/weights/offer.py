"""What a publisher tells the receivers of a version: which weights, how many bytes, and where.

An offer is plain JSON and small; the list of tensors lies with the bytes. It reaches a worker over
its admin port, so it is signed with the secret that the stack gave its workers. A worker accepts no
offer without that signature, and a worker that has no secret accepts none at all. No offer carries
code, and none is unpickled. docs/security.md says what else the admin port accepts, and from whom.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from rollway.errors import WeightsError
from rollway.orders import SECRET, stack_secret
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.untrusted import MOST_DIMS, MOST_NAME, check_shape

STILL = "still staging"
"""What a worker says that has not got the weights yet."""
Transport = Literal["files", "delta", "shm", "cuda_ipc", "collective", "nixl", "verl_buckets"]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_MOST_OFFER_BYTES = 64 << 20
_MOST_TENSORS = 1 << 22
MOST_MANIFEST_BYTES = 1 << 28
"""Of a list of tensors, wherever it is read from."""


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of the weights, as its publisher announces it."""

    transport: Transport
    version: Count
    identity: Annotated[str, msgspec.Meta(min_length=8, max_length=128)]
    """Equal for equal weights."""
    nbytes: Count
    where: dict[str, Any]
    """For the transport alone."""
    repeatable: bool = True
    """Whether a receiver that comes later can still get it."""
    mac: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""

    def signed(self, secret: str) -> Offer:
        return msgspec.structs.replace(self, mac=_mac(self, secret)) if secret else self

    def as_json(self) -> dict[str, Any]:
        made: dict[str, Any] = msgspec.to_builtins(self)
        return made


def parse_offer(raw: Mapping[str, Any]) -> Offer:
    """Return an offer from a trusted place, such as a rank of the same job; no signature needed."""
    try:
        offer = msgspec.convert(dict(raw), Offer)
        _check_size(offer)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WeightsError(
            f"This is no offer of weights: {str(error)[:300]}.", "Publish the version again."
        ) from error
    return offer


def read_offer(raw: Mapping[str, Any], secret: str | None = None) -> Offer:
    """Return an offer if whoever made it knows the secret; without `secret`, that of this stack."""
    offer = parse_offer(raw)
    secret = stack_secret() if secret is None else secret
    if not secret:
        raise WeightsError(
            "This worker was started without a secret, so it accepts no offer of weights.",
            f"Start it by `rollway up`, or set {SECRET} for the worker and for the trainer.",
        )
    if not hmac.compare_digest(offer.mac.encode(errors="replace"), _mac(offer, secret).encode()):
        raise WeightsError(
            "An offer of weights is not signed with this stack's secret.",
            f"Attach to the stack by its name, or set {SECRET} to the one its workers have.",
        )
    return offer


def _check_size(offer: Offer) -> None:
    """Refuse what has no JSON, or too much of it: `where` may hold anything."""
    size = len(msgspec.json.encode(offer))
    if size > _MOST_OFFER_BYTES:
        raise ValueError(f"it takes {size} bytes, more than {_MOST_OFFER_BYTES}")


def _mac(offer: Offer, secret: str) -> str:
    plain = msgspec.structs.replace(offer, mac="")
    body = msgspec.json.encode(plain, order="deterministic")
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME)]
Dims = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_DIMS)]


class Lies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lies in a shard: a box of a Hugging Face tensor, and where it starts in the shard."""

    name: Text
    start: Dims
    stop: Dims
    at: Dims
    transposed: bool = False


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a version: what it is, where its bytes start, and their digest."""

    name: Text
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Dims
    offset: Count
    nbytes: Count
    digest: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{16}|[0-9a-f]{32})?\Z")] = ""
    """In hexadecimal: of `bits.digest`, or 16 digits of `bits.word_sum`."""
    lies: tuple[Lies, ...] = ()
    """Nothing for a Hugging Face tensor itself."""

    @property
    def word_sum(self) -> int | None:
        return int(self.digest, 16) if len(self.digest) == 16 else None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tensors of a version, in the order in which their bytes lie."""

    version: Count
    nbytes: Count
    entries: Annotated[list[Entry], msgspec.Meta(max_length=_MOST_TENSORS)]

    @property
    def identity(self) -> str:
        """By digests and names: wherever the bytes lie."""
        facts = [(one.name, one.dtype, one.shape, one.digest, one.lies) for one in self.entries]
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def headers(self) -> dict[str, TensorHeader]:
        return {e.name: TensorHeader(e.dtype, tuple(e.shape), "") for e in self.entries}


def read_manifest(raw: bytes, offer: Offer) -> Manifest:
    """A manifest, if it is the one that was offered and its tensors lie within its bytes."""
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(
            f"The list of tensors of version {offer.version} is damaged.", "Publish it again."
        ) from error
    if (manifest.version, manifest.identity) != (offer.version, offer.identity):
        raise WeightsError(
            f"Version {offer.version} is gone: its place holds version {manifest.version}.",
            "Offer the newest version, or let the publisher keep more.",
        )
    check_entries(manifest.entries, manifest.nbytes)
    return manifest


def check_entries(entries: Sequence[Entry], nbytes: int) -> None:
    from rollway.weights.layout import ELEMENT_BYTES

    for one in entries:
        try:
            check_shape(one.shape)
        except ValueError as error:
            raise WeightsError(f"{one.name}: {error}.", "Publish the version again.") from error
        for lies in one.lies:
            _check_lies(one, lies)
        wanted = math.prod(one.shape) * ELEMENT_BYTES.get(one.dtype, 0)
        if one.dtype not in ELEMENT_BYTES or wanted != one.nbytes:
            raise WeightsError(f"{one.name} is said to be {one.dtype} in {one.nbytes} bytes.")
        if one.offset + one.nbytes > nbytes:
            raise WeightsError(f"{one.name} is said to lie outside of what was published.")
    if len({one.name for one in entries}) != len(entries):
        raise WeightsError("A tensor is listed twice.")


def _check_lies(one: Entry, lies: Lies) -> None:
    """A box is a box, and has as many dimensions as the shard that it lies in."""
    dims = {len(lies.start), len(lies.stop), len(lies.at), len(one.shape)}
    if (
        len(dims) > 1
        or (lies.transposed and len(one.shape) != 2)
        or any(a > b for a, b in zip(lies.start, lies.stop, strict=True))
    ):
        raise WeightsError(
            f"{lies.name} cannot lie in {one.name} as it is said to.", "Publish the version again."
        )
