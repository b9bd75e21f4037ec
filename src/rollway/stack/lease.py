"""Ports and GPUs that no other stack takes, from the choice until the stack ends.

Binding port 0, closing and handing the number on is a race: two stacks that start together can be
given the same one. Here every port is guarded by a machine-wide lock held by the supervisor, so
two stacks never choose alike, and it is probed by binding, so a port of some other program is
never chosen.

The range stays below 32768: Dynamo keeps the system port in a signed 16-bit number, and the kernel
takes outgoing connections from 32768 upwards, which could grab a port before its owner binds it.
"""

from __future__ import annotations

import errno
import random
import socket

from rollway.errors import PortInUse, StartError
from rollway.stack.locks import NamedLock

FIRST, LAST = 20000, 32000


class Lease:
    """Hands out ports and GPUs and keeps them reserved until `release`."""

    def __init__(self) -> None:
        self._locks: list[NamedLock] = []
        self._candidates = random.SystemRandom().sample(range(FIRST, LAST), LAST - FIRST)

    def port(self, wanted: int, host: str, what: str) -> int:
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

    def gpus(self, available: list[str], count: int) -> list[str]:
        """Reserve `count` of these GPUs, in order; fewer when other stacks have the rest."""
        chosen: list[str] = []
        for gpu in available:
            if len(chosen) < count and self._lock(f"gpu/{gpu}"):
                chosen.append(gpu)
        return chosen

    def release(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks.clear()

    def _reserve(self, port: int, host: str) -> bool:
        if not self._lock(f"port/{port}"):
            return False
        if not can_bind(port, host):
            self._locks.pop().release()
            return False
        return True

    def _lock(self, name: str) -> bool:
        lock = NamedLock(name)
        if lock.acquire():
            self._locks.append(lock)
            return True
        return False


def can_bind(port: int, host: str) -> bool:
    """Whether a server could listen there now (a connection in TIME_WAIT does not matter)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise StartError(
                f"Nothing can listen on {host} port {port}: {error.strerror or error}.",
                "Use an address of this machine (127.0.0.1, or 0.0.0.0 for all) and a port above "
                "1023.",
            ) from error
    return True
