"""A receiver's side of NIXL: its agent, staging buffers, peers and prepared reads.

All of it is kept between versions. A version whose sources, layouts and addresses are known again
needs no planning and no registration: its reads only have to be started.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.layout import Piece
from rollway.weights.planning.targets import LocalTensor
from rollway.weights.transports.nixl.agent import Agent, Numbers, Prepared, Settings
from rollway.weights.transports.nixl.listing import (
    SourceGroup,
    SourceMemory,
    this_node,
    write_layout,
    write_receipt,
)
from rollway.weights.transports.nixl.memory import Pool, memory_kind
from rollway.weights.transports.nixl.windows import Window, Windows, resolve_reads

Buffers = tuple[Tensor, Tensor]
"""The staging memory of even and of odd windows."""
_MAX_PREPARED = 4
_ABANDONED: list[tuple[Agent | None, list[Pool]]] = []
"""Agents and memory of reads that timed out. They may still write, so the memory must never be
freed for other use: it stays here as long as the process lives."""


class Connections:
    """Connects one receiver to its sources."""

    def __init__(self, name: str, net_devices: tuple[str, ...], serves_peers: bool) -> None:
        """A receiver that serves peers needs one buffer that holds a whole version."""
        self._name, self._net_devices, self._serves_peers = name, net_devices, serves_peers
        self._agent: Agent | None = None
        self._pools: list[Pool] = []
        self._peers: dict[str, tuple[bytes, str]] = {}
        self.prepared: OrderedDict[str, list[list[Prepared]]] = OrderedDict()
        """Reads by window, for each set of sources and addresses: pools of sources alternate."""

    def connect(self, group: SourceGroup) -> Agent:
        """Return the agent, connected to these sources as they are now."""
        modes = {memory.error_handling for memory in group.memories}
        if len(modes) != 1:
            raise WeightsError("The ranks of the trainer have different settings of NIXL.")
        mode = modes.pop()
        if self._agent is not None and self._agent.settings.error_handling != mode:
            self.close()
        if self._agent is None:
            self._agent = Agent(self._name, Settings(mode, self._net_devices))
            if self._serves_peers:  # a peer that reads from here connects first
                self._agent.listen(self._agent.poll)
        for name, memory in zip(group.names, group.memories, strict=True):
            known = self._peers.get(name)
            if known is not None and known[0] == memory.agent:
                continue
            if known is not None:  # the source registered other memory: its reads are invalid
                self.drop_prepared()
                self._agent.remove_peer(known[1])
            self._peers[name] = memory.agent, self._agent.add_peer(memory.agent)
        return self._agent

    def allocate(self, windows: Windows, device: torch.device) -> Buffers:
        """Return the buffers of even and odd windows; they are one if a version is kept whole."""
        assert self._agent is not None
        if not self._pools:
            self._pools = [Pool(self._agent) for _ in range(1 if self._serves_peers else 2)]
        before = [pool.memory for pool in self._pools]
        step = len(self._pools)
        sizes = [_largest_end(windows.windows[first::step]) for first in range(step)]
        buffers = [
            pool.allocate(size, device) for pool, size in zip(self._pools, sizes, strict=True)
        ]
        if any(old is not new for old, new in zip(before, buffers, strict=True)):
            self.drop_prepared()  # they point into the old buffers
        return buffers[0], buffers[-1]

    def prepare(
        self, group: SourceGroup, windows: Windows, buffers: Buffers
    ) -> list[list[Prepared]]:
        """Return the reads of each window, prepared now or for an earlier version."""
        hasher = hashlib.sha256(group.key.encode())
        for memory in group.memories:
            hasher.update(msgspec.msgpack.encode(memory.addresses))
        key = hasher.hexdigest()
        reads = self.prepared.get(key)
        if reads is None:
            memories = dict(zip(group.names, group.memories, strict=True))
            reads = [
                [
                    self._prepare_read(name, memories[name], window, buffers[number % 2])
                    for name in window.reads
                ]
                for number, window in enumerate(windows.windows)
            ]
        self.prepared[key] = reads
        self.prepared.move_to_end(key)
        while len(self.prepared) > _MAX_PREPARED:
            _release_all(self.prepared.popitem(last=False)[1])
        return reads

    def _prepare_read(
        self, name: str, memory: SourceMemory, window: Window, buffer: Tensor
    ) -> Prepared:
        assert self._agent is not None
        kind, index = memory_kind(buffer.device)
        reads = window.reads[name]
        remote, local, sizes = resolve_reads(reads, memory.addresses, buffer.data_ptr())
        return self._agent.prepare(
            self._peers[name][1],
            (kind, _make_rows(local, sizes, index)),
            (memory.memory, _make_rows(remote, sizes, memory.device)),
        )

    def acknowledge(self, names: Iterable[str], version: int) -> None:
        """Notify sources that this receiver has a version, as far as they still listen."""
        assert self._agent is not None
        for name in names:
            with suppress(WeightsError):
                self._agent.notify(self._peers[name][1], write_receipt(version))
        # Notifications leave this process only while it polls. They matter beyond the receipt:
        # without one, reads from a stopped trainer (`peer`, one machine) still succeeded for a
        # while, so a trainer that hangs was noticed later.
        with suppress(WeightsError):
            self._agent.poll()

    def describe(self, windows: Windows, group: SourceGroup) -> SourceMemory:
        """Describe the received version in the buffer, for peers to read."""
        assert self._agent is not None and self._pools[0].memory is not None
        buffer = self._pools[0].memory
        targets = [target for window in windows.windows for target in window.targets]
        tensors = {target.name: LocalTensor(target.dtype, target.shape) for target in targets}
        pieces = [Piece(name, box, name, box.start) for name, box in group.digests]
        kind, index = memory_kind(buffer.device)
        return SourceMemory(
            agent=self._agent.metadata(),
            memory=kind,
            device=index,
            error_handling=self._agent.settings.error_handling,
            node=this_node(),
            layout=write_layout(tensors, pieces),
            addresses=[buffer.data_ptr() + target.offset for target in targets],
            digests=b"".join(group.digests.values()),
        )

    def forget(self, names: Iterable[str]) -> None:
        """Disconnect sources after a failure, so that the next attempt connects again."""
        self.drop_prepared()
        for name in names:
            known = self._peers.pop(name, None)
            if known is not None and self._agent is not None:
                self._agent.remove_peer(known[1])

    def abandon(self) -> None:
        """Start with a new agent and new buffers, because a read that timed out may still write."""
        _ABANDONED.append((self._agent, self._pools))
        self.prepared.clear()  # not released: NIXL still uses them
        self._agent, self._pools, self._peers = None, [], {}

    def drop_prepared(self) -> None:
        for reads in self.prepared.values():
            _release_all(reads)
        self.prepared.clear()

    def close(self) -> None:
        self.drop_prepared()
        for pool in self._pools:
            pool.release()
        if self._agent is not None:
            self._agent.stop_listening()
        self._agent, self._pools, self._peers = None, [], {}


def _largest_end(windows: list[Window]) -> int:
    return max((window.offset + window.nbytes for window in windows), default=0)


def _make_rows(addresses: Any, sizes: Any, device: int) -> Numbers:
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, sizes, device
    return rows


def _release_all(windows: list[list[Prepared]]) -> None:
    for reads in windows:
        for read in reads:
            read.release()
