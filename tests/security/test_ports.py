"""Other users of the machine, and the network, cannot use a stack's sockets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollway
from rollway import processes
from rollway.processes import ProcessId
from rollway.spec import load_spec
from rollway.stack import preset
from rollway.stack.commands import make_kv_events_endpoint
from rollway.stack.locks import Lease
from rollway.stack.machine_check import ListeningSocket, list_listeners
from rollway.stack.plan import plan_stack
from rollway.stack.state import ProcessState, StackDir, StackState, choose_run_dir
from tests.conftest import Cli
from tests.stack.mocker import mocker_spec

LONGEST_SOCKET_PATH = 107


def kv_endpoints(run_dir: Path, **model: Any) -> list[str]:
    lease = Lease()
    models = [{"path": "org/a", "replicas": 2, **model}, {"path": "org/b", **model}]
    try:
        stack_plan = plan_stack(
            load_spec({"models": models}),
            run_id="0123456789abcdef",
            run_dir=run_dir,
            log_dir=run_dir,
            ports=lease,
        )
    finally:
        lease.release()
    configs = [worker.argv[worker.argv.index("--kv-events-config") + 1]
               for worker in stack_plan.by_role("worker")]  # fmt: skip
    return [json.loads(config)["endpoint"] for config in configs]


def test_kv_events_use_private_unix_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold the token ids of every prompt; no port carries them."""
    monkeypatch.setattr(preset, "list_gpus", list)
    endpoints = kv_endpoints(tmp_path)
    assert len(set(endpoints)) == 3
    assert all(endpoint.startswith(f"ipc://{tmp_path}/") for endpoint in endpoints)


def test_a_long_temporary_directory_keeps_the_socket_path_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/tmp/" + "x" * 200)
    endpoint = make_kv_events_endpoint(choose_run_dir("0123456789abcdef"), 99, 4095)
    assert len(f"{endpoint}_dp127".removeprefix("ipc://")) <= LONGEST_SOCKET_PATH


@pytest.mark.parametrize("rank", [0, 3])
def test_kv_events_are_published_below_a_private_directory(tmp_path: Path, rank: int) -> None:
    """vLLM publishes where Dynamo subscribes for each data-parallel rank."""
    zmq = pytest.importorskip("zmq")
    events = pytest.importorskip("vllm.distributed.kv_events")
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    endpoint = make_kv_events_endpoint(run_dir, 0, 0)
    publisher = events.ZmqEventPublisher(data_parallel_rank=rank, endpoint=endpoint, topic="t")
    # As dynamo.vllm computes where to subscribe.
    dynamo = events.ZmqEventPublisher.offset_endpoint_port(endpoint, data_parallel_rank=rank)
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    try:
        subscriber.connect(dynamo.replace("*", "127.0.0.1"))
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        batch = events.KVEventBatch(ts=0.0, events=[events.AllBlocksCleared()])
        deadline = time.monotonic() + 30
        while not subscriber.poll(50):
            assert time.monotonic() < deadline, "nothing was published"
            publisher.publish(batch)
        assert [path.is_socket() for path in run_dir.iterdir()] == [True]
        assert run_dir.stat().st_mode & 0o077 == 0
    finally:
        subscriber.close(linger=0)
        publisher.shutdown()


# --- `rollway doctor --ports` --------------------------------------------------------------

LISTEN = """
import socket, sys
sockets = []
def tcp(family, address):
    s = socket.socket(family); s.bind((address, 0)); s.listen(); sockets.append(s)
    print(address, s.getsockname()[1])
def unix(address, kind=socket.SOCK_STREAM):
    s = socket.socket(socket.AF_UNIX, kind); s.bind(address)
    if kind == socket.SOCK_STREAM: s.listen()
    sockets.append(s)
tcp(socket.AF_INET, "127.0.0.1")
tcp(socket.AF_INET, "0.0.0.0")
if socket.has_ipv6 and sys.argv[3] == "6":
    tcp(socket.AF_INET6, "::1"); tcp(socket.AF_INET6, "::")
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("0.0.0.0", 0)); sockets.append(u)
unix(sys.argv[1] + "/private.sock"); unix(sys.argv[2] + "/open.sock")
unix("\\0test-abstract-" + sys.argv[1])
import os
os.chmod(sys.argv[2] + "/open.sock", 0o777); os.chmod(sys.argv[1] + "/private.sock", 0o777)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """A process of a stack that listens in every way there is."""
    private, open_to_all = tmp_path_factory.mktemp("p"), Path(f"/tmp/rollway-test-{os.getpid()}")
    private.chmod(0o700)
    open_to_all.mkdir(mode=0o755)
    run_id = "feedfacefeedface"
    child = subprocess.Popen(
        [sys.executable, "-c", LISTEN, str(private), str(open_to_all),
         "6" if Path("/proc/net/tcp6").exists() else "4"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **processes.make_run_environment(run_id)},
    )  # fmt: skip
    assert child.stdout is not None and child.stdin is not None
    while child.stdout.readline().strip() not in ("ready", ""):
        pass
    identity, me = ProcessId.of(child.pid), ProcessId.of(os.getpid())
    assert identity is not None and me is not None
    process = ProcessState("w-0", "worker", "w.log", pid=child.pid, start=identity.start)
    yield StackState(
        "t", run_id, me.pid, me.start, run_dir=str(private), log_dir="", processes=[process],
        join_spec={"event_plane": "zmq"},
    )  # fmt: skip
    child.stdin.close()
    child.wait(10)
    (open_to_all / "open.sock").unlink()
    open_to_all.rmdir()


def test_the_doctor_lists_every_kind_of_listener(listening: StackState) -> None:
    own = [entry for entry in list_listeners(listening) if entry.process == "w-0"]
    reach = {entry.address: entry.reach for entry in own if entry.protocol == "tcp"}
    assert reach["127.0.0.1"] == "users of this machine"
    assert reach["0.0.0.0"] == "the network"
    if "::" in reach:
        assert (reach["::"], reach["::1"]) == ("the network", "users of this machine")
    assert [entry.reach for entry in own if entry.protocol == "udp"] == ["the network"]
    sockets = {Path(entry.address).name: entry.reach for entry in own if entry.protocol == "unix"}
    assert sockets.pop("private.sock") == "only this user"
    assert set(sockets.values()) == {"users of this machine"}
    assert len(sockets) == 2
    assert all(bool(entry.advice) == (entry.reach == "the network") for entry in own)


def listed(name: str) -> list[ListeningSocket]:
    state = StackDir(name).read()
    assert state is not None
    return list_listeners(state)


def outside_address() -> str:
    """An address of this machine that another one could dial."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        address: str = probe.getsockname()[0]
    if address.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    return address


def can_connect(address: str, port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(5)
        return client.connect_ex((address, port)) == 0


@pytest.mark.stack
def test_no_port_of_a_stack_on_nats_is_reachable_from_the_network(base_model: Path) -> None:
    for program in ("etcd", "nats-server"):
        if preset.find_program(program) is None:
            pytest.skip(f"{program} is not installed")
    outside = outside_address()
    with rollway.up(mocker_spec(base_model, event_plane="nats", discovery="etcd")):
        ports = [entry for entry in listed("t") if entry.protocol == "tcp"]
        assert {"etcd", "nats-server", "frontend", "tiny-0"} <= {entry.process for entry in ports}
        assert [entry for entry in ports if entry.reach == "the network"] == []
        for entry in ports:
            assert entry.port is not None
            assert can_connect("127.0.0.1", entry.port)
            assert not can_connect(outside, entry.port)


@pytest.mark.stack
def test_the_doctor_warns_that_the_event_plane_is_reachable_from_the_network(
    base_model: Path, cli: Cli
) -> None:
    """With zmq Dynamo binds it on all interfaces; the doctor says how to close it."""
    outside = outside_address()
    with rollway.up(mocker_spec(base_model)):
        reachable = [entry for entry in listed("t") if entry.reach == "the network"]
        assert reachable
        for entry in reachable:
            assert entry.purpose.startswith("the event plane")
            assert entry.port is not None and can_connect(outside, entry.port)
        frontend = [entry for entry in listed("t") if "OpenAI" in entry.purpose]
        assert [entry.address for entry in frontend] == ["127.0.0.1"]
        result = cli("doctor", "--ports", "t")
        assert result.returncode == 0, result.stderr
        assert "event_plane: nats" in result.stdout and "warning" in result.stdout
        as_json = json.loads(cli("doctor", "--ports", "--json").stdout)
        assert len(as_json["listeners"]) == len(listed("t"))
    assert cli("doctor", "--ports", "t").returncode == 1
    assert "no stack is running" in cli("doctor", "--ports").stdout
