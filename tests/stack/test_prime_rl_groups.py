"""prime-rl's `nccl` broadcast, over gloo, into many light workers, and with a server that dies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file

import rollway
from rollway.integrations.prime_rl.broadcast import CollectiveSender
from tests.light.spec import light
from tests.stack.policies import Policy
from tests.stack.prime_rl import (
    PAUSE,
    PrimeServer,
    broadcast,
    form_group,
    read_logprobs,
    send_step,
)
from tests.stack.serving import TOLERANCE, fresh_prompt
from tests.waiting import wait_until

pytestmark = pytest.mark.stack
WORKERS = 8


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prime-rl-groups")


@pytest.fixture(autouse=True)
def in_module_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWAY_HOME", str(home))


@pytest.fixture(scope="module")
def stack(home: Path, base_model: Path) -> Iterator[rollway.Stack]:
    # All workers in one process: eight imports of torch would take most of the time.
    spec = light(base_model, "groups")
    spec["models"][0] |= {"replicas": 1, "args": {"count": WORKERS}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(home))
        opening = rollway.up(spec)
        running = opening.__enter__()
    yield running
    opening.__exit__(None, None, None)


@pytest.fixture(scope="module")
def server(stack: rollway.Stack, home: Path) -> Iterator[PrimeServer]:
    running = PrimeServer("groups", home, env={"ROLLWAY_HOME": str(home)}).start()
    yield running
    running.end()


@pytest.fixture
def sender(server: PrimeServer) -> Iterator[CollectiveSender]:
    with CollectiveSender("127.0.0.1", 0, WORKERS, 60, output_dir=server.output_dir) as opened:
        form_group(server, opened, WORKERS)
        yield opened


def check_served(server: PrimeServer, policy: Policy, count: int = 12) -> None:
    for _ in range(count):
        prompt = fresh_prompt(20)
        answer = server.generate(prompt)
        tokens = answer["choices"][0]["token_ids"]
        assert policy.distance(prompt, tokens, read_logprobs(answer)) < TOLERANCE


def test_eight_workers_receive_every_step(
    server: PrimeServer, sender: CollectiveSender, stack: rollway.Stack, policies: list[Policy]
) -> None:
    for step, policy in enumerate(policies[1:3]):
        tensors = load_file(policy.path / "model.safetensors")
        status, answer = send_step(server, sender, step, tensors.items())
        assert status == 200, answer
        assert server.post("/resume")[0] == 200
        check_served(server, policy)
        versions = stack.fleet.read_versions()
        assert len(versions) == WORKERS and set(versions.values()) == {answer["weight_version"]}


def test_a_server_that_is_killed_in_a_broadcast_takes_what_has_arrived(
    server: PrimeServer, sender: CollectiveSender, policies: list[Policy]
) -> None:
    tensors = load_file(policies[1].path / "model.safetensors")
    directory = server.output_dir / "broadcasts" / "step_7"
    before = server.metrics()["rollway_weight_updates"]
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(sender.send, 7, tensors.items())
        wait_until(lambda: (directory / "STABLE").exists(), 30)
        assert server.post(PAUSE)[0] == 200
        body = {"weight_dir": "broadcasts/step_7"}
        asked = pool.submit(server.post, "/update_weights", body)
        # Its workers are told to receive; the trainer has not begun.
        wait_until(lambda: server.metrics()["rollway_weight_updates"] > before, 30)
        server.end(kill=True)
        with pytest.raises(OSError):
            asked.result(30)
        server.start()
        assert server.post("/resume")[0] == 409, "workers may differ"
        (directory / "NCCL_READY").touch()
        status, answer = server.post("/update_weights", body)  # prime-rl repeats it
        assert status == 200, answer
        sending.result(30)
    assert server.post("/resume")[0] == 200
    check_served(server, policies[1])


def test_a_run_by_files_follows_one_by_a_group(
    server: PrimeServer, stack: rollway.Stack, policies: list[Policy]
) -> None:
    with CollectiveSender("127.0.0.1", 0, WORKERS, 60, output_dir=server.output_dir) as sender:
        form_group(server, sender, WORKERS)
    # The server was told no type, and is started again between the two runs.
    server.end()
    server.start()
    server.update(broadcast(server.output_dir, 20, policies[2].path))
    check_served(server, policies[2])
    assert len(set(stack.fleet.read_versions().values())) == 1
