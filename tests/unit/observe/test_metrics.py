"""The table of metrics, and docs/metrics.md, which is written from it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.observe.metrics import (
    METRICS,
    SCRAPED,
    find_metric,
    make_labels_key,
    parse_labels_key,
)
from tests.observe.names import NAMES

ROOT = Path(__file__).parents[3]


def test_the_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    sys.modules.pop("metrics_page", None)
    import metrics_page

    assert metrics_page.PAGE.read_text() == metrics_page.render_page(), "run metrics_page.py"


def test_every_name_is_that_of_one_metric() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all(find_metric(name) is not None for name in NAMES)
    scraped = [name for metric in SCRAPED for name in (metric.name, *metric.aliases)]
    assert len(set(scraped)) == len(scraped)


def test_every_metric_of_ours_begins_with_our_name_and_no_other_does() -> None:
    for metric in METRICS:
        assert metric.name.startswith("rollway_") != metric.is_scraped
        assert metric.help.endswith(".") and metric.source


def test_curated_families_of_dynamo_exist_in_the_installed_release() -> None:
    """Dynamo renames families between releases; a name that is gone would be recorded never."""
    names = pytest.importorskip("dynamo.prometheus_names")
    known = {
        value
        for part in vars(names).values()
        if isinstance(part, type)
        for value in vars(part).values()
        if isinstance(value, str)
    }
    prefixes = ("dynamo_frontend_", "dynamo_component_", "dynamo_work_handler_")
    wanted = [m.name for m in SCRAPED if m.name.startswith("dynamo_")]
    # Not in the module of names, but on the page of a frontend.
    by_page = {
        "dynamo_component_requests_total",
        "dynamo_component_router_kv_selected_cached_prefix_tokens_total",
    }
    missing = [
        name
        for name in wanted
        if not any(name.removeprefix(prefix) in known for prefix in prefixes)
    ]
    assert set(missing) <= by_page


@given(st.dictionaries(st.sampled_from(["worker", "role", "state"]), st.text(min_size=1)))
def test_labels_survive_unless_they_hold_the_signs_that_divide_them(
    labels: dict[str, str],
) -> None:
    plain = {name: value.replace(",", "_").replace("=", "_") for name, value in labels.items()}
    assert parse_labels_key(make_labels_key(**labels)) == plain
