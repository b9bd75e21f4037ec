"""What a light worker receives by Rollway's own readers: prime-rl's broadcasts, and every transport
that a real worker knows."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rollway.engine.foreign_senders import PrimeRlBroadcastReader
from rollway.engine.incoming import get_reader
from rollway.weights.checkpoint import read_headers
from rollway.weights.offer import Offer
from rollway.weights.transports.base import Reader

State = dict[str, Any]


class Broadcasts:
    """Joins, and stages what arrives as a checkpoint that the worker loads."""

    def __init__(self, model: Path) -> None:
        self.reader = PrimeRlBroadcastReader(read_headers(model))
        self._readers: dict[str, Reader] = {"prime_rl_broadcast": self.reader}
        self._states: dict[str, State] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="light-broadcast-")

    def join(self, offer: Offer, tell: str) -> None:
        self.reader.join(offer, 0, torch.device("cpu"), tell)

    def receive(self, offer: Offer, stage: Callable[[Path], None], tell: str) -> None:
        """Start to receive a version; `stage` loads it. The same one again changes nothing."""
        is_broadcast = offer.transport == "prime_rl_broadcast"
        # Other versions may have the same weights, and so the same identity.
        again = ("failed",) if is_broadcast else ("failed", "ready")
        if self._states.get(offer.identity, {"state": "failed"})["state"] in again:
            if is_broadcast:
                self.reader.headers(offer)  # raises if there is no group
            self._states = {offer.identity: {"state": "running", "error": ""}}
            arguments = offer, stage, tell
            threading.Thread(target=self._receive, args=arguments, daemon=True).start()

    def get_state(self, identity: str) -> State | None:
        return self._states.get(identity)

    def discard(self) -> None:
        self.reader.release()
        self._states = {}

    def _receive(self, offer: Offer, stage: Callable[[Path], None], tell: str) -> None:
        state: State
        try:
            reader = get_reader(offer, self._readers)
            reader.headers(offer)
            tensors = {name: tensor.clone() for name, tensor in reader.tensors(offer)}
            path = Path(self._directory.name) / offer.identity
            path.mkdir(exist_ok=True)
            save_file(tensors, path / "model.safetensors")
            stage(path)
            state = {"state": "ready", "error": ""}
            if reader is self.reader:
                state["digest"] = self.reader.get_digest(offer)
        except Exception as error:  # noqa: BLE001 (the worker answers with it)
            state = {"state": "failed", "error": str(error)}
        if offer.identity in self._states:  # otherwise it was discarded
            self._states[offer.identity] = state
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{tell}")
