"""Checkpoints as numpy arrays, shared between the workers of a process."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import safetensors

Array = np.ndarray
INDEX = "model.safetensors.index.json"


class Tensors(dict[str, Array]):
    """All tensors of a checkpoint in float32. (A plain dict cannot be referred to weakly.)"""


def weight_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise FileNotFoundError(f"There is no checkpoint directory {directory}")
    index = directory / INDEX
    if not index.is_file():
        return [directory / "model.safetensors"]
    shards = set(json.loads(index.read_text())["weight_map"].values())
    return [directory / name for name in sorted(shards)]


def read_tensors(directory: Path) -> Tensors:
    """Read every tensor from the files, now."""
    tensors = Tensors()
    for path in weight_files(directory):
        for name, entry in safetensors.deserialize(path.read_bytes()):
            array = _as_float32(entry["dtype"], bytes(entry["data"])).reshape(entry["shape"])
            array.flags.writeable = False  # it may be shared
            tensors[name] = array
    return tensors


_shared: weakref.WeakValueDictionary[tuple[object, ...], Tensors] = weakref.WeakValueDictionary()


def share_tensors(directory: Path) -> Tensors:
    """The tensors of a checkpoint, read once for all workers of this process that use it."""
    key = tuple(_signature(directory))
    tensors = _shared.get(key)
    if tensors is None:
        tensors = _shared[key] = read_tensors(directory)
    return tensors


def _signature(directory: Path) -> Iterator[object]:
    for path in weight_files(directory):
        stat = path.stat()
        yield (str(path.resolve()), stat.st_ino, stat.st_mtime_ns, stat.st_size)


def _as_float32(dtype: str, data: bytes) -> Array:
    match dtype:
        case "F32":
            return np.frombuffer(data, "<f4").astype(np.float32)
        case "F16":
            return np.frombuffer(data, "<f2").astype(np.float32)
        case "BF16":  # the upper half of a float32
            return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    raise ValueError(f"Cannot read tensors of dtype {dtype}")
