"""Transcripts of NeMo-RL's refit over HTTP (pull requests 2429 and 3068), replayed: the same
workers with the same faults, and our calls beside theirs. Where upstream is right, the calls are
the same; where it is wrong, the difference is named.

Their `update_weights_via_mx` is a route that no released Dynamo has; ours here is the stock
`update_weights_from_distributed` with a method of the engine. Workers listen at one port of the
addresses 127.0.0.N.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollway.errors import NoWorkers, RefitError, RollwayError
from rollway.fleet.fleet import Fleet
from rollway.fleet.refit import MAX_PASSES
from rollway.fleet.report import RefitReport
from rollway.fleet.workers import HealthListing
from rollway.http import Http
from tests.checkpoints import write_checkpoint
from tests.unit.fleet.fake_fleet import FakeWorker

TRANSCRIPTS = Path(__file__).parents[2] / "data" / "nemo_rl" / "refit_transcripts.txt"
NAMES = {"update_weights_via_mx": "update", "update_weights_from_disk": "update"} | {
    f"{step}_{what}": step
    for step, what in (("pause", "generation"), ("flush", "cache"), ("resume", "generation"))
}
THEIRS = ["pause", "update", "flush", "resume"]
OURS = ["pause", "pause", "update", "flush", "pause", "resume"]
"""The second pause ends requests that have not begun, and the third those for the old version that
a stalled router delivered late."""


def read_transcripts() -> dict[str, dict[int, list[tuple[str, str]]]]:
    """Return the calls of each scenario, with their answers, by worker."""
    scenarios: dict[str, dict[int, list[tuple[str, str]]]] = {}
    for line in TRANSCRIPTS.read_text().splitlines():
        if line.startswith("["):
            scenarios[line.strip("[]")] = workers = {}
        elif line.startswith("POST"):
            _, number, route, answer = line.split()
            workers.setdefault(int(number), []).append((NAMES[route], answer))
    return scenarios


GOLDEN = read_transcripts()


def list_theirs(scenario: str, number: int) -> list[str]:
    return [step for step, _ in GOLDEN[scenario][number]]


class ScriptedWorker(FakeWorker):
    """A worker with vLLM's own routes: one of them runs methods of the engine. The call with a
    version is the update; those without only look."""

    async def handle(self, request: web.Request) -> web.Response:
        if request.match_info["route"] == "update_weights_from_distributed":
            changes = "weight_version" in await request.json()
            request.match_info["route"] = "update_weights_from_disk" if changes else "look"
        return await super().handle(request)


@dataclass
class Deployment:
    """A frontend's /health, and workers that are scripted by a transcript."""

    workers: dict[int, FakeWorker] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)
    namespace: str = "ns-dgd-0a1b2c3d"
    """As Dynamo's operator names it: upstream compares with `ns-dgd` and sees nobody."""
    before_listing: Callable[[], None] = lambda: None
    has_listing: bool = True

    def add(self, number: int, **fields: Any) -> FakeWorker:
        worker = self.workers[number] = ScriptedWorker(number, **fields)
        return worker

    def describe(self, number: int, **fields: Any) -> dict[str, Any]:
        return {
            "instance_id": number, "component": "backend", "namespace": self.namespace,
            "endpoint": "rl", "transport": {"tcp": f"127.0.0.{number}:7000/x"}, **fields,
        }  # fmt: skip

    async def list_instances(self, request: web.Request) -> web.Response:
        if self._find_address(request) != "127.0.1.1":
            return web.Response()  # a worker's own
        self.before_listing()
        if not self.has_listing:
            return web.Response(status=500)
        listed = [self.describe(number) for number in self.workers]
        return web.json_response({"instances": listed + self.entries})

    async def answer(self, request: web.Request) -> web.Response:
        number = int(self._find_address(request).rpartition(".")[2])
        return await self.workers[number].handle(request)

    @staticmethod
    def _find_address(request: web.Request) -> str:
        assert request.transport is not None
        return str(request.transport.get_extra_info("sockname")[0])

    def list_calls(self, number: int) -> list[str]:
        """Return the calls that upstream makes as well."""
        return [NAMES[call] for call in self.workers[number].calls if call in NAMES]

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Fleet]:
        app = web.Application()
        app.router.add_get("/health", self.list_instances)
        app.router.add_post("/engine/{route:.+}", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", 0).start()  # every address of the loopback network
        port = runner.addresses[0][1]
        try:
            async with Http() as http:
                yield Fleet(http, HealthListing(f"http://127.0.1.1:{port}", ("ns-dgd",), port))
        finally:
            await runner.cleanup()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


async def refit(deployment: Deployment, checkpoint: Path) -> RefitReport:
    async with deployment.serve() as fleet:
        return await fleet.refit(3, checkpoint)


async def test_only_workers_of_the_deployment_are_refitted(checkpoint: Path) -> None:
    """Difference: every worker is paused. Upstream loads into a worker of the older kind while it
    generates; of the newer kind, its second version (3068) sees none."""
    assert list_theirs("2429: flat", 2) == ["update", "flush"]
    assert list(GOLDEN["3068: flat"]) == [2]
    deployment = Deployment()
    deployment.add(1)
    deployment.add(2)
    describe = deployment.describe
    deployment.entries = [
        describe(1, endpoint="generate"),
        describe(2, endpoint="update_weights_via_mx"),
        describe(4, component="router", endpoint="generate"),
        describe(5, component="Planner", endpoint="generate"),
        describe(6, namespace="ns-other"),
        describe(7, namespace="ns-dgd-2"),
    ]
    report = await refit(deployment, checkpoint)
    assert [worker.instance_id for worker in report.workers] == [1, 2] and report.serving == 2
    for number in (1, 2):
        assert deployment.list_calls(number) == OURS


async def test_a_worker_that_joins_meanwhile_is_refitted(checkpoint: Path) -> None:
    scenario = "2429: scale-up mid-cycle"
    assert list_theirs(scenario, 1) == list_theirs(scenario, 3) == THEIRS
    deployment = Deployment()
    first = deployment.add(1)

    def join() -> None:
        if "update_weights_from_disk" in first.calls and 3 not in deployment.workers:
            deployment.add(3)

    deployment.before_listing = join
    report = await refit(deployment, checkpoint)
    assert report.serving == 2 and report.passes == 2
    for number in (1, 3):
        assert deployment.list_calls(number) == OURS
        assert deployment.workers[number].version == 3


async def test_an_update_that_failed_is_not_repeated(checkpoint: Path) -> None:
    """Difference: upstream sends an update again and again to a worker that said no, which may have
    loaded a part of it. Ours is sent once, and the worker stays paused until another refit."""
    scenario = "2429: transient refit failure then ok"
    assert list_theirs(scenario, 1).count("update") == 3
    deployment = Deployment()
    worker = deployment.add(1, fail={"update_weights_from_disk": ["no source", "no source"]})
    async with deployment.serve() as fleet:
        for version in (3, 4):
            with pytest.raises(RefitError, match="no source"):
                await fleet.refit(version, checkpoint)
            assert worker.paused and deployment.list_calls(1).count("resume") == 0
        assert deployment.list_calls(1).count("update") == 2
        report = await fleet.refit(5, checkpoint)
    assert report.serving == 1 and worker.version == 5 and not worker.paused


async def test_a_worker_that_was_not_refitted_is_not_resumed(checkpoint: Path) -> None:
    """Difference: upstream flushes and resumes it, so it generates from the old weights."""
    scenario = "2429: permanent refit failure -> deadline"
    assert list_theirs(scenario, 1)[-2:] == ["flush", "resume"]
    deployment = Deployment()
    worker = deployment.add(1, fail={"update_weights_from_disk": "no v2 source"})
    with pytest.raises(RefitError, match="no v2 source") as raised:
        await refit(deployment, checkpoint)
    assert worker.paused and "resume" not in deployment.list_calls(1)
    assert [each.state for each in raised.value.report.workers] == ["in doubt"]


async def test_a_worker_that_cannot_pause_gets_no_update(checkpoint: Path) -> None:
    """Difference: upstream has refitted the first worker by then, so that two versions are served;
    and the second one serves on. Ours pauses all of them before it loads into any."""
    scenario = "2429: pause fails on one of two"
    assert list_theirs(scenario, 1) == THEIRS
    assert GOLDEN[scenario][2] == [("pause", "error")]
    deployment = Deployment()
    deployment.add(1)
    deployment.add(2, fail={"pause_generation": "busy"})
    with pytest.raises(RefitError, match="busy"):
        await refit(deployment, checkpoint)
    for number, worker in deployment.workers.items():
        assert "update" not in deployment.list_calls(number) and worker.version == 0
    assert not deployment.workers[1].paused


async def test_a_flush_that_fails_keeps_the_worker_out(checkpoint: Path) -> None:
    """Difference: upstream resumes it, with blocks of the old weights in its cache."""
    scenario = "2429: transport error on flush"
    assert GOLDEN[scenario][1][-2:] == [("flush", "error"), ("resume", "ok")]
    deployment = Deployment()
    worker = deployment.add(1, fail={"flush_cache": 500})
    with pytest.raises(RefitError):
        await refit(deployment, checkpoint)
    assert deployment.list_calls(1)[:4] == OURS[:4]
    assert worker.paused and "resume" not in deployment.list_calls(1)


async def test_a_fleet_that_never_stops_changing_ends_in_an_error(checkpoint: Path) -> None:
    """Difference: 3 passes, not 5. Each of them refits whoever joined."""
    assert len(GOLDEN["2429: churn, never converges"]) == 3  # and the record ends
    deployment = Deployment()
    deployment.add(101)

    def replace_worker() -> None:
        newest = max(deployment.workers)
        if "update_weights_from_disk" in deployment.workers[newest].calls:
            deployment.add(newest + 1)

    deployment.before_listing = replace_worker
    with pytest.raises(RefitError, match="joined after"):
        await refit(deployment, checkpoint)
    updated = [n for n in deployment.workers if "update" in deployment.list_calls(n)]
    assert updated == list(range(101, 101 + MAX_PASSES))


async def test_no_workers_is_an_error(checkpoint: Path) -> None:
    assert GOLDEN["2429: no workers"] == {}
    with pytest.raises(NoWorkers):
        await refit(Deployment(), checkpoint)


async def test_twenty_five_workers_are_refitted(checkpoint: Path) -> None:
    """Difference: all at once. Upstream's waves of 4, 16, 64 let later workers read from earlier
    ones; here that is the transport's (`NixlPublisher(fanout=)`), not the order of the calls."""
    assert list_theirs("2429: 25 workers waves", 1) == THEIRS
    deployment = Deployment()
    for number in range(1, 26):
        deployment.add(number)
    report = await refit(deployment, checkpoint)
    assert report.serving == 25 and report.passes == 1
    assert all(deployment.list_calls(number) == OURS for number in deployment.workers)


async def test_a_listing_that_fails_is_not_read_as_done(checkpoint: Path) -> None:
    """Upstream reads an error of /health after its first pass as "converged"."""
    deployment = Deployment()
    worker = deployment.add(1)

    def fail() -> None:
        deployment.has_listing = "update_weights_from_disk" not in worker.calls

    deployment.before_listing = fail
    with pytest.raises(RollwayError):
        await refit(deployment, checkpoint)


async def test_a_worker_that_only_says_ok_is_not_believed(checkpoint: Path) -> None:
    """Upstream does not ask for the version; a worker that ignored the update would serve."""
    deployment = Deployment()
    worker = deployment.add(1, ignores_updates=True)
    with pytest.raises(RefitError, match="has not applied the update"):
        await refit(deployment, checkpoint)
    assert worker.paused
