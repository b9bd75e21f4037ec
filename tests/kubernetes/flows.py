"""Runs for tests on the real control plane: an infra file, both stand-in operators, the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rollway.kubernetes.client import Cluster
from rollway.kubernetes.cluster_run import Limits, RunOptions, RunResult
from rollway.kubernetes.infra import load_infra, merge
from rollway.kubernetes.manifests import Manifests, render_all
from rollway.kubernetes.objects import (
    CONFIG_MAP,
    DEPLOYMENT,
    DGD,
    POD,
    RAYCLUSTER,
    RAYJOB,
    RUN_LABEL,
    SERVICE,
    Object,
    ObjectKind,
)
from rollway.kubernetes.run import bring_up, start_run
from rollway.kubernetes.spec import Infra
from tests.kubernetes.dynamo_operator import DynamoOperator
from tests.kubernetes.kuberay_operator import KubeRayOperator
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
IMAGE = "registry/rollway:1.6.1"
RUN = "math"
KINDS = (RAYJOB, RAYCLUSTER, DGD, DEPLOYMENT, SERVICE, POD, CONFIG_MAP)
QUICK = Limits(gates=30, suspend=20, cluster=20, deployments=20, grace=2, driver=30, gone=30)

_RAY_POD = {"spec": {"containers": [{"name": "ray"}]}}
RAY: dict[str, Any] = {
    "rayVersion": "2.60.0",
    "headGroupSpec": {"template": _RAY_POD},
    "workerGroupSpecs": [{"groupName": "gpu", "replicas": 1, "template": _RAY_POD}],
}


def make_graph(name: str, workers: int = 1, **worker: Any) -> Object:
    """Return a DynamoGraphDeployment as a user would write it."""
    pod = {"spec": {"containers": [{"name": "main", "image": IMAGE}]}}
    return {
        "apiVersion": DGD.api_version,
        "kind": DGD.kind,
        "metadata": {"name": name},
        "spec": {
            "components": [
                {"name": "Frontend", "type": "frontend", "podTemplate": pod},
                {"name": "worker", "type": "worker", "replicas": workers, "podTemplate": pod}
                | worker,
            ]
        },
    }


def write_infra(folder: Path, *graphs: Object, **fields: Any) -> Path:
    """Write an infra file with these graphs beside it; one graph `policy` without any."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {}
    for graph in graphs or (make_graph("policy"),):
        name = graph["metadata"]["name"]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(graph))
        parts[name] = {"manifest": f"{name}.yaml"}
    content = {
        "name": RUN,
        "image": IMAGE,
        "dynamo": parts,
        "kuberay": {"training": {"spec": RAY}},
        "launch": {"entrypoint": "echo trained ${dynamo.policy}", "ttl_seconds": 0},
    }
    if fields.get("kuberay", {}).get("training", {}).get("existing"):
        content["kuberay"] = {}
    path = folder / "infra.yaml"
    path.write_text(yaml.safe_dump(merge(content, fields)))
    return path


@dataclass
class World:
    """A namespace with both operators, and the product's own connection to it."""

    admin: Cluster
    cluster: Cluster
    dynamo: DynamoOperator
    kuberay: KubeRayOperator
    folder: Path
    kubeconfig: Path

    def load(self, *graphs: Object, **fields: Any) -> tuple[Infra, Manifests]:
        fields = {"namespace": self.admin.namespace, **fields}
        infra = load_infra(None, write_infra(self.folder / "infra", *graphs, **fields))
        return infra, render_all(infra)

    def run(
        self,
        infra: Infra,
        *,
        reports: list[str] | None = None,
        limits: Limits = QUICK,
        **options: Any,
    ) -> RunResult:
        report = (lambda _: None) if reports is None else reports.append
        options = {"wait": False, **options}
        return start_run(
            self.cluster, infra, render_all(infra), RunOptions(limits=limits, **options), report
        )

    def up(self, infra: Infra, *, limits: Limits = QUICK, **options: Any) -> RunResult:
        return bring_up(
            self.cluster, infra, render_all(infra), RunOptions(limits=limits, **options)
        )

    def command(self, *arguments: str | Path) -> list[str]:
        """Return the command line of `rollway k8s …` for this namespace."""
        command, *rest = map(str, arguments)
        where = ["--kubeconfig", str(self.kubeconfig), "-n", self.admin.namespace]
        return [sys.executable, "-m", "rollway.cli", "k8s", command, *where, *rest]

    def call(self, *arguments: str | Path, status: int = 0) -> Any:
        """Run a command with `--json`; return what it prints."""
        ended = subprocess.run(
            [*self.command(*arguments), "--json"], capture_output=True, text=True, env=make_env()
        )
        assert ended.returncode == status, f"{ended.stdout}\n{ended.stderr}"
        return json.loads(ended.stdout)

    def list(self, kind: ObjectKind) -> list[Object]:
        return self.admin.list(kind)

    def get(self, kind: ObjectKind, name: str) -> Object:
        body = self.admin.get(kind, name)
        assert body is not None, f"{kind.kind} {name} is not there"
        return body

    def get_owners(self, kind: ObjectKind, name: str) -> list[str]:
        references = self.get(kind, name)["metadata"].get("ownerReferences") or []
        return [f"{each['kind']} {each['name']}" for each in references]

    def list_left(self, *, but: tuple[str, ...] = ()) -> list[str]:
        """Return what the namespace still has, without the objects named in `but`."""
        return [
            f"{kind.kind} {body['metadata']['name']}"
            for kind in KINDS
            for body in self.list(kind)
            if body["metadata"]["name"] not in but
            and (kind != CONFIG_MAP or RUN_LABEL in body["metadata"].get("labels", {}))
        ]

    def wait_until_empty(self, *, but: tuple[str, ...] = ()) -> None:
        """Wait for the garbage collector, which deletes in the background."""
        wait_until(lambda: not self.list_left(but=but), 60, every=0.2, what="nothing is left")


@contextmanager
def open_world(
    admin: Cluster,
    kubeconfig: Path,
    folder: Path,
    model: Path | None = None,
    kind: ObjectKind = DGD,
) -> Iterator[World]:
    """Start both operators, each with connections of its own; requests of the product are counted
    on `cluster` alone."""
    with ExitStack() as stack:
        connections = [
            Cluster.connect(kubeconfig=kubeconfig, namespace=admin.namespace) for _ in range(3)
        ]
        own, first, second = connections
        dynamo = stack.enter_context(DynamoOperator(first, folder / "dynamo", model, kind))
        kuberay = stack.enter_context(KubeRayOperator(second, folder / "kuberay"))
        yield World(admin, own, dynamo, kuberay, folder, kubeconfig)


@contextmanager
def meanwhile(action: Callable[[], object]) -> Iterator[None]:
    """Do something in a thread; an error in it is raised at the end."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised at the end
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)
    assert not errors, errors


def make_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONUNBUFFERED": "1"}
