"""The private directory of one run: sockets, scratch files, and the secret of the stack."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

from rollway import private

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
