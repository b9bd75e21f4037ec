"""A gateway process that can be killed, restarted and measured, and a disk that can be filled.

The disk is a tmpfs of some MiB where mounting is permitted. Elsewhere the gateway's limit on file
sizes stands in for it: writes beyond it are cut short in the same way, but only for that process,
which cannot be started on a full disk then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from chaos import make_environment
from chaos.clients import Address, call
from rollway import processes
from rollway.errors import RequestFailed, StartError, Unreachable
from rollway.rollout.sequence import TokenSequence

_START_SECONDS = 120.0
_GATEWAY = "rollway.cli"


class GatewayProcess:
    """`rollway gateway`, and a trainer's requests to it."""

    def __init__(
        self, arguments: Sequence[str], log: Path, *, bound: float, module: str = _GATEWAY
    ) -> None:
        self.address = Address("127.0.0.1", 0)
        self.log = log
        self._command = [sys.executable, "-m", module, "gateway", *arguments, "--port", "0"]
        self._bound = bound
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait until it listens."""
        # It must end with this process, even if this one is killed.
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=make_environment(),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                preexec_fn=processes.die_with_parent,
                start_new_session=True,  # Ctrl-C asks the run for its report, not the gateway
            )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_START_SECONDS):
                line = (await self._process.stdout.readline()).decode()
        except TimeoutError:
            line = ""
        url = urlsplit(line.split(" ")[0])
        if url.port is None:
            await self.kill()
            raise StartError(
                "The gateway did not start.", log_tail=self.log.read_text(errors="replace")[-2000:]
            )
        self.address = Address("127.0.0.1", url.port)

    async def kill(self) -> None:
        """Kill it with SIGKILL."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """Stop it with SIGTERM, and with SIGKILL if that takes too long."""
        try:
            async with asyncio.timeout(20.0):
                await self._end(signal.SIGTERM)
        except TimeoutError:
            await self.kill()

    async def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        await self._process.wait()

    # --- a trainer's requests ---------------------------------------------------------------------

    async def sessions(self) -> list[str]:
        """Return the names of all sessions."""
        return list((await self._get("/v1/rollway/sessions"))["sessions"])

    async def trajectories(self, session: str) -> list[TokenSequence]:
        """Return all trajectories of a session, from all pages; none if there is no such
        session."""
        path = f"/v1/rollway/trajectories/{quote(session, safe='')}"
        sequences: list[TokenSequence] = []
        query = ""
        while True:
            try:
                page = await self._get(path + query)
            except RequestFailed as error:
                if error.status == 404:
                    return sequences
                raise
            sequences += [TokenSequence.from_json(raw) for raw in page["trajectories"]]
            if page.get("next") is None:
                return sequences
            query = f"?offset={page['next']}"

    async def _get(self, path: str) -> Any:
        try:
            async with asyncio.timeout(self._bound):
                reply = await call(self.address, "GET", path)
        except (TimeoutError, OSError, EOFError) as error:
            raise Unreachable(f"GET {path}: no answer ({error!r}).") from error
        if reply.status != 200:
            text = reply.body[:200].decode(errors="replace")
            raise RequestFailed(f"GET {path}: {reply.status}, {text}", status=reply.status)
        return json.loads(reply.body)

    # --- resources ----------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        """Return the resident bytes: now, and the peak."""
        fields = {}
        for line in Path("/proc", str(self.pid), "status").read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name] = value
        return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208 - no entry is looked at


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory; 0 if it does not exist."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def size_of_store(path: Path) -> int:
    """Return the bytes of a gateway's store with its write-ahead log, which is a file beside it."""
    return sum(map(size_of, path.parent.glob(f"{path.name}*")))


# --- a disk that can be filled -------------------------------------------------------------------


_FILLER = "filler"
_SOURCE = "rollway-chaos-"
"""The name in the list of mounts, before the process id of the owner."""
_LITTLE_ROOM = 256
"""Bytes that stay free under a limit: less than a turn needs, so that a write is cut."""


class SmallDisk:
    """A directory for one store, whose disk can be filled and freed on demand."""

    def __init__(self, path: Path, *, mebibytes: int) -> None:
        """Create `path` and mount there."""
        _unmount_leftovers()
        self.path = path
        self.journal = path / "gateway.sqlite"
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
            _limit(pid, _LITTLE_ROOM)
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
