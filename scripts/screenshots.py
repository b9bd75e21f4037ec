"""Take the pictures of the docs from real runs, light and dark, so that they never age.

    python scripts/screenshots.py                  run the demo and a chaos run, take all pictures
    python scripts/screenshots.py --only demo      those of one of them
    python scripts/screenshots.py --run demo=DIR   those of a run that is recorded already

It needs Debian's chromium, and what the demo needs. Pictures go to docs/images, each of at most
150 kB.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the browser of the tests

from rollway.observe.dash.browsers import DashAccess  # noqa: E402
from rollway.observe.dash.open_run import open_directory  # noqa: E402
from rollway.observe.dash.server import Dashboard, serve  # noqa: E402
from rollway.observe.dash.view import Watch  # noqa: E402
from rollway.observe.read import list_runs  # noqa: E402
from rollway.observe.report import write_report  # noqa: E402

RUNS = {
    "demo": ["demo", "--steps", "12"],
    "chaos": ["chaos", "--rounds", "6", "--quiet", "--set", "observe=on"],
}
SIZES = {"wide": (1280, 1000), "narrow": (400, 1000)}
LARGEST = 150_000
_SETTLE_SECONDS = 0.5  # uPlot draws in a frame after the data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*RUNS], help="the pictures of this run only")
    text = "take a recorded run instead of starting one; repeatable"
    parser.add_argument("--run", action="append", default=[], metavar="NAME=DIR", help=text)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="where to")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    recorded = dict(text.split("=", 1) for text in options.run)
    names = [options.only] if options.only else [*recorded] or [*RUNS]
    with tempfile.TemporaryDirectory(prefix="rollway-pictures-") as home:
        for name in names:
            given = recorded.get(name)
            run = Path(given) if given else record(RUNS[name], Path(home) / name)
            asyncio.run(take_pictures(name, run, options.out))


def record(command: list[str], home: Path) -> Path:
    """Run a command of Rollway in a home of its own, and return the run that it recorded."""
    environment = {**os.environ, "ROLLWAY_HOME": str(home)}
    out = ["--out", str(home / "out")] if command[0] == "demo" else []
    subprocess.run(
        [sys.executable, "-m", "rollway.cli", *command, *out], env=environment, check=True
    )
    return list_runs(home / "runs")[0]


async def take_pictures(name: str, run: Path, out: Path) -> None:
    # Not at the top: the tests' browser needs pytest, which only a development install has.
    from tests.observe.browser import open_browser

    async with open_browser() as browser:
        async with serve(Dashboard(open_directory(run)), DashAccess(), "127.0.0.1", 0) as url:
            ready = "document.body?.dataset.ready === 'yes'"
            for size, place in SIZES.items():
                await take(browser, url, f"dash-{name}-{size}", place, out, ready)
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "report.html"
            write_report([run], file)
            await take(browser, file.as_uri(), f"report-{name}", SIZES["wide"], out)
            if name == "demo":
                file.with_suffix(".svg").write_text(draw_terminal(run))
                address = file.with_suffix(".svg").as_uri()
                await take(browser, address, "top", (1200, 760), out, schemes=("dark",))


async def take(
    browser: Any,
    url: str,
    name: str,
    size: tuple[int, int],
    out: Path,
    ready: str = "document.readyState === 'complete'",
    schemes: tuple[str, ...] = ("light", "dark"),
) -> None:
    for scheme in schemes:
        page = await browser.open(url, *size)
        await page.prefer(scheme)
        await page.wait_for(ready)
        await asyncio.sleep(_SETTLE_SECONDS)
        file = out / f"{name}-{scheme}.png"
        await page.take_picture(file)
        shrink(file)
        print(f"{file}: {file.stat().st_size / 1e3:.0f} kB")
        if page.problems:
            raise SystemExit(f"The page has problems: {page.problems}")


def draw_terminal(run: Path) -> str:
    """Return `rollway top` as SVG, without a terminal."""
    from rich.console import Console

    from rollway.observe.dash.live_table import draw

    watch = Watch(open_directory(run))
    watch.load()
    console = Console(record=True, width=140, file=io.StringIO())
    console.print(draw(watch))
    drawing = console.export_svg(title="rollway top")
    return re.sub(r"@font-face\s*\{.*?\}", "", drawing, flags=re.DOTALL)  # fonts from a network


def shrink(file: Path) -> None:
    """Write a picture with a palette of its 256 commonest colours: nothing is shifted but the
    softest edges, which are not among them."""
    from PIL import Image

    with Image.open(file) as picture:
        plain = picture.convert("RGB")
    counts: Any = plain.getcolors(1 << 24)
    colors = sorted(counts, reverse=True)[:256]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, color in colors for part in color])
    plain.quantize(palette=palette, dither=Image.Dither.NONE).save(file, optimize=True)
    if file.stat().st_size > LARGEST:
        raise SystemExit(f"{file} has {file.stat().st_size:,} bytes, more than {LARGEST:,}.")


if __name__ == "__main__":
    main()
