"""`rollway top` as tables of text, before any terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollway.observe.dash.open_run import open_directory
from rollway.observe.dash.screen import Screen, draw_bars, make_screen, print_screen
from rollway.observe.dash.source import Source, Watch
from rollway.observe.figures import (
    draw_sparkline,
    format_bytes,
    format_number,
    format_seconds,
    format_share,
)
from tests.observe.make_run import MadeRun, Writer, make_header, write_run


def watch(directory: Path) -> Watch:
    result = Watch(open_directory(directory))
    result.poll()
    return result


def look(directory: Path) -> Screen:
    shown = watch(directory)
    return make_screen(shown.make_model(), shown.view)


def print_plain(screen: Screen, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_screen(screen, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def texts(screen: Screen, table: str, column: str) -> list[str]:
    shown = screen.tables[table]
    place = [each.title for each in shown.columns].index(column)
    return [cells[place].text for cells in shown.rows.values()]


def test_the_fleet_is_what_the_page_shows(tmp_path: Path) -> None:
    write_run(tmp_path, workers=12, seconds=40)
    shown = watch(tmp_path)
    screen = make_screen(shown.make_model(), shown.view)
    assert texts(screen, "fleet", "worker") == [f"tiny-{number}" for number in range(12)]
    model = {row["name"]: row for row in shown.make_model()["fleet"]}
    for name, version, kv in zip(
        texts(screen, "fleet", "worker"),
        texts(screen, "fleet", "version"),
        texts(screen, "fleet", "KV"),
        strict=True,
    ):
        assert version == str(model[name]["version"])
        assert kv == format_share(model[name]["kv"])
    assert screen.tables["fleet"].title == "Fleet: 12 of 12 workers serve"


def test_bars_have_the_lengths_of_their_steps() -> None:
    bars = [("preflight", 0.0, 1.0), ("load", 2.0, 4.0)]
    assert list(draw_bars(bars, 4.0, 8)) == [("pp", "blue"), ("  ", ""), ("LLLL", "yellow")]


def test_a_run_that_has_nothing_says_so(tmp_path: Path) -> None:
    Writer(tmp_path).write("supervisor", make_header(1.7e9, "supervisor", 1))
    text = print_plain(look(tmp_path))
    assert "No worker has been recorded yet." in text
    assert "No trainer has reported a step" in text


def test_a_failed_refit_is_told_with_its_text(tmp_path: Path) -> None:
    run, writer = MadeRun(2), Writer(tmp_path)
    writer.write_all(run.start(1.7e9))
    writer.write_all(run.refit(1.7e9 + 5, 1, fails=True))
    text = print_plain(look(tmp_path))
    assert "Not every worker is on version 1." in text
    assert "in doubt: The parameters differ from what was published." in text


def test_the_end_of_a_stack_is_said_and_its_figures_stay(tmp_path: Path) -> None:
    run, writer = MadeRun(2), Writer(tmp_path)
    writer.write_all(run.start(1.7e9))
    source = open_directory(tmp_path)
    phases: list[Any] = ["live"]
    source.get_phase = lambda: phases[-1]
    shown = Watch(source)
    assert shown.poll()
    assert " · live · " in make_screen(shown.make_model(), shown.view).head
    assert not shown.poll()
    phases.append("ended")
    assert shown.poll()
    screen = make_screen(shown.make_model(), shown.view)
    assert " · ended · " in screen.head and "The stack has ended" in screen.notes[0]
    assert len(screen.tables["fleet"].rows) == 2


def test_a_record_that_cannot_be_read_now_is_named(tmp_path: Path) -> None:
    def fail() -> list[dict[str, Any]]:
        raise PermissionError(13, "Permission denied")

    shown = Watch(Source("x", poll=fail, read=list))
    assert shown.poll()
    assert "cannot be read: Permission denied" in shown.make_model()["run"]["notes"][0]


def test_text_from_outside_moves_no_cursor_and_is_no_markup(tmp_path: Path) -> None:
    hostile = "[bold]\x1b[2J\x1b]0;title\x07 [/nothing]"
    writer = Writer(tmp_path)
    writer.write("supervisor", {**make_header(1.7e9, "supervisor", 1), "stack": hostile})
    worker = {"name": hostile, "instance": "1", "state": hostile, "node": hostile}
    writer.write("supervisor", {"kind": "workers", "t": 1.7e9, "workers": [worker]})
    event = {"kind": "event", "t": 1.7e9, "event": hostile, "detail": hostile}
    writer.write("supervisor", event)
    text = print_plain(look(tmp_path))
    assert "\x1b" not in text and "\x07" not in text
    assert "[bold]" in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_can_be_printed_at_any_width(tmp_path: Path, width: int) -> None:
    write_run(tmp_path, workers=3, seconds=60)
    lines = print_plain(look(tmp_path), width).splitlines()
    assert all(len(line) <= width for line in lines)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_number(None), "–"),
        (format_number(0.0), "0"),
        (format_number(1234.4), "1234"),
        (format_number(12_340.0), "12.3 k"),
        (format_number(4.1e-5), "4.1e-05"),
        (format_seconds(0.0123), "12.3 ms"),
        (format_seconds(0.99999), "1000 ms"),
        (format_seconds(3600.0), "60.0 min"),
        (format_bytes(520_000_000), "520 MB"),
        (format_bytes(12), "12 B"),
        (draw_sparkline([0, 1, 2, 4], 3), "▃▅█"),
        (draw_sparkline([], 3), ""),
        (draw_sparkline([0.0, 0.0], 3), "▁▁"),
    ],
)
def test_figures_are_written_for_people(text: str, expected: str) -> None:
    assert text == expected
