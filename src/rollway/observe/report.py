"""`rollway report`: the dashboard's page with the data of a run in it, as one HTML file.

    run directory ──► View ──► JSON in the page ──► no script but the page's own, nothing to load

Two runs are in one file: the page shows one of them at a time, and the figures of both.
"""

from __future__ import annotations

import base64
import hashlib
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollway.errors import UsageError
from rollway.observe.dash.open_run import open_directory
from rollway.observe.dash.server import STATIC
from rollway.observe.dash.verdicts import STALE_SECONDS
from rollway.observe.dash.view import Watch
from rollway.observe.figures import (
    NONE,
    count,
    format_bytes,
    format_number,
    format_seconds,
    format_share,
    format_utc,
)
from rollway.observe.read import is_alive, read_headers
from rollway.observe.run_state import RunState

DIFFERENCE = 0.1
"""Two runs differ in a figure from here on."""
Better = Literal["less", "more", ""]
"""Which way a figure is better."""
_PARTS = {"generate": "generating", "train": "training", "publish": "publishing", "wait": "waiting"}


def write_report(directories: Sequence[Path], out: Path) -> dict[str, Any]:
    """Write the report of one run, or of two, and return it for scripts."""
    watches = [Watch(open_directory(directory)) for directory in directories]
    for watch in watches:
        watch.load()
    shown = [
        {
            **watch.make_page(),
            "hits": watch.view.state.workers.list_hits(),
            "refits": {refit.key: watch.view.get_refit(refit.key)
                       for refit in watch.view.state.timeline.refits},
        }
        for watch in watches
    ]  # fmt: skip
    report = describe_report(watches, [page["sections"] for page in shown])
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(render_page({**report, "shown": shown}))
    except OSError as error:
        raise UsageError(
            f"The report cannot be written to {out}: {error.strerror or error}.",
            "Choose another file with --out.",
        ) from error
    return report


def describe_report(
    watches: Sequence[Watch], models: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a report for scripts."""
    states = [watch.view.state for watch in watches]
    runs = []
    for watch, state, model in zip(watches, states, models, strict=True):
        runs.append(
            {
                "stack": state.stack,
                "run": state.run,
                "began": state.first,
                "seconds": state.seconds,
                "text": describe_run(state, watch.source.run.directory),
                "notes": model["run"]["notes"],
                "findings": model["findings"],
                "figures": [asdict(figure) for figure in list_figures(state)],
            }
        )
    if len(states) < 2:
        return {"runs": runs}
    return {"runs": runs, "differences": compare(*states)}


def describe_run(state: RunState, directory: Path) -> str:
    """Return when a run was, and how it ended."""
    if state.first is None:
        return "Nothing was recorded."
    ends = {"": "its record stops without an end", "failed": "it failed"}
    end = ends.get(state.ended_by, "it was stopped")
    if not state.ended_by and any(is_alive(each, directory) for each in read_headers(directory)):
        end = "it runs"
    version = f", Rollway {state.rollway}" if state.rollway else ""
    return (
        f"{format_utc(state.first)} to {format_utc(state.now)} UTC, "
        f"{format_seconds(state.seconds)}; {end}; "
        f"{count(len(state.workers.histories), 'worker')}{version}."
    )


# --- figures -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a whole run. `better` says which way is good, where one is."""

    label: str
    metric: str
    value: float
    text: str
    better: Better = ""


def list_figures(state: RunState) -> list[Figure]:
    """Return the figures of a whole run, by which runs are compared."""
    ended = [refit for refit in state.refits if refit.outcome == "ok"]
    totals, prompts = state.list_totals(), state.get("prompt_tokens_total")
    stale = [time.seconds for time in state.workers.stale_times if time.seconds >= STALE_SECONDS]
    histories = state.workers.histories.values()
    rows: list[tuple[str, str, float | None, Callable[[float], str], Better]] = [
        ("refit, median", "refit_seconds", _take_median([r.seconds for r in ended]),
         format_seconds, "less"),
        ("generation paused by a refit, median", "refit_paused_seconds",
         _take_median([refit.paused for refit in ended]), format_seconds, "less"),
        ("refits", "refits_total", len(state.refits), _format, ""),
        ("refits that did not end well", "refits_total", len(state.refits) - len(ended), _format,
         "less"),
        ("tokens per second, over the whole run", "tokens_per_second",
         _divide(totals["tokens"], state.seconds) or None, _format, "more"),
        ("rollouts", "rollouts_total", totals["count"], _format, ""),
        ("tokens", "tokens_total", totals["tokens"], _format, ""),
        ("prompt tokens from a cache", "cached_share", _divide(totals["cached_tokens"], prompts),
         format_share, "more"),
    ]  # fmt: skip
    for name, transfers in state.transfers.items():
        by = f"weights by {name or 'an unknown transport'}"
        size, seconds = transfers.bytes / transfers.refits, transfers.seconds / transfers.refits
        rows.append((f"{by}, mean", "refit_bytes", size, format_bytes, ""))
        rows.append((f"{by}, staged in", "refit_transfer_seconds", seconds, format_seconds, "less"))
    for label, name, metric in (("time of a rollout", "latency", "rollout_seconds"),
                                ("first token", "first_token", "first_token_seconds")):  # fmt: skip
        for level in ("p50", "p95"):
            levels = state.levels.get(f"{name}_{level}", Counter())
            value = _take_median(list(levels.elements()))
            text = f"{label}, {level}, median of the intervals"
            rows.append((text, f"{metric}_{level}", value, format_seconds, "less"))
    rows += [
        ("trainer's steps", "step", state.step_count or None, _format, ""),
        ("step, mean", "step_seconds", _divide(state.step_seconds, state.step_count),
         format_seconds, "less"),
        *((f"of it {_PARTS.get(part, part)}", "step_part_seconds",
           _divide(seconds, state.step_seconds), format_share,
           "" if part in ("generate", "train") else "less")
          for part, seconds in state.part_seconds.items()),
        ("largest mismatch k3 of a version", "mismatch_k3",
         max((row["k3"] for row in state.mismatch.values()), default=None), _format, "less"),
        ("largest difference of a log-prob", "mismatch_max",
         max((row["max"] or 0.0 for row in state.mismatch.values()), default=0.0) or None,
         _format, "less"),
        ("answers not believed", "answers_not_believed_total", totals["not_believed"], _format, ""),
        ("requests sent again", "retries_total",
         sum(state.list_by_label("retries_total").values()), _format, "less"),
        ("rollouts cut", "rollouts_cut_total", totals["cut"], _format, "less"),
        ("time with workers behind", "version_spread", sum(stale), format_seconds, "less"),
        ("restarts of workers", "restarts_total", sum(w.restarts for w in histories), _format,
         "less"),
        ("workers", "workers", len(histories), _format, ""),
        ("sessions of the gateway", "gateway_sessions", state.get("gateway_sessions") or None,
         _format, ""),
        ("turns of the gateway", "gateway_turns_total", state.get("gateway_turns_total") or None,
         _format, ""),
    ]  # fmt: skip
    return [
        Figure(label, f"rollway_{metric}", value, form(value), better)
        for label, metric, value, form, better in rows
        if value is not None
    ]


def _format(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) and value < 1e6 else format_number(value)


def _divide(amount: float, by: float) -> float | None:
    return amount / by if by else None


def _take_median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def compare(first: RunState, second: RunState) -> list[dict[str, Any]]:
    """Return how the figures of a second run differ from those of the first; `ratio` is the second
    by the first."""
    before, after = (
        {figure.label: figure for figure in list_figures(state)} for state in (first, second)
    )
    rows = []
    for label, known in {**after, **before}.items():
        a, b = before.get(label), after.get(label)
        values = [None if figure is None else figure.value for figure in (a, b)]
        rows.append(
            {
                "label": label,
                "metric": known.metric,
                "first": NONE if a is None else a.text,
                "second": NONE if b is None else b.text,
                "ratio": b.value / a.value if a and b and a.value else None,
                "verdict": _judge(values[0], values[1], known.better),
            }
        )
    return rows


def _judge(before: float | None, after: float | None, better: Better) -> str:
    if before is None or after is None:
        return "other"
    if abs(after - before) <= DIFFERENCE * max(abs(before), abs(after)):
        return "same"
    return "other" if not better else _WORDS[(after > before) == (better == "more")]


_WORDS = {True: "better", False: "worse"}


# --- the file ------------------------------------------------------------------------------------

_MODULES = ("dom", "api", "log", "fleet", "refits", "charts", "hits", "exactness",
            "conversations", "events", "findings", "main")  # fmt: skip
"""The page's modules, each after those that it imports."""
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const) (\$|\w+))", re.MULTILINE)


def render_page(data: Mapping[str, Any]) -> bytes:
    """Return the page with its style, its script and the data in it."""
    files = {path.name: path.read_text() for path in STATIC.iterdir()}
    style = files["uplot.css"] + files["style.css"]
    modules = (_wrap(name, files[f"{name}.js"]) for name in _MODULES)
    script = "\n".join([files["theme.js"], files["uplot.js"], *modules])
    policy = (
        f"default-src 'none'; img-src data:; script-src '{_hash(script)}'; "
        f"style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    # No `<` is left in the data: nothing in it ends its element.
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    page = re.sub(r"\s*<(link|script)\b[^\n]*", "", files["index.html"])
    head, body = page.split("</head>")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    head = head.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n  {meta}')
    inner = f'<script type="application/json" id="data">{text}</script><script>{script}</script>'
    body = body.replace("</body>", f"{inner}</body>")
    return f"{head}<style>{style}</style></head>{body}".encode()


def _wrap(name: str, text: str) -> str:
    """Return a module as a function that returns what it exports: a file has no other to import."""
    names = ", ".join(match[2] for match in _EXPORT.finditer(text))
    text = _IMPORT.sub(r"const \1 = module_\2;", text)
    text = _EXPORT.sub(r"\1", text)
    return f"const module_{name} = (() => {{\n{text}\nreturn {{ {names} }};\n}})();"


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
