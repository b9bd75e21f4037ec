"""Stacks on a Ray cluster of two raylets, from start to end, and everything that kills them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import rollway
from rollway.errors import SpecError, StackNotRunning, StartError
from rollway.stack.ray import cluster as names
from rollway.stack.ray import groups, launcher
from tests.conftest import Cli, Footprint
from tests.ray.clusters import DRIVER, list_left, on_ray, settle, spawn_driver
from tests.stack.policies import Policy
from tests.stack.serving import SHORT, TOLERANCE, worst
from tests.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
PROMPT = list(range(40, 100))


def test_a_stack_over_two_nodes_is_one_fleet(
    two_nodes: Cluster,
    base_model: Path,
    policies: list[Policy],
    tmp_path: Path,
    footprint: Footprint,
) -> None:
    spec = {**on_ray(base_model, "wide", 4), "runtime_env": {"working_dir": str(tmp_path)}}
    with rollway.up(spec) as stack:
        state = launcher.find("wide")
        assert state is not None
        workers = [p.pid for p in state.state.processes if p.role == "worker"]
        assert {Path(f"/proc/{pid}/cwd").readlink() for pid in workers} == {tmp_path}
        nodes = {p.name: p.node for p in state.state.processes}
        assert sorted(nodes) == ["etcd", "frontend", "tiny-0", "tiny-1", "tiny-2", "tiny-3"]
        free = sum(node.gpus for node in names.read_nodes())
        assert free == 0  # pipelines on the same cluster see them taken
        assert len(groups.list_groups()) == 5  # one for the services, one per replica

        report = stack.refit(1, policies[1].path)
        assert [worker.state for worker in report.workers] == ["serving"] * 4
        group = stack.rollouts().generate(PROMPT, SHORT, n=8)
        assert worst(policies[1], group) < TOLERANCE

        with rollway.attach("wide") as other:
            assert set(other.fleet.read_versions().values()) == {1}
            assert other.weights_secret == stack.weights_secret
            report = other.refit(2, policies[2].path)
            assert report.serving == 4
        group = stack.rollouts().generate([*PROMPT, 7], SHORT, n=4)
        assert worst(policies[2], group) < TOLERANCE
    # At once: a stack that needs all of them may be started right after the stop.
    assert sum(node.gpus for node in names.read_nodes()) == 4
    assert list_left() == {}
    assert footprint.settle() == {}


def test_a_dead_owner_takes_its_stack_with_it(
    two_nodes: Cluster, base_model: Path, footprint: Footprint
) -> None:
    driver = spawn_driver(DRIVER, json.dumps(on_ray(base_model, "owned", 2)))
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.strip() == "ready":
            break
    driver.kill()
    driver.wait()
    assert settle() == {}
    assert footprint.settle() == {}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("after", [0, 2, 6])
def test_a_driver_that_dies_during_the_start_leaves_nothing(
    two_nodes: Cluster, base_model: Path, footprint: Footprint, how: int, after: int
) -> None:
    """After so many reports of progress: before the keepers, with them, with the first part."""
    kill_at_report(base_model, after, how)
    assert settle() == {}
    assert footprint.settle() == {}


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_driver_that_is_killed_at_any_step_of_the_start_leaves_nothing(
    two_nodes: Cluster, base_model: Path, footprint: Footprint
) -> None:
    """At each report of progress in turn, until a start is ready before it."""
    after = 0
    while kill_at_report(base_model, after, signal.SIGKILL):
        assert settle() == {}, f"killed after {after} reports"
        after += 1
    assert after > 6
    assert settle() == {}
    assert footprint.settle() == {}


def kill_at_report(base_model: Path, after: int, how: int) -> bool:
    """Kill a driver after so many reports of its start; return whether it was still starting."""
    driver = spawn_driver(DRIVER, json.dumps(on_ray(base_model, "early", 2)))
    assert driver.stdout is not None
    lines = 0
    while lines <= after and driver.stdout.readline().strip() == "starting":
        lines += 1
    driver.send_signal(how)
    driver.wait()
    return lines > after


def test_a_name_is_used_once_and_free_after_a_stop(
    two_nodes: Cluster, base_model: Path, footprint: Footprint
) -> None:
    """`a` beside `a-2`; whose the name is; stop from another driver; restart after the stop."""
    first = launcher.start(_parse(on_ray(base_model, "a", 1)))
    second = launcher.start(_parse(on_ray(base_model, "a-2", 1)))
    with pytest.raises(
        StartError, match=rf"`a` is ready on this cluster: .*{os.getpid()}.* started it, 20"
    ):
        rollway.up(on_ray(base_model, "a", 1)).__enter__()
    code = "from rollway.cli import main; raise SystemExit(main(['down', 'a', '--quiet']))"
    assert spawn_driver(code).wait(120) == 0
    assert launcher.find("a") is None
    found = launcher.find("a-2")
    assert found is not None
    assert {p.state for p in found.state.processes} == {"ready"}
    with pytest.raises(StackNotRunning, match="`a` no longer runs"):
        first.access.read_state()
    with rollway.up(on_ray(base_model, "a", 1)):
        assert len(launcher.list_stacks()) == 2
    second.stop()
    assert list_left() == {}
    assert footprint.settle() == {}


def test_the_command_line_reaches_a_stack_from_any_driver(
    two_nodes: Cluster, base_model: Path, tmp_path: Path, cli: Cli, footprint: Footprint
) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(json.dumps({**on_ray(base_model, "cli", 2), "launcher": "local"}))
    plan = json.loads(cli("up", str(file), "--on", "ray", "--dry-run", "--json").stdout)
    workers = [row for row in plan["processes"] if row["model"]]
    assert [row["process"] for row in workers] == ["tiny-0", "tiny-1"]
    assert all(row["argv"] and row["address"] for row in workers)
    assert list_left() == {}

    up = cli("up", str(file), "--on", f"ray={two_nodes.address}", "--json", "--quiet")
    assert up.returncode == 0, up.stderr
    assert json.loads(up.stdout)["phase"] == "ready"
    (status,) = json.loads(cli("status", "cli", "--json").stdout)["stacks"]
    assert len(status["weight_versions"]) == 2
    assert cli("logs", "cli", "frontend", "-n", "3").stdout
    follow = "from rollway.cli import main; raise SystemExit(main(['logs', 'cli', 'tiny-1', '-f']))"
    follower = spawn_driver(follow)
    assert follower.stdout is not None and follower.stdout.readline()  # from whichever node has it
    ls = json.loads(cli("fleet", "ls", "cli", "--json").stdout)
    assert len(ls["workers"]) == 2
    down = cli("down", "cli", "--json", "--quiet")
    assert json.loads(down.stdout)["stopped"] == ["cli"], down.stderr
    assert follower.wait(60) == 0  # it ends with the stack
    assert list_left() == {}
    assert footprint.settle() == {}


def test_killed_heads_and_keepers_leave_nothing(
    two_nodes: Cluster, base_model: Path, footprint: Footprint
) -> None:
    running = launcher.start(_parse(on_ray(base_model, "headless", 4)))
    ray.kill(running.access.head)
    assert settle() == {}
    assert footprint.settle() == {}
    with pytest.raises(StackNotRunning):
        running.access.read_state()

    # The Keeper of the services: the run ends with that cause.
    running = launcher.start(_parse(on_ray(base_model, "headless", 4)))
    over = running.access.head.wait_until_over.remote()
    _kill_keeper("node-0", running)
    cause = ray.get(over, timeout=60)
    assert "The actor that ran the engines of node" in cause["message"]
    assert settle() == {}
    assert footprint.settle() == {}

    # All of them at once, by Ray, which kills the children of such actors, too. The owner's stop
    # frees the groups.
    running = launcher.start(_parse(on_ray(base_model, "headless", 4)))
    prefix = names.get_part_name(running.state.run_id, "node-")
    keepers = [
        ray.get_actor(entry["name"], namespace=entry["namespace"])
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["name"].startswith(prefix)
    ]
    assert len(keepers) == 2
    for actor in (running.access.head, *keepers):
        ray.kill(actor)
    assert footprint.settle() == {}
    running.stop()
    assert list_left() == {}


def test_a_killed_keeper_is_replaced_and_its_workers_are_refitted(
    two_nodes: Cluster, base_model: Path, policies: list[Policy], footprint: Footprint
) -> None:
    with rollway.up(on_ray(base_model, "healing", 4)) as stack:
        stack.refit(1, policies[1].path)
        found = launcher.find("healing")
        assert found is not None
        _kill_keeper("node-1", found)

        def is_healed() -> bool:
            state = found.access.read_state()
            workers = [p for p in state.processes if p.role == "worker" and p.state == "ready"]
            served = list(stack.fleet.read_versions().values())
            return len(workers) == 4 and served.count(1) >= 4

        wait_until(is_healed, 120, every=1.0)
        group = stack.rollouts().generate(PROMPT, SHORT, n=8)
        assert worst(policies[1], group) < TOLERANCE
    assert footprint.settle() == {}


def test_a_failed_start_names_the_node_and_leaves_nothing(
    two_nodes: Cluster, base_model: Path, footprint: Footprint, tmp_path: Path
) -> None:
    spec = on_ray(base_model, "broken", 2)
    spec["models"][0]["module"] = "tests.no_such_worker"
    with pytest.raises(StartError, match=r"On node .*exited with status"):
        rollway.up(spec).__enter__()
    assert list_left() == {}
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(StartError, match=f"Node .*there is no model directory {nowhere}"):
        rollway.up({**spec, "models": [{**spec["models"][0], "path": nowhere}]}).__enter__()
    with pytest.raises(StartError, match="there is no interpreter /no/python"):
        rollway.up({**spec, "python": "/no/python"}).__enter__()
    with pytest.raises(SpecError, match="5"):
        rollway.up(on_ray(base_model, "large", 5)).__enter__()
    assert list_left() == {}
    assert footprint.settle() == {}


LEFTOVER = """
import ray
from rollway.stack.ray import cluster, groups
ray.init(namespace="another", log_to_driver=False)
(node, *_) = cluster.read_nodes()
groups.create_group("rollway/0123456789abcdef/tiny-0", [(node.id, {"GPU": 1})]).wait(30)
"""
"""A driver that leaves the group of a run of which no actor lives."""


def test_leftovers_of_another_namespace_are_cleared(two_nodes: Cluster) -> None:
    assert spawn_driver(LEFTOVER).wait(60) == 0
    assert list_left() == {"groups": ["rollway/0123456789abcdef/tiny-0"]}
    launcher.clear_leftovers()
    assert list_left() == {}
    assert sum(node.gpus for node in names.read_nodes()) == 4


def test_a_node_without_rollway_is_named(
    two_nodes: Cluster, base_model: Path, tmp_path: Path, footprint: Footprint
) -> None:
    broken = tmp_path / "rollway"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('not on this node')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        node = two_nodes.add_node(num_cpus=8, num_gpus=2, labels={"pool": "bare"})
    try:
        two_nodes.wait_for_nodes()
        unable = r"its Python cannot import Rollway \(ImportError: not on this node\)"
        with pytest.raises(StartError, match=rf"Node .*: {unable}"):  # its Keeper cannot start
            rollway.up(on_ray(base_model, "bare", 5)).__enter__()
        only_there = on_ray(base_model, "bare", 2, labels={"pool": "bare"})
        with pytest.raises(StartError, match=f"The node of the services: {unable}"):
            rollway.up(only_there).__enter__()
    finally:
        two_nodes.remove_node(node)
    assert list_left() == {}
    assert footprint.settle() == {}


def _parse(spec: dict[str, object]) -> rollway.StackSpec:
    return rollway.make_spec(spec)


def _kill_keeper(part: str, running: launcher.RayStack) -> None:
    """Kill the process of a Keeper, as the kernel would when memory is short."""
    run_id = running.state.run_id
    name = names.get_part_name(run_id, part)
    keeper = ray.get_actor(name, namespace=running.state.ray_namespace)
    pid = ray.get(keeper.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)

    def has_gone() -> bool:
        return name not in {a["name"] for a in ray.util.list_named_actors(all_namespaces=True)}

    wait_until(has_gone, 30)
