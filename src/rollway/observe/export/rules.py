"""Recording rules and alerts, in Prometheus' format.

Every alert says what is wrong and what to do. `Bounds` has what a user may set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rollway.errors import UsageError
from rollway.observe.export.expressions import over_names
from rollway.observe.export.prometheus import JOBS

Rules = dict[str, Any]

_SHORT, _LONG = "10m", "1h"
_FEWEST_TOKENS = 10_000
"""Below this many prompt tokens in ten minutes, a share of hits says little."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """When an alert fires. Times are seconds."""

    spread_seconds: float = 120.0
    """Workers differ in their version for longer than this: longer than a refit takes."""
    mismatch_k3: float = 1e-3
    """The mismatch KL of trainer and engine."""
    paused_share: float = 0.2
    """The share of a step in which refits paused the engines."""
    paused_seconds: float = 300.0
    hits_share: float = 0.5
    """The share of prefix hits in ten minutes, against the hour before."""
    hits_seconds: float = 300.0
    restarts: float = 3
    """How many restarts of one worker, within `restart_seconds`."""
    restart_seconds: float = 900.0
    kv_share: float = 0.95
    """The share of the KV cache in use."""
    kv_seconds: float = 300.0
    lost_seconds: float = 60.0
    """How long a page cannot be read."""


def parse_bounds(texts: Sequence[str]) -> Bounds:
    """Return the bounds with changes such as `mismatch_k3=0.01`."""
    known = {field.name for field in fields(Bounds)}
    changes = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name not in known or not 0 <= number < float("inf"):
            raise UsageError(
                f"`{text}` sets no bound of an alert.",
                f"Write NAME=NUMBER, with a name of {', '.join(sorted(known))}.",
            )
        changes[name] = number
    return replace(Bounds(), **changes)


def make_rules(bounds: Bounds | None = None) -> Rules:
    """Return the content of a rule file."""
    return {
        "groups": [
            {"name": "rollway-recorded", "rules": _list_recorded()},
            {"name": "rollway-alerts", "rules": _list_alerts(bounds or Bounds())},
        ]
    }


def _list_recorded() -> list[Rules]:
    rules = []
    for span in (_SHORT, _LONG):
        cached = f"sum by (stack) (rate(rollway_cached_tokens_total[{span}]))"
        prompt = f"sum by (stack) (rate(rollway_prompt_tokens_total[{span}]))"
        rules.append(
            {"record": f"stack:rollway_cached_share:rate{span}", "expr": f"{cached} / {prompt}"}
        )
    paused = 'sum by (stack) (rollway_step_part_seconds{part="paused"})'
    step = "sum by (stack) (rollway_step_seconds)"
    rules.append({"record": "stack:rollway_paused_share:last", "expr": f"{paused} / {step}"})
    return rules


def _list_alerts(bounds: Bounds) -> list[Rules]:
    kv = over_names("vllm:kv_cache_usage_perc", "max by (stack, worker) ({})")
    restarts = f"increase(rollway_restarts_total[{_span(bounds.restart_seconds)}])"
    tokens = f"sum by (stack) (increase(rollway_prompt_tokens_total[{_SHORT}]))"
    hits = (
        f"stack:rollway_cached_share:rate{_SHORT} < {bounds.hits_share:g} * "
        f"(stack:rollway_cached_share:rate{_LONG} offset {_SHORT}) and {tokens} > {_FEWEST_TOKENS}"
    )
    return [
        _make_alert(
            "RollwayVersionSpread", "rollway_version_spread > 0", bounds.spread_seconds, "critical",
            "Workers of {{ $labels.stack }} serve different weight versions.",
            "They are {{ $value }} versions apart for longer than a refit. `rollway fleet "
            "versions` shows who is behind, `rollway doctor --stack` why.",
        ),
        _make_alert(
            "RollwayMismatch", f"rollway_mismatch_k3 > {bounds.mismatch_k3:g}", 0, "critical",
            "Trainer and engines of {{ $labels.stack }} disagree on version "
            "{{ $labels.version }}.",
            "The mismatch KL is {{ $value }} nats. docs/exactness.md tells the causes apart.",
        ),
        _make_alert(
            "RollwayPaused", f"stack:rollway_paused_share:last > {bounds.paused_share:g}",
            bounds.paused_seconds, "warning",
            "Refits pause {{ $labels.stack }} for {{ $value | humanizePercentage }} of a step.",
            "Stage weights in the background, or refit by `rolling` or `in-flight`: "
            "docs/fleet.md.",
        ),
        _make_alert(
            "RollwayHitsFell", hits, bounds.hits_seconds, "warning",
            "Prefix hits of {{ $labels.stack }} fell to {{ $value | humanizePercentage }}.",
            "Compare with the hour before. `rollway doctor --stack` checks that KV events reach "
            "the router.",
        ),
        _make_alert(
            "RollwayRestartLoop", f"{restarts} >= {bounds.restarts:g}", 0, "critical",
            "{{ $labels.worker }} of {{ $labels.stack }} restarts again and again.",
            "Read `rollway logs {{ $labels.stack }} {{ $labels.worker }}`.",
        ),
        _make_alert(
            "RollwayKvFull", f"({kv}) > {bounds.kv_share:g}", bounds.kv_seconds, "warning",
            "The KV cache of {{ $labels.worker }} in {{ $labels.stack }} is full.",
            "Requests wait or lose their blocks. Add workers or KV memory, or send fewer "
            "rollouts at once.",
        ),
        _make_alert(
            "RollwayScrapeLost", f'up{{job=~"{"|".join(JOBS)}"}} == 0', bounds.lost_seconds,
            "warning",
            "{{ $labels.instance }} of {{ $labels.stack }} does not answer Prometheus.",
            "It is dead, hung, or cannot be reached: `rollway status {{ $labels.stack }}`.",
        ),
    ]  # fmt: skip


def _make_alert(
    name: str, expression: str, seconds: float, severity: str, summary: str, description: str
) -> Rules:
    return {
        "alert": name,
        "expr": expression,
        "for": _span(seconds),
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "description": description},
    }


def _span(seconds: float) -> str:
    """Return a time as Prometheus writes it, to the millisecond."""
    return f"{round(seconds * 1000)}ms" if seconds % 1 else f"{seconds:.0f}s"
