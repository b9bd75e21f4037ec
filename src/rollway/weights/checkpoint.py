"""Checkpoint directories: write one that readers never see half of, and check one before use.

`publish_checkpoint` writes `STABLE` last and renames last, for readers that look for either; in
it are size and SHA-256 of every file. Dynamo answers 200 to a missing directory, to one with wrong
shapes and to an incomplete one, and damages the worker, so `check_checkpoint` looks first, also at
checkpoints that others wrote. No torch here: headers are read, and bytes are hashed, as they are.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollway.errors import UsageError
from rollway.weights import owner
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.weight_file import HALF_WRITTEN, stored_tensors

STABLE = "STABLE"
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a weight file says about one tensor."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint, looked at: where it is, what it holds, and which bytes these are."""

    path: Path
    tensors: dict[str, TensorHeader]
    identity: str
    """Equal for equal files; tells one set of weights from another that claims its version."""

    @property
    def nbytes(self) -> int:
        return sum(
            math.prod(one.shape) * ELEMENT_BYTES.get(one.dtype, 1) for one in self.tensors.values()
        )


def publish_checkpoint(directory: Path, write: Callable[[Path], object]) -> Path:
    """Let `write(dir)` fill a scratch directory, then make it appear as `directory` at once."""
    scratch = directory.with_name(owner.scratch_name(directory.name))
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        write(scratch)
        files = sorted(path for path in scratch.iterdir() if path.is_file())
        for path in files:
            path.chmod(_readable())  # safetensors writes for its owner alone
            sync(path)
        stable = scratch / STABLE
        stable.write_text(json.dumps({"files": _digests(files)}, indent=1))
        sync(stable)
        sync(scratch)
        scratch.rename(directory)
        sync(directory.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return directory


def check_checkpoint(
    directory: Path, *, roots: Sequence[Path] = (), whole: bool = True
) -> Checkpoint:
    """Refuse what cannot be a whole checkpoint; the reason is in the error.

    With `whole`, every byte is compared with what `STABLE` says, where that was written."""
    path = directory.expanduser().resolve()
    _check_root(path, roots)
    if path.is_dir() and not (path / "config.json").is_file():
        raise UsageError(f"{path} has no config.json.", "It is not a whole checkpoint.")
    tensors = read_headers(path)
    said = _said_by_stable(path)
    if said is not None and whole:
        _check_bytes(path, said)
    return Checkpoint(path, tensors, _identity(path, tensors, said))


def stamps(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Size, time and place of every file: they show that something was written since."""
    try:
        files = sorted(path for path in directory.iterdir() if path.is_file())
        return {path.name: _stat(path) for path in files}
    except OSError as error:
        raise UsageError(f"{directory} cannot be read: {error.strerror}.") from error


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Name, dtype and shape of every tensor, from the weight files' headers alone."""
    if not directory.is_dir():
        raise UsageError(f"There is no checkpoint directory {directory}.", "Check the path.")
    names = _shards(directory)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise UsageError(f"{directory} lacks weight files: {', '.join(missing[:5])}.", HALF_WRITTEN)
    found: dict[str, TensorHeader] = {}
    for name in names:
        stored = stored_tensors(directory / name)
        found.update({n: TensorHeader(one.dtype, one.shape, name) for n, one in stored.items()})
    indexed = _index(directory)
    absent = sorted(set(indexed) - set(found)) if indexed else []
    if absent:
        raise UsageError(
            f"{directory} lacks tensors that its index lists: {', '.join(absent[:5])}.",
            HALF_WRITTEN,
        )
    return found


def differences(
    new: dict[str, TensorHeader], served: dict[str, TensorHeader], *, allow_cast: bool = False
) -> list[str]:
    """How `new` differs from what is served, in words; empty when it can take its place."""
    words = [f"{name} is missing" for name in sorted(served.keys() - new.keys())]
    words += [f"{name} is not part of the model" for name in sorted(new.keys() - served.keys())]
    for name in sorted(new.keys() & served.keys()):
        mine, theirs = new[name], served[name]
        if mine.shape != theirs.shape or (mine.dtype != theirs.dtype and not allow_cast):
            words.append(f"{name} is {mine}, served is {theirs}")
    return words


def refuse_differences(words: Sequence[str], path: Path | str) -> None:
    """Raise when there are any; the message names the first few."""
    if words:
        more = f" and {len(words) - 5} more" if len(words) > 5 else ""
        raise UsageError(
            f"{path} does not fit the model that is served: {'; '.join(words[:5])}{more}.",
            "Save a checkpoint of the served architecture, with all tensors; another dtype is "
            "accepted from Python, with refit(version, FromDisk(path, allow_cast=True)).",
        )


def _check_root(path: Path, roots: Sequence[Path]) -> None:
    allowed = [root.expanduser().resolve() for root in roots]
    if allowed and not any(path.is_relative_to(root) for root in allowed):
        raise UsageError(
            f"{path} is outside the allowed checkpoint roots ({', '.join(map(str, allowed))}).",
            "Publish checkpoints below one of them, or change `checkpoint_roots` of the stack.",
        )


def _shards(directory: Path) -> list[str]:
    indexed = _index(directory)
    return sorted(set(indexed.values())) if indexed is not None else [_WHOLE]


def _index(directory: Path) -> dict[str, str] | None:
    """Tensor name to file, for a checkpoint in several files."""
    index = directory / _INDEX
    if not index.is_file():
        return None
    try:
        names = {str(k): str(v) for k, v in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{index} cannot be read as an index of weight files ({error}).", HALF_WRITTEN
        ) from error
    outside = [name for name in names.values() if Path(name).name != name]
    if outside:
        raise UsageError(f"{index} names files elsewhere: {outside[0]}.", "Use plain file names.")
    return names


def _said_by_stable(directory: Path) -> dict[str, dict[str, Any]] | None:
    """What the publisher recorded; None for a checkpoint that somebody else wrote."""
    try:
        said = json.loads((directory / STABLE).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return said if isinstance(said, dict) else None


def _check_bytes(directory: Path, said: dict[str, dict[str, Any]]) -> None:
    files = [directory / name for name in said]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise UsageError(f"{directory} lost files: {', '.join(missing[:5])}.", HALF_WRITTEN)
    now = _digests(files)
    changed = [name for name, digest in said.items() if now[name] != digest]
    if changed:
        raise UsageError(
            f"{directory} is corrupt: {', '.join(changed[:5])} changed after it was published.",
            "Write the checkpoint again.",
        )


def _digests(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of each file; hashing lets go of the GIL, so files go side by side."""

    def digest(path: Path) -> dict[str, Any]:
        with path.open("rb") as file:
            return {
                "size": path.stat().st_size,
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            }

    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip((path.name for path in files), pool.map(digest, files), strict=True))


def _identity(
    path: Path, tensors: dict[str, TensorHeader], said: dict[str, dict[str, Any]] | None
) -> str:
    """By digests where they were recorded; else by size and time of the weight files."""
    files = sorted({tensor.file for tensor in tensors.values()})
    if said is not None and all(name in said for name in files):
        facts: list[Any] = [(name, said[name]["sha256"]) for name in files]
    else:
        facts = [(name, *_stat(path / name)) for name in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _stat(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _readable() -> int:
    """The mode a plain `open` would give: workers may run as another user."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, outlive the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
