"""`inference @ FILE`, as prime-rl's launcher starts and ends it, with light workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollway.integrations.prime_rl.inference import write_shim
from tests.footprint import Footprint
from tests.light.spec import ROOT
from tests.stack.prime_rl import PAUSE, broadcast, make_request
from tests.waiting import wait_until

pytestmark = pytest.mark.stack

LIGHT = {
    "engine": "custom", "module": "tests.light.worker", "env.PYTHONPATH": str(ROOT),
    "args": "{}",
}  # fmt: skip


@dataclass
class Child:
    """One `inference @ FILE`."""

    directory: Path
    port: int
    admin_port: int
    process: subprocess.Popen[str]

    def ask(self, path: str, body: Any = None, *, admin: bool = False, post: bool = False) -> int:
        port = self.admin_port if admin else self.port
        data = json.dumps(body).encode() if body is not None else b"" if post else None
        # As prime-rl does: without a body there is no content type either.
        headers = {"content-type": "application/json" if body is not None else ""}
        headers["authorization"] = "Bearer child"
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


@pytest.fixture
def child(
    base_model: Path, tmp_path: Path, own_home: Path, footprint: Footprint
) -> Iterator[Child]:
    """Start it by its name on PATH, in the directory of the run."""
    port, admin_port = find_ports()
    config = {
        "server": {"host": None, "port": port},
        "backend_port": admin_port,
        "vllm": {"model": str(base_model), "data_parallel_size": 2, "served_model_name": "tiny"},
    }
    (tmp_path / "inference.json").write_text(json.dumps(config))
    shim = write_shim(tmp_path / "bin")
    overrides = [f"--set=models.0.{name}={value}" for name, value in LIGHT.items()]
    process = subprocess.Popen(
        ["inference", "@", "inference.json", *overrides],
        cwd=tmp_path,
        env={
            **os.environ, "PATH": f"{shim.parent}{os.pathsep}{os.environ['PATH']}",
            "VLLM_API_KEY": "child",
        },
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    yield Child(tmp_path, port, admin_port, process)
    process.kill()
    process.wait()


def find_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


def wait_ready(child: Child) -> None:
    assert child.process.stdout is not None
    line = child.process.stdout.readline()
    assert "takes admin calls" in line, line


def test_it_serves_both_ports_and_ends_with_its_workers(
    child: Child, base_model: Path, footprint: Footprint
) -> None:
    wait_ready(child)
    assert child.ask("/health") == 200 and child.ask("/health", admin=True) == 200
    broadcast(child.directory, 0, base_model)
    assert child.ask(PAUSE, admin=True, post=True) == 200
    # Relative to the directory that the launcher was started in.
    assert child.ask("/update_weights", {"weight_dir": "broadcasts/step_0"}, admin=True) == 200
    assert child.ask("/resume", admin=True, post=True) == 200
    assert child.ask("/inference/v1/generate", make_request([1, 2, 3])) == 200
    assert child.ask("/resume", post=True) == 404  # not on the address of the rollouts
    child.process.send_signal(signal.SIGTERM)
    assert child.process.wait(60) == 0
    assert footprint.settle() == {}


def test_a_signal_during_the_start_leaves_nothing(child: Child, footprint: Footprint) -> None:
    wait_until(lambda: len(footprint.new().get("processes", ())) > 2, 60)
    child.process.send_signal(signal.SIGTERM)
    assert child.process.wait(60) == 0
    assert footprint.settle() == {}


def test_killed_it_leaves_nothing(child: Child, footprint: Footprint) -> None:
    wait_ready(child)
    child.process.kill()
    assert footprint.settle(60) == {}


def test_a_port_that_is_taken_is_refused_before_the_start(
    base_model: Path, tmp_path: Path, own_home: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = {"server": {"port": port}, "vllm": {"model": str(base_model)}}
        (tmp_path / "inference.json").write_text(json.dumps(config))
        errors = []
        for key in ("child", "EMPTY"):
            ran = subprocess.run(
                [sys.executable, "-m", "rollway.cli", "prime-rl", "inference", "@",
                 "inference.json"],
                cwd=tmp_path, env={**os.environ, "VLLM_API_KEY": key},
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert ran.returncode == 2
            errors.append(ran.stderr)
    assert "inference.server.port" in errors[0]
    # Without a key of the launcher's, nobody could make admin calls, or everybody.
    assert "VLLM_API_KEY is not set" in errors[1]
