"""A run directory comes from anywhere: no line of it can make a reader fail."""

from __future__ import annotations

import json
import math
import os
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import UsageError
from rollway.observe import read
from rollway.observe.read import Run, decode
from rollway.observe.record import SCHEMA, SHAPES, Recorder
from rollway.observe.run_state import RunState

T = 1.7e9
HEADER = {"kind": "header", "schema": SCHEMA, "t": T, "process": "driver"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
KINDS = st.sampled_from([*SHAPES, "new kind"])
FIELDS = st.sampled_from(
    sorted({field for shape in SHAPES.values() for field in shape.__annotations__})
)


def write(path: Path, *entries: dict[str, Any], end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + end)


def event(t: float, name: str) -> dict[str, Any]:
    return {"kind": "event", "t": T + t, "event": name, "detail": ""}


def names(run: Run) -> list[str]:
    return [entry["event"] for entry in run.read() if entry["kind"] == "event"]


@given(st.binary() | st.text().map(str.encode) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_an_entry_or_a_reason(line: bytes) -> None:
    assert isinstance(decode(line), dict | str)


@given(KINDS, st.dictionaries(FIELDS, JSON))
def test_an_entry_has_the_fields_of_its_kind(kind: str, fields: dict[str, Any]) -> None:
    entry = decode(json.dumps({**fields, "kind": kind}).encode())
    if isinstance(entry, dict):
        shape = SHAPES[entry["kind"]]
        assert shape.__required_keys__ <= entry.keys() <= {"kind", *shape.__annotations__}
        assert isinstance(entry["t"], float)


@given(data=st.data())
def test_a_damaged_file_loses_only_damaged_lines(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("run")
    lines = [json.dumps(HEADER).encode()]
    good = []
    for number in range(data.draw(st.integers(0, 8))):
        if data.draw(st.booleans()):
            good.append(str(number))
            lines.append(json.dumps(event(float(number + 2), str(number))).encode())
        else:
            lines.append(data.draw(st.binary()).replace(b"\n", b""))
    torn = data.draw(st.sampled_from([b"", b'{"kind":"event","t":9,"ev']))
    (directory / "driver-1-a.jsonl").write_bytes(b"\n".join(lines) + b"\n" + torn)
    assert [name for name in names(Run(directory)) if name in good] == good


def test_files_are_merged_by_time(tmp_path: Path) -> None:
    write(tmp_path / "driver-1-a.jsonl", HEADER, event(10, "a"), event(30, "c"), event(29, "late"))
    write(tmp_path / "supervisor-2-b.jsonl", HEADER, event(20, "b"), event(40, "d"))
    assert names(Run(tmp_path)) == ["a", "b", "late", "c", "d"]


def test_a_file_of_another_schema_is_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "driver-1-a.jsonl", {**HEADER, "schema": 1}, event(2, "old"), event(3, "old"))
    with pytest.raises(UsageError, match=r"schema is 1, and this version reads"):
        Run(tmp_path).check()
    with pytest.raises(UsageError, match=r"schema is 1, and this version reads"):
        Run(tmp_path).read()
    strange = {"kind": "hologram", "t": T}
    write(tmp_path / "driver-2-b.jsonl", HEADER, {**event(2, "a"), "colour": "red"}, strange)
    run = Run(tmp_path)
    run.check()
    entries = [entry for entry in run.read() if entry["kind"] == "event"]
    assert entries == [{**event(2.0, "a"), "process": "driver", "source": "driver-2-b"}]
    assert run.problems == {"unknown kind": 1, "files of schema 1": 1}


@pytest.mark.parametrize("version", ["9" * 5_000, "\u00b2", "\u0663", "1,version=2", "", "1\n"])
def test_a_version_of_tokens_is_one_that_a_tally_writes(tmp_path: Path, version: str) -> None:
    rollouts = {"kind": "rollouts", "t": T, "seconds": 1.0, "count": 1, "tokens": 1}
    good = [{**rollouts, "versions": {known: 1}} for known in ("12", "-1", "None")]
    write(tmp_path / "driver-1-a.jsonl", HEADER, {**rollouts, "versions": {version: 1}}, *good)
    run, state = Run(tmp_path), RunState()
    for entry in run.read():
        state.add(entry)
    assert run.problems == {"damaged": 1}
    assert set(state.tokens_by_version) == {12}


def test_a_file_without_lines_is_read_once_and_by_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "LARGEST_LINE", 1_000)
    path = tmp_path / "driver-1-a.jsonl"
    path.write_bytes(b"x" * 2_500)
    run = Run(tmp_path)
    follower = run.follower()
    assert follower.poll() == [] and follower.bytes_read == 2_000
    assert follower.poll() == [] and run.problems == {"damaged": 2}
    with path.open("a") as file:
        file.write("\n" + json.dumps(event(3, "after it")) + "\n")
    assert list_events(follower.poll()) == ["after it"] and run.problems == {"damaged": 3}


def test_a_refit_is_looked_for_without_a_whole_line_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "LARGEST_LINE", 1 << 20)
    recorder, began = Recorder(tmp_path, "driver"), math.ceil(time.time())
    report = {"version": 1, "workers": []}
    recorder.write("refit", t=began + 5, began=began, report=report, outcome="ok")
    recorder.close()
    with (tmp_path / "driver-1-a.jsonl").open("wb") as file:
        file.truncate(32 << 20)  # one line
    tracemalloc.start()
    try:
        assert Run(tmp_path).find_end_of_refit(0) == began + 5
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_record_that_may_not_be_read_is_not_called_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "driver-1-a.jsonl"
    write(path, HEADER, event(2, "a"))
    Run(tmp_path).check()
    for refused in (path, tmp_path):  # root may read everything
        monkeypatch.setattr(os, "access", lambda asked, _, refused=refused: asked != refused)
        with pytest.raises(UsageError, match="You may not read all of"):
            Run(tmp_path).check()


def test_a_header_is_checked_as_every_line_is(tmp_path: Path) -> None:
    for number, schema in enumerate([[1], "\x1b[31m", 10**400]):
        line = json.dumps(HEADER).replace(f'"schema": {SCHEMA}', f'"schema": {json.dumps(schema)}')
        (tmp_path / f"driver-{number}-a.jsonl").write_text(line + "\n")
    run = Run(tmp_path)
    run.check()  # none of them names a schema
    assert list(run.read()) == [] and run.problems == {"damaged": 3}


def test_text_has_no_sign_that_a_terminal_or_a_page_obeys(tmp_path: Path) -> None:
    text = "\x1b[2Jred\u202egnp\x9b\x7f"
    write(tmp_path / "driver-1-a.jsonl", HEADER, {**event(2, text), "worker": text})
    raw = json.dumps({**event(3, text), "worker": text}, ensure_ascii=False).encode()
    with (tmp_path / "driver-1-a.jsonl").open("ab") as file:
        file.write(raw + b"\n")
    clean = "\ufffd[2Jred\ufffdgnp\ufffd\ufffd"
    texts = [(e["event"], e["worker"]) for e in Run(tmp_path).read() if e["kind"] == "event"]
    assert texts == [(clean, clean)] * 2


def test_what_is_no_file_of_a_run_is_left_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    write(secret, HEADER, event(2, "secret"))
    directory = tmp_path / "run"
    write(directory / "driver-1-a.jsonl", HEADER, event(2, "a"))
    (directory / "link.jsonl").symlink_to(secret)
    (directory / "folder.jsonl").mkdir()
    os.mkfifo(directory / "pipe.jsonl")
    (directory / "empty.jsonl").write_bytes(b"")
    assert names(Run(directory)) == ["a"]
    assert [e["kind"] for e in Run(directory).follower().poll()] == ["header", "event"]
    assert names(Run(tmp_path / "nowhere")) == []


def test_a_follower_sees_each_entry_once_also_of_files_that_appear_later(tmp_path: Path) -> None:
    path = tmp_path / "driver-1-a.jsonl"
    write(path, HEADER, event(2, "a"))
    follower = Run(tmp_path).follower()
    assert [e.get("event") for e in follower.poll()] == [None, "a"]
    assert follower.poll() == []
    with path.open("a") as file:
        file.write(json.dumps(event(3, "b"))[:20])
        file.flush()
        assert follower.poll() == []  # half a line
        file.write(json.dumps(event(3, "b"))[20:] + "\n")
    write(tmp_path / "driver-2-b.jsonl", HEADER, event(2.5, "other"))
    assert [e.get("event") for e in follower.poll()] == [None, "other", "b"]


def test_a_follower_of_a_long_run_returns_it_in_order_a_part_at_a_time(tmp_path: Path) -> None:
    for process in range(3):
        entries = [event(10 + number * 3 + process, "x") for number in range(1_000)]
        write(tmp_path / f"driver-{process}-a.jsonl", HEADER, *entries)
    follower = Run(tmp_path).follower()
    times: list[float] = []
    while entries := follower.poll(300):
        assert len(entries) <= 300
        times += [entry["t"] for entry in entries]
    assert times == sorted(times) and len(times) == 3 * 1_001


def test_a_file_that_was_thinned_while_it_was_followed_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sampler-1-a.s000001.jsonl"
    write(path, HEADER, *(event(float(number), str(number)) for number in range(2, 6)))
    follower = Run(tmp_path).follower()
    follower.poll()
    scratch = tmp_path / "scratch"
    write(scratch, HEADER, *(event(float(number), str(number)) for number in (2, 4)))
    scratch.replace(path)
    write(tmp_path / "sampler-1-a.s000002.jsonl", HEADER, event(6.0, "6"))
    assert [entry.get("event") for entry in follower.poll()] == [None, "6"]


def test_workers_of_a_supervisor_get_the_versions_that_a_driver_recorded(tmp_path: Path) -> None:
    def workers(t: float, *versions: int | None) -> dict[str, Any]:
        rows = [
            {"name": f"w{number}", "instance": str(number), "state": "ready", "version": version}
            for number, version in enumerate(versions)
        ]
        return {"kind": "workers", "t": T + t, "workers": rows}

    write(tmp_path / "driver-1-a.jsonl", HEADER, workers(3, 4, 4), workers(5, None, 5))
    supervisor = {**HEADER, "process": "supervisor"}
    write(
        tmp_path / "supervisor-1-a.jsonl", supervisor, *(workers(t, None, None) for t in (2, 4, 6))
    )
    versions = [
        [worker["version"] for worker in entry["workers"]]
        for entry in Run(tmp_path).read()
        if entry["kind"] == "workers"
    ]
    assert versions == [[None, None], [4, 4], [4, 4], [None, 5], [None, 5]]


def test_workers_of_several_supervisors_are_one_list_and_no_dead_one_stays(tmp_path: Path) -> None:
    def workers(t: float, *rows: tuple[str, str, int | None]) -> dict[str, Any]:
        listed = [
            {"name": name, "instance": instance, "state": "ready", "version": version}
            for name, instance, version in rows
        ]
        return {"kind": "workers", "t": T + t, "workers": listed}

    supervisor = {**HEADER, "process": "supervisor"}
    first = workers(2, ("a", "1", None)), workers(6, ("a", "9", None))
    write(tmp_path / "supervisor-1-a.jsonl", supervisor, *first)
    write(tmp_path / "supervisor-2-b.jsonl", supervisor, workers(3, ("b", "2", None)))
    joined = workers(4, ("", "1", 1), ("", "2", 1), ("", "77", 1))
    write(tmp_path / "driver-3-c.jsonl", HEADER, joined)
    entries = [entry for entry in Run(tmp_path).read() if entry["kind"] == "workers"]
    rows = [[(w["name"], w["version"]) for w in entry["workers"]] for entry in entries]
    assert rows == [
        [("a", None)],
        [("a", None), ("b", None)],
        [("a", 1), ("b", 1), ("worker 77", 1)],
        [("a", None), ("b", 1), ("worker 77", 1)],  # a restarted, and is not refitted yet
    ]


# --- long records ---------------------------------------------------------------------------------


def list_events(entries: Iterable[dict[str, Any]]) -> list[str]:
    return [entry["event"] for entry in entries if entry["kind"] == "event"]


def test_a_follower_that_has_read_everything_polls_what_comes(tmp_path: Path) -> None:
    path = tmp_path / "driver-1-a.jsonl"
    step = {"kind": "step", "t": T + 3, "refit": 1, "worker": "7", "step": "load"}
    torn = f'\n{{"kind":"event","t":{T + 10:.0f}'
    write(path, HEADER, event(2, "a"), step, {**step, "t": T + 9}, end=torn)
    follower = Run(tmp_path).follower()
    entries = list(follower.read(without={"step"}, until=T + 5))
    assert [entry["kind"] for entry in entries] == ["header", "event", "step"]
    assert Run(tmp_path).nbytes == path.stat().st_size > follower.bytes_read > 0  # a line is torn
    with path.open("a") as file:
        file.write(',"event":"torn and whole"}\n' + json.dumps({**step, "t": T + 4}) + "\n")
    write(tmp_path / "supervisor-2-b.jsonl", HEADER, event(11, "new"))
    entries = follower.poll()
    assert list_events(entries) == ["torn and whole", "new"]
    assert [entry["t"] for entry in entries if entry["kind"] == "step"] == [T + 4]
    assert follower.poll() == []


def test_the_end_of_a_record_has_its_newest_entries_and_their_headers(tmp_path: Path) -> None:
    lines = [event(1000 + number, f"driver {number}") for number in range(20_000)]
    write(tmp_path / "driver-1-a.jsonl", HEADER, *lines)
    write(tmp_path / "supervisor-2-b.jsonl", HEADER, event(5, "old, and in a short file"))
    for number in (1, 2, 3):
        samples = [event(10_000 * number + i, f"segment {number}") for i in range(100)]
        write(tmp_path / f"driver-1-a.s00000{number}.jsonl", HEADER, *samples)
    run = Run(tmp_path)
    entries = list(run.read_end(10_000))
    names = list_events(entries)
    assert "old, and in a short file" in names
    assert "segment 3" in names and "segment 2" in names and "segment 1" not in names
    driver = [entry for entry in entries if entry.get("event", "").startswith("driver")]
    assert driver[-1]["event"] == "driver 19999" and driver[-1]["t"] == T + 20_999
    assert 50 < len(driver) < 300 and {entry["process"] for entry in driver} == {"driver"}
    assert [entry["t"] for entry in entries] == sorted(entry["t"] for entry in entries)
    assert not run.problems and list(Run(tmp_path / "none").read_end()) == []


def test_the_end_of_a_short_record_is_all_of_it(tmp_path: Path) -> None:
    write(tmp_path / "driver-1-a.jsonl", HEADER, event(2, "a"), event(3, "b"))
    assert list(Run(tmp_path).read_end()) == list(Run(tmp_path).read())


def test_the_end_of_an_earlier_refit_is_found(tmp_path: Path) -> None:
    report, began = {"version": 1, "workers": []}, math.ceil(time.time())
    for number in (1, 2):
        recorder = Recorder(tmp_path, f"driver{number}")
        for t in range(began + 10 * number, began + 10 * number + 3):
            recorder.write("refit", t=float(t), began=t - 1.0, report=report, outcome="ok")
        recorder.close()
    run = Run(tmp_path)
    ends = [run.find_end_of_refit(number) - began for number in (0, 2, 3, 5)]
    assert ends == [22.0, 20.0, 12.0, 10.0]
    assert run.find_end_of_refit(6) == -math.inf
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to("/etc/passwd")
    assert run.find_end_of_refit(0) == began + 22.0
