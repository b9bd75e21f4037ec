"""Parts of the doctor's checks that need no stack."""

from __future__ import annotations

import os
from pathlib import Path

from aiohttp import web

from rollway.fleet.discovery import StaticList, Worker
from rollway.fleet.fleet import Fleet
from rollway.http import Http
from rollway.observe.doctor.network import find_ways, measure_offset
from rollway.observe.doctor.subject import Pool
from rollway.observe.doctor.upkeep import count_files, read_last_samples
from rollway.observe.record import Recorder


def test_a_record_is_read_from_its_end_also_if_the_last_line_is_torn(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "supervisor")
    for number in range(5):
        recorder.write("sample", t=100.0 + number, values={"rollway_step": {"": number}})
    recorder.close()
    (file,) = tmp_path.glob("*.s*.jsonl")
    with file.open("a") as torn:
        torn.write('{"kind":"sample","t":200.0,"val')
    assert [sample["t"] for sample in read_last_samples(tmp_path)] == [103.0, 104.0]
    assert read_last_samples(tmp_path / "nowhere") == []


def test_open_files_are_counted() -> None:
    used, limit = count_files(os.getpid())
    assert used > 0 and (limit is None or limit >= used)
    assert count_files(None) == (0, None)
    assert count_files(2**31) == (0, None)


async def test_a_clock_is_read_from_an_answer_or_unknown() -> None:
    dates = {"/off": "Thu, 01 Jan 1970 00:00:00 GMT", "/odd": "yesterday"}

    async def answer(request: web.Request) -> web.Response:
        return web.Response(headers={"Date": dates[request.path]})

    app = web.Application()
    app.router.add_get("/{name}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    offset = await measure_offset(f"{url}/off")
    assert offset is not None and offset < -1e9
    assert await measure_offset(f"{url}/odd") is None
    await runner.cleanup()
    assert await measure_offset(f"{url}/off") is None


async def test_later_checks_ask_only_sound_workers_of_the_newest_version() -> None:
    workers = [Worker(number, "m", f"http://h:{number}") for number in range(4)]
    workers.append(Worker(4, "m", "http://h:4", error="silent"))
    async with Http() as http:
        pool = Pool("m", Fleet(http, StaticList(())), workers)
        assert [w.instance_id for w in pool.serving] == [0, 1, 2, 3]  # no version is declared
        pool.labels = {0: 3, 1: 2, 2: -1, 3: 3, 4: 3}
        pool.refusing.add(3)
        assert pool.newest == 3
        assert [w.instance_id for w in pool.serving] == [0]


LINE = "[1.0] [vm:1:1] ucp_worker.c:1997 UCX  INFO    d0ac-7617c61 {}-node cfg#1 {}"


def test_the_transports_of_a_peer_are_read_from_ucxs_own_lines() -> None:
    """Lines of UCX 1.23, of workers that may use shared memory, and that may not."""
    lines = [
        LINE.format("intra", "rma_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)"),
        LINE.format("intra", "rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo)  ka(tcp/lo)"),
        LINE.format("inter", "am(tcp/eth0)"),
    ]
    ways = find_ways(["other", *lines])
    assert [way.transports for way in ways] == [
        ("tcp/lo", "cma/memory"),
        ("tcp/lo",),
        ("tcp/eth0",),
    ]
    assert [way.is_slow for way in ways[:2]] == [False, True]


def test_nothing_is_said_about_lines_that_ucx_did_not_write() -> None:
    assert find_ways(["INFO rma(tcp/lo)", "", "UCX INFO rma("]) == []
