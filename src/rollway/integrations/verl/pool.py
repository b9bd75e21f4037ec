"""One actor for all replicas of a pool: it runs their common stack, and talks to it. Workers on
other nodes than its own join that stack (rollway.integrations.verl.nodes).

A verl replica is one worker of the stack. All share a frontend, whose router knows what each has
cached, so it does not matter which replica verl's load balancer picked. Each has an address of its
own, since verl would take equal ones for one server; what connects there gets the frontend.

The stack ends with this actor, also when Ray or the driver is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollway.api import Stack, up
from rollway.config import StackSpec
from rollway.errors import RolloutError, RollwayError, StartError, UsageError
from rollway.fleet.admin import on_all
from rollway.fleet.updates import Weights
from rollway.integrations.verl import fallback, generation, nodes
from rollway.integrations.verl.forward import forwarded
from rollway.integrations.verl.gate import Gate
from rollway.integrations.verl.handover import handed_over
from rollway.integrations.verl.options import Affinity, read_options
from rollway.integrations.verl.settings import (
    ADAPTERS_KEPT,
    frees_engine,
    joining_spec,
    model_path,
    stack_spec,
    tied_names,
)
from rollway.integrations.verl.targets import write_targets
from rollway.integrations.verl.traffic import Answer, Traffic
from rollway.integrations.verl.updates import About
from rollway.rollout.client import Rollouts
from rollway.stack.state import StackDir
from rollway.weights.offer import parse_offer

log = logging.getLogger(__name__)

ALL_JOINED_SECONDS = 300.0
CONCURRENCY = 100_000
ADAPTER = "policy"
"""The LoRA adapter that verl trains, as the stack knows it."""
AGAIN_SECONDS = 0.5
"""After which an abort is sent again, for what a router delivered after the first."""


class Pool:
    """What verl calls, on behalf of every replica; calls for several replicas come at once, and
    the second finds done what the first did."""

    def __init__(self, name: str, rollout: Any, model: Any, expected: int) -> None:
        self._name, self._rollout, self._model = name, rollout, model
        self._options = read_options(rollout.engine_kwargs)
        self._expected = expected
        self._places: dict[int, tuple[str, Sequence[str]]] = {}
        self._broken = ""
        self._starting: asyncio.Task[None] | None = None
        self._failure = ""
        self._everybody = asyncio.Event()
        self._cleanup = AsyncExitStack()
        self._stack: Stack | None = None
        self._rollouts: Rollouts | None = None
        self._earlier: list[Rollouts] = []
        """Clients of adapters before, while they have requests."""
        self._gate = Gate()
        self._paused = self._asleep = self._frees = False
        self._control = asyncio.Lock()
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._aborted: set[str] = set()
        self._version = 0
        self._steps: dict[int, int | None] = {}
        self._traffic = Traffic(self._options.request_log)
        self._affinity: Affinity = self._options.affinity

    # --- life ------------------------------------------------------------------------------------

    async def join(self, replica: int, node: str, gpus: Sequence[str]) -> str:
        """Called once for each replica; the address of its server, when all are ready."""
        self._places[replica] = node, list(gpus)
        if len(self._places) == self._expected:
            self._everybody.set()
        if self._starting is None:
            self._starting = asyncio.create_task(self._started())
        await asyncio.shield(self._starting)
        frontend = urlsplit(self.stack.frontend_url)
        assert frontend.hostname is not None and frontend.port is not None
        return await self._cleanup.enter_async_context(
            forwarded(frontend.hostname, frontend.port, bind=frontend.hostname)
        )

    async def _started(self) -> None:
        try:
            await self._start()
        except StartError as error:
            self._failure = str(error)
            if self._options.fallback:
                fallback.warn(error)
            raise

    async def failure(self) -> str:
        """Why there is no stack; empty unless its start has failed."""
        return self._failure

    async def _start(self) -> None:
        await self._all_joined()
        shares = nodes.shares(self._places)
        self._frees = frees_engine(self._rollout, self._options) and bool(shares[0].gpus)
        specs = self._specs(shares)
        spec = specs.pop(nodes.own_node() if len(shares) > 1 else shares[0].node)
        print(f"rollway: starting stack {spec.name} with {self._expected} workers", flush=True)
        self._stack = await self._cleanup.enter_async_context(up(spec))
        if specs:
            guests = {
                node: joining_spec(one, self._stack.invitation, spec.name, number)
                for number, (node, one) in enumerate(specs.items(), 1)
            }
            actors = await self._cleanup.enter_async_context(nodes.joined(guests, self._lost))
            self._stack.fleet.supervised_by(
                partial(nodes.replaced, pool_stack=spec.name, actors=actors)
            )
        self._rollouts = self._client()
        self._write_targets()
        print(f"rollway: {self._stack.frontend_url} serves; logs: rollway logs {spec.name}")

    async def _all_joined(self) -> None:
        try:
            await asyncio.wait_for(self._everybody.wait(), ALL_JOINED_SECONDS)
        except TimeoutError:
            raise StartError(
                f"{len(self._places)} of {self._expected} rollout replicas came within "
                f"{ALL_JOINED_SECONDS:g} s.",
                "Look for the others' errors above.",
            ) from None

    def _specs(self, shares: Sequence[nodes.Share]) -> dict[str, StackSpec]:
        """A stack for each node; the pool's own is the one that the others join."""
        spread = len(shares) > 1
        if spread and self._options.weights == "verl_buckets":
            raise UsageError(
                "weights=verl_buckets goes through sockets of one machine, and the rollout "
                f"replicas are on {len(shares)} nodes.",
                "Use files, delta, collective or nixl.",
            )
        return {
            share.node: stack_spec(
                self._rollout,
                self._model,
                self._options,
                pool=self._name,
                replicas=share.replicas,
                gpus=share.gpus,
                before=share.before,
                address=nodes.address_of(share.node) if spread else None,
            )
            for share in shares
        }

    def _client(self, adapter: str | None = None) -> Rollouts:
        timeout = self._options.request_timeout_s
        made = self.stack.rollouts(concurrency=CONCURRENCY, timeout=timeout, adapter=adapter)
        made.resumes = False  # verl's client goes on with what was cut
        return made

    def _write_targets(self) -> None:
        directory = self._options.metrics_dir
        if directory is None:
            return
        if state := StackDir(self.stack.name).read():
            write_targets(directory / f"{self._name}.json", state)

    def _lost(self, why: str) -> None:
        """A node's engines have gone for good: whatever verl asks next is answered with that."""
        print(f"rollway: {why}", flush=True)
        self._broken = why
        self._gate.open()

    @property
    def stack(self) -> Stack:
        if self._broken:
            raise RolloutError(self._broken)
        if self._stack is None:
            raise RolloutError("The rollout stack has not started.")
        return self._stack

    async def about(self) -> About:
        """What ranks that publish weights must know."""
        there = [worker for worker in await self.stack.fleet.workers() if not worker.error]
        return About(
            stack=self.stack.name,
            secret=self.stack.weights_secret,
            model=model_path(self._model),
            addresses=frozenset(nodes.address_of(node) for node, _ in self._places.values()),
            receivers=len(there) * int(self._rollout.tensor_model_parallel_size),
            tied=tied_names(Path(model_path(self._model))),
        )

    async def shutdown(self) -> None:
        await self._cleanup.aclose()

    # --- generation ------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        trajectory_id: str | None = None,
        group_id: str | None = None,
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        generation.refuse_media(images=image_data, videos=video_data, audio=audio_data)
        if not self._broken and not await self._gate.admits():
            return TokenOutput(**generation.nothing("aborted"))
        name = self.stack.name
        if sampling_params.get("prompt_logprobs") is not None:
            return TokenOutput(**await self._score(prompt_ids, sampling_params["prompt_logprobs"]))
        key = f"{request_id}/{uuid.uuid4().hex}"
        task = asyncio.ensure_future(
            self._sample(list(prompt_ids), sampling_params, group_id, trajectory_id)
        )
        self._running[key] = task
        try:
            return TokenOutput(**await task)
        except asyncio.CancelledError:
            if key not in self._aborted:
                raise
            return TokenOutput(**generation.nothing("aborted"))
        except RollwayError as error:
            # Ray would wrap the class; the words are what the user needs.
            raise RuntimeError(f"rollway: {error} (rollway logs {name})") from error
        finally:
            del self._running[key]
            self._aborted.discard(key)

    async def _sample(
        self, prompt: list[int], params: dict[str, Any], group: str | None, trajectory: str | None
    ) -> dict[str, Any]:
        assert self._rollouts is not None
        replays = bool(getattr(self._rollout, "enable_rollout_routing_replay", False))
        sampling = generation.sampling_of(
            params, len(prompt), self._rollout, routed_experts=replays
        )
        if sampling is None:
            return generation.nothing("completed", self._step_of(self._version))
        session = {"group": group, "trajectory": trajectory, "off": None}[self._affinity]
        began = time.monotonic()
        (rollout,) = await self._rollouts.generate(prompt, sampling, group=session)
        self._traffic.add(
            Answer(
                group=group,
                trajectory=trajectory,
                worker=rollout.worker_id,
                prompt_tokens=len(prompt),
                cached_tokens=rollout.cached_tokens,
                output_tokens=len(rollout.token_ids),
                seconds=time.monotonic() - began,
            )
        )
        return generation.output_of(rollout, self._step_of)

    async def set_affinity(self, affinity: Affinity) -> None:
        """Of requests from now on: so `rollway bench verl` compares them in one stack."""
        self._affinity = affinity

    async def _score(self, prompt: Sequence[int], likeliest: int) -> dict[str, Any]:
        if likeliest:
            raise RolloutError(
                f"A teacher was asked for its {likeliest} likeliest tokens; rollout.name=dynamo "
                "gives the log-probs of the tokens themselves."
            )
        teacher = self.stack.teacher(timeout=self._options.request_timeout_s)
        (scores,) = await teacher.score([list(prompt)])
        return generation.scores_of(scores, self._step_of)

    def _step_of(self, version: int | None) -> int | None:
        return None if version is None else self._steps.get(version)

    # --- control ---------------------------------------------------------------------------------

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Requests under way are answered with what they have, later ones wait for the resume; or
        are answered with nothing, where they are to be rejected."""
        self._gate.shut(rejects=reject_request)
        async with self._control:
            self._gate.shut(rejects=reject_request)  # a resume under way may have opened it
            under_way = dict(self._running)
            if not self._paused:
                await self.stack.fleet.pause("abort")
                self._paused = True
            if under_way:
                await self._ended(under_way)
        return {
            "aborted_count": len(under_way),
            "request_ids": [k.split("/")[0] for k in under_way],
        }

    async def _ended(self, tasks: dict[str, asyncio.Task[Any]]) -> None:
        """What an engine has sampled comes back, however long that takes it. A request that none
        of them has would wait for the resume; it is ended, and has nothing to lose."""
        await self._answered(tasks)
        unsent = {key: task for key, task in tasks.items() if not task.done()}
        self._aborted.update(unsent)
        for task in unsent.values():
            task.cancel()
        if unsent:
            await asyncio.wait(unsent.values())

    async def _answered(self, tasks: dict[str, asyncio.Task[Any]]) -> None:
        """Until none of the requests is with an engine."""
        waiting = set(tasks.values())
        deadline = time.monotonic() + self._options.abort_seconds
        while self._in_flight():
            _, waiting = await asyncio.wait(waiting, timeout=AGAIN_SECONDS)
            if not waiting:
                return
            if time.monotonic() > deadline:
                raise RolloutError(f"{self._in_flight()} requests could not be aborted.")
            with contextlib.suppress(RollwayError):  # one that has died loses its requests itself
                await self.stack.fleet.pause("abort")

    def _in_flight(self) -> int:
        """Requests that an engine has, or may have."""
        self._earlier = [client for client in self._earlier if client.in_flight]
        clients = [*self._earlier, *filter(None, [self._rollouts])]
        return sum(client.in_flight for client in clients)

    async def resume_generation(self) -> None:
        async with self._control:
            if self._asleep:
                return
            if self._paused:
                await self.stack.fleet.resume()
                self._paused = False
            self._gate.open()

    async def sleep(self) -> None:
        """Give the engines' memory to the trainer, after what runs has ended."""
        if not self._frees:
            return
        self._gate.shut()
        async with self._control:
            if self._asleep:
                return
            self._gate.shut()
            if self._running:
                await asyncio.wait(self._running.values())
            await self._on_workers("sleep")
            self._asleep = True

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Dynamo wakes all of an engine at once; requests come back with its cache."""
        async with self._control:
            if self._asleep:
                await self._on_workers("wake")
                self._asleep = False
        if tags is None or "kv_cache" in tags:
            await self.resume_generation()

    async def _on_workers(self, call: str) -> None:
        fleet = self.stack.fleet
        results = await on_all(await fleet.workers(), getattr(fleet.admin, call))
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def clear_kv_cache(self) -> None:
        if self._stack is not None and not self._asleep:
            await self.stack.fleet.flush_cache()

    async def release_kv_cache(self) -> None:
        """The cache alone cannot be given back; new weights are staged beside it."""

    async def resume_kv_cache(self) -> None: ...

    async def start_profile(self, **_: Any) -> None:
        log.warning("Rollway's engines are not profiled by verl; see `rollway logs`.")

    async def stop_profile(self) -> None: ...

    # --- weights ---------------------------------------------------------------------------------

    async def refit(self, offer: dict[str, Any], step: int | None) -> dict[str, float]:
        """Bring every worker to what a rank has published."""
        made = parse_offer(offer)  # it came from a rank of this job, through Ray
        async with self._control:
            self._version += 1
            return await self._brought(made, step)

    async def hand_over(self, sockets: Sequence[str], step: int | None) -> dict[str, float]:
        """Have every worker take what the ranks at these sockets send."""
        model, secret = Path(model_path(self._model)), self.stack.weights_secret
        async with self._control:
            self._version += 1
            update = handed_over(self._version, sockets, model, secret)
            return await self._brought(update, step)

    async def _brought(self, update: Weights, step: int | None) -> dict[str, float]:
        if words := self._traffic.summary():
            print(f"rollway: since the last weights: {words}", flush=True)
        self._steps[self._version] = step
        report = await self.stack.refit(self._version, update, allow_cast=True)
        self._write_targets()  # a worker that was replaced has another port
        return {"seconds": report.seconds, "paused_seconds": report.paused_seconds}

    async def load_adapter(
        self, offer: dict[str, Any], config: dict[str, Any], step: int | None
    ) -> None:
        """Have every worker serve what a rank has published as a LoRA adapter. Each version has a
        name of its own, also in the engines' caches; requests from now on are for this one."""
        made = parse_offer(offer)
        async with self._control:
            self._version += 1
            self._steps[self._version] = step
            served = await self.stack.fleet.load_adapter(
                ADAPTER, self._version, made, config, keep=ADAPTERS_KEPT
            )
            self._earlier += [] if self._rollouts is None else [self._rollouts]
            self._rollouts = self._client(served)

    async def next_version(self) -> int:
        return self._version + 1

    async def set_global_steps(self, global_steps: int) -> None:
        self._steps[self._version] = global_steps
