"""Mark files with their writer, so that files of a dead writer can be recognised and removed.

A directory may be shared by machines, and by containers of one machine, and a pid means something
only within one of them. So a mark has three parts: the pid namespace, the pid and the start time.
Files from another namespace count as abandoned after an hour without a write.
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
WEIGHTS, IPC = "rollway-weights-", "rollway-ipc-"
IN_MEMORY = (WEIGHTS, IPC)
"""How the names of files in shared memory begin; the mark of their writer follows."""
_MARK = re.compile(r"(?P<place>[0-9a-f]{12})-(?P<pid>\d{1,10})-(?P<start>\d{1,20})")


def writer_mark() -> str:
    """Return a text that names this process, for file names."""
    process = ProcessId.of(os.getpid())
    assert process is not None
    return f"{_get_place()}-{process.pid}-{process.start}"


def scratch_name(name: str, kind: str = PARTIAL) -> str:
    """Return a hidden name beside `name`, for files that readers must not see."""
    return f".{name}.{writer_mark()}.{kind}"


def is_abandoned(name: str, idle_seconds: float) -> bool:
    """Return whether the writer of a file is dead, judged by the mark in the file's name.

    `idle_seconds` is the time since the last write; it decides for writers in other namespaces,
    whose pids mean nothing here."""
    match = _MARK.search(name)
    if match is None or match["place"] != _get_place():
        return idle_seconds > ABANDONED_SECONDS
    return not ProcessId(int(match["pid"]), int(match["start"])).alive


class Guard:
    """A process that removes paths when its owner has ended, even if the owner was killed.

    It waits for the end of its stdin, which the kernel closes when the owner ends. It forks once
    so that it is not a child of the owner: Ray kills the children of an actor that ends."""

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
            stdout=subprocess.PIPE,  # `close` waits for its end, since the process is no child
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at a terminal must not end it before its owner
            env={},
        )
        self._process.wait()

    def close(self) -> None:
        """Remove the paths now, and wait until they are removed."""
        self._process.communicate()


@functools.cache
def _get_place() -> str:
    """Return a digest of this pid namespace and of the boot of its kernel."""
    namespace = os.readlink(Path("/proc/self/ns/pid"))  # noqa: PTH115  (a link to no file)
    return hashlib.sha256(f"{boot_id()} {namespace}".encode()).hexdigest()[:12]
