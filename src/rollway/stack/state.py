"""What is on disk about a stack: one directory per name, owned by the user.

    <home>/stacks/<name>/
        state.json     what runs now; written by the supervisor, replaced atomically
        events.jsonl   what happened: starts, deaths, restarts, with times
        logs/          one file per process; see rollway.stack.retention

`<home>` is $ROLLWAY_HOME, or $XDG_STATE_HOME/rollway, or ~/.local/state/rollway.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollway.config import slug
from rollway.errors import RollwayError, StartError
from rollway.stack.processes import ProcessId, boot_id

DETACH = b"D"
"""Written to the supervisor's lifeline by an owner that leaves and wants the stack to stay."""

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


class StackDir:
    """The directory of one stack."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = home() / "stacks" / name
        self.lock_name = f"stack/{os.getuid()}/{self.path}"

    @property
    def state_file(self) -> Path:
        return self.path / "state.json"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def read(self) -> StackState | None:
        try:
            return msgspec.json.decode(self.state_file.read_bytes(), type=StackState)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise RollwayError(
                f"{self.state_file} cannot be read: {error.strerror}.",
                "It belongs to somebody else, perhaps: set ROLLWAY_HOME to a directory of yours.",
            ) from error
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise RollwayError(
                f"{self.state_file} was not written by this version of Rollway ({error}).",
                "Stop that stack with the version that started it, or remove the file if it is "
                "not running.",
            ) from error

    def write(self, state: StackState) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        scratch = self.state_file.with_suffix(".new")
        scratch.write_bytes(msgspec.json.encode(asdict(state)))
        scratch.replace(self.state_file)

    def record(self, event: str, **details: Any) -> None:
        """Append to the history; a full disk must not take the stack down."""
        line = json.dumps({"time": time.time(), "event": event, **details})
        with contextlib.suppress(OSError), self.events_file.open("a") as file:
            file.write(line + "\n")

    def events(self) -> list[dict[str, Any]]:
        lines: list[str] = []
        for file in (self.events_file.with_name("events.jsonl.1"), self.events_file):
            with contextlib.suppress(OSError):
                lines += file.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def forget(self) -> None:
        """Remove what says that a stack runs; logs and history stay."""
        for path in (self.state_file, self.state_file.with_suffix(".new")):
            path.unlink(missing_ok=True)


def new_secret(run_dir: Path, given: str = "") -> str:
    """What offers of weights to the workers of this run are signed with."""
    secret = given or secrets.token_hex(32)
    handle = os.open(run_dir / "secret", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secret)
    return secret


def secret_of(state: StackState) -> str:
    """Of a run of this user; empty when there is none to read."""
    try:
        return (Path(state.run_dir) / "secret").read_text()
    except OSError:
        return ""


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
        return (record["version"], Path(record["path"])) if "path" in record else None

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
            record = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        ours = isinstance(record, dict) and record.get("run") == self._run_id
        return record if ours else {}

    def _write(self, record: dict[str, Any]) -> None:
        scratch = self._file.with_suffix(".new")
        scratch.write_text(json.dumps({**record, "run": self._run_id}))
        scratch.replace(self._file)


def home() -> Path:
    explicit = os.environ.get("ROLLWAY_HOME")
    if explicit:
        return Path(explicit).expanduser().resolve()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "rollway"


def known_stacks() -> list[StackState]:
    """Every stack of this user that has a state, running or left behind."""
    directory = home() / "stacks"
    if not directory.is_dir():
        return []
    states = (StackDir(path.name).read() for path in sorted(directory.iterdir()))
    return [state for state in states if state is not None and state.uid == os.getuid()]


def prepare_logs(directory: Path) -> Path:
    """Create the log directory, and check that it can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StartError(
            f"The log directory {directory} cannot be written: {error.strerror or error}.",
            "Choose another with `log_dir` (or --set log_dir=PATH), or mend its permissions.",
        ) from error
    return directory
