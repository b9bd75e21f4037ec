"""The planner of the Ray launcher: splits, labels, the head, lost nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.errors import SpecError
from rollway.spec import StackSpec, load_spec
from rollway.stack.ray.cluster import NodeInfo
from rollway.stack.ray.placement import (
    Placement,
    ReplicaPlace,
    has_labels,
    place_again,
    plan_placement,
)
from tests.unit.stack.ray.stand_in import make_nodes


def make_spec(*models: dict[str, Any], **ray: Any) -> StackSpec:
    entries = [{"path": f"org/m{i}", **model} for i, model in enumerate(models)]
    return load_spec({"launcher": "ray", "ray": ray, "models": entries})


def show(replica: ReplicaPlace) -> str:
    return " ".join(f"{rank.node}:{rank.gpus:g}" for rank in replica.ranks)


def place(spec: StackSpec, nodes: Sequence[NodeInfo]) -> list[str]:
    return [show(replica) for replica in plan_placement(spec, nodes).replicas]


@pytest.mark.parametrize(
    ("ranks", "gpus", "expected"),
    [
        (4, (8, 8), "n0:4"),
        (8, (4, 4), "n0:4 n1:4"),
        (8, (4, 4, 4, 4), "n0:4 n1:4"),
        (6, (4, 4, 4), "n0:3 n1:3"),
        (12, (4, 4, 4), "n0:4 n1:4 n2:4"),
        (8, (2, 2, 2, 2), "n0:2 n1:2 n2:2 n3:2"),
        (8, (6, 4, 3, 4), "n1:4 n3:4"),
        (4, (8, 4), "n1:4"),
        (3, (2, 2, 1), "n0:1 n1:1 n2:1"),
    ],
)
def test_a_replica_is_whole_or_spread_evenly_over_the_fewest_nodes(
    ranks: int, gpus: tuple[int, ...], expected: str
) -> None:
    assert place(make_spec({"tensor_parallel": ranks}), make_nodes(*gpus)) == [expected]


def test_ranks_count_from_fields_and_raw_arguments() -> None:
    spec = make_spec({"args": {"tp": 2, "pipeline-parallel-size": 2}, "data_parallel": 2})
    assert place(spec, make_nodes(8)) == ["n0:8"]
    assert place(spec, make_nodes(4, 4)) == ["n0:4 n1:4"]


def test_a_node_has_whole_data_parallel_engines_or_a_part_of_one() -> None:
    spec = make_spec({"tensor_parallel": 2, "data_parallel": 3})
    assert place(spec, make_nodes(3, 3, 2)) == ["n0:2 n1:2 n2:2"]  # not 2 nodes x 3


def test_small_replicas_fill_nodes_before_they_open_new_ones() -> None:
    spec = make_spec({"replicas": 2}, {"tensor_parallel": 4})
    assert place(spec, make_nodes(8, 4)) == ["n0:1", "n0:1", "n1:4"]


def test_fractions_share_a_gpu_but_never_parts_of_two() -> None:
    spec = make_spec({"replicas": 4}, gpus=0.4)
    assert place(spec, make_nodes(2)) == ["n0:0.4"] * 4
    with pytest.raises(SpecError, match="room for 4"):
        plan_placement(make_spec({"replicas": 5}, gpus=0.4), make_nodes(2))
    assert place(make_spec({"replicas": 2}, gpus=0.5), make_nodes(0.5, 0.5)) == ["n0:0.5", "n1:0.5"]


def test_a_stack_without_gpus_is_placed_by_its_cpus() -> None:
    spec = make_spec({"replicas": 3}, gpus=0, cpus=2)
    nodes = make_nodes(0, 0, cpus=4)
    plan = plan_placement(spec, nodes)
    assert plan.services == "n0", "the head, if it may be used"
    assert [replica.ranks[0].node for replica in plan.replicas] == ["n0", "n1", "n1"]
    assert {replica.ranks[0].cpus for replica in plan.replicas} == {2}
    assert place(make_spec({"replicas": 9}, gpus=0, cpus=0), make_nodes(0, cpus=0)) == ["n0:0"] * 9


def test_the_head_is_used_or_avoided() -> None:
    nodes = make_nodes(8, 8)
    assert plan_placement(make_spec({}), nodes).services == "n0"
    avoided = plan_placement(make_spec({}, head="avoid"), nodes)
    assert (avoided.services, show(avoided.replicas[0])) == ("n1", "n1:1")


def test_services_go_where_they_take_no_room_from_a_rank() -> None:
    nodes = [
        NodeInfo("full", "10.0.0.1", True, 8, 8, {}),
        NodeInfo("spare", "10.0.0.2", False, 9, 8, {}),
    ]
    plan = plan_placement(make_spec({"tensor_parallel": 8, "replicas": 2}), nodes)
    assert plan.services == "spare"


@pytest.mark.parametrize(
    ("condition", "matches"),
    [("a", True), ("b", False), ("!a", False), ("!b", True), ("in(a, c)", True),
     ("in(b,c)", False), ("!in(b,c)", True), ("!in(a)", False)],
)  # fmt: skip
def test_labels_select_nodes_as_ray_does(condition: str, matches: bool) -> None:
    node = NodeInfo("n", "10.0.0.1", True, 1, 1, {"zone": "a"})
    assert has_labels(node, {"zone": condition}) is matches
    assert not has_labels(node, {"rack": "a"}) and has_labels(node, {"rack": "!a"})


def test_a_stack_keeps_to_nodes_with_its_labels() -> None:
    plan = plan_placement(make_spec({"replicas": 2}, labels={"zone": "b"}), make_nodes(8, 1, 8, 1))
    assert (plan.services, [show(r) for r in plan.replicas]) == ("n1", ["n1:1", "n3:1"])


# --- any cluster ---------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 3)), min_size=1, max_size=3),
)
def test_a_plan_never_overbooks_a_node(
    free: list[tuple[int, int]], models: list[tuple[int, int]]
) -> None:
    nodes = [NodeInfo(f"n{i}", f"10.0.0.{i}", i == 0, c, g, {}) for i, (g, c) in enumerate(free)]
    spec = make_spec(*({"tensor_parallel": size, "replicas": count} for size, count in models))
    try:
        plan = plan_placement(spec, nodes)
    except SpecError:
        return
    check_reserved(plan, nodes)
    for replica in plan.replicas:
        assert len({rank.node for rank in replica.ranks}) == len(replica.ranks)
        assert len({rank.gpus for rank in replica.ranks}) == 1, "an even split"


@given(st.integers(1, 8), st.sampled_from([1, 2, 4, 8, 16]))
def test_a_uniform_cluster_is_filled_to_the_last_gpu(count: int, size: int) -> None:
    nodes = make_nodes(*[8] * count)
    if replicas := 8 * count // size:
        plan = plan_placement(make_spec({"tensor_parallel": size, "replicas": replicas}), nodes)
        check_reserved(plan, nodes)
        assert all(len(replica.ranks) == max(1, size // 8) for replica in plan.replicas)


def check_reserved(plan: Placement, nodes: Sequence[NodeInfo], services_cpus: float = 1.0) -> None:
    """Assert that no node has to give more than it has."""
    free = {node.id: [node.gpus, node.cpus] for node in nodes}
    free[plan.services][1] -= services_cpus
    for rank in (rank for replica in plan.replicas for rank in replica.ranks):
        free[rank.node][0] -= rank.gpus
        free[rank.node][1] -= rank.cpus
    assert all(min(left) > -1e-6 for left in free.values())


@given(st.permutations(range(6)))
def test_the_order_in_which_ray_lists_nodes_does_not_matter(order: list[int]) -> None:
    nodes = make_nodes(8, 4, 4, 2, 2, 1)
    spec = make_spec({"tensor_parallel": 8}, {"tensor_parallel": 2, "replicas": 3})
    assert plan_placement(spec, [nodes[i] for i in order]) == plan_placement(spec, nodes)


# --- lost nodes ----------------------------------------------------------------------------------


def test_replicas_of_a_lost_node_are_placed_again_or_wait() -> None:
    spec = make_spec({"tensor_parallel": 4, "replicas": 2}, {"replicas": 2})
    plan = plan_placement(spec, make_nodes(4, 4, 2))
    assert [show(r) for r in plan.replicas] == ["n0:4", "n1:4", "n2:1", "n2:1"]
    placed, waiting = place_again(spec, plan.replicas[1:], make_nodes(0, 0, 0, 5))
    assert [(r.model, r.replica, show(r)) for r in placed] == [
        ("m0", 1, "n3:4"),
        ("m1", 0, "n3:1"),
    ]
    assert waiting == [
        "m1 replica 1: it needs room for 1 ranks of 1 GPU and 1 CPU each (nodes x ranks: 1 x 1); "
        "free: none"
    ]
    # Later, when there is room, the same call places what waited.
    again, still = place_again(spec, plan.replicas[2:], make_nodes(0, 0, 0, 5))
    assert len(again) == 2 and not still


def test_a_replica_over_nodes_moves_as_a_whole() -> None:
    spec = make_spec({"tensor_parallel": 4})
    lost = plan_placement(spec, make_nodes(2, 2)).replicas
    placed, waiting = place_again(spec, lost, make_nodes(2, 0, 2))
    assert [show(r) for r in placed] == ["n0:2 n2:2"] and not waiting
    placed, waiting = place_again(spec, lost, make_nodes(2))
    assert not placed and "free: 2 on 10.0.0.0" in waiting[0]
    placed, waiting = place_again(spec, lost, [])
    assert not placed and len(waiting) == 1


# --- pools ---------------------------------------------------------------------------------------


def test_pools_of_one_model_are_placed_apart() -> None:
    model = {
        "serving": "disaggregated",
        "prefill": {"replicas": 2},
        "decode": {"args": {"tp": 4}},
    }
    plan = plan_placement(make_spec(model), make_nodes(4, 2))
    assert [(str(r), show(r)) for r in plan.replicas] == [
        ("m0 prefill replica 0", "n1:1"),
        ("m0 prefill replica 1", "n1:1"),
        ("m0 decode replica 0", "n0:4"),
    ]
