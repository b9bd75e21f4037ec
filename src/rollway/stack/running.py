"""What the users of a running stack ask of it and share: its state and secret, a restart of one
worker, the lock of refits, and the record of versions.

`LocalAccess` answers from files and locks of this machine. `rollway.stack.ray.head_client` asks the
Head of a stack on Ray.
"""

from __future__ import annotations

import contextlib
import os
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rollway import private_files
from rollway.errors import RollwayError
from rollway.model_spec import slug
from rollway.stack.locks import hold_machine_lock
from rollway.stack.state import (
    LARGEST_STATE,
    ProcessState,
    StackDir,
    StackState,
    is_at,
    read_secret,
)

if TYPE_CHECKING:  # a Keeper imports this module, and does not need most of what these import
    from rollway.fleet.workers import Worker
    from rollway.versions import VersionRecord


class StackAccess(Protocol):
    """The state of a stack, its secret, its supervisors, and what its users share."""

    def read_state(self) -> StackState | None: ...

    def read_secret(self) -> str: ...

    async def replace_worker(self, worker: Worker) -> bool:
        """Kill a worker so that its supervisor restarts it; return False if none would."""
        ...

    def is_supervised(self, worker: Worker) -> bool:
        """Return whether a supervisor of the stack has started this worker."""
        ...

    def hold_refit_lock(self, model: str) -> AbstractAsyncContextManager[Any]:
        """Keep the refits of a model apart, also those of several processes."""
        ...

    def open_record(self, model: str) -> VersionRecord: ...


class LocalAccess:
    """A stack of this machine, by its files and locks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read_state(self) -> StackState | None:
        return StackDir(self.name).read()

    def read_secret(self) -> str:
        state = self.read_state()
        return "" if state is None else read_secret(state)

    async def replace_worker(self, worker: Worker) -> bool:
        """Kill a worker so that its supervisor restarts it.

        Return False if the worker is not one of the stack's, was already restarted, or would not
        be restarted."""
        state = self.read_state()
        if state is None or not state.is_supervised or not state.restarts:
            return False
        for process in state.processes:
            if process.instance == worker.instance_id and process.id is not None:
                return _kill(self.name, process)
        return False

    def is_supervised(self, worker: Worker) -> bool:
        """Return whether the supervisor has started this worker, or an earlier one at its
        address."""
        state = self.read_state()
        if state is None or not state.is_supervised:
            return False
        return any(p.role == "worker" and is_at(worker.admin_url, p) for p in state.processes)

    def hold_refit_lock(self, model: str) -> AbstractAsyncContextManager[Any]:
        return hold_machine_lock(f"refit/{self._get_run_id()}/{model}")

    def open_record(self, model: str) -> VersionRecord:
        return WeightsFile(self.name, self._get_run_id(), model)

    def _get_run_id(self) -> str:
        state = self.read_state()
        return "" if state is None else state.run_id


def _kill(stack: str, process: ProcessState) -> bool:
    """Kill a process of a stack; its supervisor restarts it, or reports that it waits."""
    if process.id is None:
        return False
    # Before the kill, so that the supervisor does not count it as a failure.
    mark = StackDir(stack).get_replaced_mark(process.id.pid)
    with contextlib.suppress(OSError):  # on a full disk it counts as one
        os.close(private_files.open_file(mark, os.O_WRONLY))
    process.id.send(signal.SIGKILL)
    return True


# --- ranks of replicas over several machines -----------------------------------------------------


def stop_rank(name: str, process_name: str) -> bool:
    """Kill a rank whose replica has lost another one; return whether it ran.

    Its supervisor clears up, and then reports that the rank waits for its replica."""
    state = StackDir(name).read()
    if state is None or not state.is_supervised:
        return False
    for process in state.processes:
        if process.name == process_name and process.id is not None and process.id.alive:
            return _kill(name, process)
    return False


def release_rank(name: str, process_name: str) -> None:
    """Let a rank that waits for its replica start again; call it when all ranks of it wait."""
    os.close(private_files.open_file(StackDir(name).get_restart_request(process_name), os.O_WRONLY))


# --- versions ------------------------------------------------------------------------------------


class _WeightsRecord(msgspec.Struct, omit_defaults=True):
    run: str
    version: int = -1
    path: str | None = None
    claims: dict[str, str] = {}


class WeightsFile:
    """The record of a model's versions, shared by all processes that use the stack.

    A process that updates a restarted worker finds the checkpoint of the current version here,
    also when another process refitted."""

    def __init__(self, stack: str, run_id: str, model: str) -> None:
        self._file = StackDir(stack).path / f"weights-{slug(model)}.json"
        self._run_id = run_id

    def put(self, version: int, path: Path) -> None:
        """Record the checkpoint of the current version."""
        record = self._read()
        record.version, record.path = version, str(path)
        with contextlib.suppress(OSError):
            self._write(record)

    def get(self) -> tuple[int, Path] | None:
        """Return the current version and its checkpoint, if one is recorded."""
        record = self._read()
        if record.path is None or record.version < 0:
            return None
        return record.version, Path(record.path)

    def claim(self, version: int, identity: str) -> None:
        """Record permanently which weights a version names.

        A version that cannot be recorded must not be served: other processes learn from this file
        that the weights are about to change."""
        record = self._read()
        record.claims[str(version)] = identity
        try:
            self._write(record)
        except OSError as error:
            raise RollwayError(
                f"The version cannot be recorded in {self._file}: {error}.",
                "Check the disk space and the permissions.",
            ) from error

    def claims(self) -> dict[int, str]:
        return {int(version): identity for version, identity in self._read().claims.items()}

    def _read(self) -> _WeightsRecord:
        """Read the record; return an empty one if it is damaged or of an earlier run."""
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
            content = private_files.read_file(self._file, LARGEST_STATE)
            record = msgspec.json.decode(content, type=_WeightsRecord)
            are_versions = all(len(v) < 20 and v.isdecimal() for v in record.claims)
            if record.run == self._run_id and are_versions:
                return record
        return _WeightsRecord(self._run_id)

    def _write(self, record: _WeightsRecord) -> None:
        private_files.replace_file(self._file, msgspec.json.encode(record))
