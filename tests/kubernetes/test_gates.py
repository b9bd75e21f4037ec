"""The three gates on a real API server: what the operator, the pods and the frontend say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from rollway.errors import ClusterError, NotReady
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.gates import GateState, read_gates, wait_until_ready
from rollway.kubernetes.objects import DGD, POD
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.dynamo_operator import DynamoOperator
from tests.kubernetes.graphs import StubGraph
from tests.kubernetes.manifests import make_graph
from tests.waiting import stays, wait_until

LONG = 90.0


class Waiter:
    """`wait_until_ready` in a thread, with what it says about each graph."""

    def __init__(self, cluster: Cluster, *names: str, timeout: float = LONG, workers: int = 1):
        self.states: dict[str, GateState] = {}
        self.history: list[str] = []
        graphs = [cluster.apply(DGD, make_graph(name, workers=workers)) for name in names]
        self._pool = ThreadPoolExecutor(1)
        self.future: Future[None] = self._pool.submit(
            wait_until_ready, cluster, graphs, timeout=timeout, on_change=self._note
        )

    def _note(self, states: Mapping[str, GateState]) -> None:
        self.states = dict(states)
        self.history += [state.why for state in states.values()]

    def wait_for_why(self, text: str) -> GateState:
        def find() -> GateState | None:
            return next((s for s in self.states.values() if text in s.why), None)

        return wait_until(lambda: find() or self.future.done(), 40, what=text) and find()  # type: ignore[return-value]


@pytest.fixture
def wait(admin: Cluster) -> Iterator[Callable[..., Waiter]]:
    waiters: list[Waiter] = []

    def start(*names: str, **options: float) -> Waiter:
        waiters.append(Waiter(admin, *names, **options))  # type: ignore[arg-type]
        return waiters[-1]

    yield start
    for waiter in waiters:
        waiter.future.exception(LONG)


def stub(operator: DynamoOperator, name: str = "policy") -> StubGraph:
    wait_until(lambda: name in operator.graphs, 30)
    backing = operator.graphs[name].backing
    assert isinstance(backing, StubGraph)
    return backing


def test_a_graph_passes_all_gates(
    admin: Cluster, dynamo: DynamoOperator, wait: Callable[..., Waiter]
) -> None:
    waiter = wait("policy", workers=2)
    waiter.future.result(LONG)
    (state,) = waiter.states.values()
    assert state.gate == "" and state.operator and state.pods and state.frontend
    live = admin.get(DGD, "policy")
    assert live is not None
    assert read_gates(admin, [live])["policy"].gate == ""


def test_a_real_frontend_with_workers_passes_the_gates_through_the_proxy(
    admin: Cluster, light_dynamo: DynamoOperator, wait: Callable[..., Waiter]
) -> None:
    light_dynamo.get_faults("policy").ready_after = 2.0  # the gates are read once a second
    waiter = wait("policy", workers=2)
    waiter.future.result(LONG)
    assert any("workers" in why or "list" in why or "pods" in why for why in waiter.history)
    status, body = admin.ask_service("policy-frontend", 8000, "/v1/models")
    assert status == 200 and b'"tiny"' in body


def test_an_operator_that_is_too_early_does_not_open_the_gate(
    dynamo: DynamoOperator, wait: Callable[..., Waiter]
) -> None:
    faults = dynamo.get_faults("policy")
    faults.too_early = faults.never_ready = True
    waiter = wait("policy")
    state = waiter.wait_for_why("1 of 2 pods are ready, policy-worker-0 is not")
    assert state.operator and state.gate == "pods"
    faults.never_ready = False
    waiter.future.result(LONG)


def test_an_old_generation_does_not_count(
    admin: Cluster, dynamo: DynamoOperator, wait: Callable[..., Waiter]
) -> None:
    wait("policy").future.result(LONG)
    faults = dynamo.get_faults("policy")
    faults.old_generation = True
    waiter = wait("policy", workers=2)
    state = waiter.wait_for_why("seen generation 1 of 2")
    assert state.gate == "operator"
    faults.old_generation = False
    waiter.future.result(LONG)


def test_a_status_that_comes_in_parts_opens_the_gate_with_the_last(
    dynamo: DynamoOperator, wait: Callable[..., Waiter]
) -> None:
    dynamo.get_faults("policy").one_by_one = 1.0
    waiter = wait("policy")
    waiter.wait_for_why("condition Ready")
    waiter.future.result(LONG)


@pytest.mark.parametrize("status", [502, 503])
def test_a_ready_pod_whose_frontend_does_not_serve_is_not_ready(
    dynamo: DynamoOperator, wait: Callable[..., Waiter], status: int
) -> None:
    dynamo.get_faults("policy").ready_after = 1.0
    waiter = wait("policy")
    stub(dynamo).status = status
    state = waiter.wait_for_why(f"answers {status}")
    assert state.operator and state.pods and state.gate == "frontend"
    stub(dynamo).status = 200
    waiter.future.result(LONG)


def test_a_frontend_without_listings_is_up(
    dynamo: DynamoOperator, wait: Callable[..., Waiter]
) -> None:
    dynamo.get_faults("policy").ready_after = 1.0
    waiter = wait("policy")
    stub(dynamo).status = 404
    waiter.future.result(LONG)


def test_the_frontend_must_list_every_worker_and_every_model(
    admin: Cluster, dynamo: DynamoOperator, wait: Callable[..., Waiter]
) -> None:
    dynamo.get_faults("policy").ready_after = 1.0
    waiter = wait("policy", workers=3)
    backing = stub(dynamo)
    backing.listed, backing.models = 2, ["other"]
    assert waiter.wait_for_why("lists 2 of 3 workers").gate == "frontend"
    backing.listed = None
    waiter.wait_for_why("does not list tiny")
    backing.models = ["tiny"]
    waiter.future.result(LONG)


def test_a_failed_graph_ends_the_wait_at_once(
    dynamo: DynamoOperator, wait: Callable[..., Waiter]
) -> None:
    dynamo.get_faults("second").failed = "image not found"
    error = wait("first", "second", "third").future.exception(LONG)
    assert isinstance(error, NotReady)
    assert error.graph == "second" and "failed: image not found" in error.message


def test_a_timeout_names_gate_pod_event_and_log(
    dynamo: DynamoOperator, wait: Callable[..., Waiter]
) -> None:
    faults = dynamo.get_faults("policy")
    faults.never_ready, faults.waiting = True, "CrashLoopBackOff"
    faults.event = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    error = wait("policy", timeout=4.0).future.exception(LONG)
    assert isinstance(error, NotReady)
    assert (error.graph, error.gate, error.pod) == ("policy", "operator", "policy-worker-0")
    assert "not ready after 4 s" in error.message
    assert "CrashLoopBackOff" in error.message and "Insufficient nvidia.com/gpu" in error.event
    assert error.log == ["policy-worker-0 started", "waiting for weights"]
    assert "waiting for weights" in str(error) and error.as_json()["gate"] == "operator"


def test_a_graph_that_nobody_reconciles_times_out_at_the_first_gate(
    admin: Cluster, wait: Callable[..., Waiter]
) -> None:
    error = wait("policy", timeout=2.0).future.exception(LONG)
    assert isinstance(error, NotReady) and error.gate == "operator"


def test_a_graph_that_somebody_deletes_ends_the_wait(
    admin: Cluster, dynamo: DynamoOperator, wait: Callable[..., Waiter]
) -> None:
    dynamo.get_faults("policy").never_ready = True
    waiter = wait("policy")
    waiter.wait_for_why("pods")
    admin.delete(DGD, "policy")
    error = waiter.future.exception(LONG)
    assert isinstance(error, ClusterError) and "was deleted" in error.message


def test_replicas_are_followed_up_and_down(
    admin: Cluster, dynamo: DynamoOperator, wait: Callable[..., Waiter]
) -> None:
    wait("policy").future.result(LONG)
    wait("policy", workers=4).future.result(LONG)
    assert len(admin.list(POD)) == 5
    wait("policy", workers=2).future.result(LONG)
    wait_until(lambda: len(admin.list(POD)) == 3, 30)
    assert threading.active_count() < 60


def test_an_api_server_that_restarts_does_not_end_the_wait(
    control_plane: ControlPlane, dynamo: DynamoOperator, wait: Callable[..., Waiter]
) -> None:
    dynamo.get_faults("policy").ready_after = 1.0
    waiter = wait("policy")
    stub(dynamo).status = 503
    waiter.wait_for_why("answers 503")
    control_plane.kill()
    assert stays(lambda: not waiter.future.done(), 3.0, every=0.2)
    control_plane.revive()
    stub(dynamo).status = 200
    waiter.future.result(LONG)


def test_a_failed_graph_is_shown_beside_the_others(admin: Cluster, dynamo: DynamoOperator) -> None:
    dynamo.get_faults("second").failed = "image not found"
    for name in ("first", "second"):
        admin.apply(DGD, make_graph(name))

    def read() -> dict[str, GateState]:
        return read_gates(admin, admin.list(DGD))

    wait_until(lambda: read()["first"].gate == "", LONG, every=1.0)
    wait_until(lambda: "image not found" in read()["second"].why, LONG, every=1.0)
