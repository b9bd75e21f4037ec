"""The prefix cache: blocks of keys and values under the chain hash of (salt, tokens).

As in real engines a hash says nothing about weights: a block computed under old ones is found,
and used, under new ones, until somebody clears the cache or changes the salt.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

BLOCK = 16
CAPACITY = 1024
FAULT = os.environ.get("LIGHT_FAULT", "")
"""What is wrong with this worker; see tests/light/worker.py."""

Stored = Callable[[list[int], list[int], int | None, str], None]
"""Called with the tokens of new blocks, their hashes, the hash before them, and the salt."""
Removed = Callable[[list[int]], None]


def block_hash(parent: int | None, tokens: Sequence[int], salt: str) -> int:
    """A signed 64-bit number, as Dynamo's KV events want it."""
    if FAULT == "salt":
        salt = ""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(salt.encode() if parent is None else parent.to_bytes(8, "little", signed=True))
    digest.update(np.asarray(tokens, "<u4").tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


class PrefixCache:
    """Least recently used blocks go first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.on_stored: Stored | None = None
        self.on_removed: Removed | None = None
        self._blocks: OrderedDict[int, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, hashes: Iterable[int]) -> list[np.ndarray]:
        """The blocks of the longest cached prefix."""
        blocks = []
        for key in hashes:
            block = self._blocks.get(key)
            if block is None:
                break
            self._blocks.move_to_end(key)
            blocks.append(block)
        return blocks

    def store(
        self,
        blocks: Sequence[np.ndarray],
        hashes: list[int],
        tokens: list[int],
        parent: int | None,
        salt: str,
    ) -> None:
        """Add consecutive blocks; those that are there already stay as they are."""
        fresh = [i for i, key in enumerate(hashes) if key not in self._blocks]
        if not fresh:
            return
        for i in fresh:
            self._blocks[hashes[i]] = blocks[i].copy()
        if self.on_stored is not None:
            first = fresh[0]
            before = hashes[first - 1] if first else parent
            self.on_stored(tokens[first * BLOCK :], hashes[first:], before, salt)
        self._evict()

    def clear(self) -> None:
        self._forget(list(self._blocks))

    def _evict(self) -> None:
        surplus = len(self._blocks) - self.capacity
        if surplus > 0:
            self._forget(list(self._blocks)[:surplus])

    def _forget(self, hashes: list[int]) -> None:
        for key in hashes:
            del self._blocks[key]
        if hashes and self.on_removed is not None:
            self.on_removed(hashes)
