"""Checkpoint directories: write one that readers never see half of, and check one before use.

`publish_checkpoint` writes `STABLE` last and renames last, for readers that look for either.
Dynamo answers 200 to a missing directory and to an incomplete one, and damages the worker, so
`check_checkpoint` looks first, also at checkpoints that others wrote.
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
    if not index.is_file():
        return ["model.safetensors"]
    try:
        return sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{index} cannot be read as an index of weight files ({error}).",
            "It is still being written, or its writer died.",
        ) from error


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
