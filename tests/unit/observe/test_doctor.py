"""Parts of the doctor's checks that need no stack."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from rollway.errors import Problem, UsageError
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import StaticList, Worker
from rollway.http import Http
from rollway.observe.doctor import machine
from rollway.observe.doctor.machine import (
    UcxChoice,
    check_rdma,
    count_files,
    find_ucx_choices,
    read_last_samples,
    read_limit,
)
from rollway.observe.doctor.subject import ModelWorkers, Subject
from rollway.observe.record import SCHEMA, Recorder
from rollway.stack import preset


def test_a_record_is_read_from_its_end_also_if_the_last_line_is_torn(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "supervisor")
    for number in range(5):
        recorder.write("sample", t=1.7e9 + number, values={"rollway_step": {"": number}})
    recorder.close()
    (file,) = tmp_path.glob("*.s*.jsonl")
    with file.open("a") as torn:
        torn.write('{"kind":"sample","t":1700000200.0,"val')
    assert [sample["t"] for sample in read_last_samples(tmp_path)] == [1.7e9 + 3, 1.7e9 + 4]
    assert read_last_samples(tmp_path / "nowhere") == []


def test_samples_of_another_schema_are_refused_with_the_reason(tmp_path: Path) -> None:
    header = {"kind": "header", "schema": SCHEMA - 1, "t": 1e9, "process": "supervisor"}
    lines = [header, {"kind": "sample", "t": 1e9, "values": {}}]
    (tmp_path / "supervisor-1-a.s0.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in lines))
    with pytest.raises(UsageError, match="Another version of Rollway"):
        read_last_samples(tmp_path)


def test_open_files_are_counted() -> None:
    used, limit = count_files(os.getpid()), read_limit(os.getpid(), "Max open files")
    assert used > 0 and (limit is None or limit >= used)
    for pid in (None, 2**31):
        assert count_files(pid) == 0 and read_limit(pid, "Max open files") is None


async def test_later_checks_ask_only_sound_workers_of_the_newest_version() -> None:
    workers = [Worker(number, "m", f"http://h:{number}") for number in range(4)]
    workers.append(Worker(4, "m", "http://h:4", error="silent"))
    async with Http() as http:
        pool = ModelWorkers("m", Fleet(http, StaticList(())), workers)
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
    ways = find_ucx_choices(["other", *lines])
    assert [way.transports for way in ways] == [
        ("tcp/lo", "cma/memory"),
        ("tcp/lo",),
        ("tcp/eth0",),
    ]
    assert [way.is_slow for way in ways[:2]] == [False, True]


def test_nothing_is_said_about_lines_that_ucx_did_not_write() -> None:
    assert find_ucx_choices(["INFO rma(tcp/lo)", "", "UCX INFO rma("]) == []


# --- RDMA: no machine of the tests has a device, so these trees stand in for /sys and /dev --------


@pytest.fixture
def fake_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two ports of one device, the second one up, and its device file."""
    ports, files = tmp_path / "infiniband/mlx5_0/ports", tmp_path / "dev"
    for number, state in (("1", "1: DOWN"), ("2", "4: ACTIVE")):
        (ports / number).mkdir(parents=True)
        (ports / number / "state").write_text(f"{state}\n")
        (ports / number / "rate").write_text("400 Gb/sec (4X NDR)\n")
    files.mkdir()
    (files / "uverbs0").touch()
    monkeypatch.setattr(preset, "RDMA_DEVICES", tmp_path / "infiniband")
    monkeypatch.setattr(machine, "RDMA_FILES", files)
    monkeypatch.setattr(machine, "read_limit", lambda pid, name: None)
    return ports


async def examine_rdma(*, is_split: bool = True) -> list[Problem]:
    process = SimpleNamespace(role="worker", pid=1)
    subject = SimpleNamespace(
        local_state=SimpleNamespace(processes=[process]),
        pools=[SimpleNamespace(is_split=is_split)],
    )
    return [Problem("RDMA", *finding) async for finding in check_rdma(cast(Subject, subject))]


async def test_a_device_that_works_is_named_and_a_machine_without_one_says_nothing(
    fake_rdma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = await examine_rdma()
    assert (finding.level, finding.cause) == ("ok", "mlx5_0:2 400 Gb/sec (4X NDR)")
    monkeypatch.setattr(preset, "RDMA_DEVICES", fake_rdma / "nowhere")
    assert await examine_rdma() == []


async def test_what_keeps_workers_from_rdma_is_found_one_line_each(
    fake_rdma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "read_limit", lambda pid, name: 64 << 10)
    (finding,) = await examine_rdma()
    assert finding.level == "warning" and "ulimit -l" in finding.fix
    monkeypatch.setattr(machine, "RDMA_FILES", fake_rdma / "nowhere")
    (finding,) = await examine_rdma()
    assert finding.level == "warning" and "--device /dev/infiniband" in finding.fix
    (fake_rdma / "2/state").write_text("2: INIT\n")
    (finding,) = await examine_rdma()
    assert finding.level == "warning" and finding.cause == "mlx5_0:1 1: DOWN, mlx5_0:2 2: INIT"
    (finding,) = await examine_rdma(is_split=False)
    assert finding.level == "note"  # such a stack sends no KV


def test_tcp_between_machines_is_slow_only_where_rdma_is_up(fake_rdma: Path) -> None:
    """As UCX logs its choice: TCP, or the device beside a TCP lane to keep it alive."""
    begin = "[1] UCX  INFO  ucp inter-node cfg#2"
    (tcp,) = find_ucx_choices([f"{begin} rma_am(tcp/eth0)  ka(tcp/eth0)"])
    (rdma,) = find_ucx_choices([f"{begin} rma(rc_mlx5/mlx5_0:2) ka(tcp/eth0)"])
    assert tcp == UcxChoice("inter", ("tcp/eth0",))
    assert rdma == UcxChoice("inter", ("rc_mlx5/mlx5_0:2",))
    assert tcp.is_slow and not rdma.is_slow
    (fake_rdma / "2/state").write_text("1: DOWN\n")
    assert not tcp.is_slow
