"""Prometheus: a file with the present value of every metric of ours, replaced as it changes.

The format is that of a page, which node_exporter's textfile collector reads, or any file server.
Families of Dynamo and vLLM are left out: Prometheus scrapes those itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollway import private
from rollway.observe.metrics import OWN, parse_labels_key
from rollway.observe.series import Values
from rollway.observe.sinks.trainer_names import Histogram


class PrometheusFile:
    """Writes a file whose name ends with `.prom`."""

    name = "Prometheus"

    def __init__(self, path: Path, stack: str = "") -> None:
        self._path = path
        self._stack = stack

    def update(self, values: Values) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Replaced as a whole, so that nobody reads half a page.
        private.replace_file(self._path, render_page(values, self._stack).encode())

    def end_step(self, step: int, values: Values, lengths: Mapping[str, Histogram]) -> None:
        """Do nothing: Prometheus has its own times."""

    def close(self) -> None:
        """Remove the file: what it says is no longer so."""
        self._path.unlink(missing_ok=True)


def render_page(values: Values, stack: str = "") -> str:
    """Return the values of our own metrics as a Prometheus page."""
    lines: list[str] = []
    for metric in OWN:
        keys = values.get(metric.name)
        if not keys:
            continue
        lines.append(f"# HELP {metric.name} {metric.help}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        for key, value in keys.items():
            labels = {**({"stack": stack} if stack else {}), **parse_labels_key(key)}
            shown = ",".join(f'{name}="{_escape(text)}"' for name, text in labels.items())
            lines.append(f"{metric.name}{{{shown}}} {value!r}" if shown else
                         f"{metric.name} {value!r}")  # fmt: skip
    return "\n".join([*lines, ""])


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
