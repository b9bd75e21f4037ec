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
from pathlib import Path

from rollway.stack.processes import ProcessId, boot_id

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


@functools.cache
def _place() -> str:
    """One kernel since its boot, and one of its pid namespaces."""
    namespace = os.readlink(Path("/proc/self/ns/pid"))  # noqa: PTH115  (a link to no file)
    return hashlib.sha256(f"{boot_id()} {namespace}".encode()).hexdigest()[:12]
