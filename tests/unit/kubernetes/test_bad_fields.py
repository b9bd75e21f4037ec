"""Fields of a wrong type are explained; rendering never stops for another reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollway.errors import RollwayError
from rollway.kubernetes.conversion import convert
from rollway.kubernetes.manifests import render_all
from rollway.yaml_input import copy_plain
from tests.unit.kubernetes.objects import CLUSTER, LONG, OLD, make_infra

WRONG = st.sampled_from(
    [None, 0, 1.5, True, "text", "", [], {}, [1], [None], ["a"], [{}], {"a": 1}]
)
RUN: dict[str, Any] = {
    "hf_cache": {"existingClaim": "hf", "mountPath": "/hf"},
    "networking": {"env": {"A": "1"}, "roce": {"template": "r"}},
    "placement": {"exclude_nodes": ["bad"], "nodeSelector": {"a": "b"}},
    "scheduler": {"kind": "kueue", "queue": "q"},
    "imagePullSecrets": ["pull"],
}


def list_places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all nodes of plain data."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    places = [path] if path else []
    if isinstance(value, (dict, list)):
        for key, item in items:
            places += (
                list_places(item, (*path, key))
                if isinstance(item, (dict, list))
                else [(*path, key)]
            )
    return places


def replace(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = copy_plain(value)
    target = changed
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = new
    return changed


GRAPHS = {
    "new": yaml.safe_load(LONG),
    "converted": convert(yaml.safe_load(LONG), "v1alpha1").graph,
    "old": yaml.safe_load(OLD),
}


@pytest.mark.parametrize("kind", GRAPHS)
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_manifest_with_a_wrong_field_renders_or_is_explained(
    kind: str, data: st.DataObject, tmp_path: Path
) -> None:
    graph = GRAPHS[kind]
    path = data.draw(st.sampled_from(list_places(graph)))
    changed = replace(graph, path, data.draw(WRONG))
    file = tmp_path / "graph.yaml"
    file.write_text(json.dumps(changed))
    try:
        render_all(make_infra(dynamo={"policy": {"manifest": str(file)}}, **RUN))
    except RollwayError as error:
        assert error.message


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_cluster_with_a_wrong_field_renders_or_is_explained(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list_places(CLUSTER)))
    spec = replace(CLUSTER, path, data.draw(WRONG))
    try:
        infra = make_infra(**RUN)
        infra.kuberay["training"].spec = spec
        render_all(infra)
    except RollwayError as error:
        assert error.message
