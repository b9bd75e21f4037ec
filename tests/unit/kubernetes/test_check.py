"""`rollway k8s check` against a stub of an API server; tests/kubernetes has the real one."""

from __future__ import annotations

import pytest

from rollway.kubernetes.check import check_cluster
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.manifests import render_all
from tests.unit.kubernetes.objects import make_infra
from tests.unit.kubernetes.test_connection import StubServer, cluster, stub
from tests.unit.kubernetes.test_render import MODEL

__all__ = ["cluster", "stub"]  # fixtures
LWS = ["leaderworkerset.x-k8s.io", "scheduling.volcano.sh"]


@pytest.mark.parametrize(
    ("ranks", "groups", "is_ok"),
    [
        (16, [], False),
        (16, LWS[:1], False),
        (16, LWS, True),
        (16, ["grove.io"], True),
        (8, [], None),
    ],
)
def test_what_runs_workers_over_several_nodes_is_asked_for(
    cluster: Cluster, stub: StubServer, ranks: int, groups: list[str], is_ok: bool | None
) -> None:
    """The operator accepts such a graph and makes no pods: only the graph's status says why."""
    answer = {
        "metadata": {"name": "rl", "resourceVersion": "1"}, "items": [],
        "status": {"allowed": True}, "groups": [{"name": name} for name in groups],
    }  # fmt: skip
    stub.script = [(200, answer)]  # to every question
    stack = {"models": [{**MODEL, "tensor_parallel": ranks}]}
    rendered = render_all(make_infra(dynamo={"policy": {"stack": stack}}))
    findings = [each for each in check_cluster(cluster, rendered) if each.what == "multinode"]
    assert [finding.ok for finding in findings] == ([] if is_ok is None else [is_ok])
    if is_ok is False:
        assert "Grove" in findings[0].text and "global.grove.install: true" in findings[0].fix
