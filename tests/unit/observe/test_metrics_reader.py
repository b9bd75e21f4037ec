"""Prometheus pages, of Dynamo, of vLLM and of anything else that answers at their port."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.observe.metrics_reader import Families, ProcessMetrics, Scrape, find_percentiles

PAGE = """# HELP vllm:num_requests_running Requests, running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m, of {ours}"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0 1700000000
dynamo_component_inflight_requests 9
vllm:generation_tokens_total{engine="0"} 1.5e+03
vllm:generation_tokens_created{engine="0"} 1.7e+09
vllm:inter_token_latency_seconds_bucket{le="0.1",engine="0"} 4
vllm:inter_token_latency_seconds_bucket{le="0.1",engine="1"} 4
vllm:inter_token_latency_seconds_bucket{le="+Inf",engine="0"} 10
vllm:inter_token_latency_seconds_sum{engine="0"} 0.5
vllm:prompt_tokens_total{engine="0"} NaN
dynamo_custom_things 7
broken
vllm:num_requests_waiting{engine="0"
"""


def test_the_families_of_the_table_are_summed_over_labels() -> None:
    scrape = Families("worker").parse(PAGE)
    assert scrape.values == {
        "vllm:num_requests_running": 5.0,
        "vllm:generation_tokens_total": 1500.0,
    }
    assert scrape.buckets == {"vllm:inter_token_latency_seconds": {0.1: 8.0, math.inf: 10.0}}


def test_another_release_is_read_under_the_first_name() -> None:
    """Also if both names are on a page, in any order: the first of the table counts."""
    old = "dynamo_component_inflight_requests 9\n"
    new = "vllm:num_requests_running 5\n"
    families = Families("worker")
    assert families.parse(old).values == {"vllm:num_requests_running": 9.0}
    assert families.parse(old + new).values == {"vllm:num_requests_running": 5.0}
    assert families.parse(new + old).values == {"vllm:num_requests_running": 5.0}


def test_families_can_be_added_and_left_out() -> None:
    families = Families("worker", ["dynamo_custom"], ["vllm:"])
    assert families.parse(PAGE).values == {"dynamo_custom_things": 7.0}


def test_a_family_that_begins_like_one_of_the_table_can_be_added() -> None:
    page = PAGE + "vllm:num_requests_waiting_by_reason 4\nvllm:num_requests_waiting 1\n"
    values = Families("worker", ["vllm:num_requests_"]).parse(page).values
    assert values["vllm:num_requests_waiting_by_reason"] == 4.0
    assert values["vllm:num_requests_running"] == 5.0 and values["vllm:num_requests_waiting"] == 1.0


@given(st.text() | st.lists(st.sampled_from(PAGE.splitlines())).map("\n".join))
def test_any_page_is_read(page: str) -> None:
    scrape = Families("worker", [""]).parse(page)
    assert all(map(math.isfinite, scrape.values.values()))


def test_a_counter_that_begins_again_is_added_up_and_has_no_negative_rate() -> None:
    history, name = ProcessMetrics(), "vllm:generation_tokens_total"
    steps = [(100.0, 1), (150.0, 1), (20.0, 1), (500.0, 2)]
    rates, totals = [], []
    for at, (value, process) in enumerate(steps):
        change = history.advance(Scrape({name: value}), float(at), process, [name])
        rates.append(change.rates.get(name))
        totals.append(change.totals[name])
    assert rates == [None, 50.0, 20.0, 500.0]  # the last is of another process, from 0
    assert totals == [100.0, 150.0, 170.0, 670.0]


def test_a_gap_is_bridged_by_its_true_length() -> None:
    history, name = ProcessMetrics(), "vllm:generation_tokens_total"
    history.advance(Scrape({name: 0.0}), 0.0, 1, [name])
    assert history.advance(Scrape({name: 100.0}), 10.0, 1, [name]).rates == {name: 10.0}


def test_percentiles_are_those_of_what_was_observed_meanwhile() -> None:
    history, name = ProcessMetrics(), "vllm:inter_token_latency_seconds"
    first = {0.1: 1000.0, 1.0: 1000.0, math.inf: 1000.0}
    second = {0.1: 1000.0, 1.0: 1100.0, math.inf: 1100.0}
    history.advance(Scrape(buckets={name: first}), 0.0, 1, [])
    change = history.advance(Scrape(buckets={name: second}), 1.0, 1, [])
    percentiles = find_percentiles([change.buckets[name]])
    assert percentiles == pytest.approx({"p50": 0.55, "p95": 0.955, "p99": 0.991})
    assert find_percentiles([{0.1: 0.0, math.inf: 0.0}]) is None
    assert find_percentiles([]) is None


@given(
    st.lists(
        st.dictionaries(
            st.floats(0, 100) | st.just(math.inf), st.integers(0, 1000).map(float), max_size=6
        )
    )
)
def test_percentiles_rise_and_are_finite_whatever_the_buckets(
    parts: list[dict[float, float]],
) -> None:
    cumulative = []
    for part in parts:
        total, sums = 0.0, {}
        for bound in sorted(part):
            total += part[bound]
            sums[bound] = total
        cumulative.append(sums)
    percentiles = find_percentiles(cumulative)
    if percentiles is not None:
        values = list(percentiles.values())
        assert all(map(math.isfinite, values))
