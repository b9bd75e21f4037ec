"""`rollway chaos --gateway` over light workers (see tests/light), and its control."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli, Footprint
from tests.light.spec import WITH_LIGHT_WORKERS
from tests.soak import SOAK

SHORT = ("--gateway", "--agents", "16" if SOAK else "8", "--json", "--quiet")


def chaos(cli: Cli, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = cli("chaos", *WITH_LIGHT_WORKERS, *SHORT, *arguments, timeout=300.0)
    assert done.stdout, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    assert "rounds" in report, report
    return done.returncode, report


def mounts() -> list[str]:
    lines = Path("/proc/mounts").read_text().splitlines()
    return [line for line in lines if line.startswith("rollway-chaos")]


def test_a_gateway_under_every_fault_loses_and_mixes_no_turns(
    cli: Cli, footprint: Footprint
) -> None:
    # Every round ends with a kill: a round for it alone is left to the long run.
    faults = ("deleted_sessions", "full_disk", "slow_clients", "vanished_clients")
    only = [word for fault in faults for word in ("--fault", fault)]
    code, report = chaos(cli, "--rounds", "4", *only)
    assert report["broken"] == [] and report["clean"] and code == 0, report
    assert tuple(sorted(report["faults"])) == faults
    assert report["acknowledged_turns"] > 100 and report["turns_checked"] > 50
    assert report["answers_on_full_disk"] > 0 and report["gateway_kills"] >= 4
    assert footprint.settle() == {} and mounts() == []


@pytest.mark.soak
def test_with_the_old_journal_promises_are_broken(cli: Cli, footprint: Footprint) -> None:
    faults = ("--fault", "full_disk", "--fault", "deleted_sessions")
    code, report = chaos(cli, "--rounds", "2", *faults, "--old-journal")
    assert code == 1 and not report["clean"]
    assert report["lost_turns"] > 0 and report["returned_sessions"] > 0, report
    assert footprint.settle() == {} and mounts() == []


def test_a_small_load_does_not_grow_the_gateway(cli: Cli) -> None:
    done = cli("bench", "gateway", "--requests", "2000", "--agents", "16", "--json")
    figures = json.loads(done.stdout)
    assert figures["flat"] and done.returncode == 0, figures
    assert figures["requests"] >= 2000 and figures["sessions"] > 300
    assert figures["vanished_clients"] > 0
    assert cli("bench", "gateway", "--requests", "5").returncode == 2


def test_conflicting_options_are_explained(cli: Cli) -> None:
    for arguments, text in (
        (("--old-journal",), "control of --gateway"),
        (("--gateway", "--unprotected"), "Use --old-journal"),
        (("--gateway", "--fault", "earthquake"), "There is no gateway fault `earthquake`"),
        (("--gateway", "--agents", "0"), "at least one"),
    ):
        done = cli("chaos", *arguments)
        assert done.returncode == 2 and text in done.stderr, done.stderr
