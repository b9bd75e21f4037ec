"""`rollway doctor --stack` against stacks that were broken on purpose, one fault per check: each is
found, and nothing else. Light workers, with real Dynamo before them, unless a check needs vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

import rollway
from rollway import processes
from rollway.observe.doctor import CHECKS, Examination, examine_stack
from rollway.processes import ProcessId
from rollway.stack import machine_check
from rollway.stack.preset import has_nixl
from rollway.stack.state import StackDir, StackState, find_record_dir, make_run_dir_name
from rollway.versions import taint_of
from rollway.weights import leftovers
from tests.conftest import Cli
from tests.footprint import RUN
from tests.light.spec import light
from tests.stack.stacks import VLLM_ARGS
from tests.waiting import wait_until

OFTEN = {"interval_seconds": 0.2}


def examine(name: str, rl_url: str | None = None) -> Examination:
    return asyncio.run(examine_stack(name, rl_url))


def find_problems(name: str, rl_url: str | None = None) -> dict[str, str]:
    """Return the checks that found something wrong, with its level."""
    return list_problems(examine(name, rl_url))


def list_problems(done: Examination) -> dict[str, str]:
    return {f.what: f.level for f in done.findings if f.level in ("warning", "error")}


def read_state(name: str) -> StackState:
    state = StackDir(name).read()
    assert state is not None
    return state


def find_pid(stack: str, name: str) -> int:
    process = next(p for p in read_state(stack).processes if p.name == name)
    assert process.pid is not None
    return process.pid


def wait_for_samples(name: str) -> None:
    directory = find_record_dir(read_state(name))
    assert directory is not None
    wait_until(lambda: list(directory.glob("supervisor-*.s*.jsonl")))


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """See leftovers of this test alone: what other tests kill at the same time is theirs."""
    monkeypatch.setattr(machine_check, "SHM", tmp_path)
    monkeypatch.setattr("rollway.weights.adapter.HOME", tmp_path)
    monkeypatch.setattr(machine_check, "list_bases", lambda: {tmp_path})
    find_runs = processes.find_runs

    def find_own_runs() -> dict[str, set[ProcessId]]:
        own = f"{RUN}={os.getpid()}".encode()
        return {
            run_id: members
            for run_id, members in find_runs().items()
            if any(own in read_environment(member.pid) for member in members)
        }

    monkeypatch.setattr(processes, "find_runs", find_own_runs)
    return tmp_path


def read_environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


@pytest.fixture
def sound(base_model: Path) -> Iterator[rollway.Stack]:
    """A healthy stack, which a test breaks."""
    with rollway.up({**light(base_model, "sound"), "observe": OFTEN}) as stack:
        wait_for_samples("sound")
        yield stack


def test_a_healthy_stack_has_nothing_and_is_asked_little(sound: rollway.Stack, cli: Cli) -> None:
    done = examine("sound")
    assert list_problems(done) == {}
    # Dynamo opens the ports of the event plane, whatever it is told.
    assert [f.what for f in done.findings if f.level == "note"] == ["listeners"]
    assert {f.what for f in done.findings} >= {name for name, _ in CHECKS} - {
        "pools",
        "RDMA",
        "KV transfer",
    }
    assert done.requests <= 24 and done.tokens <= 40
    assert list(sound.fleet.read_versions().values()) == [0, 0]
    printed = cli("doctor", "--stack", "--json")
    assert printed.returncode == 0, printed.stderr
    result = json.loads(printed.stdout)
    assert result["stack"] == "sound" and result["requests"] == done.requests
    text = cli("doctor", "--stack", "sound").stdout
    assert f"sound was sent {done.requests} requests" in text


def test_nobody_runs_under_a_wrong_name(cli: Cli) -> None:
    done = cli("doctor", "--stack", "nobody", "--json")
    assert done.returncode == 1 and "nobody" in done.stderr


# --- what a stack answers ------------------------------------------------------------------------


async def set_label(name: str, label: int | None, taint: str | None) -> None:
    """Give the first worker another label or taint, as a driver that went wrong would."""
    async with rollway.attach(name, watch=False) as stack:
        admin, worker = stack.fleet.admin, (await stack.fleet.workers())[0]
        if label is not None:
            await admin.declare_version(worker, label)
        if taint is not None:
            await admin.set_taints(worker, [taint])


@pytest.mark.parametrize(
    ("label", "taint", "problem"),
    [(7, taint_of(7), "versions"), (None, "another", "taints"), (-1, None, "workers")],
)
def test_a_worker_on_another_version_is_found(
    sound: rollway.Stack, cli: Cli, label: int | None, taint: str | None, problem: str
) -> None:
    asyncio.run(set_label("sound", label, taint))
    # The listing shows a taint to the router a moment later.
    wait_until(lambda: find_problems("sound") == {problem: "error"}, every=0.5)
    done = cli("doctor", "--stack", "sound", "--json")
    assert done.returncode == 1


def test_a_worker_that_hangs_is_found(sound: rollway.Stack) -> None:
    pid = find_pid("sound", "tiny-0")
    os.kill(pid, signal.SIGSTOP)
    try:
        problems = find_problems("sound")
        assert problems.pop("workers", None) == "error"
        assert set(problems) <= {"record"}  # the sampler cannot read its page either
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("fault", "problem", "level"),
    [
        ("events", "KV events", "error"),
        ("salt", "cache salt", "error"),
        ("log-probs", "log-probs", "error"),
        ("generation config", "generation config", "warning"),
    ],
)
def test_a_fault_of_the_workers_is_found(
    base_model: Path, fault: str, problem: str, level: str
) -> None:
    # A router that knows nothing may find two workers' prompts by chance, three workers' hardly.
    spec = {**light(base_model, "faulty", replicas=3, LIGHT_FAULT=fault), "observe": OFTEN}
    with rollway.up(spec):
        wait_for_samples("faulty")
        assert find_problems("faulty") == {problem: level}


def test_why_there_are_canaries_only_is_said(base_model: Path) -> None:
    spec = light(base_model, "plain", LIGHT_FOREIGN="1")
    with rollway.up({**spec, "observe": "off"}):
        done = examine("plain")
    notes = {f.what: f.cause for f in done.findings if f.level == "note"}
    assert list_problems(done) == {}
    assert "2 workers are foreign ones" in notes["proof"]
    assert notes["record"] == "nothing is recorded"


def test_a_pool_without_workers_is_found(base_model: Path) -> None:
    model = light(base_model, "halved")["models"][0]
    del model["replicas"]
    model |= {"serving": "disaggregated", "prefill": {"replicas": 1}, "decode": {"replicas": 1}}
    spec = {"name": "halved", "models": [model], "start_seconds": 120, "observe": "off"}
    with rollway.up({**spec, "restart": {"enabled": False}}) as stack:
        assert find_problems("halved") == {}
        os.kill(find_pid("halved", "tiny-prefill-0"), signal.SIGKILL)
        wait_until(lambda: len([w for w in stack.fleet.workers() if w.error is None]) == 1)
        problems = find_problems("halved")
        assert problems.pop("pools", None) == "error"
        assert set(problems) <= {"workers"}  # while the dead one is still listed


# --- who reaches it ------------------------------------------------------------------------------


@asynccontextmanager
async def open_proxy(
    server: str, *, drops_taints: bool = False, replaces: str = "none"
) -> AsyncIterator[str]:
    """Stand before a server as a proxy of another machine: it drops what it does not know of a
    request, or names an address that nobody listens on. (No machine of the tests has a
    firewall.)"""

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        if drops_taints and body:
            fields = json.loads(body)
            fields.get("nvext", {}).pop("routing_constraints", None)
            body = json.dumps(fields).encode()
        headers = {"content-type": "application/json"}
        url = f"{server}{request.path_qs}"
        async with (
            ClientSession() as session,
            session.request(request.method, url, data=body or None, headers=headers) as answer,
        ):
            content = (await answer.read()).replace(replaces.encode(), b"127.0.0.1:1")
        return web.Response(body=content, status=answer.status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def test_a_proxy_that_drops_taints_is_found(sound: rollway.Stack) -> None:
    async def examine_proxied() -> Examination:
        async with open_proxy(sound.frontend_url, drops_taints=True) as url:
            return await examine_stack(url, sound.rl_url)

    assert list_problems(asyncio.run(examine_proxied())) == {"other versions": "error"}


def test_a_worker_that_only_the_frontend_reaches_is_found(sound: rollway.Stack) -> None:
    async def examine_proxied() -> Examination:
        processes = read_state("sound").processes
        address = next(p.admin_url for p in processes if p.admin_url) or ""
        async with (
            open_proxy(sound.frontend_url) as frontend,
            open_proxy(sound.rl_url, replaces=address.removeprefix("http://")) as listing,
        ):
            return await examine_stack(frontend, listing)

    assert list_problems(asyncio.run(examine_proxied())) == {"workers": "error"}


def test_a_frontend_without_a_listing_of_workers_is_found(sound: rollway.Stack) -> None:
    async def examine_proxied() -> Examination:
        async with open_proxy(sound.frontend_url) as frontend:
            return await examine_stack(frontend, "http://127.0.0.1:1")

    assert list_problems(asyncio.run(examine_proxied())) == {"workers": "error"}


def test_an_open_admin_port_is_found(base_model: Path) -> None:
    spec = {**light(base_model, "exposed"), "observe": "off", "admin_host": "0.0.0.0"}
    with rollway.up(spec):
        done = examine("exposed")
    # The request plane listens on the same address.
    assert list_problems(done) == {"admin ports": "warning", "listeners": "warning"}
    advice = {f.what: f.fix for f in done.findings}
    assert "admin_host" in advice["admin ports"]


def test_a_worker_without_a_guard_is_found(
    sound: rollway.Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the worker of another's stack: its admin port has no door."""
    monkeypatch.setattr("rollway.observe.doctor.subject.DOOR", "liveness_probe")
    assert find_problems("sound") == {"admin ports": "error"}


# --- what it needs to go on ----------------------------------------------------------------------


def test_a_process_near_its_file_limit_is_found(sound: rollway.Stack) -> None:
    pid = find_pid("sound", "tiny-1")
    used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 5, before[1]))
    try:
        assert find_problems("sound") == {"file limits": "error"}
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_a_record_that_is_gone_is_found(sound: rollway.Stack) -> None:
    directory = find_record_dir(read_state("sound"))
    assert directory is not None
    shutil.rmtree(directory)
    assert find_problems("sound") == {"record": "error"}


@pytest.mark.skipif(os.getuid() != 0, reason="a tmpfs is mounted by root alone")
def test_a_small_disk_is_found(base_model: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mount is not permitted here")
    try:
        spec = {**light(base_model, "small"), "observe": {**OFTEN, "directory": str(disk)}}
        with rollway.up(spec):
            wait_for_samples("small")
            assert find_problems("small") == {"disk": "error"}
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_stack_that_was_left_behind_is_found(
    sound: rollway.Stack, base_model: Path, cli: Cli
) -> None:
    with rollway.up({**light(base_model, "left", replicas=1), "observe": "off"}):
        os.kill(read_state("left").supervisor_pid, signal.SIGKILL)
        wait_until(lambda: not read_state("left").is_supervised)
        assert find_problems("sound") == {"leftovers": "warning"}


@pytest.mark.parametrize("what", ["a process", "a run directory", "weights", "an adapter"])
def test_what_else_dead_runs_leave_is_found(
    sound: rollway.Stack, own_machine: Path, what: str
) -> None:
    """The files stand in for those of processes that were killed with their guards."""
    run_id, dead = "0123456789abcdef", f"{find_place()}-2147483647-1"
    with ExitStack() as cleanup:
        if what == "a process":
            env = {**os.environ, **processes.make_run_environment(run_id)}
            orphan = cleanup.enter_context(subprocess.Popen(["sleep", "600"], env=env))
            cleanup.callback(orphan.kill)
        elif what == "a run directory":
            (own_machine / make_run_dir_name(run_id, os.getuid())).mkdir()
            os.utime(own_machine / make_run_dir_name(run_id, os.getuid()), (0, 0))
        elif what == "weights":
            (own_machine / f"{leftovers.WEIGHTS}{dead}-aa").touch()
        else:
            (own_machine / "rollway-adapters-aa").mkdir()
            (own_machine / "rollway-adapters-aa" / f"{dead}.owner").touch()
        assert find_problems("sound") == {"leftovers": "warning"}


def find_place() -> str:
    """Return the part of a writer's mark that names this machine."""
    return leftovers.writer_mark().partition("-")[0]


def test_a_small_shared_memory_of_the_workers_is_found(
    base_model: Path, tmp_path: Path, cli: Cli
) -> None:
    """As of a container: the stack has a /dev/shm of its own, and the doctor has this machine's."""
    flags = "-m" if os.getuid() == 0 else "-Urm"
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    inside = ["unshare", flags, "sh", "-c", mount, "sh"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace is permitted here")
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps({**light(base_model, "shallow"), "observe": OFTEN}))
    command = [*inside, sys.executable, "-m", "rollway.cli", "up", str(spec), "--json"]
    started = subprocess.run(command, capture_output=True, text=True, timeout=120)
    try:
        assert started.returncode == 0, started.stderr
        wait_for_samples("shallow")
        assert find_problems("shallow") == {"shared memory": "warning"}
    finally:
        cli("down", "shallow")


def test_other_versions_of_packages_are_found(
    sound: rollway.Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if Rollway had been tested with another torch: none can be installed for a test."""
    monkeypatch.setitem(machine_check._TESTED, "torch", "1.0")
    assert find_problems("sound") == {"packages": "warning"}


# --- vLLM ----------------------------------------------------------------------------------------


def test_a_healthy_vllm_stack_has_nothing(base_model: Path) -> None:
    """Also with the checkpoint's generation config, which has a top-k and a top-p."""
    model = {"path": str(base_model), "name": "tiny", "replicas": 2, "args": VLLM_ARGS}
    with rollway.up({"name": "engines", "models": [model], "observe": OFTEN}):
        wait_for_samples("engines")
        done = examine("engines")
    assert list_problems(done) == {}
    assert [f.what for f in done.findings if f.level == "note"] == ["listeners"]


@pytest.mark.skipif(not has_nixl(), reason="needs the module nixl: make setup")
@pytest.mark.parametrize("is_forced", [False, True])
def test_a_transport_that_is_forced_to_tcp_is_found(base_model: Path, is_forced: bool) -> None:
    model = {"path": str(base_model), "name": "tiny", "args": VLLM_ARGS}
    model |= {"serving": "disaggregated", "prefill": {}, "decode": {}}
    if is_forced:
        model["env"] = {"UCX_TLS": "tcp"}
    with rollway.up({"name": "transfers", "models": [model], "observe": OFTEN}):
        wait_for_samples("transfers")
        done = examine("transfers")
    assert list_problems(done) == ({"KV transfer": "warning"} if is_forced else {})
    (transfer,) = [f.cause for f in done.findings if f.what == "KV transfer"]
    # UCX keeps a TCP lane for control beside shared memory (`cma`).
    assert "MB/s" in transfer and ("cma/" in transfer) == (not is_forced)
