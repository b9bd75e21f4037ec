"""Requests and pauses, with the semantics of vLLM's scheduler.

Every request is a coroutine of its own that takes one step at a time. All modes of a pause hold
new requests back; they differ in what happens to the running ones.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from enum import Enum
from typing import Any, Literal

import numpy as np
from dynamo.llm.exceptions import EngineShutdown

from rollway.engine.core import read_version
from rollway.engine.transferred import COMPUTED_FOR
from tests.light.cache import FAULT, PrefixCache
from tests.light.checkpoint import Array
from tests.light.model import Decoding, log_softmax
from tests.light.request import Params
from tests.light.weights import LightWorker

CHUNK = 8

PauseMode = Literal["keep", "wait", "abort"]
Chunk = dict[str, Any]
Seed = int | tuple[int, int]


class Pause(Enum):
    NONE = "none"
    NEW = "new"  # running requests continue
    ALL = "all"


class Request:
    """One request and what it has sampled but not sent."""

    def __init__(self, key: str, params: Params, decoding: Decoding, seed: Seed) -> None:
        self.key = key
        self.params = params
        self.decoding = decoding
        self.rng = np.random.default_rng(seed)
        self.running = False
        self.aborted = False
        self.count = 0
        self.wake = asyncio.Event()
        self._ids: list[int] = []
        self._rows: list[Array] = []

    def sample(self, logits: Array) -> str | None:
        """Take one token; returns the finish reason if it was the last."""
        params = self.params
        if self.count < params.min_tokens and params.stops:
            logits = logits.copy()
            logits[list(params.stops)] = -np.inf
        raw = logits
        if params.temperature > 0:
            logits = logits / np.float32(params.temperature)
        # RL workers report the log-probs of the distribution that was sampled from.
        row = log_softmax(logits)
        reported = log_softmax(raw) if FAULT == "log-probs" else row
        if params.temperature > 0:
            # The Gumbel trick needs no normalised float64 probabilities.
            token = int((row + self.rng.gumbel(size=row.shape)).argmax())
        else:
            token = int(row.argmax())
        self._ids.append(token)
        self._rows.append(reported)
        self.decoding.tokens.append(token)
        self.count += 1
        if token in params.stops and self.count >= params.min_tokens:
            return "stop"
        return "length" if self.count >= params.max_tokens else None

    @property
    def unsent(self) -> int:
        return len(self._ids)

    def chunk(self, reason: str | None = None) -> Chunk:
        """What is unsent, and the end of the answer if it has a reason to end."""
        params, ids, rows = self.params, self._ids, self._rows
        self._ids, self._rows = [], []
        out: Chunk = {"index": 0, "token_ids": ids}
        if params.logprobs is not None:
            out["log_probs"] = [float(row[i]) for row, i in zip(rows, ids, strict=True)]
            if params.logprobs:
                out["top_logprobs"] = [_top(row, params.logprobs) for row in rows]
        if reason is not None:
            out["finish_reason"] = reason
            out["completion_usage"] = {
                "prompt_tokens": params.prompt_length,
                "completion_tokens": self.count,
                "total_tokens": params.prompt_length + self.count,
                "prompt_tokens_details": {"cached_tokens": self.decoding.cached_tokens},
            }
            if reason == "stop" and ids[-1] in params.named_stops:
                out["stop_reason"] = ids[-1]
        return out


class Engine:
    def __init__(
        self,
        worker: LightWorker,
        *,
        seed: int = 0,
        max_length: int | None = None,
        mode: str = "agg",
    ) -> None:
        """`mode` is Dynamo's --disaggregation-mode. The KV of a prompt travels in the hand-over
        itself, where vLLM's says from where to fetch it."""
        config = worker.model.config
        self.mode = mode
        self.worker = worker
        self.cache = PrefixCache()
        self.closing = False
        self.max_length = min(max_length or config.max_positions, config.max_positions)
        self._seed = seed
        self._served = 0
        self.label: int | None = None
        """The version whose requests are admitted; None admits all."""
        self.pause_state = Pause.NONE
        self.requests: dict[str, Request] = {}
        self._ended = asyncio.Event()
        self._step_seconds = float(os.environ.get("LIGHT_STEP_SECONDS", "0.002"))
        self._prefill_seconds = float(os.environ.get("LIGHT_PREFILL_SECONDS_PER_TOKEN", "0"))
        self._prefilling = asyncio.Lock()

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[Chunk]:
        """Dynamo's handler: it finds the second parameter by this name."""
        params = Params.read(request, self.worker.model.config.vocab, self.max_length)
        if self.mode == "prefill":
            params = replace(params, max_tokens=1, min_tokens=1)
        self._served += 1
        # A request's own seed gives the same tokens on every worker.
        seed: Seed = (self._seed, self._served) if params.seed is None else params.seed
        decoding = Decoding(self.worker.model, self.cache, params.prompt, params.salt)
        prefill = request.get("prefill_result") or {}
        hand_over = (prefill.get("disaggregated_params") or {}).get("kv_transfer_params")
        if self.mode == "decode" and hand_over:
            decoding.import_kv(hand_over)
        entry = Request(context.id(), params, decoding, seed)
        computed_for = (hand_over or {}).get(COMPUTED_FOR) if self.mode == "decode" else None
        if not self._admits(entry, is_handed_over=bool(hand_over), computed_for=computed_for):
            yield entry.chunk("cancelled")
            return
        version = None if self.label is None else read_version(params.salt)
        self.requests[entry.key] = entry
        try:
            async for chunk in self._run(entry, context):
                if self.mode == "prefill" and chunk.get("finish_reason") in ("length", "stop"):
                    sent = decoding.export_kv(params.prompt_length) | {COMPUTED_FOR: version}
                    chunk["disaggregated_params"] = {"kv_transfer_params": sent}
                if prefill and "completion_usage" in chunk:
                    details = prefill.get("prompt_tokens_details")
                    chunk["completion_usage"]["prompt_tokens_details"] = details
                yield chunk
        finally:
            self._finish(entry)

    def _admits(
        self, entry: Request, *, is_handed_over: bool = False, computed_for: int | None = None
    ) -> bool:
        """Return whether the request, and KV of another worker, is of the version served here."""
        version = read_version(entry.params.salt)
        if self.label is None or version is None:
            return True
        return version == self.label and (not is_handed_over or computed_for == version)

    def abort_others(self) -> None:
        """Abort requests of other versions, which waited during a refit."""
        for entry in [entry for entry in self.requests.values() if not self._admits(entry)]:
            self._abort(entry)

    async def _run(self, entry: Request, context: Any) -> AsyncIterator[Chunk]:
        reason: str | None = None
        while reason is None:
            if not self._may_step(entry):
                if entry.unsent:
                    yield entry.chunk()  # a pause does not hold back what was sampled before
                await self._turn(entry, context)
            if self.closing:
                raise EngineShutdown("the worker is shutting down")
            if entry.aborted or context.is_stopped():
                # Dynamo's vLLM handler writes vLLM's "abort" like this.
                yield entry.chunk("cancelled")
                return
            if self._prefill_seconds and not entry.running:
                reason = await self._slow_first_step(entry)
            else:
                reason = self._step(entry)
            if reason is not None:
                self._finish(entry)  # before its last chunk is delivered, as in vLLM
            # The first token is not held back, as with vLLM's stream interval.
            if reason is not None or entry.unsent >= CHUNK or entry.count == entry.unsent == 1:
                yield entry.chunk(reason)
            if reason is None:
                await asyncio.sleep(self._step_seconds)  # the time of a step on an accelerator

    def _step(self, entry: Request) -> str | None:
        if not self.worker.usable:
            os._exit(1)  # weights without storage: the engine core dies, and the worker with it
        entry.running = True
        return entry.sample(entry.decoding.next_logits())

    async def _slow_first_step(self, entry: Request) -> str | None:
        """Prompts are computed one after the other, so that a sibling finds the first one's blocks,
        and what is cached costs no time."""
        async with self._prefilling:
            await asyncio.sleep(entry.decoding.uncached_tokens() * self._prefill_seconds)
            if entry.aborted or self.closing or not self._may_step(entry):
                return None
            return self._step(entry)

    def _may_step(self, entry: Request) -> bool:
        if self.pause_state is Pause.NEW:
            return entry.running
        return self.pause_state is Pause.NONE

    async def _turn(self, entry: Request, context: Any) -> None:
        """Wait until the request may step, or has to end."""
        gone = asyncio.ensure_future(context.async_killed_or_stopped())
        gone.add_done_callback(lambda _: entry.wake.set())
        try:
            while not (self._may_step(entry) or entry.aborted or self.closing or gone.done()):
                entry.wake.clear()
                await entry.wake.wait()
        finally:
            gone.cancel()

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        if mode == "abort":
            for entry in list(self.requests.values()):
                self._abort(entry)
        self.pause_state = Pause.ALL if mode == "keep" else Pause.NEW
        self._wake_all()
        while self.pause_state is Pause.NEW and any(e.running for e in self.requests.values()):
            self._ended.clear()
            await self._ended.wait()
        if clear_cache:
            for entry in self.requests.values():
                entry.running = False
                entry.decoding.drop_kv()
            self.reset_prefix_cache()

    def resume(self) -> None:
        self.pause_state = Pause.NONE
        self._wake_all()

    def abort(self, key: str) -> None:
        """End a request; one that does not exist is no error."""
        if entry := self.requests.get(key):
            self._abort(entry)

    def close(self) -> None:
        """Hand running requests back to the frontend, which may migrate them."""
        self.closing = True
        self._wake_all()

    def reset_prefix_cache(self) -> bool:
        """Refused, without a word to the admin client, while any request holds blocks."""
        if any(entry.decoding.holds_blocks for entry in self.requests.values()):
            return False
        self.cache.clear()
        return True

    def _abort(self, entry: Request) -> None:
        entry.aborted = True
        self._finish(entry)  # its blocks are free at once; its coroutine ends when it wakes
        entry.wake.set()

    def _finish(self, entry: Request) -> None:
        entry.running = False
        if self.requests.get(entry.key) is entry:
            del self.requests[entry.key]
        self._ended.set()

    def _wake_all(self) -> None:
        for entry in self.requests.values():
            entry.wake.set()


def _top(row: Array, count: int) -> list[dict[str, Any]]:
    best = np.argsort(-row)[:count]
    return [
        {"rank": rank, "token_id": int(i), "token": f"token_id:{i}", "logprob": float(row[i])}
        for rank, i in enumerate(best, start=1)
    ]
