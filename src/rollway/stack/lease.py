"""Ports and GPUs that no other stack takes, from the choice until the stack ends.

Binding port 0, closing and handing the number on is a race: two stacks that start together can be
given the same one. Here every port is guarded by a lock of this user, held by the supervisor, so
two stacks of one user never choose alike, and it is probed by binding, so a port of some other
program is never chosen.

Stacks of two users cannot share a lock that neither could hold against the other. They publish
claims, which they respect while there is a choice. A user who claims everything gains nothing:
after a few foreign claims they are ignored, and the bind of the port itself decides. Two users
collide only if they ignore each other's claims and choose the same port between choice and bind;
then one stack's start fails with "address already in use".

The range stays below 32768: Dynamo keeps the system port in a signed 16-bit number, and the kernel
takes outgoing connections from 32768 upwards, which could grab a port before its owner binds it.
"""

from __future__ import annotations

import errno
import random
import resource
import socket

from rollway.errors import PortInUse, StartError
from rollway.stack.locks import Claim, NamedLock

FIRST, LAST = 20000, 32000
_OPEN_FILES = 65536
_FOREIGN_CLAIMS = 64  # that a choice respects before it ignores them


class Lease:
    """Hands out ports and GPUs and keeps them reserved until `release`."""

    def __init__(self) -> None:
        _raise_file_limit()
        self._locks: list[NamedLock | Claim] = []
        self._candidates = random.SystemRandom().sample(range(FIRST, LAST), LAST - FIRST)
        self._foreign_claims = 0

    def port(self, wanted: int, host: str, what: str) -> int:
        """Reserve `wanted`, or any free port when it is 0."""
        if wanted:
            if not self._reserve(wanted, host):
                raise PortInUse(
                    f"Port {wanted} on {host}, asked for as {what}, is in use.",
                    f"Choose another, or 0 for a free one; `ss -ltnp 'sport = :{wanted}'` "
                    "shows who has it.",
                )
            self._take(Claim(f"port/{wanted}"))
            return wanted
        while self._candidates:
            port = self._candidates.pop()
            if not self._reserve(port, host):
                continue
            if self._take(Claim(f"port/{port}")) or self._foreign_claims >= _FOREIGN_CLAIMS:
                return port
            self._foreign_claims += 1
            self._locks.pop().release()
        raise PortInUse(f"No port from {FIRST} to {LAST} is free on {host}.", "Stop some stacks.")

    def gpus(self, available: list[str], count: int) -> list[str]:
        """Reserve `count` of these GPUs, in order; fewer when other stacks have the rest.

        Those that another user claims come last: the claim may be honest, but it proves nothing.
        If it is, the engine finds no free memory on them and says so."""
        chosen: list[str] = []
        claimed: dict[str, NamedLock] = {}
        for gpu in available:
            lock = NamedLock(f"gpu/{gpu}")
            if len(chosen) == count or not lock.acquire():
                continue
            if self._take(Claim(f"gpu/{gpu}")):
                self._locks.append(lock)
                chosen.append(gpu)
            else:
                claimed[gpu] = lock
        for gpu, lock in claimed.items():
            if len(chosen) < count:
                self._locks.append(lock)
                chosen.append(gpu)
            else:
                lock.release()
        return sorted(chosen, key=available.index)

    def release(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks.clear()

    def _reserve(self, port: int, host: str) -> bool:
        if not self._take(NamedLock(f"port/{port}")):
            return False
        if not can_bind(port, host):
            self._locks.pop().release()
            return False
        return True

    def _take(self, lock: NamedLock | Claim) -> bool:
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
        except (OSError, ValueError) as error:  # a name that no resolver takes is a ValueError
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                return False
            reason = getattr(error, "strerror", None) or str(error)
            raise StartError(
                f"Nothing can listen on {host} port {port}: {reason}.",
                "Use an address of this machine (127.0.0.1, or 0.0.0.0 for all) and a port above "
                "1023.",
            ) from error
    return True


def _raise_file_limit() -> None:
    """Make room for the locks: a port takes two descriptors, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
