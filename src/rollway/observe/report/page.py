"""One self-contained HTML file of one or two runs: findings, figures, plots, workers, events.

It has no script and loads nothing: the content policy forbids both. All text of a run is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib import resources

from rollway.observe.bins import Bins
from rollway.observe.dash import verdicts
from rollway.observe.figures import (
    NONE,
    count,
    format_number,
    format_seconds,
    format_share,
    format_utc,
)
from rollway.observe.metrics import PERCENTILES
from rollway.observe.report.compare import Difference, compare, list_figures
from rollway.observe.report.findings import KINDS, Finding, find_all
from rollway.observe.report.parts import WorkerSummary
from rollway.observe.report.plots import (
    Line,
    Points,
    draw_lines,
    draw_shares,
    draw_stack,
    draw_versions,
)
from rollway.observe.report.summary import PARTS, Summary

_TITLES = {
    "failed": "What failed",
    "slow": "What was slow",
    "stale": "What was stale",
    "prevented": "What was prevented",
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MOST_WORKERS, _MOST_EVENTS = 200, 400
_NAMES = ("A", "B")


def render_report(summaries: Sequence[Summary]) -> str:
    """Return the page of one run, or of two that are compared."""
    title = " against ".join(_get_name(summary) for summary in summaries)
    body = "".join(_render_body(summaries))
    style = (resources.files("rollway.observe.report") / "report.css").read_text()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)} · Rollway</title>'
        f"<style>{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def _render_body(summaries: Sequence[Summary]) -> Iterator[str]:
    yield "<h1>" + " against ".join(escape(_get_name(summary)) for summary in summaries) + "</h1>"
    for number, summary in enumerate(summaries):
        mark = f"{_NAMES[number]}: " if len(summaries) > 1 else ""
        yield f'<p class="muted">{mark}{escape(describe_run(summary))}</p>'
        for note in list_notes(summary):
            yield f'<p class="note">{mark}{escape(note)}</p>'
    if len(summaries) > 1:
        yield _render_comparison(compare(*summaries))
    for number, summary in enumerate(summaries):
        name = f" of {_NAMES[number]}" if len(summaries) > 1 else ""
        yield f"<h2>Findings{name}</h2>{''.join(_render_findings(find_all(summary)))}"
    if len(summaries) == 1:
        yield _render_figures(summaries[0])
    yield f'<h2>Over time</h2><div class="plots">{"".join(_render_plots(summaries))}</div>'
    for number, summary in enumerate(summaries):
        name = f" of {_NAMES[number]}" if len(summaries) > 1 else ""
        yield _render_workers(summary, name)
        yield _render_events(summary, name)


def _get_name(summary: Summary) -> str:
    return " ".join(filter(None, (summary.stack, summary.run[:16]))) or "a run"


def describe_run(summary: Summary) -> str:
    """Return when a run was, and how it ended."""
    if summary.first is None:
        return "Nothing was recorded."
    ends = {"": "its record stops without an end", "failed": "it failed", "running": "it runs"}
    end = ends.get(summary.ended, "it was stopped")
    version = f", Rollway {summary.rollway}" if summary.rollway else ""
    return (
        f"{format_utc(summary.first)} to {format_utc(summary.last)} UTC, "
        f"{format_seconds(summary.seconds)}; {end}; "
        f"{count(len(summary.workers), 'worker')}{version}."
    )


def list_notes(summary: Summary) -> list[str]:
    """Return what of the record could not be read."""
    notes = []
    if summary.is_newer:
        notes.append("A newer Rollway wrote a part of this run: its report tells more.")
    if summary.problems:
        lines = ", ".join(f"{number:,} {reason}" for reason, number in summary.problems.items())
        notes.append(f"Lines of the record that could not be read: {lines}.")
    return notes


# --- findings and figures ------------------------------------------------------------------------


def _render_findings(findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        yield '<p class="good">Nothing failed, nothing was slow, nothing was stale.</p>'
    for kind in KINDS:
        own = [finding for finding in findings if finding.kind == kind]
        if own:
            yield f"<h3>{_TITLES[kind]}</h3><ul>{''.join(map(_render_finding, own))}</ul>"


def _render_finding(finding: Finding) -> str:
    at = "" if finding.t is None else f' <span class="muted">{format_utc(finding.t)} UTC</span>'
    details = "".join(f"<li>{escape(line)}</li>" for line in finding.details)
    more = f"<details><summary>details</summary><ul>{details}</ul></details>" if details else ""
    return (
        f'<li class="{finding.level}" data-metric="{escape(finding.metric)}">'
        f"{escape(finding.text)}{at} <code>{escape(finding.metric)}</code>{more}</li>"
    )


def _render_figures(summary: Summary) -> str:
    rows = (
        f'<tr><th scope="row">{escape(figure.label)}</th>'
        f'<td class="number" data-metric="{escape(figure.metric)}">{escape(figure.text)}</td>'
        f"<td><code>{escape(figure.metric)}</code></td></tr>"
        for figure in list_figures(summary)
    )
    return f"<h2>Figures</h2><table>{''.join(rows)}</table>"


def _render_comparison(differences: Sequence[Difference]) -> str:
    rows = []
    for each in differences:
        ratio = NONE if each.ratio is None else f"{each.ratio:.2f}"
        metric = escape(each.metric)
        word = "" if each.verdict in ("same", "other") else each.verdict
        rows.append(
            f'<tr class="{each.verdict}"><th scope="row">{escape(each.label)}</th>'
            f'<td class="number" data-metric="{metric}">{escape(each.first)}</td>'
            f'<td class="number" data-metric="{metric}">{escape(each.second)}</td>'
            f'<td class="number" data-metric="{metric}">{ratio}</td><td>{word}</td>'
            f"<td><code>{metric}</code></td></tr>"
        )
    head = "".join(f"<th>{name}</th>" for name in ("", "A", "B", "B / A", "", "metric"))
    changed = [each for each in differences if each.verdict in ("better", "worse")]
    lines = "".join(
        f'<li class="{each.verdict}" data-metric="{escape(each.metric)}">'
        f"{each.verdict}: {escape(each.describe())}</li>"
        for each in changed
    )
    summary = f"<ul>{lines}</ul>" if lines else '<p class="good">No figure differs by a tenth.</p>'
    return f"<h2>B against A</h2>{summary}<table><tr>{head}</tr>{''.join(rows)}</table>"


# --- plots ---------------------------------------------------------------------------------------

_PLOTS: tuple[
    tuple[str, tuple[tuple[str, str, str], ...], Callable[[float | None], str], float | None], ...
] = (
    ("Prompt tokens from cache", (("", "cached", "rollway_cached_share"),), format_share, 1.0),
    *(
        (
            title,
            tuple((level, f"{name} {level}", f"{metric}_{level}") for level in PERCENTILES),
            form,
            None,
        )
        for title, name, metric, form in (
            ("Time of a rollout", "latency", "rollway_rollout_seconds", format_seconds),
            ("Time to first token", "first_token", "rollway_first_token_seconds", format_seconds),
            ("Tokens of a rollout", "lengths", "rollway_rollout_tokens", format_number),
        )
    ),
    (
        "Requests in the workers",
        (
            ("running", "running", "vllm:num_requests_running"),
            ("waiting", "waiting", "vllm:num_requests_waiting"),
        ),
        format_number,
        None,
    ),
    ("KV cache in use", (("", "kv", "vllm:kv_cache_usage_perc"),), format_share, 1.0),
    (
        "Refits",
        (
            ("whole", "refit", "rollway_refit_seconds"),
            ("paused", "refit paused", "rollway_refit_paused_seconds"),
        ),
        format_seconds,
        None,
    ),
    ("Spread of versions", (("", "spread", "rollway_version_spread"),), format_number, 1.0),
)
"""Title, lines (label, series, metric), form and least height of every plot of means."""


def _render_plots(summaries: Sequence[Summary]) -> Iterator[str]:
    rates = [("", "tokens", "rollway_tokens_per_second")]
    lines = _make_lines(summaries, rates, Bins.list_rates)
    yield draw_lines("Tokens per second", lines)
    for title, series, form, most in _PLOTS:
        yield draw_lines(title, _make_lines(summaries, series, Bins.list_means), form, most=most)
    for number, summary in enumerate(summaries):
        name = f", {_NAMES[number]}" if len(summaries) > 1 else ""
        parts = {part: _get_points(summary, f"part {part}", Bins.list_means) for part in PARTS}
        yield draw_stack(f"Trainer's steps{name}", "rollway_step_part_seconds", parts)
        bounds = (verdicts.EXACT_GOOD, verdicts.EXACT_WARN)
        title = f"Mismatch k3 by version{name}"
        yield draw_versions(title, "rollway_mismatch_k3", summary.mismatch, bounds)
        yield draw_shares(
            f"Prefix hits of each worker{name}",
            "vllm:prefix_cache_hits_total_per_second",
            [
                (worker.name, [(t - worker.hits_over_time.start, share) for t, share in means])
                for worker in summary.workers.values()
                if (means := worker.hits_over_time.list_means())
            ],
            summary.seconds or 1.0,
        )


def _make_lines(
    summaries: Sequence[Summary],
    series: Sequence[tuple[str, str, str]],
    read: Callable[[Bins], list[tuple[float, float]]],
) -> list[Line]:
    lines = []
    for number, summary in enumerate(summaries):
        name = f" {_NAMES[number]}" if len(summaries) > 1 else ""
        for place, (label, key, metric) in enumerate(series):
            points = _get_points(summary, key, read)
            style = f"line-{place + 1}{' second' if number else ''}"
            lines.append(Line(f"{label}{name}".strip(), metric, points, style))
    return lines


def _get_points(
    summary: Summary, name: str, read: Callable[[Bins], list[tuple[float, float]]]
) -> Points:
    bins = summary.get_series(name)
    if bins is None or summary.first is None:
        return []
    return [(t - summary.first, value) for t, value in read(bins)]


# --- workers and events --------------------------------------------------------------------------


_COLUMNS = (
    ("worker", ""),
    ("state", "rollway_workers"),
    ("version", "rollway_weight_version"),
    ("hits", "vllm:prefix_cache_hits_total_per_second"),
    ("KV, mean", "vllm:kv_cache_usage_perc"),
    ("restarts", "rollway_restarts_total"),
    ("slow in refits", "rollway_refit_phase_seconds"),
    ("failed refits", "rollway_refits_total"),
    ("node", ""),
    ("role", ""),
)


def _render_workers(summary: Summary, name: str) -> str:
    workers = sorted(summary.workers.values(), key=_rank_trouble)
    rows = []
    for worker in workers[:_MOST_WORKERS]:
        texts = (
            worker.name,
            worker.state,
            NONE if worker.version is None else str(worker.version),
            format_share(worker.hits / worker.queries if worker.queries else None),
            format_share(worker.kv / worker.samples if worker.samples else None),
            str(worker.restarts),
            f"{worker.slow_refits} of {worker.refits}",
            str(worker.failed_refits),
            worker.node or "here",
            worker.role or NONE,
        )
        cells = (
            f'<td data-metric="{metric}">{escape(text)}</td>'
            if metric
            else f"<td>{escape(text)}</td>"
            for text, (_, metric) in zip(texts, _COLUMNS, strict=True)
        )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th>{title}</th>" for title, _ in _COLUMNS)
    rest = len(workers) - _MOST_WORKERS
    more = f'<p class="muted">and {rest:,} more without trouble</p>' if rest > 0 else ""
    return (
        f"<details open><summary>Workers{name}</summary>"
        f"<table><tr>{head}</tr>{''.join(rows)}</table>{more}</details>"
    )


def _rank_trouble(worker: WorkerSummary) -> tuple[int, ...]:
    """Return a key that has workers with trouble first; others stay as they are."""
    return (-worker.failed_refits, -worker.restarts, -worker.slow_refits)


def _render_events(summary: Summary, name: str) -> str:
    events = summary.list_bad_events()
    rows = (
        f'<tr><td class="time">{format_utc(t)}</td><td class="bad">{escape(event)}</td>'
        f"<td>{escape(worker)}</td><td>{escape(detail)}</td></tr>"
        for t, event, worker, detail in events[:_MOST_EVENTS]
    )
    head = "".join(f"<th>{title}</th>" for title in ("time, UTC", "event", "worker", "detail"))
    body = f"<table><tr>{head}</tr>{''.join(rows)}</table>" if events else "<p>None.</p>"
    return f"<details><summary>Events that were failures{name}</summary>{body}</details>"
