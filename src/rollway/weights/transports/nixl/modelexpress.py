"""Record versions on a ModelExpress server, which systems other than Rollway can follow.

    trainer ranks                          ModelExpress server          receivers
    CreateWeightVersion    ─────────────►  STAGING
    announce in Rollway's catalog
    the last rank:
    UpdateWeightVersionState ───────────►  READY     ◄────────────────  GetWeightVersion
                                                                        look up in Rollway's catalog
    DeleteWeightVersion    ─────────────►  RELEASING

A server records versions and their states. It cannot store our listings, because its shard
manifests are served by its own trainer client; so they are in a catalog of Rollway's. A version can
be found only while the server calls it READY.

The messages are those of ModelExpress 0.7.0 (`model_express.refit`). They are encoded here: its
client brings two dozen packages and a protobuf that engines do not have. Versions 0.5 and 0.7 have
other numbers for the same fields, so the server must be 0.7. It is a container image and on no
package index: this was tested against a stand-in that speaks gRPC and against the messages of
0.7.0's client, and has not run against a server.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

from rollway.errors import UsageError, WeightsError
from rollway.weights.transports.nixl.catalog import Catalog, NotYet
from rollway.weights.transports.nixl.listing import Listing

MODELEXPRESS = "0.7.0"
SERVICE = "model_express.refit.RefitService"
SECONDS = 15.0
"""How long a call may take, also to a server that restarts."""
_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1000))
_TOKEN_PATH = "MX_AUTH_TOKEN_PATH"
_DEFAULT_TOKEN_PATH = "/var/run/secrets/tokens/modelexpress"
"""Where ModelExpress's own clients look for a token, if the server wants one."""
_FULL_TENSOR = 1

Field = str | int | Sequence[str]


class State(IntEnum):
    """The state of a version on the server."""

    STAGING = 1
    READY = 2
    RELEASING = 3


def open_catalog(where: Mapping[str, Any], *, secret: str | None = None) -> Catalog:
    """Return the catalog that an offer names."""
    url, recorder = where.get("catalog"), where.get("modelexpress")
    if not isinstance(url, str):
        raise WeightsError("The offer does not say where its catalog is.")
    if recorder is None:
        return Catalog(url, secret=secret)
    server, model, run = (str(recorder.get(key, "")) for key in ("server", "model", "run"))
    return ModelExpressCatalog(url, server, model, run, secret=secret)


class ModelExpressCatalog(Catalog):
    """A catalog whose versions are recorded on a ModelExpress server."""

    def __init__(
        self, url: str, server: str, model: str, run: str, *, secret: str | None = None
    ) -> None:
        """Connect at the first call. `server` is HOST:PORT, with http:// before it or without;
        `run` tells the versions of this run from those of others, which count from 1, too."""
        super().__init__(url, secret=secret)
        try:
            import grpc
        except ImportError as error:
            raise UsageError(
                "A ModelExpress server speaks gRPC, and Python has no gRPC here.",
                "pip install grpcio",
            ) from error
        self._server = server.removeprefix("http://").removeprefix("grpc://").rstrip("/")
        host, _, port = self._server.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(
                f"`{server}` is not the address of a ModelExpress server.", "Use HOST:PORT."
            )
        self._model, self._run = model, run
        self._error: type[Exception] = grpc.RpcError
        self._channel = grpc.insecure_channel(self._server, _OPTIONS)
        self._first: set[tuple[int, str]] = set()
        """Versions and sources that this process announced as the trainer's rank 0."""

    def announce(self, listing: Listing) -> None:
        if listing.role == "receiver":
            super().announce(listing)
            return
        uid = self._uid(listing.version)
        # Every rank calls it: the key makes all calls but the first repetitions.
        slots = [f"rank-{rank}" for rank in range(listing.world)]
        self._ask(
            "CreateWeightVersion",
            {1: self._model, 2: uid, 3: _FULL_TENSOR, 5: slots, 7: State.STAGING, 8: uid},
        )
        if listing.rank == 0:
            self._first.add((listing.version, listing.source))
        super().announce(listing)
        with suppress(NotYet):
            super().look_up(listing.version)
            self._ask("UpdateWeightVersionState", {1: uid, 2: State.READY})

    def withdraw(self, version: int, source: str) -> None:
        super().withdraw(version, source)
        if (version, source) in self._first:
            self._first.discard((version, source))
            with suppress(WeightsError):  # nobody finds it any more, whatever the server says
                self._ask("DeleteWeightVersion", {1: self._uid(version)})

    def look_up(
        self, version: int, without: Sequence[str] = (), receiver: str = ""
    ) -> list[Listing]:
        state = self._ask("GetWeightVersion", {1: self._uid(version)})
        if state == State.STAGING:
            raise NotYet(f"ModelExpress has version {version}, but it is not ready.")
        if state != State.READY:
            raise WeightsError(
                f"ModelExpress is releasing version {version}.", "Use a newer version."
            )
        return super().look_up(version, without, receiver)

    def _uid(self, version: int) -> str:
        return f"{self._model}-{self._run}-v{version}"

    def _ask(self, name: str, fields: Mapping[int, Field]) -> State:
        """Make a call; every answer has the version in its first field."""
        send = self._channel.unary_unary(f"/{SERVICE}/{name}")
        try:
            answer = send(
                encode(fields), timeout=SECONDS, wait_for_ready=True, metadata=_read_token()
            )
            version = dict(decode(dict(decode(answer))[1]))
            return State(int(version[8]))
        except self._error as error:
            status, cause = error.code().name, error.details()  # type: ignore[attr-defined]
            raise WeightsError(
                f"ModelExpress at {self._server} failed in {name}: {cause} ({status}).",
                f"Check that its server runs there, and is version {MODELEXPRESS}.",
            ) from error
        except (LookupError, TypeError, ValueError) as error:
            raise WeightsError(
                f"ModelExpress at {self._server} answered {name} without a version: {error}.",
                f"Its versions cannot read each other's messages: run {MODELEXPRESS}.",
            ) from error


def _read_token() -> list[tuple[str, str]]:
    """Return the header of a Kubernetes token for the server, if this pod has one."""
    path = Path(os.environ.get(_TOKEN_PATH) or _DEFAULT_TOKEN_PATH)
    try:
        token = path.read_text().strip()
    except OSError:
        return []
    return [("authorization", f"Bearer {token}")] if token else []


# --- protobuf ------------------------------------------------------------------------------------
# By hand: the library comes in versions that trainers and engines disagree about.

_VARINT, _BYTES = 0, 2
"""Types of fields."""
_FIXED = {1: 8, 5: 4}


def encode(fields: Mapping[int, Field]) -> bytes:
    """Encode the fields of a message, by their numbers: texts, numbers and lists of texts."""
    message = bytearray()
    for number, value in fields.items():
        if isinstance(value, int):
            message += _encode_varint(number << 3 | _VARINT) + _encode_varint(value)
            continue
        for text in (value,) if isinstance(value, str) else value:
            body = text.encode()
            message += _encode_varint(number << 3 | _BYTES) + _encode_varint(len(body)) + body
    return bytes(message)


def _encode_varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def decode(message: object) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message: numbers, and texts and messages as bytes.

    Raises:
        ValueError: this is no message.
    """
    if not isinstance(message, bytes):
        raise ValueError("a field is no message")
    data = io.BytesIO(message)
    while data.tell() < len(message):
        key = _read_varint(data)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            yield number, _read_varint(data)
        elif kind == _BYTES:
            yield number, _read(data, _read_varint(data))
        elif kind in _FIXED:
            yield number, _read(data, _FIXED[kind])
        else:
            raise ValueError(f"a field has the type {kind}")


def _read_varint(data: io.BytesIO) -> int:
    value = 0
    for shift in range(0, 64, 7):
        byte = _read(data, 1)[0]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
    raise ValueError("a number has more than 64 bits")


def _read(data: io.BytesIO, count: int) -> bytes:
    raw = data.read(count)
    if len(raw) < count:
        raise ValueError("a message ends within a field")
    return raw
