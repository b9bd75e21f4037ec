"""Write docs/metrics.md from the table of metrics: `python scripts/metrics_page.py`.

The table is in rollway.observe.metrics. A test requires that the page is up to date.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rollway.observe.metrics import LENGTHS, OWN, SCRAPED, TRAINER_NAMES, TRAINER_PREFIX, Metric

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
INTRO = """# Metrics

<!-- Written by scripts/metrics_page.py from rollway.observe.metrics: edit that, run it again. -->

These names are the same in a recorded run, on the page, in TensorBoard, wandb and Prometheus
([observe.md](observe.md)). They do not change between releases of Rollway. Where Dynamo or vLLM has
renamed a family, Rollway looks for the other names too and records it under the first.

A counter of Dynamo or vLLM is recorded as `NAME_per_second`. Where the table lists the plain name
too, that is the sum since sampling began, which does not fall when a process restarts. A histogram
is recorded as three percentiles of what was observed since the sample before. A process that does
not answer has no value: a gap, never a zero.
"""

TRAINERS = """## Trainers' names

With `Feed(…, trainer_names=True)`, TensorBoard and wandb also get what users of trainers know, of
the time before the step's refit: of a gauge the mean, of a counter the last value. The names are
there at every step; without a sample the average is NaN. Histograms count by powers of two.
"""


def render_page() -> str:
    workers = [metric for metric in SCRAPED if metric.source == "worker"]
    frontend = [metric for metric in SCRAPED if metric.source == "frontend"]
    parts = [
        INTRO,
        "## Rollway\n",
        _render_own(OWN),
        "## Workers\n\nFrom the system port of every worker, with the labels `worker` and, with\n"
        "prefill and decode apart, `role`; percentiles are over all workers of a role.\n",
        _render_scraped(workers),
        "## Frontend\n",
        _render_scraped(frontend),
        TRAINERS,
        _render_trainers(),
    ]
    return "\n".join(parts)


def _render_own(metrics: Iterable[Metric]) -> str:
    lines = ["| name | kind | unit | labels | from | meaning |", "|---|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(
            f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | `{metric.source}` | "
            f"{metric.help} |"
        )
    return "\n".join([*lines, ""])


def _render_scraped(metrics: Iterable[Metric]) -> str:
    lines = ["| recorded as | family | unit | other names | meaning |", "|---|---|---|---|---|"]
    for metric in metrics:
        names = "<br>".join(f"`{name}`" for name in metric.list_names())
        aliases = "<br>".join(f"`{name}`" for name in metric.aliases)
        lines.append(f"| {names} | {metric.kind} | {metric.unit} | {aliases} | {metric.help} |")
    return "\n".join([*lines, ""])


def _render_trainers() -> str:
    lines = ["| name | computed from |", "|---|---|"]
    for name, source in TRAINER_NAMES.items():
        lines.append(
            f"| `{TRAINER_PREFIX}per_worker_{name}`, with the label `worker` | `{source}` |"
        )
        lines.append(f"| `{TRAINER_PREFIX}average_{name}` | `{source}` |")
    lines += [f"| `{name}` | lengths of rollouts: {source} |" for source, name in LENGTHS.items()]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(render_page())
