"""A prime-rl inference server in a process of its own, and what prime-rl's trainer writes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import rollway
from rollway.integrations.prime_rl.broadcast import CollectiveSender
from tests.light.spec import light
from tests.stack.policies import Policy
from tests.stack.serving import some_rollouts
from tests.waiting import wait_until

PAUSE = "/pause?mode=keep&clear_cache=false"
GENERATE = "/inference/v1/generate"


@contextlib.contextmanager
def light_stack(base_model: Path, home: Path, output_dir: Path) -> Iterator[rollway.Stack]:
    """Two light workers that take orders, as real ones do, and may read the trainer's output."""
    spec = light(base_model, "prime", LIGHT_STEP_SECONDS="0.01")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(home))
        opening = rollway.up({**spec, "checkpoint_roots": [str(output_dir)]})
        running = opening.__enter__()
    yield running
    opening.__exit__(None, None, None)


@contextlib.contextmanager
def serve_shared(
    stack: rollway.Stack, home: Path, versions: Iterator[int], output_dir: Path, broadcast: str
) -> Iterator[PrimeServer]:
    """A server in front of the stack that all tests share."""
    options = "--weight-broadcast", broadcast
    running = PrimeServer("shared", output_dir, options, env={"ROLLWAY_HOME": str(home)}).start()
    yield running
    newest = max(rollout.weight_version or 0 for rollout in some_rollouts(stack, 1))
    running.end()
    # The server chose its own versions; other tests of this stack must count on from there.
    while next(versions) < newest:
        pass


@dataclass
class PrimeServer:
    """`rollway prime-rl serve` in front of a running stack."""

    stack: str
    output_dir: Path
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[str] | None = None
    ready: dict[str, str] = field(default_factory=dict)

    def start(self) -> PrimeServer:
        """Start it; once it has had a port, it gets the same one again."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollway.cli", "prime-rl", "serve", self.stack, "--json",
             "--port", str(self.port), "--journal", str(self.output_dir / "store/gateway.sqlite"),
             "--output-dir", str(self.output_dir), *self.options],
            env={**os.environ, **self.env}, stdout=subprocess.PIPE, stderr=self.log.open("a"),
            text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("{"), f"the server did not start:\n{self.log.read_text()[-2000:]}"
        self.ready = json.loads(line)
        self.port = int(self.url.rpartition(":")[2])
        return self

    def end(self, *, kill: bool = False) -> None:
        assert self.process is not None
        (self.process.kill if kill else self.process.terminate)()
        assert self.process.wait(60) == (-9 if kill else 0)

    @property
    def url(self) -> str:
        return self.ready["url"].removesuffix("/v1")

    @property
    def admin_url(self) -> str:
        return self.ready.get("admin_url", self.ready["url"]).removesuffix("/v1")

    @property
    def log(self) -> Path:
        return self.output_dir / "server.log"

    @property
    def token(self) -> str:
        """The token that the server has made for admin calls, as its user reads it."""
        home = self.env.get("ROLLWAY_HOME") or os.environ["ROLLWAY_HOME"]
        file = Path(home, "prime-rl", "token")
        return file.read_text() if file.exists() else "EMPTY"

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return self._send(urllib.request.Request(f"{self.url}{path}", headers=headers))

    def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """POST as prime-rl does: without a body there is no content type either."""
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method="POST")
        if body is not None:
            request.add_header("content-type", "application/json")
        else:
            request.add_unredirected_header("content-type", "")
        return self._send(request)

    def update(self, directory: Path | str) -> None:
        """Broadcast a directory as the orchestrator does."""
        assert self.post(PAUSE) == (200, {"status": "paused"})
        status, answer = self.post("/update_weights", {"weight_dir": str(directory)})
        assert (status, answer["status"]) == (200, "ok"), answer
        assert self.post("/resume") == (200, {"status": "resumed"})

    def generate(self, prompt: list[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """Send what `renderers` sends, and return its reply after its own checks."""
        status, answer = self.post(GENERATE, make_request(prompt, max_tokens, **more))
        assert status == 200, answer
        check_reply(answer)
        return dict(answer)

    def metrics(self) -> dict[str, float]:
        """Return Rollway's own series."""
        own = (
            line.split() for line in self.read_page().splitlines() if line.startswith("rollway_")
        )
        return {name: float(value) for name, value in own}

    def read_page(self) -> str:
        request = urllib.request.Request(f"{self.url}/metrics")
        request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())

    def _send(self, request: urllib.request.Request) -> tuple[int, Any]:
        if not request.has_header("Authorization"):
            request.add_header("Authorization", f"Bearer {self.token}")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


def make_request(prompt: list[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    """Return the body that was captured from renderers 0.1.12."""
    params = {
        "temperature": 1.0, "top_p": 1.0, "max_tokens": max_tokens, "top_k": -1, "min_p": 0.0,
        "return_token_ids": True, "logprobs": 1, "stop_token_ids": [1],
        "skip_special_tokens": False, **more,
    }  # fmt: skip
    return {"model": "tiny", "token_ids": prompt, "sampling_params": params, "cache_salt": "3"}


def check_reply(answer: dict[str, Any]) -> None:
    """Apply the checks of renderers 0.1.12, which end an episode."""
    (choice,) = answer["choices"]
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in ids]
    assert all(-9999.0 < entry["logprob"] <= 1e-5 for entry in content)
    assert choice["finish_reason"] in ("stop", "length") and choice["index"] == 0
    assert answer["prompt_logprobs"] is None and answer["request_id"]


def read_logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]


def broadcast(
    output_dir: Path, step: int, checkpoint: Path, markers: tuple[str, ...] = ("STABLE",)
) -> Path:
    """Write a step as prime-rl's trainer does: sharded weights, an index, no config, a marker."""
    directory = output_dir / "broadcasts" / f"step_{step}"
    directory.mkdir(parents=True, exist_ok=True)
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    shards = [names[::2], names[1::2]]
    files = [f"model-{i + 1:05}-of-00002.safetensors" for i in range(2)]
    for file, part in zip(files, shards, strict=True):
        save_file({name: tensors[name] for name in part}, directory / file)
    where = {name: file for file, part in zip(files, shards, strict=True) for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for marker in markers:
        (directory / marker).touch()
    return directory


def init_group(server: PrimeServer, port: int, ranks: int = 2, **more: Any) -> tuple[int, Any]:
    body = {"host": "127.0.0.1", "port": port, "rank_offset": 0, "inference_world_size": ranks}
    return server.post("/init_broadcaster", {**body, "timeout": 60, **more})


def form_group(server: PrimeServer, sender: CollectiveSender, ranks: int = 2) -> None:
    """Form a group, as orchestrator and trainer do at the same time."""
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(init_group, server, sender.port, ranks)
        sender.connect()
        status, answer = joined.result(90)
        assert status == 200, answer


def send_step(
    server: PrimeServer, sender: CollectiveSender, step: int, tensors: Any
) -> tuple[int, Any]:
    """Broadcast a step; play the orchestrator's part of it."""
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, step, tensors)
        directory = server.output_dir / "broadcasts" / f"step_{step}"
        wait_until(lambda: (directory / "STABLE").exists(), 30)
        assert server.post(PAUSE)[0] == 200
        (directory / "NCCL_READY").touch()
        answer = server.post("/update_weights", {"weight_dir": f"broadcasts/step_{step}"})
        sending.result(60)
    return answer


def distance(policy: Policy, prompt: list[int], answer: dict[str, object]) -> float:
    ids = answer["choices"][0]["token_ids"]  # type: ignore[index]
    return policy.distance(prompt, ids, read_logprobs(answer))


@pytest.fixture(scope="module", name="server")
def shared_server(
    request: pytest.FixtureRequest,
    vllm_stack: rollway.Stack,
    session_home: Path,
    versions: Iterator[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PrimeServer]:
    """A server in front of the session's real workers. A module names its type of broadcasts: one
    that is not named is that of the server before."""
    output_dir = tmp_path_factory.mktemp("outputs")
    broadcast = request.module.BROADCAST
    with serve_shared(vllm_stack, session_home, versions, output_dir, broadcast) as running:
        yield running


# --- fixtures of a module's own light stack ---------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prime-rl-home")


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def stack(home: Path, output_dir: Path, base_model: Path) -> Iterator[rollway.Stack]:
    with light_stack(base_model, home, output_dir) as running:
        yield running


@pytest.fixture(scope="module")
def server(stack: rollway.Stack, home: Path, output_dir: Path) -> Iterator[PrimeServer]:
    running = PrimeServer("prime", output_dir, env={"ROLLWAY_HOME": str(home)}).start()
    yield running
    running.end()


@pytest.fixture(autouse=True)
def in_module_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWAY_HOME", str(home))
