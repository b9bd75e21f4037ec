"""A report in a real Chromium: it stands alone, at any width, light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollway.observe.report import write_report
from tests.observe.browser import needs_chromium, open_browser
from tests.observe.make_run import write_run

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
        await page.wait_for("document.readyState === 'complete'")
        assert await page.run("document.querySelectorAll('figure').length") > 8
        assert await page.run("document.documentElement.scrollWidth") <= width
        # A line is drawn inside its plot, and in a colour that is not that of the page.
        for scheme in ("light", "dark"):
            await page.prefer(scheme)
            colors = "[getComputedStyle(document.querySelector('polyline')).stroke, \
                getComputedStyle(document.body).backgroundColor]"
            line, behind = await page.run(colors)
            assert line != behind
        assert page.problems == []
        assert page.requests == [(tmp_path / "report.html").as_uri()]
