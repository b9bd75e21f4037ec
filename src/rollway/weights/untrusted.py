"""Read files that another program wrote: plain files only, with a size limit, and strict JSON.

A checkpoint, a sidecar or a list of tensors may come from anywhere. A FIFO in place of a file would
block the reader, a device would fill the memory, and deeply nested JSON would raise an error that
no caller expects. All functions here raise `OSError` or `ValueError`; the callers turn these into
errors for the user.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_NAME = 4096  # Characters in the name of a tensor
MAX_DIMS = 16
MAX_ELEMENTS = 1 << 53
_MAX_FILE_NAME = 255


@contextmanager
def open_plain(path: Path, *, follow: bool = True) -> Iterator[int]:
    """Open a plain file for reading and yield its descriptor; refuse everything else at once."""
    # O_NONBLOCK: opening a FIFO would wait for a writer before its type can be checked.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    handle = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "It is not a plain file", str(path))
        yield handle
    finally:
        os.close(handle)


def read_plain(path: Path, most: int, *, follow: bool = True) -> bytes:
    """Read a plain file of at most `most` bytes."""
    with (
        open_plain(path, follow=follow) as handle,
        os.fdopen(handle, "rb", closefd=False) as file,
    ):
        size = os.fstat(handle).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"It has {size} bytes, more than {most}", str(path))
        return file.read(size)


def parse_json(raw: str | bytes, *, unique: bool = True) -> Any:
    """Parse JSON text. With `unique`, refuse an object that has a key twice."""
    try:
        return json.loads(raw, object_pairs_hook=_check_unique if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_file_name(name: object) -> str:
    """Return `name` if it is a plain file name and not a path."""
    if not isinstance(name, str) or not is_file_name(name):
        raise ValueError(f"{_show(name)} is not a plain file name")
    return name


def is_file_name(name: str, prefix: str = "") -> bool:
    """Return whether `name` is a plain file name, not a path, and begins with `prefix`."""
    return (
        name not in ("", ".", "..")
        and "/" not in name
        and name.isprintable()  # no NUL, no line end, no half of a surrogate pair
        and len(name.encode()) <= _MAX_FILE_NAME
        and name.startswith(prefix)
    )


def check_tensor_name(name: object) -> str:
    """Return `name` if it can be the name of a tensor."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"{_show(name)} cannot be the name of a tensor")
    return name


def check_shape(shape: object) -> tuple[int, ...]:
    """Return `shape` as a tuple if a tensor can have it."""
    if not isinstance(shape, list | tuple) or len(shape) > MAX_DIMS:
        raise ValueError(f"{_show(shape)} is not a shape of at most {MAX_DIMS} dimensions")
    spread = 1  # zeros are left out: strides are products of the other dimensions alone
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_ELEMENTS:
            raise ValueError(f"{_show(size)} is not a size of a dimension")
        spread *= max(size, 1)
    if spread > MAX_ELEMENTS:
        raise ValueError(f"a tensor cannot have the shape {_show(shape)}")
    return tuple(shape)


def reason(error: OSError | ValueError) -> str:
    """Return why a file could not be read, as a short text for a message."""
    return (getattr(error, "strerror", None) or str(error))[:300]


def _check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"it has {_show(twice)} twice")
    return fields


def _show(value: object) -> str:
    """Return `value` as short printable text for a message."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # an integer of more than 4,300 digits has no text
        text = type(value).__name__
    return text if len(text) <= 120 else f"{text[:117]}..."
