"""The actor between verl and a stack: aborts, rejected and waiting requests, sleep, versions.

The stack is a stand-in, and so is verl's `TokenOutput`, since verl is in an environment of its own;
tests/verl has the real ones.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollway.config import StackSpec
from rollway.errors import RolloutError, StartError, UsageError, WeightsError
from rollway.fleet.discovery import Worker
from rollway.integrations.verl import pool as pool_module
from rollway.integrations.verl import updates
from rollway.integrations.verl.gate import Gate
from rollway.integrations.verl.options import Options
from rollway.integrations.verl.pool import Pool
from rollway.integrations.verl.traffic import Traffic, read_log
from rollway.integrations.verl.updates import across_machines
from rollway.rollout.sampling import Sampling
from rollway.rollout.teacher import Scores
from rollway.rollout.trajectory import Rollout, Span
from rollway.weights.offer import Offer


@dataclass
class Engines:
    """As a fleet, as its admin, and as the client: what they were told, and what they sample."""

    calls: list[str] = field(default_factory=list)
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    finish: asyncio.Event = field(default_factory=asyncio.Event)
    version: int = 0
    in_flight: int = 0
    adapter: str | None = None
    deaf: bool = False
    """Whether a request has not reached an engine, so that no abort ends it."""
    aborts: int = 1
    """The abort that ends a request: the second for one that a router delivered late."""
    answer_seconds: float = 0.0
    """From the abort to the answer."""
    control_seconds: float = 0.0

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

    async def workers(self) -> list[str]:
        return ["a", "b"]

    async def sleep(self, worker: str) -> None:
        self.calls.append(f"sleep {worker}")

    async def wake(self, worker: str) -> None:
        self.calls.append(f"wake {worker}")

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
        if not self.deaf:
            waits.append(asyncio.create_task(self.paused.wait()))
        self.in_flight += not self.deaf
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(self.answer_seconds)
        self.in_flight -= not self.deaf
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
    monkeypatch.setattr(pool_module, "AGAIN_SECONDS", 0.05)
    rollout = SimpleNamespace(engine_kwargs={}, prompt_length=8, response_length=8)
    made = Pool("hybrid", rollout, SimpleNamespace(), expected=2)
    fleet = SimpleNamespace(
        pause=engines.pause,
        resume=engines.resume,
        workers=engines.workers,
        flush_cache=engines.flush_cache,
        admin=engines,
        load_adapter=engines.load_adapter,
    )
    made._stack = SimpleNamespace(  # type: ignore[assignment]
        fleet=fleet,
        refit=engines.refit,
        rollouts=engines.rollouts,
        teacher=engines.teacher,
        name="s",
    )
    made._rollouts = engines  # type: ignore[assignment]
    return made


def ask(pool: Pool, name: str = "r") -> asyncio.Task[Any]:
    params = {"temperature": 1.0, "logprobs": True}
    asked: Awaitable[Any] = pool.generate([1, 2], params, name, group_id="g", trajectory_id="t")
    return asyncio.ensure_future(asked)


async def test_what_is_under_way_is_answered_with_what_it_has(pool: Pool, engines: Engines) -> None:
    first = ask(pool)
    await asyncio.sleep(0.01)
    # verl asks every replica, and all of them are this pool.
    counts = await asyncio.gather(pool.abort_all_requests(), pool.abort_all_requests())
    output = await first
    assert (output.token_ids, output.log_probs, output.stop_reason) == ([7], [-0.5], "aborted")
    assert counts[0] == {"aborted_count": 1, "request_ids": ["r"]}
    assert engines.calls == ["generate in g", "pause abort"]

    waiting = ask(pool)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    engines.finish.set()
    await asyncio.gather(pool.resume_generation(), pool.resume_generation())
    output = await waiting
    assert (output.token_ids, output.stop_reason) == ([7, 8, 9], "completed")
    assert engines.calls.count("resume") == 1


async def test_requests_to_a_pool_that_leaves_are_rejected(pool: Pool) -> None:
    await pool.abort_all_requests(reject_request=True)
    output = await asyncio.wait_for(ask(pool), 1)
    assert (output.token_ids, output.stop_reason, output.extra_fields) == ([], "aborted", {})


async def test_a_request_that_no_engine_has_seen_ends_with_nothing(
    pool: Pool, engines: Engines
) -> None:
    engines.deaf = True
    lost = ask(pool)
    await asyncio.sleep(0.01)
    await pool.abort_all_requests()
    output = await asyncio.wait_for(lost, 1)
    assert (output.token_ids, output.stop_reason) == ([], "aborted")


async def test_an_answer_that_takes_its_time_keeps_its_tokens(pool: Pool, engines: Engines) -> None:
    engines.answer_seconds = 10 * pool_module.AGAIN_SECONDS
    slow = ask(pool)
    await asyncio.sleep(0.01)
    await pool.abort_all_requests()
    assert all(task.done() for task in pool._running.values())
    assert (await slow).token_ids == [7]


async def test_what_a_router_delivers_after_the_abort_is_aborted_too(
    pool: Pool, engines: Engines
) -> None:
    engines.aborts = 2
    late = ask(pool)
    await asyncio.sleep(0.01)
    await pool.abort_all_requests()
    assert (await late).stop_reason == "aborted"
    assert engines.calls.count("pause abort") == 2


async def test_an_abort_that_does_not_end_is_an_error(pool: Pool, engines: Engines) -> None:
    engines.aborts = 1_000_000
    pool._options.abort_seconds = 0.1
    stuck = ask(pool)
    await asyncio.sleep(0.01)
    with pytest.raises(RolloutError, match="1 requests could not be aborted"):
        await pool.abort_all_requests()
    engines.finish.set()
    await stuck


async def test_a_waiting_request_is_turned_away_when_its_pool_leaves(pool: Pool) -> None:
    await pool.abort_all_requests()
    waiting = ask(pool)
    await asyncio.sleep(0.01)
    await pool.abort_all_requests(reject_request=True)
    assert (await asyncio.wait_for(waiting, 1)).stop_reason == "aborted"


async def test_a_pool_that_left_turns_requests_away_in_its_sleep(
    pool: Pool, engines: Engines
) -> None:
    pool._frees = True
    await pool.abort_all_requests(reject_request=True)
    await pool.sleep()
    assert (await asyncio.wait_for(ask(pool), 1)).stop_reason == "aborted"
    await pool.wake_up()
    engines.finish.set()
    assert (await ask(pool)).stop_reason == "completed"


async def test_who_waits_does_not_slip_through_a_gate_that_is_shut_again() -> None:
    gate = Gate()
    gate.shut()
    waiting = asyncio.ensure_future(gate.admits())
    await asyncio.sleep(0.01)
    gate.open()
    gate.shut()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    gate.open()
    assert await waiting


async def test_an_abort_during_a_resume_leaves_the_gate_shut(pool: Pool, engines: Engines) -> None:
    await pool.abort_all_requests()
    engines.control_seconds = 0.05
    resuming = asyncio.ensure_future(pool.resume_generation())
    await asyncio.sleep(0.01)
    await pool.abort_all_requests(reject_request=True)
    await resuming
    assert (await asyncio.wait_for(ask(pool), 1)).stop_reason == "aborted"
    assert engines.calls == ["pause abort", "resume", "pause abort"]


async def test_an_abort_during_a_refit_comes_after_it(pool: Pool, engines: Engines) -> None:
    engines.control_seconds = 0.05
    offer = Offer("shm", 1, "identity", 10, {}).as_json()
    refitting = asyncio.ensure_future(pool.refit(offer, 1))
    await asyncio.sleep(0.01)
    aborting = asyncio.ensure_future(pool.abort_all_requests())
    await asyncio.sleep(0.01)
    late = ask(pool)
    await asyncio.gather(refitting, aborting)
    assert engines.calls == ["refit 1", "pause abort"] and not late.done()
    engines.finish.set()
    await pool.resume_generation()
    assert (await late).extra_fields["global_steps"] == 1


async def test_the_pieces_of_a_trajectory_add_up_across_versions(
    pool: Pool, engines: Engines
) -> None:
    """As verl's client goes on: with prompt and tokens so far, until the answer is whole."""
    offer = Offer("shm", 1, "identity", 10, {}).as_json()
    await pool.refit(offer, 4)
    first = ask(pool)
    await asyncio.sleep(0.01)
    await pool.abort_all_requests()
    await pool.refit(offer, 5)
    second = ask(pool)
    engines.finish.set()
    await pool.resume_generation()
    steps = [(await piece).extra_fields["global_steps"] for piece in (first, second)]
    assert steps == [4, 5]


async def test_a_prompt_without_room_for_an_answer_is_counted_with_the_others(pool: Pool) -> None:
    await pool.set_global_steps(3)
    output = await pool.generate(list(range(16)), {"logprobs": True}, "r")
    assert (output.token_ids, output.stop_reason) == ([], "completed")
    assert output.extra_fields == {"global_steps": 3}


async def test_tokens_carry_the_step_whose_weights_they_came_from(
    pool: Pool, engines: Engines
) -> None:
    engines.finish.set()
    assert (await ask(pool)).extra_fields["global_steps"] is None  # nobody has trained yet
    offer = Offer("shm", 1, "identity", 10, {}).as_json()
    assert (await pool.refit(offer, 40))["paused_seconds"] == 0.1
    assert (await ask(pool)).extra_fields["global_steps"] == 40
    await pool.set_global_steps(41)
    assert (await ask(pool)).extra_fields["min_global_steps"] == 41


async def test_engines_sleep_when_nothing_runs_and_answer_when_their_cache_is_back(
    pool: Pool, engines: Engines
) -> None:
    pool._frees = True
    running = ask(pool)
    await asyncio.sleep(0.01)
    sleeping = [asyncio.ensure_future(pool.sleep()) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert "sleep a" not in engines.calls
    engines.finish.set()
    await asyncio.gather(*sleeping)
    assert (await running).stop_reason == "completed"
    assert sorted(c for c in engines.calls if c.startswith("sleep")) == ["sleep a", "sleep b"]

    waiting = ask(pool)
    await pool.wake_up(tags=["weights"])
    await asyncio.sleep(0.02)
    assert not waiting.done() and "wake a" in engines.calls
    await pool.wake_up(tags=["kv_cache"])
    assert (await waiting).stop_reason == "completed"
    assert engines.calls.count("wake a") == 1


async def test_engines_beside_the_trainer_are_updated_in_verls_order(
    pool: Pool, engines: Engines
) -> None:
    pool._frees = True
    engines.finish.set()
    await pool.sleep()
    waiting = ask(pool)
    await pool.wake_up(tags=["weights"])
    await pool.refit(Offer("shm", 1, "identity", 10, {}).as_json(), 7)
    await pool.clear_kv_cache()
    await pool.set_global_steps(7)
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await pool.wake_up(tags=["kv_cache"])
    assert (await waiting).extra_fields["global_steps"] == 7
    told = ["sleep", "sleep", "wake", "wake", "refit", "flush", "generate"]
    assert [call.split()[0] for call in engines.calls] == told


async def test_engines_apart_are_updated_in_verls_order(pool: Pool, engines: Engines) -> None:
    cut = ask(pool)
    await asyncio.sleep(0.01)
    await pool.abort_all_requests(reject_request=False)
    assert (await cut).stop_reason == "aborted"
    waiting = ask(pool)
    await pool.release_kv_cache()
    await pool.refit(Offer("shm", 1, "identity", 10, {}).as_json(), 7)
    await pool.clear_kv_cache()
    await pool.set_global_steps(7)
    await pool.resume_kv_cache()
    await asyncio.sleep(0.02)
    assert not waiting.done()
    engines.finish.set()
    await pool.resume_generation()
    assert (await waiting).extra_fields["global_steps"] == 7
    told = ["generate", "pause", "refit", "flush", "resume", "generate"]
    assert [call.split()[0] for call in engines.calls] == told


async def test_without_freeing_engines_sleep_changes_nothing(pool: Pool, engines: Engines) -> None:
    engines.finish.set()
    await pool.sleep()
    assert (await ask(pool)).stop_reason == "completed"
    assert engines.calls == ["generate in g"]


async def test_what_was_cached_is_told_with_the_next_weights_and_logged(
    pool: Pool, engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "new" / "answers.jsonl"
    pool._traffic = Traffic(log)
    engines.finish.set()
    await asyncio.gather(ask(pool), ask(pool))
    offer = Offer("shm", 1, "identity", 10, {}).as_json()
    await pool.refit(offer, 1)
    assert "2 requests, 0.0% of 4 prompt tokens from cache" in capsys.readouterr().out
    await pool.refit(offer, 2)
    assert "requests" not in capsys.readouterr().out
    first, _ = read_log(log)
    assert (first.group, first.trajectory, first.worker) == ("g", "t", 1)
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens) == (2, 0, 3)


async def test_affinity_can_change_while_it_serves(pool: Pool, engines: Engines) -> None:
    engines.finish.set()
    for affinity in ("group", "trajectory", "off"):
        await pool.set_affinity(affinity)  # type: ignore[arg-type]
        await ask(pool)
    assert engines.calls == ["generate in g", "generate in t", "generate in None"]


class FarNode:
    """A Node actor as its handle looks: what it was told to run, and how it ends."""

    def __init__(self) -> None:
        self.spec: dict[str, Any] = {}
        self.calls: list[str] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fails: Exception | None = None
        self.start = SimpleNamespace(remote=self._start)
        self.stop = SimpleNamespace(remote=self._stop)
        self.ended = SimpleNamespace(remote=lambda: self.over)
        self.replace = SimpleNamespace(remote=self._replace)
        self.fleet = SimpleNamespace(
            supervised_by=lambda way: setattr(self, "way", way), workers=self._workers
        )

    async def _workers(self) -> list[Any]:
        return []

    async def _start(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        if self.fails is not None:
            raise self.fails

    async def _stop(self) -> None:
        self.calls.append("stop")

    async def _replace(self, worker: Worker) -> bool:
        self.calls.append(f"replace {worker.instance_id}")
        return worker.instance_id == 7


INVITATION = {
    "discovery": "etcd",
    "etcd_endpoints": "http://10.0.0.1:2379",
    "join": {"namespace": "n", "frontend": "http://127.0.0.1:9", "rl": "http://127.0.0.1:9"},
}


@pytest.fixture
async def far(monkeypatch: pytest.MonkeyPatch, engines: Engines) -> FarNode:
    """The second of two nodes; the first is the pool's, whose stack is a stand-in."""
    node = FarNode()

    @asynccontextmanager
    async def up(spec: StackSpec) -> AsyncIterator[Any]:
        node.calls.append(f"pool's stack: seed {spec.models[0].seed} at {spec.frontend.host}")
        yield SimpleNamespace(
            name=spec.name,
            frontend_url="http://127.0.0.1:9",
            invitation=INVITATION,
            rollouts=lambda **_: engines,
            weights_secret="s",
            fleet=node.fleet,
        )

    monkeypatch.setattr(pool_module, "up", up)
    monkeypatch.setattr(pool_module.nodes, "own_node", lambda: "one")
    addresses = {"one": "127.0.0.1", "two": "127.0.0.2"}
    monkeypatch.setattr(pool_module.nodes, "address_of", addresses.__getitem__)
    monkeypatch.setattr(pool_module.nodes, "actor_on", {"two": node}.__getitem__)
    return node


def spread_pool() -> Pool:
    rollout = SimpleNamespace(
        engine_kwargs={"dynamo": {"log_dir": "/logs"}},
        prompt_length=8,
        response_length=8,
        tensor_model_parallel_size=1,
        seed=5,
        free_cache_engine=False,
    )
    return Pool("hybrid", rollout, SimpleNamespace(path="/models/tiny"), expected=3)


async def join_all(pool: Pool) -> list[Any]:
    places = {0: "two", 1: "one", 2: "two"}
    joins = [pool.join(replica, node, []) for replica, node in reversed(places.items())]
    return await asyncio.gather(*joins, return_exceptions=True)


async def test_workers_of_another_node_join_the_pools_stack(far: FarNode, pool: Pool) -> None:
    spread = spread_pool()
    addresses = await join_all(spread)
    assert len(set(addresses)) == 3  # verl would take equal ones for one server
    spec = StackSpec.model_validate(far.spec)
    # Nodes are ranked by their first replicas, whoever came first and wherever the pool is.
    assert (spec.models[0].replicas, spec.models[0].seed) == (2, 5)
    assert far.calls == ["pool's stack: seed 7 at 127.0.0.1"]
    assert spec.admin_host == "127.0.0.2" and spec.etcd_endpoints == "http://10.0.0.1:2379"
    assert spec.join is not None and spec.join.namespace == "n"
    assert str(spec.log_dir) == "/logs/hybrid/node-1"
    assert (await spread.about()).addresses == {"127.0.0.1", "127.0.0.2"}
    # A worker that hangs is ended by whoever runs it.
    assert await far.way(Worker(7, "tiny", "http://127.0.0.2:1"))  # type: ignore[attr-defined]
    assert not await far.way(Worker(8, "tiny", "http://127.0.0.2:2"))  # type: ignore[attr-defined]
    await spread.shutdown()
    assert far.calls[-3:] == ["replace 7", "replace 8", "stop"]


async def test_a_node_that_dies_ends_the_run_with_its_cause(far: FarNode, pool: Pool) -> None:
    spread = spread_pool()
    await join_all(spread)
    spread._gate.shut()
    waiting = ask(spread)
    await asyncio.sleep(0.01)
    far.over.set_exception(RuntimeError("out of\nmemory"))
    for asked in (waiting, spread.refit({}, 1), spread.about(), spread.abort_all_requests()):
        with pytest.raises((RolloutError, WeightsError), match=r"node 127\.0\.0\.2|no offer"):
            await asyncio.wait_for(asked, 1)
    with pytest.raises(RolloutError, match="died: out of memory"):
        await ask(spread)
    await spread.shutdown()


async def test_a_node_that_cannot_start_is_the_cause_that_is_told(far: FarNode, pool: Pool) -> None:
    far.fails = StartError("policy-0 exited with status 1 while the stack was starting.")
    spread = spread_pool()
    for result in await join_all(spread):
        assert isinstance(result, StartError) and "policy-0" in result.message
    assert far.calls[-1] == "stop"


def test_weights_for_other_nodes_take_a_way_that_leads_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert across_machines(Options(weights="auto", weights_dir=Path("/shared"))) == "files"
    assert across_machines(Options(weights="nixl")) == "nixl"
    for near in ("shm", "cuda_ipc"):
        with pytest.raises(UsageError, match="memory of one machine"):
            across_machines(Options(weights=near))

    def missing() -> None:
        raise UsageError("NIXL is not installed.")

    monkeypatch.setattr(updates, "import_nixl", missing)
    with pytest.raises(UsageError, match="nothing says how new weights get there"):
        across_machines(Options())


async def test_tokens_carry_the_step_of_the_adapter_they_were_sampled_with(
    pool: Pool, engines: Engines
) -> None:
    engines.finish.set()
    offer = Offer("shm", 1, "identity", 10, {}).as_json()
    await pool.refit(offer, 0)  # the base, once
    await pool.load_adapter(offer, {"r": 8}, 0)
    await pool.load_adapter(offer, {"r": 8}, 1)
    assert engines.calls == [
        "refit 1",
        "load policy@2 of rank 8, keep 2",
        "load policy@3 of rank 8, keep 2",
    ]
    assert (await ask(pool)).extra_fields["global_steps"] == 1
    assert engines.adapter == "policy@3" and engines.version == 1


async def test_a_teacher_gives_a_row_for_each_token_it_is_shown(pool: Pool) -> None:
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    output = await pool.generate([4, 5, 6], params, "r")
    assert output.extra_fields["prompt_ids"] == [[5], [6], [0]]
    assert output.extra_fields["prompt_logprobs"] == [[-0.5], [-0.25], [0.0]]
    with pytest.raises(RolloutError, match="its 32 likeliest tokens"):
        await pool.generate([4, 5, 6], {**params, "prompt_logprobs": 32}, "r")


@pytest.mark.parametrize("asked", [None, "vllm"])
async def test_a_pool_whose_stack_did_not_start_says_why(
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    asked: str | None,
) -> None:
    async def fails() -> None:
        raise StartError("worker-0 exited with status 1.", "Dynamo is not installed.")

    monkeypatch.setattr(pool, "_start", fails)
    pool._options = pool._options.model_copy(update={"fallback": asked})
    assert await pool.failure() == ""
    for result in await asyncio.gather(
        *(pool.join(replica, "node", []) for replica in range(2)), return_exceptions=True
    ):
        assert isinstance(result, StartError)
    assert await pool.failure() == "worker-0 exited with status 1. Dynamo is not installed."
    warned = capfd.readouterr().err.count("THIS RUN DOES NOT USE DYNAMO")
    assert warned == (1 if asked else 0)  # once, whatever the number of replicas
