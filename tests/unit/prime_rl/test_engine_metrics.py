"""One page of series from many workers, read by the parser that prime-rl uses."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.integrations.prime_rl.engine_metrics import (
    EngineMetrics,
    format_gauges,
    join_pages,
)
from tests.unit.prime_rl.fakes import PAGE, FakeHttp


def read(page: str) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(page)
    samples = (sample for family in families for sample in family.samples)
    return {(sample.name, sample.labels.get("engine", "")): sample.value for sample in samples}


def test_every_series_has_its_worker() -> None:
    page = join_pages({"0": PAGE, "1": PAGE.replace("3.0", "5.0"), "2": ""})
    samples = read(page)
    assert samples["vllm:num_requests_running", "0"] == 3.0
    assert samples["vllm:num_requests_running", "1"] == 5.0
    assert samples["vllm:num_preemptions_total", "1"] == 1.0
    assert page.count("# TYPE vllm:num_requests_running gauge") == 1
    assert 'model_name="m, of {ours}"' in page and 'kv_cache_size_tokens="8192"' in page
    assert not any(name.startswith("dynamo") for name, _ in samples)
    assert join_pages({}) == ""


def test_engines_of_one_worker_stay_apart() -> None:
    two = PAGE + 'vllm:num_requests_running{engine="1"} 4.0\n'
    samples = read(join_pages({"0": two}))
    assert samples["vllm:num_requests_running", "0-0"] == 3.0
    assert samples["vllm:num_requests_running", "0-1"] == 4.0


def test_own_gauges_are_readable() -> None:
    page = format_gauges([("rollway_gate_open", "Whether.", True)])
    assert read(page) == {("rollway_gate_open", ""): 1.0}


class FakeFleet:
    def __init__(self) -> None:
        self.listed = [Worker(1, "m", "http://a:1"), Worker(2, "m", "http://b:1")]

    async def workers(self, *, fresh: bool) -> list[Worker]:
        return self.listed


async def test_pollers_share_a_scrape_and_a_silent_worker_costs_only_its_own() -> None:
    http, fleet = FakeHttp(), FakeFleet()
    metrics = EngineMetrics(cast(Http, http), cast(Fleet, fleet), shared_seconds=60.0)
    pages = await asyncio.gather(*(metrics.read() for _ in range(5)))
    assert len(set(pages)) == 1 and len(http.asked) == 2
    metrics.shared_seconds, http.silent = -1.0, "http://a"
    assert {engine for _, engine in read(await metrics.read())} == {"1"}
    await metrics.close()


async def test_a_restarted_worker_keeps_its_label() -> None:
    """prime-rl adds up the caches of all engines that it has ever seen."""
    fleet: Any = FakeFleet()
    metrics = EngineMetrics(cast(Http, FakeHttp()), fleet, shared_seconds=-1.0)
    before = {engine for _, engine in read(await metrics.read())}
    fleet.listed = [Worker(3, "m", "http://b:1"), Worker(9, "m", "http://a:1")]
    assert {engine for _, engine in read(await metrics.read())} == before == {"0", "1"}
