"""What runs behind the pods of a graph: a real frontend with light workers, or a stub of both."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

from rollway.processes import die_with_parent
from tests.light.spec import ROOT

MODEL = "tiny"
SECRET = "of-the-tests"
"""What orders to light workers are signed with."""


class Backing(Protocol):
    """The processes of one graph."""

    ports: dict[int, int]
    """The local port for each port of the frontend's Service."""

    def start(self, pod: str, component: str) -> None: ...
    def stop(self, pod: str) -> None: ...
    def is_up(self, pod: str) -> bool: ...
    def get_env(self, pod: str) -> dict[str, str]: ...
    def read_log(self, pod: str) -> Sequence[str]: ...
    def close(self) -> None: ...


class LightGraph:
    """A real `dynamo.frontend` and light workers (tests/light), one process for each pod.

    Workers register in the namespace with the operator's suffix. They find each other by files."""

    def __init__(
        self, namespace: str, address: str, model: Path, folder: Path, served: str = MODEL
    ) -> None:
        self._served = served
        self._namespace = namespace
        self._address = address
        self._model = model
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._urls: dict[str, str] = {}
        self._env: dict[str, dict[str, str]] = {}
        self.worker_env = {"ROLLWAY_WEIGHTS_SECRET": SECRET}
        """More environment for workers that start from now on."""
        http, rl = find_port(address), find_port(address)
        self.ports = {8000: http, 8001: rl}

    def start(self, pod: str, component: str) -> None:
        if pod in self._processes:
            return
        host = self._address
        env = {
            "DYN_NAMESPACE": self._namespace,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self._folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
            "DYN_TCP_RPC_HOST": host,
            "DYN_TCP_RESPONSE_STREAM_HOST": host,
            "DYN_EVENT_PLANE_HOST": host,
        }
        if component == "frontend":
            http, rl = self.ports[8000], self.ports[8001]
            command = ["-m", "dynamo.frontend", "--http-host", host, "--http-port", str(http)]
            env |= {
                "DYN_NAMESPACE_PREFIX": self._namespace,
                "DYN_ENABLE_RL": "true",
                "DYN_RL_HOST": host,
                "DYN_RL_PORT": str(rl),
            }
            self._urls[pod] = f"http://{host}:{http}/health"
            self._env[pod] = {"DYN_RL_PORT": str(rl)}
        else:
            port = find_port(host)
            endpoint = f"dyn://{self._namespace}-0123abcd.{MODEL}.generate"
            command = ["-m", "tests.light.worker", "--model", str(self._model)]
            command += ["--served-model-name", self._served, "--endpoint", endpoint]
            env |= {"DYN_SYSTEM_HOST": host, "DYN_SYSTEM_PORT": str(port), **self.worker_env}
            self._urls[pod] = f"http://{host}:{port}/health"
            self._env[pod] = {"DYN_SYSTEM_PORT": str(port)}
        self._folder.mkdir(parents=True, exist_ok=True)
        paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        with (self._folder / f"{pod}.log").open("ab") as log:
            self._processes[pod] = subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, "PYTHONPATH": paths, **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def stop(self, pod: str) -> None:
        process = self._processes.pop(pod, None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def is_up(self, pod: str) -> bool:
        process = self._processes.get(pod)
        return process is not None and process.poll() is None and _answers(self._urls[pod])

    def get_env(self, pod: str) -> dict[str, str]:
        return self._env.get(pod, {})

    def read_log(self, pod: str) -> Sequence[str]:
        log = self._folder / f"{pod}.log"
        return log.read_text().splitlines() if log.exists() else []

    def close(self) -> None:
        for pod in list(self._processes):
            self.stop(pod)


class StubGraph:
    """A stub of a frontend, for tests with many graphs: it lists the workers that were started.

    It is a mock: a real one takes seconds of CPU to start, and these tests are about pods."""

    def __init__(self, namespace: str, address: str, served: str = MODEL) -> None:
        self._namespace = namespace
        self._pods: dict[str, str] = {}
        self.status = 200
        """What it answers to everything; not 200 is a frontend that does not serve."""
        self.listed: int | None = None
        """How many workers it lists; None for all."""
        self.models = [served]
        self._server = ThreadingHTTPServer((address, 0), self._make_handler())
        self.ports = {8000: int(self._server.server_address[1])}
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def start(self, pod: str, component: str) -> None:
        self._pods[pod] = component

    def stop(self, pod: str) -> None:
        self._pods.pop(pod, None)

    def is_up(self, pod: str) -> bool:
        return pod in self._pods

    def get_env(self, pod: str) -> dict[str, str]:
        return {}

    def read_log(self, pod: str) -> Sequence[str]:
        return [f"{pod} started", "waiting for weights"]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> object:
        workers = [pod for pod, component in self._pods.items() if component != "frontend"]
        if path.startswith("/v1/models"):
            return {"data": [{"id": name} for name in (self.models if workers else [])]}
        instances = [
            {
                "namespace": f"{self._namespace}-0123abcd",
                "component": self._pods[pod] if self._pods[pod] == "prefill" else "backend",
                "endpoint": "generate",
                "instance_id": number + 1,
            }
            for number, pod in enumerate(workers[: self.listed])
        ]
        return {"status": "healthy", "instances": instances}

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        graph = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(graph.answer(self.path)).encode()
                self.send_response(graph.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def find_port(host: str) -> int:
    """Return a free port below 32768: Dynamo reads its system port as a signed 16-bit number."""
    for port in random.sample(range(20000, 32000), 200):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((host, port))
            return port
    raise OSError(f"{host} has no free port")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except urllib.error.HTTPError:
        return False
    except OSError:
        return False
