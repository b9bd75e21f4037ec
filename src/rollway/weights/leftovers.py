"""Whose a half-written file is: its name says so, and a later writer can tell a dead one's.

A directory may be shared by machines and by containers of one machine, and a pid means something
only where it was given. So a mark names the place too; what was written in another place is
abandoned once nobody has touched it for an hour.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

from rollway.processes import ProcessId, boot_id

ABANDONED_SECONDS = 3600.0
PARTIAL, TRASH = "partial", "trash"
_MARKED = re.compile(r"(?P<place>[0-9a-f]{12})-(?P<pid>\d{1,10})-(?P<start>\d{1,20})")


def mark() -> str:
    """This process, now and for ever, and the place where its pid counts."""
    process = ProcessId.of(os.getpid())
    assert process is not None
    return f"{_place()}-{process.pid}-{process.start}"


def scratch_name(name: str, kind: str = PARTIAL) -> str:
    """A hidden name beside `name`, for what readers must not see."""
    return f".{name}.{mark()}.{kind}"


def gone(name: str, idle_seconds: float) -> bool:
    """Whether the writer of something whose name carries its mark is dead, as far as one can tell.

    `idle_seconds` is how long nobody wrote there; it decides for writers of other places."""
    found = _MARKED.search(name)
    if found is None or found["place"] != _place():
        return idle_seconds > ABANDONED_SECONDS
    return not ProcessId(int(found["pid"]), int(found["start"])).alive


class Guard:
    """A process that removes things of its owner when that has ended, however it ends. It is no
    child of its owner's: Ray kills the children of an actor that ends."""

    _PROGRAM = (
        "import os, shutil, sys\n"
        "if os.fork(): os._exit(0)\n"
        "sys.stdin.read()\n"
        "for path in sys.argv[1:]:\n"
        "    shutil.rmtree(path, True) if os.path.isdir(path) else None\n"
        "    os.unlink(path) if os.path.lexists(path) else None"
    )

    def __init__(self, *paths: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", self._PROGRAM, *map(str, paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # ends with it
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what is typed at a terminal must not end it first
            env={},
        )
        self._process.wait()

    def close(self) -> None:
        """Have them removed now."""
        self._process.communicate()


@functools.cache
def _place() -> str:
    """One kernel since its boot, and one of its pid namespaces."""
    namespace = os.readlink(Path("/proc/self/ns/pid"))  # noqa: PTH115  (a link to no file)
    return hashlib.sha256(f"{boot_id()} {namespace}".encode()).hexdigest()[:12]
