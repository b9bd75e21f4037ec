"""The private directory of one run (sockets, scratch files, the secret of the stack), and the
validation of a state file: `rollway down` kills the processes and removes the files it names.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import ValidationError

from rollway import private
from rollway.config import LONGEST_STOP_SECONDS, AdminTimeouts

if TYPE_CHECKING:
    from rollway.stack.state import StackState


SECRET_NAME = "secret"
"""The file that holds the stack's secret."""
RUN_ID = re.compile(r"[0-9a-f]{16}")
_LONGEST_TEMPDIR = 40


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
    with os.fdopen(private.open_file(path, os.O_WRONLY | os.O_EXCL), "w") as file:
        file.write(secret)
    return secret


def list_run_dirs(run_id: str) -> list[Path]:
    """List where the directory of a run may be."""
    name = make_run_dir_name(run_id, os.getuid())
    return [Path(base, name) for base in {tempfile.gettempdir(), "/tmp"}]


# --- the state file ------------------------------------------------------------------------------


def validate_state(state: StackState, name: str) -> None:
    """Raise ValueError for a state that no supervisor of this stack has written.

    `rollway down` removes the paths in a state, so they must be plain names below the run's own
    directories."""
    run_dir, log_dir = Path(state.run_dir), Path(state.log_dir)
    is_plain_path = os.path.normpath(state.run_dir) == state.run_dir and run_dir.is_absolute()
    error = {"error": "", "message": "", "hint": ""} if state.error is None else state.error
    for is_valid, problem in (
        (state.name == name, "it is that of a stack of another name"),
        # A stack on Ray has its state at its Head. In a file it would count as alive for ever.
        (not state.ray_namespace, "it is that of a stack on Ray"),
        (RUN_ID.fullmatch(state.run_id), "its run id is not valid"),
        (is_plain_path, "its run directory is not a plain absolute path"),
        (
            run_dir.name == make_run_dir_name(state.run_id, state.uid),
            "its run directory is that of another run",
        ),
        (all(map(private.is_plain_name, state.shared_memory)), "a shared-memory name is a path"),
        (
            log_dir.is_absolute() and "\0" not in state.log_dir,
            "its log directory is not an absolute path",
        ),
        (
            "\0" not in state.record_dir and ".." not in Path(state.record_dir).parts,
            "its record is not in a plain directory",
        ),
        (0 <= state.stop_seconds <= LONGEST_STOP_SECONDS, "`stop_seconds` is out of range"),
        (0 <= state.started_at < 1e11, "`started_at` is out of range"),
        (isinstance(state.join_spec.get("join", {}), dict), "its invitation is damaged"),
        (
            all(isinstance(error.get(key), str) for key in ("error", "message", "hint")),
            "its error is damaged",
        ),
    ):
        if not is_valid:
            raise ValueError(problem)
    for process in state.processes:
        is_plain = private.is_plain_name(process.name) and process.name.isprintable()
        log = Path(process.log)
        if not is_plain or log.parent != log_dir or not private.is_plain_name(log.name):
            raise ValueError("the log of a process is not in the log directory")
    for url in (state.frontend, state.rl, *(p.admin_url or "" for p in state.processes)):
        urlsplit(url).port  # noqa: B018  (raises ValueError)
    try:
        AdminTimeouts(**state.timeouts)
    except ValidationError:
        raise ValueError("its timeouts are damaged") from None
