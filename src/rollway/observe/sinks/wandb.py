"""wandb, also offline: the metrics of each step of the trainer, in one committed call.

wandb shows a summary and an empty history for values that were logged and not committed, so a step
is logged once, when it ends. Without a login the run is offline, which is said once.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollway.errors import UsageError
from rollway.observe.series import Values
from rollway.observe.sinks import list_tags
from rollway.observe.sinks.trainer_names import Histogram, list_edges

log = logging.getLogger(__name__)


class Wandb:
    """Logs to a run of wandb: one that is open, or a new one."""

    name = "wandb"

    def __init__(self, project: str, directory: Path, *, mode: str | None = None) -> None:
        """`mode` is wandb's: `online`, `offline`; by default online if there is a login."""
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise UsageError("wandb is not installed.", "`pip install wandb`.") from None
        self._make_histogram: Any = getattr(wandb, "Histogram", None)
        self._owns_run = getattr(wandb, "run", None) is None
        if mode is None and self._owns_run and not _has_login():
            mode = "offline"
            log.warning("wandb has no login: the run is kept offline in %s", directory)
        self._run: Any = (
            wandb.init(project=project, dir=str(directory), mode=mode)
            if self._owns_run
            else wandb.run
        )

    def update(self, values: Values) -> None:
        """Do nothing: points belong to steps."""

    def end_step(self, step: int, values: Values, lengths: Mapping[str, Histogram]) -> None:
        histograms = {
            tag: self._make_histogram(np_histogram=list_edges(histogram))
            for tag, histogram in lengths.items()
        }
        self._run.log({**list_tags(values), **histograms, "rollway_step": step}, commit=True)

    def close(self) -> None:
        if self._owns_run:
            self._run.finish()


def _has_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
        return True
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return "wandb" in netrc.read_text()
    except (OSError, ValueError):
        return False
