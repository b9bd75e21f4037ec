"""The dashboard of a stack of light workers: of its own record, and attached by its address."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import rollway
from rollway.observe.dash.browsers import DashAccess
from rollway.observe.dash.open_run import open_source, open_stack
from rollway.observe.dash.server import Dashboard, serve
from rollway.observe.dash.view import RunSource, View
from rollway.stack.state import StackDir
from tests.conftest import Cli, Footprint
from tests.light.spec import light
from tests.observe.browser import needs_chromium, open_browser
from tests.stack.policies import Policy
from tests.waiting import wait_until

OFTEN = {"interval_seconds": 0.2}


def follow(source: RunSource, view: View) -> View:
    for entry in source.poll():
        view.add(entry)
    return view


def test_a_stack_is_shown_with_its_workers_their_deaths_and_its_end(
    base_model: Path, footprint: Footprint
) -> None:
    with rollway.up({**light(base_model, "dashed"), "observe": OFTEN}):
        source, view = open_stack("dashed"), View()

        def list_states() -> list[str]:
            return [row["state"] for row in follow(source, view).get_sections()["fleet"]]

        wait_until(lambda: list_states() == ["ready", "ready"])
        assert source.get_phase() == "live"
        state = StackDir("dashed").read()
        assert state is not None
        worker = next(process for process in state.processes if process.role == "worker")
        assert worker.pid is not None
        assert source.find_log(worker.name)
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: list_states() != ["ready", "ready"])
        wait_until(lambda: list_states() == ["ready", "ready"])
        rows = {row["name"]: row for row in view.get_sections()["fleet"]}
        wait_until(lambda: follow(source, view).state.workers.as_json()[0]["load"] is not None)
        assert rows[worker.name]["last_event"] == "ready"
        events = [e["event"] for e in view.get_events() if e["worker"] == worker.name]
        assert "exited" in events
    wait_until(lambda: follow(source, view).get_sections()["run"]["ended"] is not None)
    assert source.get_phase() == "ended"
    assert footprint.settle() == {}


def test_a_stack_is_shown_by_its_address(base_model: Path, footprint: Footprint) -> None:
    with rollway.up({**light(base_model, "by-address"), "observe": "off"}) as stack:
        with open_source(stack.frontend_url, None) as source:
            view = View()
            wait_until(lambda: len(follow(source, view).get_sections()["fleet"]) == 2)
            assert all(row["state"] == "serving" for row in view.get_sections()["fleet"])
        assert stack.rl_url  # the stack goes on
    assert footprint.settle() == {}


def test_top_and_report_tell_of_a_running_stack(
    base_model: Path, policies: list[Policy], cli: Cli, tmp_path: Path, footprint: Footprint
) -> None:
    """As a user types them: by name, by address, and the report when it has ended."""
    with rollway.up({**light(base_model, "topped"), "observe": OFTEN}) as stack:
        stack.refit(1, policies[1].path)
        stack.rollouts().generate(list(range(20)), rollway.Sampling(max_tokens=4), n=4)

        def read_top(*arguments: str) -> dict[str, Any]:
            result = cli("top", *arguments, "--json")
            assert result.returncode == 0, result.stderr
            model: dict[str, Any] = json.loads(result.stdout)
            return model

        def has_rollouts() -> bool:
            return bool(read_top("topped")["sections"]["rollouts"]["totals"].get("count"))

        wait_until(has_rollouts, every=0.5)
        model = read_top("topped")
        assert [row["version"] for row in model["sections"]["fleet"]] == [1, 1]
        assert model["refit"]["version"] == 1 and len(model["refit"]["rows"]) == 2
        by_address = read_top(stack.frontend_url)
        assert [row["version"] for row in by_address["sections"]["fleet"]] == [1, 1]
        text = cli("top", "topped", "--once").stdout
        assert "Fleet: 2 of 2 workers serve" in text and "topped · live" in text
        directory = stack.record_dir
    result = cli("report", str(directory), "--out", str(tmp_path / "report.html"), "--json")
    assert result.returncode == 0, result.stderr
    figures = {f["label"]: f["value"] for f in json.loads(result.stdout)["runs"][0]["figures"]}
    assert figures["rollouts"] == 4 and figures["refits"] == 1 and figures["workers"] == 2
    assert footprint.settle() == {}


KILLED_IN_A_REFIT = """
import asyncio, os, signal, sys
import rollway

async def die(step, worker):
    if step == "flush":  # the orders are on their way
        await asyncio.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

async def train():
    async with rollway.attach("orphaned", watch=False) as stack:
        stack.fleet.observer = die
        await stack.refit(2, sys.argv[1])

asyncio.run(train())
"""


def test_a_trainer_that_is_killed_in_a_refit_leaves_no_false_red(
    base_model: Path,
    policies: list[Policy],
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its workers end their orders by themselves; what they declare counts."""
    # Versions of tokens are compared with those of workers some time later, here at once.
    monkeypatch.setattr("rollway.observe.run_state.FOREIGN_SECONDS", -1.0)
    spec = light(base_model, "orphaned")
    with rollway.up({**spec, "observe": OFTEN}) as stack:
        stack.refit(1, policies[1].path)
        trainer = [sys.executable, "-c", KILLED_IN_A_REFIT, str(policies[2].path)]
        assert subprocess.run(trainer).returncode == -signal.SIGKILL
        wait_until(lambda: set(stack.fleet.read_versions().values()) == {2})
        (rollout,) = stack.rollouts().generate(list(range(20)), rollway.Sampling(max_tokens=4))
        assert rollout.weight_version == 2
        source, view = open_stack("orphaned"), View()

        def judge() -> list[tuple[str, str]]:
            top = follow(source, view).get_sections()["top"][:2]
            return [(verdict["level"], verdict["sentence"]) for verdict in top]

        wait_until(lambda: judge()[1] == ("good", "All workers serve version 2, the newest."), 20)
        wait_until(lambda: follow(source, view).get_sections()["rollouts"]["totals"].get("count"))
        assert judge()[0][0] == "unknown"  # no trainer compares log-probs here
        directory = stack.record_dir
    result = cli("report", str(directory), "--out", str(tmp_path / "report.html"), "--json")
    assert result.returncode == 0 and "no worker of this run had" not in result.stdout


@needs_chromium
async def test_the_page_of_a_stack_shows_a_refit_a_death_and_the_end(
    base_model: Path, policies: list[Policy]
) -> None:
    """In a real browser: bars agree with the report; a worker is killed and its row turns, heals;
    the stack ends and the page stays."""
    async with open_browser() as browser, AsyncExitStack() as server:
        async with rollway.up({**light(base_model, "paged"), "observe": OFTEN}) as stack:
            dashboard = Dashboard(open_stack("paged"))
            url = await server.enter_async_context(serve(dashboard, DashAccess(), "127.0.0.1", 0))
            page = await browser.open(url)
            rows = "[...document.querySelectorAll('.state')].map((s) => s.innerText).join()"
            await page.wait_for(f"{rows} === 'ready,ready'")

            report = await stack.refit(1, policies[1].path)
            await page.wait_for(
                "document.querySelector('#refit-facts dd.good')?.innerText === 'ok'"
            )
            cells = "[...document.querySelectorAll('td[data-column=version]')]"
            versions = f"{cells}.map((td) => td.innerText).join()"
            await page.wait_for(f"{versions} === '1,1'")
            for worker in report.workers:
                place = f"[data-instance='{worker.instance_id}'] [data-step]"
                bars = f'[...document.querySelectorAll("{place}")]'
                shown = await page.run(f"{bars}.reduce((s, bar) => s + +bar.dataset.seconds, 0)")
                seconds = (
                    worker.preflight_seconds
                    + worker.pause_seconds
                    + worker.update_seconds
                    + worker.resume_seconds
                )
                assert shown == pytest.approx(seconds, abs=2e-3)

            state = StackDir("paged").read()
            assert state is not None
            process = next(process for process in state.processes if process.role == "worker")
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            await page.wait_for("document.querySelector('.row-bad, .row-warn') !== null")
            await page.wait_for(f"{rows} === 'ready,ready'")
            await page.wait_for(f"{versions} === '1,1'")  # its driver has refitted it
        await page.wait_for("document.getElementById('phase').innerText.startsWith('ended')")
        assert page.problems == []
        assert page.list_foreign_requests() == []
