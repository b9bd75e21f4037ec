"""What the sampler keeps of the workers' metrics, under NeMo-RL's names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest
from aiohttp import web

from rollway.errors import Unreachable
from rollway.fleet.workers import Worker
from rollway.integrations.nemo_rl import metrics as module
from rollway.integrations.nemo_rl.connection import Connection
from rollway.integrations.nemo_rl.metrics import (
    ALIASES,
    CURATED,
    EXCLUDED,
    LISTING_SECONDS,
    Sampler,
    parse_page,
)
from rollway.sync import Portal
from tests.waiting import wait_until

ALWAYS = {"inflight_batch_sizes", "num_pending_samples", "kv_cache_usage_perc", "generation_tokens"}
PAGE = """# HELP vllm:num_requests_running Requests, running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m, of {ours}"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0 1700000000
vllm:num_requests_waiting{engine="0"} 7
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:generation_tokens_total{engine="0"} 1.5e+03
vllm:generation_tokens_created{engine="0"} 1.7e+09
vllm:inter_token_latency_seconds_bucket{le="0.1"} 4
vllm:inter_token_latency_seconds_sum{engine="0"} 0.5
vllm:prompt_tokens_total{engine="0"} NaN
vllm:e2e_request_latency_seconds_sum 9
dynamo_component_requests_total 11
process_cpu_seconds_total 5
python_info{version="3"} 1
broken
"""


class Fleet:
    """Workers as a test lists them."""

    def __init__(self) -> None:
        self.listed: list[Worker] = []
        self.fails = False

    async def workers(self, *, fresh: bool) -> list[Worker]:
        if self.fails:
            raise Unreachable("nobody lists")
        return list(self.listed)


class Stack:
    """What a sampler uses of a connection, and a worker's admin port."""

    def __init__(self) -> None:
        self.portal = Portal()
        self.fleet = Fleet()
        self.page = PAGE
        self.hangs = self.raves = False
        self.port = self.portal.run(self._listen())

    async def _listen(self) -> int:
        app = web.Application()
        app.router.add_get("/{worker}/metrics", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return int(self._runner.addresses[0][1])

    async def _answer(self, request: web.Request) -> web.Response:
        if self.hangs and request.match_info["worker"] == "0":
            await asyncio.Event().wait()
        if self.raves and request.match_info["worker"] == "0":
            return web.Response(body=b"\xff\x00" + b"vllm:num_requests_running 9\n" * 400_000)
        return web.Response(text=self.page)

    def list_workers(self, *numbers: int) -> None:
        url = f"http://127.0.0.1:{self.port}"
        self.fleet.listed = [Worker(90 - n, "m", f"{url}/{n}") for n in numbers]

    def open(self, interval: float = 0.01, **dynamo: Any) -> Sampler:
        cfg = {"vllm_cfg": {"vllm_metrics_logger_interval": interval}, "dynamo_cfg": dynamo}
        return Sampler(cast(Connection, self), cfg)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.setattr(module, "LISTING_SECONDS", 0.01)
    running = Stack()
    yield running
    running.portal.run(running._runner.cleanup())
    running.portal.close()


def count(sampler: Sampler, worker: int) -> int:
    return len(sampler.read()["inflight_batch_sizes"].get(worker, []))


def is_alone(sampler: Sampler, worker: int) -> bool:
    """Return whether a worker had several samples while no other had one."""
    sampler.clear()
    wait_until(lambda: count(sampler, worker) > 3)
    return sampler.read()["inflight_batch_sizes"].keys() == {worker}


def test_series_are_summed_over_their_labels() -> None:
    assert parse_page(PAGE, CURATED, EXCLUDED) == {
        "vllm_num_requests_running": 5.0,
        "vllm_num_requests_waiting": 7.0,
        "vllm_kv_cache_usage_perc": 0.25,
        "vllm_generation_tokens_total": 1500.0,
        "vllm_inter_token_latency_seconds_sum": 0.5,
        "dynamo_component_requests_total": 11.0,
    }
    everything = parse_page(PAGE, ("",), ())
    assert everything["process_cpu_seconds_total"] == 5.0
    assert everything["vllm_e2e_request_latency_seconds_sum"] == 9.0
    assert parse_page(PAGE, ("vllm:",), ("vllm:num",)).keys() == {
        "vllm_kv_cache_usage_perc",
        "vllm_generation_tokens_total",
        "vllm_inter_token_latency_seconds_sum",
        "vllm_e2e_request_latency_seconds_sum",
    }


def test_the_sources_of_nemo_rls_names_are_those_of_the_table() -> None:
    assert ALIASES == {
        "inflight_batch_sizes": (
            "dynamo_component_inflight_requests",
            "vllm_num_requests_running",
        ),
        "num_pending_samples": ("dynamo_work_handler_queue_depth", "vllm_num_requests_waiting"),
        "kv_cache_usage_perc": (
            "dynamo_component_gpu_cache_usage_percent",
            "vllm_kv_cache_usage_perc",
            "vllm_gpu_cache_usage_perc",
        ),
        "generation_tokens": ("vllm_generation_tokens_total", "vllm_generation_tokens"),
    }


def test_nemo_rls_names_are_always_there(stack: Stack) -> None:
    sampler = stack.open()
    assert sampler.read() == {name: {} for name in ALWAYS}
    stack.list_workers(0)
    wait_until(lambda: count(sampler, 0))
    samples = sampler.read()
    assert samples.keys() > ALWAYS and "vllm_num_requests_running" not in samples
    assert samples["inflight_batch_sizes"][0][0] == 5.0
    assert samples["num_pending_samples"][0][0] == 7.0
    assert samples["kv_cache_usage_perc"][0][0] == 0.25
    assert samples["generation_tokens"][0][0] == 1500.0
    # Dynamo's own count of requests is the first source where it is there.
    stack.page = "dynamo_component_inflight_requests 2\nvllm:num_requests_running 1\n"
    sampler.clear()
    wait_until(lambda: sampler.read()["inflight_batch_sizes"].get(0, [0])[-1] == 2.0)
    sampler.close()


def test_workers_are_numbered_by_first_sight_and_come_and_go(stack: Stack) -> None:
    stack.list_workers(1)
    sampler = stack.open()
    wait_until(lambda: count(sampler, 0))
    stack.list_workers(0, 1)  # the new one has the lower address and the higher id
    wait_until(lambda: count(sampler, 1))
    stack.list_workers(0)
    wait_until(lambda: is_alone(sampler, 1))
    stack.list_workers(0, 1)
    wait_until(lambda: count(sampler, 0))  # its number is its own
    sampler.close()


def test_a_silent_worker_and_a_failed_listing_delay_nobody(stack: Stack) -> None:
    stack.hangs = True
    stack.list_workers(0, 1)
    sampler = stack.open()
    wait_until(lambda: count(sampler, 1) > 3)
    stack.fleet.fails = True
    before = count(sampler, 1)
    wait_until(lambda: count(sampler, 1) > before + 3)
    assert count(sampler, 0) == 0
    sampler.close()


def test_a_page_without_end_is_a_gap(stack: Stack) -> None:
    stack.raves = True
    stack.list_workers(0, 1)
    sampler = stack.open()
    wait_until(lambda: count(sampler, 1) > 3)
    assert count(sampler, 0) == 0
    stack.raves = False
    wait_until(lambda: count(sampler, 0))
    sampler.close()


def test_what_nobody_clears_is_bounded(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SAMPLES", 5)
    stack.list_workers(0)
    sampler = stack.open()
    wait_until(lambda: count(sampler, 0) == 5)
    stack.page = "vllm:num_requests_running 77\n"
    wait_until(lambda: sampler.read()["inflight_batch_sizes"][0] == [77.0] * 5)  # the newest
    sampler.close()


def test_figures_of_a_refit_outlive_the_clear_that_follows_it(stack: Stack) -> None:
    """NeMo-RL reads, refits and clears, in this order: the figures are for the next read."""
    sampler = stack.open()
    sampler.read()
    sampler.note_refit({"seconds": 1.5, "refit/version": 3})
    sampler.clear()
    samples = sampler.read()
    assert samples["refit/seconds"] == {0: [1.5]} and samples["refit/version"] == {0: [3.0]}
    sampler.clear()
    assert "refit/seconds" not in sampler.read()
    sampler.close()


def test_recipes_choose_the_series(stack: Stack) -> None:
    stack.list_workers(0)
    sampler = stack.open(metrics_include_prefixes=[], metrics_exclude_prefixes=["vllm:"])
    wait_until(lambda: sampler.read().get("process_cpu_seconds_total"))
    assert sampler.read()["inflight_batch_sizes"] == {}
    sampler.close()
    assert LISTING_SECONDS > 1.0  # a listing asks every worker
