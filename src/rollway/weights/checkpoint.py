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
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollway.errors import UsageError
from rollway.weights import leftovers
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.untrusted import (
    check_file_name,
    check_tensor_name,
    open_plain,
    parse_json,
    read_plain,
    reason,
)
from rollway.weights.weight_file import HALF_WRITTEN, stored_tensors

STABLE = "STABLE"
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_MOST_INDEX = _MOST_STABLE = 128 << 20
_MOST_CONFIG = 16 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


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
    scratch = directory.with_name(leftovers.scratch_name(directory.name))
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
    path = _real(directory)
    _check_root(path, roots)
    if path.is_dir():
        _check_links(path, roots)
        _check_config(path)
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
    indexed = _index(directory)
    names = [_WHOLE] if indexed is None else sorted(set(indexed.values()))
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise UsageError(f"{directory} lacks weight files: {', '.join(missing[:5])}.", HALF_WRITTEN)
    tensors: dict[str, TensorHeader] = {}
    for name in names:
        for tensor, stored in stored_tensors(directory / name).items():
            if tensor in tensors:
                raise UsageError(
                    f"{directory} has {tensor} in {tensors[tensor].file} and in {name}.",
                    "Save each tensor in one file: which of them counts would be chance.",
                )
            tensors[tensor] = TensorHeader(stored.dtype, stored.shape, name)
    absent = sorted(set(indexed) - set(tensors)) if indexed else []
    if absent:
        raise UsageError(
            f"{directory} lacks tensors that its index lists: {', '.join(absent[:5])}.",
            HALF_WRITTEN,
        )
    return tensors


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


def _check_links(directory: Path, roots: Sequence[Path]) -> None:
    """Refuse files that are links to places that the directory itself could not be in."""
    allowed = [root.expanduser().resolve() for root in roots]
    for file in _list_files(directory) if allowed else ():
        if file.is_symlink() and not any(_real(file).is_relative_to(root) for root in allowed):
            raise UsageError(
                f"{file} is a link to a file outside the allowed checkpoint roots.",
                "Copy the file into the checkpoint, or change `checkpoint_roots` of the stack.",
            )


def _list_files(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be read: {reason(error)}.", "Let this user read it."
        ) from error


def _real(path: Path) -> Path:
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, NUL, no such user
        raise UsageError(f"{str(path)!a} leads nowhere: {error}.", "Check the path.") from error


def _check_config(directory: Path) -> None:
    file = directory / "config.json"
    if not file.exists():
        raise UsageError(f"{directory} has no config.json.", "It is not a whole checkpoint.")
    read_config(file)


def read_config(file: Path) -> dict[str, Any]:
    """Read a model's config.json."""
    try:
        config = parse_json(read_plain(file, _MOST_CONFIG), unique=False)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {reason(error)}.",
            "Give a checkpoint directory, or the path of a config.json.",
        ) from error
    except ValueError as error:
        raise UsageError(f"{file} is not JSON ({reason(error)}).", HALF_WRITTEN) from error
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds no JSON object.", "Save the model's config again.")
    return config


def _index(directory: Path) -> dict[str, str] | None:
    """Tensor name to file, for a checkpoint in several files."""
    index = directory / _INDEX
    if not index.exists():
        return None
    try:
        fields = parse_json(read_plain(index, _MOST_INDEX))
        where = fields.get("weight_map") if isinstance(fields, dict) else None
        if not isinstance(where, dict):
            raise ValueError("it has no weight_map")
        names = {check_tensor_name(name): file for name, file in where.items()}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{index} cannot be read as an index of weight files ({reason(error)}).", HALF_WRITTEN
        ) from error
    try:
        return {name: check_file_name(file) for name, file in names.items()}
    except ValueError as error:
        raise UsageError(
            f"{index} names files elsewhere: {reason(error)}.", "Use plain file names."
        ) from error


def _said_by_stable(directory: Path) -> dict[str, dict[str, Any]] | None:
    """What the publisher recorded; None for a checkpoint that somebody else wrote.

    Other trainers write a file of this name too, often an empty one."""
    stable = directory / STABLE
    if not stable.exists():
        return None
    try:
        raw = read_plain(stable, _MOST_STABLE)
        if not raw.lstrip().startswith((b"{", b"[")):
            return None
        fields = parse_json(raw)
        if not isinstance(fields, dict) or "files" not in fields:
            return None
        if not isinstance(fields["files"], dict):
            raise ValueError("its list of files is none")
        return {check_file_name(name): _digest(f) for name, f in fields["files"].items()}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{stable} cannot be read as a list of files ({reason(error)}).",
            "Write the checkpoint again.",
        ) from error


def _digest(fields: Any) -> dict[str, Any]:
    """Size and SHA-256 of one file, as `STABLE` has them."""
    if (
        not isinstance(fields, dict)
        or fields.keys() != {"size", "sha256"}
        or type(fields["size"]) is not int
        or not isinstance(fields["sha256"], str)
        or not _DIGEST.fullmatch(fields["sha256"])
    ):
        raise ValueError("a file has no size or no SHA-256")
    return fields


def _check_bytes(directory: Path, said: dict[str, dict[str, Any]]) -> None:
    files = [directory / name for name in said]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise UsageError(f"{directory} lost files: {', '.join(missing[:5])}.", HALF_WRITTEN)
    try:
        now = _digests(files)
    except OSError as error:
        raise UsageError(
            f"{error.filename or directory} cannot be read: {reason(error)}.",
            "Write the checkpoint again.",
        ) from error
    changed = [name for name, digest in said.items() if now[name] != digest]
    if changed:
        raise UsageError(
            f"{directory} is corrupt: {', '.join(changed[:5])} changed after it was published.",
            "Write the checkpoint again.",
        )


def _digests(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of each file; hashing lets go of the GIL, so files go side by side."""

    def digest(path: Path) -> dict[str, Any]:
        with open_plain(path) as handle, os.fdopen(handle, "rb", closefd=False) as file:
            return {
                "size": os.fstat(handle).st_size,
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
