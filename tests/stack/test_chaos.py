"""`rollway chaos` over light workers (see tests/light) and over real ones, and its control."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from tests.conftest import Cli, Footprint
from tests.light.spec import STACK_FILE, WITH_LIGHT_WORKERS, WITH_ROLES_APART
from tests.stack.chaos import BAD, chaos


@pytest.mark.parametrize("rounds", [6, pytest.param(24, marks=pytest.mark.soak)])
def test_light_workers_under_every_kind_of_fault(
    cli: Cli, footprint: Footprint, rounds: int
) -> None:
    # Supervisor crashes and long hangs are left to the long run: each costs half a minute.
    faults = [
        "none", "kill_worker", "stop_worker", "worker_leave", "worker_join", "slow_disk",
        "missing_checkpoint", "corrupt_checkpoint", "half_checkpoint", "wrong_checkpoint",
        "connection_reset", "frontend_restart", "refit_cancelled",
    ]  # fmt: skip
    only = [word for fault in faults for word in ("--fault", fault)]
    report = chaos(cli, *WITH_LIGHT_WORKERS, "--rounds", str(rounds), *only)
    assert {name: report[name] for name in BAD} == dict.fromkeys(BAD, 0), report["examples"]
    assert report["rounds"] == rounds and report["tokens_checked"] > 400 * rounds
    assert len(report["faults"]) >= min(8, rounds // 2)
    assert footprint.settle() == {}


@pytest.mark.parametrize(
    ("rounds", "faults"),
    [
        # Half-written directories: test_prime_rl_faults.py.
        (3, ("kill_worker", "worker_join", "refit_cancelled")),
        pytest.param(24, (), marks=pytest.mark.soak),
    ],
)
def test_prime_rls_calls_refit_and_sample(
    cli: Cli, footprint: Footprint, rounds: int, faults: tuple[str, ...]
) -> None:
    only = [word for fault in faults for word in ("--fault", fault)]
    arguments = (*WITH_LIGHT_WORKERS, "--through", "prime-rl", "--rounds", str(rounds), *only)
    report = chaos(cli, *arguments, timeout=1500.0)
    assert {name: report[name] for name in BAD} == dict.fromkeys(BAD, 0), report["examples"]
    assert report["rounds"] == rounds and report["tokens_checked"] > 300 * rounds
    assert footprint.settle() == {}


@pytest.mark.soak
def test_the_death_of_a_supervisor_ends_only_its_stack(cli: Cli, footprint: Footprint) -> None:
    arguments = ("--rounds", "1", "--fault", "supervisor_crash")
    report = chaos(cli, *WITH_LIGHT_WORKERS, *arguments)
    assert {name: report[name] for name in BAD} == dict.fromkeys(BAD, 0), report["examples"]
    assert footprint.settle() == {}


def test_without_protection_stale_tokens_are_found(cli: Cli) -> None:
    report = chaos(cli, *WITH_LIGHT_WORKERS, "--rounds", "3", "--unprotected")
    assert report["stale_tokens"] > 0 and report["wrong_logprobs"] > 0


@pytest.mark.parametrize(
    ("rounds", "faults"),
    [
        (3, ("kill_worker", "connection_reset", "refit_cancelled")),
        pytest.param(20, (), marks=pytest.mark.soak, id="20"),
    ],
)
def test_light_prefill_and_decode_workers(
    cli: Cli, footprint: Footprint, rounds: int, faults: tuple[str, ...]
) -> None:
    only = [word for fault in faults for word in ("--fault", fault)]
    wanted = ("--rounds", str(rounds), *only)
    report = chaos(cli, *WITH_ROLES_APART, *wanted, timeout=900.0)
    assert {name: report[name] for name in BAD} == dict.fromkeys(BAD, 0), report["examples"]
    assert report["rounds"] == rounds and report["tokens_checked"] > 300 * rounds
    assert footprint.settle() == {}


def test_without_protection_kv_of_two_versions_is_mixed(cli: Cli) -> None:
    report = chaos(cli, *WITH_ROLES_APART, "--rounds", "2", "--unprotected")
    assert report["stale_tokens"] > 0 and report["wrong_logprobs"] > 0


@pytest.mark.parametrize(
    "faults",
    [
        # A real worker that is killed under load: test_known_faults_deaths.py, faults 10 to 12.
        ("connection_reset", "refit_cancelled"),
        pytest.param(
            ("stop_worker", "connection_reset", "kill_worker", "refit_cancelled"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_real_workers(cli: Cli, footprint: Footprint, faults: tuple[str, ...]) -> None:
    only = [word for fault in faults for word in ("--fault", fault)]
    report = chaos(cli, "--rounds", str(len(faults)), "--seed", "1", *only)
    assert {name: report[name] for name in BAD} == dict.fromkeys(BAD, 0), report["examples"]
    assert report["tokens_checked"] > 250 * len(faults)
    assert footprint.settle() == {}


def test_an_unknown_fault_is_explained(cli: Cli) -> None:
    done = cli("chaos", str(STACK_FILE), "--fault", "earthquake", "--json")
    assert done.returncode == 2
    assert "There is no fault `earthquake`" in done.stderr


def test_a_run_that_is_over_its_time_reports_what_it_has_checked(
    cli: Cli, footprint: Footprint
) -> None:
    """The worker that was killed need not come back."""
    arguments = ("--rounds", "50", "--fault", "kill_worker", "--seconds", "1")
    report = chaos(cli, *WITH_LIGHT_WORKERS, *arguments)
    assert {name: report[name] for name in BAD} == dict.fromkeys(BAD, 0), report["examples"]
    assert report["rounds"] == 1 and not report["detail"][0]["healed"]
    assert report["ended_early"] == "1 s have passed"
    assert footprint.settle() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_interrupted_reports_what_it_has_checked(
    footprint: Footprint, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "rollway.cli", "chaos", *WITH_LIGHT_WORKERS, "--json"]
    with subprocess.Popen(
        [*command, "--rounds", "500", "--fault", "none"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        assert any("round 2" in line for line in run.stderr)  # it ends if the run does
        run.send_signal(number)
        output, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors[-2000:]
    report = json.loads(output)
    assert {name: report[name] for name in BAD} == dict.fromkeys(BAD, 0), report["examples"]
    assert 2 <= report["rounds"] < 500 and report["ended_early"] == number.name
    assert footprint.settle() == {}
