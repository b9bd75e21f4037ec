"""Checkpoint directories: write one that readers never see half of, and check one before use.

The last file to appear is `STABLE`; a directory without it is still being written, or its writer
died. Dynamo answers 200 to a missing directory and to an incomplete one, and damages the worker,
so Rollway looks first.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rollway.errors import UsageError

STABLE = "STABLE"


def publish_checkpoint(directory: Path, write: Callable[[Path], object]) -> Path:
    """Let `write(dir)` fill a scratch directory, then make it appear as `directory` at once."""
    scratch = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        write(scratch)
        for path in scratch.iterdir():
            path.chmod(_readable())  # safetensors writes for its owner alone
            _sync(path)
        (scratch / STABLE).touch()
        scratch.rename(directory)
        _sync(directory.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return directory


def check_checkpoint(directory: Path) -> None:
    """Refuse what cannot be a whole checkpoint; the reason is in the error."""
    if not directory.is_dir():
        raise UsageError(f"There is no checkpoint directory {directory}.", "Check the path.")
    if not (directory / "config.json").is_file():
        raise UsageError(f"{directory} has no config.json.", "It is not a whole checkpoint.")
    missing = [name for name in _shards(directory) if not (directory / name).is_file()]
    if missing:
        raise UsageError(
            f"{directory} lacks weight files: {', '.join(missing[:5])}.",
            "It is still being written, or its writer died.",
        )


def _shards(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return ["model.safetensors"]


def _readable() -> int:
    """The mode a plain `open` would give: workers may run as another user."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
