"""These tests need two environments: this one, with the engine, and another with verl."""

from __future__ import annotations

import importlib.util

import pytest

from tests.verl.training import RUNS, VERL_PYTHON, verl_python

METRICS = {
    "correlation": "training/rollout_actor_probs_pearson_corr",
    "k3 KL": "rollout_corr/k3_kl",
    "update, s": "timing_s/update_weights",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = ""
    if verl_python() is None:
        missing = f"no environment with verl: `make setup-verl`, or set {VERL_PYTHON}"
    elif importlib.util.find_spec("dynamo") is None:
        missing = "no engine in this environment: `make setup`"
    if missing:
        for item in items:
            if "tests/verl/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=missing))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print verl's own figures step by step; docs/verl.md quotes them."""
    if RUNS:
        terminalreporter.section("verl's metrics at each step")
    for name, steps in RUNS:
        terminalreporter.write_line(name)
        for title, metric in METRICS.items():
            values = "  ".join(f"{step.get(metric, float('nan')):.3g}" for step in steps)
            terminalreporter.write_line(f"    {title:12}{values}")
