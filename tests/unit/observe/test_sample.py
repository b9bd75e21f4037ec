"""The sampler against pages of real servers: slow, huge, dead, replaced, or no text at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from rollway.http import Http
from rollway.observe import sample
from rollway.observe.read import Run
from rollway.observe.record import Recorder
from rollway.observe.sample import MetricsTarget, Sampler
from tests.observe.names import NAMES
from tests.waiting import wait_until_async

RUNNING = "vllm:num_requests_running"
TOKENS = "vllm:generation_tokens_total"


class Pages:
    """A server with a page per path, which a test changes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.pages: dict[str, bytes | Exception] = {}
        self.hanging = asyncio.Event()
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        name = request.path.strip("/")
        self.asked.append(name)
        if name == "slow":
            await self.hanging.wait()
        page = self.pages.get(name)
        if not isinstance(page, bytes):
            raise web.HTTPServiceUnavailable
        return web.Response(body=page)

    def target(self, name: str, role: str = "", process: object = 1) -> MetricsTarget:
        return MetricsTarget(name, f"{self.url}/{name}", role=role, process=process)


@pytest.fixture
async def pages() -> AsyncIterator[Pages]:
    app = web.Application()
    runner = web.AppRunner(app)
    served = Pages("")
    app.router.add_get("/{tail:.*}", served.answer)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield served
    served.hanging.set()
    await runner.cleanup()


Make = Callable[..., Sampler]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make_sampler(*targets: MetricsTarget, **options: float) -> Sampler:
        recorder = Recorder(tmp_path, "supervisor")
        return Sampler(recorder, lambda: targets, **options)  # type: ignore[arg-type]

    return make_sampler


async def test_a_dead_or_broken_process_is_a_gap_and_delays_nobody(
    pages: Pages, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "LARGEST_PAGE", 1000)
    monkeypatch.setattr(sample, "SHORTEST_TIMEOUT", 0.2)
    pages.pages = {
        "good": f"{RUNNING} 3\n".encode(),
        "huge": f"{RUNNING} 3\n".encode() * 1000,
        "binary": bytes(range(256)),
        "slow": b"",
    }
    names = ["good", "huge", "binary", "slow", "refused"]
    targets = [pages.target(name) for name in names]
    targets.append(MetricsTarget("dead", "http://127.0.0.1:1/metrics"))
    sampler = make(*targets, interval=0.2)
    async with Http() as http:
        values = await sampler.sample(http)
    assert values[RUNNING] == {"worker=good": 3.0}
    failed = {"worker=huge", "worker=slow", "worker=refused", "worker=dead"}
    assert set(values["rollway_scrape_failed"]) == failed


async def test_a_worker_that_was_restarted_has_no_negative_rate(pages: Pages, make: Make) -> None:
    targets = [pages.target("w", "decode")]
    recorder = make().__dict__["_recorder"]
    sampler = Sampler(recorder, lambda: targets)
    key, totals = "worker=w,role=decode", []
    async with Http() as http:
        for process, value in ((1, 100), (1, 130), (2, 10)):
            targets[:] = [pages.target("w", "decode", process)]
            pages.pages = {"w": f"{TOKENS} {value}\n".encode()}
            values = await sampler.sample(http)
            totals.append(values[TOKENS][key])
            assert values.get(f"{TOKENS}_per_second", {}).get(key, 0.0) >= 0.0
    assert totals == [100.0, 130.0, 140.0]


async def test_percentiles_are_over_all_workers_of_a_role(pages: Pages, make: Make) -> None:
    family = "vllm:time_to_first_token_seconds"

    def page(fast: int, slow: int) -> bytes:
        lines = (f'{family}_bucket{{le="1"}} {fast}', f'{family}_bucket{{le="+Inf"}} {slow}')
        return "\n".join(lines).encode()

    names = ("a", "b", "c")
    sampler = make(
        pages.target("a", "prefill"), pages.target("b", "prefill"), pages.target("c", "decode")
    )
    async with Http() as http:
        pages.pages = dict.fromkeys(names, page(0, 0))
        await sampler.sample(http)
        pages.pages = {"a": page(10, 10), "b": page(10, 10), "c": page(0, 0)}
        values = await sampler.sample(http)
    assert values[f"{family}_p50"] == {"role=prefill": 0.5}


async def test_the_thread_records_samples_whose_names_are_in_the_table(
    pages: Pages, make: Make, tmp_path: Path
) -> None:
    pages.pages = {"w": f"{RUNNING} 1\n{TOKENS} 5\n".encode()}
    sampler = make(pages.target("w"), interval=0.1)
    sampler.start()
    await wait_until_async(lambda: len(pages.asked) > 3)
    await asyncio.to_thread(sampler.close)
    recorder = sampler.__dict__["_recorder"]
    recorder.close()
    entries = [entry for entry in Run(tmp_path).read() if entry["kind"] == "sample"]
    assert len(entries) >= 3
    assert {name for entry in entries for name in entry["values"]} <= set(NAMES)
    assert entries[-1]["values"][TOKENS] == {"worker=w": 5}
