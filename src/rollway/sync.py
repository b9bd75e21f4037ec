"""The async API for code without an event loop: the same names, blocking.

A portal runs one event loop in a thread. `blocking(method)` makes a coroutine method into one that
hands the coroutine to the portal and waits; its signature stays visible to type checkers and
editors. Ctrl-C cancels the coroutine, so that requests end on the workers too.

A test compares each class with its async one: a coroutine method that is missing here fails it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack

from rollway.fleet.fleet import Fleet as AsyncFleet
from rollway.publishing import PublisherOptions, Transport
from rollway.rollout.client import Rollouts as AsyncRollouts
from rollway.rollout.teacher import Teacher as AsyncTeacher
from rollway.stack_handle import Stack as AsyncStack
from rollway.weights.transports.base import Publisher

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")
P = ParamSpec("P")


class Portal:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rollway-portal", daemon=True
        )
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine in the loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                # The coroutine must clean up before the interrupt continues.
                concurrent.futures.wait([future], timeout=120.0)
            raise

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Blocking(Generic[A]):
    """An object of the async API, and the portal that runs its coroutines."""

    def __init__(self, wrapped: A, portal: Portal) -> None:
        self._async = wrapped
        self._portal = portal


def blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Blocking[A], P], T]:
    """Return the blocking form of a coroutine method."""

    @functools.wraps(method)
    def call(self: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        bound: Callable[P, Coroutine[Any, Any, T]] = getattr(self._async, method.__name__)
        return self._portal.run(bound(*args, **kwargs))

    return call


def blocking_iterator(
    method: Callable[Concatenate[A, P], AsyncIterator[T]],
) -> Callable[Concatenate[Blocking[A], P], Iterator[T]]:
    """Return the blocking form of an async generator method."""

    @functools.wraps(method)
    def call(self: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        bound: Callable[P, AsyncIterator[T]] = getattr(self._async, method.__name__)
        items = bound(*args, **kwargs)
        try:
            while True:
                try:
                    yield self._portal.run(_next(items))
                except StopAsyncIteration:
                    return
        finally:
            # A reader that stops early must end the request on the worker too.
            if (close := getattr(items, "aclose", None)) is not None:
                self._portal.run(close())

    return call


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)


def wrapping(
    method: Callable[Concatenate[A, P], T], blocking_class: Callable[[T, Portal], B]
) -> Callable[Concatenate[Blocking[A], P], B]:
    """Return a method whose result is the blocking form of what the async method returns."""

    @functools.wraps(method)
    def call(self: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> B:
        bound: Callable[P, T] = getattr(self._async, method.__name__)
        return blocking_class(bound(*args, **kwargs), self._portal)

    return call


class Rollouts(Blocking[AsyncRollouts]):
    """A client that samples; `Stack.rollouts` returns it.

    The n rollouts of a call share one session, which the router keeps on one worker: the prompt is
    computed once. No worker on another weight version samples a token of them.

    Example:
        rollouts = stack.rollouts()
        group = rollouts.generate(prompt_ids, rollway.Sampling(max_tokens=64), n=8)
    """

    generate = blocking(AsyncRollouts.generate)
    generate_batch = blocking(AsyncRollouts.generate_batch)
    stream = blocking_iterator(AsyncRollouts.stream)


class Teacher(Blocking[AsyncTeacher]):
    """A client that returns the log-probs a served model gives to sequences.

    `Stack.teacher` returns it. It serves distillation, reference models, and checks of another
    engine.

    Example:
        (scores,) = stack.teacher().score([prompt_ids + completion_ids])
        scores.logprobs[len(prompt_ids) :]  # of the completion
    """

    score = blocking(AsyncTeacher.score)


class Fleet(Blocking[AsyncFleet]):
    """All RL workers of one model; `Stack.fleet` returns it.

    Example:
        for worker in stack.fleet.workers():
            print(worker.instance_id, worker.error)
    """

    workers = blocking(AsyncFleet.workers)
    pause = blocking(AsyncFleet.pause)
    resume = blocking(AsyncFleet.resume)
    sleep = blocking(AsyncFleet.sleep)
    wake = blocking(AsyncFleet.wake)
    flush_cache = blocking(AsyncFleet.flush_cache)
    read_versions = blocking(AsyncFleet.read_versions)
    refit = blocking(AsyncFleet.refit)
    load_adapter = blocking(AsyncFleet.load_adapter)
    unload_adapter = blocking(AsyncFleet.unload_adapter)
    admit = blocking(AsyncFleet.admit)
    is_paused = blocking(AsyncFleet.is_paused)


class Stack(Blocking[AsyncStack]):
    """A running stack: its addresses, its fleet, its rollouts.

    `with rollway.up(…)` and `with rollway.attach(…)` return it. `async with` returns a
    `rollway.aio.Stack`, whose methods are coroutines.

    Attributes:
        name: the name of a stack of this machine; empty for a stack attached by address.
        models: the names of the served models.
        frontend_url: the address of the frontend.
        rl_url: the address of the RL worker listing.
        run_dir: a scratch directory that is removed with the stack; None for an attached stack.
        record_dir: where the stack is recorded, for `rollway report`; None if it is not.

    Example:
        with rollway.up(model="/models/policy", workers=2) as stack:
            (rollout,) = stack.rollouts().generate(prompt_ids)
            stack.refit(1, "/checkpoints/step-1")
    """

    def __init__(self, wrapped: AsyncStack, portal: Portal) -> None:
        super().__init__(wrapped, portal)
        self.name: str = wrapped.name
        self.run_dir: Path | None = wrapped.run_dir
        self.record_dir: Path | None = wrapped.record_dir
        self.frontend_url: str = wrapped.frontend_url
        self.rl_url: str = wrapped.rl_url
        self.models: list[str] = wrapped.models

    fleet_of = wrapping(AsyncStack.fleet_of, Fleet)
    rollouts = wrapping(AsyncStack.rollouts, Rollouts)
    teacher = wrapping(AsyncStack.teacher, Teacher)
    refit = blocking(AsyncStack.refit)
    sleep = blocking(AsyncStack.sleep)
    wake = blocking(AsyncStack.wake)
    context_length = blocking(AsyncStack.context_length)

    @property
    def version(self) -> int | None:
        """The version of new rollouts of the only model, as far as this process knows: 0 before the
        first refit, None where workers declare none. Another process's refit is known once the
        workers were asked, as by a rollout or `Fleet.read_versions`."""
        return self._async.version

    @property
    def next_version(self) -> int:
        """The number for the next refit of the only model, above all that this process knows or has
        published, and all that the stack's record has."""
        return self._async.next_version

    @property
    def fleet(self) -> Fleet:
        """The workers of the only model; `fleet_of` returns those of one of several."""
        return self.fleet_of(None)

    def publisher(
        self,
        transport: Transport = "auto",
        model: str | None = None,
        **options: Unpack[PublisherOptions],
    ) -> Publisher:
        """Return a publisher of new weights that knows this stack. It is a context manager.

        Tensors are read in the calling thread.

        Args:
            transport: "shm", "cuda_ipc", "files", "delta", "collective" or "nixl". "auto" chooses
                at the first publish, by where the tensors and the workers are, and logs why.
            model: the name of a served model; None for the only one.
            directory: files, delta: where versions are stored; it must be visible to the trainer
                and all workers. Without it, a temporary directory that is removed on close.
            checkpoint: files: the directory of the trained model, for a stack that was not started
                on this machine.
            bucket_bytes: cuda_ipc, files: limit of the memory for tensors on their way. collective:
                the size of a chunk, which its last tensor may exceed; at most 16 MiB, the default.
                Two chunks are in memory.
            in_place: cuda_ipc: publish the trainer's own memory instead of a copy; the trainer
                must not change its weights until `refit` has returned.
            keep: shm, cuda_ipc, nixl: how many versions stay available.
            keep_recent: files, delta: how many versions stay available.
            max_off_policy_steps: files, delta: how many versions a worker may be behind.
            snapshot_every: delta: publish all weights, not only changes, every so many versions.
            hold_on_cpu: delta: hold the last version in CPU memory.
            compression: delta: "zstd" or "none" (default: "none" in a temporary directory on the
                engines' machine, else "zstd").
            host, port: collective, nixl: the address that workers connect to.
            init_seconds, step_seconds: collective: time limits of joining and of one broadcast.
            engine_ranks: nixl: tensor parallelism of the engines (default: that of the workers).
            fanout: nixl: workers pass a version on to each other.
            rank, world: nixl: which of how many trainer processes this is.
            catalog: nixl: the address of a catalog that runs elsewhere.

        Raises:
            UsageError: a transport that cannot reach the workers, or an option it does not have.

        Example:
            with rollway.up(model=path, workers=2) as stack, stack.publisher() as weights:
                for _ in range(steps):
                    train()
                    stack.refit(weights.publish(stack.next_version, model.named_parameters()))
        """
        workers = self.fleet_of(model).workers()
        return self._async.open_publisher(
            transport,
            model,
            options,
            workers,
            lambda: self._portal.run(self._async.count_receivers(model)),
        )

    @property
    def weights_secret(self) -> str:
        """The secret that offers of weights are signed with; a catalog of weights needs it too.

        It is empty for a stack that this user did not start on this machine."""
        return self._async.weights_secret

    @property
    def join_spec(self) -> dict[str, Any]:
        """Fields for the spec of workers that join this stack, also from another machine.

        They contain the secret that weights are signed with.

        Raises:
            UsageError: the stack was not started by this user on this machine.

        Example:
            spec = {**stack.join_spec, "name": "more", "models": [{"path": path}]}
        """
        return self._async.join_spec
