"""The table of `rollway bench verl`, in the terminal and in the docs."""

from __future__ import annotations

from rollway.bench.verl import LOADS, ArmFigures, VerlReport
from rollway.errors import UsageError

COLUMNS = (
    *("load", "affinity", "prefix hits", "first turns", "later turns", "with its group"),
    *("ms per token", "against off"),
)
BEGIN, END = "<!-- rollway bench verl -->", "<!-- end -->"
"""Lines around the table in the docs."""


def format_arm(report: VerlReport, row: ArmFigures) -> tuple[str, ...]:
    """Format the figures of one arm as a row of the table."""
    prompts = next(load.prompts for load in LOADS if load.name == row.load)
    low, high = row.spread("hit_rate")
    fast, slow = row.spread("ms_per_token")
    ratio = report.time_ratio(row)
    return (
        f"{prompts} prompts, {row.load}",
        row.arm,
        f"{row.mean('hit_rate'):.3f} ({low:.3f} to {high:.3f})",
        f"{row.mean('first_turns'):.3f}",
        f"{row.mean('later_turns'):.3f}",
        f"{row.mean('together'):.2f}",
        f"{row.mean('ms_per_token'):.2f} ({fast:.2f} to {slow:.2f})",
        "" if ratio is None else f"{ratio:.2f}",
    )


def format_markdown(report: VerlReport) -> str:
    """Format the table as Markdown."""
    lines = ["|" + "|".join(f" {name} " for name in COLUMNS) + "|"]
    lines.append("|---|---|" + "---:|" * (len(COLUMNS) - 2))
    lines += ["| " + " | ".join(format_arm(report, row)) + " |" for row in report.rows]
    return "\n".join(lines)


def replace_table(text: str, table: str) -> str:
    """Replace the table between the marker lines of a document."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(
            "The document has no place for the table.", f"Add the lines {BEGIN} and {END}."
        )
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"
