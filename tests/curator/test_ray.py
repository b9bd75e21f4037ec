"""The server on a real Ray cluster, with light workers; its GPUs are only counted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from nemo_curator.core.serve import DynamoRouterConfig, DynamoServerConfig, DynamoVLLMModelConfig
from ray.util import list_named_actors, placement_group_table

from rollway.integrations.curator import InferenceServer
from rollway.integrations.curator.backend import ServerError
from rollway.stack.ray import launcher
from tests.curator.conftest import GPUS, ROOT, SHIM, run_cluster
from tests.footprint import Footprint
from tests.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]
MakeServer = Callable[..., Any]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster without a dashboard, which Curator's own backend needs (F)."""
    with run_cluster(tmp_path_factory.mktemp("cluster-home"), dashboard=False) as address:
        yield address


@pytest.fixture
def session(cluster: str) -> Iterator[None]:
    """The user's own connection."""
    ray.init(address=cluster, namespace="users", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def make_server(base_model: Path) -> MakeServer:
    def make(*names: str, replicas: int = 1, **fields: Any) -> Any:
        env = {"PYTHONPATH": f"{SHIM}:{ROOT}", **fields.pop("env", {})}
        config = {"request_plane": "tcp", "event_plane": "zmq", **fields.pop("config", {})}
        models = [
            DynamoVLLMModelConfig(str(base_model), model_name=name, num_replicas=replicas)
            for name in names or ("tiny",)
        ]
        backend = DynamoServerConfig(subprocess_env=env, **config)
        defaults = {"models": models, "backend": backend, "health_check_timeout_s": 180}
        return InferenceServer(**{**defaults, **fields})

    return make


def list_ours() -> list[str]:
    """Return our named actors and groups, as the GCS lists them."""
    actors = [actor["name"] for actor in list_named_actors(all_namespaces=True)]
    groups = [
        group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"
    ]
    return [name for name in (*actors, *groups) if name.startswith("rollway")]


def is_clean() -> bool:
    return not list_ours() and ray.available_resources().get("GPU") == GPUS


def list_models(server: Any) -> list[str]:
    with urllib.request.urlopen(f"{server.endpoint}/models", timeout=10) as answer:
        return sorted(entry["id"] for entry in json.load(answer)["data"])


@ray.remote(num_cpus=0)
class Users:
    def answer(self) -> str:
        return "alive"


def test_A_the_users_session_survives(
    session: None, make_server: MakeServer, footprint: Footprint
) -> None:
    users = Users.remote()
    with make_server(replicas=2) as server:
        assert list_models(server) == ["tiny"]
        assert ray.get(users.answer.remote()) == "alive"
        assert ray.get_runtime_context().namespace == "users"
        # Held in groups, so that pipelines see them taken.
        assert ray.available_resources().get("GPU") == GPUS - 2
        manifest = next(Path(server._backend_impl._stack.log_dir).glob("manifest.json"))
        assert "nemo_curator_dynamo_" in str(manifest)
        assert [p["replica"] for p in json.loads(manifest.read_text())["placements"]] == [0, 1]
        assert server._backend_impl._stack.free_cpus == 12 - 3  # two replicas and the services
    assert ray.get(users.answer.remote()) == "alive"
    wait_until(is_clean)
    assert not footprint.settle()


def test_B_C_two_models_and_round_robin(session: None, make_server: MakeServer) -> None:
    config = {"router": DynamoRouterConfig(mode="round_robin")}
    with make_server("orgA/mock", "orgB/mock", config=config) as server:
        assert list_models(server) == ["orgA/mock", "orgB/mock"]
    wait_until(is_clean)


def test_a_port_that_is_taken_is_only_a_preference(session: None, make_server: MakeServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with make_server(port=port) as server:
            assert server.port != port
            assert list_models(server) == ["tiny"]
    wait_until(is_clean)


def test_C_a_model_that_fails_takes_all_down_and_is_named(
    session: None, make_server: MakeServer, footprint: Footprint
) -> None:
    server = make_server("good", "bad")
    server.models[1].runtime_env = {"env_vars": {"SHIM_FAIL": "1"}}
    with pytest.raises(ServerError, match="bad"):
        server.start()
    wait_until(is_clean)
    assert not footprint.settle()
    server.models[1].runtime_env = {}
    with server:  # the next start has all GPUs
        assert list_models(server) == ["bad", "good"]


def test_D_H_ready_means_all_replicas_and_a_timeout_leaves_nothing(
    session: None, make_server: MakeServer, tmp_path: Path, footprint: Footprint
) -> None:
    gate = tmp_path / "gate"
    env = {"SHIM_GATE": str(gate)}
    with pytest.raises(ServerError):
        make_server(replicas=2, env=env, health_check_timeout_s=20).start()
    wait_until(is_clean)
    assert not footprint.settle()
    server = make_server(replicas=2, env=env)
    starting = threading.Thread(target=server.start)
    starting.start()
    try:
        # The first replica is there long before the second.
        wait_until(lambda: Path(f"{gate}.waiting").exists(), 120)
        assert starting.is_alive() and not server._started
    finally:
        gate.touch()
        starting.join()
        server.stop()
    wait_until(is_clean)


DRIVER = """
import sys
from tests.curator.driver import make_server
server = make_server("light")
server.port = 0
server.name = "default"
server.backend.request_plane, server.backend.event_plane = "tcp", "zmq"
print("starting", flush=True)
server.start()
print(server.endpoint, flush=True)
sys.stdin.readline()
server.stop()
print("stopped", flush=True)
"""


@contextlib.contextmanager
def run_driver() -> Iterator[subprocess.Popen[str]]:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield driver
    finally:
        driver.kill()
        driver.wait()


def read_line(driver: subprocess.Popen[str]) -> str:
    assert driver.stdout is not None
    return driver.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_E_a_driver_that_ends_during_the_start(
    session: None, number: signal.Signals, footprint: Footprint
) -> None:
    with run_driver() as driver:
        assert read_line(driver) == "starting"
        wait_until(list_ours, 120)
        driver.send_signal(number)
        driver.wait(120)
    wait_until(is_clean, 120)
    assert not footprint.settle(60)


def test_F_nothing_stays_when_driver_and_owner_are_killed(
    session: None, footprint: Footprint
) -> None:
    with run_driver() as driver:
        read_line(driver)
        assert read_line(driver).startswith("http")
        children = psutil.Process(driver.pid).children(recursive=True)
        for process in (psutil.Process(driver.pid), *children):
            process.kill()
        driver.wait()
    wait_until(is_clean, 120)
    assert not footprint.settle(60)


def test_K_two_drivers_with_one_name(session: None, make_server: MakeServer) -> None:
    with run_driver() as other:
        read_line(other)
        assert read_line(other).startswith("http")
        with make_server(name="default") as server:
            assert list_models(server) == ["tiny"]
        make_server(name="default").stop()  # 8a 1: one that never started stops nothing
        assert other.stdin is not None
        assert len([name for name in list_ours() if name.startswith("rollway/curator")]) == 1
        other.stdin.write("\n")
        other.stdin.flush()
        assert read_line(other) == "stopped"
    wait_until(is_clean)


def test_I_programs_are_looked_for_where_they_run(
    session: None, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # of the driver; NATS is on the node
    with make_server(config={"event_plane": "nats"}) as server:
        assert list_models(server) == ["tiny"]


def test_R_a_worker_that_dies_is_replaced(session: None, make_server: MakeServer) -> None:
    with make_server() as server:
        name = server._backend_impl._stack.spec.name
        first = find_worker(name)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: find_worker(name) not in (first, None), 60)
        wait_until(lambda: list_models(server) == ["tiny"], 60)


def find_worker(name: str) -> int | None:
    """Return the process id of the stack's only worker, once it is ready."""
    stack = launcher.find(name)
    assert stack is not None
    (worker,) = (process for process in stack.state.processes if process.role == "worker")
    return worker.pid if worker.state == "ready" else None
