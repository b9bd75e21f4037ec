"""Another user of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@contextmanager
def another_user(attack: Callable[[], str]) -> Iterator[str]:
    """Run an attack as another user, which holds its sockets until the block ends."""
    report_end, attack_end = os.pipe()
    leave_end, stay_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(stay_end)
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            report = attack()
        except Exception as error:  # noqa: BLE001  (reported to the parent)
            report = f"failed: {error!r}"
        os.write(attack_end, report.encode())
        os.read(leave_end, 1)
        os._exit(0)
    os.close(attack_end)
    os.close(leave_end)
    try:
        yield os.read(report_end, 1 << 16).decode()
    finally:
        os.close(stay_end)
        os.close(report_end)
        os.waitpid(child, 0)
