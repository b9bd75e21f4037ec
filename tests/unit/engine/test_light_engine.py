"""The arithmetic of the light engine equals that of torch, and its prefix cache reuses blocks."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollway.errors import UsageError
from tests.light.cache import BLOCK, PrefixCache
from tests.light.checkpoint import share_tensors
from tests.light.model import Decoding, Qwen3, log_softmax
from tests.stack.policies import Policy, perturbed
from tests.waiting import stays_async, wait_until_async

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def policies(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Policy]:
    other = perturbed(base_model, tmp_path_factory.mktemp("light") / "other", seed=1)
    return [Policy(base_model), Policy(other)]


def make_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


def score(decoding: Decoding, completion: list[int]) -> list[float]:
    """Decode the given tokens one by one and return their log-probs."""
    logprobs = []
    for token in completion:
        logprobs.append(float(log_softmax(decoding.next_logits())[token]))
        decoding.tokens.append(token)
    return logprobs


def assert_close(mine: list[float], reference: list[float]) -> None:
    assert mine == pytest.approx(reference, abs=TOLERANCE)


@pytest.mark.parametrize("prompt_length", [1, 15, 16, 17, 300])
def test_logprobs_equal_those_of_torch(policies: list[Policy], prompt_length: int) -> None:
    prompt, completion = make_tokens(prompt_length), make_tokens(40, seed=1)
    for policy in policies:
        decoding = Decoding(Qwen3.load(policy.path), PrefixCache(), prompt)
        assert_close(score(decoding, completion), policy.logprobs(prompt, completion))


def test_decoding_token_by_token_equals_torch(policies: list[Policy]) -> None:
    prompt = make_tokens(20)
    decoding = Decoding(Qwen3.load(policies[1].path), PrefixCache(), prompt)
    tokens, logprobs = [], []
    for _ in range(40):
        row = log_softmax(decoding.next_logits())
        tokens.append(int(row.argmax()))
        logprobs.append(float(row[tokens[-1]]))
        decoding.tokens.append(tokens[-1])
    assert tokens == policies[1].greedy(prompt, 40)
    assert_close(logprobs, policies[1].logprobs(prompt, tokens))


def test_a_reused_prefix_changes_nothing(policies: list[Policy]) -> None:
    model, cache = Qwen3.load(policies[0].path), PrefixCache()
    prompt, completion = make_tokens(4 * BLOCK + 3), make_tokens(20, seed=1)
    first = score(Decoding(model, cache, prompt), completion)
    again = Decoding(model, cache, prompt)
    assert again.uncached_tokens() == 3
    assert_close(score(again, completion), first)
    assert again.cached_tokens == 4 * BLOCK


def test_a_stale_prefix_matches_neither_policy(policies: list[Policy]) -> None:
    old, new = policies
    model, cache = Qwen3.load(old.path), PrefixCache()
    prompt, completion = make_tokens(4 * BLOCK + 3), make_tokens(20, seed=1)
    Decoding(model, cache, prompt).next_logits()
    model.swap(share_tensors(new.path))

    stale = Decoding(model, cache, prompt)
    logprobs = score(stale, completion)
    assert stale.cached_tokens == 4 * BLOCK
    assert old.distance(prompt, completion, logprobs) > 0.1
    assert new.distance(prompt, completion, logprobs) > 0.1

    salted = Decoding(model, cache, prompt, salt="1")
    assert_close(score(salted, completion), new.logprobs(prompt, completion))
    assert salted.cached_tokens == 0
    cache.clear()
    flushed = Decoding(model, cache, prompt)
    assert_close(score(flushed, completion), new.logprobs(prompt, completion))


def test_dropped_kv_is_recomputed_with_the_new_weights(policies: list[Policy]) -> None:
    old, new = policies
    model, cache = Qwen3.load(old.path), PrefixCache()
    prompt, completion = make_tokens(50), make_tokens(20, seed=1)
    decoding = Decoding(model, cache, prompt)
    decoding.next_logits()
    assert decoding.holds_blocks
    decoding.drop_kv()
    cache.clear()
    assert not decoding.holds_blocks
    model.swap(share_tensors(new.path))
    assert_close(score(decoding, completion), new.logprobs(prompt, completion))


def test_events_report_cached_blocks_and_the_oldest_is_evicted_first(base_model: Path) -> None:
    model, cache = Qwen3.load(base_model), PrefixCache(capacity=3)
    known: dict[int, int | None] = {}

    def record_stored(tokens: list[int], hashes: list[int], parent: int | None, salt: str) -> None:
        assert salt == "s" and len(tokens) == len(hashes) * BLOCK
        for key in hashes:
            known[key], parent = parent, key

    cache.on_stored = record_stored
    cache.on_removed = lambda hashes: [known.pop(key) for key in hashes] and None
    Decoding(model, cache, make_tokens(2 * BLOCK), "s").next_logits()
    assert len(known) == len(cache) == 2
    Decoding(model, cache, make_tokens(2 * BLOCK, seed=1), "s").next_logits()
    assert len(known) == len(cache) == 3
    assert list(known.values()).count(None) == 1  # the head of the older chain was evicted
    cache.clear()
    assert known == {} and len(cache) == 0


def test_shards_and_tied_heads_are_read(tmp_path: Path, base_model: Path) -> None:
    from safetensors.numpy import save_file

    tensors = dict(share_tensors(base_model))
    del tensors["lm_head.weight"]
    config = json.loads((base_model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, chosen in shards.items():
        save_file({name: np.array(tensors[name]) for name in chosen}, tmp_path / file)
    weight_map = {name: file for file, chosen in shards.items() for name in chosen}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    prompt, completion = make_tokens(20), make_tokens(10, seed=1)
    mine = score(Decoding(Qwen3.load(tmp_path), PrefixCache(), prompt), completion)
    assert_close(mine, Policy(tmp_path).logprobs(prompt, completion))


class FakeContext:
    """The part of Dynamo's request context that the engine uses."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._left = asyncio.Event()
        self.received: list[int] = []
        """The token ids that its client has got so far."""

    def id(self) -> str:
        return self._key

    def leave(self) -> None:
        self._left.set()

    def is_stopped(self) -> bool:
        return self._left.is_set()

    async def async_killed_or_stopped(self) -> bool:
        return await self._left.wait()


class Rig:
    """A light engine and its admin routes, without Dynamo's planes around them."""

    def __init__(self, path: Path) -> None:
        pytest.importorskip("dynamo.llm")
        from tests.light.engine import Engine
        from tests.light.routes import AdminRoutes
        from tests.light.weights import LightWorker

        self.engine = Engine(LightWorker(path))
        self._routes = AdminRoutes(self.engine).table()
        self._started = 0

    async def admin(self, route: str, **body: Any) -> dict[str, Any]:
        return await self._routes[route](body)

    def start(self, prompt: list[int], count: int) -> tuple[FakeContext, asyncio.Task[Any]]:
        """Start a greedy request; the task returns (token ids, log-probs, finish reason)."""
        self._started += 1
        context = FakeContext(str(self._started))
        request = {
            "token_ids": prompt,
            "stop_conditions": {"max_tokens": count, "ignore_eos": True},
            "sampling_options": {"temperature": 0.0},
            "output_options": {"logprobs": 0},
        }
        return context, asyncio.create_task(self._collect(request, context))

    async def _collect(self, request: dict[str, Any], context: FakeContext) -> Any:
        logprobs: list[float] = []
        async for chunk in self.engine.generate(request, context):
            context.received += chunk["token_ids"]
            logprobs += chunk["log_probs"]
        return context.received, logprobs, chunk["finish_reason"]


async def test_abort_ends_running_and_queued_requests(policies: list[Policy]) -> None:
    rig, prompt = Rig(policies[0].path), make_tokens(40)
    client, running = rig.start(prompt, 1000)
    await wait_until_async(lambda: client.received)
    await rig.admin("pause_generation", mode="keep")
    _, queued = rig.start(prompt, 1000)
    await wait_until_async(lambda: len(rig.engine.requests) == 2)
    assert not running.done() and not queued.done()
    await rig.admin("pause_generation", mode="abort")
    ids, logprobs, reason = await running
    assert reason == "cancelled" and 0 < len(ids) == len(logprobs) < 1000
    assert await queued == ([], [], "cancelled")


async def test_wait_lets_running_requests_finish_and_holds_new_ones(policies: list[Policy]) -> None:
    rig, prompt = Rig(policies[0].path), make_tokens(40)
    client, running = rig.start(prompt, 30)
    await wait_until_async(lambda: client.received)
    pausing = asyncio.create_task(rig.admin("pause_generation", mode="wait"))
    await wait_until_async(lambda: rig.engine.pause_state.name == "NEW", every=0)
    assert not running.done()
    _, queued = rig.start(prompt, 3)
    await pausing
    assert (await running)[2] == "length"
    assert await stays_async(lambda: not queued.done(), 0.02)
    await rig.admin("resume_generation")
    assert (await queued)[0] == policies[0].greedy(prompt, 3)


async def test_a_disconnected_client_ends_its_request_even_during_a_pause(
    policies: list[Policy],
) -> None:
    rig = Rig(policies[0].path)
    await rig.admin("pause_generation")
    client, queued = rig.start(make_tokens(40), 3)
    await wait_until_async(lambda: rig.engine.requests)
    client.leave()
    assert await queued == ([], [], "cancelled")


@pytest.mark.parametrize("clear_cache", [False, True])
async def test_an_update_under_frozen_requests_leaves_stale_kv_unless_cleared(
    policies: list[Policy], clear_cache: bool
) -> None:
    old, new = policies
    rig, prompt = Rig(old.path), make_tokens(40)
    client, frozen = rig.start(prompt, 60)
    await wait_until_async(lambda: client.received)
    await rig.admin("pause_generation", mode="keep", clear_cache=clear_cache)
    updated = await rig.admin(
        "update_weights_from_disk", model_path=str(new.path), weight_version=1
    )
    assert updated == {"status": "ok", "version": 1, "version_declared": True}
    assert (await rig.admin("flush_cache"))["status"] == "ok"
    await rig.admin("resume_generation")
    await frozen
    ids, logprobs, _ = await rig.start(prompt, 5)[1]
    assert (new.distance(prompt, ids, logprobs) < TOLERANCE) is clear_cache


async def test_updates_fail_as_vllm_does(policies: list[Policy], tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    old, new = policies
    rig = Rig(old.path)
    await rig.admin("pause_generation")

    def checkpoint(name: str, tensors: dict[str, np.ndarray]) -> str:
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        return str(tmp_path / name)

    async def load(path: str | Path, **more: Any) -> dict[str, Any]:
        return await rig.admin("update_weights_from_disk", model_path=str(path), **more)

    part = checkpoint(
        "part", {"lm_head.weight": np.array(share_tensors(new.path)["lm_head.weight"])}
    )
    assert (await load(part))["status"] == "ok"
    tensors = rig.engine.worker.model.tensors
    assert np.array_equal(tensors["lm_head.weight"], share_tensors(new.path)["lm_head.weight"])
    assert np.array_equal(
        tensors["model.norm.weight"], share_tensors(old.path)["model.norm.weight"]
    )

    worker = rig.engine.worker
    with pytest.raises(UsageError, match="is missing"):
        worker.stage("part", Path(part), allow_cast=False)
    assert worker.usable and not worker.has_staged("part")
    assert (await load(tmp_path / "nowhere"))["status"] == "error"
    assert not rig.engine.worker.usable
    worker.stage("new", new.path, allow_cast=False)
    worker.rollway_swap("new")
    assert worker.usable
    small = checkpoint("small", {"model.norm.weight": np.ones(8, np.float32)})
    assert await load(small) == {"status": "error", "message": ""}
    assert (await load(new.path))["status"] == "error"
    assert not rig.engine.worker.usable
    unknown = await load(new.path, engine_rpc="nothing")
    assert unknown["message"] == "'LightWorker' object has no attribute 'nothing'"


@pytest.mark.parametrize("length", [1, BLOCK, 3 * BLOCK + 5])
def test_a_decode_worker_continues_on_the_kv_of_a_prefill_worker(
    policies: list[Policy], length: int
) -> None:
    prompt, completion = make_tokens(length), make_tokens(20, seed=1)
    models = [Qwen3.load(policy.path) for policy in policies]

    def decode(prefill: Qwen3) -> list[float]:
        """Decode with the first model what `prefill` has computed."""
        first = Decoding(prefill, PrefixCache(), prompt)
        first.next_logits()
        second = Decoding(models[0], PrefixCache(), prompt)
        second.import_kv(json.loads(json.dumps(first.export_kv(length))))
        return score(second, completion)

    expected = policies[0].logprobs(prompt, completion)
    assert_close(decode(models[0]), expected)
    if length > 1:  # KV of other weights shows: this is what chaos looks for
        assert max(abs(a - b) for a, b in zip(decode(models[1]), expected, strict=True)) > 0.01
