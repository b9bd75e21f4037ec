"""The server's life on the local launcher: what does not depend on where the stack runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nemo_curator.core import serve as curator
from nemo_curator.core.serve import (
    DynamoRouterConfig,
    DynamoServerConfig,
    DynamoVLLMModelConfig,
    RayServeModelConfig,
)
from nemo_curator.core.serve.dynamo.backend import DynamoBackend
from nemo_curator.core.serve.server import _active_servers

from rollway.errors import UsageError
from rollway.integrations.curator import (
    InferenceServer,
    RollwayServerConfig,
    backend,
    install,
    uninstall,
)
from rollway.integrations.curator.backend import RollwayBackend, ServerError
from rollway.stack.state import list_stacks
from tests.curator.conftest import ROOT
from tests.footprint import Footprint
from tests.light.spec import light
from tests.waiting import wait_until

MakeServer = Callable[..., Any]


@pytest.fixture(autouse=True)
def local_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "make_launcher_fields", lambda: {})


@pytest.fixture
def make_server(base_model: Path, light_env: dict[str, str]) -> MakeServer:
    def make(kind: type = InferenceServer, replicas: int = 1, **fields: Any) -> Any:
        env = {**light_env, **fields.pop("env", {})}
        models = [DynamoVLLMModelConfig(str(base_model), model_name="tiny", num_replicas=replicas)]
        config = DynamoServerConfig(subprocess_env=env, request_plane="tcp", event_plane="zmq")
        defaults = {"models": models, "backend": config, "health_check_timeout_s": 90}
        return kind(**{**defaults, "port": 0, **fields})

    return make


def list_models(server: Any) -> list[str]:
    with urllib.request.urlopen(f"{server.endpoint}/models", timeout=10) as answer:
        return [entry["id"] for entry in json.load(answer)["data"]]


def test_start_stop_and_start_again(make_server: MakeServer, footprint: Footprint) -> None:
    server = make_server(replicas=2)
    for _ in range(2):
        with server:
            assert list_models(server) == ["tiny"]
            assert curator.is_inference_server_active()
            assert server.port > 0 and server._host == "127.0.0.1"
        assert not curator.is_inference_server_active()
        assert server._host == "localhost"
        server.stop()  # does nothing
    assert not footprint.settle()


def test_another_server_is_refused_while_one_runs(make_server: MakeServer) -> None:
    with make_server(name="first"):
        with pytest.raises(RuntimeError, match=r"already active \(running: first\)"):
            make_server(name="second").start()
        assert set(_active_servers) == {"first"}


def test_a_port_that_is_taken_is_only_a_preference(make_server: MakeServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with make_server(port=port) as server:
            assert server.port != port
            assert list_models(server) == ["tiny"]


def test_manifest_and_logs(make_server: MakeServer) -> None:
    with make_server() as server:
        directory = Path(server._backend_impl._stack.log_dir)
        manifest = json.loads((directory / "manifest.json").read_text())
        assert {path.name for path in directory.glob("*.log")} == {"frontend.log", "tiny-0.log"}
    assert manifest["models"] == ["tiny"] and manifest["ready"] is True
    assert manifest["endpoint"].endswith(f":{manifest['port']}/v1")


def test_a_failed_start_leaves_nothing_and_can_be_repeated(
    make_server: MakeServer, footprint: Footprint
) -> None:
    words = "dynamo.vllm: error: unrecognized arguments: --no-such-option 1"  # the engine's own
    server = make_server(env={"SHIM_FAIL": words}, health_check_timeout_s=60)
    with pytest.raises(ServerError) as caught:
        server.start()
    assert "unrecognized arguments: --no-such-option" in caught.value.hint
    assert caught.value.debug_context["models_expected"] == ["tiny"]
    assert isinstance(caught.value, RuntimeError)
    assert (server._host, server.port, server._started) == ("localhost", 0, False)
    assert not curator.is_inference_server_active()
    assert not footprint.settle()


def test_wrong_configs_are_value_errors(make_server: MakeServer) -> None:
    with pytest.raises(ValueError, match="At least one"):
        make_server(models=[]).start()
    with pytest.raises(ValueError, match=r"`request_plane`.*\(got 'quic'\)"):
        make_server(backend=DynamoServerConfig(request_plane="quic")).start()
    with pytest.raises(ValueError, match=r"`router.mode`.*\(got 'foo'\)"):
        router = DynamoRouterConfig(mode="foo")
        make_server(backend=DynamoServerConfig(router=router)).start()
    for mode in ("foo", "disaggregated"):
        with pytest.raises(ValueError, match=rf"mode of 'm' is '{mode}'.*mode='disagg'"):
            make_server(models=[DynamoVLLMModelConfig("m", mode=mode)]).start()
    with pytest.raises(TypeError, match="accepts DynamoVLLMModelConfig, but got RayServe"):
        make_server(models=[RayServeModelConfig("m")])

    class Special(DynamoVLLMModelConfig):  # type: ignore[misc]
        pass

    with pytest.raises(TypeError, match="must be the same config type"):
        make_server(models=[DynamoVLLMModelConfig("a"), Special("b")])


def test_no_engine_is_said_before_anything_starts(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLWAY_ENGINE_PYTHON")
    with pytest.raises(ValueError, match="ROLLWAY_ENGINE_PYTHON"):
        make_server().start()


@pytest.mark.parametrize(("free_cpus", "is_warned"), [(0.5, True), (1.0, False), (None, False)])
def test_a_server_that_leaves_no_cpu_to_pipelines_warns(
    make_server: MakeServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    free_cpus: float | None,
    is_warned: bool,
) -> None:
    stack = SimpleNamespace(free_cpus=free_cpus, frontend="nowhere", stop=lambda: None)
    monkeypatch.setattr(backend, "start_stack", lambda spec: stack)
    with pytest.raises(ValueError, match="nowhere"):
        make_server().start()
    assert ("a pipeline would wait forever" in caplog.text) is is_warned


DRIVER = """
import sys
from rollway.integrations.curator import backend, DynamoServerConfig, DynamoVLLMModelConfig
from rollway.integrations.curator import InferenceServer
backend.make_launcher_fields = lambda: {}
path, pythonpath = sys.argv[1:]
config = DynamoServerConfig(subprocess_env={"PYTHONPATH": pythonpath, "LIGHT_LOAD_SECONDS": "60"},
                            request_plane="tcp", event_plane="zmq")
server = InferenceServer(models=[DynamoVLLMModelConfig(path, model_name="tiny")], backend=config,
                         port=0)
print("starting", flush=True)
server.start()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("moment", ["starting", "ready"])
def test_a_driver_that_ends_takes_the_stack_with_it(
    number: signal.Signals,
    moment: str,
    base_model: Path,
    light_env: dict[str, str],
    footprint: Footprint,
) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(base_model), light_env["PYTHONPATH"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "starting\n"
    if moment == "ready":
        assert driver.stdout.readline() == "ready\n"
    wait_until(lambda: bool(list_stacks()))
    driver.send_signal(number)
    driver.wait(60)
    assert not footprint.settle(60)


# --- RollwayServerConfig -------------------------------------------------------------------------


def test_a_stack_of_your_own(base_model: Path, tmp_path: Path) -> None:
    stack = light(base_model, "own", replicas=1)
    stack["python"] = os.environ["ROLLWAY_ENGINE_PYTHON"]
    with InferenceServer(models=[], backend=RollwayServerConfig(stack=stack), port=0) as server:
        assert list_models(server) == ["tiny"]
        assert [state.name for state in list_stacks()] == ["own"]
        uninvolved = RollwayServerConfig(stack=f"http://127.0.0.1:{server.port}")
        _active_servers.clear()  # as in another process
        with InferenceServer(models=[], backend=uninvolved, name="second") as second:
            assert second.endpoint == server.endpoint
        assert list_models(server) == ["tiny"]  # it was not started here, so it was not stopped
        _active_servers.add(server.name)


def test_a_port_that_the_stack_names_is_no_preference(base_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        stack = {**light(base_model, "own", replicas=1), "frontend": {"port": port}}
        stack["python"] = os.environ["ROLLWAY_ENGINE_PYTHON"]
        with pytest.raises(ServerError, match=str(port)):
            InferenceServer(models=[], backend=RollwayServerConfig(stack=stack)).start()


def test_an_address_where_nothing_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    config = RollwayServerConfig(stack=f"http://127.0.0.1:{port}/v1")
    with pytest.raises(ServerError, match="No model appeared at"):
        InferenceServer(models=[], backend=config, health_check_timeout_s=1).start()


def test_a_stack_and_keywords_that_contradict(base_model: Path) -> None:
    stack = {**light(base_model, "own"), "frontend": {"port": 8123}}
    with pytest.raises(ValueError, match=r"frontend.port 8123, and the server port 9000"):
        InferenceServer(models=[], backend=RollwayServerConfig(stack=stack), port=9000).start()
    with pytest.raises(TypeError, match=r"takes its models from the stack.* Give models=\[\]"):
        InferenceServer(
            models=[DynamoVLLMModelConfig("m")], backend=RollwayServerConfig(stack=stack)
        )
    for nothing in ("", None, 3):
        with pytest.raises(UsageError, match="names no stack"):
            RollwayServerConfig(nothing)
    for address in ("https://host:1", "http://:80", "http://host:99999"):
        with pytest.raises(ValueError, match="not an address that Curator's server can name"):
            InferenceServer(models=[], backend=RollwayServerConfig(stack=address)).start()
    with pytest.raises(UsageError, match=r"no file no-such\.yaml"):
        InferenceServer(models=[], backend=RollwayServerConfig(stack="no-such.yaml")).start()


# --- install -------------------------------------------------------------------------------------


def choose(**fields: Any) -> Any:
    server = curator.InferenceServer(
        models=[DynamoVLLMModelConfig("m")], backend=DynamoServerConfig(), **fields
    )
    return server._create_backend()


def test_install_and_uninstall() -> None:
    own = curator.InferenceServer._create_backend
    assert isinstance(choose(), DynamoBackend)
    install()
    install()
    assert isinstance(choose(), RollwayBackend)
    uninstall()
    assert isinstance(choose(), DynamoBackend)
    assert curator.InferenceServer._create_backend is own
    uninstall()


def test_install_leaves_ray_serve_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    server = curator.InferenceServer(models=[RayServeModelConfig("m")])
    backend_kind = type(server._create_backend()).__name__
    assert backend_kind == "RayServeBackend"


def test_a_wrapper_around_ours_survives_uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    below = curator.InferenceServer._create_backend
    calls = []

    def wrapper(server: Any) -> Any:
        calls.append(server)
        return below(server)

    with monkeypatch.context() as patch:
        patch.setattr(curator.InferenceServer, "_create_backend", wrapper)
        for _ in range(2):
            uninstall()
            assert isinstance(choose(), DynamoBackend) and calls
            install()
            assert isinstance(choose(), RollwayBackend)


def test_install_from_many_threads() -> None:
    own = curator.InferenceServer._create_backend
    start = threading.Barrier(16)

    def flip() -> None:
        start.wait()
        for _ in range(200):
            install()
            uninstall()

    threads = [threading.Thread(target=flip) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert curator.InferenceServer._create_backend is own


def test_curators_own_server_runs_on_rollway_after_install(make_server: MakeServer) -> None:
    install()
    with make_server(kind=curator.InferenceServer) as server:
        assert list_models(server) == ["tiny"]
        assert isinstance(server._backend_impl, RollwayBackend)
