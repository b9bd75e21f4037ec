"""`rollway top`: the figures of the page in a terminal. Needs Textual, the extra `observe`.

    Watch.poll, in a thread ── every interval ──► make_screen ──► cells that changed are written

Nothing is animated and unchanged cells are left alone: over a slow line, a quiet stack costs a few
bytes per second.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import DataTable, Footer, OptionList, RichLog, Static, TabbedContent, TabPane

from rollway.observe.dash.fields import get_text
from rollway.observe.dash.screen import Screen, Table, draw_answers, draw_table, make_screen
from rollway.observe.dash.source import Watch
from rollway.stack.logs import Follower

_LOG_LINES, _LINE_LENGTH, _LOG_SECONDS = 400, 4_000, 0.5
_MOST_EVENTS = 300
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|.)?")
"""Sequences that would move the cursor or set colours, and titles of windows."""
_NUMBERS = re.compile(r"(\d+(?:\.\d+)?)")

_TABS = {
    "fleet": "Fleet",
    "refits": "Refits",
    "rollouts": "Rollouts",
    "exactness": "Exactness",
    "events": "Events",
    "logs": "Logs",
}
_KEYS = {
    "fleet": "f", "refits": "r", "rollouts": "o", "exactness": "x", "events": "e", "logs": "l",
}  # fmt: skip
"""As on the page."""
_FOCUSED = {
    "rollouts": "#rollouts-scroll", "exactness": "#exactness-scroll", "logs": "#log-names",
}  # fmt: skip


class Top(App[None]):  # type: ignore[misc]
    """The terminal of one run."""

    TITLE = "rollway top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { overflow: hidden; }
    #tabs, #tabs ContentSwitcher, #tabs TabPane { height: 1fr; }
    #tabs TabPane { padding: 0; }
    #head { text-style: bold; height: 1; }
    #answers { height: auto; padding: 0 0 1 0; }
    DataTable { height: 1fr; }
    #refits-table { height: 40%; }
    #log-names { width: 24; }
    """
    BINDINGS: ClassVar[list[Any]] = [
        *(Binding(key, f"show('{tab}')", _TABS[tab]) for tab, key in _KEYS.items()),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, watch: Watch, interval: float) -> None:
        super().__init__()
        self.animation_level = "none"
        self._watch = watch
        self._interval = interval
        self._busy = asyncio.Lock()  # held while a thread changes the view
        self._refit = ""
        self._sort: tuple[int, bool] = (0, False)
        self._log: asyncio.Task[None] | None = None
        self._log_names: list[str] = []
        self._following: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="answers")
        with TabbedContent(initial="fleet", id="tabs"):
            with TabPane(_TABS["fleet"], id="fleet"):
                yield DataTable(id="fleet-table", cursor_type="row")
            with TabPane(_TABS["refits"], id="refits"):
                yield DataTable(id="refits-table", cursor_type="row")
                with VerticalScroll():
                    yield Static(id="bars")
            with TabPane(_TABS["rollouts"], id="rollouts"), VerticalScroll(id="rollouts-scroll"):
                yield Static(id="rollouts-text")
            with TabPane(_TABS["exactness"], id="exactness"), VerticalScroll(id="exactness-scroll"):
                yield Static(id="exactness-text")
            with TabPane(_TABS["events"], id="events"):
                yield DataTable(id="events-table", cursor_type="row")
            with TabPane(_TABS["logs"], id="logs"), Horizontal():
                yield OptionList(id="log-names")
                yield RichLog(id="log-lines", max_lines=2_000, wrap=True)
        yield Footer()

    def on_mount(self) -> None:
        self._following = asyncio.create_task(self._follow())
        self.query_one("#fleet-table").focus()

    async def on_unmount(self) -> None:
        for task in (self._following, self._log):
            if task is not None:
                task.cancel()

    async def _follow(self) -> None:
        self._show()
        while True:
            await asyncio.sleep(self._interval)
            async with self._busy:
                if await asyncio.to_thread(self._watch.poll):
                    self._show()

    # --- what is shown ---------------------------------------------------------------------------

    def _show(self) -> None:
        watch = self._watch
        screen = make_screen(watch.make_model(), watch.view, self._refit)
        head = Text(screen.head)
        for note in screen.notes:
            head.append(f"  {note}", style="yellow")
        self._set("#head", head, screen.head + "".join(screen.notes))
        answers = [dict(answer) for answer in screen.answers]
        self._set("#answers", draw_answers(answers), str(answers))
        self._fill("#fleet-table", screen.tables["fleet"], sorts=True)
        self._fill("#refits-table", screen.tables["refits"])
        self._fill("#events-table", screen.tables["events"], most=_MOST_EVENTS)
        self._set_tables("#bars", screen, "bars")
        self._set_tables("#rollouts-text", screen, "rollouts", "steps")
        self._set_tables("#exactness-text", screen, "exactness")
        self._list_logs()

    def _set_tables(self, place: str, screen: Screen, *names: str) -> None:
        tables = [screen.tables[name] for name in names]
        self._set(place, Group(*map(draw_table, tables)), str(tables))

    def _set(self, place: str, content: Any, key: str) -> None:
        """Show something in a place, unless it is there already."""
        widget = self.query_one(place, Static)
        if getattr(widget, "shown_key", None) != key:
            widget.shown_key = key
            widget.update(content)

    def _fill(
        self, place: str, table: Table, *, most: int | None = None, sorts: bool = False
    ) -> None:
        """Write the cells of a table that changed; all of them if rows came, left or moved."""
        widget = self.query_one(place, DataTable)
        if not widget.columns:
            for column in table.columns:
                widget.add_column(column.title, key=column.title)
        rows = dict(list(table.rows.items())[:most])
        if sorts:
            place_of, is_down = self._sort
            ordered = sorted(
                rows.items(), key=lambda item: _rank(item[1][place_of].text), reverse=is_down
            )
            rows = dict(ordered)
        if [key.value for key in widget.rows] != list(rows):
            chosen, scroll = widget.cursor_row, widget.scroll_y
            widget.clear()
            for key, cells in rows.items():
                widget.add_row(*(cell.as_rich() for cell in cells), key=key)
            widget.move_cursor(row=min(chosen, max(0, len(rows) - 1)), scroll=False)
            widget.scroll_to(y=scroll, animate=False)
            return
        for key, cells in rows.items():
            for column, cell in zip(table.columns, cells, strict=True):
                text = cell.as_rich()
                if widget.get_cell(key, column.title) != text:
                    widget.update_cell(key, column.title, text, update_width=True)

    # --- keys and clicks -------------------------------------------------------------------------

    def action_show(self, tab: str) -> None:
        self.query_one("#tabs", TabbedContent).active = tab
        self.query_one(_FOCUSED.get(tab, f"#{tab}-table")).focus()

    async def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        if event.data_table.id == "fleet-table":
            is_same = self._sort[0] == event.column_index
            self._sort = event.column_index, is_same and not self._sort[1]
            await self._show_again()

    async def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        key = event.row_key.value or ""
        if event.data_table.id == "refits-table":
            self._refit = key
            await self._show_again()
        elif event.data_table.id == "fleet-table" and self._watch.source.find_log(key):
            self.action_show("logs")
            self._open_log(key)

    async def _show_again(self) -> None:
        async with self._busy:
            self._show()

    # --- logs ------------------------------------------------------------------------------------

    def _list_logs(self) -> None:
        names = self._watch.source.list_logs()
        if names == self._log_names and names:
            return
        options = self.query_one("#log-names", OptionList)
        if not names:
            if not options.option_count:
                options.add_option("no logs here")
            return
        self._log_names = names
        options.clear_options()
        options.add_options([Text(get_text(name, 100)) for name in names])

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if event.option_index < len(self._log_names):
            self._open_log(self._log_names[event.option_index])

    def _open_log(self, name: str) -> None:
        if self._log is not None:
            self._log.cancel()
        lines = self.query_one("#log-lines", RichLog)
        lines.clear()
        self._log = asyncio.create_task(self._follow_log(name, lines))

    async def _follow_log(self, name: str, lines: RichLog) -> None:
        path = self._watch.source.find_log(name)
        if path is None:
            lines.write(Text("There is no such log."))
            return
        follower = await asyncio.to_thread(Follower, path, _LOG_LINES)
        try:
            while True:
                for line in await asyncio.to_thread(follower.read):
                    lines.write(Text(clean_line(line)))
                await asyncio.sleep(_LOG_SECONDS)
        finally:
            follower.close()


def clean_line(line: str) -> str:
    """Return a line of a log without what a terminal would obey."""
    return get_text(_ESCAPES.sub("", line), _LINE_LENGTH)


def _rank(text: str) -> list[tuple[bool, float, str]]:
    """Return a key that has 2 before 10, also inside names."""
    parts = [part for part in _NUMBERS.split(text) if part]
    return [
        (False, float(part), "") if _NUMBERS.fullmatch(part) else (True, 0.0, part)
        for part in parts
    ]


def run_top(watch: Watch, interval: float) -> None:
    """Show a run until the user ends it."""
    Top(watch, interval).run()
