"""From entries to the page's model: figures, levels, bars; and entries that nobody should write."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.observe import run_state, workers
from rollway.observe.dash import verdicts
from rollway.observe.dash.view import View
from rollway.observe.read import decode
from rollway.observe.record import SHAPES
from rollway.observe.refits import KEPT
from rollway.observe.run_state import MOST_POINTS, Plot, RunState
from tests.observe.make_run import MadeRun, make_header

T = 1.7e9
isclose = partial(math.isclose, abs_tol=5e-4)
LEVELS = ("good", "warn", "bad", "unknown")


def see(*entries: object) -> View:
    view = View()
    show(view, *entries)
    return view


def show(view: View, *entries: object) -> None:
    """Add entries as the reader of a record does: what it refuses, nobody sees."""
    for written in entries:
        entry = decode(json.dumps(written).encode())
        if isinstance(entry, dict):
            view.add(entry)


def see_run(workers: int = 4, seconds: float = 300.0) -> View:
    return see(*(entry for _, entry in MadeRun(workers).run(T, seconds)))


def answer(view: View, name: str) -> dict[str, Any]:
    return next(verdict for verdict in view.get_sections()["top"] if verdict["name"] == name)


def make_workers(t: float, **versions: int | None) -> dict[str, Any]:
    rows = [
        {"name": name, "instance": str(2**60 + i), "state": "ready", "version": version}
        for i, (name, version) in enumerate(versions.items())
    ]
    return {"kind": "workers", "t": t, "workers": rows}


# --- the top line ---------------------------------------------------------------------------------


def test_a_healthy_run_is_good_in_all_four() -> None:
    view = see_run()
    assert [verdict["level"] for verdict in view.get_sections()["top"]] == ["good"] * 4
    assert all(
        verdict["threshold"] and verdict["sentence"] for verdict in view.get_sections()["top"]
    )


def test_nothing_measured_is_unknown_and_not_good() -> None:
    levels = {verdict["level"] for verdict in see().get_sections()["top"]}
    assert levels == {"unknown"}


@pytest.mark.parametrize(("k3", "level"), [(9e-4, "good"), (1e-3, "warn"), (1e-2, "bad")])
def test_exactness_follows_the_mismatch_of_the_newest_version(k3: float, level: str) -> None:
    entries = [
        {"kind": "mismatch", "t": T, "version": 1, "k1": 0.0, "k3": 0.5, "max": 1.0, "tokens": 9},
        {
            "kind": "mismatch",
            "t": T + 1,
            "version": 2,
            "k1": 0.0,
            "k3": k3,
            "max": 0.1,
            "tokens": 9,
        },
    ]
    assert answer(see(*entries), "exact")["level"] == level


def test_tokens_of_a_version_that_no_worker_had_are_not_exact() -> None:
    rollouts = {"kind": "rollouts", "t": T, "seconds": 2, "count": 1, "tokens": 5,
                "versions": {"7": 5}}  # fmt: skip
    view = see(make_workers(T, a=3), rollouts, make_workers(T + 10, a=3))
    assert answer(view, "exact")["level"] == "unknown"  # the list of workers may still come
    show(view, make_workers(T + 60, a=3))
    assert answer(view, "exact")["level"] == "bad"
    show(view, make_workers(T + 61, a=7))
    assert answer(view, "exact")["level"] == "unknown"


def test_a_worker_that_is_behind_is_amber_then_red_and_a_refit_explains_it() -> None:
    view = see(make_workers(T, a=3, b=3))
    assert answer(view, "fresh")["level"] == "good"
    show(view, make_workers(T + 1, a=4, b=3))
    assert answer(view, "fresh")["level"] == "warn"
    show(view, {"kind": "event", "t": T + 2 + verdicts.FRESH_SECONDS, "event": "note"})
    assert answer(view, "fresh")["level"] == "bad"
    show(view, {"kind": "step", "t": T + 40, "refit": 5, "worker": str(2**60), "step": "preflight"})
    assert answer(view, "fresh")["level"] == "warn"
    assert "refit to version 5" in answer(view, "fresh")["sentence"]


def test_a_worker_that_died_does_not_serve_and_has_no_version() -> None:
    view = see(make_workers(T, a=3, b=3))
    show(view, {"kind": "event", "t": T + 1, "event": "exited", "worker": "b", "detail": "-9"})
    row = view.get_sections()["fleet"][1]
    assert (row["state"], row["version"], row["last_event"]) == ("exited", None, "exited")
    assert answer(view, "fresh")["figure"] == "1 of 1"
    dead = make_workers(T + 2, a=3, b=3)
    dead["workers"][1]["state"] = "exited"  # a driver may have told its version before
    show(view, dead)
    assert view.get_sections()["fleet"][1]["version"] is None


def test_few_prompt_tokens_make_no_red_cache() -> None:
    rollouts = {"kind": "rollouts", "t": T, "seconds": 2, "count": 1,
                "tokens": 1, "cached_tokens": 0, "prompt_tokens": 50}  # fmt: skip
    assert answer(see(rollouts), "cached")["level"] == "warn"
    assert answer(see({**rollouts, "prompt_tokens": 50_000}), "cached")["level"] == "bad"


def test_waiting_and_pauses_are_not_busy() -> None:
    step = {"kind": "trainer", "t": T, "step": 1, "seconds": 10.0,
            "parts": {"generate": 3.0, "train": 1.0, "wait": 4.0, "paused": 2.0}}  # fmt: skip
    verdict = answer(see(step), "busy")
    assert (verdict["level"], verdict["figure"]) == ("bad", "40%")


# --- refits ---------------------------------------------------------------------------------------


def test_bars_of_a_worker_add_up_to_its_report() -> None:
    run = MadeRun(4)
    entries = [*run.start(T), *run.refit(T + 10, 1)]
    report = next(e["report"] for _, e in entries if e["kind"] == "refit")
    view = see(*(entry for _, entry in entries))
    rows = {row["instance"]: row for row in view.get_refit("")["rows"]}
    for worker in report["workers"]:
        bars = rows[worker["instance_id"]]["bars"]
        sums = {name: last - first for name, first, last in bars}
        assert isclose(sums["preflight"], worker["preflight_seconds"])
        assert isclose(sums["leave"] + sums["pause"], worker["pause_seconds"])
        update = sums["load"] + sums["flush"] + sums["verify"]
        assert isclose(update, worker["update_seconds"])
        assert isclose(sums["open"], worker["resume_seconds"])
        ends = [last for _, _, last in bars]
        assert ends == sorted(ends)


def test_an_order_has_the_steps_that_the_worker_measured() -> None:
    worker = {
        "instance_id": "5", "state": "serving", "version": 1, "preflight_seconds": 1.0,
        "pause_seconds": 0.3, "update_seconds": 0.5, "resume_seconds": 0.1,
        "paused_seconds": 0.7, "steps": {"order": 0.9, "order.leave": 0.1,
        "order.engine.stop": 0.2, "order.engine": 0.7, "order.engine.swap": 0.5,
        "order.engine.swap.copy": 0.4, "order.enter": 0.1},
    }  # fmt: skip
    entry = {"kind": "refit", "t": T + 3, "began": T, "outcome": "ok",
             "report": {"version": 1, "seconds": 3.0, "paused_seconds": 0.7,
                        "workers": [worker]}}  # fmt: skip
    (row,) = see(entry).get_refit("")["rows"]
    lengths = [(name, round(last - first, 6)) for name, first, last in row["bars"]]
    assert lengths == [("preflight", 1.0), ("leave", 0.1), ("pause", 0.2), ("load", 0.5),
                       ("open", 0.1)]  # fmt: skip
    assert row["paused"] == pytest.approx([1.0, 1.7])


def test_a_running_refit_grows_and_its_last_step_is_open() -> None:
    view = see(
        {"kind": "step", "t": T, "refit": 1, "worker": "5", "step": "preflight"},
        {"kind": "step", "t": T + 1, "refit": 1, "worker": "5", "step": "update"},
        {"kind": "event", "t": T + 3, "event": "note"},
    )
    refit = view.get_refit("")
    assert refit["outcome"] == "running"
    assert refit["rows"][0]["bars"] == [("preflight", 0.0, 1.0), ("load", 1.0, 3.0)]


def test_the_slow_worker_of_a_refit_is_marked() -> None:
    entries = [entry for _, entry in MadeRun(8).refit(T, 3)]
    view = see(make_header(T, "driver", 1), *entries)
    assert sum(row["straggler"] for row in view.get_refit("")["rows"]) == 1


def test_a_failed_refit_has_its_text_and_an_event() -> None:
    view = see(*(entry for _, entry in MadeRun(3).refit(T, 3, fails=True)))
    refit = view.get_refit("")
    assert (refit["outcome"], refit["failed"]) == ("failed", 1)
    assert refit["rows"][0]["error"].startswith("The parameters differ")
    assert view.get_events()[-1]["event"] == "refit failed"
    assert view.get_events()[-1]["level"] == "bad"


def test_the_last_fifty_refits_are_kept() -> None:
    run = MadeRun(1)
    view = see(*(e for version in range(60) for _, e in run.refit(T + version, version)))
    refits = view.get_sections()["refits"]
    assert len(refits) == KEPT
    assert refits[0]["version"] == 59
    assert view.get_refit(refits[-1]["key"])["version"] == 10


# --- the rest -------------------------------------------------------------------------------------


def test_a_worker_that_is_no_longer_sampled_is_a_gap_and_not_a_zero() -> None:
    sample = {"kind": "sample", "t": T + 1, "values": {
        "vllm:num_requests_running": {"worker=a": 3, "worker=b": 4}}}  # fmt: skip
    later = {"kind": "sample", "t": T + 30, "values": {
        "vllm:num_requests_running": {"worker=a": 5}}}  # fmt: skip
    view = see(make_workers(T, a=1, b=1), sample, later)
    assert [row["load"] for row in view.get_sections()["fleet"]] == [5, None]


def test_instance_ids_stay_text() -> None:
    rows = json.loads(json.dumps(see_run().get_sections()["fleet"]))
    assert all(isinstance(row["instance"], str) and int(row["instance"]) > 2**53 for row in rows)


def test_the_end_is_told_and_a_new_start_takes_it_back() -> None:
    start, stop = {"kind": "event", "event": "start"}, {"kind": "event", "event": "stopped"}
    view = see({**start, "t": T}, {**stop, "t": T + 9})
    assert view.get_sections()["run"]["ended"] == T + 9
    show(view, {**start, "t": T + 10})
    assert view.get_sections()["run"]["ended"] is None


def test_a_page_asks_only_for_what_it_does_not_have() -> None:
    view = see_run()
    events = view.get_events()
    assert view.get_events(events[-2]["id"]) == events[-1:]


def test_a_day_of_many_workers_has_bounded_size() -> None:
    view = see_run(workers=128, seconds=1200)
    for second in range(40_000):
        show(
            view,
            {"kind": "rollouts", "t": T + 2000 + second, "seconds": 1, "count": 1, "tokens": 1},
        )
    assert len(view.get_series()["tokens_per_second"]["t"]) <= MOST_POINTS
    assert len(json.dumps(view.get_sections())) < 80_000


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(-(10**5), 10**5)), max_size=60))
def test_a_series_is_in_order_and_has_each_time_once(points: list[tuple[int, int]]) -> None:
    series = Plot()
    for t, value in points:
        series.add(t, value)
    assert series.times == sorted(set(series.times))
    assert dict(zip(series.times, series.values, strict=True)) == dict(points)


@pytest.mark.parametrize("late", [0, 3], ids=["in order", "two writers"])
def test_a_plot_of_a_long_run_is_dense_everywhere_and_ends_exactly(late: int) -> None:
    plot, count = Plot(), 21_600  # twelve hours, a point every two seconds
    for number in range(count):
        second = number - late if number % 2 and number > late else number
        plot.add(T + 2 * second + number % 2 / 2, second)
    assert len(plot.times) <= MOST_POINTS and plot.times == sorted(set(plot.times))
    assert plot.values[-1] == max(plot.values) > count - 3
    quarters = [int((t - T) // (2 * count / 4)) for t in plot.times]
    shares = [quarters.count(quarter) / len(quarters) for quarter in range(4)]
    assert all(0.2 < share < 0.3 for share in shares), shares
    # A point is the mean of what comes until the next one.
    for t, after, value in zip(plot.times, plot.times[1:], plot.values[:-1], strict=False):
        assert abs(value - (t + after - 2 * T) / 4) < 4 + 1e-4 * value
    assert isclose(plot.mean, plot.total / count) and abs(plot.mean - count / 2) < 4


def test_a_short_peak_stays_on_a_plot_of_peaks() -> None:
    plot = Plot(is_of_peaks=True)
    for number in range(10_000):
        plot.add(T + number, number == 5_000)
    plot.add(plot.times[-1], 0.5)
    plot.add(plot.times[-1], 0.0)  # of another process, at the same time
    assert max(plot.values) == 1.0 and sum(plot.values) == 1.5


def test_what_is_kept_of_a_run_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "MOST_KEPT", 20)
    report = {"instance_id": "1", "state": "in doubt", "error": "x" * 10_000}
    state = RunState()
    for number in range(60):
        t = T + number
        workers = [{**report, "instance_id": str(each)} for each in range(40)]
        state.add({"kind": "refit", "t": t, "began": t, "outcome": "failed", "error": "y" * 10_000,
                   "report": {"version": number, "workers": workers}})  # fmt: skip
        state.add({"kind": "mismatch", "t": t, "version": number, "k3": 0.0})
        state.add({"kind": "rollouts", "t": t, "seconds": 1.0, "count": 1, "tokens": 1,
                   "versions": {str(number): 1}})  # fmt: skip
    assert len(state.refits) == len(state.mismatch) == len(state.tokens_by_version) == 20
    assert max(state.mismatch) == max(state.tokens_by_version) == 59
    assert all(len(keys) <= 20 for keys in state.values.values())
    assert all(len(refit.error) + sum(map(len, refit.kept_out)) < 11_000 for refit in state.refits)


def test_workers_without_an_instance_share_no_version() -> None:
    rows = [
        {"name": name, "instance": None, "state": "ready", "version": version}
        for name, version in (("a", 5), ("b", None))
    ]
    fleet = see({"kind": "workers", "t": T, "workers": rows}).get_sections()["fleet"]
    assert [(row["name"], row["version"]) for row in fleet] == [("a", 5), ("b", None)]


@pytest.mark.parametrize("t", [0.0, 1.0, 9e8, 4.2e9, 9e10])
def test_a_wrong_time_stretches_no_run(t: float) -> None:
    event = {"kind": "event", "event": "note"}
    state = see({**event, "t": T}, {**event, "t": t}, {**event, "t": T + 5}).state
    assert (state.first, state.seconds) == (T, 5.0)
    assert decode(json.dumps({**event, "t": t}).encode()) == "damaged"


def draw(shape: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Draw what a line may have where its shape has this type, and what it may not."""
    match shape:
        case msgspec.inspect.TypedDictType():
            fields = {True: {}, False: {}}  # type: ignore[var-annotated]
            for each in shape.fields:
                fields[each.required][each.encode_name] = draw(each.type)
            return st.fixed_dictionaries(fields[True], optional=fields[False])
        case msgspec.inspect.DictType():
            return st.dictionaries(draw(shape.key_type), draw(shape.value_type), max_size=3)
        case msgspec.inspect.ListType():
            return st.lists(draw(shape.item_type), max_size=3)
        case msgspec.inspect.UnionType():
            return st.one_of(*map(draw, shape.types))
        case msgspec.inspect.IntType():
            return st.integers(0, 9) | st.sampled_from([-1, 2**53 - 1, 2**53, -(2**70), 10**400])
        case msgspec.inspect.FloatType():
            return st.floats(0, 1e3) | st.sampled_from([1.7e9, 1e-320, 9e14, -1.0, 9e29, 1e308])
        case msgspec.inspect.StrType():
            return st.sampled_from(TEXTS) | st.text(max_size=5)
    return st.none()


TEXTS = ["ready", "serving", "ok", "\u202e<script>", "9" * 400, "stop", "pause", "p50", "1", "a",
         "wait", "worker=a", "rollway_record_dropped_total", workers.KV]  # fmt: skip
ENTRIES = st.one_of(
    *(
        st.builds(
            lambda kind, t, fields: {"kind": kind, **fields, "t": t},
            st.just(kind),
            st.floats(1.6e9, 1.8e9),
            draw(msgspec.inspect.type_info(shape)),
        )
        for kind, shape in SHAPES.items()
    )
)
"""Entries of every kind. What any other line does, test_read.py tells."""


@given(st.lists(ENTRIES, max_size=25))
def test_no_entry_breaks_the_view(entries: list[object]) -> None:
    view = see(*entries)
    sections = view.get_sections()
    refits = [view.get_refit(refit["key"]) for refit in sections["refits"]]
    # Strict JSON: a browser refuses NaN and Infinity; and integers that doubles round.
    text = json.dumps([sections, refits, view.get_events(), view.get_series()], allow_nan=False)
    text.encode()
    assert {verdict["level"] for verdict in sections["top"]} <= set(LEVELS)
    for refit in refits:
        assert refit is not None
        for row in refit["rows"]:
            assert all(0 <= first <= last for _, first, last in row["bars"])


@given(st.lists(ENTRIES, max_size=10))
def test_bad_entries_do_not_hide_good_ones(entries: list[object]) -> None:
    view = see(*entries, make_workers(1.9e9, good=3))
    assert "good" in [row["name"] for row in view.get_sections()["fleet"]]


def test_prefix_hits_of_each_worker_over_time() -> None:
    view = View()
    queries, hits = (f"vllm:prefix_cache_{name}_total_per_second" for name in ("queries", "hits"))
    for number in range(500):
        values = {
            queries: {"worker=tiny-10": 100.0, "worker=tiny-2,role=prefill": 10.0,
                      "worker=d,role=decode": 5.0},
            hits: {"worker=tiny-10": 25.0, "worker=tiny-2,role=prefill": 10.0,
                   "worker=d,role=decode": 5.0},
        }  # fmt: skip
        show(view, {"kind": "sample", "t": 1.7e9 + 2 * number, "values": values})
    rows = view.state.workers.list_hits()
    assert [row["name"] for row in rows] == ["tiny-2", "tiny-10"]
    assert len(rows[0]["points"]) <= 90
    assert {share for _, share in rows[0]["points"]} == {1.0}
    assert {share for _, share in rows[1]["points"]} == {0.25}


def test_a_stack_that_was_stopped_keeps_what_its_workers_served() -> None:
    """An orderly end is no finding: the answers are those of the moment before it."""
    view = View()
    workers = [{"name": name, "instance": name, "state": "ready", "version": 3} for name in "ab"]
    show(view, {"kind": "workers", "t": 1.7e9, "workers": workers, "process": "supervisor"})
    stopping = [{**worker, "state": "stopping", "version": None} for worker in workers]
    show(view, {"kind": "workers", "t": 1.7e9 + 60, "workers": stopping, "process": "supervisor"})
    show(view, {"kind": "event", "t": 1.7e9 + 61, "event": "stopped"})
    sections = view.get_sections()
    fresh = next(answer for answer in sections["top"] if answer["name"] == "fresh")
    assert (fresh["level"], fresh["figure"]) == ("good", "2 of 2")
    assert [row["version"] for row in sections["fleet"]] == [3, 3]


def test_tokens_of_the_base_are_no_finding() -> None:
    """A driver lists versions from the first refit on; before it, workers sample the base."""
    view = View()
    rollouts = {"seconds": 1.0, "count": 1, "tokens": 9, "versions": {"0": 9, "1": 9}}
    show(view, {"kind": "rollouts", "t": 1.7e9, **rollouts})
    workers = [{"name": "a", "instance": "1", "state": "ready", "version": 1}]
    show(view, {"kind": "workers", "t": 1.7e9 + 600, "workers": workers})
    exact = view.get_sections()["top"][0]
    assert exact["level"] == "unknown"
    show(view, {"kind": "rollouts", "t": 1.7e9 + 700, **rollouts, "versions": {"7": 9}})
    show(view, {"kind": "event", "t": 1.7e9 + 800, "event": "ready"})
    assert view.get_sections()["top"][0]["level"] == "bad"
