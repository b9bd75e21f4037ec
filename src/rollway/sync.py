"""The async API for code without an event loop: the same names, blocking.

A portal runs one event loop in a thread of its own; every call here hands a coroutine over and
waits. Ctrl-C cancels the coroutine, so that requests end on the workers too.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rollway.fleet.admin import PauseMode
from rollway.fleet.discovery import Worker
from rollway.fleet.fleet import Fleet, RefitReport
from rollway.fleet.updates import Weights
from rollway.rollout.client import Rollout, Rollouts
from rollway.rollout.sampling import Sampling
from rollway.rollout.teacher import Scores, Teacher
from rollway.weights.offer import Offer

if TYPE_CHECKING:
    from rollway.api import Stack

T = TypeVar("T")


class Portal:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rollway-portal", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                # Let it clean up before the interrupt goes on.
                concurrent.futures.wait([future], timeout=120.0)
            raise

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class SyncRollouts:
    """`Rollouts`, blocking."""

    def __init__(self, rollouts: Rollouts, portal: Portal) -> None:
        self._rollouts = rollouts
        self._portal = portal

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        n: int = 1,
        *,
        group: str | None = None,
        version: int | None = None,
    ) -> list[Rollout]:
        return self._portal.run(
            self._rollouts.generate(prompt_ids, sampling, n, group=group, version=version)
        )

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None, n: int = 1
    ) -> list[list[Rollout]]:
        return self._portal.run(self._rollouts.generate_batch(prompts, sampling, n))


class SyncTeacher:
    """`Teacher`, blocking."""

    def __init__(self, teacher: Teacher, portal: Portal) -> None:
        self._teacher = teacher
        self._portal = portal

    def score(
        self, sequences: Sequence[Sequence[int]], *, version: int | None = None
    ) -> list[Scores]:
        return self._portal.run(self._teacher.score(sequences, version=version))


class SyncFleet:
    """`Fleet`, blocking."""

    def __init__(self, fleet: Fleet, portal: Portal) -> None:
        self._fleet = fleet
        self._portal = portal

    def workers(self) -> list[Worker]:
        return self._portal.run(self._fleet.workers())

    def pause(self, mode: PauseMode = "wait", *, clear_cache: bool = True) -> None:
        self._portal.run(self._fleet.pause(mode, clear_cache=clear_cache))

    def resume(self) -> None:
        self._portal.run(self._fleet.resume())

    def flush_cache(self) -> None:
        self._portal.run(self._fleet.flush_cache())

    def read_versions(self) -> dict[int, int | None]:
        return self._portal.run(self._fleet.read_versions())

    def refit(self, version: int, update: Weights, **options: Any) -> RefitReport:
        return self._portal.run(self._fleet.refit(version, update, **options))

    def load_adapter(
        self, name: str, version: int, offer: Offer, config: Mapping[str, Any], *, keep: int = 2
    ) -> str:
        return self._portal.run(self._fleet.load_adapter(name, version, offer, config, keep=keep))

    def unload_adapter(self, name: str) -> None:
        self._portal.run(self._fleet.unload_adapter(name))

    def admit(self) -> RefitReport | None:
        return self._portal.run(self._fleet.admit())


class SyncStack:
    """`Stack`, blocking."""

    def __init__(self, stack: Stack, portal: Portal) -> None:
        self._stack = stack
        self._portal = portal
        self.name = stack.name
        self.run_dir = stack.run_dir
        self.frontend_url = stack.frontend_url
        self.rl_url = stack.rl_url
        self.models = stack.models

    @property
    def fleet(self) -> SyncFleet:
        return SyncFleet(self._stack.fleet, self._portal)

    def fleet_of(self, model: str | None) -> SyncFleet:
        return SyncFleet(self._stack.fleet_of(model), self._portal)

    def rollouts(self, model: str | None = None, **options: Any) -> SyncRollouts:
        return SyncRollouts(self._stack.rollouts(model, **options), self._portal)

    def teacher(self, model: str | None = None, **options: Any) -> SyncTeacher:
        return SyncTeacher(self._stack.teacher(model, **options), self._portal)

    @property
    def weights_secret(self) -> str:
        return self._stack.weights_secret

    @property
    def invitation(self) -> dict[str, Any]:
        return self._stack.invitation

    def refit(self, version: int, update: Weights, **options: Any) -> RefitReport:
        return self.fleet.refit(version, update, **options)
