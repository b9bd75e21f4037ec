"""A directory whose disk can be filled and freed on demand.

It is a tmpfs of some MiB where mounting is permitted. Elsewhere the gateway's limit on file sizes
stands in for it: writes beyond it are cut short in the same way, but only for that process, which
cannot be started on a full disk then.
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
"""The name in the list of mounts, before the process id of the owner."""
_LITTLE_ROOM = 256
"""Bytes that stay free under a limit: less than a turn needs, so that a write is cut."""


class SmallDisk:
    """The disk of one journal."""

    def __init__(self, path: Path, *, mebibytes: int) -> None:
        """Create `path` and mount there."""
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
        """Leave no space for the gateway with this process id."""
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
        """Free the space again."""
        if not self.mounted:
            _limit(pid, resource.RLIM_INFINITY)
            return
        (self.path / _FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount and remove the directory."""
        if self.mounted:
            subprocess.run(["umount", str(self.path)], capture_output=True, check=False)
        if not self.path.is_mount():
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def still_exists(self) -> bool:
        return self.path.exists()


def _limit(pid: int, size: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _unmount_leftovers() -> None:
    """Unmount the leftovers of killed runs."""
    for line in Path("/proc/mounts").read_text().splitlines():
        source, path, *_ = line.split(" ")
        owner = source.removeprefix(_SOURCE)
        if source != owner and owner.isdigit() and not Path("/proc", owner).exists():
            subprocess.run(["umount", path], capture_output=True, check=False)
