"""No figure on the page or in a report without its metric in docs/metrics.md.

Each walk takes everything that is shown and has a digit. What is no figure of a run is listed here
by its place: names, times, texts of others, scales of plots.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollway.observe.dash.browsers import DashAccess
from rollway.observe.dash.open_run import open_directory
from rollway.observe.dash.server import Dashboard, serve
from rollway.observe.dash.view import Watch
from rollway.observe.report import list_figures, write_report
from tests.observe.browser import needs_chromium, open_browser
from tests.observe.make_run import MadeRun, Writer

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
DOCUMENTED = {
    name
    for line in DOCS.read_text().splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`([^`]+)`", line.split("|")[1])
}
"""The first column of the tables: what is recorded."""
BEGAN = 1.7e9


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which everything happens that can be shown."""
    directory = tmp_path_factory.mktemp("names") / "run"
    run, writer = MadeRun(3), Writer(directory)
    writer.write_all(run.start(BEGAN))
    for step in range(1, 5):
        writer.write_all(run.train(BEGAN + 12 * step, step))
    writer.write_all(run.refit(BEGAN + 70, 5, fails=True))
    writer.write_all(run.kill(BEGAN + 80))
    writer.write_all(run.train(BEGAN + 90, 6))
    fields = {"seconds": 2.0, "count": 3, "tokens": 90, "cut": 2, "continued": 1, "not_believed": 4,
              "retries": {"worker gone": 5}, "versions": {"6": 90}}  # fmt: skip
    writer.write("driver", {"kind": "rollouts", "t": BEGAN + 103, **fields})
    writer.write("driver", {"kind": "forks", "t": BEGAN + 104, "reason": "edited", "count": 2})
    writer.write("driver", {"kind": "gateway", "t": BEGAN + 105, "sessions": 7, "turns": 21})
    return directory


def has_figure(text: str) -> bool:
    return re.search(r"\d", re.sub(r"\b(p\d\d|k[13])\b", "", text)) is not None


def test_the_docs_were_read() -> None:
    assert {"rollway_refit_seconds", "vllm:kv_cache_usage_perc"} <= DOCUMENTED
    assert len(DOCUMENTED) > 80


# --- the page ------------------------------------------------------------------------------------

PAGE_TEXTS = {
    "#stack, #phase, #moment, #notes": "the name of the run, and times",
    "#figures p, #run-choice": "the names of a report's runs, and their times",
    "[data-column=name], [data-column=node], [data-column=role]": "names",
    "[data-column=last_event], #event-list, #event-summary": "events",
    "[data-part=sentence], [data-part=threshold]": "explain the figure above them",
    ".who, #refit-facts dd:not([data-metric]), .error": "names, times, texts of failures",
    ".axis, .scale, .ends": "scales of plots",
}
WALK = """(exempt) => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = { metrics: [], nameless: [] };
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const text = node.data.replace(/\\b(p\\d\\d|k[13])\\b/g, "");  // names of figures
    if (!/\\d/.test(text) || node.parentElement.closest("script, style")) continue;
    const figure = node.parentElement.closest("[data-metric]");
    if (figure) found.metrics.push(figure.dataset.metric);
    else if (!node.parentElement.closest(exempt)) found.nameless.push(node.data.trim());
  }
  const figures = document.querySelectorAll("[data-metric]");
  found.metrics.push(...[...figures].map((each) => each.dataset.metric));
  return found;
}"""


@needs_chromium
async def test_every_figure_of_the_page_has_its_metric(run_dir: Path) -> None:
    dashboard = Dashboard(open_directory(run_dir))
    async with (
        serve(dashboard, DashAccess(), "127.0.0.1", 0) as url,
        open_browser() as browser,
    ):
        page = await browser.open(url)
        await page.wait_for("document.body?.dataset.ready === 'yes'")
        await page.wait_for("document.querySelectorAll('[data-instance]').length === 3")
        shown = await page.run(f"({WALK})({', '.join(PAGE_TEXTS)!r})")
    assert shown["nameless"] == []
    assert set(shown["metrics"]) - DOCUMENTED == set()
    assert len(set(shown["metrics"])) > 30


# --- a report ------------------------------------------------------------------------------------


@needs_chromium
async def test_every_figure_of_a_report_has_its_metric(run_dir: Path, tmp_path: Path) -> None:
    write_report([run_dir, run_dir], tmp_path / "report.html")
    async with open_browser() as browser:
        page = await browser.open((tmp_path / "report.html").as_uri())
        await page.wait_for("document.body?.dataset.ready === 'yes'")
        shown = await page.run(f"({WALK})({', '.join(PAGE_TEXTS)!r})")
    assert shown["nameless"] == []
    assert set(shown["metrics"]) - DOCUMENTED == set()
    assert len(set(shown["metrics"])) > 30


# --- the values ----------------------------------------------------------------------------------


def test_figures_of_one_name_are_equal_wherever_they_are_shown(run_dir: Path) -> None:
    """The page, the terminal, the sinks and a report read one state."""
    watch = Watch(open_directory(run_dir))
    watch.poll()
    model, series = watch.make_model(), watch.view.state
    totals = model["rollouts"]["totals"]
    figures = {figure.metric: figure.value for figure in list_figures(series)}
    assert figures.keys() <= DOCUMENTED
    for metric, shown in {
        "rollway_rollouts_total": totals["count"],
        "rollway_tokens_total": totals["tokens"],
        "rollway_rollouts_cut_total": totals["cut"],
        "rollway_answers_not_believed_total": model["exactness"]["not_believed"],
    }.items():
        recorded = series.values[metric][""]
        assert shown == recorded == figures[metric], metric
    retries = sum(series.values["rollway_retries_total"].values())
    assert sum(model["rollouts"]["retries"].values()) == retries == figures["rollway_retries_total"]
    restarts = sum(series.values["rollway_restarts_total"].values())
    assert figures["rollway_restarts_total"] == restarts
    assert sum(row["restarts"] for row in model["fleet"]) == restarts
    last = model["refits"][0]
    assert [last["seconds"]] == list(series.values["rollway_refit_seconds"].values())
    assert last["paused_seconds"] == series.values["rollway_refit_paused_seconds"][""]
    assert model["trainer"][-1]["seconds"] == series.values["rollway_step_seconds"][""]
    versions = {row["name"]: row["version"] for row in model["fleet"]}
    for key, version in series.values["rollway_weight_version"].items():
        assert versions[key.split(",")[0].removeprefix("worker=")] == version
