"""Programs that a model may write, harmful or not: each stays within limits and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.retool import system_calls
from examples.retool.sandbox import (
    Limits,
    Outcome,
    Sandbox,
    SandboxError,
    extract_code,
)
from rollway.errors import UsageError
from tests.children import find_processes_in
from tests.waiting import wait_until, wait_until_async

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

SECONDS = 20.0
"""Within which a killed program must be gone, on a slow machine."""


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Make a directory that every user can enter, unlike `tmp_path`."""
    path = Path(tempfile.mkdtemp(prefix="retool-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


async def run(code: str, scratch: Path, **options: object) -> Outcome:
    """Run a program and assert that it leaves nothing."""
    limits = {name: options.pop(name) for name in list(options) if name in Limits.__slots__}
    sandbox = Sandbox(Limits(**{"timeout": 15, **limits}), scratch=str(scratch), **options)  # type: ignore[arg-type]
    outcome = await sandbox.run(code)
    assert find_processes_in(scratch) == []
    assert list(scratch.iterdir()) == []
    return outcome


# --- What programs can do ---


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(6 * 7)", "42\n"),
        ("x = 6\nx * 7", "42\n"),
        ("1, 2", "(1, 2)\n"),
        ("def f():\n    print('in')\nf()", "in\n"),
        ("'a string'", "a string\n"),
        ("(  # first\n  1 +\n  1  # last\n)", "2\n"),
        ("print('à'); 5", "à\n5\n"),
        ("x = 1", ""),
        ("", ""),
        ("import sys\nsys.exit()", ""),
        (
            "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nA(1)",
            "A(x=1)\n",
        ),
        ("import threading\nt = threading.Thread(target=print, args=(5,))\nt.start()", "5\n"),
        ("import asyncio\nasync def f():\n    return 7\nasyncio.run(f())", "7\n"),
        ("open('kept', 'w').write('abc')\nopen('kept').read()", "abc\n"),
        ("print(input())", ""),
    ],
)
async def test_prints_what_a_notebook_would(code: str, printed: str, scratch: Path) -> None:
    outcome = await run(code, scratch)
    assert outcome.stdout == printed
    assert outcome.ok or "EOFError" in outcome.stderr


async def test_a_traceback_has_the_models_own_lines_and_no_path(scratch: Path) -> None:
    outcome = await run("# a comment\n\nx = 0\n1 / x", scratch)
    assert outcome.code == 1
    assert outcome.stderr.splitlines()[1:3] == [
        '  File "main.py", line 4, in <module>',
        "    1 / x",
    ]
    broken = await run("def f(:", scratch)
    assert "SyntaxError" in broken.stderr and str(scratch) not in broken.stderr


def test_code_is_extracted_from_fences() -> None:
    assert extract_code("see:\n```python\nx = 1\n```\nand\n```\nx\n```") == "x = 1\n\nx\n"
    assert extract_code("```py\r\n1\r\n```") == "1\r\n"
    assert extract_code("x = 1") == "x = 1"


# --- Limits ---


async def test_an_endless_loop_is_killed(scratch: Path) -> None:
    outcome = await run("while True: pass", scratch, timeout=1.0)
    assert outcome.ending == "timeout" and 1 <= outcome.seconds < SECONDS


async def test_a_program_that_ignores_signals_is_killed(scratch: Path) -> None:
    code = (
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except OSError: pass\nwhile True: pass"
    )
    assert (await run(code, scratch, timeout=1.0)).ending == "timeout"


async def test_processor_time_is_bounded(scratch: Path) -> None:
    outcome = await run("while True: pass", scratch, cpu_seconds=1)
    assert outcome.ending == "cpu" and outcome.seconds < 15


async def test_memory_is_bounded(scratch: Path) -> None:
    outcome = await run("x = []\nwhile True: x.append(bytearray(10**7))", scratch)
    assert "MemoryError" in outcome.stderr and outcome.code == 1


async def test_files_are_bounded(scratch: Path) -> None:
    outcome = await run("open('f', 'wb').write(b'x' * 3 * 2**20)", scratch, file_mb=2)
    assert "File too large" in outcome.stderr
    many = await run("f = [open('f', 'w') for _ in range(1000)]", scratch)
    assert "Too many open files" in many.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_program_with_too_much_output_is_killed(stream: str, scratch: Path) -> None:
    code = f"import sys\nwhile True: sys.{stream}.write('x' * 1000)"
    outcome = await run(code, scratch, output_bytes=5000)
    assert outcome.ending == "output" and outcome.seconds < SECONDS
    assert len(getattr(outcome, stream)) == 5000


async def test_output_just_over_the_limit_is_cut_too(scratch: Path) -> None:
    outcome = await run("print('x' * 5001, end='')", scratch, output_bytes=5000)
    assert outcome.ending == "output" and len(outcome.stdout) == 5000
    whole = await run("print('x' * 5000, end='')", scratch, output_bytes=5000)
    assert whole.ok and len(whole.stdout) == 5000


async def test_no_other_process_can_be_started(scratch: Path) -> None:
    for start in ("os.fork()", "os.posix_spawn('/bin/true', ['true'], {})", "os.system('true')"):
        outcome = await run(f"import os\nprint(repr({start}))", scratch)
        assert outcome.stdout in ("", "32512\n"), start  # 127: the shell could not be run
    spawned = await run("import subprocess\nsubprocess.run(['true'])", scratch)
    assert "PermissionError" in spawned.stderr


async def test_a_fork_bomb_is_killed(scratch: Path) -> None:
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert (await run(code, scratch, timeout=1.0)).ending == "timeout"
    allowed = await run(code, scratch, processes=8)
    assert allowed.ending == "processes" and allowed.seconds < SECONDS


async def test_a_child_in_the_background_is_killed(scratch: Path) -> None:
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nprint('parent')"
    outcome = await run(code, scratch, processes=4)
    assert outcome.stdout == "parent\n" and outcome.ok and outcome.seconds < SECONDS


async def test_a_child_cannot_leave_its_group(scratch: Path) -> None:
    for escape in ("os.setsid()", "os.setpgid(0, 0)"):
        code = f"import os\nif os.fork() == 0:\n    {escape}\nelse:\n    os.wait()"
        assert "PermissionError" in (await run(code, scratch, processes=4)).stderr


async def test_a_deeply_nested_program_harms_only_itself(scratch: Path) -> None:
    outcome = await run("-" * 100_000 + "1", scratch)
    assert not outcome.ok
    long = await run("x" * 200_000, scratch)
    assert "longer than" in long.stderr


# --- What programs cannot reach ---


async def test_there_is_no_network(scratch: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)\nprint('in')"
        outcome = await run(code, scratch)
        assert "PermissionError" in outcome.stderr and outcome.stdout == ""
        allowed = await run(code, scratch, network="allow")
        assert allowed.stdout == "in\n"


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_VSOCK"])
@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM", "SOCK_RAW"])
async def test_there_is_no_socket_of_any_kind(family: str, kind: str, scratch: Path) -> None:
    code = f"import socket\nsocket.socket(socket.{family}, socket.{kind})\nprint('in')"
    assert "PermissionError" in (await run(code, scratch)).stderr


async def test_a_pair_of_datagram_sockets_is_refused(scratch: Path) -> None:
    code = "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"
    assert "PermissionError" in (await run(code, scratch)).stderr


async def test_the_environment_is_unreadable(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    outcome = await run("import os\nprint(os.environ, os.getcwd())", scratch)
    assert "HF_TOKEN" not in outcome.stdout and os.environ["HOME"] not in outcome.stdout
    code = f"for p in {os.getpid()}, 'self':\n    print(open(f'/proc/{{p}}/environ').read())"
    outcome = await run(code, scratch)
    if outcome.confined["files"] or outcome.confined["user"]:
        assert "hf_secret" not in outcome.stdout and "PermissionError" in outcome.stderr


async def test_files_of_the_user_are_unreadable(scratch: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    outcome = await run(f"print(open({str(secret)!r}).read())", scratch)
    if outcome.confined["files"] or outcome.confined["user"]:
        assert "PermissionError" in outcome.stderr
    if outcome.confined["files"]:
        outcome = await run("open('/tmp/left-behind', 'w')", scratch)
        assert "PermissionError" in outcome.stderr


async def test_other_processes_are_out_of_reach(scratch: Path) -> None:
    me = os.getpid()
    for attempt in (
        "os.kill(-1, 0)",
        f"os.kill({me}, 0)",
        f"resource.prlimit({me}, resource.RLIMIT_NOFILE, (1, 1))",
        f"os.setpriority(os.PRIO_PROCESS, {me}, 19)",
        f"os.sched_setaffinity({me}, [0])",
        f"os.pidfd_open({me})",
    ):
        outcome = await run(f"import os, resource\n{attempt}\nprint('in')", scratch)
        assert "PermissionError" in outcome.stderr, attempt


# --- The filter ---


def verdict(code: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Interpret a filter as the kernel does."""
    data = struct.pack("<iIQ6Q", number, architecture, 0, *(*arguments, *[0] * 6)[:6])
    place, value = 0, 0
    while True:
        operation, then, otherwise, constant = struct.unpack_from("<HBBI", code, 8 * place)
        place += 1
        if operation == system_calls.RETURN:
            return int(constant)
        if operation == system_calls.LOAD:
            (value,) = struct.unpack_from("<I", data, constant)
        elif operation == system_calls.MASK:
            value &= constant
        else:
            holds = {
                system_calls.JUMP_EQUAL: value == constant,
                system_calls.JUMP_ABOVE: value >= constant,
                system_calls.JUMP_BITS: bool(value & constant),
            }[operation]
            place += then if holds else otherwise


@pytest.mark.parametrize("machine", list(system_calls.SYSTEM_CALLS))
@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("metadata", [False, True])
def test_a_filter_refuses_restricted_calls_alone(
    machine: str, processes: bool, metadata: bool
) -> None:
    architecture, calls = system_calls.SYSTEM_CALLS[machine]
    code = system_calls.assemble(machine, network=False, processes=processes, metadata=metadata)
    assert code is not None
    conditional = system_calls.argument_conditions(processes=processes, metadata=metadata)

    def allowed(name: str, *arguments: int) -> bool:
        answer = verdict(code, architecture, calls[name], *arguments)
        assert answer in (system_calls.ALLOW, system_calls.REFUSE, system_calls.UNKNOWN)
        return answer == system_calls.ALLOW

    for name in set(calls) - set(conditional):
        expected = (metadata and name in system_calls.METADATA) or (
            processes and name in ("fork", "vfork")
        )
        assert allowed(name) == expected, name
    thread, fork = 0x3D0F00, 0x1200011
    assert allowed("clone", thread) and allowed("clone", fork) == processes
    for flag in (0x20000, *(1 << bit for bit in range(25, 31))):
        assert not allowed("clone", fork | flag) and not allowed("clone", thread | flag)
    for command in range(2000):
        refused = command in (8, 10, 15, 1024)
        assert allowed("fcntl", 3, command) != refused
        assert allowed("fcntl", 3, command | 1 << 32) != refused
    assert not allowed("ioctl", 3, 0x8901) and not allowed("ioctl", 3, 0x8902)
    assert allowed("ioctl", 3, 0x5401) and allowed("ioctl", 3, 0x40086602) == metadata
    assert not allowed("prctl", 1) and not allowed("prctl", 1 | 1 << 32) and allowed("prctl", 15)
    assert allowed("prlimit64", 0) and not allowed("prlimit64", 77)
    assert allowed("socketpair", 1, 1 | 0o4000) and not allowed("socketpair", 1, 2)
    assert verdict(code, architecture, 63) == system_calls.ALLOW  # uname, or read
    assert verdict(code, 0x40000003, 63) == system_calls.KILL


def test_there_is_no_filter_for_an_unknown_machine() -> None:
    allow = {"network": True, "processes": True, "metadata": True}
    assert system_calls.assemble("riscv64", **allow) is None


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"),
        ("x86_64", "asm/unistd_64.h"),
        ("aarch64", "asm-generic/unistd.h"),
    ],
)
def test_call_numbers_match_the_kernels_headers(machine: str, header: str) -> None:
    path = Path("/usr/include", header)
    if not path.exists():
        pytest.skip(f"there is no {path}")
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text()))
    calls = system_calls.SYSTEM_CALLS[machine][1]
    known = {name: int(numbers[name]) for name in calls if name in numbers}
    assert len(known) > 50 and {name: calls[name] for name in known} == known


# --- The caller ---


async def test_at_most_max_concurrent_programs_run_at_once(scratch: Path) -> None:
    sandbox = Sandbox(Limits(timeout=30), scratch=str(scratch), max_concurrent=2)
    code = "import time\ntime.sleep(0.5)"
    began = time.monotonic()
    tasks = [asyncio.create_task(sandbox.run(code)) for _ in range(4)]
    counts = []

    def are_done() -> bool:
        counts.append(len(list(scratch.iterdir())))
        return all(task.done() for task in tasks)

    await wait_until_async(are_done)
    assert max(counts) <= 2 and time.monotonic() - began >= 1.0
    assert all(task.result().ok for task in tasks)


async def test_cancelling_a_call_kills_its_program(scratch: Path) -> None:
    sandbox = Sandbox(scratch=str(scratch))
    task = asyncio.create_task(sandbox.run("while True: pass"))
    await wait_until_async(lambda: find_processes_in(scratch))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert find_processes_in(scratch) == [] and list(scratch.iterdir()) == []
    assert (await sandbox.run("1")).ok


def test_the_death_of_the_caller_kills_the_program(scratch: Path) -> None:
    code = (
        "import asyncio\nfrom examples.retool.sandbox import Sandbox\n"
        f"asyncio.run(Sandbox(scratch={str(scratch)!r}).run('while True: pass'))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3]) as caller:
        wait_until(lambda: find_processes_in(scratch), SECONDS)
        caller.send_signal(signal.SIGKILL)
    wait_until(lambda: not find_processes_in(scratch) and not list(scratch.iterdir()), SECONDS)


def test_check_names_what_is_missing(scratch: Path, tmp_path: Path) -> None:
    assert Sandbox(scratch=str(scratch)).check().confined["calls"]
    with pytest.raises(UsageError, match="no interpreter"):
        Sandbox(interpreter="/no/such/python")
    with pytest.raises(SandboxError, match=r"Python 3\.9"):
        Sandbox(interpreter="/bin/false").check()
    with pytest.raises(SandboxError, match="No such file"):
        Sandbox(scratch=str(tmp_path / "gone")).check()
    with pytest.raises(UsageError, match="memory_mb"):
        Sandbox(Limits(memory_mb=1)).check()
    with pytest.raises(UsageError, match="timeout"):
        Limits(timeout=0)
    with pytest.raises(UsageError, match="network"):
        Sandbox(network="perhaps")  # type: ignore[arg-type]


def test_check_reports_an_interpreter_that_ended_before_it_read_its_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def has_ended(command: str) -> bool:
        """Whether a child has ended that nobody has waited for yet."""
        ended = f"({command}) Z {os.getpid()} "
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if ended in file.read_text(errors="replace"):
                    return True
        return False

    def late(sandbox: Sandbox, code: str) -> bytes:
        wait_until(lambda: has_ended("false"))
        return b"{}\n"

    monkeypatch.setattr(Sandbox, "encode_job", late)
    with pytest.raises(SandboxError, match=r"Python 3\.9"):
        Sandbox(interpreter="/bin/false").check()


def test_check_warns_of_packages_that_programs_will_not_find(
    scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A system's Python often has neither numpy nor sympy; a bare environment never has."""
    system = str(Sandbox().interpreter)
    subprocess.run([system, "-m", "venv", "--without-pip", scratch / "bare"], check=True)
    bare = str(scratch / "bare" / "bin" / "python")
    Sandbox(interpreter=bare, readable=(str(scratch),), packages=False).check()
    assert "numpy" not in caplog.text
    Sandbox(interpreter=bare, readable=(str(scratch),)).check()
    assert f"{bare} has no numpy and no sympy" in caplog.text and "`interpreter`" in caplog.text


async def test_without_a_filter_the_network_must_be_allowed(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_calls, "SYSTEM_CALLS", {})
    with pytest.raises(UsageError, match="network: allow"):
        Sandbox(scratch=str(scratch)).check()
    code = "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(1000)\nprint('parent')"
    outcome = await run(code, scratch, network="allow")
    assert outcome.stdout == "parent\n" and not outcome.confined["calls"]


def test_check_logs_missing_protections(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(system_calls, "SYSTEM_CALLS", {})
    with caplog.at_level(logging.WARNING):
        outcome = Sandbox(scratch=str(scratch), network="allow").check()
    assert outcome.missing_protections
    assert all(sentence in caplog.text for sentence in outcome.missing_protections)
