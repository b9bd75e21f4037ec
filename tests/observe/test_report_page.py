"""A report in a real Chromium: it stands alone, at any width, and shows what the dashboard does."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollway.observe.report import write_report
from tests.observe.browser import needs_chromium, open_browser
from tests.observe.make_run import Writer, write_run

pytestmark = needs_chromium


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("count", [1, 2])
async def test_a_report_asks_for_nothing_and_fits(tmp_path: Path, width: int, count: int) -> None:
    runs = [tmp_path / name for name in "ab"[:count]]
    for number, run in enumerate(runs):
        write_run(run, workers=12 + number, seconds=300)
    write_report(runs, tmp_path / "report.html")
    async with open_browser() as browser:
        page = await browser.open((tmp_path / "report.html").as_uri(), width, 900)
        await page.wait_for("document.body?.dataset.ready === 'yes'")
        assert await page.run("document.querySelectorAll('.u-wrap canvas').length") > 8
        assert await page.run("document.documentElement.scrollWidth") <= width
        assert await page.run("document.querySelectorAll('#fleet tbody tr').length") == 12
        await page.run("document.querySelector('#refit-strip div').click()")
        first = "document.querySelector('#refit-strip div').ariaSelected === 'true'"
        await page.wait_for(first)
        await page.wait_for("document.querySelectorAll('.track-row').length === 13")
        assert "did not end well" in await page.run("document.querySelector('#findings').innerText")
        rows = "document.querySelectorAll('#figures tbody tr').length"
        assert await page.run(rows) > 15
        if count == 2:
            await page.run(
                "(() => { const c = document.querySelector('#run-choice'); c.value = '1';"
                "c.dispatchEvent(new Event('change')); })()"
            )
            await page.wait_for("document.querySelectorAll('#fleet tbody tr').length === 13")
        assert page.problems == []
        assert page.requests == [(tmp_path / "report.html").as_uri()]


async def test_what_is_empty_says_why(tmp_path: Path) -> None:
    nothing, short = tmp_path / "nothing", tmp_path / "short"
    nothing.mkdir()
    (nothing / "driver-1-a.jsonl").write_text("")
    write_run(short, seconds=3)
    rollouts = {"kind": "rollouts", "t": 1.7e9 + 2, "seconds": 2.0, "count": 1, "tokens": 10}
    Writer(short).write("driver", rollouts)
    async with open_browser() as browser:
        for run, finding in ((nothing, "Nothing has been recorded"), (short, "Nothing failed")):
            write_report([run], tmp_path / "report.html")
            page = await browser.open((tmp_path / "report.html").as_uri())
            await page.wait_for("document.body?.dataset.ready === 'yes'")
            assert finding in await page.run("document.querySelector('#findings').innerText")
            bars = await page.run("document.querySelector('#refit-bars').innerText")
            assert "There was no refit yet" in bars
            bare = await page.run(
                "[...document.querySelectorAll('.plot')].map((plot) => plot.className)"
            )
            assert bare[0] == ("plot bare" if run is nothing else "plot") and "plot bare" in bare
            assert page.problems == []
