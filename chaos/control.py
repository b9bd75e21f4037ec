"""The controls of chaos: what it must find when Rollway's protections are missing.

`naive_refit` updates weights as in Dynamo's own guide. `OldStore` is a gateway's store that
makes the old mistakes; as a program, this module is the gateway with it:

    python -m chaos.control gateway STACK --journal FILE --port PORT
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollway.errors import UsageError
from rollway.fleet.admin import call_all
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import Worker
from rollway.gateway import command
from rollway.gateway.command import GatewayOptions, serve
from rollway.gateway.store import SessionStore
from rollway.gateway.tokens import Access
from rollway.gateway.turns import Session, Turn
from rollway.rollout.client import Rollouts
from rollway.rollout.completion import Completion
from rollway.versions import FleetVersions, Ticket


class NaiveBook(FleetVersions):
    """Sends every request without a taint and without a salt."""

    def ticket(self, version: int | None = None) -> Ticket:
        return Ticket(self.current, None, None)


class NaiveRollouts(Rollouts):
    """Accepts every answer. With prefill and decode apart, the mixed answers are those of requests
    that a refit came between, which `Rollouts` drops; a stale prefix is not found there, because
    prefill workers are idle often enough to clear their caches."""

    async def _is_attributed(self, ticket: Ticket, answer: Completion) -> bool:
        return True


async def naive_refit(fleet: Fleet, version: int, path: Path) -> None:
    """Pause with requests and cache kept, load, and resume, without any check. If chaos finds no
    stale token here, it could not find any."""
    admin: DynamoAdmin = fleet.admin
    workers = [worker for worker in await fleet.workers() if worker.error is None]

    async def move(worker: Worker) -> None:
        await admin.pause(worker, "keep", clear_cache=False)
        await admin.update_from_disk(worker, path, version)
        await admin.resume(worker)

    await call_all(workers, move)
    fleet.versions.current = version


class OldStore(SessionStore):
    """A store that makes the mistakes of the old journal.

    A short write counts as complete, and the next line is appended to it. A parent is a position
    among the turns of a session, so every turn after a lost line continues the wrong one. A turn in
    flight restores its deleted session. The file is rewritten at each start, so the gateway cannot
    start on a full disk."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(None)
        self._held: dict[str, Session] = {}
        try:
            if path.exists():
                self._read(path)
                self._rewrite(path)
            self._lines = path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"The journal {path} cannot be used: {error.strerror}.") from error

    async def open(self, name: str) -> Session:
        return self._hold(name)

    async def record(self, session: Session, turns: Sequence[Turn]) -> bool:
        for turn in turns:
            self._lines.write(_encode_line(session, turn))  # ignores how much was written
            self._add(turn)  # also if it was deleted meanwhile
        return True

    async def delete(self, name: str) -> bool:
        if self._held.pop(name, None) is None:
            return False
        self.sessions.pop(name, None)
        self._lines.write(json.dumps({"forgotten": name}).encode() + b"\n")
        return True

    def close(self) -> None:
        super().close()
        self._lines.close()

    def _hold(self, name: str) -> Session:
        return self._held.setdefault(name, Session(name))

    def _add(self, turn: Turn) -> None:
        session = self._hold(turn.session)
        session.add(turn)
        self.sessions[session.name] = len(session.turns)

    def _read(self, journal: Path) -> None:
        for line in journal.read_bytes().splitlines():
            try:
                entry = json.loads(line)
                if "forgotten" in entry:
                    self._held.pop(entry["forgotten"], None)
                    self.sessions.pop(entry["forgotten"], None)
                    continue
                parent = entry.pop("parent")
                entry["id"] = str(len(self._hold(entry["session"]).turns))
                turn = msgspec.convert(entry, Turn)
                turn.parent = None if parent is None else str(parent)
                self._add(turn)
            except (ValueError, KeyError, TypeError):
                continue  # now the positions of all later turns are wrong

    def _rewrite(self, journal: Path) -> None:
        scratch = journal.with_suffix(".new")
        with scratch.open("wb") as file:
            for session in self._held.values():
                file.writelines(_encode_line(session, turn) for turn in session.turns)
        scratch.replace(journal)


def _encode_line(session: Session, turn: Turn) -> bytes:
    """Encode a turn with the position of its parent in the session that it was sampled for."""
    positions = {known.id: position for position, known in enumerate(session.turns)}
    entry = msgspec.to_builtins(turn)
    entry["parent"] = positions.get(turn.parent or "")
    return json.dumps(entry).encode() + b"\n"


def main() -> None:
    """Serve with the old journal; takes those arguments of `rollway gateway` that chaos uses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["gateway"])
    parser.add_argument("stack")
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    options = GatewayOptions(arguments.stack, port=arguments.port, journal=arguments.journal)
    command.SessionStore = OldStore  # type: ignore[assignment, attr-defined]
    asyncio.run(serve(options, Access.from_environment(os.environ)))


if __name__ == "__main__":
    main()
