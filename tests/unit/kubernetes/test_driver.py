"""What states of KubeRay and answers of Ray's dashboard mean. The dashboard is a fake."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from rollway.errors import ClusterError
from rollway.kubernetes import driver
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.driver import RayDashboard, is_provisioned
from rollway.kubernetes.run import _decide_cluster_name, _decide_suspended


class FakeCluster:
    """Answers in turn."""

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str, Any]] = []

    def ask_service(
        self, service: str, port: int, path: str, *, method: str, body: bytes | None
    ) -> tuple[int, bytes]:
        self.asked.append((method, path, json.loads(body) if body else None))
        return self.answers.pop(0)


def make_dashboard(*answers: tuple[int, bytes]) -> tuple[RayDashboard, FakeCluster]:
    fake = FakeCluster(*answers)
    return RayDashboard(cast(Cluster, fake), "head-svc"), fake


@pytest.mark.parametrize("status", [400, 500])
def test_a_job_that_exists_already_is_a_success(status: int) -> None:
    dashboard, _ = make_dashboard((status, b"Job with submission_id x already exists."))
    assert dashboard.submit("x", "python train.py") is False


def test_a_submission_has_the_jobs_id_and_only_fields_that_are_set() -> None:
    dashboard, fake = make_dashboard((200, b"{}"))
    assert dashboard.submit("x", "train", runtime_env={"env_vars": {"A": "1"}}, metadata=None)
    [(method, path, body)] = fake.asked
    assert (method, path) == ("POST", "/api/jobs/")
    expected = {"entrypoint": "train", "submission_id": "x"}
    assert body == {**expected, "runtime_env": {"env_vars": {"A": "1"}}}


def test_a_dashboard_that_is_not_up_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(driver.time, "sleep", pauses.append)
    dashboard, fake = make_dashboard((503, b""), (502, b""), (404, b""))
    assert dashboard.find_job("x") is None
    assert len(fake.asked) == 3
    assert all(pause >= 1.0 for pause in pauses)


def test_a_job_is_forgotten_when_it_has_ended() -> None:
    """Ray refuses to delete one that runs, and then its id is not free."""
    answers = [(200, b"{}"), (200, b'{"status": "RUNNING"}'), (200, b'{"status": "STOPPED"}')]
    dashboard, fake = make_dashboard(*answers, (200, b"{}"))
    dashboard.delete_job("x")
    assert [method for method, _, _ in fake.asked] == ["POST", "GET", "GET", "DELETE"]


def test_a_refusal_has_the_dashboards_words() -> None:
    dashboard, _ = make_dashboard((400, b"runtime_env is not valid"))
    with pytest.raises(ClusterError, match="runtime_env is not valid"):
        dashboard.submit("x", "train")


@pytest.mark.parametrize(
    ("status", "provisioned"),
    [
        ({}, False),
        ({"state": "ready"}, True),
        ({"state": "ready", "conditions": [{"type": "RayClusterProvisioned", "status": "False"}]},
         False),
        ({"conditions": [{"type": "RayClusterProvisioned", "status": "True"}]}, True),
    ],
)  # fmt: skip
def test_a_cluster_is_provisioned_by_its_condition(
    status: dict[str, Any], provisioned: bool
) -> None:
    assert is_provisioned({"status": status}) is provisioned


def make_job(suspend: bool, **status: str) -> dict[str, Any]:
    return {"metadata": {"name": "train"}, "spec": {"suspend": suspend}, "status": status}


@pytest.mark.parametrize(
    ("suspend", "state", "name", "taken"),
    [
        # A suspended job has the name of a cluster that never comes, until it is Suspended.
        (True, "Initializing", "train-old", None),
        (False, "Suspending", "train-old", None),
        (False, "Suspended", "", None),
        (False, "", "", None),
        (False, "Initializing", "train-new", "train-new"),
        (False, "Running", "train-new", "train-new"),
    ],
)
def test_a_clusters_name_is_read_only_after_the_resumption(
    suspend: bool, state: str, name: str, taken: str | None
) -> None:
    job = make_job(suspend, jobDeploymentStatus=state, rayClusterName=name)
    assert _decide_cluster_name(job) == taken


@pytest.mark.parametrize("state", ["", "Initializing", "Suspending"])
def test_a_job_that_is_being_suspended_is_waited_for(state: str) -> None:
    assert _decide_suspended(make_job(True, jobDeploymentStatus=state)) is None


@pytest.mark.parametrize("state", ["ValidationFailed", "Failed", "Complete", "Running"])
def test_a_job_that_cannot_be_suspended_is_an_error(state: str) -> None:
    with pytest.raises(ClusterError) as caught:
        _decide_suspended(make_job(True, jobDeploymentStatus=state, message="because"))
    assert "inference-first" in caught.value.hint
