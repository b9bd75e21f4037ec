"""Ports that no other stack takes, from the choice until the stack ends.

Binding port 0, closing and handing the number on is a race: two stacks that start together can be
given the same one. Here every port is guarded by a machine-wide lock held by the supervisor, so
two stacks never choose alike, and it is probed by binding, so a port of some other program is
never chosen.

The range stays below 32768: Dynamo keeps the system port in a signed 16-bit number, and the kernel
takes outgoing connections from 32768 upwards, which could grab a port before its owner binds it.
"""

from __future__ import annotations

import random
import socket

from rollway.errors import PortInUse
from rollway.stack.locks import NamedLock

FIRST, LAST = 20000, 32000


class PortLease:
    """Hands out ports and keeps them reserved until `release`."""

    def __init__(self) -> None:
        self._locks: dict[int, NamedLock] = {}
        self._candidates = random.SystemRandom().sample(range(FIRST, LAST), LAST - FIRST)

    def take(self, wanted: int, host: str, what: str) -> int:
        """Reserve `wanted`, or any free port when it is 0."""
        if wanted:
            if not self._reserve(wanted, host):
                raise PortInUse(
                    f"Port {wanted} on {host}, asked for as {what}, is in use.",
                    f"Choose another, or 0 for a free one; `ss -ltnp 'sport = :{wanted}'` "
                    "shows who has it.",
                )
            return wanted
        while self._candidates:
            port = self._candidates.pop()
            if self._reserve(port, host):
                return port
        raise PortInUse(f"No port from {FIRST} to {LAST} is free on {host}.", "Stop some stacks.")

    def release(self) -> None:
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def _reserve(self, port: int, host: str) -> bool:
        lock = NamedLock(f"port/{port}")
        if port in self._locks or not lock.acquire():
            return False
        if not can_bind(port, host):
            lock.release()
            return False
        self._locks[port] = lock
        return True


def can_bind(port: int, host: str) -> bool:
    """Whether a server could listen there now (a connection in TIME_WAIT does not matter)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True
