"""Attacks on the code sandbox, each run as a model's program would run it.

As root, every attack runs twice: once by root, where the program gets its own user id, and once by
an ordinary user, who also runs a stand-in for the trainer.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.retool import sandbox as sandbox_module
from examples.retool.sandbox import Limits, Outcome, Sandbox
from tests.children import find_processes_in
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

USER = 1234567
"""An ordinary user who owns nothing on the machine that runs the tests."""
SECONDS = 60.0
"""Within which a condition must hold, on a slow machine."""
LANDLOCK = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
ATTEMPT = """
import ctypes, fcntl, os, signal, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(call, *arguments):
    try:
        print("done:", call(*arguments))
    except OSError as error:
        print("refused:", error.errno)
def raw(number, *arguments):
    if libc.syscall(number, *map(ctypes.c_long, arguments)) == -1:
        raise OSError(ctypes.get_errno(), "")
"""


@dataclass
class Attacker:
    """Runs programs in the sandbox of one user."""

    uid: int
    scratch: Path
    jail: Path
    keeper: subprocess.Popen[bytes] | None = None

    def start(self, code: str, **options: Any) -> Sandbox:
        limits = {name: options.pop(name) for name in list(options) if name in Limits.__slots__}
        limits = {"timeout": SECONDS, **limits}
        sandbox = Sandbox(Limits(**limits), scratch=str(self.scratch), **options)
        assert sandbox.interpreter is not None
        self.keeper = subprocess.Popen(
            [sandbox.interpreter, "-I", "-S", "-B", str(self.jail)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            start_new_session=True,
            **self.identity(),
        )
        assert self.keeper.stdin
        self.keeper.stdin.write(sandbox.encode_job(code))
        self.keeper.stdin.flush()
        return sandbox

    def run(self, code: str, **options: Any) -> Outcome:
        sandbox = self.start(code, **options)
        assert self.keeper and self.keeper.stdin and self.keeper.stdout and self.keeper.stderr
        with self.keeper as keeper:
            assert keeper.stdout and keeper.stderr
            outcome = sandbox.read_outcome(keeper.stdout.read(), keeper.stderr.read())
            keeper.wait(SECONDS)
        return outcome

    def attack(self, code: str, **options: Any) -> Outcome:
        """Run a program that uses `attempt`; nothing it attempts may succeed."""
        outcome = self.run(ATTEMPT + code, **options)
        assert "refused:" in outcome.stdout and "done:" not in outcome.stdout, outcome
        return outcome

    def identity(self) -> dict[str, Any]:
        if self.uid == os.getuid():
            return {}
        return {"user": self.uid, "group": self.uid, "extra_groups": []}

    def list_leftovers(self) -> list[Path]:
        return [path for path in self.scratch.iterdir() if path != self.jail]


@pytest.fixture(params=["root", "user"])
def attacker(request: pytest.FixtureRequest) -> Iterator[Attacker]:
    root = os.getuid() == 0
    if request.param == "root" and not root:
        pytest.skip("only root can run a program under another user id")
    uid = USER if request.param == "user" and root else os.getuid()
    scratch = Path(tempfile.mkdtemp(prefix="sandbox-"))
    scratch.chmod(0o755)
    copy = scratch / "jail.py"  # the installed file may be readable by its owner alone
    shutil.copyfile(sandbox_module.JAIL, copy)
    os.chown(scratch, uid, uid if uid == USER else -1)
    attacker = Attacker(uid, scratch, copy)
    interpreter = str(Sandbox().interpreter)
    probe = subprocess.run(
        [interpreter, "-I", "-S", "-c", ""], **attacker.identity(), check=False, env={}
    )
    if probe.returncode != 0:
        pytest.skip(f"user {uid} cannot run {interpreter}")
    yield attacker
    if attacker.keeper is not None:
        attacker.keeper.kill()
        attacker.keeper.wait()
    for pid in find_processes_in(scratch):  # left by an attack that succeeded
        os.kill(pid, signal.SIGKILL)
    subprocess.run(["rm", "-rf", str(scratch)], check=False)  # the tree is too deep for shutil


@pytest.fixture
def trainer(attacker: Attacker) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the user who runs the sandbox; it must outlive every attack."""
    with subprocess.Popen(["sleep", "600"], **attacker.identity()) as process:
        yield process
        process.kill()


def change_jail(attacker: Attacker, old: str, new: str) -> None:
    text = attacker.jail.read_text()
    assert old in text
    attacker.jail.write_text(text.replace(old, new))


# --- Signals that the kernel sends for the program ---

SIGNAL_BY_A_PIPE = """
for target in TARGETS:
    reader, writer = os.pipe()
    for command, value in ((10, signal.SIGKILL), (8, target), (15, struct.pack("ii", 1, target))):
        attempt(fcntl.fcntl, reader, command, value)
    attempt(raw, 72 if os.uname().machine == "x86_64" else 25, reader, 2**32 + 8, target)
    try:
        fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
        os.write(writer, b"x")
    except OSError:
        pass
"""
SIGNAL_BY_A_SOCKET = """
import array, socket
for target in TARGETS:
    for request in (0x8901, 0x8902):
        ours, theirs = socket.socketpair()
        attempt(fcntl.ioctl, ours, request, array.array("i", [target]))
        try:
            fcntl.fcntl(ours, 10, signal.SIGKILL)
        except OSError:
            pass
        fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        theirs.send(b"x")
"""


@pytest.mark.parametrize("way", [SIGNAL_BY_A_PIPE, SIGNAL_BY_A_SOCKET], ids=["pipe", "socket"])
def test_a_program_cannot_make_the_kernel_signal_the_trainer_or_the_keeper(
    way: str, attacker: Attacker, trainer: subprocess.Popen[bytes]
) -> None:
    outcome = attacker.attack(f"TARGETS = [{trainer.pid}, os.getppid()]\n{way}")
    assert outcome.ending == "exit" and outcome.code == 0, outcome
    assert trainer.poll() is None


@pytest.mark.parametrize("way", [SIGNAL_BY_A_PIPE, SIGNAL_BY_A_SOCKET], ids=["pipe", "socket"])
def test_landlock_stops_those_signals_without_a_filter(
    way: str, attacker: Attacker, trainer: subprocess.Popen[bytes]
) -> None:
    if LANDLOCK < 6:
        pytest.skip("Landlock has no scope for signals before ABI 6")
    change_jail(attacker, "PR_SET_SECCOMP, SECCOMP_MODE_FILTER", "PR_SET_SECCOMP, 1000")
    code = f"{ATTEMPT}\nTARGETS = [{trainer.pid}, os.getppid()]\n{way}"
    outcome = attacker.run(code, network="allow")
    assert not outcome.confined["calls"] and outcome.ending == "exit" and outcome.code == 0
    assert trainer.poll() is None


@pytest.mark.parametrize("processes", [1, 4])
def test_a_program_cannot_outlive_its_keeper(attacker: Attacker, processes: int) -> None:
    code = ATTEMPT + (
        "attempt(raw, PRCTL, 1, 0)\nattempt(raw, PRCTL, 2**32 + 1, 0)\n"
        "open('ready', 'w').close()\nsignal.pause()"
    ).replace("PRCTL", "157 if os.uname().machine == 'x86_64' else 167")
    attacker.start(code, processes=processes)
    wait_until(lambda: list(attacker.scratch.glob("*/ready")), SECONDS)
    assert attacker.keeper
    attacker.keeper.send_signal(signal.SIGKILL)
    wait_until(lambda: not find_processes_in(attacker.scratch), SECONDS)


def test_a_child_of_the_program_does_not_outlive_the_keeper(attacker: Attacker) -> None:
    code = (
        "import os, signal\nif os.fork() == 0 and os.fork() == 0:\n"
        "    open('ready', 'w').close()\nsignal.pause()"
    )
    attacker.start(code, processes=4)
    wait_until(lambda: list(attacker.scratch.glob("*/ready")), SECONDS)
    assert attacker.keeper
    attacker.keeper.send_signal(signal.SIGKILL)
    wait_until(lambda: not find_processes_in(attacker.scratch), SECONDS)


def test_a_program_cannot_change_the_scheduling_of_the_trainer(
    attacker: Attacker, trainer: subprocess.Popen[bytes]
) -> None:
    def scheduling() -> list[Any]:
        number = 252 if os.uname().machine == "x86_64" else 31  # ioprio_get
        disk = ctypes.CDLL(None).syscall(number, 1, trainer.pid)
        priority = os.getpriority(os.PRIO_PROCESS, trainer.pid)
        return [os.sched_getscheduler(trainer.pid), priority, disk]

    before = scheduling()
    numbers = (
        "schedule, parameter, io, move, migrate, prctl = (314, 142, 251, 279, 256, 157) "
        "if os.uname().machine == 'x86_64' else (274, 118, 30, 239, 238, 167)\n"
    )
    code = f"""{numbers}pid = {trainer.pid}
idle = ctypes.create_string_buffer(struct.pack("IIQiIQQQ", 48, 5, 0, 0, 0, 0, 0, 0))
attempt(raw, schedule, pid, ctypes.addressof(idle), 0)
attempt(raw, parameter, pid, ctypes.addressof(ctypes.c_int(0)))
attempt(raw, io, 1, pid, 3 << 13)
attempt(raw, io, 3, 0, 3 << 13)
attempt(raw, move, pid, 0, 0, 0, 0, 0)
attempt(raw, migrate, pid, 0, 0, 0)
attempt(raw, prctl, 62, 2, pid, 0, 0)
"""
    outcome = attacker.attack(code)
    assert outcome.stdout.count("refused: 1\n") == 7
    assert scheduling() == before


# --- Metadata outside the working directory ---


def test_a_program_cannot_change_modes_times_and_attributes_of_the_users_files(
    attacker: Attacker,
) -> None:
    private = attacker.scratch / "ssh"
    private.mkdir(mode=0o700)
    key = private / "key"
    key.write_text("secret")
    key.chmod(0o600)
    for path in (private, key):
        os.chown(path, attacker.uid, -1)
    before = [private.stat(), key.stat()]
    numbers = (
        "[(90, True), (92, True), (94, True), (188, True), (189, True), (197, True), (198, True), "
        "(132, True), (235, True), (268, False), (452, False), (260, False), (280, False), "
        "(261, False), (463, False), (466, False), (469, False)] "
        "if os.uname().machine == 'x86_64' else [(5, True), (6, True), (14, True), (15, True), "
        "(53, False), (452, False), (54, False), (88, False), (463, False), (466, False), "
        "(469, False)]"
    )
    code = f"""
for path in ({str(private)!r}, {str(key)!r}):
    for call in (
        lambda: os.chmod(path, 0o755),
        lambda: os.chown(path, -1, os.getgid()),
        lambda: os.utime(path, (0, 0)),
        lambda: os.setxattr(path, "user.mark", b"x"),
        lambda: os.removexattr(path, "user.mark"),
    ):
        attempt(call)
    text = ctypes.create_string_buffer(path.encode())
    for number, direct in {numbers}:
        arguments = (ctypes.addressof(text), 0o755, 0) if direct else (
            -100, ctypes.addressof(text), 0o755, 0, 0)
        attempt(raw, number, *arguments)
"""
    attacker.attack(code)
    after = [private.stat(), key.stat()]
    for old, new in zip(before, after, strict=True):
        assert (old.st_mode, old.st_ctime_ns) == (new.st_mode, new.st_ctime_ns)


def test_a_program_can_write_and_rename_files_in_its_working_directory(attacker: Attacker) -> None:
    code = "import os\nopen('a', 'w').write('x')\nos.rename('a', 'b')\nos.mkdir('c')\nos.listdir()"
    outcome = attacker.run(code)
    assert outcome.ok and "'b'" in outcome.stdout and "'c'" in outcome.stdout


# --- Directories that are hard to remove ---

DEEP = """
import os
for number in range(1500):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
    open("file", "w").close()
print("deep")
"""


def test_1500_nested_directories_cost_neither_the_report_nor_the_disk(attacker: Attacker) -> None:
    outcome = attacker.run(DEEP)
    assert outcome.ok and outcome.stdout == "deep\n"
    assert attacker.list_leftovers() == []


@pytest.mark.parametrize("filtered", [True, False])
def test_directories_of_mode_0_are_removed(attacker: Attacker, filtered: bool) -> None:
    if not filtered:  # then a user's program can call chmod
        change_jail(attacker, "PR_SET_SECCOMP, SECCOMP_MODE_FILTER", "PR_SET_SECCOMP, 1000")
    code = """
import os
os.makedirs("a/b/c")
os.mkdir("d", 0)
os.symlink("/etc", "a/link")
os.mkdir("a/b/c/e", 0)
for path in ("a/b/c", "a/b", "a", "."):
    try:
        os.chmod(path, 0)
    except OSError:
        pass
"""
    assert attacker.run(code, network="deny" if filtered else "allow").ok
    assert attacker.list_leftovers() == [] and Path("/etc").is_dir()


def test_a_link_to_a_directory_outside_is_removed_and_not_followed(attacker: Attacker) -> None:
    outside = attacker.scratch / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    os.chown(outside, attacker.uid, -1)
    assert attacker.run(f"import os\nos.symlink({str(outside)!r}, 'link')").ok
    assert attacker.list_leftovers() == [outside] and (outside / "kept").exists()


def test_the_next_start_sweeps_the_directory_of_a_killed_keeper(attacker: Attacker) -> None:
    code = "top = __import__('os').getcwd()\n" + DEEP
    attacker.start(code + "import signal\nopen(top + '/ready', 'w').close()\nsignal.pause()")
    wait_until(lambda: list(attacker.scratch.glob("*/ready")), SECONDS)
    assert attacker.keeper
    attacker.keeper.kill()
    attacker.keeper.wait()
    wait_until(lambda: not find_processes_in(attacker.scratch), SECONDS)
    assert len(attacker.list_leftovers()) == 1
    assert attacker.run("1").ok
    assert attacker.list_leftovers() == []


def test_the_sweep_removes_nothing_of_a_living_keeper_or_of_other_users(attacker: Attacker) -> None:
    attacker.start("import signal\nopen('ready', 'w').close()\nsignal.pause()")
    wait_until(lambda: list(attacker.scratch.glob("*/ready")), SECONDS)
    (living,) = attacker.list_leftovers()
    other = attacker.scratch / "rollway-code-of-another"
    other.mkdir()
    if attacker.uid != os.getuid() or os.getuid() == 0:
        os.chown(other, 7654321, -1)
    foreign = attacker.scratch / "rollway-code-link"
    foreign.symlink_to("/etc")
    named = attacker.scratch / "rollway-models"
    named.mkdir()
    os.chown(named, attacker.uid, -1)
    second = Attacker(attacker.uid, attacker.scratch, attacker.jail)
    assert second.run("1").ok
    kept = {living, foreign, named} | ({other} if os.getuid() == 0 else set())
    assert set(attacker.list_leftovers()) == kept and (living / "ready").exists()


# --- More processes, more memory, more threads ---


def test_clone_makes_no_namespace(attacker: Attacker) -> None:
    numbers = "clone, clone3 = (56 if os.uname().machine == 'x86_64' else 220), 435\n"
    code = f"""{numbers}
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    attempt(raw, clone, flag | signal.SIGCHLD, 0, 0, 0, 0)
attempt(raw, clone3, 0, 0)
"""
    outcome = attacker.attack(code, processes=4)
    assert outcome.stdout == "refused: 1\n" * 7 + "refused: 38\n"
    outcome = attacker.attack(code)
    assert outcome.stdout == "refused: 1\n" * 7 + "refused: 38\n"
    forked = "import subprocess\nsubprocess.run(['echo', 'child'], check=True)\nprint('parent')"
    assert attacker.run(forked, processes=4).stdout == "child\nparent\n"


@pytest.mark.parametrize("processes", [1, 4])
def test_the_new_mount_calls_are_refused(attacker: Attacker, processes: int) -> None:
    code = "for number in (428, 429, 430, 431, 432, 433, 442, 467):\n    attempt(raw, number)"
    outcome = attacker.attack(code, processes=processes)
    assert outcome.stdout == "refused: 1\n" * 8


def test_memfds_are_refused(attacker: Attacker) -> None:
    code = "attempt(os.memfd_create, 'more')\nattempt(raw, 447, 0)"
    assert attacker.attack(code).stdout == "refused: 1\n" * 2


def test_threads_are_bounded(attacker: Attacker) -> None:
    code = """
import threading, time
threading.stack_size(65536)
forever = threading.Event()
for count in range(2000):
    threading.Thread(target=forever.wait, daemon=True).start()
    time.sleep(0.001)  # the keeper counts threads at intervals
print("all of them")
"""
    outcome = attacker.run(code)
    assert "all of them" not in outcome.stdout
    assert outcome.ending == "threads" or "can't start new thread" in outcome.stderr
    few = code.replace("2000", "50")
    assert attacker.run(few).stdout == "all of them\n"
    spread = (
        "import os\nfor _ in range(3):\n    if os.fork() == 0: break\n"
        + code.replace("2000", "40")
        + "forever.wait()"
    )
    outcome = attacker.run(spread, processes=4, timeout=20)
    assert outcome.ending == "threads" or "can't start new thread" in outcome.stderr


def test_the_network_does_not_reach_abstract_sockets(attacker: Attacker) -> None:
    if LANDLOCK < 6:
        pytest.skip("Landlock has no scope for abstract sockets before ABI 6")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0rollway-test-{os.getpid()}-{attacker.uid}")
        server.listen()
        address = server.getsockname()
        code = f"import socket\nattempt(socket.socket(socket.AF_UNIX).connect, {address!r})"
        attacker.attack(code, network="allow")


def test_io_uring_is_refused(attacker: Attacker) -> None:
    for network in ("deny", "allow"):
        outcome = attacker.attack("attempt(raw, 425, 8, 0)", network=network)
        assert outcome.stdout == "refused: 1\n"


# --- Where a layer is missing ---


def test_missing_protections_name_the_layers_that_do_not_hold(attacker: Attacker) -> None:
    whole = attacker.run("1")
    if LANDLOCK >= 6:
        assert whole.missing_protections == ()
    change_jail(attacker, "    if version < 1:", "    if version < 100:")
    without_landlock = attacker.run("1").missing_protections
    assert any("files" in sentence for sentence in without_landlock)
    change_jail(attacker, "PR_SET_SECCOMP, SECCOMP_MODE_FILTER", "PR_SET_SECCOMP, 1000")
    without_both = attacker.run("1", network="allow").missing_protections
    assert len(without_both) > len(without_landlock)
    assert any("processes" in sentence for sentence in without_both)


def test_a_program_that_stays_root_has_no_capabilities(attacker: Attacker) -> None:
    """A user namespace with one user maps root alone."""
    command = ["unshare", "--user", "--map-root-user"]
    probe = subprocess.run(
        [*command, "true"], **attacker.identity(), capture_output=True, check=False
    )
    if probe.returncode != 0:
        pytest.skip("this kernel makes no user namespaces for this user")
    sandbox = Sandbox(Limits(timeout=SECONDS), scratch=str(attacker.scratch))
    code = (
        ATTEMPT
        + """
header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
sets = ctypes.create_string_buffer(24)
libc.capget(header, sets)
print(os.getuid(), any(sets.raw))
"""
    )
    with subprocess.Popen(
        [*command, str(sandbox.interpreter), "-I", "-S", "-B", str(attacker.jail)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin"},
        **attacker.identity(),
    ) as keeper:
        assert keeper.stdin and keeper.stdout and keeper.stderr
        keeper.stdin.write(sandbox.encode_job(code))
        keeper.stdin.flush()
        outcome = sandbox.read_outcome(keeper.stdout.read(), keeper.stderr.read())
    assert outcome.stdout == "0 False\n", outcome
