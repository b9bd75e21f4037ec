"""What runs on Ray beside plain light workers: real engines behind a gateway, and roles apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import rollway
from rollway.stack.preset import has_nixl
from rollway.stack.ray import cluster as names
from rollway.stack.ray import groups, launcher
from tests.conftest import Footprint
from tests.ray.clusters import list_left, on_ray
from tests.stack.policies import Policy, perturbed
from tests.stack.served import Served, check
from tests.stack.serving import SHORT, TOLERANCE, worst
from tests.stack.stacks import VLLM_ARGS

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def count_keepers(stack: str) -> int:
    """Return how many nodes run a part of the stack."""
    found = launcher.find(stack)
    assert found is not None
    actors = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
    return sum(name.startswith(f"rollway/{found.state.run_id}/node-") for name in actors)


@pytest.mark.slow
def test_real_engines_on_two_nodes_behind_a_gateway(
    two_nodes: Cluster, tool_model: Path, tmp_path: Path, footprint: Footprint
) -> None:
    model = {"path": str(tool_model), "name": "caller", "replicas": 2}
    model["args"] = {**VLLM_ARGS, "dyn-tool-call-parser": "hermes"}
    spec = {"name": "real", "launcher": "ray", "models": [model], "start_seconds": 400}
    # A node has 16 CPUs: one replica fits beside the services, the other one does not.
    spec["ray"] = {"cpus": 8, "gpus": 0}
    spec["frontend"] = {"env": {"DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1"}}
    policies = [Policy(tool_model), Policy(perturbed(tool_model, tmp_path / "new", 1))]
    with rollway.up(spec) as stack:
        assert count_keepers("real") == 2
        served = Served(stack, tmp_path / "gateway.sqlite", {}, name="real")
        served.start()
        try:
            for version, policy in enumerate(policies):
                if version:
                    assert stack.refit(version, policy.path).serving == 2
                for number in range(4):  # sessions, which the router distributes
                    session = f"session-{version}-{number}"
                    served.client(session).chat.completions.create(
                        model="caller",
                        messages=[{"role": "user", "content": f"add {number} {version}"}],
                        max_tokens=8,
                    )
                    (sequence,) = served.trajectories(session)
                    check(sequence, stack, policy)
        finally:
            served.end()
    assert list_left() == {}
    assert footprint.settle() == {}


def test_prefill_and_decode_are_apart_on_two_nodes(
    two_nodes: Cluster, base_model: Path, policies: list[Policy], footprint: Footprint
) -> None:
    spec = on_ray(base_model, "apart", 1)
    (model,) = spec["models"]
    del model["replicas"]
    pools = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    model |= {"serving": "disaggregated", **pools}
    with rollway.up(spec) as stack:
        assert count_keepers("apart") == 2
        found = launcher.find("apart")
        assert found is not None
        workers = [p.name for p in found.state.processes if p.role == "worker"]
        assert sorted(workers) == [
            "tiny-decode-0", "tiny-decode-1", "tiny-prefill-0", "tiny-prefill-1",
        ]  # fmt: skip
        for version in (1, 2):
            assert stack.refit(version, policies[version].path).serving == 4
            prompt = [*range(40, 100), version]
            group = stack.rollouts().generate(prompt, SHORT, n=8)
            assert worst(policies[version], group) < TOLERANCE
    assert list_left() == {}
    assert footprint.settle() == {}


@pytest.mark.slow
@pytest.mark.skipif(not has_nixl(), reason="needs the module nixl: make setup")
def test_real_engines_prefill_on_one_node_and_decode_on_the_other(
    two_nodes: Cluster, base_model: Path, policies: list[Policy], footprint: Footprint
) -> None:
    model = {"path": str(base_model), "name": "tiny", "args": VLLM_ARGS}
    model |= {"serving": "disaggregated", "prefill": {}, "decode": {}}
    spec = {"name": "halves", "launcher": "ray", "models": [model], "start_seconds": 400}
    spec["ray"] = {"cpus": 8, "gpus": 0}  # of 16: beside the services there is room for one
    with rollway.up(spec) as stack:
        assert count_keepers("halves") == 2
        for version in (1, 2):
            assert stack.refit(version, policies[version].path).serving == 2
            group = stack.rollouts().generate([*range(40, 100), version], SHORT, n=4)
            assert worst(policies[version], group) < TOLERANCE
            assert {rollout.prefill_worker_id for rollout in group}.isdisjoint(
                {rollout.worker_id for rollout in group} | {None}
            )
    assert list_left() == {}
    assert footprint.settle() == {}


def test_nats_carries_the_planes_of_two_nodes(
    two_nodes: Cluster, base_model: Path, policies: list[Policy], footprint: Footprint
) -> None:
    spec = {**on_ray(base_model, "bus", 4), "request_plane": "nats", "event_plane": "nats"}
    with rollway.up(spec) as stack:
        assert count_keepers("bus") == 2
        running = launcher.find("bus")
        assert running is not None
        assert "nats-server" in {process.name for process in running.state.processes}
        assert stack.refit(1, policies[1].path).serving == 4
        group = stack.rollouts().generate(list(range(40, 100)), SHORT, n=8)
        assert worst(policies[1], group) < TOLERANCE
    assert list_left() == {}
    assert footprint.settle() == {}


def test_two_models_of_mixed_sizes_share_the_nodes(
    two_nodes: Cluster, base_model: Path, policies: list[Policy], footprint: Footprint
) -> None:
    """A replica of two ranks takes a node; two small ones take the other."""
    spec = on_ray(base_model, "mixed", 2)
    (small,) = spec["models"]
    spec["models"] = [{**small, "name": "wide", "replicas": 1, "tensor_parallel": 2}, small]
    with rollway.up(spec) as stack:
        assert count_keepers("mixed") == 2
        assert len(groups.list_groups()) == 4  # the services, and three replicas
        assert sum(node.gpus for node in names.read_nodes()) == 0
        for number, model in enumerate(("wide", "tiny")):
            policy = policies[number + 1]
            assert stack.refit(1, policy.path, model=model).serving == number + 1
            group = stack.rollouts(model).generate([*range(40, 100), number], SHORT, n=4)
            assert worst(policy, group) < TOLERANCE
    assert list_left() == {}
    assert footprint.settle() == {}
