"""`Sandbox`: run Python that a model wrote, in a confined process.

    sandbox = Sandbox(Limits(timeout=10))
    sandbox.check()
    outcome = await sandbox.run("import sympy\\nsympy.factorint(2026)")

Time, memory, output, files and processes are bounded, there is no network, and the environment is
empty. When `run` returns or is cancelled, no process and no file is left. A new process of
`jail.py`, the keeper, enforces this for each program.
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

from examples.retool.system_calls import assemble
from rollway.errors import RollwayError, UsageError

log = logging.getLogger(__name__)

JAIL = Path(__file__).with_name("jail.py")
RUNNER = Path(__file__).with_name("program.py").read_text()
SYSTEM_PATH = "/usr/bin:/bin:/usr/local/bin"
PROBE = """from importlib.util import find_spec
print(*(name for name in ("numpy", "sympy") if find_spec(name) is None))"""
"""Prints which of the packages are missing that programs of mathematics use."""
GRACE_SECONDS = 20.0
"""Time that a loaded machine may need to start a process and to end it."""
FENCE = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
PIPES: dict[str, Any] = {
    "stdin": subprocess.PIPE,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "env": {},
    "start_new_session": True,
}

Ending = Literal["exit", "signal", "timeout", "cpu", "output", "processes", "threads", "cancelled"]


class SandboxError(RollwayError):
    """The sandbox could not run a program at all; the program is not at fault."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources that one program may use."""

    timeout: float = 30.0
    """Seconds of wall clock."""
    cpu_seconds: int = 30
    """Seconds of processor time, of each process."""
    memory_mb: int = 1024
    """Address space of each process, which exceeds its resident memory."""
    file_mb: int = 16
    """Size of one file."""
    open_files: int = 64
    processes: int = 1
    """With 1, a program cannot start another. With more, it is killed when it has more processes
    than this, or more than 64 additional threads."""
    output_bytes: int = 16384
    """Bytes of stdout and of stderr each; a program that writes more is killed."""
    source_bytes: int = 131072
    """Length of the program itself."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            is_valid = name == "timeout" or isinstance(value, int)
            if isinstance(value, bool) or not isinstance(value, int | float) or not is_valid:
                raise UsageError(f"`{name}` of the sandbox is {value!r}.", "Give a number.")
            if value <= 0:
                raise UsageError(f"`{name}` of the sandbox is {value}.", "Give more than zero.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one program."""

    stdout: str
    stderr: str
    ending: Ending
    code: int
    """Exit code; if negative, the signal that ended the program."""
    seconds: float
    confined: dict[str, bool]
    """Whether each layer confined the program: `user` (it ran as another user than the caller),
    `own_user` (no other program had that user), `files`, `truncation` and `scopes` (Landlock 1, 3
    and 6), and `calls` (seccomp)."""

    @property
    def ok(self) -> bool:
        return self.ending == "exit" and self.code == 0

    @property
    def missing_protections(self) -> tuple[str, ...]:
        """One sentence for each thing that programs can do here because a layer is missing."""
        return tuple(list_missing_protections(self.confined)) if self.confined else ()


@dataclass(slots=True)
class Sandbox:
    """Runs programs, at most `max_concurrent` at a time."""

    limits: Limits = field(default_factory=Limits)
    interpreter: str | None = None
    """A path or a name; None: the system's `python3`, or else the one that runs this."""
    network: Literal["deny", "allow"] = "deny"
    packages: bool = True
    """Whether programs can import the interpreter's installed packages, e.g. sympy."""
    readable: tuple[str, ...] = ()
    """More directories that programs may read. Only Landlock blocks the others."""
    scratch: str | None = None
    """Parent of the working directories; None: the default for temporary files."""
    max_concurrent: int = 16
    _slots: asyncio.Semaphore = field(init=False, repr=False)
    _swept: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.network not in ("deny", "allow"):
            raise UsageError(f"`network` of the sandbox is {self.network!r}.", "Set deny or allow.")
        if self.max_concurrent < 1:
            raise UsageError(f"`max_concurrent` is {self.max_concurrent}.", "Set 1 or more.")
        self.interpreter = find_interpreter(self.interpreter)
        self._slots = asyncio.Semaphore(self.max_concurrent)

    def check(self) -> Outcome:
        """Run a small program, so that problems show before training starts. Log each missing
        protection, and the usual packages that programs will not find."""
        with subprocess.Popen(self._command(), **PIPES) as keeper:
            assert keeper.stdin and keeper.stdout and keeper.stderr
            try:
                keeper.stdin.write(self.encode_job(PROBE))
                keeper.stdin.flush()
                keeper.wait(self.limits.timeout + GRACE_SECONDS)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                keeper.kill()
            # Input that the keeper never read is still buffered, and close would write it again.
            with contextlib.suppress(BrokenPipeError):
                keeper.stdin.close()
            outcome = self.read_outcome(keeper.stdout.read(), keeper.stderr.read())
        if not outcome.ok:
            cause = last_line(outcome.stderr) or f"it ended by {outcome.ending}, {outcome.code}"
            raise UsageError(
                f"{self.interpreter} cannot run an empty program in the sandbox: {cause}",
                "Raise `memory_mb`, or name in `readable` where the interpreter has its libraries.",
            )
        for sentence in outcome.missing_protections:
            log.warning("The code sandbox lacks a protection here: %s", sentence)
        if self.packages and (missing := outcome.stdout.split()):
            log.warning(
                "%s has no %s, which the model's programs often import. Set `interpreter` in the "
                "tool's config to a Python that has them.",
                self.interpreter,
                " and no ".join(missing),
            )
        return outcome

    async def run(self, code: str) -> Outcome:
        """Run one program; cancelling the call kills it."""
        if len(code.encode(errors="replace")) > self.limits.source_bytes:
            message = f"The program is longer than {self.limits.source_bytes} bytes."
            return Outcome("", message, "exit", 1, 0.0, {})
        async with self._slots:
            keeper = await asyncio.create_subprocess_exec(*self._command(), **PIPES)
            try:
                return await self._wait_for_report(keeper, code)
            finally:
                await asyncio.shield(stop_keeper(keeper))

    async def _wait_for_report(self, keeper: asyncio.subprocess.Process, code: str) -> Outcome:
        assert keeper.stdin and keeper.stdout and keeper.stderr
        # Keep stdin open: the keeper reads its end as the death of the caller.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            keeper.stdin.write(self.encode_job(code))
            await keeper.stdin.drain()
        seconds = self.limits.timeout + GRACE_SECONDS
        try:
            async with asyncio.timeout(seconds):
                report, errors = await asyncio.gather(keeper.stdout.read(), keeper.stderr.read())
        except TimeoutError:
            raise SandboxError(f"The sandbox sent no report within {seconds:.0f} s.") from None
        return self.read_outcome(report, errors)

    def _command(self) -> list[str]:
        assert self.interpreter is not None
        return [self.interpreter, "-I", "-S", "-B", str(JAIL)]

    def encode_job(self, code: str) -> bytes:
        """Return the line that `jail.py` reads. The first job also has it remove directories that
        killed keepers left."""
        sweep, self._swept = not self._swept, True
        job = {
            **dataclasses.asdict(self.limits),
            "runner": RUNNER,
            "code": code,
            "network": self.network,
            "packages": self.packages,
            "readable": self.readable,
            "scratch": self.scratch,
            "filters": {"own_user": self._filter(True), "shared_user": self._filter(False)},
            "sweep": sweep,
        }
        return json.dumps(job).encode() + b"\n"

    def _filter(self, own_user: bool) -> str | None:
        """Assemble the filter of system calls. A user created for the program owns no files but
        the program's, so it may change their metadata."""
        code = assemble(
            platform.machine(),
            network=self.network == "allow",
            processes=self.limits.processes > 1,
            metadata=own_user,
        )
        return code.hex() if code else None

    def read_outcome(self, report: bytes, errors: bytes) -> Outcome:
        """Parse a keeper's report; raise if there is none, or if it names a problem."""
        try:
            fields: dict[str, Any] = json.loads(report)
        except ValueError:
            cause = last_line(errors.decode(errors="replace")) or "no message"
            raise SandboxError(
                f"The sandbox failed under {self.interpreter}: {cause}",
                "`interpreter` must be Python 3.9 or later that this user can run.",
            ) from None
        if "problem" not in fields:
            return Outcome(**fields)
        if fields["problem"].startswith("CannotConfine") and self.network == "deny":
            raise UsageError(
                f"The sandbox cannot block the network here ({fields['problem']}).",
                "Use a machine with seccomp (Linux on x86-64 or aarch64), or set `network: allow` "
                "in the tool's config if the model's code may have the network.",
            )
        raise SandboxError(
            f"{self.interpreter} cannot start any program: {fields['problem']}",
            "As root, each program gets a user id that must be able to read `interpreter`; "
            "and `scratch` must exist.",
        )


def list_missing_protections(confined: dict[str, bool]) -> Iterator[str]:
    """Yield a sentence for each thing that a program can do because a layer is missing."""
    files, calls = confined["files"], confined["calls"]
    if not files and not confined["user"]:
        yield (
            "Programs can read, change and leave files of this user, and read the environment of "
            "its processes (no Landlock, not root)."
        )
    elif not files:
        yield (
            "Programs can read world-readable files, and leave files in world-writable "
            "directories like /tmp (no Landlock)."
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


async def stop_keeper(keeper: asyncio.subprocess.Process) -> None:
    """Close the pipe, so that the keeper kills its program and removes its directory. Kill a keeper
    that takes too long; the first job of the next sandbox removes what it left."""
    assert keeper.stdin
    keeper.stdin.close()
    try:
        async with asyncio.timeout(GRACE_SECONDS):
            await keeper.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            keeper.kill()
        await keeper.wait()


def find_interpreter(name: str | None) -> str:
    """Return the path of the interpreter; raise `UsageError` if a named one does not exist."""
    path = shutil.which(name or "python3", path=os.environ.get("PATH") if name else SYSTEM_PATH)
    if path is None and name:
        raise UsageError(
            f"There is no interpreter `{name}` for the sandbox.",
            "Set `interpreter` to a Python that exists on every node.",
        )
    return path or sys.executable


def extract_code(text: str) -> str:
    """Join the fenced blocks of a model's text; without any, return the whole text."""
    return "\n".join(FENCE.findall(text)) or text


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
