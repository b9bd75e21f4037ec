"""Files and directories that only this user can read.

Every function sets the mode explicitly: a umask may be loose, and what exists may have a looser
mode. None follows a link in the last part of a path.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from rollway.errors import StartError

_HINT = "Set ROLLWAY_HOME to a directory that only you can write."


def make_directory(path: Path) -> Path:
    """Create a directory with mode 0700, or tighten an existing one; refuse one of another user.
    Directories above it that are missing are private, too."""
    try:
        for missing in [each for each in reversed(path.parents) if not each.exists()]:
            missing.mkdir(mode=0o700, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StartError(
            f"Rollway's directory {path} cannot be written: {error.strerror}.",
            "Set ROLLWAY_HOME to a directory you can write.",
        ) from error
    try:
        _tighten(path, handle)
    finally:
        os.close(handle)
    return path


def make_scratch(path: Path) -> None:
    """Create a directory with mode 0700. It must not exist: another user may have guessed the name
    and created it first."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except FileExistsError as error:
        raise StartError(
            f"The directory {path} exists already, and this run did not create it.",
            "Start again: the next run gets another name.",
        ) from error
    path.chmod(0o700)  # a umask may remove even the owner's rights


def _tighten(path: Path, handle: int) -> None:
    status = os.fstat(handle)
    if status.st_uid != os.getuid():
        raise StartError(f"The directory {path} belongs to another user ({status.st_uid}).", _HINT)
    if status.st_mode & stat.S_ISVTX or path == Path(path.anchor):
        # Root owns /tmp, too: closing it to everybody else would break the machine.
        raise StartError(f"The directory {path} is a directory that all users share.", _HINT)
    if stat.S_IMODE(status.st_mode) != 0o700:
        with contextlib.suppress(OSError):
            os.fchmod(handle, 0o700)
        if os.fstat(handle).st_mode & 0o022:  # some filesystems ignore modes
            raise StartError(
                f"The directory {path} can be written by other users, and its mode cannot be "
                "changed.",
                _HINT,
            )


def open_file(path: Path, flags: int) -> int:
    """Open a file with mode 0600, and create it if it does not exist; return the descriptor."""
    handle = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file of another user that we may write
        if stat.S_IMODE(os.fstat(handle).st_mode) != 0o600:
            os.fchmod(handle, 0o600)
    return handle


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers, and the next boot, see the old or the new content."""
    # A random name: two writers at once must not write to one scratch file.
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with os.fdopen(open_file(scratch, os.O_WRONLY | os.O_EXCL), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException as error:
        scratch.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # the system names no file if the disk is full
        raise
    # Without this, a power cut can undo the rename.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_file(path: Path, limit: int) -> bytes:
    """Read a regular file of this user; raise ValueError for another kind or a larger file."""
    # Without O_NONBLOCK, opening a named pipe waits for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a plain file")
        if status.st_uid != os.getuid():
            raise ValueError(f"it belongs to another user ({status.st_uid})")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return content


def is_plain_name(name: str) -> bool:
    """Return whether a name can only name an entry of the directory it is used in."""
    return 0 < len(name) < 256 and name not in (".", "..") and not set(name) & {"/", "\0"}
