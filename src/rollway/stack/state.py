"""Read and write the private directory of a stack.

    <home>/stacks/<name>/
        state.json     the processes that run now; the supervisor replaces it atomically
        run            the id of the last run
        logs/          one file per process; see rollway.stack.logs

`<home>` is $ROLLWAY_HOME, or $XDG_STATE_HOME/rollway, or ~/.local/state/rollway.

`rollway down` kills the processes and removes the files that a state names, so a state is validated
strictly: disk faults, older versions and editors change files.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

from rollway import private_files
from rollway.errors import StateUnreadable, UsageError
from rollway.observe.read import prune_runs
from rollway.processes import ProcessId, boot_id
from rollway.spec import StackSpec, check_stack_name, is_loopback

if TYPE_CHECKING:
    from rollway.stack.plan import ProcessPlan

DETACH = b"D"
"""What an owner writes to the lifeline when the stack is to outlive it."""

WAITS_FOR_REPLICA = "waiting for its replica"
"""The state of a dead rank whose replica runs on several machines: it restarts with the others."""
WAITS_FOR_REFIT = "waiting for a refit"
"""The state of a worker that started after a refit: out of routing until it is refitted, too."""
PAUSED = "paused"
LOADED = ("ready", PAUSED, WAITS_FOR_REFIT)
"""The states of workers that have weights and declare a version."""

LARGEST_STATE = 16 << 20  # bytes; the state of 4,096 workers has 3 MB
KEPT_ATTACHED = 5
"""How many runs with a stack that Rollway did not start keep their record."""

SECRET_NAME = "secret"
"""The file that holds the stack's secret."""
RUN_ID = re.compile(r"[0-9a-f]{16}")
_LONGEST_TEMPDIR = 40

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
    worker_role: str = ""
    """`prefill` or `decode`, for a model with `serving: disaggregated`."""
    admin_url: str | None = None
    ports: dict[str, int] = field(default_factory=dict)
    ready_seconds: float | None = None
    instance: int | None = None
    """Dynamo's id of the running worker, once it has registered."""
    version: int | None = None
    """The weight version that the worker last declared."""
    node: str = ""
    """The address of its node, for a stack on Ray."""
    replica: int | None = None
    """Which replica of its model a worker is, counted over the whole stack."""
    node_rank: int = 0
    """Its position among the machines of the replica."""
    nodes: int = 1
    """The number of machines of the replica."""

    @property
    def id(self) -> ProcessId | None:
        if self.pid is None or self.start is None:
            return None
        return ProcessId(self.pid, self.start)


class StackState(msgspec.Struct):
    """The whole stack, with everything that stopping it without its supervisor needs."""

    name: str
    run_id: Annotated[str, msgspec.Meta(pattern=f"^{RUN_ID.pattern}$")]
    supervisor_pid: int
    supervisor_start: int
    run_dir: str
    log_dir: str
    uid: int = msgspec.field(default_factory=os.getuid)
    boot: str = msgspec.field(default_factory=boot_id)
    phase: Phase = "starting"
    started_at: float = msgspec.field(default_factory=time.time)
    frontend: str = ""
    rl: str = ""
    models: list[str] = []
    model_paths: dict[str, str] = {}
    checkpoint_roots: list[str] = []
    timeouts: dict[str, float] = {}
    restarts: bool = True
    """Whether the supervisor restarts processes that die."""
    processes: list[ProcessState] = []
    shared_memory: list[str] = []
    stop_seconds: float = 20.0
    join_spec: dict[str, Any] = msgspec.field(default_factory=dict, name="invitation")
    """Fields for the spec of a stack that joins this one, without the secret."""
    error: dict[str, Any] | None = None
    ray_namespace: str = ""
    """The Ray namespace of a stack on Ray. Its Head sent this state, so it is alive."""
    record_dir: str = ""
    """Where the run is recorded, by default a path below Rollway's home; empty if it is not."""
    waiting: list[str] = []
    """Replicas of a stack on Ray that have no room at the moment."""

    @classmethod
    def from_spec(cls, spec: StackSpec, **fields: Any) -> StackState:
        """Return the state of a stack of this spec; `fields` are those of the run."""
        return cls(
            name=spec.name,
            models=[model.name for model in spec.models],
            model_paths={model.name: model.path for model in spec.models},
            checkpoint_roots=[str(root) for root in spec.checkpoint_roots],
            timeouts=spec.timeouts.model_dump(),
            restarts=spec.restart.enabled,
            stop_seconds=spec.stop_seconds,
            record_dir=choose_record_dir(spec, fields["run_id"]),
            **fields,
        )

    @property
    def supervisor(self) -> ProcessId:
        return ProcessId(self.supervisor_pid, self.supervisor_start)

    @property
    def is_supervised(self) -> bool:
        """Whether the supervisor is alive; for a stack on Ray, its Head."""
        if self.ray_namespace:
            return True
        # Start times count from boot, so after a reboot they could match another process.
        return self.boot == boot_id() and self.supervisor.alive


def is_at(admin_url: str, worker: ProcessPlan | ProcessState) -> bool:
    """Return whether a listed admin address is that of a worker of this stack.

    The port alone is not enough: a worker of another machine may have the same. The host is
    compared only if the spec gave an address; for loopback, all addresses or a name, Dynamo
    chooses what it lists."""
    listed, planned = urlsplit(admin_url), urlsplit(worker.admin_url or "")
    if listed.port != worker.ports.get("system"):
        return False
    host = planned.hostname or ""
    return is_loopback(host) or not _is_ip_address(host) or listed.hostname == host


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def get_stop_seconds(state: StackState) -> float:
    """Return the seconds to wait between SIGTERM and SIGKILL.

    A worker that is still loading its model ignores SIGTERM and has nothing to finish."""
    workers = [process for process in state.processes if process.role == "worker"]
    if any(worker.state not in LOADED for worker in workers):
        return min(state.stop_seconds, 3.0)
    return state.stop_seconds


def choose_record_dir(spec: StackSpec, run_id: str) -> str:
    """Return where a run is recorded. The default is relative to Rollway's home: the processes of
    a stack on Ray run on nodes with homes of their own."""
    if not spec.observe.record:
        return ""
    run = spec.observe.part_of.rpartition("/")[2] or run_id
    return str((spec.observe.directory or Path("runs")) / run)


def find_record_dir(state: StackState) -> Path | None:
    """Return the directory of a run's record as this process sees it; None if there is none."""
    return home() / state.record_dir if state.record_dir else None


def choose_attached_dir(label: str) -> Path:
    """Return where a process records what it does with a stack that Rollway did not start; old
    runs with that stack are removed. The directory appears with the first entry."""
    runs = home() / "runs"
    prune_runs(runs, label, KEPT_ATTACHED - 1)
    return runs / f"attached-{secrets.token_hex(6)}"


def _validate(state: StackState, name: str) -> None:
    """Raise ValueError for a state that no supervisor of this stack has written.

    `rollway down` removes the paths in a state, so they must be plain names below the run's own
    directories."""
    run_dir, log_dir = Path(state.run_dir), Path(state.log_dir)
    if state.name != name:
        raise ValueError("it is that of a stack of another name")
    if state.ray_namespace:  # it is at the stack's Head; in a file it would count as alive for ever
        raise ValueError("it is that of a stack on Ray")
    is_own = run_dir.name == make_run_dir_name(state.run_id, state.uid)
    if not is_own or not run_dir.is_absolute() or os.path.normpath(run_dir) != state.run_dir:
        raise ValueError("its run directory is not that of its run")
    if not all(map(private_files.is_plain_name, state.shared_memory)):
        raise ValueError("a shared-memory name is a path")
    for process in state.processes:
        is_plain = private_files.is_plain_name(process.name)
        if not is_plain or Path(process.log).parent != log_dir:
            raise ValueError("the log of a process is not in the log directory")
    if not log_dir.is_absolute():
        raise ValueError("its log directory is not an absolute path")
    urlsplit(state.frontend).port  # noqa: B018  (raises ValueError; `attach` looks at all stacks)


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
        self.state_file = self.path / "state.json"
        self.run_file = self.path / "run"
        self.logs = self.path / "logs"
        self.lock_name = f"stack/{os.getuid()}/{self.path}"
        self.start_lock_name = f"start/{os.getuid()}/{self.path}"

    def create(self) -> None:
        """Create the directory and its parents, for this user alone."""
        for path in (home(), self.path.parent, self.path):
            private_files.make_directory(path)

    def read(self) -> StackState | None:
        """Read the state, or None if there is none; raise `StateUnreadable` for a damaged one."""
        try:
            if self.path.is_symlink():
                raise ValueError("its directory is a link")
            content = private_files.read_file(self.state_file, LARGEST_STATE)
            state = msgspec.json.decode(content, type=StackState)
            _validate(state, self.name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            shown = "".join(char if char.isprintable() else "?" for char in reason)[:200]
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
        private_files.replace_file(self.state_file, msgspec.json.encode(state))

    def begin(self, state: StackState) -> None:
        """Write the first state of a run, and its id apart: the id marks the run's processes, which
        must be found also by a damaged state."""
        self.write(state)
        private_files.replace_file(self.run_file, state.run_id.encode())

    def get_stop_request(self, starter: ProcessId) -> Path:
        """Return the file that asks a process which is starting this stack to stop it."""
        return self.path / f"stop-{starter.pid}-{starter.start}"

    def get_restart_request(self, process: str) -> Path:
        """Return the file that releases a rank which waits for its replica."""
        return self.path / f"restart-{process}"

    def get_replaced_mark(self, pid: int) -> Path:
        """Return the file that says that a process is killed on purpose, so that it restarts."""
        return self.path / f"replaced-{pid}"

    def read_run_id(self) -> str | None:
        """Return the id of the last run without trusting the state; None if there is none."""
        with contextlib.suppress(OSError, ValueError):
            run_id = private_files.read_file(self.run_file, 100).decode()
            if RUN_ID.fullmatch(run_id) and not self.path.is_symlink():
                return run_id
        return None

    def forget(self) -> None:
        """Remove the state; logs stay."""
        if self.path.is_symlink():
            self.path.unlink()
            return
        # A writer that was killed leaves its scratch file.
        scratch = self.path.glob(f"{self.state_file.name}.*.new")
        for path in (self.state_file, *scratch, *self.path.glob("replaced-*")):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def make_ray_part_name(stack: str, run_id: str, number: int) -> str:
    """Return the name of one node's part of a stack on Ray. Nodes may share a home directory, so
    it has the run id and a number."""
    return f"ray-{stack[:17].rstrip('-')}-{run_id[:8]}-{number}"


def is_ray_part(name: str) -> bool:
    """Return whether a stack of this machine is one node's part of a stack on Ray."""
    return re.fullmatch(r"ray-[a-z0-9-]+-[0-9a-f]{8}-\d+", name) is not None


# --- the directory of a run: sockets, scratch files, the secret of the stack --------------------


def make_run_dir_name(run_id: str, uid: int) -> str:
    return f"rollway-{uid}-{run_id[:8]}"


def choose_run_dir(run_id: str) -> Path:
    """Return the directory of a run. It is short: vLLM puts Unix sockets below it, and the path of
    a socket has at most 107 bytes."""
    base = os.path.normpath(tempfile.gettempdir())
    if len(base) > _LONGEST_TEMPDIR:
        base = "/tmp"
    return Path(base) / make_run_dir_name(run_id, os.getuid())


def remove_run_dir(path: Path) -> None:
    """Remove the directory of a run if it is a real directory of this user, not a link."""
    with contextlib.suppress(OSError):
        if not path.is_symlink() and path.lstat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)


def write_secret(run_dir: Path, secret: str = "") -> str:
    """Write the secret that signs orders and offers of this run, a new one if none is given."""
    secret = secret or secrets.token_hex(32)
    path = run_dir / SECRET_NAME
    # O_EXCL: an existing secret is never replaced, since running workers have read it.
    with os.fdopen(private_files.open_file(path, os.O_WRONLY | os.O_EXCL), "w") as file:
        file.write(secret)
    return secret


def list_run_dirs(run_id: str) -> list[Path]:
    """List where the directory of a run may be."""
    name = make_run_dir_name(run_id, os.getuid())
    return [Path(base, name) for base in {tempfile.gettempdir(), "/tmp"}]


def secret_file(state: StackState) -> Path:
    return Path(state.run_dir) / SECRET_NAME


def read_secret(state: StackState) -> str:
    """Read the secret of a run of this user; return an empty one if there is none to read."""
    try:
        return private_files.read_file(secret_file(state), 1 << 16).decode()
    except (OSError, ValueError):
        return ""


# --- Rollway's home ------------------------------------------------------------------------------


def home() -> Path:
    """Return the directory of Rollway's state."""
    explicit = os.environ.get("ROLLWAY_HOME")
    if explicit:
        return Path(explicit).expanduser().resolve()
    base = os.environ.get("XDG_STATE_HOME")
    return ((Path(base) if base else Path.home() / ".local" / "state") / "rollway").resolve()


def make_home() -> Path:
    """Create the home, or tighten its mode; refuse one that other users can write."""
    return private_files.make_directory(home())


def list_stack_names() -> list[str]:
    """List the names of all stacks that have a directory here, also those that have ended."""
    names = []
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        os.scandir(home() / "stacks") as entries,
    ):
        for entry in entries:
            with contextlib.suppress(ValueError):
                names.append(check_stack_name(entry.name))
    return sorted(names)


def _read_stacks() -> Iterator[tuple[StackDir, StackState | StateUnreadable]]:
    for directory in map(StackDir, list_stack_names()):
        try:
            state = directory.read()
        except StateUnreadable as error:
            yield directory, error
        else:
            if state is not None:
                yield directory, state


def list_stacks() -> list[StackState]:
    """List every stack of this user that has a readable state, running or left behind."""
    states = [state for _, state in _read_stacks() if isinstance(state, StackState)]
    return [state for state in states if state.uid == os.getuid()]


def list_unreadable_stacks() -> dict[str, str]:
    """Return the stacks of this user whose state is damaged, with the reason."""
    return {
        directory.name: error.reason
        for directory, error in _read_stacks()
        if isinstance(error, StateUnreadable) and directory.path.lstat().st_uid == os.getuid()
    }
