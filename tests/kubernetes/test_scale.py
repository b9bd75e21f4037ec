"""Graphs grow and shrink under traffic: every token is of the weights that its version names."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import rollway
from rollway.errors import RollwayError
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import DGD, POD, SCALING_ADAPTER
from rollway.rollout.trajectory import Rollout
from tests.kubernetes.flows import RUN, World, make_env, make_graph, open_world
from tests.kubernetes.graphs import SECRET
from tests.stack.policies import Policy
from tests.stack.serving import SHORT, TOLERANCE, worst
from tests.waiting import wait_until

PROMPT = list(range(40, 100))


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pod has from a Secret: workers check orders with it, and the trainer signs them."""
    monkeypatch.setenv("ROLLWAY_WEIGHTS_SECRET", SECRET)


@pytest.fixture
def world(
    secret: None, admin: Cluster, kubeconfig: Path, tmp_path: Path, base_model: Path
) -> Iterator[World]:
    with open_world(admin, kubeconfig, tmp_path, base_model) as world:
        yield world


@pytest.fixture
def stubs(admin: Cluster, kubeconfig: Path, tmp_path: Path) -> Iterator[World]:
    with open_world(admin, kubeconfig, tmp_path) as world:
        yield world


@dataclass
class Traffic:
    """Rollouts of a trainer that samples all the time."""

    stack: rollway.Stack
    rollouts: list[Rollout] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._stop.is_set():
            try:
                self.rollouts += self.stack.rollouts().generate(PROMPT, SHORT, n=4)
            except RollwayError as error:
                self.errors.append(str(error))

    @contextmanager
    def flow(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


@contextmanager
def attach(world: World, graph: str) -> Iterator[rollway.Stack]:
    """Attach as a trainer in a pod does: to the addresses of the frontend itself."""
    backing = world.dynamo.graphs[graph].backing
    host = world.dynamo._node.address
    url, rl_url = (f"http://{host}:{backing.ports[port]}" for port in (8000, 8001))
    with rollway.attach(url, rl_url=rl_url) as stack:
        yield stack


def count_served(stack: rollway.Stack, version: int) -> int:
    try:
        return list(stack.fleet.read_versions().values()).count(version)
    except RollwayError:
        return 0


def check_tokens(traffic: Traffic, policies: list[Policy]) -> set[int]:
    """Compare every token with the policy of its span's version; return the versions."""
    assert traffic.rollouts
    assert traffic.errors == []
    versions, stale = set(), []
    for rollout in traffic.rollouts:
        assert rollout.logprobs is not None
        for span in rollout.spans:
            assert span.version is not None
            versions.add(span.version)
            own = policies[span.version].logprobs(rollout.prompt_ids, rollout.token_ids)
            for place in range(span.start, span.end):
                if abs(own[place] - rollout.logprobs[place]) > TOLERANCE:
                    stale.append((place, rollout.spans, name_versions(rollout, place, policies)))
    assert stale == []
    return versions


def name_versions(rollout: Rollout, place: int, policies: list[Policy]) -> list[int]:
    """Return the versions that would have given a token its log-prob."""
    assert rollout.logprobs is not None
    given = rollout.logprobs[place]
    every = [policy.logprobs(rollout.prompt_ids, rollout.token_ids)[place] for policy in policies]
    return [version for version, own in enumerate(every) if abs(own - given) <= TOLERANCE]


def test_scaled_up_workers_serve_the_current_version_only(
    world: World, policies: list[Policy]
) -> None:
    infra, _ = world.load(make_graph("policy", workers=1))
    world.up(infra)
    with attach(world, "policy") as stack:
        stack.refit(1, policies[1].path)
        traffic = Traffic(stack)
        with traffic.flow():
            answer = world.call("scale", RUN, "worker=3")
            assert (answer["before"], answer["after"]) == (1, 3)
            wait_until(lambda: count_served(stack, 1) == 3, 60, every=0.2)
            stack.refit(2, policies[2].path)
            world.call("scale", RUN, "worker=1")
            wait_until(lambda: len(stack.fleet.read_versions()) == 1, 60, every=0.2)
            stack.refit(3, policies[1].path)  # one that left is not waited for
    assert check_tokens(traffic, [*policies, policies[1]]) <= {1, 2, 3}
    world.call("down", RUN)
    world.wait_until_empty()


def test_a_scale_up_in_the_middle_of_a_refit_ends_on_one_version(
    world: World, policies: list[Policy]
) -> None:
    infra, _ = world.load(make_graph("policy", workers=1))
    world.up(infra)
    with attach(world, "policy") as stack:
        stack.refit(1, policies[1].path)
        scaling = threading.Thread(target=world.call, args=("scale", RUN, "worker=3"))
        scaling.start()
        version = 1
        while scaling.is_alive():
            version += 1
            stack.refit(version, policies[version % 2 + 1].path)
        scaling.join()
        wait_until(lambda: count_served(stack, version) == 3, 60, every=0.2)
        rollouts = stack.rollouts().generate(PROMPT, SHORT, n=8)
        assert worst(policies[version % 2 + 1], rollouts) < TOLERANCE
    world.call("down", RUN)


@pytest.mark.parametrize("with_adapter", [False, True])
def test_the_planners_own_client_scales_our_graph(
    world: World, policies: list[Policy], with_adapter: bool
) -> None:
    """ai-dynamo's client writes, our fleet admits: no stale token in the traffic meanwhile."""
    extra = {"scalingAdapter": {}} if with_adapter else {}
    infra, _ = world.load(make_graph("policy", workers=1, **extra))
    world.up(infra)
    env = {
        **make_env(),
        "KUBECONFIG": str(world.kubeconfig),
        "POD_NAMESPACE": world.admin.namespace,
    }
    command = [sys.executable, "-m", "tests.kubernetes.planner_client"]
    command += ["scale", "policy", "worker", "3"]
    with attach(world, "policy") as stack:
        stack.refit(1, policies[1].path)
        traffic = Traffic(stack)
        with traffic.flow():
            ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
            assert ended.returncode == 0, ended.stderr
            wait_until(lambda: count_served(stack, 1) == 3, 60, every=0.2)
    assert check_tokens(traffic, policies) == {1}
    assert bool(world.list(SCALING_ADAPTER)) == with_adapter
    world.call("down", RUN)
    world.wait_until_empty()


def test_scaling_goes_through_the_adapter_where_there_is_one(stubs: World) -> None:
    infra, _ = stubs.load(make_graph("policy", workers=1, scalingAdapter={}))
    stubs.up(infra)
    wait_until(lambda: stubs.admin.get(SCALING_ADAPTER, "policy-worker"), 30)
    answer = stubs.call("scale", RUN, "worker=2", "--no-wait")
    assert answer["through"] == "DynamoGraphDeploymentScalingAdapter policy-worker"
    wait_until(lambda: stubs.admin.get(POD, "policy-worker-1"), 30)
    stubs.call("down", RUN)


def test_wrong_components_and_numbers_are_refused(stubs: World) -> None:
    infra, _ = stubs.load(make_graph("policy"), make_graph("judge"))
    stubs.up(infra)
    assert "policy.worker" in stubs.call("scale", RUN, "decoder=2", status=2)["hint"]
    assert "2 graphs" in stubs.call("scale", RUN, "worker=2", status=2)["message"]
    assert stubs.call("scale", RUN, "policy.worker=many", status=2)["error"] == "UsageError"
    planned = stubs.call("scale", RUN, "policy.worker=2", "--dry-run")
    assert planned["after"] == 2
    assert stubs.get(DGD, "policy")["spec"]["components"][1]["replicas"] == 1
    stubs.call("down", RUN)
