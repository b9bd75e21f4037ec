"""A directory whose disk can be filled and freed on demand.

A tmpfs of some MiB where mounting is permitted. Elsewhere the gateway's own limit on the size of
files stands in for it: a write beyond it is cut short in the same way, but only that process is
concerned, and it cannot be started while its disk is full.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from pathlib import Path

_FILLER = "filler"
_SOURCE = "rollway-chaos-"
"""Before the process id of the owner, in the list of mounts."""
_LITTLE_ROOM = 256
"""Bytes left under a limit: less than a turn needs, so that a write is cut in its middle."""


class SmallDisk:
    """The disk of one journal."""

    def __init__(self, path: Path, *, mebibytes: int) -> None:
        """Mount at `path`, which is created."""
        _unmount_leftovers()
        self.path = path
        self.journal = path / "journal.jsonl"
        path.mkdir(mode=0o700)
        options = f"size={mebibytes}m,mode=0700"
        command = ["mount", "-t", "tmpfs", "-o", options, f"{_SOURCE}{os.getpid()}", str(path)]
        self.mounted = shutil.which("mount") is not None and (
            subprocess.run(command, capture_output=True, check=False).returncode == 0
        )

    @property
    def kind(self) -> str:
        return "tmpfs" if self.mounted else "file size limit (mounting a tmpfs is not permitted)"

    def fill(self, pid: int) -> None:
        """Leave no room for the gateway with this process id."""
        if not self.mounted:
            size = self.journal.stat().st_size if self.journal.exists() else 0
            _limit(pid, size + _LITTLE_ROOM)
            return
        with (self.path / _FILLER).open("wb", buffering=0) as file:
            for block in (2**20, 4096):
                with contextlib.suppress(OSError):
                    while file.write(b"\0" * block) == block:
                        pass

    def free(self, pid: int) -> None:
        """Make room again."""
        if not self.mounted:
            _limit(pid, resource.RLIM_INFINITY)
            return
        (self.path / _FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount; the directory is empty then, and goes."""
        if self.mounted:
            subprocess.run(["umount", str(self.path)], capture_output=True, check=False)
        if not self.path.is_mount():
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def left_behind(self) -> bool:
        return self.path.exists()


def _limit(pid: int, size: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _unmount_leftovers() -> None:
    """Unmount what a run that was killed has left."""
    for line in Path("/proc/mounts").read_text().splitlines():
        source, path, *_ = line.split(" ")
        owner = source.removeprefix(_SOURCE)
        if source != owner and owner.isdigit() and not Path("/proc", owner).exists():
            subprocess.run(["umount", path], capture_output=True, check=False)
