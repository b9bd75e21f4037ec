"""The actor between verl and a stack: aborts, rejected and waiting requests, sleep, versions.

The stack is a stand-in, and so is verl's `TokenOutput`, since verl needs another environment;
tests/verl uses the real ones.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollway.errors import RolloutError, StackNotRunning, StartError, UsageError, WeightsError
from rollway.integrations.verl import pool as pool_module
from rollway.integrations.verl import requests as requests_module
from rollway.integrations.verl.nodes import make_placement
from rollway.integrations.verl.pool import Pool
from rollway.integrations.verl.requests import Gate, RequestRecord
from rollway.observe import steps
from rollway.observe.read import Run
from rollway.observe.record import Recorder
from rollway.rollout.sampling import Sampling
from rollway.rollout.teacher import Scores
from rollway.rollout.trajectory import Rollout, Span
from rollway.spec import StackSpec
from rollway.stack.ray.placement import Placement
from rollway.weights.offer import Offer
from tests.waiting import settle


@dataclass
class Engines:
    """A stand-in for the fleet, its admin and the client; it records calls and samples tokens."""

    calls: list[str] = field(default_factory=list)
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    finish: asyncio.Event = field(default_factory=asyncio.Event)
    version: int = 0
    in_flight: int = 0
    adapter: str | None = None
    unreachable: bool = False
    """Whether requests do not reach an engine, so that no abort ends them."""
    aborts: int = 1
    """The number of the abort that ends a request; 2: a router delivered it after the first."""
    answer_seconds: float = 0.0
    """Time from the abort to the answer."""
    control_seconds: float = 0.0
    names: str = "ab"
    """The names of its workers, a letter each."""

    async def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")
        if self.calls.count("pause abort") >= self.aborts:
            self.paused.set()

    async def resume(self) -> None:
        await asyncio.sleep(self.control_seconds)
        self.calls.append("resume")
        self.paused.clear()

    async def flush_cache(self) -> None:
        self.calls.append("flush")

    async def workers(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name, error="") for name in self.names]

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    async def wake(self) -> None:
        self.calls.append("wake")

    async def refit(self, version: int, offer: Offer, *, allow_cast: bool) -> Any:
        await asyncio.sleep(self.control_seconds)
        self.calls.append(f"refit {version}")
        self.version = version
        return SimpleNamespace(seconds=0.5, paused_seconds=0.1)

    async def load_adapter(
        self, name: str, version: int, offer: Offer, config: dict[str, Any], *, keep: int
    ) -> str:
        self.calls.append(f"load {name}@{version} of rank {config['r']}, keep {keep}")
        return f"{name}@{version}"

    def rollouts(self, *, adapter: str | None, **_: Any) -> Engines:
        self.adapter = adapter
        return self

    def teacher(self, **_: Any) -> Engines:
        return self

    async def score(self, sequences: list[list[int]]) -> list[Scores]:
        return [Scores(ids, [None, -0.5, -0.25], self.version) for ids in sequences]

    async def generate(self, prompt: list[int], sampling: Sampling, group: str) -> list[Rollout]:
        self.calls.append(f"generate in {group}")
        version = self.version
        waits = [asyncio.create_task(self.finish.wait())]
        if not self.unreachable:
            waits.append(asyncio.create_task(self.paused.wait()))
        self.in_flight += not self.unreachable
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(self.answer_seconds)
        self.in_flight -= not self.unreachable
        whole = self.finish.is_set()
        ids = [7, 8, 9] if whole else [7]
        spans = (Span(0, len(ids), version, 1),)
        reason: Any = "stop" if whole else "aborted"
        return [Rollout(prompt, ids, [-0.5] * len(ids), reason, spans, 0, adapter=self.adapter)]


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def pool(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Pool:
    module = ModuleType("verl.workers.rollout.replica")
    module.TokenOutput = SimpleNamespace  # type: ignore[attr-defined]
    for name in ("verl", "verl.workers", "verl.workers.rollout"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(requests_module, "ABORT_INTERVAL_SECONDS", 0.05)
    return make_pool(engines)


def make_pool(engines: Engines, *, frees_memory: bool = False, **options: Any) -> Pool:
    rollout = SimpleNamespace(
        engine_kwargs={"dynamo": options},
        prompt_length=8,
        response_length=8,
        tensor_model_parallel_size=1,
    )
    pool = Pool("hybrid", rollout, SimpleNamespace(path="/models/tiny"), expected=2)
    fleet = SimpleNamespace(
        pause=engines.pause,
        resume=engines.resume,
        workers=engines.workers,
        flush_cache=engines.flush_cache,
        load_adapter=engines.load_adapter,
    )
    stack = SimpleNamespace(
        fleet=fleet,
        refit=engines.refit,
        sleep=engines.sleep,
        wake=engines.wake,
        rollouts=engines.rollouts,
        teacher=engines.teacher,
        name="s",
        weights_secret="",
    )
    pool.serve(stack, frees_memory=frees_memory)  # type: ignore[arg-type]
    return pool


def make_offer(version: int, **where: Any) -> dict[str, Any]:
    return Offer("shm", version, "identity", 10, where).as_json()


def request(pool: Pool, name: str = "r") -> asyncio.Task[Any]:
    params = {"temperature": 1.0, "logprobs": True}
    answer: Awaitable[Any] = pool.generate([1, 2], params, name, group_id="g", trajectory_id="t")
    return asyncio.ensure_future(answer)


async def test_an_abort_answers_with_the_tokens_so_far(pool: Pool, engines: Engines) -> None:
    first = request(pool)
    await settle()
    # verl calls every replica, and all replicas are this pool.
    counts = await asyncio.gather(pool.abort_all_requests(), pool.abort_all_requests())
    output = await first
    assert (output.token_ids, output.log_probs, output.stop_reason) == ([7], [-0.5], "aborted")
    assert counts[0] == {"aborted_count": 1, "request_ids": ["r"]}
    assert engines.calls == ["generate in g", "pause abort"]

    waiting = request(pool)
    await settle()
    assert not waiting.done()
    engines.finish.set()
    await asyncio.gather(pool.resume_generation(), pool.resume_generation())
    output = await waiting
    assert (output.token_ids, output.stop_reason) == ([7, 8, 9], "completed")
    assert engines.calls.count("resume") == 1


async def test_a_rejecting_abort_rejects_later_requests(pool: Pool) -> None:
    await pool.abort_all_requests(reject_request=True)
    output = await asyncio.wait_for(request(pool), 10)
    assert (output.token_ids, output.stop_reason, output.extra_fields) == ([], "aborted", {})


async def test_an_abort_cancels_a_request_that_no_engine_has(pool: Pool, engines: Engines) -> None:
    engines.unreachable = True
    lost = request(pool)
    await settle()
    await pool.abort_all_requests()
    output = await asyncio.wait_for(lost, 10)
    assert (output.token_ids, output.stop_reason) == ([], "aborted")


async def test_an_abort_waits_for_slow_answers(pool: Pool, engines: Engines) -> None:
    engines.answer_seconds = 10 * requests_module.ABORT_INTERVAL_SECONDS
    slow = request(pool)
    await settle()
    await pool.abort_all_requests()
    assert engines.in_flight == 0
    assert (await slow).token_ids == [7]


async def test_a_request_that_a_router_delivers_after_the_abort_is_aborted_too(
    pool: Pool, engines: Engines
) -> None:
    engines.aborts = 2
    late = request(pool)
    await settle()
    await pool.abort_all_requests()
    assert (await late).stop_reason == "aborted"
    assert engines.calls.count("pause abort") == 2


async def test_an_abort_that_does_not_end_is_an_error(pool: Pool, engines: Engines) -> None:
    engines.aborts = 1_000_000
    pool = make_pool(engines, abort_seconds=0.1)
    stuck = request(pool)
    await settle()
    with pytest.raises(RolloutError, match="1 requests could not be aborted"):
        await pool.abort_all_requests()
    engines.finish.set()
    await stuck


async def test_a_rejecting_abort_rejects_waiting_requests(pool: Pool) -> None:
    await pool.abort_all_requests()
    waiting = request(pool)
    await settle()
    await pool.abort_all_requests(reject_request=True)
    assert (await asyncio.wait_for(waiting, 10)).stop_reason == "aborted"


async def test_a_sleeping_pool_still_rejects_requests(pool: Pool, engines: Engines) -> None:
    pool = make_pool(engines, frees_memory=True)
    await pool.abort_all_requests(reject_request=True)
    await pool.sleep()
    assert (await asyncio.wait_for(request(pool), 10)).stop_reason == "aborted"
    await pool.wake_up()
    engines.finish.set()
    assert (await request(pool)).stop_reason == "completed"


async def test_a_request_keeps_waiting_at_a_gate_that_opens_and_shuts_at_once() -> None:
    gate = Gate()
    gate.shut()
    waiting = asyncio.ensure_future(gate.admit())
    await settle()
    gate.open()
    gate.shut()
    await settle()
    assert not waiting.done()
    gate.open()
    assert await waiting


async def test_an_abort_during_a_resume_leaves_the_gate_shut(pool: Pool, engines: Engines) -> None:
    await pool.abort_all_requests()
    engines.control_seconds = 0.05
    resuming = asyncio.ensure_future(pool.resume_generation())
    await settle()
    await pool.abort_all_requests(reject_request=True)
    await resuming
    assert (await asyncio.wait_for(request(pool), 10)).stop_reason == "aborted"
    assert engines.calls == ["pause abort", "resume", "pause abort"]


async def test_an_abort_waits_for_a_refit(pool: Pool, engines: Engines) -> None:
    engines.control_seconds = 0.05
    refitting = asyncio.ensure_future(pool.refit(make_offer(1), 1))
    await settle()
    aborting = asyncio.ensure_future(pool.abort_all_requests())
    await settle()
    late = request(pool)
    await asyncio.gather(refitting, aborting)
    assert engines.calls == ["refit 1", "pause abort"] and not late.done()
    engines.finish.set()
    await pool.resume_generation()
    assert (await late).extra_fields["global_steps"] == 1


async def test_the_pieces_of_a_trajectory_add_up_across_versions(
    pool: Pool, engines: Engines
) -> None:
    """verl's client continues with the prompt and the tokens so far, until the answer is whole."""
    await pool.refit(make_offer(1), 4)
    first = request(pool)
    await settle()
    await pool.abort_all_requests()
    await pool.refit(make_offer(2), 5)
    second = request(pool)
    engines.finish.set()
    await pool.resume_generation()
    steps = [(await piece).extra_fields["global_steps"] for piece in (first, second)]
    assert steps == [4, 5]


async def test_a_prompt_that_fills_the_context_has_an_empty_answer_with_a_step(pool: Pool) -> None:
    await pool.set_global_steps(3)
    output = await pool.generate(list(range(16)), {"logprobs": True}, "r")
    assert (output.token_ids, output.stop_reason) == ([], "completed")
    assert output.extra_fields == {"global_steps": 3}


async def test_tokens_carry_the_step_whose_weights_they_came_from(
    pool: Pool, engines: Engines
) -> None:
    engines.finish.set()
    assert (await request(pool)).extra_fields["global_steps"] is None  # before the first update
    reply = await pool.refit(make_offer(1), 40)
    assert reply.figures["paused_seconds"] == 0.1
    assert (await request(pool)).extra_fields["global_steps"] == 40
    await pool.set_global_steps(41)
    assert (await request(pool)).extra_fields["min_global_steps"] == 41


async def test_engines_sleep_after_the_last_answer_and_serve_when_their_cache_is_back(
    pool: Pool, engines: Engines
) -> None:
    pool = make_pool(engines, frees_memory=True)
    running = request(pool)
    await settle()
    sleeping = [asyncio.ensure_future(pool.sleep()) for _ in range(2)]
    await settle()
    assert "sleep 1" not in engines.calls
    engines.finish.set()
    await asyncio.gather(*sleeping)
    assert (await running).stop_reason == "completed"
    assert engines.calls.count("sleep 1") == 1  # one fleet, whichever replica verl called

    waiting = request(pool)
    await pool.wake_up(tags=["weights"])
    await settle()
    assert not waiting.done() and "wake" not in engines.calls
    await pool.wake_up(tags=["kv_cache"])
    assert (await waiting).stop_reason == "completed"
    assert engines.calls.count("wake") == 1


async def test_engines_beside_the_trainer_are_updated_in_verls_order(
    pool: Pool, engines: Engines
) -> None:
    pool = make_pool(engines, frees_memory=True)
    engines.finish.set()
    await pool.sleep()
    waiting = request(pool)
    await pool.wake_up(tags=["weights"])
    await pool.refit(make_offer(1), 7)
    await pool.clear_kv_cache()
    await pool.set_global_steps(7)
    await settle()
    assert not waiting.done()
    await pool.wake_up(tags=["kv_cache"])
    assert (await waiting).extra_fields["global_steps"] == 7
    expected = ["sleep", "refit", "wake", "generate"]  # the refit takes the memory back
    assert [call.split()[0] for call in engines.calls] == expected


async def test_engines_forget_their_weights_where_every_update_brings_them(
    engines: Engines, pool: Pool
) -> None:
    pool = make_pool(engines, frees_memory=True, sleep_level=2)
    await pool.sleep()
    await pool.wake_up(tags=["weights"])
    await pool.refit(make_offer(1), 7)
    await pool.wake_up(tags=["kv_cache"])
    assert engines.calls == ["sleep 2", "refit 1", "wake"]


async def test_separate_engines_are_updated_in_verls_order(pool: Pool, engines: Engines) -> None:
    cut = request(pool)
    await settle()
    await pool.abort_all_requests(reject_request=False)
    assert (await cut).stop_reason == "aborted"
    waiting = request(pool)
    await pool.release_kv_cache()
    await pool.refit(make_offer(1), 7)
    await pool.clear_kv_cache()
    await pool.set_global_steps(7)
    await pool.resume_kv_cache()
    await settle()
    assert not waiting.done()
    engines.finish.set()
    await pool.resume_generation()
    assert (await waiting).extra_fields["global_steps"] == 7
    expected = ["generate", "pause", "refit", "flush", "resume", "generate"]
    assert [call.split()[0] for call in engines.calls] == expected


async def test_sleep_does_nothing_if_engines_keep_their_memory(
    pool: Pool, engines: Engines
) -> None:
    engines.finish.set()
    await pool.sleep()
    assert (await request(pool)).stop_reason == "completed"
    assert engines.calls == ["generate in g"]


async def test_cache_hits_are_logged_and_printed_with_the_next_weights(
    pool: Pool, engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "new" / "answers.jsonl"
    pool = make_pool(engines, request_log=log)
    engines.finish.set()
    await asyncio.gather(request(pool), request(pool))
    await pool.refit(make_offer(1), 1)
    assert "2 requests, 0.0% of 4 prompt tokens from cache" in capsys.readouterr().out
    await pool.refit(make_offer(2), 2)
    assert "requests" not in capsys.readouterr().out
    first, _ = (RequestRecord(**json.loads(line)) for line in log.read_text().splitlines())
    assert (first.group, first.trajectory, first.worker) == ("g", "t", 1)
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens) == (2, 0, 3)


@pytest.mark.usefixtures("pool")  # a stand-in for verl
async def test_affinity_says_what_stays_on_one_worker(engines: Engines) -> None:
    engines.finish.set()
    for affinity in ("group", "trajectory", "off"):
        await request(make_pool(engines, affinity=affinity))
    assert engines.calls == ["generate in g", "generate in t", "generate in None"]


class OnNodes:
    """A stand-in for a stack on Ray: what it was asked to run, and how it ends."""

    def __init__(self, engines: Engines) -> None:
        self.is_running = False
        self.fails: StartError | None = None
        self.spec: StackSpec
        self.placement: Placement
        self.end: Callable[[StackNotRunning], None]
        self._fleet = SimpleNamespace(workers=engines.workers, pause=engines.pause)
        self._engines = engines

    @asynccontextmanager
    async def up(
        self, spec: StackSpec, placement: Placement, on_end: Callable[[StackNotRunning], None]
    ) -> AsyncIterator[Any]:
        self.spec, self.placement, self.end = spec, placement, on_end
        if self.fails is not None:
            raise self.fails
        self.is_running = True
        yield SimpleNamespace(
            name=spec.name,
            frontend_url="http://127.0.0.1:9",
            rollouts=lambda **_: self._engines,
            weights_secret="s",
            fleet=self._fleet,
        )
        self.is_running = False


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, engines: Engines) -> OnNodes:
    stand_in = OnNodes(engines)
    monkeypatch.setattr(pool_module, "up_placed", stand_in.up)
    monkeypatch.setattr(pool_module.nodes, "get_own_node", lambda: "one")
    addresses = {"one": "127.0.0.1", "two": "127.0.0.2"}
    monkeypatch.setattr(pool_module.nodes, "get_address", addresses.__getitem__)
    return stand_in


def spread_pool(expected: int = 3, **options: Any) -> Pool:
    rollout = SimpleNamespace(
        engine_kwargs={"dynamo": {"log_dir": "/logs", **options}},
        prompt_length=8,
        response_length=8,
        tensor_model_parallel_size=1,
        seed=5,
        free_cache_engine=False,
    )
    return Pool("hybrid", rollout, SimpleNamespace(path="/models/tiny"), expected)


async def join_all(pool: Pool) -> list[Any]:
    places = {0: "two", 1: "one", 2: "two"}
    joins = [pool.join(replica, [(node, [])]) for replica, node in reversed(places.items())]
    return await asyncio.gather(*joins, return_exceptions=True)


async def test_a_pool_is_one_stack_on_the_nodes_of_its_replicas(nodes: OnNodes, pool: Pool) -> None:
    spread = spread_pool()
    addresses = await join_all(spread)
    assert len(set(addresses)) == 3  # verl treats equal ones as one server
    # Replicas are ranked as verl ranks them, whichever joined first and wherever the pool is.
    assert [place.ranks[0].node for place in nodes.placement.replicas] == ["two", "one", "two"]
    assert nodes.placement.services == "one"
    assert (nodes.spec.models[0].replicas, nodes.spec.models[0].seed) == (3, 5)
    assert (nodes.spec.launcher, nodes.spec.discovery) == ("ray", "etcd")
    assert nodes.spec.ray.on_node_lost == "fail"
    assert str(nodes.spec.log_dir) == "/logs/hybrid"
    assert (await spread.info()).destination.addresses == {"127.0.0.1", "127.0.0.2"}
    assert nodes.is_running
    await spread.shutdown()
    assert not nodes.is_running


async def test_a_pool_on_one_node_needs_no_etcd(nodes: OnNodes, pool: Pool) -> None:
    here = spread_pool(expected=1)
    await here.join(0, [("one", ["3"])])
    assert nodes.spec.discovery != "etcd"
    assert nodes.placement.replicas[0].ranks[0].gpu_ids == ("3",)
    await here.shutdown()


async def test_a_stack_that_ends_ends_the_run_with_its_cause(nodes: OnNodes, pool: Pool) -> None:
    spread = spread_pool()
    await join_all(spread)
    await spread.abort_all_requests()
    waiting = request(spread)
    await settle()
    nodes.end(StackNotRunning("The actor that ran the engines of node 127.0.0.2 died: memory"))
    for call in (waiting, spread.refit(make_offer(1), 1), spread.info(), spread.sleep()):
        with pytest.raises(RolloutError, match=r"node 127\.0\.0\.2 died: memory"):
            await asyncio.wait_for(call, 10)
    with pytest.raises(RolloutError, match="died: memory"):
        await request(spread)
    await spread.shutdown()


async def test_a_stack_that_cannot_start_fails_every_replica(nodes: OnNodes, pool: Pool) -> None:
    nodes.fails = StartError("On node 127.0.0.2: policy-0 exited with status 1.")
    for result in await join_all(spread_pool()):
        assert isinstance(result, StartError) and "policy-0" in result.message


def test_the_workers_of_a_replica_on_several_nodes_are_its_ranks_there(nodes: OnNodes) -> None:
    workers = [("one", ["0"]), ("one", ["1"]), ("two", ["6"]), ("two", ["7"])]
    (place,) = make_placement("m", {3: workers}, "one").replicas
    assert place.replica == 0  # of the pool; verl counts replicas of other pools, too
    assert [(rank.node, rank.node_rank, rank.gpu_ids) for rank in place.ranks] == [
        ("one", 0, ("0", "1")),
        ("two", 1, ("6", "7")),
    ]
    assert all((rank.gpus, rank.cpus) == (0, 0) for rank in place.ranks)  # verl holds them


@pytest.mark.parametrize("order", [["one", "two", "two"], ["one", "two", "one", "two"]])
def test_ranks_that_are_spread_unevenly_are_refused(nodes: OnNodes, order: list[str]) -> None:
    with pytest.raises(UsageError, match=r"replica 0 are spread unevenly.* 1 on 127\.0\.0\.1"):
        make_placement("m", {0: [(node, []) for node in order]}, "one")


async def test_an_offer_for_another_number_of_receivers_is_refused_with_the_right_one(
    pool: Pool, engines: Engines
) -> None:
    engines.names = "abc"
    reply = await pool.refit(make_offer(1, receivers=2), 1)
    assert not reply.accepted and engines.calls == []
    assert (reply.info.receivers, reply.info.next_version) == (3, 1)
    reply = await pool.refit(make_offer(1, receivers=3), 1)
    assert reply.accepted and engines.calls == ["refit 1"]
    assert (reply.info.receivers, reply.info.next_version) == (3, 2)


async def test_the_pool_alone_assigns_versions(pool: Pool, engines: Engines) -> None:
    assert (await pool.info()).next_version == 1
    with pytest.raises(WeightsError, match="Version 2 was published, and the pool expects 1"):
        await pool.refit(make_offer(2), 1)
    assert engines.calls == []


async def test_tokens_carry_the_step_of_the_adapter_they_were_sampled_with(
    pool: Pool, engines: Engines
) -> None:
    engines.finish.set()
    await pool.refit(make_offer(1), 0)  # the base, once
    await pool.load_adapter(make_offer(2), {"r": 8}, 0)
    reply = await pool.load_adapter(make_offer(3), {"r": 8}, 1)
    assert reply.info.next_version == 4
    assert engines.calls == [
        "refit 1",
        "wake",  # an adapter needs an engine that is awake
        "load policy@2 of rank 8, keep 2",
        "wake",
        "load policy@3 of rank 8, keep 2",
    ]
    assert (await request(pool)).extra_fields["global_steps"] == 1
    assert engines.adapter == "policy@3" and engines.version == 1


async def test_refits_and_adapters_are_the_trainers_steps(
    pool: Pool, engines: Engines, tmp_path: Path
) -> None:
    """The base and its first adapter come before the first step, with its number less one."""
    engines.finish.set()
    recorder = Recorder(tmp_path / "run", "driver")
    steps.register(recorder)
    try:
        await pool.refit(make_offer(1), 0)
        for version, step in ((2, 0), (3, 1), (4, 2)):
            await pool.load_adapter(make_offer(version), {"r": 8}, step)
        await pool.refit(make_offer(5), 3)
    finally:
        steps.unregister(recorder)
        recorder.close()
    entries = [entry for entry in Run(tmp_path / "run").read() if entry["kind"] == "trainer"]
    assert [entry["step"] for entry in entries] == [1, 2, 3]


async def test_a_teacher_returns_a_row_for_each_prompt_token(pool: Pool) -> None:
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    output = await pool.generate([4, 5, 6], params, "r")
    assert output.extra_fields["prompt_ids"] == [[5], [6], [0]]
    assert output.extra_fields["prompt_logprobs"] == [[-0.5], [-0.25], [0.0]]
    with pytest.raises(RolloutError, match="32 most likely tokens"):
        await pool.generate([4, 5, 6], {**params, "prompt_logprobs": 32}, "r")


@pytest.mark.parametrize("chosen", [None, "vllm"])
async def test_a_pool_whose_stack_did_not_start_returns_the_cause(
    pool: Pool,
    nodes: OnNodes,
    capfd: pytest.CaptureFixture[str],
    chosen: str | None,
) -> None:
    nodes.fails = StartError("worker-0 exited with status 1.", "Dynamo is not installed.")
    pool = spread_pool(expected=2, fallback=chosen)
    assert await pool.failure() == ""
    for result in await asyncio.gather(
        *(pool.join(replica, [("one", [])]) for replica in range(2)), return_exceptions=True
    ):
        assert isinstance(result, StartError)
    assert await pool.failure() == "worker-0 exited with status 1. Dynamo is not installed."
    warned = capfd.readouterr().err.count("THIS RUN DOES NOT USE DYNAMO")
    assert warned == (1 if chosen else 0)  # once, whatever the number of replicas
