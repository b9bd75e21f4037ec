"""Prometheus: a file with the present value of every metric of ours, replaced as it changes.

The format is that of a page, which node_exporter's textfile collector reads, or any file server.
Families of Dynamo and vLLM are left out: Prometheus scrapes those itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rollway import private
from rollway.observe.metrics import OWN, parse_labels_key
from rollway.observe.series import Values
from rollway.observe.sinks.trainer_names import Histogram

PAGE_TYPE = "text/plain; version=0.0.4"
KEPT_VERSIONS = 8
"""How many versions a page has. A run has thousands, and Prometheus keeps every series."""


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
    return render_runs([({"stack": stack} if stack else {}, values)])


def render_runs(runs: Sequence[tuple[Mapping[str, str], Values]]) -> str:
    """Return the values of several runs as one page, each with labels that tell it from others."""
    lines: list[str] = []
    for metric in OWN:
        samples = [
            _make_sample(metric.name, {**labels, **parse_labels_key(key)}, value)
            for labels, values in runs
            for key, value in values.get(metric.name, {}).items()
        ]
        if samples:
            lines.append(f"# HELP {metric.name} {metric.help}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            lines += samples
    return "\n".join([*lines, ""])


def _make_sample(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
    return f"{name}{{{shown}}} {value!r}" if shown else f"{name} {value!r}"


def keep_newest_versions(values: Values, most: int = KEPT_VERSIONS) -> Values:
    """Return the values without those of old weight versions."""
    kept: Values = {}
    for name, keys in values.items():
        versions = {key: parse_labels_key(key).get("version", "") for key in keys}
        numbers = {int(text) for text in versions.values() if text.isdecimal()}
        if len(numbers) <= most:
            kept[name] = keys
            continue
        oldest = sorted(numbers)[-most]
        is_kept = {k: not text.isdecimal() or int(text) >= oldest for k, text in versions.items()}
        kept[name] = {key: value for key, value in keys.items() if is_kept[key]}
    return kept


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
