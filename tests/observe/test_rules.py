"""Prometheus' own tool accepts what is exported, and every alert fires when its series say so."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollway.observe.exporter import make_config, write_config
from rollway.stack.prometheus import write_file
from tests.observe.deployed import RULES, read_rules
from tests.observe.prometheus import needs_prometheus, run_promtool

pytestmark = needs_prometheus

STACK = '{stack="s"}'
HOUR = 60
"""Samples are a minute apart."""

CASES: dict[str, tuple[dict[str, str], dict[str, str], int]] = {
    "RollwayVersionSpread": (
        {f"rollway_version_spread{STACK}": "0x5 1x10"},
        {f"rollway_version_spread{STACK}": "0x5 1 0x10"},  # a refit is under way
        12,
    ),
    "RollwayMismatch": (
        {'rollway_mismatch_k3{stack="s",version="3"}': "0.0001x3 0.02x3"},
        {'rollway_mismatch_k3{stack="s",version="3"}': "0.0001x9"},
        5,
    ),
    "RollwayPaused": (
        {
            'rollway_step_part_seconds{stack="s",part="paused"}': "4x20",
            'rollway_step_part_seconds{stack="s",part="train"}': "6x20",
            f"rollway_step_seconds{STACK}": "10x20",
        },
        {
            'rollway_step_part_seconds{stack="s",part="paused"}': "1x20",
            f"rollway_step_seconds{STACK}": "10x20",
        },
        15,
    ),
    "RollwayHitsFell": (
        {
            f"rollway_prompt_tokens_total{STACK}": f"0+6000x{2 * HOUR}",
            f"rollway_cached_tokens_total{STACK}": f"0+3000x{HOUR} {3000 * HOUR}+60x{HOUR}",
        },
        {
            f"rollway_prompt_tokens_total{STACK}": f"0+6000x{2 * HOUR}",
            f"rollway_cached_tokens_total{STACK}": f"0+3000x{2 * HOUR}",
        },
        HOUR + 25,
    ),
    "RollwayRestartLoop": (
        {'rollway_restarts_total{stack="s",worker="w-0"}': "0x5 1x3 2x3 3x3"},
        {'rollway_restarts_total{stack="s",worker="w-0"}': "0x5 1x20"},
        14,
    ),
    "RollwayKvFull": (
        {'vllm:kv_cache_usage_perc{stack="s",worker="w-0",engine="0"}': "0.99x20"},
        {'vllm:kv_cache_usage_perc{stack="s",worker="w-0",engine="0"}': "0.5x20"},
        15,
    ),
    "RollwayScrapeLost": (
        {'up{job="rollway-stack",stack="s",worker="w-0"}': "1x5 0x10"},
        {
            'up{job="rollway-stack",stack="s",worker="w-0"}': "1x5 0 1x10",
            'up{job="another",stack="s"}': "0x20",
        },
        12,
    ),
}
"""The series that make each alert fire, those that must not, and the minute to look at."""


def test_promtool_accepts_the_config_with_its_rules(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    write_config(tmp_path, make_config(5.0, has_token=True))
    write_file(tmp_path / "token", "secret")
    answer = run_promtool("check", "config", tmp_path / "prometheus.yml")
    assert "10 rules found" in answer


def test_every_alert_has_a_case() -> None:
    (_, alerts) = read_rules()["groups"]
    assert [rule["alert"] for rule in alerts["rules"]] == list(CASES)


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_for_its_cause_and_for_nothing_else(tmp_path: Path, alert: str) -> None:
    bad, good, minute = CASES[alert]
    tests = [make_test(bad, minute, [alert]), make_test(good, minute, [])]
    content = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    run_promtool("test", "rules", write_file(tmp_path / "test.yml", yaml.safe_dump(content)))


def make_test(series: dict[str, str], minute: int, firing: list[str]) -> dict[str, Any]:
    """Return a test of promtool: exactly these alerts fire."""
    count = "count by (alertname) (ALERTS{alertstate='firing'})"
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": count, "eval_time": f"{minute}m", "exp_samples": samples}],
    }
