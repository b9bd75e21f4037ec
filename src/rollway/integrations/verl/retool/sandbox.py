"""`Sandbox`: runs Python that a model wrote, in a process that can do little harm.

    sandbox = Sandbox(Limits(timeout=10))
    sandbox.check()
    outcome = await sandbox.run("import sympy\\nsympy.factorint(2026)")

Time, memory, output, files and processes are bounded, there is no network, the environment is
empty, and when `run` returns or is cancelled no process and no file is left. `jail.py` does this,
started anew for every program.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollway.errors import RollwayError, UsageError
from rollway.integrations.verl.retool.system_calls import assemble

log = logging.getLogger(__name__)

JAIL = Path(__file__).with_name("jail.py")
RUNNER = Path(__file__).with_name("program.py").read_text()
SYSTEM_PATH = "/usr/bin:/bin:/usr/local/bin"
GRACE_SECONDS = 20.0
"""What a loaded machine may take to start a process and to end it."""
FENCE = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)

Ending = Literal["exit", "signal", "timeout", "cpu", "output", "processes", "threads", "cancelled"]


class SandboxError(RollwayError):
    """A program could not be run at all, which is no fault of the program."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use."""

    timeout: float = 30.0
    """Seconds of wall clock."""
    cpu_seconds: int = 30
    """Seconds of processor time, of each process."""
    memory_mb: int = 1024
    """Address space of each process, which is more than what it has in memory."""
    file_mb: int = 16
    """Size of one file."""
    open_files: int = 64
    processes: int = 1
    """With 1 it cannot start any other; with more it is ended when it has more than these, or 64
    threads more than these."""
    output_bytes: int = 16384
    """Of stdout and of stderr each; a program that writes more is ended."""
    source_bytes: int = 131072
    """Length of the program itself."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            whole = name == "timeout" or isinstance(value, int)
            if isinstance(value, bool) or not isinstance(value, int | float) or not whole:
                raise UsageError(f"`{name}` of the sandbox is {value!r}.", "Give a number.")
            if value <= 0:
                raise UsageError(f"`{name}` of the sandbox is {value}.", "Give more than zero.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a program."""

    stdout: str
    stderr: str
    ending: Ending
    code: int
    """Exit code; negative: the signal that ended it."""
    seconds: float
    confined: dict[str, bool]
    """Which layers held the program: `user` and `own_user` (not the caller's; nobody else's),
    `files`, `truncation` and `scopes` (Landlock 1, 3 and 6), and `calls` (seccomp)."""

    @property
    def ok(self) -> bool:
        return self.ending == "exit" and self.code == 0

    @property
    def open_promises(self) -> tuple[str, ...]:
        """What a program can do here because a layer is missing, in sentences."""
        return tuple(open_promises(self.confined)) if self.confined else ()


@dataclass(slots=True)
class Sandbox:
    """Runs programs, at most `max_concurrent` at a time."""

    limits: Limits = field(default_factory=Limits)
    interpreter: str | None = None
    """A path or a name; None: the system's `python3`, or else the one that runs this."""
    network: Literal["deny", "allow"] = "deny"
    packages: bool = True
    """Whether programs can import what is installed for the interpreter, such as sympy."""
    readable: tuple[str, ...] = ()
    """Further directories that programs may read, where the kernel can shut off the others."""
    scratch: str | None = None
    """Where the working directories are made; None: the usual place for temporary files."""
    max_concurrent: int = 16
    _slots: asyncio.Semaphore = field(init=False, repr=False)
    _swept: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.network not in ("deny", "allow"):
            raise UsageError(f"`network` of the sandbox is {self.network!r}.", "deny or allow.")
        if self.max_concurrent < 1:
            raise UsageError(f"`max_concurrent` is {self.max_concurrent}.", "At least 1.")
        self.interpreter = find_interpreter(self.interpreter)
        self._slots = asyncio.Semaphore(self.max_concurrent)

    def check(self) -> Outcome:
        """Run an empty program, so that what is missing is known before training starts: a
        promise that does not hold is logged, and is in `open_promises` of the outcome."""
        seconds = self.limits.timeout + GRACE_SECONDS
        with subprocess.Popen(
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            start_new_session=True,
        ) as keeper:
            assert keeper.stdin and keeper.stdout and keeper.stderr
            try:
                keeper.stdin.write(self._job("pass"))
                keeper.stdin.flush()
                keeper.wait(seconds)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                keeper.kill()
            # What it never read is still in the buffer, and closing would try to write it again.
            with contextlib.suppress(BrokenPipeError):
                keeper.stdin.close()
            outcome = self._outcome(keeper.stdout.read(), keeper.stderr.read())
        if not outcome.ok:
            said = last_line(outcome.stderr) or f"it ended by {outcome.ending}, {outcome.code}"
            raise UsageError(
                f"{self.interpreter} cannot run an empty program in the sandbox: {said}",
                "Raise `memory_mb`, or name in `readable` where the interpreter has its libraries.",
            )
        for promise in outcome.open_promises:
            log.warning("The code sandbox does not hold everything here: %s", promise)
        return outcome

    async def run(self, code: str) -> Outcome:
        """Run one program; cancelling the call ends it."""
        if len(code.encode(errors="replace")) > self.limits.source_bytes:
            said = f"The program is longer than {self.limits.source_bytes} bytes."
            return Outcome("", said, "exit", 1, 0.0, {})
        async with self._slots:
            keeper = await asyncio.create_subprocess_exec(
                *self._command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                start_new_session=True,
            )
            try:
                return await self._attend(keeper, code)
            finally:
                await asyncio.shield(leave(keeper))

    async def _attend(self, keeper: asyncio.subprocess.Process, code: str) -> Outcome:
        assert keeper.stdin and keeper.stdout and keeper.stderr
        # Its stdin stays open: the keeper takes the end of it for the end of the caller.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            keeper.stdin.write(self._job(code))
            await keeper.stdin.drain()
        seconds = self.limits.timeout + GRACE_SECONDS
        try:
            async with asyncio.timeout(seconds):
                report, errors = await asyncio.gather(keeper.stdout.read(), keeper.stderr.read())
        except TimeoutError:
            raise SandboxError(f"The sandbox gave no report within {seconds:.0f} s.") from None
        return self._outcome(report, errors)

    def _command(self) -> list[str]:
        assert self.interpreter is not None
        return [self.interpreter, "-I", "-S", "-B", str(JAIL)]

    def _job(self, code: str) -> bytes:
        swept, self._swept = self._swept, True
        job = {
            **dataclasses.asdict(self.limits),
            "runner": RUNNER,
            "code": code,
            "network": self.network,
            "packages": self.packages,
            "readable": self.readable,
            "scratch": self.scratch,
            "filters": {"own_user": self._filter(True), "shared_user": self._filter(False)},
            "sweep": not swept,
        }
        return json.dumps(job).encode() + b"\n"

    def _filter(self, own_user: bool) -> str | None:
        """Assemble the filter of system calls; a user of its own has no files but the program's."""
        code = assemble(
            platform.machine(),
            network=self.network == "allow",
            processes=self.limits.processes > 1,
            metadata=own_user,
        )
        return code.hex() if code else None

    def _outcome(self, report: bytes, errors: bytes) -> Outcome:
        try:
            fields: dict[str, Any] = json.loads(report)
        except ValueError:
            said = last_line(errors.decode(errors="replace")) or "it said nothing"
            raise SandboxError(
                f"The sandbox failed under {self.interpreter}: {said}",
                "`interpreter` must be Python 3.9 or later that this user can run.",
            ) from None
        if "problem" not in fields:
            return Outcome(**fields)
        if fields["problem"].startswith("CannotConfine") and self.network == "deny":
            raise UsageError(
                f"The network cannot be shut off from programs here ({fields['problem']}).",
                "Use a machine with seccomp (Linux on x86-64 or aarch64), or set `network: allow` "
                "in the tool's config if the model's code may have the network.",
            )
        raise SandboxError(
            f"No program can be started by {self.interpreter}: {fields['problem']}",
            "Under root programs have a user of their own, who must be able to read `interpreter`; "
            "and `scratch` must exist.",
        )


def open_promises(confined: dict[str, bool]) -> Iterator[str]:
    """Say what a program can do where one of the layers is missing."""
    files, calls = confined["files"], confined["calls"]
    if not files and not confined["user"]:
        yield (
            "Programs can read, change and leave files of this user, and read the environment of "
            "its processes (no Landlock, not root)."
        )
    elif not files:
        yield (
            "Programs can read what everybody can read, and leave files where everybody can "
            "write, such as /tmp (no Landlock)."
        )
    elif not confined["truncation"] and not confined["user"]:
        yield "Programs can empty files of this user (Landlock before version 3, not root)."
    if not files and confined["user"] and not confined["own_user"]:
        yield "Programs can reach each other's files: they share a user (no Landlock)."
    if calls:
        return
    yield (
        "Programs can start processes and threads beyond `processes`, outlive a killed keeper, "
        "make namespaces, and hold memory beyond `memory_mb` (no seccomp)."
    )
    if not confined["own_user"]:
        yield "Programs can change modes, owners, attributes and times of files (no seccomp)."
        yield "Programs can change limits and scheduling of processes of this user (no seccomp)."
        if not confined["scopes"]:
            yield "Programs can signal processes of this user (no seccomp, Landlock before 6)."


async def leave(keeper: asyncio.subprocess.Process) -> None:
    """Close the pipe, upon which the keeper ends its program and removes its directory. One that
    takes too long is killed, and what it has not removed is swept at the next start."""
    assert keeper.stdin
    keeper.stdin.close()
    try:
        async with asyncio.timeout(GRACE_SECONDS):
            await keeper.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            keeper.kill()
        await keeper.wait()


def find_interpreter(asked: str | None) -> str:
    found = shutil.which(asked or "python3", path=os.environ.get("PATH") if asked else SYSTEM_PATH)
    if found is None and asked:
        raise UsageError(
            f"There is no interpreter `{asked}` for the sandbox.",
            "Set `interpreter` to a Python that exists on every node.",
        )
    return found or sys.executable


def extract_code(text: str) -> str:
    """The program in a model's text: its fenced blocks one after the other, or else all of it."""
    return "\n".join(FENCE.findall(text)) or text


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
