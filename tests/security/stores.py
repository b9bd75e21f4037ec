"""Turns to record, and stores of killed gateways."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import Any

from rollway.gateway.store import SessionStore
from rollway.gateway.turns import Turn

_numbers = count(1)


def make_turn(session: str, parent: str | None = None, **fields: Any) -> Turn:
    """Make a turn whose tokens no other turn has."""
    number = next(_numbers)
    values: dict[str, Any] = {
        "model": "m",
        "history": f"history {number}",
        "new_ids": [2 * number],
        "token_ids": [2 * number + 1],
        "logprobs": [-0.5],
        "finish_reason": "stop",
        "version": 0,
        "worker_id": 7,
        "parent": parent,
    }
    return Turn(session=session, **(values | fields))


async def record(store: SessionStore, *turns: Turn) -> bool:
    return await store.record(await store.open(turns[0].session), turns)


async def list_ids(store: SessionStore, session: str) -> list[str]:
    known = await store.find(session)
    return [] if known is None else [turn.id for turn in known.turns]


def copy_as_killed(path: Path) -> Path:
    """Return a copy of the files as a gateway leaves them that is killed now."""
    target = Path(str(path.parent) + " killed", path.name)
    shutil.rmtree(target.parent, ignore_errors=True)
    target.parent.mkdir(mode=0o700)
    for suffix in ("", "-wal", "-shm"):
        if (source := path.with_name(path.name + suffix)).exists():
            shutil.copy(source, target.with_name(source.name))
    return target


def read_files(path: Path) -> bytes:
    """Return all bytes of a store."""
    return b"".join(each.read_bytes() for each in path.parent.glob(f"{path.name}*"))
