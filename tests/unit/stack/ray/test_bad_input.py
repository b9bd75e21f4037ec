"""What a spec and the nodes of a cluster show to be wrong: a sentence with the cause, one with the
fix, before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from rollway.errors import SpecError
from rollway.spec import load_spec
from rollway.stack.ray.placement import plan_placement
from tests.unit.stack.ray.stand_in import make_nodes

DECODE_ONLY = {"serving": "disaggregated", "decode": {"replicas": 2}}
CASES: list[tuple[str, dict[str, Any], tuple[int, ...], str, str]] = [
    # what, fields of the spec over a sound one, GPUs of the nodes, the cause, the fix
    ("no nodes", {}, (), "The cluster has no nodes.", "`ray start`"),
    ("only the head", {"ray": {"head": "avoid"}}, (8,), "has only its head node",
     "set `ray.head: use`"),
    ("no such label", {"ray": {"labels": {"zone": "x"}}}, (8,),
     "None of the 1 nodes that the stack may use has the labels of `ray.labels` (zone=x)",
     "change `ray.labels`"),
    ("a fraction with TP", {"model": {"tensor_parallel": 2}, "ray": {"gpus": 0.5}}, (8,),
     "`ray.gpus` is 0.5, but replicas of `m` have several ranks", "Use whole GPUs"),
    ("a fraction with DP in args", {"model": {"args": {"dp": 2}}, "ray": {"gpus": 0.5}}, (8,),
     "`ray.gpus` is 0.5", "one rank per replica"),
    ("more GPUs than there are", {"model": {"replicas": 9}}, (8,),
     "needs 9 ranks of 1 GPU and 1 CPU each, but the nodes that it may use have room for 8",
     "Lower `replicas`"),
    ("no GPUs at all", {}, (0, 0), "have room for 0", "Set `ray.gpus: 0` for engines on the CPU"),
    ("too few CPUs", {"ray": {"cpus": 99}}, (8,), "No node has 99 CPUs (`ray.cpus`) free", "add"),
    ("no even split", {"model": {"tensor_parallel": 8}}, (6, 3, 3),
     "have room for 12 ranks of 1 GPU and 1 CPU each, but no even split",
     "2 x 4 (1 nodes have 4), 4 x 2 (3 nodes have 2)"),
    ("the launcher's options", {"model": {"args": {"nnodes": 2}}}, (8,),
     "`args.nnodes` of `m` says which part of a replica a process is", "Remove it"),
    ("the same, with underscores", {"model": {"args": {"data_parallel_rank": 0}}}, (8,),
     "`args.data_parallel_rank` of `m`", "`data_parallel`"),
    ("two sizes", {"model": {"tensor_parallel": 2, "args": {"tp": 4}}}, (8,),
     "`tensor_parallel` is 2, but `args.tp` is 4", "keep one of them"),
    ("decode without prefill", {"model": DECODE_ONLY}, (8,), "has no `prefill` workers",
     "give both"),
    ("two installers", {"model": {"runtime_env": {"pip": ["a"]}}, "runtime_env": {"uv": ["b"]}},
     (8,), "under both `pip` and `uv`", "list all packages under one of them"),
    ("no models", {"models": []}, (8,), "names no model", "`models: [{path: …}]`"),
    ("two models of one name", {"models": [{"path": "org/m"}, {"path": "other/m"}]}, (8,),
     "two models are served under one name (m)", "give each a `name`"),
    ("a router without events", {"model": {"args": {"enable-prefix-caching": False}},
     "router": {"args": {"router-kv-events": True}}}, (8,),
     "workers of `m` give no KV events", "change one of the two"),
    ("a stack to join", {"placed": []}, (8,), "fills in `join` and `placed` itself", "remove them"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "gpus", "cause", "fix"), [case[1:] for case in CASES],
                         ids=[case[0] for case in CASES])  # fmt: skip
def test_what_cannot_run_is_refused_with_cause_and_fix(
    fields: dict[str, Any], gpus: tuple[int, ...], cause: str, fix: str
) -> None:
    fields = dict(fields)
    model = {"path": "org/m", **fields.pop("model", {})}
    with pytest.raises(SpecError) as failure:
        spec = load_spec({"launcher": "ray", "models": [model], **fields})
        plan_placement(spec, make_nodes(*gpus))
    assert cause in str(failure.value) and fix in str(failure.value)
    assert failure.value.exit_code == 2
