"""`Pool`: the Ray actor behind all replicas of a pool, which runs their common stack.

    verl ── calls ──► Pool ─┬─ Requests      what is generated, aborted, paused   (requests.py)
                            ├─ PoolWeights   versions and updates                 (weights.py)
                            └─ the stack, on the replicas' nodes     (nodes.py, stack/ray/)

A replica of verl is one worker of the stack. All workers share a frontend, whose router knows what
each has cached, so it does not matter which replica verl's load balancer chose. verl treats equal
addresses as one server, so each replica gets a proxy port that leads to the frontend.

The stack ends with this actor, also when Ray or the driver is killed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence, Set
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rollway.aio import Stack
from rollway.api import up_placed
from rollway.errors import RolloutError, StackNotRunning, StartError, UsageError
from rollway.integrations.verl import fallback, nodes
from rollway.integrations.verl.generation import refuse_media
from rollway.integrations.verl.nodes import open_proxy
from rollway.integrations.verl.requests import Requests
from rollway.integrations.verl.spec import (
    find_tied_names,
    get_model_path,
    make_stack_spec,
    read_options,
    should_free_memory,
)
from rollway.integrations.verl.weights import PoolInfo, PoolWeights, UpdateReply, Versions
from rollway.spec import StackSpec
from rollway.stack.prometheus import list_groups, write_groups
from rollway.weights.offer import parse_offer
from rollway.weights.transports.choose import Destination

log = logging.getLogger(__name__)

JOIN_SECONDS = 300.0


class Serving(NamedTuple):
    """What exists once the stack runs."""

    stack: Stack
    requests: Requests
    weights: PoolWeights


class Pool:
    """The methods that verl and the trainer's ranks call, on behalf of every replica."""

    def __init__(self, name: str, rollout: Any, model: Any, expected: int) -> None:
        self._name, self._rollout, self._model = name, rollout, model
        self._options = read_options(rollout.engine_kwargs)
        self._expected = expected
        self._places: dict[int, Sequence[nodes.WorkerPlace]] = {}
        self._all_joined = asyncio.Event()
        self._start_task: asyncio.Task[None] | None = None
        self._start_failure = self._end_cause = ""
        self._cleanup = AsyncExitStack()
        self._versions = Versions()
        self._serving: Serving | None = None

    # --- start and end ---------------------------------------------------------------------------

    async def join(self, replica: int, workers: Sequence[nodes.WorkerPlace]) -> str:
        """Register a replica, by the places of its workers; return the address of its server when
        the stack is ready."""
        self._places[replica] = workers
        if len(self._places) == self._expected:
            self._all_joined.set()
        if self._start_task is None:
            self._start_task = asyncio.create_task(self._start())
        await asyncio.shield(self._start_task)
        frontend = urlsplit(self._get_serving().stack.frontend_url)
        assert frontend.hostname is not None and frontend.port is not None
        return await self._cleanup.enter_async_context(
            open_proxy(frontend.hostname, frontend.port, bind=frontend.hostname)
        )

    async def _start(self) -> None:
        try:
            await self._wait_for_replicas()
            await self._start_stack()
        except StartError as error:
            self._start_failure = str(error)
            if self._options.fallback:
                fallback.warn(error)
            raise

    async def failure(self) -> str:
        """Return why the stack did not start; empty unless its start has failed."""
        return self._start_failure

    async def _wait_for_replicas(self) -> None:
        try:
            await asyncio.wait_for(self._all_joined.wait(), JOIN_SECONDS)
        except TimeoutError:
            raise StartError(
                f"{len(self._places)} of {self._expected} rollout replicas joined within "
                f"{JOIN_SECONDS:g} s.",
                "Look for the others' errors above.",
            ) from None

    async def _start_stack(self) -> None:
        workers = [worker for places in self._places.values() for worker in places]
        has_gpus = any(gpus for _, gpus in workers)
        spec = self._make_spec({node for node, _ in workers}, has_gpus)
        placement = nodes.make_placement(spec.models[0].name, self._places, nodes.get_own_node())
        print(f"rollway: starting stack {spec.name} with {self._expected} workers", flush=True)
        stack = await self._cleanup.enter_async_context(up_placed(spec, placement, self._end))
        frees_memory = should_free_memory(self._rollout, self._options) and has_gpus
        self.serve(stack, frees_memory=frees_memory)
        await self._write_targets()
        print(f"rollway: {stack.frontend_url} serves; logs: rollway logs {spec.name}")

    def _make_spec(self, used: Set[str], has_gpus: bool) -> StackSpec:
        if len(used) > 1 and self._options.weights == "verl_buckets":
            raise UsageError(
                "weights=verl_buckets uses sockets of one machine, and the rollout replicas are "
                f"on {len(used)} nodes.",
                "Use files, delta, collective or nixl.",
            )
        return make_stack_spec(
            self._rollout,
            self._model,
            self._options,
            pool=self._name,
            replicas=self._expected,
            has_gpus=has_gpus,
            is_spread=len(used) > 1,
        )

    def serve(self, stack: Stack, *, frees_memory: bool = False) -> None:
        """Serve verl's calls by this stack."""
        control = asyncio.Lock()
        model = get_model_path(self._model)
        used = {node for workers in self._places.values() for node, _ in workers}
        addresses = frozenset(map(nodes.get_address, used))
        requests = Requests(
            stack, self._rollout, self._options, self._versions, control, frees_memory=frees_memory
        )
        weights = PoolWeights(
            stack,
            self._versions,
            control,
            Destination(stack.name, stack.weights_secret, model, addresses),
            engine_ranks=int(self._rollout.tensor_model_parallel_size),
            tied=find_tied_names(Path(model)),
            start_seconds=self._options.start_seconds,
        )
        self._serving = Serving(stack, requests, weights)

    async def _write_targets(self) -> None:
        directory = self._options.metrics_dir
        if directory is None:
            return
        state = await asyncio.to_thread(self._get_serving().stack.read_state)
        if state is not None:
            write_groups(directory / f"{self._name}.json", list_groups(state))

    def _end(self, error: StackNotRunning) -> None:
        """Answer every later call with this error: the engines are gone for good."""
        print(f"rollway: {error}", flush=True)
        self._end_cause = error.message
        if self._serving is not None:
            self._serving.requests.fail(error.message)

    @property
    def requests(self) -> Requests:
        return self._get_serving().requests

    @property
    def weights(self) -> PoolWeights:
        return self._get_serving().weights

    def _get_serving(self) -> Serving:
        if self._end_cause:
            raise RolloutError(self._end_cause)
        if self._serving is None:
            raise RolloutError("The rollout stack has not started.")
        return self._serving

    async def shutdown(self) -> None:
        await self._cleanup.aclose()

    # --- requests --------------------------------------------------------------------------------

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

        refuse_media(images=image_data, videos=video_data, audio=audio_data)
        output = await self.requests.generate(
            prompt_ids, sampling_params, request_id, group_id, trajectory_id
        )
        return TokenOutput(**output)

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        ids = await self.requests.abort(rejects=reject_request)
        return {"aborted_count": len(ids), "request_ids": ids}

    # The trainer's ranks may make the next four calls before the stack has started.

    async def resume_generation(self) -> None:
        if self._serving is not None:
            await self.requests.resume()

    async def sleep(self) -> None:
        if self._serving is not None:
            await self.requests.sleep()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if self._serving is not None:
            await self.requests.wake_up(tags)

    async def clear_kv_cache(self) -> None:
        if self._serving is not None:
            await self.requests.clear_cache()

    async def release_kv_cache(self) -> None:
        """Do nothing: Dynamo cannot release the cache alone, and weights are staged beside it."""

    async def resume_kv_cache(self) -> None: ...

    async def start_profile(self, **_: Any) -> None:
        log.warning("verl cannot profile Rollway's engines; see `rollway logs`.")

    async def stop_profile(self) -> None: ...

    # --- weights ---------------------------------------------------------------------------------

    async def info(self) -> PoolInfo:
        """Return what a rank must know to publish; replies to updates keep it up to date."""
        return await self.weights.describe()

    async def refit(self, offer: dict[str, Any], step: int | None) -> UpdateReply:
        """Refit every worker from a version that a rank has published."""
        parsed = parse_offer(offer)
        self._print_summary()
        reply = await self.weights.refit(parsed, step)
        await self._write_targets()  # a worker that was replaced has another port
        return reply

    async def receive_buckets(self, sockets: Sequence[str], step: int | None) -> dict[str, float]:
        """Refit every worker from the ranks that send at these sockets."""
        self._print_summary()
        figures = await self.weights.receive_buckets(sockets, step)
        await self._write_targets()
        return figures

    def _print_summary(self) -> None:
        if summary := self.requests.log.summarize():
            print(f"rollway: since the last weights: {summary}", flush=True)

    async def load_adapter(
        self, offer: dict[str, Any], config: dict[str, Any], step: int | None
    ) -> UpdateReply:
        """Sample with a LoRA adapter that a rank has published, from the next request on."""
        parsed = parse_offer(offer)
        return await self.weights.load_adapter(parsed, config, step, self.requests.use_adapter)

    async def set_global_steps(self, global_steps: int) -> None:
        self._versions.set_step(global_steps)
