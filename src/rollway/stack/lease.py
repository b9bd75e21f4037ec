"""Reserves ports and GPUs for one stack, from the choice until the stack ends.

Binding port 0, closing the socket and passing the number on is a race: two stacks that start
together can get the same port. Here the supervisor holds a lock of this user for every port, so two
stacks of one user never choose the same, and it probes the port by binding it, so it never chooses
a port of another program.

Stacks of two users cannot share a lock (rollway.stack.locks). They publish claims, which they
respect while there is a choice. A user who claims everything gains nothing: after a few foreign
claims they are ignored, and the bind of the port itself decides. Two users collide only if they
ignore each other's claims and choose the same port at the same moment; then one start fails with
"address already in use".

The range stays below 32768: Dynamo keeps the system port in a signed 16-bit number, and the kernel
uses ports from 32768 upwards for outgoing connections, which could occupy a port before its owner
binds it.
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
_FOREIGN_CLAIMS = 64  # respected by one lease before it ignores the rest


class Lease:
    """Reserves ports and GPUs until `release`."""

    def __init__(self) -> None:
        _raise_file_limit()
        self._locks: list[NamedLock | Claim] = []
        self._candidates = random.SystemRandom().sample(range(FIRST, LAST), LAST - FIRST)
        self._foreign_claims = 0

    def reserve_port(self, wanted: int, host: str, what: str) -> int:
        """Reserve `wanted`, or any free port when it is 0."""
        if wanted:
            if not self._reserve(wanted, host):
                raise PortInUse(
                    f"Port {wanted} on {host}, requested as {what}, is in use.",
                    f"Choose another, or 0 for a free one; `ss -ltnp 'sport = :{wanted}'` "
                    "shows who has it.",
                )
            self._hold(Claim(f"port/{wanted}"))
            return wanted
        while self._candidates:
            port = self._candidates.pop()
            if not self._reserve(port, host):
                continue
            if self._hold(Claim(f"port/{port}")) or self._foreign_claims >= _FOREIGN_CLAIMS:
                return port
            self._foreign_claims += 1
            self._locks.pop().release()
        raise PortInUse(f"No port from {FIRST} to {LAST} is free on {host}.", "Stop some stacks.")

    def reserve_gpus(self, available: list[str], count: int) -> list[str]:
        """Reserve `count` of these GPUs, in order, or fewer if other stacks have the rest.

        GPUs that another user claims come last. Nothing verifies such a claim; if it is true, the
        engine finds no free memory there and reports it."""
        chosen: list[str] = []
        claimed: dict[str, NamedLock] = {}
        for gpu in available:
            lock = NamedLock(f"gpu/{gpu}")
            if len(chosen) == count or not lock.acquire():
                continue
            if self._hold(Claim(f"gpu/{gpu}")):
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
        if not self._hold(NamedLock(f"port/{port}")):
            return False
        if not can_bind(port, host):
            self._locks.pop().release()
            return False
        return True

    def _hold(self, lock: NamedLock | Claim) -> bool:
        if lock.acquire():
            self._locks.append(lock)
            return True
        return False


def can_bind(port: int, host: str) -> bool:
    """Whether a server could listen there now. Connections in TIME_WAIT do not matter."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except (OSError, ValueError) as error:  # ValueError: a malformed host name
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
    """Raise the limit of open files: a port needs two, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
