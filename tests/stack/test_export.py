"""A real Prometheus reads what is exported of running stacks: light workers, and vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import rollway
from benchmarks.fleet import make_single
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.stack.state import LOADED, ProcessState, StackDir
from tests.light.spec import light
from tests.observe.deployed import RATE_SPAN, RULES, list_expressions, read_dashboard
from tests.observe.prometheus import Prometheus, needs_prometheus, open_prometheus
from tests.stack.policies import Policy
from tests.stack.serving import SHORT, first_tokens
from tests.stack.stacks import VLLM_ARGS
from tests.waiting import wait_until_async

pytestmark = needs_prometheus

OFTEN = {"interval_seconds": 0.2}
QUICK = {"for: 120s": "for: 2s", "for: 60s": "for: 2s", "[900s]) >= 3": "[60s]) >= 2"}
"""Bounds of alerts for a test of a minute."""
ALL_UP = {"frontend": True, "tiny-0": True, "tiny-1": True, "page": True}


@asynccontextmanager
async def export(
    directory: Path, name: str, *, is_stopped: bool = True
) -> AsyncIterator[dict[str, Any]]:
    """Run `rollway observe export prometheus --follow`, and yield what it printed. At the end stop
    it, or wait until it ends by itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollway.cli", "observe", "export", "prometheus", name,
        "--out", str(directory), "--follow", "--port", "0", "--seconds", "0.5", "--json",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 60)
    try:
        yield json.loads(line)
    finally:
        if is_stopped:
            process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0


def find_worker(stack: str, name: str) -> ProcessState:
    state = StackDir(stack).read()
    assert state is not None
    return next(process for process in state.processes if process.name == name)


def send_signal(stack: str, name: str, number: signal.Signals) -> None:
    pid = find_worker(stack, name).pid
    assert pid is not None
    os.kill(pid, number)


async def wait_for_targets(prometheus: Prometheus, wanted: dict[str, bool]) -> None:
    async def are_as_wanted() -> bool:
        return await prometheus.list_up() == wanted

    await wait_until_async(are_as_wanted, 60, every=0.1, what=f"targets {wanted}")


async def wait_for_alert(prometheus: Prometheus, name: str, *, fires: bool = True) -> None:
    async def is_as_wanted() -> bool:
        return (name in await prometheus.list_firing()) == fires

    await wait_until_async(is_as_wanted, 60, every=0.1, what=f"{name} fires: {fires}")


async def test_prometheus_follows_workers_that_die_hang_and_fall_behind(
    base_model: Path, policies: list[Policy], tmp_path: Path
) -> None:
    """Each of three alerts fires for its cause, and ends with it."""
    directory = tmp_path / "export"
    rules = RULES.read_text()
    for bound, quick in QUICK.items():
        assert bound in rules
        rules = rules.replace(bound, quick)
    directory.mkdir()
    (directory / RULES.name).write_text(rules)
    checkpoint = shutil.copytree(policies[1].path, tmp_path / "checkpoint")
    spec = {**light(base_model, "scraped"), "observe": OFTEN}
    async with (
        rollway.aio.up(spec) as stack,
        export(directory, "scraped") as printed,
        open_prometheus(directory) as prometheus,
    ):
        await wait_for_targets(prometheus, ALL_UP)
        assert printed["url"].endswith("/metrics")
        await stack.refit(1, checkpoint)
        assert await prometheus.list_firing() == set()

        send_signal("scraped", "tiny-0", signal.SIGSTOP)
        await wait_for_targets(prometheus, {**ALL_UP, "tiny-0": False})
        await wait_for_alert(prometheus, "RollwayScrapeLost")
        send_signal("scraped", "tiny-0", signal.SIGCONT)
        await wait_for_targets(prometheus, ALL_UP)
        await wait_for_alert(prometheus, "RollwayScrapeLost", fires=False)

        shutil.rmtree(checkpoint)  # a worker that restarts waits for another version
        for count in (1, 2):
            send_signal("scraped", "tiny-1", signal.SIGKILL)
            await wait_until_async(lambda count=count: is_back("scraped", "tiny-1", count), 60)
        await wait_for_targets(prometheus, ALL_UP)
        await wait_for_alert(prometheus, "RollwayRestartLoop")
        # Somebody refits it alone, and nobody watches who would move the other worker.
        await stack.unwatch()
        async with Http() as http:
            worker = await wait_until_async(partial(find_only_behind, stack.fleet))
            single = make_single(http, stack.fleet, worker, stack.weights_secret)
            await single.refit(2, policies[2].path)
        await wait_for_alert(prometheus, "RollwayVersionSpread")
        await stack.refit(3, policies[2].path)
        await wait_for_alert(prometheus, "RollwayVersionSpread", fires=False)
    assert list((directory / "targets").iterdir()) == []  # nobody is there any more
    assert list((directory / "pages").iterdir()) == []


async def find_only_behind(fleet: Fleet) -> Worker | None:
    """Return the worker without version 1, once the dead ones are no longer listed."""
    served = fleet.versions.by_worker
    behind = [each for each in await fleet.workers() if served.get(each.instance_id) != 1]
    return behind[0] if len(behind) == 1 else None


def is_back(stack: str, name: str, restarts: int) -> bool:
    process = find_worker(stack, name)
    return process.restarts == restarts and process.state in LOADED


async def test_workers_that_join_and_leave_are_seen_by_the_stacks_address(
    base_model: Path, tmp_path: Path
) -> None:
    first = {**light(base_model, "hosts", replicas=1), "observe": "off"}
    async with (
        rollway.aio.up(first) as stack,
        export(tmp_path, stack.frontend_url),
        open_prometheus(tmp_path) as prometheus,
    ):

        async def count_workers() -> int:
            names = await prometheus.list_up()
            return sum(names.values()) - 2 if {"frontend", "page"} <= set(names) else 0

        async def has_workers(count: int) -> bool:
            return await count_workers() == count

        await wait_until_async(lambda: has_workers(1), 60)
        second = {**light(base_model, "joins", replicas=1), **stack.join_spec}
        async with rollway.aio.up({**second, "observe": "off"}):
            await wait_until_async(lambda: has_workers(2), 60)
        await wait_until_async(lambda: has_workers(1), 60)


async def test_the_exporter_ends_with_its_stack(base_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "targets" / "brief.json"
    spec = {**light(base_model, "brief"), "observe": OFTEN}
    async with AsyncExitStack() as exporter, rollway.aio.up(spec):
        # Entered last, and left after the stack: it has to end by itself.
        await exporter.enter_async_context(export(tmp_path, "brief", is_stopped=False))
        assert len(json.loads(path.read_text())) == 3
    assert not path.exists()


async def test_every_expression_of_the_dashboard_has_series(
    base_model: Path, policies: list[Policy], tmp_path: Path
) -> None:
    """Of a stack of vLLM workers with a trainer, whose frontend died once."""
    model = {"path": str(base_model), "name": "tiny", "replicas": 2, "args": VLLM_ARGS}
    spec = {"name": "plotted", "models": [model], "observe": OFTEN}
    expressions = [text.replace("$stack", ".*") for text in list_expressions(read_dashboard())]
    expressions = [text.replace(RATE_SPAN, "1h") for text in expressions]
    async with (
        rollway.aio.up(spec) as stack,
        export(tmp_path, "plotted"),
        open_prometheus(tmp_path) as prometheus,
    ):
        await wait_for_targets(prometheus, ALL_UP)
        await train(stack, policies)

        async def list_empty() -> list[str]:
            return [text for text in expressions if not await prometheus.query(text)]

        async def has_all() -> bool:
            return await list_empty() == []

        try:
            await wait_until_async(has_all, 60, every=1.0)
        except AssertionError:
            assert await list_empty() == []


async def train(stack: rollway.aio.Stack, policies: list[Policy]) -> None:
    """Do what leaves a value of every metric, as a trainer with a gateway would."""
    rollouts, prompt = stack.rollouts(), list(range(40, 140))
    for step in (1, 2):
        with rollway.observe.step(step) as current:
            with current.part("generate"):
                await rollouts.generate(prompt, SHORT, n=4)
            with current.part("publish"):
                await stack.refit(step, policies[step].path)
        rollway.observe.note_mismatch(step, 1e-6, k1=1e-7, max=1e-5, tokens=8)
    sampling = asyncio.create_task(
        rollouts.generate_batch([prompt] * 4, rollway.Sampling(max_tokens=800, ignore_eos=True))
    )
    await first_tokens(stack.frontend_url, await stack.fleet.workers())
    send_signal("plotted", "frontend", signal.SIGKILL)  # its requests are sent again
    await sampling
    recorder = stack.run_recorder
    assert recorder is not None
    # A gateway records these (rollway.gateway.command); its own tests are elsewhere.
    recorder.write("gateway", sessions=1, turns=2)
    recorder.write("forks", reason="edited", count=1)
