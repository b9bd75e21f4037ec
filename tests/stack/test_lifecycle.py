"""Starting, watching and ending stacks. Mocker workers: a whole stack starts in a second, and the
supervisor does not know the difference. What only vLLM does is in test_vllm_stack.py."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import rollway
from rollway.errors import PortInUse, RollwayError, StackNotRunning, StartError
from rollway.observe.read import Run
from rollway.rollout.sampling import Sampling
from rollway.stack import local
from rollway.stack.state import StackDir, find_record_dir
from tests.children import start_child
from tests.conftest import Cli, Footprint
from tests.light.spec import light
from tests.stack.mocker import mocker_spec
from tests.stack.policies import Policy
from tests.stack.serving import SHORT, TOLERANCE, read_state, worst
from tests.waiting import wait_until, wait_until_async

pytestmark = pytest.mark.stack

NO_LOGPROBS = Sampling(max_tokens=8, logprobs=False)


def test_up_serves_and_leaves_nothing(base_model: Path, footprint: Footprint) -> None:
    with rollway.up(mocker_spec(base_model)) as stack:
        group = stack.rollouts().generate([1, 2, 3], NO_LOGPROBS, n=3)
        assert [len(rollout.token_ids) for rollout in group] == [8, 8, 8]
        assert group[0].weight_version is None  # a mocker has no weights to name
        assert all(process.state == "ready" for process in read_state("t").processes)
    assert StackDir("t").read() is None
    assert footprint.new() == {}


async def test_the_same_api_works_in_async_code(base_model: Path, footprint: Footprint) -> None:
    async with rollway.up(mocker_spec(base_model)) as stack:
        group = await stack.rollouts().generate([1, 2, 3], NO_LOGPROBS, n=2)
        assert len(group) == 2
    assert footprint.new() == {}


async def test_cancelled_start_leaves_nothing(base_model: Path, footprint: Footprint) -> None:
    async def hold() -> None:
        async with rollway.up(mocker_spec(base_model)):
            await asyncio.Event().wait()

    async def is_starting() -> bool:
        state = StackDir("t").read()
        return state is not None and bool(state.processes)

    task = asyncio.create_task(hold())
    await wait_until_async(is_starting, every=0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert footprint.new() == {}


def test_restart_after_stop_works(base_model: Path) -> None:
    for _ in range(2):
        with rollway.up(mocker_spec(base_model)) as stack:
            assert stack.rollouts().generate([1], NO_LOGPROBS)


def test_a_name_runs_once(base_model: Path) -> None:
    with rollway.up(mocker_spec(base_model)):
        with pytest.raises(StartError, match="already running"):
            rollway.up(mocker_spec(base_model)).__enter__()
        assert read_state("t").phase == "ready"


def test_two_stacks_started_at_once_share_no_port(base_model: Path) -> None:
    running: list[local.RunningStack] = []

    def start(name: str) -> None:
        running.append(local.start(mocker_spec(base_model, name)))

    threads = [threading.Thread(target=start, args=(f"s{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        ports = [p for stack in running for proc in stack.state.processes
                 for p in proc.ports.values()]  # fmt: skip
        assert len(running) == 3
        assert len(ports) == len(set(ports))
        assert max(ports) < 32768
    finally:
        for stack in running:
            stack.stop()


def test_a_dead_worker_is_restarted_and_the_event_recorded(base_model: Path) -> None:
    with rollway.up(mocker_spec(base_model)) as stack:
        victim = next(p for p in read_state("t").processes if p.name == "tiny-0")
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: _process("tiny-0").restarts == 1 and _process("tiny-0").state == "ready")
        assert stack.rollouts().generate([1, 2, 3], NO_LOGPROBS, n=4)
        directory = find_record_dir(read_state("t"))
        assert directory is not None
        events = [(e["event"], e.get("worker")) for e in Run(directory).read() if "event" in e]
        assert ("exited", "tiny-0") in events
        assert ("restarting", "tiny-0") in events


def test_a_dead_frontend_is_restarted_on_its_port(base_model: Path) -> None:
    with rollway.up(mocker_spec(base_model)) as stack:
        os.kill(_process("frontend").pid or 0, signal.SIGKILL)
        wait_until(lambda: _process("frontend").restarts == 1)
        group = stack.rollouts().generate([1, 2, 3], NO_LOGPROBS)  # retried until it is back
        assert len(group) == 1


def test_a_worker_that_always_dies_is_not_restarted_forever(base_model: Path) -> None:
    quick = {"backoff_seconds": 0.1, "max_failures": 2}
    with rollway.up(mocker_spec(base_model, restart=quick)):
        deaths = 0

        def is_given_up() -> bool:
            nonlocal deaths
            process = _process("tiny-0")
            if process.state in ("starting", "ready", "registered") and process.restarts == deaths:
                os.kill(process.pid or 0, signal.SIGKILL)
                deaths += 1
            return process.state == "failed"

        wait_until(is_given_up)
        assert deaths == 3
        assert "not restarted" in _process("tiny-0").detail


def _process(name: str, stack: str = "t"):  # type: ignore[no-untyped-def]
    return next(p for p in read_state(stack).processes if p.name == name)


HOLD = """
import sys, rollway
with rollway.up(rollway.make_spec({spec!r})) as stack:
    print("ready", flush=True)
    sys.stdin.read()
"""


def owner_of_a_stack(base_model: Path, name: str = "t") -> subprocess.Popen[str]:
    spec = mocker_spec(base_model, name).model_dump(mode="json")
    owner, line = start_child(HOLD.format(spec=spec), stderr=subprocess.DEVNULL)
    assert line == "ready"
    return owner


def test_a_supervisor_outlives_the_shell_between_it_and_its_owner(
    base_model: Path, footprint: Footprint
) -> None:
    """Ray kills the children of an actor that it ends; the lifeline must end the stack."""
    spec = mocker_spec(base_model, "grandchild")
    stacks = [local.start(spec, as_grandchild=True)]
    stacks[0].stop()
    assert stacks[0]._supervisor.process.returncode == 0
    stacks.append(local.start(spec, as_grandchild=True))
    stacks[1]._supervisor.process.kill()
    stacks[1]._supervisor.process.wait()
    assert stacks[1].state.supervisor.alive
    stacks[1]._supervisor.let_go()
    wait_until(lambda: not stacks[1].state.supervisor.alive, 30)
    assert footprint.settle() == {}


def test_the_error_of_a_supervisor_behind_a_shell_keeps_its_type(
    base_model: Path, footprint: Footprint
) -> None:
    """It has ended by the time that somebody looks, and its parent is not known any more."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        spec = mocker_spec(base_model, "grandchild", frontend={"port": port})
        with pytest.raises(PortInUse, match=str(port)):
            local.start(spec, as_grandchild=True)
    assert footprint.settle() == {}


def test_killing_the_owner_ends_the_stack(base_model: Path, footprint: Footprint) -> None:
    owner = owner_of_a_stack(base_model)
    owner.kill()
    owner.wait()
    assert footprint.settle() == {}
    assert StackDir("t").read() is None


@pytest.mark.parametrize("clear", ["down", "up"])
def test_the_next_command_cleans_up_after_a_killed_supervisor_and_owner(
    base_model: Path, footprint: Footprint, cli: Cli, clear: str
) -> None:
    owner = owner_of_a_stack(base_model)
    state = read_state("t")
    # Stopped first, so that the children cannot act on the signal the kernel sends them.
    for process in state.processes:
        os.kill(process.pid or 0, signal.SIGSTOP)
    os.kill(state.supervisor_pid, signal.SIGKILL)
    owner.kill()
    owner.wait()
    assert footprint.new()["processes"]
    if clear == "down":
        result = cli("down")
        assert result.returncode == 0, result.stderr
    else:
        with rollway.up(mocker_spec(base_model)):
            pass
    assert footprint.settle() == {}


def test_a_stack_of_another_name_is_not_touched(base_model: Path, cli: Cli) -> None:
    with rollway.up(mocker_spec(base_model, "kept")) as kept:
        with rollway.up(mocker_spec(base_model, "other")):
            assert "several" in cli("down").stderr
            assert cli("down", "other").returncode == 0
        assert kept.rollouts().generate([1], NO_LOGPROBS)
        assert _process("frontend", "kept").restarts == 0


def test_a_reused_pid_is_not_killed(base_model: Path) -> None:
    """A record that names a living pid with another start time is of another process."""
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        directory = StackDir("t")
        spec = mocker_spec(base_model)
        with rollway.up(spec):
            state = read_state("t")
        state.supervisor_pid, state.supervisor_start = bystander.pid, 1
        for process in state.processes:
            process.pid, process.start = bystander.pid, 1
        directory.write(state)
        assert local.clear_leftovers(directory)
        assert bystander.poll() is None
        assert directory.read() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_attach_by_name_and_by_address(base_model: Path) -> None:
    with rollway.up(mocker_spec(base_model)) as stack:
        for target in ("t", stack.frontend_url):
            with rollway.attach(target) as attached:
                assert attached.models == ["tiny"]
                assert attached.rl_url == stack.rl_url
                assert attached.rollouts().generate([1], NO_LOGPROBS)
        assert read_state("t").phase == "ready"  # attach leaves it running
    with pytest.raises(StackNotRunning):
        rollway.attach("t")


def test_a_port_in_use_is_named(base_model: Path, footprint: Footprint) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        spec = mocker_spec(base_model, frontend={"port": port})
        with pytest.raises(StartError, match=f"Port {port}") as failure:
            rollway.up(spec).__enter__()
    assert isinstance(failure.value, RollwayError)
    assert PortInUse.exit_code == 1
    assert footprint.new() == {}


def test_two_models_each_on_its_own_endpoint(base_model: Path) -> None:
    models = [
        {"path": str(base_model), "name": name, "engine": "mocker"} for name in ("one", "two")
    ]
    with rollway.up({"name": "t", "models": models}) as stack:
        assert stack.models == ["one", "two"]
        for name in stack.models:
            assert stack.rollouts(name).generate([1], NO_LOGPROBS)
        with pytest.raises(RollwayError, match="several models"):
            stack.rollouts()


def test_a_stack_that_is_starting_says_so_to_who_attaches(base_model: Path, cli: Cli) -> None:
    command = [sys.executable, "-m", "rollway.cli", "up", "--model", str(base_model)]
    up = subprocess.Popen([*command, "--name", "slow", "--set", "models.0.engine=mocker"])
    wait_until(lambda: (state := StackDir("slow").read()) is not None and state.frontend)
    with pytest.raises(StackNotRunning, match="`slow` is still starting"):
        rollway.attach("slow")
    assert up.wait(timeout=120) == 0
    with rollway.attach("slow") as stack:
        assert stack.models


def test_a_failed_start_shows_the_log_and_stops_what_had_started(
    base_model: Path, footprint: Footprint
) -> None:
    spec = mocker_spec(base_model, models=[
        {"path": str(base_model), "engine": "mocker", "name": "tiny"},
        {"path": str(base_model), "engine": "mocker", "name": "bad", "args": {"no-such-flag": 1}},
    ])  # fmt: skip
    message = "bad-0, a worker of the model `bad`, exited with status 2"
    with pytest.raises(StartError, match=message) as failure:
        rollway.up(spec).__enter__()
    assert "no-such-flag" in failure.value.log_tail
    assert failure.value.log_tail in str(failure.value)
    assert "engine does not know this option" in failure.value.hint
    assert footprint.new() == {}


def test_a_read_only_log_directory_is_explained(base_model: Path, footprint: Footprint) -> None:
    with pytest.raises(StartError, match="log directory /proc/rollway"):
        rollway.up(mocker_spec(base_model, log_dir="/proc/rollway")).__enter__()
    assert footprint.new() == {}


def test_the_command_line_starts_shows_and_stops_a_stack(
    base_model: Path, cli: Cli, tmp_path: Path, footprint: Footprint
) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(f"name: y\nmodels:\n  - {{path: {base_model}, name: tiny, engine: mocker}}\n")
    up = cli("up", str(file), "--set", "models.0.replicas=2", "--json")
    assert up.returncode == 0, up.stderr
    ready = json.loads(up.stdout)
    assert ready["models"] == ["tiny"] and ready["phase"] == "ready"
    shown = json.loads(cli("status", "--json").stdout)["stacks"]
    assert [process["name"] for process in shown[0]["processes"]] == [
        "tiny-0",
        "tiny-1",
        "frontend",
    ]
    assert "frontend" in cli("status").stdout
    assert cli("logs").stdout.split() == ["frontend", "tiny-0", "tiny-1"]
    assert json.loads(cli("logs", "frontend", "--json").stdout)["lines"]
    assert "There are: frontend" in cli("logs", "nobody").stderr
    stopped = cli("down", "--json")
    assert json.loads(stopped.stdout)["stopped"] == ["y"]
    assert cli("down").returncode == 1
    assert footprint.new() == {}


def test_following_a_log_ends_with_the_stack(base_model: Path, cli: Cli) -> None:
    with rollway.up(mocker_spec(base_model)):
        follower = subprocess.Popen(
            [sys.executable, "-m", "rollway.cli", "logs", "-f", "frontend"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert follower.stdout is not None and follower.stdout.readline()
    assert follower.wait(timeout=20) == 0


def test_real_etcd_and_nats(base_model: Path, policies: list[Policy], footprint: Footprint) -> None:
    planes = {"discovery": "etcd", "event_plane": "nats", "request_plane": "nats"}
    prompt = list(range(40, 100))
    with rollway.up({**light(base_model, "t"), **planes}) as stack:
        roles = {p.name: p.role for p in read_state("t").processes}
        assert roles["etcd"] == roles["nats-server"] == "service"
        group = stack.rollouts().generate(prompt, SHORT, n=4)
        assert worst(policies[0], group) < TOLERANCE
        assert sum(rollout.cached_tokens for rollout in group) > 0
        stack.refit(1, policies[1].path)
        group = stack.rollouts().generate(prompt, SHORT, n=2)
        assert {rollout.weight_version for rollout in group} == {1}
        assert worst(policies[1], group) < TOLERANCE
    assert footprint.new() == {}
