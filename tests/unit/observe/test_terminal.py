"""The terminal of `rollway top`, driven as a user does, without a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollway.observe.dash.open_run import open_directory
from rollway.observe.dash.source import Watch
from tests.observe.make_run import MadeRun, Writer
from tests.waiting import wait_until_async

pytest.importorskip("textual", reason="Textual (the extra `observe`) is not installed")

from textual.widgets import DataTable, RichLog, Static, TabbedContent

from rollway.observe.dash.terminal import Top, clean_line

BEGAN = 1.7e9


def make_top(directory: Path, workers: int = 3) -> tuple[Top, MadeRun, Writer]:
    run, writer = MadeRun(workers), Writer(directory / "run")
    writer.write_all(run.start(BEGAN))
    writer.write_all(run.refit(BEGAN + 5, 1))
    source = open_directory(directory / "run")
    source.log_dir = directory / "logs"
    source.log_dir.mkdir()
    (source.log_dir / "tiny-0.log").write_text("first line\n\x1b[31mred [bold]\x1b[0m\n")
    watch = Watch(source)
    watch.poll()
    return Top(watch, interval=0.05), run, writer


def read(app: Top, place: str) -> str:
    """Return the text of a widget."""
    widget = app.query_one(place)
    if isinstance(widget, DataTable):
        rows = (widget.get_row(key) for key in widget.rows)
        return "\n".join("  ".join(map(str, row)) for row in rows)
    if isinstance(widget, RichLog):
        return "\n".join(line.text for line in widget.lines)
    assert isinstance(widget, Static)
    return "\n".join(
        "".join(segment.text for segment in widget.render_line(y))
        for y in range(widget.size.height)
    )


async def until(app: Top, place: str, text: str) -> None:
    await wait_until_async(lambda: text in read(app, place), 20.0, every=0.05, what=text)


async def test_what_is_recorded_while_it_is_open_appears(tmp_path: Path) -> None:
    app, run, writer = make_top(tmp_path)
    async with app.run_test(size=(140, 40)):
        await until(app, "#fleet-table", "tiny-2  ready  1")
        assert "exact" in read(app, "#answers")
        writer.write_all(iter(list(run.kill(BEGAN + 9))[:2]))
        await until(app, "#fleet-table", "tiny-2  exited  –")
        writer.write_all(iter(list(run.refit(BEGAN + 20, 2, fails=True))))
        await until(app, "#refits-table", "Not every worker is on version 2.")
        await until(app, "#events-table", "refit failed")


async def test_keys_change_the_tab_and_rows_open_what_they_name(tmp_path: Path) -> None:
    app, run, writer = make_top(tmp_path)
    writer.write_all(run.refit(BEGAN + 20, 2))
    async with app.run_test(size=(140, 40)) as pilot:
        await until(app, "#fleet-table", "tiny-0")
        await pilot.press("r")
        assert app.query_one("#tabs", TabbedContent).active == "refits"
        await until(app, "#bars", "Version 2, ok")
        await pilot.press("down", "enter")
        await until(app, "#bars", "Version 1, ok")
        await pilot.press("x")
        await until(app, "#exactness-text", "mismatch k3")
        await pilot.press("f", "enter")
        await until(app, "#log-lines", "first line")
        assert app.query_one("#tabs", TabbedContent).active == "logs"
        assert "red [bold]" in read(app, "#log-lines")
        with (tmp_path / "logs" / "tiny-0.log").open("a") as file:
            file.write("a later line\n")
        await until(app, "#log-lines", "a later line")
        await pilot.press("q")


@pytest.mark.parametrize("size", [(140, 40), (80, 24)])
async def test_the_answers_stay_on_the_screen(tmp_path: Path, size: tuple[int, int]) -> None:
    app, run, writer = make_top(tmp_path, workers=64)
    for number in range(2, 30):
        writer.write_all(run.refit(BEGAN + 10 * number, number))
    async with app.run_test(size=size) as pilot:
        for tab in ("r", "o", "x", "e", "l", "f"):
            await pilot.press(tab)
            await pilot.pause()
            assert app.screen.max_scroll_y == 0
            assert app.query_one("#head").region.y == 0
            assert app.query_one("#answers").region.y == 1
        table = app.query_one("#fleet-table", DataTable)
        assert 3 < table.size.height < size[1]


async def test_a_column_sorts_the_fleet(tmp_path: Path) -> None:
    app, run, writer = make_top(tmp_path, workers=11)
    writer.write_all(run.generate(BEGAN + 10, 1))
    async with app.run_test(size=(140, 40)):
        await until(app, "#fleet-table", "tiny-10")
        table = app.query_one("#fleet-table", DataTable)
        columns = list(table.columns.values())
        place = [str(column.label) for column in columns].index("load")

        def list_loads() -> list[str]:
            return [str(table.get_row(key)[place]) for key in table.rows]

        # Workers are recorded before their first sample.
        await wait_until_async(lambda: all(map(str.isdecimal, list_loads())), 20.0, every=0.05)
        event = DataTable.HeaderSelected(table, columns[place].key, place, columns[place].label)
        await app.on_data_table_header_selected(event)
        loads = list(map(int, list_loads()))
        assert loads == sorted(loads)
        await app.on_data_table_header_selected(event)
        loads = list(map(int, list_loads()))
        assert loads == sorted(loads, reverse=True)


async def test_a_quiet_stack_writes_no_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow line, only what changed is sent."""
    app, _, writer = make_top(tmp_path, workers=128)
    async with app.run_test(size=(140, 40)):
        await until(app, "#fleet-table", "tiny-127")
        changed: list[tuple[str, str]] = []
        update = DataTable.update_cell

        def count(self: DataTable[object], row: str, column: str, *rest: object, **named: bool):  # type: ignore[no-untyped-def]
            changed.append((row, column))
            return update(self, row, column, *rest, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(DataTable, "update_cell", count)
        polls = app._watch.poll
        looks = 0

        def poll() -> bool:
            nonlocal looks
            looks += 1
            return polls()

        monkeypatch.setattr(app._watch, "poll", poll)
        await wait_until_async(lambda: looks > 5, 20.0, every=0.05, what="some looks")
        assert changed == []
        sample = {"vllm:num_requests_running": {"worker=tiny-5": 4321}}
        writer.write("sampler", {"kind": "sample", "t": BEGAN + 30, "values": sample})
        await until(app, "#fleet-table", "4321")
        assert set(changed) == {("tiny-5", "load")}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("a\x1b", "a"),
        ("bell\x07 back\x08", "bell� back�"),
        ("tab\there", "tab\there"),
    ],
)
def test_a_line_of_a_log_is_only_text(line: str, shown: str) -> None:
    assert clean_line(line) == shown
