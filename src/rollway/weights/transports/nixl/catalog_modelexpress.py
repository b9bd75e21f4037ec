"""ModelExpress decides which versions exist; Rollway's catalog says where their bytes are.

A ModelExpress server records versions and their states (STAGING, READY, RELEASING), which systems
other than Rollway can follow. It cannot store our listings: its shard manifests are served by its
own trainer client. So listings go to another `Catalog`, and a version can be found only while
ModelExpress calls it READY.

Versions 0.5 and 0.7 cannot read each other's messages, so client and server must both be exactly
0.7.0. The server is a container image and is not on PyPI: these calls are tested against a stand-in
with the client's signatures, and have not run against a server.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

from rollway.errors import UsageError, WeightsError
from rollway.weights.transports.nixl.catalog import Catalog, Listing, NotYet

PINNED = "0.7.0"


class ModelExpressCatalog:
    """Versions of one model on a ModelExpress server, with the listings beside it."""

    def __init__(
        self, listings: Catalog, server: str, model: str, *, server_version: str = PINNED
    ) -> None:
        if not model:
            raise UsageError("ModelExpress stores versions by model.", "Pass the model's name.")
        self._package = _import_client(server_version)
        self._listings = listings
        self._server, self._model = server, model
        self._first: set[tuple[int, str]] = set()
        """Versions and sources that this process announced as the trainer's rank 0."""
        self._control = self._package.ModelExpressControlClient.connect(server_url=server)

    def announce(self, listing: Listing) -> None:
        if listing.role == "trainer":
            self._create(listing)
        self._listings.announce(listing)
        if listing.role == "trainer" and self._is_complete(listing):
            state = self._package.WeightVersionState.READY
            self._call("update_weight_version_state", self._uid(listing.version), state)

    def withdraw(self, version: int, source: str) -> None:
        self._listings.withdraw(version, source)
        if (version, source) in self._first:
            self._first.discard((version, source))
            self._call("delete_weight_version", self._uid(version))

    def look_up(
        self, version: int, member: str, without: Sequence[str] = (), *, fanout: int = 0
    ) -> list[Listing]:
        state = self._call("get_weight_version", self._uid(version)).state
        states = self._package.WeightVersionState
        if state == states.STAGING:
            raise NotYet(f"ModelExpress has version {version}, but it is not ready.")
        if state != states.READY:
            raise WeightsError(
                f"ModelExpress is releasing version {version}.", "Use a newer version."
            )
        return self._listings.look_up(version, member, without, fanout=fanout)

    def acknowledge(self, version: int, member: str) -> None:
        self._listings.acknowledge(version, member)

    def acknowledged(self, version: int) -> list[str]:
        return self._listings.acknowledged(version)

    def leave(self, member: str) -> None:
        self._listings.leave(member)

    def where(self) -> dict[str, Any]:
        return {**self._listings.where(), "modelexpress": self._server, "model": self._model}

    def close(self) -> None:
        self._control.close()

    def _uid(self, version: int) -> str:
        return f"{self._model}-v{version}"

    def _create(self, listing: Listing) -> None:
        # Every rank calls it: the key makes all calls but the first repetitions.
        uid = self._uid(listing.version)
        self._call(
            "create_weight_version",
            model_name=self._model,
            idempotency_key=uid,
            uid=uid,
            payload_format=self._package.WeightPayloadFormat.FULL_TENSOR,
        )
        if listing.rank == 0:
            self._first.add((listing.version, listing.source))

    def _is_complete(self, listing: Listing) -> bool:
        try:
            return bool(self._listings.look_up(listing.version, listing.source))
        except NotYet:
            return False

    def _call(self, name: str, *args: Any, **named: Any) -> Any:
        try:
            return getattr(self._control, name)(*args, **named)
        except Exception as error:  # gRPC's errors, whose package is not a dependency
            raise WeightsError(
                f"ModelExpress at {self._server} refused {name}: {error}.",
                f"Check that its server runs, and is version {PINNED}.",
            ) from error


def _import_client(server_version: str) -> Any:
    """Import ModelExpress's RL client; raise unless it can talk to this server."""
    try:
        installed = importlib.metadata.version("modelexpress")
        package = importlib.import_module("modelexpress_rl")
    except ImportError as error:
        raise UsageError(
            "ModelExpress's client is not installed.", f"pip install modelexpress=={PINNED}"
        ) from error
    if not installed == server_version == PINNED:
        raise UsageError(
            f"ModelExpress's client is {installed} and its server {server_version}; Rollway "
            f"needs {PINNED} at both ends.",
            "Its versions cannot read each other's messages: install the same.",
        )
    return package
