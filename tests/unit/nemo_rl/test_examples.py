"""Recipes and deployments for NeMo-RL: each recipe resolves and has no problem, and each deployment
fits the CRD, in both of its versions, and the recipe that names it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from rollway.integrations.nemo_rl.check import find_problems, read_recipe
from rollway.weights.transports.nixl.modelexpress import MODELEXPRESS

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "nemo_rl"
DEPLOYMENTS = EXAMPLES / "deployments.yaml"
SCRIPT = ROOT / "deploy" / "nemo-rl" / "render.py"
SCHEMAS = json.loads((ROOT / "tests" / "data" / "dgd_schema.json").read_text())
"""Of Dynamo's CRD, trimmed to what the manifests use (scripts/trim_crd.py)."""
RECIPES = sorted(set(EXAMPLES.glob("*.yaml")) - {DEPLOYMENTS, EXAMPLES / "base.yaml"})
NAMES = sorted(yaml.safe_load(DEPLOYMENTS.read_text()).keys() - {"defaults"})
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": None}
Object = dict[str, Any]

spec = importlib.util.spec_from_file_location("render_nemo_rl", SCRIPT)
assert spec is not None and spec.loader is not None
render = importlib.util.module_from_spec(spec)
spec.loader.exec_module(render)


@pytest.fixture
def nemo_rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the recipes that ours inherit from, as far as ours need them; those of a
    checkout are resolved by tests/nemo_rl/test_setup.py."""
    monkeypatch.setenv("NEMO_RL_DIR", str(tmp_path))
    models = {"math-1-5b": "Qwen/Qwen2.5-1.5B", "llama-8b": "meta-llama/Llama-3.1-8B-Instruct"}
    for recipe in RECIPES:
        text = recipe.read_text()
        if not (parent := re.search(r"nemo-rl\}/(examples/\S+?\.yaml)", text)):
            continue
        name = re.search(r"dgd_name: ([\w-]+)", text)
        assert name is not None
        model = models.get(name[1]) or render.read_values(DEPLOYMENTS, name[1])["model"]["name"]
        values = {"policy": {"model_name": model, "generation": SAMPLING}}
        values |= {"env": {"should_use_nemo_gym": "nemo_gym" in parent[1]}}
        file = tmp_path / parent[1]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    return tmp_path


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_resolve_and_have_no_problem(recipe: Path, nemo_rl: Path) -> None:
    values = read_recipe(recipe).values
    assert find_problems(values) == []
    dynamo = values["policy"]["generation"]["dynamo_cfg"]
    if name := dynamo.get("dgd_name"):
        deployed = render.read_values(DEPLOYMENTS, name)["model"]["name"]
        assert deployed == values["policy"]["model_name"]  # to the byte


def test_every_deployment_has_a_recipe(nemo_rl: Path) -> None:
    recipes = [read_recipe(file).values for file in RECIPES]
    named = {r["policy"]["generation"]["dynamo_cfg"].get("dgd_name") for r in recipes}
    assert named - {None} == set(NAMES)


def make(name: str, version: str) -> list[Object]:
    values = render.read_values(DEPLOYMENTS, name)
    values["dynamo"]["apiVersion"] = version
    objects: list[Object] = render.Deployment(values).render()
    return json.loads(json.dumps(objects))  # type: ignore[no-any-return]  # as a server reads it


def list_components(graph: Object) -> list[tuple[str, Object, list[str], list[Object]]]:
    """Return name, fields, command and environment of each component, in either version."""
    spec = graph["spec"]
    listed = []
    for component in spec.get("components", ()):
        (main,) = component["podTemplate"]["spec"]["containers"]
        listed.append((component["name"], component, main["command"], main["env"]))
    for name, service in spec.get("services", {}).items():
        command = service["extraPodSpec"]["mainContainer"]["command"]
        listed.append((name, service, command, service["envs"]))
    return listed


@pytest.mark.parametrize("version", ["v1beta1", "v1alpha1"])
@pytest.mark.parametrize("name", NAMES)
def test_deployments_fit_the_schema_of_the_crd(name: str, version: str) -> None:
    graphs = [o for o in make(name, version) if o["kind"] == "DynamoGraphDeployment"]
    assert graphs[-1]["metadata"]["name"] == name
    for graph in graphs:
        validator = Draft202012Validator(SCHEMAS[graph["apiVersion"]])
        assert list(validator.iter_errors(graph)) == []
        for component, _, command, env in list_components(graph):
            if component != "worker":
                continue
            assert command[:4] == ["python3", "-m", "rollway.engine.guard", "dynamo.vllm"]
            assert "ROLLWAY_WEIGHTS_SECRET" in {each["name"] for each in env}
    images = set(re.findall(r'"image": "([^"]+)"', json.dumps(graphs)))
    assert all(re.search(r":\d+\.\d+\.\d+$", image) for image in images)  # the operator wants it


def test_what_is_special_about_some_deployments(nemo_rl: Path) -> None:
    (graph,) = make("swe-30b", "v1beta1")
    (_, worker, command, _) = list_components(graph)[1]
    assert worker["replicas"] == 24
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    (graph,) = make("planner-load", "v1beta1")
    names = {name: fields for name, fields, *_ in list_components(graph)}
    assert names["worker"]["scalingAdapter"] == {} and names["Planner"]["type"] == "planner"
    short, long, front = make("pools", "v1beta1")
    assert [g["metadata"]["name"] for g in (short, long)] == ["pool-short", "pool-long"]
    assert [name for name, *_ in list_components(front)] == ["Frontend", "GlobalRouter"]
    server, service, graph = make("modelexpress", "v1beta1")
    kinds = [each["kind"] for each in (server, service, graph)]
    assert kinds == ["Deployment", "Service", "DynamoGraphDeployment"]
    containers = {c["name"]: c for c in server["spec"]["template"]["spec"]["containers"]}
    # Versions of ModelExpress cannot read each other's messages.
    assert containers["server"]["image"].endswith(f":{MODELEXPRESS}") and "redis" in containers
    recipe = read_recipe(EXAMPLES / "modelexpress.yaml").values
    url = recipe["cluster"]["weight_sync"]["mx_config"]["mx_server_url"]
    assert url == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"


def test_the_pools_of_the_recipe_are_those_of_the_deployment(nemo_rl: Path) -> None:
    values = render.read_values(DEPLOYMENTS, "pools")
    dynamo = read_recipe(EXAMPLES / "pools.yaml").values["policy"]["generation"]["dynamo_cfg"]
    names = [f"{values['namespace']}-{pool['name']}" for pool in values["pools"]]
    assert dynamo["refit_worker_namespaces"] == names
    assert all(name in json.dumps(make("pools", "v1beta1")) for name in names)


def test_the_script_prints_manifests_and_names_what_is_wrong() -> None:
    command = [sys.executable, str(SCRIPT), str(DEPLOYMENTS)]
    done = subprocess.run([*command, "math-1-5b"], capture_output=True, text=True, check=True)
    (graph,) = yaml.safe_load_all(done.stdout)
    assert graph["apiVersion"] == "nvidia.com/v1beta1"
    old = [*command, "math-1-5b", "--api-version", "v1alpha1"]
    done = subprocess.run(old, capture_output=True, text=True, check=True)
    assert yaml.safe_load(done.stdout)["apiVersion"] == "nvidia.com/v1alpha1"
    done = subprocess.run([*command, "nothing"], capture_output=True, text=True)
    assert done.returncode == 1 and "no deployment nothing" in done.stderr
