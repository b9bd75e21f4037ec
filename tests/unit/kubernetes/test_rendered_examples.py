"""Every example renders, in both versions of the CRD, to what is stored and what the schemas allow.

`python -m tests.unit.kubernetes.test_rendered_examples` writes the stored files anew."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rollway.kubernetes.conversion import convert
from rollway.kubernetes.infra import DEFAULTS_VARIABLE, load_infra
from rollway.kubernetes.manifests import Manifests, render_all, write_yaml
from tests.unit.kubernetes.schemas import list_faults

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "kubernetes"
GOLDEN = ROOT / "tests" / "data" / "kubernetes_examples"
NAMES = sorted(p.stem for p in EXAMPLES.glob("*.yaml") if not p.stem.endswith("-graph"))
VERSIONS = ("v1beta1", "v1alpha1")


def render(name: str, version: str) -> Manifests:
    rendered = render_all(load_infra(infra=EXAMPLES / f"{name}.yaml"))
    conversions = {key: convert(graph, version) for key, graph in rendered.graphs.items()}
    assert not any(conversion.losses for conversion in conversions.values())
    graphs = {key: conversion.graph for key, conversion in conversions.items()}
    return dataclasses.replace(rendered, graphs=graphs)


def write_stored(name: str, version: str) -> str:
    """Return all objects in v1beta1, and only the graphs in v1alpha1: the rest is the same."""
    rendered = render(name, version)
    objects = rendered.objects if version == "v1beta1" else [*rendered.graphs.values()]
    return write_yaml(objects)


@pytest.fixture(autouse=True)
def no_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(DEFAULTS_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_renders_to_what_is_stored(name: str, version: str) -> None:
    stored = GOLDEN / f"{name}.{version}.yaml"
    if version == "v1alpha1" and not render(name, version).graphs:
        assert not stored.exists()
        return
    assert write_stored(name, version) == stored.read_text()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_what_the_schemas_allow(name: str, version: str) -> None:
    rendered = render(name, version)
    assert rendered.jobs
    assert not rendered.warnings
    for item in rendered.objects:
        assert not list_faults(item)


def test_no_stored_file_is_left_over() -> None:
    stored = {path.name.partition(".")[0] for path in GOLDEN.glob("*.yaml")}
    assert stored == set(NAMES)


def test_the_largest_example_keeps_off_the_broken_node() -> None:
    rendered = render("swe-24x2", "v1beta1")
    worker = rendered.graphs["policy"]["spec"]["components"][1]
    assert worker["replicas"] == 24
    pods = [worker["podTemplate"]["spec"]]
    pods.append(rendered.deployments["gym"]["spec"]["template"]["spec"])
    cluster = rendered.jobs["training"]["spec"]["rayClusterSpec"]
    pods += [group["template"]["spec"] for group in cluster["workerGroupSpecs"]]
    for pod in pods:
        assert "gpu-node-17" in yaml.safe_dump(pod["affinity"])
        assert pod["nodeSelector"]


def test_the_planner_has_four_gpus_and_an_adapter_to_scale() -> None:
    graph = render("planner", "v1beta1").graphs["policy"]
    parts = {part["name"]: part for part in graph["spec"]["components"]}
    assert parts["worker"]["scalingAdapter"] == {}
    assert parts["worker"]["replicas"] == 1
    args = parts["Planner"]["podTemplate"]["spec"]["containers"][0]["args"]
    config = yaml.safe_load(args[1])
    assert config["max_gpu_budget"] == 4
    assert config["optimization_target"] == "load"
    assert config["decode_scale_up_kv_rate"] > config["decode_scale_down_kv_rate"]


def test_the_planner_itself_reads_its_configuration() -> None:
    """ai-dynamo's own model of it, which ignores what it does not know: every key must be known."""
    pytest.importorskip("dynamo.runtime")
    graph = render("planner", "v1beta1").graphs["policy"]
    [planner] = (part for part in graph["spec"]["components"] if part["name"] == "Planner")
    text = planner["podTemplate"]["spec"]["containers"][0]["args"][1]
    command = [sys.executable, "-m", "tests.kubernetes.planner_client", "config", text]
    paths = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    ended = subprocess.run(command, env=paths, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    known, wanted = json.loads(ended.stdout.splitlines()[-1]), yaml.safe_load(text)
    assert {key: known.get(key) for key in wanted} == wanted


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for stale in GOLDEN.glob("*.yaml"):
        stale.unlink()
    for example in NAMES:
        for crd in VERSIONS:
            if crd == "v1beta1" or render(example, crd).graphs:
                (GOLDEN / f"{example}.{crd}.yaml").write_text(write_stored(example, crd))
