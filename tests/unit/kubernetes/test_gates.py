"""What a graph's spec asks for."""

from __future__ import annotations

from typing import Any

from rollway.kubernetes.gates import read_expected


def make_part(args: list[str], **more: Any) -> dict[str, Any]:
    container = {"name": "main", "command": ["sh", "-c"], "args": args}
    return {"podTemplate": {"spec": {"containers": [container]}}, **more}


def test_pods_workers_and_models_are_counted() -> None:
    components = [
        {"name": "Frontend", "type": "frontend"},
        make_part(
            ["exec python -m dynamo.vllm --served-model-name policy"],
            name="prefill",
            type="prefill",
            replicas=2,
        ),
        make_part(
            ["python", "-m", "dynamo.vllm", "--served-model-name=policy"],
            name="decode",
            type="decode",
            replicas=3,
            multinode={"nodeCount": 2},
        ),
        make_part(["--served-model-name", "idle"], name="off", type="worker", replicas=0),
        {"name": "Planner", "type": "planner", "replicas": 1},
    ]
    graph = {"metadata": {"name": "g"}, "spec": {"components": components}}
    expected = read_expected(graph)
    assert (expected.pods, expected.workers) == (1 + 2 + 6 + 1, 5)
    assert expected.models == ("policy",) and expected.frontend == "g-frontend"


def test_a_model_that_only_the_pod_knows_is_not_expected() -> None:
    part = make_part(["run --served-model-name $MODEL"], name="worker", type="worker")
    graph = {"metadata": {"name": "g"}, "spec": {"components": [part]}}
    assert read_expected(graph).models == ()
    assert read_expected(graph).frontend is None
