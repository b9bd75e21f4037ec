"""`rollway top`: the dashboard's figures as tables of a terminal, once or for as long as one looks.

Cells hold text of other programs: they are never read as markup, and the reader of the record has
removed what a terminal would obey.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollway.observe.dash.view import Watch
from rollway.observe.figures import (
    NONE,
    count,
    format_bytes,
    format_clock,
    format_number,
    format_seconds,
    format_share,
    format_utc,
)
from rollway.observe.workers import SERVING, rank_name

_Table = tuple[str, Sequence[str], Sequence[Sequence[Any]]]
_STYLES = {"good": "green", "warn": "yellow", "bad": "bold red", "unknown": "dim"}
_MOST_REFITS, _MOST_STEPS, _MOST_EVENTS = 8, 6, 12


def run_top(watch: Watch, interval: float) -> None:
    """Show a run until the user presses Ctrl-C; what does not change is not sent again. The last
    table stays in the terminal."""
    with Live(auto_refresh=False, vertical_overflow="crop") as live:
        try:
            live.update(draw(watch, live.console), refresh=True)
            while True:
                time.sleep(interval)
                if watch.poll():
                    live.update(draw(watch, live.console), refresh=True)
        except KeyboardInterrupt:
            return


def print_once(watch: Watch, width: int | None) -> None:
    Console(highlight=False, width=width).print(draw(watch))


def draw(watch: Watch, screen: Console | None = None) -> Group:
    """Return all tables; of each no more rows than a screen has room for, if one is given."""
    model = watch.make_model()
    run, fleet = model["run"], model["fleet"]
    now = format_clock(run["now"]) if run["phase"] == "live" else format_utc(run["now"]) + " UTC"
    parts: list[RenderableType] = [Text(note, "yellow") for note in run["notes"]]
    parts.insert(0, Text(f"{run['stack'] or run['label']} · {run['phase']} · {now}", "bold"))
    answers = [
        (a["name"], (a["figure"], _STYLES[a["level"]]), f"{a['sentence']} ({a['threshold']})")
        for a in model["top"]
    ]
    parts += _draw("", ("", "", ""), answers, is_dense=screen is not None)
    columns: Sequence[str] = ("version", "outcome", "took", "paused", "weights", "ended", "error")
    refits = [
        (refit["version"], refit["outcome"], format_seconds(refit["seconds"]),
         format_seconds(refit["paused_seconds"]),
         f"{refit['transport'] or NONE} {format_bytes(refit['bytes'])}",
         format_clock(refit["ended"]), (refit["error"], "bold red"))
        for refit in model["refits"][:_MOST_REFITS]
    ]  # fmt: skip
    tables: list[_Table] = [("Refits, newest first", columns, refits),
                            ("Rollouts", ("", ""), [*_list_rollout_figures(model)])]  # fmt: skip
    names = ("generate", "train", "publish", "wait", "paused")
    steps = [
        (step["step"], format_seconds(step["seconds"]),
         *(format_seconds(step["parts"].get(name)) for name in names))
        for step in model["trainer"][: -_MOST_STEPS - 1 : -1]
    ]  # fmt: skip
    tables.append(("Trainer's steps, newest first", ("step", "took", *names), steps))
    events = [
        (format_clock(e["t"]), (e["event"], _STYLES.get(e["level"], "")), e["worker"], e["detail"])
        for e in watch.view.get_events()[: -_MOST_EVENTS - 1 : -1]
    ]
    tables.append(("Events, newest first", ("time", "event", "worker", "detail"), events))
    counts = [len(fleet), *(len(rows) for _, _, rows in tables)]
    most = max(counts)
    if screen is not None:  # a section has its title and the names of its columns, or "none yet"
        head = len(screen.render_lines(Group(*parts)))
        room = screen.height - head - 2 * len(counts) + 1
        most = next((n for n in range(room, 1, -1) if sum(min(n, c) for c in counts) <= room), 1)
    for title, columns, rows in (_make_fleet(fleet, most), *tables):
        parts += _draw(title, columns, rows[:most], is_dense=screen is not None)
    return Group(*parts)


def _make_fleet(fleet: Sequence[Mapping[str, Any]], most: int) -> _Table:
    """Return the workers by name; if they are too many, the worst of them."""
    serving = sum(row["state"] in SERVING for row in fleet)
    title = f"Fleet: {serving} of {count(len(fleet), 'worker')} serve{'s' * (len(fleet) == 1)}"
    if len(fleet) > most:
        title += f"; the worst {most}, and {len(fleet) - most:,} more that are not shown"
        fleet = sorted(fleet, key=_rank_worker)
    rows = sorted(fleet[:most], key=lambda row: rank_name(row["name"]))
    columns = ("worker", "state", "version", "load", "wait", "KV", "hits", "restarts", "last event")
    return title, columns, [_list_worker_cells(row) for row in rows]


def _rank_worker(row: Mapping[str, Any]) -> tuple[float, ...]:
    """Return a key that sorts the worst workers first."""
    version = -1 if row["version"] is None else row["version"]
    return row["state"] in SERVING, version, -row["restarts"], -(row["waiting"] or 0)


def _list_worker_cells(row: Mapping[str, Any]) -> Sequence[Any]:
    at = f" {format_clock(row['last_event_at'])}" if row["last_event"] else ""
    version = NONE if row["version"] is None else row["version"]
    return (row["name"], row["state"], version, format_number(row["load"]),
            format_number(row["waiting"]), format_share(row["kv"]), format_share(row["hits"]),
            row["restarts"], row["last_event"] + at)  # fmt: skip


def _list_rollout_figures(model: Mapping[str, Any]) -> Iterable[Sequence[Any]]:
    rollouts, exactness = model["rollouts"], model["exactness"]
    for name in ("tokens_per_second", "rollouts_per_second"):
        yield name.replace("_", " "), format_number(rollouts[name])
    forms: dict[str, Callable[[float | None], str]] = {
        "latency": format_seconds, "first_token": format_seconds, "lengths": format_number,
    }  # fmt: skip
    for name, form in forms.items():
        levels = (rollouts[name] or {}).items()
        text = ", ".join(f"{level} {form(value)}" for level, value in levels)
        yield name.replace("_", " "), text or NONE
    yield "totals", ", ".join(f"{n:,} {name}" for name, n in rollouts["totals"].items()) or NONE
    yield "retries", ", ".join(f"{n:,} {cause}" for cause, n in rollouts["retries"].items()) or NONE
    yield "spread of versions", NONE if exactness["spread"] is None else exactness["spread"]


def _draw(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, is_dense: bool = False
) -> list[RenderableType]:
    """Return a table below its title; a cell is a value, or text with its style. A dense one has a
    line for each row, and no line below it."""
    form: dict[str, Any] = {"no_wrap": is_dense, "overflow": "ellipsis"}
    table = Table(*columns, box=None, pad_edge=False, header_style="dim", show_header=any(columns))
    for cells in rows:
        texts = (cell if isinstance(cell, tuple) else (str(cell),) for cell in cells)
        table.add_row(*(Text(*text, **form) for text in texts))
    body = table if table.row_count else Text("none yet", "dim")
    parts: list[RenderableType] = [Text(title, "bold", **form), body, Text()]
    return parts[not title : 2 if is_dense else 3]
