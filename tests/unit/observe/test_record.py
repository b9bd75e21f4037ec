"""What a recorder has written is read back, whatever happens to its process, disk or files."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rollway.observe import record
from rollway.observe.read import Run, list_runs, prune_runs
from rollway.observe.record import Recorder

WRITER = """
import sys
from pathlib import Path
from rollway.observe.record import Recorder
recorder = Recorder(Path(sys.argv[1]), "driver", largest_bytes=int(sys.argv[2]))
for number in range(10**9):
    recorder.event("count", str(number))
    recorder.write("sample", values={"rollway_step": {"": number}})
    if number % 50 == 0:
        recorder.flush()
        print(number, flush=True)
"""
SMALL_DISK = """
import resource, signal, sys
from pathlib import Path
from rollway.observe.record import Recorder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
recorder = Recorder(Path(sys.argv[1]), "driver")
for number in range(30_000):
    recorder.event("count", str(number))
recorder.flush(0.5)
print(recorder.dropped, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
recorder.event("count", "again")
assert recorder.flush(20.0)
recorder.event("count", "last")
recorder.close()
print(recorder.dropped, flush=True)
"""


def count(run: Run) -> list[str]:
    return [entry["detail"] for entry in run.read() if entry.get("event") == "count"]


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True
    )


def test_what_is_written_is_read_in_order(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", "driver", stack="s", run="abc")
    assert not (tmp_path / "run").exists()  # nothing was written
    recorder.event("start", "yes", worker="w", instance="9007199254740993")
    recorder.write("mismatch", version=1, k1=0.1, k3=0.2, max=0.5, tokens=7)
    recorder.write("sample", values={"rollway_step": {"": 1}})
    recorder.close()
    header, *entries = Run(tmp_path / "run").read()
    assert header["stack"] == "s" and header["run"] == "abc" and header["process"] == "driver"
    kinds = [entry["kind"] for entry in entries]
    assert sorted(kinds) == ["event", "header", "mismatch", "sample"]
    event = next(entry for entry in entries if entry["kind"] == "event")
    assert event["instance"] == "9007199254740993"
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_a_writer_never_raises_and_never_waits(tmp_path: Path) -> None:
    """Not for what JSON cannot hold, nor for a directory that cannot be written."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    recorder = Recorder(blocked / "run", "driver")
    for _ in range(record.LARGEST_QUEUE * 3):
        recorder.event("lost")
    assert recorder.dropped > 0
    recorder.close(0.1)
    recorder.event("too late")
    odd = Recorder(tmp_path / "run", "driver")
    loop: list[Any] = []
    loop.append(loop)
    for value in (float("nan"), object(), {1: 2}, b"bytes", "\ud800", loop, 10**400):
        odd.event("odd", extra=value)
    odd.event("good")
    odd.close()
    events = [entry["event"] for entry in Run(tmp_path / "run").read() if "event" in entry]
    assert events[-1] == "good" or "good" in events
    assert odd.dropped >= 1


def test_a_killed_process_costs_at_most_the_line_that_it_was_writing(tmp_path: Path) -> None:
    chance = random.Random(7)
    for attempt in range(6):
        directory = tmp_path / str(attempt)
        child = start(WRITER, str(directory), str(1 << 20))
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(chance.random() / 4)  # the moment of the kill
        child.send_signal(signal.SIGKILL)
        confirmed = [int(line) for line in child.stdout]
        child.wait()
        run = Run(directory)
        numbers = [int(text) for text in count(run)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > max(confirmed, default=0)
        assert run.problems.total() == 0  # a torn line is none yet


def test_a_full_disk_costs_what_did_not_fit_and_says_how_much(tmp_path: Path) -> None:
    """The limit of a file's size stands for the disk: it tears lines in the same way."""
    child = start(SMALL_DISK, str(tmp_path / "run"))
    assert child.stdout is not None
    dropped = [int(line) for line in child.stdout]
    assert child.wait() == 0
    run = Run(tmp_path / "run")
    numbers = count(run)
    assert dropped[0] > 0
    assert len(numbers) == 30_000 - dropped[-1] + 2 and numbers[-1] == "last"
    assert numbers[:100] == [str(number) for number in range(100)]
    assert run.problems.total() == 0  # the torn line was completed
    told = [e["detail"] for e in run.read() if e.get("event") == "record dropped"]
    assert told and str(dropped[-1]) in told[-1]


@pytest.mark.skipif(os.getuid() != 0, reason="a tmpfs is mounted by root alone")
def test_a_small_tmpfs_that_fills_up(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mount is not permitted here")
    try:
        ballast = disk / "ballast"
        ballast.write_bytes(b"x" * 40_000)
        recorder = Recorder(disk / "run", "driver")
        for number in range(2_000):
            recorder.event("count", str(number))
        assert not recorder.flush(0.3)
        ballast.unlink()
        recorder.close()
        numbers = count(Run(disk / "run"))
        assert numbers == [str(number) for number in range(len(numbers))] and len(numbers) > 100
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_two_writers_and_many_threads_lose_nothing(tmp_path: Path) -> None:
    recorders = [Recorder(tmp_path, "driver"), Recorder(tmp_path, "gateway")]

    def write(recorder: Recorder, thread: int) -> None:
        for number in range(500):
            recorder.event("count", f"{recorder.process}-{thread}-{number}")

    threads = [
        threading.Thread(target=write, args=(recorder, number))
        for recorder in recorders
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for recorder in recorders:
        recorder.close()
    assert len(set(count(Run(tmp_path)))) == 2 * 4 * 500


def test_a_forked_child_has_a_file_of_its_own(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "driver")
    recorder.event("count", "parent")
    recorder.flush()
    child = os.fork()
    if child == 0:
        recorder.event("count", "child")
        recorder.flush()
        os._exit(0)
    os.waitpid(child, 0)
    recorder.event("count", "parent again")
    recorder.close()
    assert sorted(count(Run(tmp_path))) == ["child", "parent", "parent again"]
    assert len(list(tmp_path.glob("driver-*.jsonl"))) == 2


def test_old_samples_are_thinned_and_events_stay(tmp_path: Path) -> None:
    bound = 16 << 10
    recorder = Recorder(tmp_path, "driver", largest_bytes=bound)
    for number in range(4_000):
        recorder.write("sample", t=1.7e9 + number, values={"rollway_step": {"": number}})
        if number % 100 == 0:
            recorder.event("count", str(number), t=1.7e9 + number)
            recorder.flush()
    recorder.close()
    samples = [e["values"]["rollway_step"][""] for e in Run(tmp_path).read() if "values" in e]
    assert samples == sorted(samples) and samples[-1] == 3_999
    gaps = [b - a for a, b in itertools.pairwise(samples)]
    assert gaps[-1] == 1 and max(gaps[:20]) > 1  # the oldest are thinner than the newest
    assert len(count(Run(tmp_path))) == 40
    size = sum(path.stat().st_size for path in tmp_path.glob("*.s*.jsonl"))
    assert size < 1.2 * bound
    assert samples[0] < 100  # thinner, not cut off
    assert len(list(tmp_path.iterdir())) < 100


def test_runs_beyond_the_kept_ones_are_removed_but_no_living_run(tmp_path: Path) -> None:
    for number in range(4):
        recorder = Recorder(tmp_path / f"run{number}", "supervisor", stack="mine")
        recorder.event("start")
        recorder.close()
        path = next((tmp_path / f"run{number}").glob("*.jsonl"))
        header = json.loads(path.read_text().splitlines()[0])
        # Another process, which has ended.
        path.write_text(json.dumps({**header, "start": 1}) + "\n")
        os.utime(path, (number, number))
    other = Recorder(tmp_path / "other", "supervisor", stack="yours")
    other.event("start")
    alive = Recorder(tmp_path / "alive", "supervisor", stack="mine")
    alive.event("start")
    assert other.flush() and alive.flush()
    prune_runs(tmp_path, "mine", 2)
    assert {run.name for run in list_runs(tmp_path)} == {"run2", "run3", "other", "alive"}
    prune_runs(tmp_path, "mine", 0, but="run3")
    assert {run.name for run in list_runs(tmp_path)} == {"run3", "other", "alive"}
    other.close()
    alive.close()
