"""What the terminal shows: the model of the page as tables of text. Pure, like `view`.

    Watch.make_model() ──► make_screen() ──► rollway top --once: printed by `print_screen`
                                        └──► rollway top: a tab for each (`terminal`)

Every column that holds a figure names its metric in docs/metrics.md. Cells hold text of other
programs, so they are never read as markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table as RichTable
from rich.text import Text

from rollway.observe.dash.view import View
from rollway.observe.dash.workers import ENDING, SERVING, rank_name
from rollway.observe.figures import (
    NONE,
    count,
    draw_sparkline,
    format_bytes,
    format_clock,
    format_number,
    format_seconds,
    format_share,
    format_utc,
)

STYLES = {"good": "green", "warn": "yellow", "bad": "bold red", "unknown": "dim", "muted": "dim"}
WORDS = {"good": "good", "warn": "look", "bad": "WRONG", "unknown": "unknown"}
_STEP_STYLES = {
    "look": "grey50", "preflight": "blue", "leave": "magenta", "pause": "red", "load": "yellow",
    "flush": "cyan", "verify": "green", "open": "bright_green",
}  # fmt: skip
_STEP_SIGNS = {
    "look": "k", "preflight": "p", "leave": "x", "pause": "P", "load": "L", "flush": "f",
    "verify": "v", "open": "o",
}  # fmt: skip
"""A letter for each step: a terminal without colours shows them too."""
_WAITING = ("starting", "waiting", "restarting", "paused", "asleep", "joining")
_PARTS = ("generate", "train", "publish", "wait", "paused")
_BAR_WIDTH, _SPARK_WIDTH = 48, 30
_MOST_REFITS, _MOST_STEPS = 50, 12


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; `metric` is that of its figures, empty for names, times and texts."""

    title: str
    metric: str = ""
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """Text with a level; `metric` where the column has figures of several metrics."""

    text: str
    level: str = ""
    metric: str = ""
    drawing: tuple[tuple[str, str], ...] = ()
    """Pieces of a bar with their styles, instead of the text."""

    def as_rich(self) -> Text:
        if self.drawing:
            return Text.assemble(*self.drawing)
        return Text(self.text, style=STYLES.get(self.level, ""))


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by their keys, below a title."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: dict[str, list[Cell]]
    empty: str = ""


@dataclass(frozen=True, slots=True)
class Screen:
    """All of it: a head, notes, the four answers, and the tables."""

    head: str
    notes: list[str]
    answers: list[Mapping[str, str]]
    tables: dict[str, Table]


def make_screen(model: Mapping[str, Any], view: View, refit: str = "") -> Screen:
    """Return what a model shows; `refit` is the key of the refit whose bars are wanted."""
    tables = [
        make_fleet(model["fleet"]),
        make_refits(model["refits"]),
        make_bars(view.get_refit(refit)),
        make_rollouts(model, view.get_series()),
        make_exactness(model["exactness"]),
        make_steps(model["trainer"]),
        make_events(view.get_events()),
    ]
    run = model["run"]
    return Screen(_make_head(run), _make_notes(run), model["top"], {t.name: t for t in tables})


def _make_head(run: Mapping[str, Any]) -> str:
    name = run["stack"] or run["label"]
    if run["phase"] == "live":
        return f"{name} · live · {format_clock(run['now'])}"
    return f"{name} · {run['phase']} · {format_utc(run['ended'] or run['now'])} UTC"


def _make_notes(run: Mapping[str, Any]) -> list[str]:
    notes = list(run["notes"])
    if run["phase"] == "ended":
        notes.insert(0, "The stack has ended. What follows is its record.")
    if run["began"] is None:
        notes.insert(0, "Nothing has been recorded yet.")
    return notes


# --- tables --------------------------------------------------------------------------------------


def make_fleet(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        Column("worker"),
        Column("state", "rollway_workers"),
        Column("version", "rollway_weight_version", True),
        Column("load", "vllm:num_requests_running", True),
        Column("wait", "vllm:num_requests_waiting", True),
        Column("KV", "vllm:kv_cache_usage_perc", True),
        Column("hits", "vllm:prefix_cache_hits_total_per_second", True),
        Column("restarts", "rollway_restarts_total", True),
        Column("node"),
        Column("role"),
        Column("last event"),
    )
    newest = max((row["version"] for row in rows if row["version"] is not None), default=None)
    cells = {
        row["name"]: _make_worker(row, newest)
        for row in sorted(rows, key=lambda row: rank_name(row["name"]))
    }
    serving = sum(row["state"] in SERVING for row in rows)
    verb = "serves" if len(rows) == 1 else "serve"
    title = f"Fleet: {serving} of {count(len(rows), 'worker')} {verb}"
    return Table("fleet", title, columns, cells, "No worker has been recorded yet.")


def _make_worker(row: Mapping[str, Any], newest: int | None) -> list[Cell]:
    state = row["state"]
    level = "good" if state in SERVING else "warn" if state in _WAITING else "bad"
    level = "muted" if state in ENDING else level
    is_behind = state in SERVING and row["version"] != newest
    last = (
        f"{row['last_event']} {format_clock(row['last_event_at'])}" if row["last_event"] else NONE
    )
    return [
        Cell(row["name"]),
        Cell(state or "?", level),
        Cell(NONE if row["version"] is None else str(row["version"]), "warn" if is_behind else ""),
        Cell(format_number(row["load"])),
        Cell(format_number(row["waiting"]), "warn" if row["waiting"] else ""),
        Cell(format_share(row["kv"]), "warn" if (row["kv"] or 0) > 0.95 else ""),
        Cell(format_share(row["hits"])),
        Cell(str(row["restarts"]), "warn" if row["restarts"] else "muted"),
        Cell(row["node"] or "here", "muted"),
        Cell(row["role"] or NONE, "muted"),
        Cell(last, "muted"),
    ]


def make_refits(refits: Sequence[Mapping[str, Any]]) -> Table:
    """Return the last refits, newest first."""
    columns = (
        Column("version", "rollway_weight_version", True),
        Column("outcome", "rollway_refits_total"),
        Column("took", "rollway_refit_seconds", True),
        Column("paused", "rollway_refit_paused_seconds", True),
        Column("weights", "rollway_refit_bytes", True),
        Column("workers", "rollway_workers", True),
        Column("ended"),
        Column("error"),
    )
    levels = {"ok": "good", "running": "warn", "cancelled": "warn"}
    rows = {}
    for refit in refits[:_MOST_REFITS]:
        size = f" {format_bytes(refit['bytes'])}" if refit["bytes"] is not None else ""
        failed = f", {refit['failed']} failed" if refit["failed"] else ""
        rows[refit["key"]] = [
            Cell(str(refit["version"])),
            Cell(refit["outcome"], levels.get(refit["outcome"], "bad")),
            Cell(format_seconds(refit["seconds"])),
            Cell(format_seconds(refit["paused_seconds"])),
            Cell(f"{refit['transport'] or NONE}{size}"),
            Cell(f"{refit['workers']}{failed}", "bad" if failed else ""),
            Cell(format_clock(refit["ended"]), "muted"),
            Cell(refit["error"], "bad"),
        ]
    return Table("refits", "Refits, newest first", columns, rows, "No refit yet.")


def make_bars(refit: Mapping[str, Any] | None) -> Table:
    """Return one refit with a bar per worker: a letter and a colour for each step."""
    columns = (
        Column("worker"),
        Column("busy", "rollway_refit_phase_seconds", True),
        Column("steps", "rollway_refit_phase_seconds"),
        Column("error"),
    )
    if refit is None:
        return Table("bars", "Steps of a refit", columns, {}, "No refit yet.")
    last = max((end for row in refit["rows"] for _, _, end in row["bars"]), default=refit["span"])
    rows = {}
    for row in refit["rows"]:
        mark = "warn" if row["straggler"] else ""
        name = (row["name"] or row["instance"]) + (" slow" if row["straggler"] else "")
        drawing = tuple(draw_bars(row["bars"], max(last, 1e-3)))
        error = f"{row['state']}: {row['error']}" if row["error"] else ""
        rows[row["instance"]] = [
            Cell(name, "bad" if error else mark),
            Cell(format_seconds(row["busy"]), mark),
            Cell("", drawing=drawing),
            Cell(error, "bad"),
        ]
    legend = " ".join(f"{sign} {step}" for step, sign in _STEP_SIGNS.items())
    title = f"Version {refit['version']}, {refit['outcome']}: {legend}"
    return Table("bars", title, columns, rows)


def draw_bars(
    bars: Sequence[tuple[str, float, float]], last: float, width: int = _BAR_WIDTH
) -> Iterator[tuple[str, str]]:
    """Yield the pieces of one worker's line, with gaps where it waited."""
    place = 0
    for name, begin, end in bars:
        first, stop = round(begin / last * width), round(end / last * width)
        if first > place:
            yield " " * (first - place), ""
            place = first
        if stop > place:
            yield _STEP_SIGNS.get(name, "?") * (stop - place), _STEP_STYLES.get(name, "")
            place = stop


def make_rollouts(
    model: Mapping[str, Any], series: Mapping[str, Mapping[str, Sequence[float]]]
) -> Table:
    rollouts = model["rollouts"]
    totals = rollouts["totals"]
    rows: dict[str, list[Cell]] = {}

    def add(label: str, text: str, metric: str, name: str = "", most: float | None = None) -> None:
        values = series.get(name, {}).get("v", [])
        spark = draw_sparkline(values, _SPARK_WIDTH, most=most)
        rows[label] = [Cell(label), Cell(text, metric=metric), Cell(spark, metric=metric)]

    def get_last(name: str) -> float | None:
        values = series.get(name, {}).get("v", [])
        return values[-1] if values else None

    for label, field in (("tokens per second", "tokens_per_second"),
                         ("rollouts per second", "rollouts_per_second")):  # fmt: skip
        add(label, format_number(rollouts[field]), f"rollway_{field}", field)
    add("from cache", format_share(get_last("cached")), "rollway_cached_share", "cached", 1.0)
    for label, field, metric in (
        ("time of a rollout", "latency", "rollway_rollout_seconds"),
        ("first token", "first_token", "rollway_first_token_seconds"),
        ("tokens of a rollout", "lengths", "rollway_rollout_tokens"),
    ):
        shown = format_number if field == "lengths" else format_seconds
        for percentile, value in (rollouts[field] or {}).items():
            name = f"{field}_{percentile}"
            add(f"{label}, {percentile}", shown(value), f"{metric}_{percentile}", name)
    for label, name, metric in (
        ("running in workers", "running", "vllm:num_requests_running"),
        ("waiting in workers", "waiting", "vllm:num_requests_waiting"),
    ):
        add(label, format_number(get_last(name)), metric, name)
    add("KV cache", format_share(get_last("kv")), "vllm:kv_cache_usage_perc", "kv", 1.0)
    for label, field in (("rollouts", "count"), ("tokens", "tokens")):
        add(f"{label} so far", format_number(totals.get(field, 0)), f"rollway_{label}_total")
    for field in ("cut", "continued"):
        add(field, str(totals.get(field, 0)), f"rollway_rollouts_{field}_total")
    causes = ", ".join(f"{number} {cause}" for cause, number in rollouts["retries"].items())
    add("retries", causes or "none", "rollway_retries_total", "retries")
    return Table("rollouts", "Rollouts", _LABELLED, rows)


_LABELLED = (Column("figure"), Column("now"), Column("before"))
"""Columns whose cells name their own metrics."""


def make_exactness(exactness: Mapping[str, Any]) -> Table:
    newest = exactness["mismatch"][-1] if exactness["mismatch"] else {}
    good, bad = exactness["bounds"]
    k3 = newest.get("k3")
    level = "" if k3 is None else "good" if k3 < good else "warn" if k3 < bad else "bad"
    spread = exactness["spread"]
    forks = ", ".join(f"{number} {reason}" for reason, number in exactness["forks"].items())
    history = [row["k3"] for row in exactness["mismatch"]]
    sparks = {"mismatch k3": draw_sparkline(history, _SPARK_WIDTH, most=max([bad, *history]))}
    figures = [
        ("compared version", str(newest.get("version", NONE)), "rollway_weight_version", ""),
        ("mismatch k3", format_number(k3), "rollway_mismatch_k3", level),
        ("mismatch k1", format_number(newest.get("k1")), "rollway_mismatch_k1", ""),
        ("largest difference", format_number(newest.get("max")), "rollway_mismatch_max", ""),
        ("spread of versions", NONE if spread is None else str(spread), "rollway_version_spread",
         "warn" if spread else ""),
        ("answers not believed", f"{exactness['not_believed']:,}",
         "rollway_answers_not_believed_total", ""),
        ("forks", forks or "none", "rollway_forks_total", ""),
        ("gateway sessions", f"{exactness['gateway']['sessions']:,}", "rollway_gateway_sessions",
         ""),
        ("gateway turns", f"{exactness['gateway']['turns']:,}", "rollway_gateway_turns_total", ""),
    ]  # fmt: skip
    rows = {
        label: [Cell(label), Cell(text, level, metric), Cell(sparks.get(label, ""), metric=metric)]
        for label, text, metric, level in figures
    }
    return Table("exactness", "Exactness", _LABELLED, rows)


def make_steps(steps: Sequence[Mapping[str, Any]]) -> Table:
    """Return the trainer's last steps, newest first."""
    parts = (Column(part, "rollway_step_part_seconds", True) for part in _PARTS)
    columns = (Column("step", "rollway_step", True), Column("took", "rollway_step_seconds", True))
    rows = {
        f"{step['t']}": [
            Cell(str(step["step"])),
            Cell(format_seconds(step["seconds"])),
            *(Cell(format_seconds(step["parts"].get(part))) for part in _PARTS),
        ]
        for step in list(reversed(steps))[:_MOST_STEPS]
    }
    empty = "No trainer has reported a step: see rollway.observe.step."
    return Table("steps", "Trainer's steps, newest first", (*columns, *parts), rows, empty)


def make_events(events: Sequence[Mapping[str, Any]]) -> Table:
    """Return the events, newest first."""
    columns = tuple(map(Column, ("time", "event", "worker", "detail")))
    levels = {"bad": "bad", "warn": "warn"}
    rows = {
        str(event["id"]): [
            Cell(format_clock(event["t"]), "muted"),
            Cell(event["event"], levels.get(event["level"], "")),
            Cell(event["worker"]),
            Cell(event["detail"], "muted"),
        ]
        for event in reversed(events)
    }
    return Table("events", "Events, newest first", columns, rows, "No event yet.")


# --- printing ------------------------------------------------------------------------------------


def draw_answers(answers: Sequence[Mapping[str, str]], *, explains: bool = True) -> RichTable:
    """Return the four answers: a line each, with figure, sentence and threshold."""
    table = RichTable.grid(padding=(0, 2))
    for answer in answers:
        style = STYLES.get(answer["level"], "")
        word = WORDS.get(answer["level"], answer["level"])
        cells = [Text(answer["name"], style="bold"), Text(word, style=style)]
        cells.append(Text(answer["figure"], style=style))
        if explains:
            cells.append(Text(answer["sentence"]))
            cells.append(Text(answer["threshold"], style="dim"))
        table.add_row(*cells)
    return table


def draw_table(table: Table, most: int | None = None) -> Group:
    """Return a table as rich prints it, with at most so many rows."""
    shown = RichTable(box=None, pad_edge=False, header_style="dim")
    for column in table.columns:
        side = "right" if column.is_number else "left"
        shown.add_column(column.title, justify=side, overflow="fold")  # type: ignore[arg-type]
    rows = list(table.rows.values())
    for cells in rows[:most]:
        shown.add_row(*(cell.as_rich() for cell in cells))
    parts: list[Any] = [Text(table.title, style="bold")]
    parts.append(shown if rows else Text(table.empty, style="dim"))
    if most is not None and len(rows) > most:
        parts.append(Text(f"… {len(rows) - most:,} more", style="dim"))
    return Group(*parts, Text())


def print_screen(screen: Screen, console: Console) -> None:
    """Print everything once."""
    console.print(Text(screen.head, style="bold"))
    for note in screen.notes:
        console.print(Text(note, style="yellow"))
    console.print(draw_answers(screen.answers), Text())
    most = {"refits": 10, "events": 15}
    for table in screen.tables.values():
        console.print(draw_table(table, most.get(table.name)))
