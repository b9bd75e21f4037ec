"""Write checkpoint directories atomically, and check them before a worker loads them.

`publish_checkpoint` writes the file `STABLE` last and renames the directory last, for readers that
look for either of them. `STABLE` has the size and the SHA-256 of every file. Dynamo answers 200 to
a load of a missing directory, of wrong shapes and of an incomplete checkpoint, and damages the
worker; so `check_checkpoint` runs first, also for checkpoints from other programs. This module
does not import torch: it reads headers and hashes bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollway.errors import UsageError
from rollway.weights import leftovers
from rollway.weights.layout import ELEMENT_BYTES
from rollway.weights.untrusted import (
    HALF_WRITTEN,
    StoredTensor,
    check_file_name,
    check_tensor_name,
    explain,
    open_plain,
    parse_json,
    read_plain,
    read_weight_file,
    reason,
)

STABLE = "STABLE"
_INDEX = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_MAX_INDEX = _MAX_STABLE = 128 << 20
_MAX_CONFIG = 16 << 20
# Parameters of transformers 5 for all experts of a layer.
_JOINED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
_WRITE_AGAIN, _LET_READ = "Write the checkpoint again.", "Let this user read it."


class FileDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size and the SHA-256 of a file, as `STABLE` has them."""

    size: int
    sha256: str


FileDigests = dict[str, FileDigest]  # By file name


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Dtype and shape of a tensor, and the weight file that contains it, if one does."""

    dtype: str
    shape: tuple[int, ...]
    file: str = ""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that passed `check_checkpoint`."""

    path: Path
    tensors: dict[str, TensorHeader]
    identity: str
    """Equal for equal files; tells apart two sets of weights that claim the same version."""

    @property
    def nbytes(self) -> int:
        return sum(
            math.prod(tensor.shape) * ELEMENT_BYTES.get(tensor.dtype, 1)
            for tensor in self.tensors.values()
        )


def publish_checkpoint(
    directory: Path, write: Callable[[Path], object], word_sums: Mapping[str, int] | None = None
) -> Path:
    """Write a checkpoint directory that readers see either whole or not at all.

    Parameters:
        directory: the path of the checkpoint; it must not exist yet.
        write: called with a scratch directory beside it, into which it saves all files, for
            example `model.save_pretrained`.
        word_sums: the checksum of each tensor, if `write` computes them; read after `write`.

    Returns `directory`.

    Raises whatever `write` raises, and `OSError` if the disk is full or `directory` exists. The
    scratch directory is removed then.
    """
    scratch = directory.with_name(leftovers.scratch_name(directory.name))
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        write(scratch)
        files = sorted(path for path in scratch.iterdir() if path.is_file())
        with ThreadPoolExecutor(1) as pool:
            digests = pool.submit(_digest_files, files)  # the disk is slow, and needs no core
            for path in files:
                path.chmod(_default_mode())  # safetensors lets only the owner read
                sync(path)
        # The order must not change: STABLE says that all files are on disk, the rename that
        # STABLE is.
        stable = scratch / STABLE
        record: dict[str, Any] = {"files": msgspec.to_builtins(digests.result())}
        if word_sums:
            record["words"] = {name: f"{total:016x}" for name, total in word_sums.items()}
        stable.write_text(json.dumps(record, indent=1))
        sync(stable)
        sync(scratch)
        scratch.rename(directory)
        sync(directory.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return directory


def check_checkpoint(
    directory: Path,
    *,
    roots: Sequence[Path] = (),
    whole: bool = True,
    weights: bool = True,
    needs_config: bool = True,
) -> Checkpoint:
    """Read a checkpoint's headers and verify that the checkpoint is complete.

    Parameters:
        directory: the checkpoint directory.
        roots: directories that it must be in, links included; any directory if empty.
        whole: also compare the digest of every file with `STABLE`, where the file exists.
        weights: whether these include the weight files, which the caller may compare otherwise.
        needs_config: refuse a directory without config.json; some trainers write weights alone.

    Raises `UsageError` with the reason if the checkpoint cannot be used.
    """
    path = _resolve(directory)
    allowed = [root.expanduser().resolve() for root in roots]
    if allowed and not any(path.is_relative_to(root) for root in allowed):
        raise UsageError(
            f"{path} is outside the allowed checkpoint roots ({', '.join(map(str, allowed))}).",
            "Publish checkpoints below one of them, or change `checkpoint_roots` of the stack.",
        )
    if path.is_dir():
        _check_links(path, allowed)
        if (path / "config.json").exists():
            read_config(path / "config.json")
        elif needs_config:
            raise UsageError(
                f"{path} has no config.json.", "Save the model's config with its weights."
            )
    tensors = read_headers(path)
    recorded = _read_stable(path)
    if recorded is not None and whole:
        skipped = set() if weights else {tensor.file for tensor in tensors.values()}
        _check_digests(path, {name: d for name, d in recorded.items() if name not in skipped})
    return Checkpoint(path, tensors, _identify(path, tensors, recorded))


def stamps(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Return size, mtime and inode of every file; they change when a file is written."""
    with explain(f"{directory} cannot be read", _LET_READ):
        files = sorted(path for path in directory.iterdir() if path.is_file())
        return {path.name: _stat(path) for path in files}


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Return dtype and shape of every tensor by name, from the headers of the weight files."""
    return {
        name: TensorHeader(stored.dtype, stored.shape, stored.file.name)
        for name, stored in read_tensors(directory).items()
    }


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return where each tensor of a checkpoint is stored."""
    if not directory.is_dir():
        raise UsageError(f"There is no checkpoint directory {directory}.", "Check the path.")
    indexed = _read_index(directory)
    files = [_SINGLE_FILE] if indexed is None else sorted(set(indexed.values()))
    missing = [name for name in files if not (directory / name).exists()]
    if missing:
        raise UsageError(f"{directory} lacks weight files: {', '.join(missing[:5])}.", HALF_WRITTEN)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in read_weight_file(directory / file).items():
            if name in tensors:
                raise UsageError(
                    f"{directory} has {name} in {tensors[name].file.name} and in {file}.",
                    "Save each tensor in one file: readers would use either of the two.",
                )
            tensors[name] = stored
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
    """Return a sentence for each way in which `new` does not fit the served model.

    The list is empty if `new` can replace `served`. `allow_cast` accepts other dtypes."""
    sentences = [f"{name} is missing" for name in sorted(served.keys() - new.keys())]
    sentences += [f"{name} is not part of the model" for name in sorted(new.keys() - served.keys())]
    for name in sorted(new.keys() & served.keys()):
        mine, theirs = new[name], served[name]
        if mine.shape != theirs.shape or (mine.dtype != theirs.dtype and not allow_cast):
            sentences.append(f"{name} is {mine}, served is {theirs}")
    return sentences


def refuse_differences(sentences: Sequence[str], path: Path | str) -> None:
    """Raise `UsageError` if there are any differences; the message has the first five."""
    if sentences:
        more = f" and {len(sentences) - 5} more" if len(sentences) > 5 else ""
        names = (sentence.split(" ", 1)[0] for sentence in sentences)
        raise UsageError(
            f"{path} does not fit the model that is served: {'; '.join(sentences[:5])}{more}.",
            explain_joined(names)
            or "Publish all tensors of the served architecture. If only dtypes differ, as with an "
            "engine that casts its checkpoint (`dtype`), use `refit(…, allow_cast=True)` or "
            "--allow-cast.",
        )


def explain_joined(names: Iterable[str]) -> str:
    """Return how to publish experts that transformers 5 has joined, if any of these are; or ""."""
    if not any(name.endswith(_JOINED_EXPERTS) for name in names):
        return ""
    return (
        "Publish `rollway.from_module(model)` instead of `model.named_parameters()`: transformers "
        "joins the experts of a layer into one parameter, and the served checkpoint has each alone."
    )


def read_config(file: Path) -> dict[str, Any]:
    """Read a model's config.json."""
    with explain(f"{file} cannot be read", "Give a checkpoint directory, or a config.json."):
        raw = read_plain(file, _MAX_CONFIG)
    with explain(f"{file} is not JSON", HALF_WRITTEN):
        config = parse_json(raw, unique=False)
    if not isinstance(config, dict):
        raise UsageError(f"{file} does not contain a JSON object.", "Save the config again.")
    return config


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_links(directory: Path, allowed: Sequence[Path]) -> None:
    """Refuse links to files in places where the directory itself would be refused."""
    if not allowed:
        return
    with explain(f"{directory} cannot be read", _LET_READ):
        files = sorted(directory.iterdir())
    for file in files:
        if file.is_symlink() and not any(_resolve(file).is_relative_to(root) for root in allowed):
            raise UsageError(
                f"{file} is a link to a file outside the allowed checkpoint roots.",
                "Copy the file into the checkpoint, or change `checkpoint_roots` of the stack.",
            )


def _resolve(path: Path) -> Path:
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, NUL, no such user
        raise UsageError(f"{str(path)!a} leads nowhere: {error}.", "Check the path.") from error


def _read_index(directory: Path) -> dict[str, str] | None:
    """Return the file of each tensor, or None for a checkpoint in a single file."""
    index = directory / _INDEX
    if not index.exists():
        return None
    with explain(f"{index} cannot be read as an index of weight files", HALF_WRITTEN):
        fields = parse_json(read_plain(index, _MAX_INDEX))
        weight_map = fields.get("weight_map") if isinstance(fields, dict) else None
        if not isinstance(weight_map, dict):
            raise ValueError("it has no weight_map")
        names = {check_tensor_name(name): file for name, file in weight_map.items()}
    with explain(f"{index} names files elsewhere", "Use plain file names."):
        return {name: check_file_name(file) for name, file in names.items()}


def _read_stable(directory: Path) -> FileDigests | None:
    """Return the digests that the publisher recorded, or None if another program wrote the files.

    Other trainers write a file of this name too, often an empty one."""
    stable = directory / STABLE
    if not stable.exists():
        return None
    with explain(f"{stable} cannot be read as a list of files", _WRITE_AGAIN):
        raw = read_plain(stable, _MAX_STABLE)
        if not raw.lstrip().startswith((b"{", b"[")):
            return None
        fields = parse_json(raw)
        if not isinstance(fields, dict) or "files" not in fields:
            return None
        files = msgspec.convert(fields["files"], FileDigests)
        return {check_file_name(name): digest for name, digest in files.items()}


def read_word_sums(directory: Path) -> dict[str, int]:
    """Return the checksums that the publisher recorded of each tensor; none if it did not."""
    try:
        fields = parse_json(read_plain(directory / STABLE, _MAX_STABLE))
        words = fields.get("words", {}) if isinstance(fields, dict) else {}
        if not isinstance(words, dict):
            return {}
        return {check_tensor_name(name): int(digits, 16) for name, digits in words.items()}
    except (OSError, TypeError, ValueError):
        return {}  # the files themselves are compared instead


def has_word_sums(directory: Path) -> bool:
    """Return whether the publisher recorded a checksum of every tensor."""
    sums = read_word_sums(directory)
    return bool(sums) and sums.keys() == read_headers(directory).keys()


def _check_digests(directory: Path, recorded: FileDigests) -> None:
    files = [directory / name for name in recorded]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise UsageError(f"{directory} lost files: {', '.join(missing[:5])}.", _WRITE_AGAIN)
    try:
        current = _digest_files(files)
    except OSError as error:
        raise UsageError(
            f"{error.filename or directory} cannot be read ({reason(error)}).", _WRITE_AGAIN
        ) from error
    changed = [name for name, digest in recorded.items() if current[name] != digest]
    if changed:
        raise UsageError(
            f"{directory} is corrupt: {', '.join(changed[:5])} changed after it was published.",
            _WRITE_AGAIN,
        )


def _digest_files(files: Sequence[Path]) -> FileDigests:
    """Return size and SHA-256 of each file; threads help, since hashing releases the GIL."""

    def digest(path: Path) -> FileDigest:
        with open_plain(path) as handle, os.fdopen(handle, "rb", closefd=False) as file:
            size = os.fstat(handle).st_size
            return FileDigest(size, hashlib.file_digest(file, "sha256").hexdigest())

    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip((path.name for path in files), pool.map(digest, files), strict=True))


def _identify(path: Path, tensors: dict[str, TensorHeader], recorded: FileDigests | None) -> str:
    """Return an identity from recorded digests, or else from size and mtime of the files."""
    files = sorted({tensor.file for tensor in tensors.values()})
    if recorded is not None and all(name in recorded for name in files):
        facts: list[Any] = [(name, recorded[name].sha256) for name in files]
    else:
        facts = [(name, *_stat(path / name)) for name in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _stat(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _default_mode() -> int:
    """Return the mode that a plain `open` would give; workers may run as another user."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
