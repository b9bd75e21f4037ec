"""Objects appear whole or not at all, and the leftovers of dead writers are removed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollway.errors import UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.transports.delta.store import SharedMemory, Store, sweep_shared_memory
from tests.children import make_dead_writer_mark, start_child
from tests.waiting import wait_until


def test_objects_are_written_listed_replaced_and_deleted(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "store")
    assert store.keys() == []
    assert store.put("a/one", b"12") == 2
    assert store.put("a/two", iter([b"12", memoryview(b"34"), bytearray(b"5")])) == 5
    store.put("b/three", b"")
    assert store.keys() == ["a/one", "a/two", "b/three"]
    assert store.keys("a/t") == ["a/two"]
    assert store.get("a/two") == b"12345"
    store.put("a/two", b"new")
    assert store.get("a/two") == b"new"
    store.delete("a/two")
    store.delete("a/two")
    with pytest.raises(WeightsError, match="is not there"):
        store.get("a/two")


def test_only_durable_objects_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(os, "fsync", waits.append)
    store = Store(tmp_path)
    store.put("fast", b"12", durable=False)
    assert waits == [] and store.get("fast") == b"12"
    store.put("safe", b"34")
    assert len(waits) == 2  # the file and its directory


def test_parts_of_an_object_can_be_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("x", b"0123456789")
    store.put("empty", b"")
    with store.open("x") as blob:
        store.delete("x")  # a reader that has it open continues
        assert bytes(blob.read(3, 4)) == b"3456"
        with pytest.raises(WeightsError, match="cut short"):
            blob.read(8, 3)
    with store.open("empty") as blob:
        assert bytes(blob.read(0, 0)) == b""


def test_a_partial_object_is_invisible(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def chunks() -> Iterator[bytes]:
        yield b"one"
        assert store.keys() == []
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        store.put("x", chunks())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../b", ".hidden", "a//b", "a/"])
def test_keys_stay_below_the_root(tmp_path: Path, key: str) -> None:
    with pytest.raises(UsageError, match="cannot be the key"):
        Store(tmp_path).put(key, b"")


def test_a_failed_write_is_reported() -> None:
    with pytest.raises(WeightsError, match="cannot be written"):
        Store(Path("/proc/nowhere")).put("x", b"1")


def test_only_leftovers_of_dead_writers_are_swept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    mine = tmp_path / leftovers.scratch_name("x")
    dead = tmp_path / f".y.{make_dead_writer_mark()}.partial"
    elsewhere = tmp_path / ".z.0123456789ab-1-1.partial"
    forgotten = tmp_path / ".w.0123456789ab-1-2.partial"
    for path in (mine, dead, elsewhere, forgotten):
        path.write_bytes(b"half")
    long_ago = time.time() - leftovers.ABANDONED_SECONDS - 60
    os.utime(forgotten, (long_ago, long_ago))
    store.sweep()
    assert set(tmp_path.iterdir()) == {mine, elsewhere}


def test_shared_memory_is_private_and_removed_by_close() -> None:
    with SharedMemory("test") as store:
        store.put("a/x", b"123")
        assert store.root.stat().st_mode & 0o777 == 0o700
        assert (store.root / "a" / "x").stat().st_mode & 0o777 == 0o600
        assert Store(store.root).get("a/x") == b"123"
    assert not store.root.exists()


def test_shared_memory_of_a_killed_publisher_is_removed() -> None:
    process, root = _killed_publisher()
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: not root.exists(), 30)


def test_the_next_publisher_sweeps_if_the_guard_died_too() -> None:
    with SharedMemory("test") as mine:
        left = mine.root.with_name(f"rollway-deltas-test.{make_dead_writer_mark()}.0")
        left.mkdir()
        sweep_shared_memory()
        assert mine.root.exists()
        assert not left.exists()


def _killed_publisher() -> tuple[subprocess.Popen[str], Path]:
    code = (
        "from rollway.weights.transports.delta.store import SharedMemory\n"
        "store = SharedMemory('test'); store.put('x', bytes(1000))\n"
        "print(store.root, flush=True)"
    )
    process, line = start_child(code)
    root = Path(line)
    assert (root / "x").exists()
    process.kill()
    process.wait()
    return process, root
