"""What is on disk about a stack: one directory per name, that only its user can enter.

    <home>/stacks/<name>/
        state.json     what runs now; written by the supervisor, replaced atomically
        events.jsonl   what happened: starts, deaths, restarts, with times
        logs/          one file per process; see rollway.stack.retention

`<home>` is $ROLLWAY_HOME, or $XDG_STATE_HOME/rollway, or ~/.local/state/rollway.

A state decides what `rollway down` ends and removes, so it is read with care: whatever a disk, an
older version or an editor made of the file, it is a state of that very stack or it is unreadable.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from pydantic import ValidationError

from rollway import private
from rollway.config import LONGEST_STOP_SECONDS, AdminTimeouts, check_stack_name, slug
from rollway.errors import RollwayError, StartError, StateUnreadable, UsageError
from rollway.processes import ProcessId, boot_id

SECRET_NAME = "secret"
"""The file in a run's private directory that holds the stack's secret."""
DETACH = b"D"
"""Written to the supervisor's lifeline by an owner that leaves and wants the stack to stay."""

LARGEST_STATE = 16 << 20  # bytes; one of 4,096 workers has 3 MB
_LARGEST_HISTORY = 4 << 20
_RUN_ID = re.compile(r"[0-9a-f]{16}")

Phase = Literal["starting", "ready", "stopping", "failed"]


@dataclass(slots=True)
class ProcessState:
    """One process as `rollway status` shows it."""

    name: str
    role: str
    log: str
    state: str = "waiting"
    pid: int | None = None
    start: int | None = None
    restarts: int = 0
    failures: int = 0
    detail: str = ""
    model: str | None = None
    admin_url: str | None = None
    ports: dict[str, int] = field(default_factory=dict)
    ready_seconds: float | None = None
    instance: int | None = None
    """Dynamo's id of the worker that runs now, once it has registered."""

    @property
    def id(self) -> ProcessId | None:
        if self.pid is None or self.start is None:
            return None
        return ProcessId(self.pid, self.start)


@dataclass(slots=True)
class StackState:
    """The whole stack; everything needed to end it without its supervisor."""

    name: str
    run_id: str
    supervisor_pid: int
    supervisor_start: int
    run_dir: str
    log_dir: str
    uid: int = field(default_factory=os.getuid)
    boot: str = field(default_factory=boot_id)
    phase: Phase = "starting"
    started_at: float = field(default_factory=time.time)
    frontend: str = ""
    rl: str = ""
    models: list[str] = field(default_factory=list)
    model_paths: dict[str, str] = field(default_factory=dict)
    checkpoint_roots: list[str] = field(default_factory=list)
    timeouts: dict[str, float] = field(default_factory=dict)
    restarts: bool = True
    """Whether what dies is started again."""
    processes: list[ProcessState] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)
    stop_seconds: float = 20.0
    invitation: dict[str, Any] = field(default_factory=dict)
    """Fields for the spec of a stack that joins this one; all but the secret."""
    error: dict[str, Any] | None = None

    @property
    def supervisor(self) -> ProcessId:
        return ProcessId(self.supervisor_pid, self.supervisor_start)

    @property
    def supervised(self) -> bool:
        return self.boot == boot_id() and self.supervisor.alive


def patience(state: StackState) -> float:
    """Seconds to wait between SIGTERM and SIGKILL. A worker that still loads its model does not
    hear the first and has nothing to finish."""
    loading = any(
        process.role == "worker" and process.state != "ready" for process in state.processes
    )
    return min(state.stop_seconds, 3.0) if loading else state.stop_seconds


@dataclass(frozen=True, slots=True)
class Remains:
    """What can be told of a run whose state is unreadable."""

    supervisor: ProcessId | None = None
    run_id: str | None = None


class StackDir:
    """The directory of one stack."""

    def __init__(self, name: str) -> None:
        try:
            check_stack_name(name)
        except ValueError as error:
            raise UsageError(
                f"{name[:60]!r} cannot be the name of a stack.", f"Names: {error}."
            ) from None
        self.name = name
        self.path = home() / "stacks" / name
        self.lock_name = f"stack/{os.getuid()}/{self.path}"
        self.start_lock_name = f"start/{os.getuid()}/{self.path}"

    @property
    def state_file(self) -> Path:
        return self.path / "state.json"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def create(self) -> None:
        """Create the directory and those above it, for this user alone."""
        for path in (home(), self.path.parent, self.path):
            private.make_directory(path)

    def read(self) -> StackState | None:
        """Read the state; None when there is none, `StateUnreadable` when it is damaged."""
        try:
            if self.path.is_symlink():
                raise ValueError("its directory is a link")
            content = private.read_file(self.state_file, LARGEST_STATE)
            state = msgspec.json.decode(content, type=StackState)
            _check(state, self.name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            shown = "".join(sign if sign.isprintable() else "?" for sign in reason)[:200]
            raise StateUnreadable(
                f"The state of `{self.name}` is unreadable: {shown}.",
                f"`rollway down {self.name}` ends what is left of it and removes "
                f"{self.state_file}.",
                reason=shown,
            ) from error
        return state

    def write(self, state: StackState) -> None:
        if not self.path.is_dir():
            self.create()
        private.replace_file(self.state_file, msgspec.json.encode(asdict(state)))

    def record(self, event: str, **details: Any) -> None:
        """Append to the history; a full disk must not take the stack down."""
        line = json.dumps({"time": time.time(), "event": event, **details})
        with contextlib.suppress(OSError):
            handle = private.open_file(self.events_file, os.O_WRONLY | os.O_APPEND)
            with os.fdopen(handle, "a") as file:
                file.write(line + "\n")

    def events(self) -> list[dict[str, Any]]:
        """Read the history, its last part when it is long; lines that were cut are left out."""
        lines: list[bytes] = []
        for path in (self.events_file.with_name("events.jsonl.1"), self.events_file):
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LARGEST_HISTORY))
                lines += file.read(_LARGEST_HISTORY).splitlines()
        entries = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    entries.append(entry)
        return entries

    def stop_request(self, starter: ProcessId) -> Path:
        """The file that tells a process which is starting this stack to stop."""
        return self.path / f"stop-{starter.pid}-{starter.start}"

    def remains(self) -> Remains:
        """Find the supervisor and the mark of the last run, without trusting the state."""
        if self.path.is_symlink():
            return Remains()
        run_ids = [e.get("run") for e in self.events() if e.get("event") == "start"]
        run_id = run_ids[-1] if run_ids else None
        supervisor = None
        with contextlib.suppress(
            OSError, ValueError, TypeError, KeyError, msgspec.MsgspecError, RecursionError
        ):
            record = msgspec.json.decode(private.read_file(self.state_file, LARGEST_STATE))
            run_id = run_id or record.get("run_id")
            pid, start = record["supervisor_pid"], record["supervisor_start"]
            supervisor = ProcessId(int(pid), int(start))
        known = isinstance(run_id, str) and _RUN_ID.fullmatch(run_id)
        return Remains(supervisor, run_id if known else None)

    def forget(self) -> None:
        """Remove what says that a stack runs; logs and history stay."""
        if self.path.is_symlink():
            self.path.unlink()
            return
        scratch = self.path.glob(f"{self.state_file.name}.*.new")  # of a writer that was killed
        for path in (self.state_file, *scratch):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _check(state: StackState, name: str) -> None:
    """Refuse with ValueError a state that no supervisor of this stack has written.

    Paths are plain names below the run's own directories: whatever is named here, `rollway down`
    removes."""
    if state.name != name:
        raise ValueError("it is that of a stack of another name")
    if not _RUN_ID.fullmatch(state.run_id):
        raise ValueError("its run has no valid mark")
    run_dir = Path(state.run_dir)
    if os.path.normpath(state.run_dir) != state.run_dir or not run_dir.is_absolute():
        raise ValueError("its run directory is not a plain absolute path")
    if run_dir.name != run_dir_name(state.run_id, state.uid):
        raise ValueError("its run directory is not that of its run")
    if not all(map(private.is_plain_name, state.shared_memory)):
        raise ValueError("a name of shared memory is a path")
    if not Path(state.log_dir).is_absolute() or "\0" in state.log_dir:
        raise ValueError("its log directory is not an absolute path")
    for process in state.processes:
        plain = private.is_plain_name(process.name) and process.name.isprintable()
        log = Path(process.log)
        if not plain or log.parent != Path(state.log_dir) or not private.is_plain_name(log.name):
            raise ValueError("the log of a process is not in the log directory")
        urlsplit(process.admin_url or "").port  # noqa: B018  (raises ValueError)
    for url in (state.frontend, state.rl):
        urlsplit(url).port  # noqa: B018
    if not (0 <= state.stop_seconds <= LONGEST_STOP_SECONDS and 0 <= state.started_at < 1e11):
        raise ValueError("a number of seconds is out of range")
    if not isinstance(state.invitation.get("join", {}), dict):
        raise ValueError("its invitation is damaged")
    if state.error is not None and not all(
        isinstance(state.error.get(field), str) for field in ("error", "message", "hint")
    ):
        raise ValueError("its error is damaged")
    try:
        AdminTimeouts(**state.timeouts)
    except ValidationError:
        raise ValueError("its timeouts are damaged") from None


def run_dir_name(run_id: str, uid: int) -> str:
    """The name of a run's directory below the temporary directory.

    Short, because vLLM puts Unix sockets below it and their paths end at 107 characters."""
    return f"rollway-{uid}-{run_id[:8]}"


def remove_run_dir(path: Path) -> None:
    """Remove the directory of a run, if it is a directory of this user and not a link to one."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        if not path.is_symlink() and status.st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)


def new_secret(run_dir: Path, given: str = "") -> str:
    """Write the secret that orders and offers of weights to this run's workers are signed with."""
    secret = given or secrets.token_hex(32)
    path = run_dir / SECRET_NAME
    with os.fdopen(private.open_file(path, os.O_WRONLY | os.O_EXCL), "w") as file:
        file.write(secret)
    return secret


def secret_file(state: StackState) -> Path:
    return Path(state.run_dir) / SECRET_NAME


def secret_of(state: StackState) -> str:
    """Read the secret of a run of this user; empty when there is none to read."""
    try:
        return private.read_file(secret_file(state), 1 << 16).decode()
    except (OSError, ValueError):
        return ""


class _WeightsRecord(msgspec.Struct, omit_defaults=True):
    run: str
    version: int = -1
    path: str | None = None
    claims: dict[str, str] = {}


class WeightsFile:
    """Which checkpoint is the current version of a model, for processes that come later: a watcher
    that brings a restarted worker up to date need not be the one that refitted."""

    def __init__(self, stack: str, run_id: str, model: str) -> None:
        self._file = StackDir(stack).path / f"weights-{slug(model)}.json"
        self._run_id = run_id
        self._seen: tuple[tuple[int, int], int | None] | None = None

    def put(self, version: int, path: Path) -> None:
        with contextlib.suppress(OSError):
            self._write({**self._read(), "version": version, "path": str(path)})

    def get(self) -> tuple[int, Path] | None:
        record = self._read()
        if "path" not in record or "version" not in record:
            return None
        return record["version"], Path(record["path"])

    def claim(self, version: int, identity: str) -> None:
        """Record which weights a version names, for good. One that cannot be recorded must not be
        served: other processes tell by this file that weights are about to change."""
        record = self._read()
        claims = {**record.get("claims", {}), str(version): identity}
        try:
            self._write({**record, "claims": claims})
        except OSError as error:
            raise RollwayError(
                f"The version cannot be recorded in {self._file}: {error}."
            ) from error

    def claims(self) -> dict[int, str]:
        return {int(version): name for version, name in self._read().get("claims", {}).items()}

    def newest(self) -> int | None:
        """The newest version claimed; a look at the file's times, unless it was replaced."""
        try:
            found = self._file.stat()
        except OSError:
            return None
        stamp = found.st_ino, found.st_mtime_ns
        if self._seen is None or self._seen[0] != stamp:
            self._seen = stamp, max(self.claims(), default=None)
        return self._seen[1]

    def _read(self) -> dict[str, Any]:
        """Empty also for a record of an earlier run of the stack."""
        try:
            content = private.read_file(self._file, LARGEST_STATE)
            record = msgspec.json.decode(content, type=_WeightsRecord)
        except (OSError, ValueError, msgspec.MsgspecError):
            return {}
        versions_valid = all(len(v) < 20 and v.isdecimal() for v in record.claims)
        if record.run != self._run_id or not versions_valid:
            return {}
        kept: dict[str, Any] = msgspec.to_builtins(record)
        return kept

    def _write(self, record: dict[str, Any]) -> None:
        content = json.dumps({**record, "run": self._run_id}).encode()
        private.replace_file(self._file, content)


def home() -> Path:
    explicit = os.environ.get("ROLLWAY_HOME")
    if explicit:
        return Path(explicit).expanduser().resolve()
    base = os.environ.get("XDG_STATE_HOME")
    return ((Path(base) if base else Path.home() / ".local" / "state") / "rollway").resolve()


def make_home() -> Path:
    """Create the home, or tighten it; refuse one that other users can write."""
    return private.make_directory(home())


def stack_names() -> list[str]:
    """The names of all stacks that ever had a directory here."""
    directory = home() / "stacks"
    names = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as found:
        for entry in found:
            with contextlib.suppress(ValueError):
                check_stack_name(entry.name)
                names.append(entry.name)
    return sorted(names)


def known_stacks() -> list[StackState]:
    """Every stack of this user that has a readable state, running or left behind."""
    states = []
    for name in stack_names():
        with contextlib.suppress(StateUnreadable):
            state = StackDir(name).read()
            if state is not None and state.uid == os.getuid():
                states.append(state)
    return states


def unreadable_stacks() -> dict[str, str]:
    """The stacks of this user whose state is damaged, with the reason."""
    reasons = {}
    for name in stack_names():
        directory = StackDir(name)
        try:
            directory.read()
        except StateUnreadable as error:
            if directory.path.lstat().st_uid == os.getuid():
                reasons[name] = error.reason
    return reasons


def prepare_logs(directory: Path) -> Path:
    """Create the log directory, and check that it can be written."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StartError(
            f"The log directory {directory} cannot be written: {error.strerror or error}.",
            "Choose another with `log_dir` (or --set log_dir=PATH), or mend its permissions.",
        ) from error
    return directory
