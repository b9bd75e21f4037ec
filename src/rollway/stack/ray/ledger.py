"""What all processes that use a stack on Ray share: the versions of its models, and locks."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class _Versions:
    claims: dict[int, str] = field(default_factory=dict)
    current: tuple[int, str] | None = None


class Ledger:
    """Kept by the Head, in memory: it ends with the run, as the versions do."""

    def __init__(self) -> None:
        self._models: dict[str, _Versions] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._holders: dict[str, str] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    def _get(self, model: str) -> _Versions:
        return self._models.setdefault(model, _Versions())

    def put(self, model: str, version: int, path: str) -> None:
        self._get(model).current = version, path

    def get(self, model: str) -> tuple[int, str] | None:
        return self._get(model).current

    def claim(self, model: str, version: int, identity: str) -> None:
        self._get(model).claims[version] = identity

    def claims(self, model: str) -> dict[int, str]:
        return self._get(model).claims

    def newest(self, model: str) -> int | None:
        return max(self._get(model).claims, default=None)

    async def lock(self, name: str, token: str, witness: Any) -> bool:
        """Wait for a lock, which `unlock` or the death of the witness releases; return False if
        either came first."""
        self._watches[token] = asyncio.create_task(self._watch(name, token, witness))
        await self._locks.setdefault(name, asyncio.Lock()).acquire()
        self._holders[name] = token
        if token not in self._watches:  # it died, or gave up, while it waited
            self._release(name)
            return False
        return True

    async def _watch(self, name: str, token: str, witness: Any) -> None:
        with contextlib.suppress(Exception):
            await witness.wait.remote()
        self.unlock(name, token)

    def unlock(self, name: str, token: str) -> None:
        """Release a lock, or give up waiting for it."""
        if (watch := self._watches.pop(token, None)) is not None:
            watch.cancel()
        if self._holders.get(name) == token:
            self._release(name)

    def _release(self, name: str) -> None:
        del self._holders[name]
        self._locks[name].release()
