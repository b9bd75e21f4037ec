"""Show how a stack starts and stops.

On a terminal this is a live table of the processes, elsewhere one line per change. The output goes
to stderr, so that scripts can read stdout.
"""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from rollway.stack.state import StackState

_STYLES = {
    "ready": "green",
    "failed": "red",
    "exited": "red",
    "restarting": "yellow",
    "stopping": "dim",
    "waiting": "dim",
}


class StackProgress:
    """A progress callback for `up` and `down`; use it as a context manager."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._shown: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.console.quiet:
            self._live = Live(console=self.console, refresh_per_second=8, transient=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, state: StackState) -> None:
        if self._live is not None:
            self._live.update(make_process_table(state))
        for process in state.processes:
            text = f"{process.state} {process.detail}".strip()
            if process.state == "waiting" or self._shown.get(process.name) == text:
                continue
            self._shown[process.name] = text
            if self._live is None:
                elapsed = time.time() - state.started_at
                self.console.print(f"[{elapsed:6.1f} s] {process.name}: {text}", markup=False)


def make_process_table(state: StackState) -> Table:
    """Return the processes of a stack as a table."""
    elapsed = time.time() - state.started_at
    table = Table(
        title=f"{state.name}: {state.phase} ({_format_duration(elapsed)})",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    has_roles = any(process.worker_role for process in state.processes)
    for column in (
        "process",
        *(["role"] if has_roles else []),
        "state",
        "pid",
        "restarts",
        "detail",
    ):
        table.add_column(column)
    for process in state.processes:
        style = _STYLES.get(process.state, "cyan")
        # Escaped: text of a state file must not act as markup.
        table.add_row(
            escape(process.name),
            *([escape(process.worker_role)] if has_roles else []),
            f"[{style}]{escape(process.state)}[/{style}]",
            str(process.pid or ""),
            str(process.restarts or ""),
            escape(process.detail),
        )
    return table


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
