"""A refit in the engine's loop, and the refusal of other versions, on a fake of vLLM's engine.

tests/stack has the same on real engines. Here the engine fails where a real one does not on demand.
"""

from __future__ import annotations

import gc
import importlib
import queue
import sys
import threading
import tomllib
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollway.engine import core

ORDER = {"identity": "w5", "mode": "abort", "version": 5, "leaving": -10}


Shutdown = Enum("Shutdown", ["RUNNING", "REQUESTED", "SHUTTING_DOWN"])


@dataclass
class FakeRequest:
    request_id: str
    cache_salt: str | None = None
    num_output_tokens: int = 0
    client_index: int = 0
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class FakeScheduler:
    requests: dict[str, FakeRequest] = field(default_factory=dict)

    def get_kv_connector(self) -> None:
        return None

    def finish_requests(self, ids: list[str] | None, _: object) -> list[FakeRequest]:
        names = list(self.requests) if ids is None else ids
        return [self.requests.pop(name) for name in names]


def make_executor(*sleeping: str) -> SimpleNamespace:
    return SimpleNamespace(sleeping_tags=set(sleeping), is_sleeping=bool(sleeping))


class Engine:
    """The parts of EngineCore that the hook uses. `paused` is the future of a pause that waits."""

    def __init__(self) -> None:
        self.scheduler = FakeScheduler()
        self.model_executor = make_executor()
        self.is_paused = False
        self.calls: list[str] = []
        self.aborted: list[str] = []
        self.paused: Future[None] | None = None
        self.fails: dict[str, Exception] = {}
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.staging = {"state": "ready", "error": ""}

    def add_request(self, request: FakeRequest, request_wave: int = 0) -> None:
        self.scheduler.requests[request.request_id] = request

    def collective_rpc(
        self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        self._note(method)
        return [self.staging if method == "rollway_staging" else {"strategy": "reload"}]

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None] | None:
        assert clear_cache
        self._note(f"pause {mode}")
        if mode == "abort":
            self._send_abort_outputs(self.scheduler.finish_requests(None, None))
        return self.paused

    def resume_scheduler(self) -> None:
        self._note("resume")

    def is_scheduler_paused(self) -> bool:
        return self.is_paused

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    def _send_abort_outputs(self, requests: list[FakeRequest]) -> None:
        self.aborted += [request.request_id for request in requests]

    def _send_abort_outputs_to_client(self, ids: list[str], client_index: int) -> None:
        self.aborted += ids

    def _handle_shutdown(self) -> bool:
        """As vLLM's: return whether the engine goes on."""
        state, self.shutdown_state = self.shutdown_state, Shutdown.SHUTTING_DOWN
        return state is not Shutdown.SHUTTING_DOWN

    def shutdown(self) -> None:
        """As vLLM's: it makes all objects visible to the collector, and collects."""
        gc.unfreeze()
        gc.collect()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    class EngineCore(Engine): ...

    module: Any = ModuleType("vllm.v1.engine.core")
    module.EngineCore = module.EngineCoreProc = EngineCore
    requests: Any = ModuleType("vllm.v1.request")
    requests.RequestStatus = Enum("RequestStatus", ["FINISHED_ABORTED"])
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)
    monkeypatch.setitem(sys.modules, "vllm.v1.request", requests)
    assert core.install()
    assert core.install()  # again: it is installed once
    return EngineCore()


def refit(engine: Any, **changes: Any) -> Future[list[Any]]:
    result: Future[list[Any]] = engine.collective_rpc(core.REFIT, kwargs={**ORDER, **changes})
    return result


def label(engine: Any, value: int | None) -> None:
    assert engine.collective_rpc(core.LABEL, kwargs={"label": value}) == [True]


@pytest.mark.parametrize(
    ("salt", "version"),
    [
        ("v3", 3),
        ("dynamo-cache-salt:v3", 3),
        ("v3:user", 3),
        ("v3x", None),
        ("user:v3", None),
        ("", None),
        (None, None),
    ],
)
def test_a_salt_names_a_version(salt: str | None, version: int | None) -> None:
    assert core.read_version(salt) == version


def test_an_engine_refuses_requests_of_other_versions(engine: Any) -> None:
    for name, salt in [("old", "v2"), ("right", "v3"), ("new", "v4"), ("plain", None)]:
        label(engine, 3)
        engine.add_request(FakeRequest(name, salt), 0)
    assert list(engine.scheduler.requests) == ["right", "plain"]
    assert engine.aborted == ["old", "new"]


@pytest.mark.parametrize(
    ("device", "adapters", "prompt_logprobs", "refused"),
    [
        ("cpu", {1}, 0, True),
        ("cuda", {1}, 0, False),
        ("cpu", None, 0, False),
        ("cpu", set(), 0, False),
        ("cpu", {1}, None, False),
    ],
)
def test_a_request_of_which_vllm_would_die_is_refused(
    engine: Any, device: str, adapters: set[int] | None, prompt_logprobs: int | None, refused: bool
) -> None:
    engine.vllm_config = SimpleNamespace(
        lora_config=None if adapters is None else "on",
        device_config=SimpleNamespace(device_type=device),
    )
    engine.list_loras = lambda: adapters
    request: Any = FakeRequest("scored", None)
    request.sampling_params = SimpleNamespace(prompt_logprobs=prompt_logprobs)
    engine.add_request(request, 0)
    assert (engine.aborted == ["scored"]) is refused
    assert ("scored" in engine.scheduler.requests) is not refused


def test_a_prefill_engine_leaves_fatal_log_probs_to_the_decode_engine(engine: Any) -> None:
    engine.vllm_config = SimpleNamespace(
        lora_config="on", device_config=SimpleNamespace(device_type="cpu")
    )
    engine.list_loras = lambda: {1}
    request: Any = FakeRequest("scored", None)
    request.kv_transfer_params = {"do_remote_decode": True}
    request.sampling_params = SimpleNamespace(prompt_logprobs=0)
    engine.add_request(request, 0)
    assert "scored" in engine.scheduler.requests and engine.aborted == []
    assert request.sampling_params.prompt_logprobs is None


def test_an_engine_without_a_label_admits_all(engine: Any) -> None:
    label(engine, 3)
    label(engine, None)
    engine.add_request(FakeRequest("any", "v7"), 0)
    assert list(engine.scheduler.requests) == ["any"]


def test_an_engine_that_serves_no_version_refuses_all_that_name_one(engine: Any) -> None:
    label(engine, -1)
    engine.add_request(FakeRequest("any", "v1"), 0)
    assert engine.aborted == ["any"]


def test_a_refit_stops_swaps_and_resumes(engine: Any) -> None:
    label(engine, 4)
    engine.add_request(FakeRequest("running", "v4"), 0)
    (report,) = refit(engine).result()
    assert engine.calls == ["rollway_staging", "pause abort", "rollway_swap", "resume"]
    assert report["state"] == "served" and report["frozen"] == {}
    assert report["waited_seconds"] == 0.0 < report["paused_seconds"]
    assert engine.aborted == ["running"]
    engine.add_request(FakeRequest("next", "v5"), 0)
    engine.add_request(FakeRequest("late", "v4"), 0)
    assert list(engine.scheduler.requests) == ["next"]


def test_weights_that_are_not_staged_leave_the_engine_alone(engine: Any) -> None:
    label(engine, 4)
    engine.staging = {"state": "running", "error": "still staging"}
    (report,) = refit(engine).result()
    assert report == {"state": "refused", "error": "still staging"}
    assert engine.calls == ["rollway_staging"]
    engine.add_request(FakeRequest("next", "v4"), 0)
    assert list(engine.scheduler.requests) == ["next"]


def test_an_engine_that_cannot_pause_serves_on(engine: Any) -> None:
    label(engine, 4)
    engine.fails["pause abort"] = RuntimeError("blocks are in use")
    (report,) = refit(engine).result()
    assert report["state"] == "refused" and "blocks are in use" in report["error"]
    assert engine.calls[-1] == "resume"
    assert core.is_admitted(engine, FakeRequest("next", "v4"))


def test_after_a_failed_swap_the_engine_stays_paused(engine: Any) -> None:
    label(engine, 4)
    engine.fails["rollway_swap"] = RuntimeError("2 parameters differ")
    with pytest.raises(RuntimeError, match="2 parameters differ"):
        refit(engine).result()
    assert "resume" not in engine.calls
    for version in (4, 5):
        assert not core.is_admitted(engine, FakeRequest("any", f"v{version}"))


def test_a_refit_waits_until_running_requests_have_ended(engine: Any) -> None:
    label(engine, 4)
    engine.paused = Future()
    result = refit(engine, mode="wait")
    engine.add_request(FakeRequest("late", "v4"), 0)
    assert not result.done() and engine.aborted == ["late"]
    engine.paused.set_result(None)
    (report,) = result.result()
    assert report["waited_seconds"] > 0.0
    assert engine.calls[-2:] == ["rollway_swap", "resume"]


def test_requests_that_had_not_begun_are_not_served_by_the_new_version(engine: Any) -> None:
    label(engine, 4)
    engine.paused = Future()
    for request in (FakeRequest("queued", "v4"), FakeRequest("plain", None)):
        engine.add_request(request, 0)
    result = refit(engine, mode="wait")
    engine.paused.set_result(None)
    assert result.result()[0]["state"] == "served"
    assert engine.aborted == ["queued"] and list(engine.scheduler.requests) == ["plain"]


def test_a_cancelled_refit_serves_on_and_swaps_nothing(engine: Any) -> None:
    label(engine, 4)
    engine.paused = Future()
    result = refit(engine, mode="wait")
    engine.collective_rpc(core.CANCEL)
    assert result.result()[0]["state"] == "refused"
    engine.paused.set_result(None)  # the engine becomes idle later
    assert "rollway_swap" not in engine.calls
    assert core.is_admitted(engine, FakeRequest("next", "v4"))


@pytest.mark.parametrize("ends", ["cancelled", "not staged", "cannot pause"])
def test_an_engine_that_was_paused_before_stays_paused_if_nothing_was_swapped(
    engine: Any, ends: str
) -> None:
    """A user has paused it, or an earlier refit has left it in doubt."""
    label(engine, -7)
    engine.is_paused = True
    engine.paused = Future()
    if ends == "not staged":
        engine.staging = {"state": "failed", "error": "not staged"}
    if ends == "cannot pause":
        engine.fails["pause wait"] = RuntimeError("blocks are in use")
    result = refit(engine, mode="wait")
    engine.collective_rpc(core.CANCEL)
    assert result.result(0)[0]["state"] == "refused"
    assert "resume" not in engine.calls and "rollway_swap" not in engine.calls
    assert engine._rollway_label == -7


def test_an_engine_that_was_paused_before_serves_the_new_version(engine: Any) -> None:
    engine.is_paused = True
    assert refit(engine).result(0)[0]["state"] == "served"
    assert engine.calls[-1] == "resume" and engine._rollway_label == 5


def test_a_cancel_without_a_refit_does_nothing(engine: Any) -> None:
    assert engine.collective_rpc(core.CANCEL) == [True]
    refit(engine).result()
    engine.collective_rpc(core.CANCEL)
    assert engine.calls.count("resume") == 1


def test_frozen_requests_continue_and_are_counted(engine: Any) -> None:
    label(engine, 4)
    engine.add_request(FakeRequest("a", "v4", num_output_tokens=57), 0)
    (report,) = refit(engine, mode="keep").result()
    assert report["frozen"] == {"a": 57}
    assert engine.aborted == [] and list(engine.scheduler.requests) == ["a"]


def test_frozen_requests_run_on_in_vllms_own_loop() -> None:
    """On a GPU vLLM finishes a pause inside of the loop that waits for work. This is that loop; a
    stand-in is only the scheduler, because vLLM overlaps no steps on a CPU."""
    vllm: Any = importlib.import_module("vllm.v1.engine.core")

    class Scheduler(FakeScheduler):
        pause_state = vllm.PauseState.UNPAUSED

        def set_pause_state(self, state: Enum) -> None:
            self.pause_state = state

        def has_requests(self) -> bool:
            return bool(self.requests) and self.pause_state is vllm.PauseState.UNPAUSED

    engine = object.__new__(vllm.EngineCoreProc)
    engine.scheduler = Scheduler({"a": FakeRequest("a", "v4", num_output_tokens=57)})
    engine.model_executor = make_executor()
    engine.input_queue, engine.aborts_queue = queue.Queue(), queue.Queue()
    engine.shutdown_state = vllm.EngineShutdownState.RUNNING
    engine.engines_running, engine.process_input_queue_block = False, True
    engine._idle_state_callbacks, engine._finish_pause = [], lambda clear_cache: None
    engine.batch_queue = ["a step on the device"]

    def call(engine: Any, method: str, *_: Any) -> list[Any]:
        return [{"state": "ready"} if method == "rollway_staging" else {}]

    result = core.Refit(engine, call, **{**ORDER, "mode": "keep"}).start()
    assert not result.done()
    engine.batch_queue.clear()
    # As vLLM's busy loop: it returns when there is a step to do.
    loop = threading.Thread(target=engine._process_input_queue, daemon=True)
    loop.start()
    assert result.result(10.0)[0]["frozen"] == {"a": 57}
    loop.join(10.0)
    assert not loop.is_alive(), "the engine waits for a message, and its requests stand still"


def test_a_process_without_an_engine_has_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.v1.engine.core", raising=False)
    assert not core.install()


class Ranks:
    """The queues of vLLM's MultiprocExecutor: every rank answers, and its answer stays there until
    somebody reads it."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.is_sleeping, self.sleeping_tags = False, set()
        self.response_mqs = [Answers() for _ in names]
        self.futures_queue: list[Any] = []
        self.failing: dict[str, str] = {}
        self.states = dict.fromkeys(names, "ready")

    def collective_rpc(
        self, method: str, timeout: Any, args: Any, kwargs: Any, non_block: bool = False
    ) -> Any:
        for name, answers in zip(self.names, self.response_mqs, strict=True):
            if self.failing.get(method) == name:
                answers.append((Status.FAILURE, f"{name} fails"))
            elif method == "rollway_staging":
                answers.append((Status.SUCCESS, {"state": self.states[name], "error": ""}))
            else:
                answers.append((Status.SUCCESS, {"strategy": method, "seconds": {name: 1.0}}))
        assert non_block
        return LaterAnswers()


Status = Enum("Status", ["SUCCESS", "FAILURE"])


class Answers(list[Any]):
    def dequeue(self, timeout: float | None = None) -> Any:
        return self.pop(0)


class LaterAnswers:
    get_response: Any = None

    def result(self) -> Any:
        return self.get_response()


@pytest.fixture
def two_ranks(engine: Any) -> Any:
    engine.model_executor = Ranks("first", "second")
    label(engine, 4)
    return engine


def test_a_refit_swaps_in_every_rank(two_ranks: Any) -> None:
    (report,) = refit(two_ranks).result()
    assert report["state"] == "served" and report["swap"]["strategy"] == "rollway_swap"
    assert two_ranks.calls == ["pause abort", "resume"]


def test_a_rank_that_has_not_staged_leaves_the_engine_alone(two_ranks: Any) -> None:
    two_ranks.model_executor.states["second"] = "running"
    assert refit(two_ranks).result()[0]["state"] == "refused"
    assert two_ranks.calls == []


@pytest.mark.parametrize("rank", ["first", "second"])
def test_one_rank_that_fails_in_the_swap_keeps_the_engine_paused(two_ranks: Any, rank: str) -> None:
    two_ranks.model_executor.failing["rollway_swap"] = rank
    with pytest.raises(RuntimeError, match=f"{rank} fails"):
        refit(two_ranks).result()
    assert "resume" not in two_ranks.calls
    assert not core.is_admitted(two_ranks, FakeRequest("any", "v5"))


def test_the_answers_of_all_ranks_are_read_also_if_one_failed(two_ranks: Any) -> None:
    """vLLM would leave the second rank's answer for the next call."""
    two_ranks.model_executor.failing["rollway_stage"] = "first"
    with pytest.raises(RuntimeError, match="first fails"):
        two_ranks.collective_rpc("rollway_stage")
    assert two_ranks.model_executor.response_mqs == [[], []]
    states = two_ranks.collective_rpc("rollway_staging")
    assert [state["state"] for state in states] == ["ready", "ready"]


@pytest.mark.parametrize("name", ["", "ROLLWAY_SECRET_FILE", "ROLLWAY_WEIGHTS_SECRET"])
def test_the_plugin_does_nothing_outside_a_stack(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls = []
    for variable in ("ROLLWAY_SECRET_FILE", "ROLLWAY_WEIGHTS_SECRET"):
        monkeypatch.delenv(variable, raising=False)
    if name:
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr(core, "install", lambda: calls.append(1))
    core.load_as_plugin()
    assert bool(calls) == bool(name)


def test_the_package_declares_the_plugin() -> None:
    path = Path(__file__).parents[3] / "pyproject.toml"
    points = tomllib.loads(path.read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, _, function = points["rollway"].partition(":")
    assert getattr(importlib.import_module(module), function) is core.load_as_plugin


@pytest.mark.parametrize("sleeping", [("weights", "kv_cache"), ("weights",)])
def test_nothing_is_swapped_into_memory_that_is_gone(engine: Any, sleeping: tuple[str]) -> None:
    label(engine, 4)
    engine.model_executor = make_executor(*sleeping)
    (report,) = refit(engine).result(0)
    assert report == {"state": "refused", "error": "its weights sleep"}
    assert engine.calls == [] and engine._rollway_label == 4


def test_an_engine_whose_cache_sleeps_swaps_and_resumes_when_it_is_back(engine: Any) -> None:
    """vLLM resumes by itself once all memory is there; before, it would compute without a cache."""
    label(engine, -7)
    engine.model_executor, engine.is_paused = make_executor("kv_cache"), True
    assert refit(engine).result(0)[0]["state"] == "served"
    assert engine.calls[-1] == "rollway_swap" and "resume" not in engine.calls
    assert engine._rollway_label == 5


# --- prefill and decode apart --------------------------------------------------------------------


def from_prefill(name: str, salt: str | None, computed_for: int | None) -> FakeRequest:
    """Return a request whose prompt a prefill engine has computed."""
    params = {"do_remote_prefill": True, core.transferred.COMPUTED_FOR: computed_for}
    return FakeRequest(name, salt, kv_transfer_params=params)


class Connector:
    """What vLLM's connector of a prefill engine does in the scheduler."""

    _kv_lease_duration = 30

    def request_finished(self, request: FakeRequest, blocks: Any) -> Any:
        return True, {"do_remote_prefill": True}

    def get_num_new_matched_tokens(self, request: FakeRequest, computed: int) -> Any: ...

    def update_connector_output(self, output: Any) -> None: ...


def hand_over(engine: Any, labels: list[int | None], salt: str | None) -> FakeRequest:
    """Return the request to the decode engine, of a prompt that came with the first of the labels
    and was computed by the last."""
    connector = Connector()
    engine.scheduler.get_kv_connector = lambda: SimpleNamespace(connector_scheduler=connector)
    label(engine, labels[0])
    request = FakeRequest("prompt", salt)
    engine.add_request(request, 0)
    assert list(engine.scheduler.requests) == ["prompt"]
    label(engine, labels[-1])
    _, params = connector.request_finished(request, ())
    return FakeRequest("answer", salt, kv_transfer_params=params)


@pytest.mark.parametrize(
    ("labels", "salt", "version"),
    [
        ([4], "v4", 4),
        ([4, 5], "v4", 4),  # the engine that answers has changed weights since
        ([None], "v4", None),  # it admits all
        ([None, 4], "v4", None),
        ([4], None, None),
        ([4], "mine", None),
    ],
)
def test_the_hand_over_names_the_version_that_the_engine_had_when_the_request_came(
    engine: Any, labels: list[int | None], salt: str | None, version: int | None
) -> None:
    params = hand_over(engine, labels, salt).kv_transfer_params
    assert params is not None and params[core.transferred.COMPUTED_FOR] == version


@pytest.mark.parametrize(("prefill", "is_taken"), [(4, True), (None, False)])
def test_a_decode_engine_takes_what_a_prefill_engine_of_its_version_hands_over(
    engine: Any, prefill: int | None, is_taken: bool
) -> None:
    answer = hand_over(engine, [prefill], "v4")
    decode = type(engine)()
    label(decode, 4)
    decode.add_request(answer, 0)
    assert (list(decode.scheduler.requests) == ["answer"]) is is_taken
    assert (decode.aborted == ["answer"]) is not is_taken


def test_a_decode_engine_refuses_kv_of_another_version_and_of_none(engine: Any) -> None:
    """Its prefill worker had another version, or no label, or no Rollway in its engine."""
    label(engine, 4)
    for name, computed_for in [("right", 4), ("old", 3), ("new", 5), ("unnamed", None)]:
        engine.add_request(from_prefill(name, "v4", computed_for), 0)
    unmarked = FakeRequest("unmarked", "v4", kv_transfer_params={"do_remote_prefill": True})
    engine.add_request(unmarked, 0)
    own = FakeRequest("own", "v4", kv_transfer_params={"do_remote_decode": True})
    engine.add_request(own, 0)
    assert list(engine.scheduler.requests) == ["right", "own"]
    assert engine.aborted == ["old", "new", "unnamed", "unmarked"]


def test_a_request_that_names_no_version_may_have_any_kv(engine: Any) -> None:
    label(engine, 4)
    engine.add_request(from_prefill("plain", None, 3), 0)
    assert list(engine.scheduler.requests) == ["plain"]


def test_an_engine_that_ends_does_not_search_for_garbage(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfreeze = gc.unfreeze
    monkeypatch.setattr(gc, "unfreeze", unfreeze)  # the engine's process never needs it again
    garbage = FakeScheduler()
    garbage.itself = garbage  # type: ignore[attr-defined]
    reference = weakref.ref(garbage)
    del garbage
    engine.shutdown()
    assert reference() is not None
    unfreeze()
    gc.collect()
    assert reference() is None


def test_an_engine_that_ends_releases_what_it_holds_for_decode_workers(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases: list[Any] = []
    monkeypatch.setattr(core.transferred, "release_held", lambda *args: releases.append(args[0]))
    engine.shutdown_state = Shutdown.RUNNING
    assert engine._handle_shutdown() and releases == []
    engine.shutdown_state = Shutdown.REQUESTED
    assert engine._handle_shutdown() and releases == [engine]
    assert not engine._handle_shutdown() and releases == [engine]
