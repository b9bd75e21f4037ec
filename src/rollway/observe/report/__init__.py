"""`rollway report`: what happened in a run, as one HTML file; or two runs, compared.

run directory ──► summary (one pass, bounded memory) ──► findings, figures ──► page with plots
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollway.errors import RollwayError, UsageError
from rollway.observe.report.compare import compare, list_figures
from rollway.observe.report.findings import find_all
from rollway.observe.report.page import describe_run, list_notes, render_report
from rollway.observe.report.summary import Summary, read_summary
from rollway.observe.runs import get_last_write, is_alive, list_runs, read_headers
from rollway.stack.state import home

__all__ = ["Summary", "describe_report", "leave_reports", "read_summary", "write_report"]

_MOST_REPORTS = 50


def write_report(directories: Sequence[Path], out: Path) -> list[Summary]:
    """Read one run, or two, write their report, and return what was read."""
    summaries = [read_summary(directory) for directory in directories]
    for summary, run in zip(summaries, directories, strict=True):
        if not summary.ended and any(is_alive(header, run) for header in read_headers(run)):
            summary.ended = "running"
    text = render_report(summaries)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    except OSError as error:
        raise UsageError(
            f"The report cannot be written to {out}: {error.strerror or error}.",
            "Choose another file with --out.",
        ) from error
    return summaries


@contextmanager
def leave_reports(tell: Callable[[str], None]) -> Iterator[None]:
    """Write the report of every run that is recorded in the block, below Rollway's home."""
    began = time.time()
    try:
        yield
    finally:
        for run in list_runs(home() / "runs"):
            if get_last_write(run) < began:
                break  # the others are older
            out = home() / "reports" / f"{run.name}.html"
            try:
                write_report([run], out)
            except (OSError, RollwayError) as error:  # what was measured matters more
                tell(f"no report of {run.name}: {error}")
            else:
                tell(f"report of {run.name}: {out}")
        _prune(home() / "reports")


def _prune(directory: Path) -> None:
    reports = sorted(directory.glob("*.html"), key=lambda path: path.stat().st_mtime)
    for path in reports[:-_MOST_REPORTS]:
        path.unlink(missing_ok=True)


def describe_report(summaries: Sequence[Summary]) -> dict[str, Any]:
    """Return a report for scripts."""
    runs = [
        {
            "stack": summary.stack,
            "run": summary.run,
            "began": summary.first,
            "seconds": summary.seconds,
            "text": describe_run(summary),
            "notes": list_notes(summary),
            "findings": [finding.as_json() for finding in find_all(summary)],
            "figures": [figure.as_json() for figure in list_figures(summary)],
        }
        for summary in summaries
    ]
    if len(summaries) < 2:
        return {"runs": runs}
    return {"runs": runs, "differences": [each.as_json() for each in compare(*summaries)]}
