"""Read what sinks wrote: TensorBoard's files with its own reader, wandb's with its own messages.

A `.wandb` file is a log of LevelDB's format, whose records are wandb's protobuf messages. The
package reads it only in its binary, to upload it; so the frames are taken apart here.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

Points = dict[str, list[tuple[int, float]]]
"""The steps and values of each name."""
_BLOCK, _HEADER = 32_768, 7
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_tensorboard(directory: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def read_wandb(directory: Path) -> tuple[Points, dict[str, float]]:
    """Return the history of the offline run below a directory, by the trainer's step, and its
    summary."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = directory.rglob("*.wandb")

    def read_records() -> list[Any]:
        return [Record.FromString(data) for data in _read_frames(file.read_bytes())]

    def has_ended() -> bool:
        try:
            return any(record.HasField("exit") for record in read_records())
        except DecodeError:  # the last record is being written
            return False

    # wandb's service writes the end of the file after `finish` has returned.
    wait_until(has_ended, every=0.1)
    points: Points = {}
    summary: dict[str, float] = {}
    for record in read_records():
        if record.HasField("history"):
            row = _read_items(record.history.item)
            for name, value in row.items():
                if not name.startswith("_"):
                    points.setdefault(name, []).append((int(row["rollway_step"]), value))
        elif record.HasField("summary"):
            summary |= _read_items(record.summary.update)
    return points, summary


def _read_items(items: object) -> dict[str, float]:
    values = {}
    for item in items:  # type: ignore[attr-defined]
        name = item.key or "/".join(item.nested_key)
        value = json.loads(item.value_json)
        if isinstance(value, int | float) and not isinstance(value, bool):
            values[name] = value
        elif value == "NaN":
            values[name] = math.nan
    return values


def _read_frames(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log that begins with wandb's own header."""
    assert data[:4] == b":W&B", data[:8]
    place, pending = _HEADER, b""
    while place + _HEADER <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:  # the rest of a block is too short for a frame
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + _HEADER])
        place += _HEADER
        pending += data[place : place + length]
        place += length
        if kind in (_WHOLE, _LAST):
            yield pending
            pending = b""
        else:
            assert kind in (_FIRST, _MIDDLE), kind
