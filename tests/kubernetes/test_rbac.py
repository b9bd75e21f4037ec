"""The shipped Roles are exactly enough: real service accounts, one verb less at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import rollway
from rollway.errors import Forbidden, RollwayError
from rollway.kubernetes.check import USER, VIEWER, Permission
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.gates import wait_until_ready
from rollway.kubernetes.objects import DGD, POD, RAYJOB, SERVICE, Object
from rollway.kubernetes.status import read_status, read_versions
from rollway.kubernetes.teardown import take_down
from tests.kubernetes.accounts import connect_as
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.dynamo_operator import DynamoOperator
from tests.kubernetes.flows import RUN, World, open_world
from tests.kubernetes.graphs import SECRET
from tests.kubernetes.kinds import ROLE, ROLE_BINDING, SERVICE_ACCOUNT
from tests.kubernetes.manifests import make_graph
from tests.waiting import wait_until

ROLES = Path(__file__).parents[2] / "deploy" / "rbac"
SLEEP: dict[str, Any] = {"launch": {"entrypoint": "sleep 60", "ttl_seconds": 600}}


@pytest.fixture
def world(admin: Cluster, kubeconfig: Path, tmp_path: Path) -> Iterator[World]:
    with open_world(admin, kubeconfig, tmp_path) as world:
        yield world


def read_role(name: str) -> list[Object]:
    """Return the rules of a shipped Role."""
    for path in sorted(ROLES.glob("*.yaml")):
        for body in yaml.safe_load_all(path.read_text()):
            if body and body["kind"] == "Role" and body["metadata"]["name"] == name:
                return list(body["rules"])
    raise AssertionError(f"deploy/rbac has no Role {name}")


def list_grants(rules: list[Object]) -> set[tuple[str, str, str]]:
    return {
        (verb, group, resource)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def drop(rules: list[Object], verb: str, resource: str) -> list[Object]:
    """Return rules without one verb on one resource."""
    kept = []
    for rule in copy.deepcopy(rules):
        for each in rule["resources"]:
            verbs = [v for v in rule["verbs"] if (v, each) != (verb, resource)]
            if verbs:
                kept.append({**rule, "resources": [each], "verbs": verbs})
    return kept


@pytest.fixture
def become(world: World, control_plane: ControlPlane, tmp_path: Path) -> Any:
    """Make the product run as a service account with these rules; called again, change them."""
    made: list[str] = []

    def call(rules: list[Object]) -> None:
        body = {"metadata": {"name": "rollway-cli"}, "rules": rules}
        if made:
            world.admin.patch(ROLE, "rollway-cli", {"rules": rules})
            return
        made.append("rollway-cli")
        world.admin.create(SERVICE_ACCOUNT, {"metadata": {"name": "rollway-cli"}})
        world.admin.create(ROLE, body)
        subject = {
            "kind": "ServiceAccount", "name": "rollway-cli", "namespace": world.admin.namespace,
        }  # fmt: skip
        reference = {
            "apiGroup": ROLE.group, "kind": "Role", "name": "rollway-cli",
        }  # fmt: skip
        world.admin.create(
            ROLE_BINDING,
            {"metadata": {"name": "rollway-cli"}, "subjects": [subject], "roleRef": reference},
        )
        token = control_plane.make_token(world.admin.namespace, "rollway-cli")
        path = control_plane.write_kubeconfig(tmp_path / "account", token, world.admin.namespace)
        world.kubeconfig = path
        world.cluster = Cluster.connect(kubeconfig=path, namespace=world.admin.namespace)

    return call


@pytest.mark.parametrize(("name", "table"), [("rollway-cli", USER), ("rollway-viewer", VIEWER)])
def test_a_shipped_role_grants_what_the_table_says(
    name: str, table: tuple[Permission, ...]
) -> None:
    wanted = {(verb, each.kind.group, each.resource) for each in table for verb in each.verbs}
    assert wanted <= list_grants(read_role(name))


def test_every_flow_passes_with_the_shipped_role(world: World, become: Any) -> None:
    become(read_role("rollway-cli"))
    infra, _ = world.load(**SLEEP)
    assert world.run(infra).state == "submitted"
    assert {part.kind for part in read_status(world.cluster, RUN).parts} >= {"RayJob", DGD.kind}
    world.call("scale", RUN, "policy.worker=2")
    world.call("logs", RUN, "--role", "driver")
    assert world.call("check", "--infra", world.folder / "infra" / "infra.yaml")["ok"]
    take_down(world.cluster, RUN)
    world.wait_until_empty()
    assert world.run(infra, order="inference-first").state == "submitted"
    take_down(world.cluster, RUN)
    world.wait_until_empty()
    world.up(infra)
    take_down(world.cluster, RUN)
    world.wait_until_empty()


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("create", "rayjobs"),
        ("get", "rayjobs"),
        ("patch", "rayjobs"),
        ("list", "rayclusters"),
        ("create", "dynamographdeployments"),
        ("patch", "dynamographdeployments"),
        ("list", "dynamographdeployments"),
        ("list", "pods"),
        ("get", "services/proxy"),
        ("create", "configmaps"),
        ("patch", "configmaps"),
    ],
)
def test_one_verb_less_is_named_and_leaves_nothing(
    world: World, become: Any, verb: str, resource: str
) -> None:
    become(drop(read_role("rollway-cli"), verb, resource))
    infra, _ = world.load(**SLEEP)
    with pytest.raises(Forbidden) as caught:
        world.run(infra)
    rule = caught.value.rule
    assert (rule["verbs"], rule["resources"]) == ([verb], [resource])
    take_down(world.admin, RUN)  # where the rollback itself was refused
    world.wait_until_empty()


def test_check_has_one_row_for_what_is_missing(world: World, become: Any) -> None:
    become(drop(read_role("rollway-cli"), "delete", "dynamographdeployments"))
    world.load(**SLEEP)
    answer = world.call("check", "--infra", world.folder / "infra" / "infra.yaml", status=1)
    wrong = [finding for finding in answer["findings"] if not finding["ok"]]
    assert [finding["what"] for finding in wrong] == ["may dynamographdeployments"]
    assert "delete" in wrong[0]["text"]


def test_a_permission_that_is_taken_away_in_the_middle_is_named(world: World, become: Any) -> None:
    rules = read_role("rollway-cli")
    become(rules)
    infra, _ = world.load(**SLEEP)
    world.dynamo.get_faults("policy").ready_after = 2.0

    class Reports(list[str]):
        def append(self, text: str) -> None:
            if text.startswith("wait for the gates"):
                become(drop(rules, "patch", "rayjobs"))
                wait_until(lambda: not world.cluster.may("patch", RAYJOB), 30)

    with pytest.raises(Forbidden) as caught:
        world.run(infra, reports=Reports())
    assert caught.value.rule["resources"] == ["rayjobs"]
    assert "Nothing of math was left behind" in caught.value.hint
    world.wait_until_empty()


def test_a_rollback_that_is_forbidden_says_what_to_do(world: World, become: Any) -> None:
    become(drop(read_role("rollway-cli"), "delete", "rayjobs"))
    world.dynamo.get_faults("policy").failed = "no such image"
    infra, _ = world.load(**SLEEP)
    with pytest.raises(RollwayError, match="no such image") as caught:
        world.run(infra)
    assert "The rollback failed" in caught.value.hint
    assert "rollway k8s down" in caught.value.hint
    take_down(world.admin, RUN)
    world.wait_until_empty()


def test_a_viewer_sees_and_changes_nothing(world: World, become: Any) -> None:
    infra, _ = world.load(**SLEEP)
    world.run(infra)
    become(read_role("rollway-viewer"))
    assert read_status(world.cluster, RUN).parts
    with pytest.raises(Forbidden):
        take_down(world.cluster, RUN)
    take_down(world.admin, RUN)
    world.wait_until_empty()


def test_versions_of_workers_are_shown_with_the_shipped_role(
    control_plane: ControlPlane,
    admin: Cluster,
    light_dynamo: DynamoOperator,
    tmp_path: Path,
    base_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From outside of the cluster, to real workers, with the token of a service account."""
    applied = admin.apply(DGD, make_graph(workers=2))
    wait_until_ready(admin, [applied], timeout=90)
    user = connect_as(control_plane, admin, tmp_path, read_role("rollway-cli"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "user"))
    with rollway.attach(f"dgd://{admin.namespace}/policy", secret=SECRET) as stack:
        stack.refit(1, base_model)
    assert list(read_versions(user, "policy").values()) == [1, 1]
    for verb in ("get", "create"):
        admin.patch(ROLE, "user", {"rules": drop(read_role("rollway-cli"), verb, "pods/proxy")})
        wait_until(lambda verb=verb: not user.may(verb, POD, "proxy"), 30)
        assert "proxy of pods" in read_versions(user, "policy")["unknown"]
    admin.patch(ROLE, "user", {"rules": read_role("rollway-viewer")})
    wait_until(lambda: not user.may("get", SERVICE, "proxy"), 30)
    assert "services/proxy" in read_versions(user, "policy")["unknown"]


def test_a_training_that_runs_survives_a_second_command_that_fails(
    world: World, become: Any
) -> None:
    infra, _ = world.load(**SLEEP)
    world.run(infra)
    wait_until(lambda: world.get(RAYJOB, RUN)["status"].get("jobStatus"), 30)
    before = world.list_left()
    become(drop(read_role("rollway-cli"), "list", "rayjobs"))
    with pytest.raises(Forbidden):
        world.run(infra, resume=True)
    assert world.list_left() == before
    take_down(world.admin, RUN)
    world.wait_until_empty()
