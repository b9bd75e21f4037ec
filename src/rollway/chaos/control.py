"""The controls of chaos: what it must find when Rollway's protections are missing.

`naive_refit` updates weights as in Dynamo's own guide. `OldRecorder` is a gateway's recorder that
makes the old mistakes; as a program, this module is the gateway with it:

    python -m rollway.chaos.control gateway STACK --journal FILE --port PORT
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
from rollway.fleet.admin import AdminAPI, call_all
from rollway.fleet.discovery import Worker
from rollway.fleet.fleet import Fleet
from rollway.gateway.access import Access
from rollway.gateway.command import GatewayOptions, serve
from rollway.gateway.recorder import Recorder, Session, Turn
from rollway.rollout.client import Rollouts
from rollway.rollout.completion import Completion
from rollway.versions import FleetVersions, Ticket


class NaiveBook(FleetVersions):
    """Sends every request without a taint and without a salt."""

    def ticket(self, version: int | None = None) -> Ticket:
        return Ticket(self.current, None, None, self.epoch)


class NaiveRollouts(Rollouts):
    """Accepts every answer. With prefill and decode apart, the mixed answers are those of requests
    that a refit came between, which `Rollouts` drops; a stale prefix is not found there, because
    prefill workers are idle often enough to clear their caches."""

    async def _is_attributed(self, ticket: Ticket, answer: Completion | int | None) -> bool:
        return True


async def naive_refit(fleet: Fleet, version: int, path: Path) -> None:
    """Pause with requests and cache kept, load, and resume, without any check. If chaos finds no
    stale token here, it could not find any."""
    admin: AdminAPI = fleet.admin
    workers = [worker for worker in await fleet.workers() if worker.error is None]

    async def move(worker: Worker) -> None:
        await admin.pause(worker, "keep", clear_cache=False)
        await admin.update_from_disk(worker, path, version)
        await admin.resume(worker)

    await call_all(workers, move)
    fleet.versions.current = version


class OldRecorder(Recorder):
    """A recorder with the old journal.

    A short write counts as complete, and the next line is appended to it. A parent is a position
    among the turns of a session, so every turn after a lost line continues the wrong one. A turn in
    flight restores its deleted session. The file is rewritten at each start, so the gateway cannot
    start on a full disk."""

    def __init__(self, journal: Path, **options: Any) -> None:
        super().__init__(None)
        try:
            if journal.exists():
                self._read(journal)
                self._rewrite(journal)
            self._file = journal.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"The journal {journal} cannot be used: {error.strerror}.") from error

    def open(self, name: str) -> Session:
        return self.sessions.setdefault(name, Session(name))

    def add_all(self, session: Session, turns: Sequence[Turn]) -> bool:
        for turn in turns:
            self._file.write(_encode_line(session, turn))  # ignores how much was written
            self.open(turn.session).add(turn)  # also if it was deleted meanwhile
        return True

    def forget(self, name: str) -> bool:
        if self.sessions.pop(name, None) is None:
            return False
        self._file.write(json.dumps({"forgotten": name}).encode() + b"\n")
        return True

    def close(self) -> None:
        super().close()
        self._file.close()

    def _read(self, journal: Path) -> None:
        for line in journal.read_bytes().splitlines():
            try:
                entry = json.loads(line)
                if "forgotten" in entry:
                    self.sessions.pop(entry["forgotten"], None)
                    continue
                session = self.open(entry["session"])
                parent = entry.pop("parent")
                entry |= {"id": str(len(session.turns)), "type": "turn"}
                turn = msgspec.convert(entry, Turn)
                turn.parent = None if parent is None else str(parent)
                session.add(turn)
            except (ValueError, KeyError, TypeError):
                continue  # now the positions of all later turns are wrong

    def _rewrite(self, journal: Path) -> None:
        scratch = journal.with_suffix(".new")
        with scratch.open("wb") as file:
            for session in self.sessions.values():
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
    asyncio.run(serve(options, Access.from_environment(os.environ), recorder_type=OldRecorder))


if __name__ == "__main__":
    main()
