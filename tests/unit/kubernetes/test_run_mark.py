"""The mark of a run against a stub of the API server that checks versions.

tests/kubernetes/test_run_mark.py has the same with real commands and a real server.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import ClusterError, Conflict, RunExists, RunTaken
from rollway.kubernetes import gates
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.cluster_run import ClusterRun, RunOptions
from rollway.kubernetes.manifests import Manifests, render_all
from rollway.kubernetes.objects import CONFIG_MAP, DGD, RAYCLUSTER, RAYJOB, RUN_LABEL
from rollway.kubernetes.run import start_run
from rollway.kubernetes.run_mark import RunMark, take_mark
from rollway.kubernetes.teardown import delete_objects, take_down
from rollway.kubernetes.waits import Deadline, wait_for
from tests.unit.kubernetes.objects import CLUSTER, make_infra

COMMANDS = 3
OWNER = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "math", "uid": "u"}}
NAME = "rollway-math"


class StubServer:
    """Objects with optimistic concurrency, in the place of an `ApiServer`. It deletes at once."""

    def __init__(self) -> None:
        self.served: set[Any] = set()
        self.in_cluster = False
        self.objects: dict[tuple[Any, str], Any] = {}
        self.writes: set[Any] = set()
        """The kinds of objects that were written."""
        self._versions = itertools.count(1)

    @property
    def mark(self) -> Any:
        return self.objects.get((CONFIG_MAP, NAME))

    def ask(self, asked: Any, method: str, path: str, body: Any, _: str) -> Any:
        if asked.verb == "list":
            items = [body for (kind, _), body in self.objects.items() if kind == asked.kind]
            return {"items": items}
        self.writes |= {asked.kind} if method != "GET" else set()
        key = (asked.kind, asked.name)
        live = self.objects.get(key)
        if method == "POST":
            if live is not None:
                raise Conflict("There is one.")
            self.objects[key] = live = {**body, "metadata": {**body["metadata"]}}
            live["metadata"]["uid"] = live["metadata"]["resourceVersion"] = self._choose_version()
        elif live is not None and method != "GET":
            expected = body["metadata"] if method == "PATCH" else body["preconditions"]
            for field in {"uid", "resourceVersion"} & expected.keys():
                if live["metadata"][field] != expected[field]:
                    raise Conflict("It has changed.")
            if method == "DELETE":
                del self.objects[key]
            else:
                live["metadata"] |= body["metadata"] | {"resourceVersion": self._choose_version()}
                live["data"] |= body["data"]
        return copy.deepcopy(live)

    def _choose_version(self) -> str:
        return str(next(self._versions))


def make_cluster(server: StubServer) -> Cluster:
    return Cluster(server, "rl")  # type: ignore[arg-type]


def make_mark(server: StubServer) -> RunMark:
    return RunMark(make_cluster(server), "math")


def add_object(server: StubServer, kind: Any, name: str) -> None:
    metadata = {"name": name, "labels": {RUN_LABEL: "math"}}
    body = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": {}}
    make_cluster(server).create(kind, body)


def take(mark: RunMark, *, take_over: bool = False) -> None:
    mark.take(take_over=take_over, report=lambda _: None)


def may_act(mark: RunMark) -> bool:
    with contextlib.suppress(ClusterError):
        mark.check()
        return True
    return False


ACTIONS = st.tuples(
    st.sampled_from(["start", "resume", "give", "undo", "end", "down"]),
    st.integers(0, COMMANDS - 1),
)


@given(st.lists(ACTIONS, max_size=25))
def test_two_commands_never_act_on_one_run(actions: list[tuple[str, int]]) -> None:
    server = StubServer()
    marks = [make_mark(server) for _ in range(COMMANDS)]
    overtaken: set[int] = set()
    for action, number in actions:
        mark, others = marks[number], set(range(COMMANDS)) - {number}
        if action in ("start", "resume"):
            was_held = [other for other in others if may_act(marks[other])]
            try:
                take(mark, take_over=action == "resume")
            except RunExists:
                assert action == "start" and server.mark["data"]["holder"]
                continue
            assert action == "resume" or not was_held
            overtaken |= others
            overtaken.discard(number)
        elif action == "give":
            with contextlib.suppress(ClusterError):
                mark.give_to(OWNER)
        elif action == "undo" and server.mark is not None:
            if number in overtaken:
                with pytest.raises(RunTaken):
                    mark.regain()
            else:
                with contextlib.suppress(RunTaken):
                    mark.regain()
        elif action == "end":
            with contextlib.suppress(ClusterError):
                mark.release()
        elif action == "down":
            down = take_mark(make_cluster(server), "math")
            if down is not None:
                assert not any(map(may_act, marks))
                down.discard()
            overtaken.clear()
        assert sum(map(may_act, marks)) <= 1


def test_a_second_command_is_told_who_starts_the_run_and_how_to_go_on() -> None:
    server = StubServer()
    take(make_mark(server))
    with pytest.raises(RunExists, match=r"is being started by .*\(process \d+\)") as caught:
        take(make_mark(server))
    assert "--resume" in caught.value.hint and "rollway k8s down math" in caught.value.hint


def test_what_was_made_after_a_down_is_still_removed() -> None:
    server = StubServer()
    mark = make_mark(server)
    take(mark)
    take_down(make_cluster(server), "math")
    with pytest.raises(ClusterError, match="took run math down"):
        mark.check()
    mark.regain()
    mark.check()


def test_the_mark_of_somebody_else_is_not_touched() -> None:
    server = StubServer()
    cluster = make_cluster(server)
    cluster.create(CONFIG_MAP, {"metadata": {"name": NAME}, "data": {}})
    before = cluster.get(CONFIG_MAP, NAME)
    with pytest.raises(RunExists, match="does not belong to run math"):
        take(make_mark(server), take_over=True)
    assert take_mark(cluster, "math") is None
    assert cluster.get(CONFIG_MAP, NAME) == before


def start(mark: RunMark) -> None:
    """Start a run that a RayJob owns."""
    with mark.hold(take_over=False, report=lambda _: None):
        mark.give_to(OWNER)


def test_a_refused_command_leaves_the_mark_as_it_was() -> None:
    server = StubServer()
    start(make_mark(server))
    for _ in range(2):
        owners = server.mark["metadata"]["ownerReferences"]
        assert [owner["name"] for owner in owners] == ["math"]
        assert server.mark["data"]["holder"] == ""
        hold = make_mark(server).hold(take_over=True, report=lambda _: None)
        with pytest.raises(RunExists), hold:
            raise RunExists("The RayJob of the run is there.")


@pytest.mark.parametrize("status", ["RUNNING", "SUCCEEDED"])
def test_a_second_run_changes_nothing_in_a_cluster_that_stays(
    monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """Its driver was submitted, so nobody has the mark; the second infra file differs."""
    server = StubServer()
    start(make_mark(server))
    add_object(server, RAYCLUSTER, "math")
    server.objects[RAYCLUSTER, "math"]["status"] = {"state": "ready"}
    answer = 200, json.dumps({"status": status}).encode()
    monkeypatch.setattr(Cluster, "ask_service", lambda *_, **__: answer)
    monkeypatch.setattr(Cluster, "find_drift", lambda *_: ())
    owners = server.mark["metadata"]["ownerReferences"]
    infra = make_infra(launch={"mode": "raycluster"}, kuberay={"gym": {"spec": CLUSTER}})
    server.writes.clear()
    with pytest.raises(RunExists, match=f"driver math (is|has ended as) {status}"):
        start_run(make_cluster(server), infra, render_all(infra), RunOptions())
    assert server.writes == {CONFIG_MAP}
    assert server.mark["metadata"]["ownerReferences"] == owners


def test_a_command_that_made_nothing_leaves_no_mark() -> None:
    server = StubServer()
    hold = make_mark(server).hold(take_over=False, report=lambda _: None)
    with pytest.raises(KeyboardInterrupt), hold:
        raise KeyboardInterrupt
    assert server.mark is None


def test_a_command_that_is_interrupted_while_it_takes_the_mark_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, create = StubServer(), Cluster.create

    def interrupt(*arguments: Any) -> None:
        create(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Cluster, "create", interrupt)
    hold = make_mark(server).hold(take_over=False, report=lambda _: None)
    with pytest.raises(KeyboardInterrupt), hold:
        pass
    assert server.mark is None


def test_a_run_that_is_started_is_no_failure_if_its_mark_cannot_be_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = StubServer()

    def fail(*_: Any, **__: Any) -> None:
        raise ClusterError("The API server does not answer.")

    with make_mark(server).hold(take_over=False, report=lambda _: None):
        monkeypatch.setattr(server, "ask", fail)


def test_who_is_overtaken_waits_no_longer() -> None:
    server = StubServer()
    first, second = make_mark(server), make_mark(server)
    take(first)
    add_object(server, RAYJOB, "math")
    add_object(server, DGD, "policy")
    take(second, take_over=True)
    fenced = make_cluster(server).add_fence(first.check)
    with pytest.raises(RunTaken):
        wait_for(fenced, RAYJOB, "math", lambda _: None, timeout=5, what="did not end")
    with pytest.raises(RunTaken):
        gates.wait_until_ready(fenced, [server.objects[DGD, "policy"]], timeout=5)


def test_the_end_of_a_job_is_awaited_without_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    server = StubServer()
    add_object(server, RAYJOB, "math")
    add_object(server, RAYCLUSTER, "math-1")
    status = {"jobStatus": "RUNNING", "rayClusterName": "math-1"}
    server.objects[RAYJOB, "math"]["status"] = status

    def end(_: Deadline) -> bool:
        status["jobDeploymentStatus"] = "Complete"
        return True

    monkeypatch.setattr(Deadline, "pause", end)
    monkeypatch.setattr(Cluster, "find_drift", lambda *_: ())
    infra = make_infra()
    result = start_run(make_cluster(server), infra, render_all(infra), RunOptions(resume=True))
    assert result.state == "Complete"


@pytest.mark.parametrize("is_down", [True, False])
def test_who_is_overtaken_while_it_deletes_leaves_the_new_objects(is_down: bool) -> None:
    """`down`, `--recreate` and a rollback wait for minutes until pods are gone, and look again."""
    server = StubServer()
    cluster, first, second = make_cluster(server), make_mark(server), make_mark(server)
    take(first)
    add_object(server, RAYJOB, "math")

    def report(text: str) -> None:
        if text.startswith("wait until RayJob"):
            take(second, take_over=True)
            add_object(server, DGD, "policy")

    with pytest.raises(RunTaken):
        if is_down:
            take_down(cluster, "math", report=report)
        else:
            delete_objects(cluster.add_fence(first.check), "math", timeout=5, report=report)
    assert (DGD, "policy") in server.objects
    second.check()


def test_a_job_whose_answer_was_lost_is_the_commands_own(monkeypatch: pytest.MonkeyPatch) -> None:
    server = StubServer()
    run = ClusterRun(
        make_cluster(server), make_infra(name="math"), Manifests(), RunOptions(), print, "suspended"
    )
    body = {"metadata": {"name": "math", "labels": {RUN_LABEL: "math"}}, "spec": {}}
    create = Cluster.create

    def lose(*arguments: Any) -> None:
        create(*arguments)
        raise Conflict("The request was repeated, and there is one now.")

    with run.hold():
        monkeypatch.setattr(Cluster, "create", lose)
        live, existed = run.create_or_take_up(RAYJOB, body)
        assert live["metadata"]["name"] == "math" and not existed
        assert run.create_or_take_up(RAYJOB, body) == (live, True)


def test_who_is_overtaken_sends_no_order_to_ray() -> None:
    server = StubServer()
    first, second = make_mark(server), make_mark(server)
    take(first)
    take(second, take_over=True)
    fenced = make_cluster(server).add_fence(first.check)
    with pytest.raises(RunTaken):
        fenced.ask_service("math-head-svc", 8265, "/api/jobs/math", method="DELETE")
