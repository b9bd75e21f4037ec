"""What a process may ask of a running stack, on this machine or on a Ray cluster."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from rollway.fleet.discovery import Worker
from rollway.stack import local
from rollway.stack.locks import hold_machine_lock
from rollway.stack.state import StackDir, StackState, WeightsFile, read_secret
from rollway.versions import VersionRecord


class StackAccess(Protocol):
    """The state of a stack, its secret, its supervisors, and what its users share."""

    def read_state(self) -> StackState | None: ...

    def read_secret(self) -> str: ...

    async def replace_worker(self, worker: Worker) -> bool:
        """Kill a worker so that its supervisor restarts it; return False if none would."""
        ...

    def is_supervised(self, worker: Worker) -> bool:
        """Whether a supervisor of the stack has started this worker."""
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
        return await local.replace_worker(self.name, worker)

    def is_supervised(self, worker: Worker) -> bool:
        return local.is_supervised(self.name, worker)

    def hold_refit_lock(self, model: str) -> AbstractAsyncContextManager[Any]:
        return hold_machine_lock(f"refit/{self._get_run_id()}/{model}")

    def open_record(self, model: str) -> VersionRecord:
        return WeightsFile(self.name, self._get_run_id(), model)

    def _get_run_id(self) -> str:
        state = self.read_state()
        return "" if state is None else state.run_id
