"""Take the pictures of the docs from real runs, light and dark, so that they never age.

    python scripts/screenshots.py            run the demo and a chaos run, and take all pictures
    python scripts/screenshots.py --run DIR  only the pictures of one recorded run

It needs Debian's chromium, and what the demo needs. Pictures go to docs/images.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the browser of the tests

from rollway.observe.dash.access import Access  # noqa: E402
from rollway.observe.dash.open_run import open_directory  # noqa: E402
from rollway.observe.dash.server import Dashboard, serve  # noqa: E402
from rollway.observe.runs import list_runs  # noqa: E402

RUNS = {
    "demo": ["demo", "--steps", "12"],
    "chaos": ["chaos", "--rounds", "6", "--quiet"],
}
SIZES = {"wide": (1280, 1000), "narrow": (400, 1000)}
_SETTLE_SECONDS = 0.5  # uPlot draws in a frame after the data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, metavar="DIR", help="pictures of this run only")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="where to")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.run is not None:
        asyncio.run(take_pictures({"dash": options.run}, options.out))
        return
    with tempfile.TemporaryDirectory(prefix="rollway-pictures-") as home:
        runs = {name: record(command, Path(home) / name) for name, command in RUNS.items()}
        asyncio.run(take_pictures(runs, options.out))


def record(command: list[str], home: Path) -> Path:
    """Run a command of Rollway in a home of its own, and return the run that it recorded."""
    environment = {**os.environ, "ROLLWAY_HOME": str(home)}
    subprocess.run([sys.executable, "-m", "rollway.cli", *command], env=environment, check=True)
    return list_runs(home / "runs")[0]


async def take_pictures(runs: dict[str, Path], out: Path) -> None:
    # Not at the top: the tests' browser needs pytest, which only a development install has.
    from tests.observe.browser import open_browser

    async with open_browser() as browser:
        for name, run in runs.items():
            dashboard = Dashboard(open_directory(run))
            async with serve(dashboard, Access(), "127.0.0.1", 0) as url:
                await take(browser, url, name, out)


async def take(browser: Any, url: str, name: str, out: Path) -> None:
    for scheme in ("light", "dark"):
        for size, (width, height) in SIZES.items():
            page = await browser.open(url, width, height)
            await page.prefer(scheme)
            await page.wait_for("document.body?.dataset.ready === 'yes'")
            await asyncio.sleep(_SETTLE_SECONDS)
            file = out / f"{name}-{size}-{scheme}.png"
            await page.take_picture(file)
            print(file)
            if page.problems:
                raise SystemExit(f"The page has problems: {page.problems}")


if __name__ == "__main__":
    main()
