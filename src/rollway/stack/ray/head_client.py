"""A running stack on Ray as other processes use it: they ask its Head.

RayAccess          what a `StackAccess` offers: state, secret, versions, the lock of refits
copy_records       the record of all nodes, in the directory of the reader:

node A   runs/<run>/supervisor-….jsonl ── Keeper ──┐
node B   runs/<run>/supervisor-….jsonl ── Keeper ──┴─► Head ─► runs/<run>/node-<node>-….jsonl
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rollway import private_files
from rollway.errors import RollwayError, StackNotRunning
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.stack.ray import cluster
from rollway.stack.ray.keeper import COPY_PREFIX, LARGEST_PIECE
from rollway.stack.state import StackState, is_at

log = logging.getLogger(__name__)

_COPY_SECONDS = 1.0
_STATE_SECONDS = 1.0
_UNAVAILABLE_SECONDS = 60.0
"""How long a Head may be neither reachable nor dead."""


class RayAccess:
    """A stack on Ray, by its Head."""

    def __init__(self, head: Any, name: str, namespace: str, witness: Any = None) -> None:
        self.name = name
        self.namespace = namespace
        self._head, self._job = head, _get_job()
        self._witness = witness
        self._state: tuple[float, StackState] | None = None

    @property
    def head(self) -> Any:
        """The Head. A handle dies with its connection, so it is looked up again after another
        `ray.init` of the user."""
        job = _get_job()
        if job != self._job:
            self._head, self._job = cluster.find_head(self.name, self.namespace), job
        if self._head is None:
            raise StackNotRunning(f"The stack `{self.name}` no longer runs on Ray.")
        return self._head

    def read_state(self) -> StackState:
        state: StackState = self.call("read_state")
        self._state = time.monotonic(), state
        return state

    def read_secret(self) -> str:
        return str(self.call("read_secret"))

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the Head and wait; raise StackNotRunning if it has ended."""
        import ray

        deadline = time.monotonic() + _UNAVAILABLE_SECONDS
        while True:
            try:
                return ray.get(getattr(self.head, method).remote(*arguments))
            except ray.exceptions.RayActorError as error:
                is_dead = not isinstance(error, ray.exceptions.ActorUnavailableError)
                if is_dead or time.monotonic() > deadline:
                    raise make_gone_error(self.name, error) from None
            time.sleep(0.5)  # Ray does not know yet whether it lives

    async def call_ledger(self, method: str, *arguments: Any) -> Any:
        """Call the Head's Ledger without blocking the event loop."""
        return await self._call("call_ledger", method, *arguments)

    async def _call(self, method: str, *arguments: Any) -> Any:
        import ray

        call = partial(getattr(self.head, method).remote, *arguments)
        try:
            return await cluster.outlast(call, _UNAVAILABLE_SECONDS)
        except ray.exceptions.RayActorError as error:
            raise make_gone_error(self.name, error) from None

    async def replace_worker(self, worker: Worker) -> bool:
        return any((await self._call("ask_keepers", "replace", worker)).values())

    def read_log(self, process: str, lines: int, reader: str = "") -> list[str]:
        """Return the last lines of a process's log; with a `reader`, then what is new to it."""
        answers = self.call("ask_keepers", "read_log", process, lines, reader)
        return next(filter(None, answers.values()), [])

    def is_supervised(self, worker: Worker) -> bool:
        if self._state is None or time.monotonic() - self._state[0] > _STATE_SECONDS:
            self.read_state()
        assert self._state is not None
        processes = self._state[1].processes
        return any(p.role == "worker" and is_at(worker.admin_url, p) for p in processes)

    @asynccontextmanager
    async def hold_refit_lock(self, model: str) -> AsyncIterator[None]:
        if self._witness is None:
            self._witness = await asyncio.to_thread(cluster.create_witness)
        lock, token = f"refit/{model}", secrets.token_hex(8)
        try:
            if not await self.call_ledger("lock", lock, token, self._witness):
                raise RollwayError(f"The lock of `{model}` was given up.", "Try again.")
            yield
        finally:
            # Also when the wait was cancelled: then this gives the place in the queue up.
            self.head.call_ledger.remote("unlock", token)

    def open_record(self, model: str) -> _Record:
        return _Record(self, model)

    async def wait_until_over(self) -> StackNotRunning:
        """Return the cause, as an error, when the stack has ended."""
        try:
            error = await self._call("wait_until_over")
        except StackNotRunning as gone:
            return gone
        cause = "it was stopped" if error is None else str(error["message"])
        return StackNotRunning(
            f"The stack `{self.name}` no longer runs on Ray: {cause}",
            "Start it again with `rollway up --on ray`.",
        )


class WatchedHttp(Http):
    """A client whose calls fail at once with the cause after the stack has ended; otherwise they
    would be retried for a minute, and fail without it."""

    def __init__(self, on_end: Callable[[StackNotRunning], None] | None = None) -> None:
        super().__init__()
        self._end: StackNotRunning | None = None
        self._on_end = on_end

    async def watch(self, access: RayAccess) -> None:
        self._end = await access.wait_until_over()
        if self._on_end is not None:
            self._on_end(self._end)

    async def before_request(self, method: str, url: str, body: Any) -> None:
        if self._end is not None:
            raise self._end
        await super().before_request(method, url, body)


class _Record:
    """The versions of a model, kept by the Head. A refit waits for its few calls, of a millisecond
    or more each."""

    def __init__(self, access: RayAccess, model: str) -> None:
        self._access, self._model = access, model

    def put(self, version: int, path: Path) -> None:
        self._call("put", version, str(path))

    def get(self) -> tuple[int, Path] | None:
        current = self._call("get")
        return None if current is None else (current[0], Path(current[1]))

    def claim(self, version: int, identity: str) -> None:
        self._call("claim", version, identity)

    def claims(self) -> dict[int, str]:
        return dict(self._call("claims"))

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._access.call("call_ledger", method, self._model, *arguments)


# --- the record of all nodes ---------------------------------------------------------------------

Fetch = Callable[[dict[str, dict[str, int]], frozenset[str]], dict[str, dict[str, bytes]]]
"""Returns what each node's files have beyond so many bytes, except the reader's own files."""


@contextmanager
def copy_records(directory: Path, fetch: Fetch) -> Iterator[None]:
    """Copy what other nodes have recorded, and then what comes, until the block ends.

    Each node records into its own home. A file that is in the directory already, because homes are
    shared or because it is this node's, is not copied."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(_COPY_SECONDS):
            try:
                copy_new(directory, fetch)
            except RollwayError:  # the stack has ended
                return
            except OSError as error:
                log.warning("the record of other nodes is not copied: %s", error)

    with contextlib.suppress(RollwayError):
        while copy_new(directory, fetch) >= LARGEST_PIECE:
            pass
    thread = threading.Thread(target=run, name="rollway-record-copy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_COPY_SECONDS)


def copy_new(directory: Path, fetch: Fetch) -> int:
    """Copy what is new; return how many bytes that was. Bytes are written where they belong, so two
    readers that copy at once write the same."""
    private_files.make_directory(directory)
    known: dict[str, dict[str, int]] = {}
    own = set()
    for path in directory.glob("*.jsonl"):
        if path.name.startswith(COPY_PREFIX):
            node, _, name = path.name.removeprefix(COPY_PREFIX).partition("-")
            known.setdefault(node, {})[name] = path.stat().st_size
        else:
            own.add(path.name)
    count = 0
    for node, pieces in fetch(known, frozenset(own)).items():
        for name, data in pieces.items():
            if private_files.is_plain_name(name):
                place = known.get(node, {}).get(name, 0)
                path = directory / f"{COPY_PREFIX}{node}-{name}"
                with os.fdopen(private_files.open_file(path, os.O_WRONLY), "wb") as file:
                    file.seek(place)
                    file.write(data)
                count += len(data)
    return count


# --- the end of a Head ---------------------------------------------------------------------------


def _get_job() -> str:
    import ray

    return str(ray.get_runtime_context().get_job_id()) if ray.is_initialized() else ""


def make_gone_error(name: str, error: Exception) -> StackNotRunning:
    """Make the error of a call to a Head that has ended."""
    text = " ".join(str(error).split())
    is_lost = "node" in text and ("died" in text or "dead" in text)
    cause = "the node of its frontend and services is lost" if is_lost else "its Head has ended"
    return StackNotRunning(
        f"The stack `{name}` no longer runs on Ray: {cause}.",
        "See `ray status`, and start it again with `rollway up --on ray`.",
    )
