"""The public names, and that blocking classes do not lag behind the async ones."""

from __future__ import annotations

import ast
import asyncio
import inspect
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rollway
from rollway import processes, stack_handle, sync
from rollway.api import Opening, _find_addresses
from rollway.errors import UsageError
from rollway.fleet.fleet import Fleet as AsyncFleet
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.publishing import find_addresses
from rollway.rollout.client import Rollouts as AsyncRollouts
from rollway.rollout.teacher import Teacher as AsyncTeacher
from rollway.stack.state import ProcessState, StackDir, StackState, choose_run_dir
from rollway.stack_handle import Stack as AsyncStack

# Coroutines that only Rollway calls: background work of an event loop, and integrations.
INTERNAL = {
    AsyncFleet: {"choose_version", "refresh", "still_serves", "watch"},
    AsyncStack: {"learn", "unwatch", "count_receivers"},
    AsyncRollouts: set(),
    AsyncTeacher: {"sample"},
}
PAIRS = [
    (AsyncStack, rollway.Stack),
    (AsyncFleet, rollway.Fleet),
    (AsyncRollouts, rollway.Rollouts),
    (AsyncTeacher, rollway.Teacher),
]


def is_awaited(member: Any) -> bool:
    return inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)


@pytest.mark.parametrize(("async_class", "blocking_class"), PAIRS)
def test_every_coroutine_has_a_blocking_form(async_class: type, blocking_class: type) -> None:
    coroutines = {
        name
        for name, member in inspect.getmembers(async_class)
        if is_awaited(member) and not name.startswith("_")
    }
    assert coroutines - INTERNAL[async_class] <= set(vars(blocking_class))


@pytest.mark.parametrize(("async_class", "blocking_class"), PAIRS)
def test_blocking_methods_have_the_signature_of_their_coroutine(
    async_class: type, blocking_class: type
) -> None:
    for name, member in inspect.getmembers(async_class):
        blocking = getattr(blocking_class, name, None)
        if is_awaited(member) and blocking is not None and not name.startswith("_"):
            assert not is_awaited(blocking)
            assert inspect.signature(blocking) == inspect.signature(member)
            assert blocking.__doc__ == member.__doc__


def test_dir_shows_every_public_name() -> None:
    assert set(rollway.__all__) <= set(dir(rollway))
    for name in rollway.__all__:
        assert getattr(rollway, name) is not None
    assert not hasattr(rollway, "nonsense")
    for name in rollway.aio.__all__:
        assert getattr(rollway.aio, name) is not None


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(rollway.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = [
        alias.asname or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(imported) == sorted(rollway.__all__)


def test_importing_the_package_imports_nothing_heavy() -> None:
    """The code inside an engine imports it too."""
    script = "import rollway, sys; print([m for m in sys.modules if m.startswith('rollway')])"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout
    assert output.strip() == "['rollway']"


class Counter:
    def __init__(self) -> None:
        self.closed = threading.Event()

    async def add(self, first: int, second: int = 1) -> int:
        await asyncio.sleep(0)  # it really suspends
        return first + second

    async def count(self, to: int) -> AsyncIterator[int]:
        try:
            for number in range(to):
                yield number
        finally:
            self.closed.set()


class BlockingCounter(sync.Blocking[Counter]):
    add = sync.blocking(Counter.add)
    count = sync.blocking_iterator(Counter.count)


@pytest.fixture
def portal() -> Iterator[sync.Portal]:
    portal = sync.Portal()
    yield portal
    portal.close()


@pytest.fixture
def async_counter() -> Counter:
    return Counter()


@pytest.fixture
def counter(async_counter: Counter, portal: sync.Portal) -> BlockingCounter:
    return BlockingCounter(async_counter, portal)


def test_a_blocking_method_returns_what_the_coroutine_returns(counter: BlockingCounter) -> None:
    assert counter.add(1, second=2) == 3


def test_a_blocking_iterator_ends_the_async_one(
    counter: BlockingCounter, async_counter: Counter
) -> None:
    assert list(counter.count(3)) == [0, 1, 2]
    async_counter.closed.clear()
    items = counter.count(3)
    assert next(items) == 0
    items.close()  # type: ignore[attr-defined]
    assert async_counter.closed.wait(60.0)


# --- publishers ----------------------------------------------------------------------------


@pytest.fixture
def async_stack(monkeypatch: pytest.MonkeyPatch, portal: sync.Portal) -> Iterator[AsyncStack]:
    """A stack of two workers, one of them with two ranks."""

    async def workers(self: AsyncFleet, *, fresh: bool = True) -> list[Worker]:
        return [
            Worker(1, "tiny", "http://127.0.0.1:1", world_size=2),
            Worker(2, "tiny", "http://127.0.0.3:1"),
            Worker(3, "tiny", "http://127.0.0.1:2", error="it does not answer"),
        ]

    monkeypatch.setattr(AsyncFleet, "workers", workers)

    async def make() -> tuple[AsyncStack, Http]:
        http = Http()
        return AsyncStack(http, "http://127.0.0.1:9", "http://127.0.0.1:10", ["tiny"]), http

    stack, http = portal.run(make())
    yield stack
    portal.run(http.close())


@pytest.fixture
def stack(async_stack: AsyncStack, portal: sync.Portal) -> rollway.Stack:
    return sync.Stack(async_stack, portal)


def tensors() -> list[tuple[str, Any]]:
    torch = pytest.importorskip("torch")
    return [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(4))]


def test_auto_chooses_shared_memory_for_workers_of_this_machine(stack: rollway.Stack) -> None:
    with stack.publisher() as weights:
        offer = weights.publish(1, tensors())
        assert (offer.transport, offer.version) == ("shm", 1)
        assert Path("/dev/shm", offer.where["ranks"][0]["slot"]).exists()
    assert not Path("/dev/shm", offer.where["ranks"][0]["slot"]).exists()


async def test_a_publisher_for_async_code(async_stack: AsyncStack) -> None:
    async with async_stack.publisher("shm", keep=1) as weights:
        assert (await weights.publish(1, tensors())).transport == "shm"


@pytest.mark.parametrize("transport", ["files", "delta"])
def test_without_a_directory_a_temporary_one_is_removed_on_close(
    stack: rollway.Stack, transport: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    (tmp_path / "config.json").write_text("{}")
    with stack.publisher(transport, checkpoint=tmp_path) as weights:
        weights.publish(1, tensors())
        assert list((tmp_path / "scratch").iterdir())
    assert not list((tmp_path / "scratch").iterdir())


def test_a_directory_of_the_users_stays(stack: rollway.Stack, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with stack.publisher("files", directory=tmp_path / "v", checkpoint=tmp_path) as weights:
        offer = weights.publish(1, tensors())
    assert Path(offer.where["path"]).is_dir()


def test_a_broadcast_counts_the_ranks_that_answer(stack: rollway.Stack) -> None:
    with stack.publisher("collective", init_seconds=5.0) as weights:
        assert weights.publish(1, tensors()).where["receivers"] == 3


class SendingPublisher(rollway.Publisher):
    """Takes part in the transfer, as a broadcast does."""

    transport = "collective"

    def __init__(self) -> None:
        self.events: list[str] = []

    def _publish(self, version: int, tensors: Any = None) -> rollway.Offer:
        return rollway.Offer("collective", version, "identity", 1, {}, repeatable=False)

    def wait(self, version: int, seconds: float | None = None) -> None:
        self.events.append(f"wait {version}")

    def cancel(self) -> None:
        self.events.append("cancel")


@pytest.mark.parametrize("fails", [False, True])
def test_a_refit_completes_a_transfer_that_the_publisher_takes_part_in(
    stack: rollway.Stack, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    async def refit(self: AsyncFleet, *_: Any, **__: Any) -> rollway.RefitReport:
        if fails:
            raise rollway.RefitError("A worker refused.")
        return rollway.RefitReport(1)

    monkeypatch.setattr(AsyncFleet, "refit", refit)
    earlier, publisher = SendingPublisher(), SendingPublisher()
    to_open = iter([earlier, publisher])
    with monkeypatch.context() as patch:
        patch.setattr(stack_handle, "open_for_stack", lambda *_, **__: next(to_open))
        assert stack.publisher("collective") is earlier
        assert stack.publisher("collective") is publisher
    undecided = stack.publisher()
    with pytest.raises(rollway.RefitError) if fails else nullcontext():
        stack.refit(1, publisher.publish(1))
    assert publisher.events == (["cancel"] if fails else ["wait 1"])
    assert earlier.events == []
    undecided.close()


def test_an_option_of_another_transport_is_refused(stack: rollway.Stack) -> None:
    with pytest.raises(UsageError, match="fanout"):
        stack.publisher("shm", fanout=True)
    with pytest.raises(UsageError, match="fanout"):
        stack.publisher(fanout=True)


def test_addresses_of_workers() -> None:
    loopback = frozenset({"127.0.0.1"})
    assert find_addresses([]) == (loopback, "127.0.0.1")
    assert find_addresses(["http://localhost:1", "http://127.0.0.3:2"]) == (loopback, "127.0.0.1")
    addresses, own = find_addresses(["http://127.0.0.1:1", "http://192.0.2.7:1"])
    assert addresses == {own, "192.0.2.7"}


# --- openings ------------------------------------------------------------------------------


async def fail_to_open(events: list[str], cleanup: AsyncExitStack) -> AsyncStack:
    async def record() -> None:
        events.append("cleaned up")

    cleanup.push_async_callback(record)
    raise UsageError("It cannot start.")


def test_an_opening_that_fails_cleans_up() -> None:
    events: list[str] = []
    before = threading.active_count()
    with pytest.raises(UsageError), Opening(partial(fail_to_open, events)):
        raise AssertionError("the block must not run")
    assert events == ["cleaned up"]
    assert threading.active_count() == before


async def test_an_async_opening_that_fails_cleans_up() -> None:
    events: list[str] = []
    with pytest.raises(UsageError):
        async with Opening(partial(fail_to_open, events)):
            raise AssertionError("the block must not run")
    assert events == ["cleaned up"]


class SlowStart:
    """A launcher that reports its progress until it may finish."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may_finish = threading.Event(), threading.Event()
        self.stopped = False
        monkeypatch.setattr("rollway.stack.local.start", self.start)

    def start(self, spec: Any, report: Any) -> Any:
        self.began.set()
        while not self.may_finish.wait(0.01):
            report(None)
        return self

    def stop(self, progress: Any) -> None:
        self.stopped = True


@pytest.mark.parametrize("finishes", [False, True])
async def test_a_cancelled_start_leaves_nothing(
    finishes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = SlowStart(monkeypatch)
    opening = rollway.up(model="org/model")
    entering = asyncio.create_task(opening.__aenter__())
    await asyncio.to_thread(launcher.began.wait, 10)
    if finishes:  # at the moment of the cancel
        launcher.may_finish.set()
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert launcher.stopped == finishes


def test_a_stack_runs_where_it_is_told_to() -> None:
    def launch(on: str | None) -> tuple[str, str | None]:
        spec = rollway.make_spec(model="org/m", on=on)
        return spec.launcher, spec.ray.address

    assert launch(None) == ("local", None)
    assert launch("ray") == ("ray", None)
    assert launch("ray=10.0.0.1:6379") == ("ray", "10.0.0.1:6379")
    for wrong in ("slurm", "ray=", "local=x"):
        with pytest.raises(UsageError, match="nothing that a stack can run on"):
            launch(wrong)


def write_state(name: str, frontend: str, *roles: str) -> None:
    """Write the state of a stack that this process supervises, in a home whose stacks are not
    stopped after the test."""
    me, run_id = processes.this_process(), "0123456789abcdef"
    state = StackState(
        name, run_id, me.pid, me.start, str(choose_run_dir(run_id)), "/logs", frontend=frontend
    )
    state.processes = [ProcessState(role, role, f"/logs/{role}.log") for role in roles]
    StackDir(name).write(state)


@pytest.mark.parametrize("url", ["http://127.0.0.1:20000", "http://10.0.0.5:20000"])
def test_an_address_means_the_stack_that_runs_the_frontend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str
) -> None:
    monkeypatch.setenv("ROLLWAY_HOME", str(tmp_path))
    write_state("a-joined", url, "worker")
    assert _find_addresses(url, None)[2] == ""
    write_state("first", url, "worker", "frontend")
    assert _find_addresses(f"{url}/v1", None)[2] == "first"


def test_an_address_is_found_beside_a_damaged_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROLLWAY_HOME", str(tmp_path))
    write_state("bad", "http://127.0.0.1:2000x", "frontend")
    assert _find_addresses("http://localhost:20000", None)[2] == ""
