"""KV of other workers when an engine refuses a request or changes weights, on vLLM's real
scheduler-side connector logic where it matters, and on fakes of the engine around it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollway.engine import transferred


class Status(Enum):
    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()


@dataclass
class Request:
    request_id: str
    status: Status = Status.WAITING
    kv_transfer_params: dict[str, Any] | None = None
    client_index: int = 0
    abort_immediately: bool = False

    def is_finished(self) -> bool:
        return self.status.name.startswith("FINISHED")


@dataclass
class Engine:
    """An engine whose connector is `connector`, and what it did."""

    connector: Any
    requests: dict[str, Request] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = SimpleNamespace(
            requests=self.requests,
            get_kv_connector=lambda: self.connector,
            finish_requests=self._finish,
        )

    def _finish(self, ids: list[str], status: Status) -> list[Request]:
        ended = [self.requests[name] for name in ids]
        for request in ended:
            request.status = status
        return ended

    def _send_abort_outputs(self, requests: list[Request]) -> None:
        self.sent += [request.request_id for request in requests]

    def _send_abort_outputs_to_client(self, ids: list[str], client_index: int) -> None:
        self.sent += ids

    def add(self, request: Request, _: int) -> None:
        self.added.append(request.request_id)


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        __import__("sys").modules, "vllm.v1.request", SimpleNamespace(RequestStatus=Status)
    )


def refuse(engine: Engine, request: Request) -> None:
    transferred.refuse(engine, request, lambda e, r, wave: e.add(r, wave))


def test_a_refused_decode_request_frees_the_blocks_of_its_prefill_worker() -> None:
    engine, request = Engine(connector=object()), Request("a")
    request.kv_transfer_params = {"do_remote_prefill": True}
    refuse(engine, request)
    # The connector hears of it as of a request that ends before it begins.
    assert request.abort_immediately and engine.added == ["a"]
    assert engine.sent == ["a"]


@pytest.mark.parametrize("params", [None, {"do_remote_decode": True, "do_remote_prefill": False}])
def test_other_refused_requests_never_reach_the_scheduler(params: dict[str, Any] | None) -> None:
    engine = Engine(connector=object())
    refuse(engine, Request("a", kv_transfer_params=params))
    assert (engine.added, engine.sent) == ([], ["a"])


@pytest.mark.usefixtures("statuses")
def test_a_pause_that_waits_drops_what_waits_for_kv_and_keeps_what_runs() -> None:
    engine = Engine(connector=object())
    for status in Status:
        engine.requests[status.name] = Request(status.name, status)
    transferred.drop_waiting(engine)
    assert engine.sent == ["WAITING", "WAITING_FOR_REMOTE_KVS"]
    assert engine.requests["RUNNING"].status is Status.RUNNING


@pytest.mark.usefixtures("statuses")
def test_an_engine_that_shares_no_kv_keeps_its_queue() -> None:
    engine = Engine(connector=None)
    engine.requests["a"] = Request("a")
    transferred.drop_waiting(engine)
    assert engine.sent == []


@dataclass
class Connector:
    """What vLLM's connector does in the scheduler, as far as `watch` changes it."""

    _kv_lease_duration: int = 30
    updated: list[Any] = field(default_factory=list)

    def request_finished(self, request: Request, blocks: Any) -> tuple[bool, dict[str, Any] | None]:
        return True, {"do_remote_prefill": True}

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        return 64, True

    def update_connector_output(self, output: Any) -> None:
        self.updated.append(output)


@pytest.fixture
def watched(statuses: None) -> tuple[Engine, Connector]:
    connector = Connector()
    engine = Engine(connector=SimpleNamespace(connector_scheduler=connector))
    transferred.watch(engine)
    transferred.watch(engine)  # again, as with every request
    return engine, connector


def test_a_hand_over_names_its_version(watched: tuple[Engine, Connector]) -> None:
    """tests/unit/engine/test_core.py has who sets it, and which engine takes it."""
    _, connector = watched
    request = Request("p")
    for version in (None, 4):
        if version is not None:
            setattr(request, transferred.VERSION_FIELD, version)
        _, params = connector.request_finished(request, ())
        assert params is not None and params[transferred.COMPUTED_FOR] == version
        decoding = Request("d", kv_transfer_params=params)
        assert transferred.is_computed_for(decoding, 4) is (version == 4)
    assert transferred.is_computed_for(request, 4)  # this engine computes the prompt itself


def hand_over(connector: Connector, age: float, monkeypatch: pytest.MonkeyPatch) -> Request:
    """Return a request whose KV was computed `age` seconds ago."""
    _, params = connector.request_finished(Request("p"), ())
    computed_at = params[transferred.COMPUTED_AT] if params else 0.0
    monkeypatch.setattr(transferred.time, "time", lambda: computed_at + age)
    return Request("a", Status.WAITING_FOR_REMOTE_KVS, params)


@pytest.mark.parametrize(("age", "answer"), [(1.0, (64, True)), (16.0, (0, False))])
def test_a_decode_engine_computes_the_prompt_if_the_hand_over_is_old(
    watched: tuple[Engine, Connector],
    age: float,
    answer: tuple[int, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, connector = watched
    request = hand_over(connector, age, monkeypatch)
    assert connector.get_num_new_matched_tokens(request, 0) == answer


@pytest.mark.parametrize(("age", "aborted"), [(29.0, []), (31.0, ["a"])])
def test_kv_that_was_read_after_its_lease_is_not_used(
    watched: tuple[Engine, Connector],
    age: float,
    aborted: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, connector = watched
    engine.requests["a"] = hand_over(connector, age, monkeypatch)
    connector.update_connector_output(SimpleNamespace(finished_recving={"a"}))
    assert engine.sent == aborted
    assert len(connector.updated) == 1  # the blocks are freed in any case


def test_held_blocks_expire_in_the_scheduler_and_in_every_worker() -> None:
    scheduler = SimpleNamespace(_reqs_need_send={"a": 30.0})
    engine = Engine(connector=SimpleNamespace(connector_scheduler=scheduler))
    calls: list[str] = []
    transferred.release_held(engine, lambda _, method, *__: calls.append(method) or [])
    assert scheduler._reqs_need_send == {"a": transferred.EXPIRED}
    assert calls == ["rollway_release_kv"]


def test_a_connector_without_leases_is_left_alone() -> None:
    engine = Engine(connector=SimpleNamespace())
    transferred.release_held(engine, lambda *_: [])
    assert transferred.expire(None) == 0


def test_vllm_frees_blocks_whose_lease_was_ended() -> None:
    """What `release_in_worker` relies on: vLLM reaps leases that are over at its next step."""
    worker_class = pytest.importorskip(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"
    ).NixlBaseConnectorWorker
    leases = {"a": 1e18, "b": 1e18}
    transferred.expire(leases)
    worker = SimpleNamespace(
        _reqs_to_send=leases,
        _reqs_to_process={"a", "b"},
        consumer_notification_counts_by_req={},
        expected_consumer_notifications_by_req={},
        xfer_stats=SimpleNamespace(record_kv_expired_req=lambda: None),
    )
    done: set[str] = set()
    worker_class._reap_expired_send_leases(worker, done)
    assert done == {"a", "b"} and leases == {}


def test_vllm_tells_the_prefill_worker_of_a_request_that_never_began() -> None:
    """What `refuse` relies on: the connector asks for an empty transfer, which frees the blocks."""
    module = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler")
    scheduler = SimpleNamespace(
        _stop_heartbeat=lambda _: None, _reqs_need_recv={}, is_bidirectional_kv_xfer_enabled=False
    )
    request = Request("a", Status.FINISHED_ABORTED, {"do_remote_prefill": True})
    held, _ = module.NixlPullConnectorScheduler.request_finished(scheduler, request, ((),))
    assert not held
    assert scheduler._reqs_need_recv == {"a": (request, [], (), False)}


@pytest.mark.parametrize(
    ("is_disaggregated", "has_cuda", "wanted", "delay"),
    [
        (True, False, 0, transferred.POLL_MICROSECONDS),
        (True, False, 50, 50),
        (True, True, 0, 0),
        (False, False, 0, 0),
    ],
)
def test_nixls_thread_takes_no_core_on_a_machine_without_cuda(
    monkeypatch: pytest.MonkeyPatch,
    is_disaggregated: bool,
    has_cuda: bool,
    wanted: int,
    delay: int,
) -> None:
    api: Any = ModuleType("nixl._api")
    api.nixlBind = SimpleNamespace(nixlAgent=lambda name, config: (name, config.pthrDelay))
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_cuda)
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_PORT", raising=False)
    if is_disaggregated:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "1")
    for _ in range(2):  # a second time changes nothing
        transferred.rest_between_polls()
    assert api.nixlBind.nixlAgent("a", SimpleNamespace(pthrDelay=wanted)) == ("a", delay)


def test_nixl_has_the_delay_that_is_set() -> None:
    """The names in NIXL that `rest_between_polls` relies on."""
    api = pytest.importorskip("nixl._api")
    assert callable(api.nixlBind.nixlAgent)
    assert api.nixlBind.nixlAgentConfig().pthrDelay >= 0
