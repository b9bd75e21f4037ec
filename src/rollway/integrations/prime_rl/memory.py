"""What the server remembers across its own restarts: one small private file per stack and model.

The orchestrator does not notice a restart: it may have sent `/pause` to the old process and send
`/update_weights` to the new one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from rollway import private_files
from rollway.errors import RollwayError, UsageError
from rollway.model_spec import slug
from rollway.stack.locks import NamedLock, describe
from rollway.stack.state import make_home

Phase = Literal["serving", "paused", "failed"]
_LARGEST = 1 << 20


class LoadedAdapter(msgspec.Struct):
    """The newest version of an adapter."""

    number: int
    directory: str
    older: list[int] = []
    """Numbers of versions that may still be loaded."""


class JoinedGroup(msgspec.Struct):
    """The trainer's group that the workers are in, and the last broadcast by it."""

    identity: str
    host: str
    port: int
    seats: dict[int, int]
    """By the id of a worker, the number of ranks before its own."""
    directory: str = ""
    """The directory of the last broadcast."""
    offered: str = ""
    """The identity under which workers were ordered to receive it."""


class Record(msgspec.Struct):
    """The state of one server."""

    run: str = ""
    """The run of the stack; a record of another run means nothing."""
    phase: Phase = "serving"
    cause: str = ""
    """Why the last update failed."""
    refusal: str = ""
    """Why the last admin call was refused, until one of its kind is answered: prime-rl drops the
    answer's text."""
    step: int | None = None
    version: int | None = None
    adapters: dict[str, LoadedAdapter] = {}
    group: JoinedGroup | None = None
    session: str | None = None
    """The trainer's session, if it broadcasts by NIXL."""


@contextlib.contextmanager
def hold_alone(file: Path) -> Iterator[None]:
    """Refuse a second server of the same model: two of them would pause and update apart."""
    lock = NamedLock(f"prime-rl/{file}")
    if not lock.acquire():
        raise UsageError(
            f"Another server answers prime-rl for this model ({describe(lock.find_holder())}).",
            "End it first, or use its address.",
        )
    try:
        yield
    finally:
        lock.release()


class Memory:
    """Reads the record once, and replaces its file at each change."""

    def __init__(self, file: Path | None = None, run: str = "") -> None:
        """Read the record in `file`, if it is of this `run`; without a file, keep nothing."""
        self._file = file
        self.record = Record(run=run)
        if file is None:
            return
        with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError):
            record = msgspec.json.decode(private_files.read_file(file, _LARGEST), type=Record)
            if record.run == run:
                self.record = record

    def note_refusal(self, text: str) -> None:
        """Keep it for `rollway status`. A file that cannot be written changes no answer."""
        self.record.refusal = text
        with contextlib.suppress(RollwayError):
            self.save()

    def save(self) -> None:
        """Write the record; raise if it cannot be written, before anything depends on it."""
        if self._file is None:
            return
        try:
            private_files.make_directory(self._file.parent)
            private_files.replace_file(self._file, msgspec.json.encode(self.record))
        except OSError as error:
            raise RollwayError(
                f"The server's state cannot be written to {self._file}: {error}.",
                "Check the disk space and the permissions.",
            ) from error


def find_file(stack: str, model: str) -> Path:
    """Return the file of a stack's model."""
    return make_home() / "prime-rl" / f"{slug(stack or 'attached')}-{slug(model)}.json"
