"""What `scale` and `check` read of a line and of an object."""

from __future__ import annotations

import pytest

from rollway.errors import UsageError
from rollway.kubernetes.check import count_gpus
from rollway.kubernetes.scale import parse_change

GPU = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
POD = {"spec": {"containers": [GPU, {}]}}


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("worker=4", ("", "worker", 4)),
        ("policy.worker=0", ("policy", "worker", 0)),
        ("dynamo.policy.worker=32", ("policy", "worker", 32)),
    ],
)
def test_a_change_is_read(text: str, change: tuple[str, str, int]) -> None:
    assert parse_change(text) == change


@pytest.mark.parametrize("text", ["worker", "=4", "worker=", "worker=-1", "worker=²"])
def test_a_change_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_change(text)


@pytest.mark.parametrize(
    ("body", "gpus"),
    [
        ({"spec": {"components": [{"name": "w", "replicas": 3, "podTemplate": POD}]}}, 6),
        ({"spec": {"components": [{"name": "w", "multinode": {"nodeCount": 2},
                                   "podTemplate": POD}]}}, 4),
        ({"spec": {"rayClusterSpec": {"headGroupSpec": {"template": POD}, "workerGroupSpecs": [
            {"replicas": 2, "template": POD}]}}}, 6),
        ({"spec": {"replicas": 1, "template": {"spec": {"containers": [{}]}}}}, 0),
    ],
)  # fmt: skip
def test_gpus_of_all_replicas_are_counted(body: dict[str, object], gpus: int) -> None:
    assert count_gpus(body) == gpus
