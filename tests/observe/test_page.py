"""The page in a real Chromium, over runs that are written while it looks."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import pytest

from rollway.cli.dash import open_in_browser
from rollway.gateway.store import SessionStore
from rollway.gateway.turns import Turn
from rollway.observe.dash.browsers import DashAccess
from rollway.observe.dash.open_run import open_directory
from rollway.observe.dash.server import Dashboard, serve
from rollway.observe.dash.view import RunSource
from tests.observe.browser import Page, needs_chromium, open_browser
from tests.observe.make_run import MadeRun, Writer, make_header, write_run

pytestmark = needs_chromium
READY = "document.body?.dataset.ready === 'yes'"
MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"


@asynccontextmanager
async def open_page(source: Path | RunSource, *, port: int = 0, **size: int) -> AsyncIterator[Page]:
    """Open the dashboard of a run; at the end, nothing may have gone wrong in the page."""
    source = open_directory(source) if isinstance(source, Path) else source
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(
            serve(Dashboard(source), DashAccess(), "127.0.0.1", port)
        )
        browser = await stack.enter_async_context(open_browser())
        page = await browser.open(url, **size)
        await page.wait_for(READY)
        yield page
        assert page.problems == []
        assert page.list_foreign_requests() == []


def begin_run(directory: Path, workers: int = 3) -> tuple[MadeRun, Writer, float]:
    """Begin a run that a test goes on with."""
    run, writer, began = MadeRun(workers), Writer(directory), time.time()
    writer.write_all(run.start(began))
    return run, writer, began


async def read_bars(page: Page) -> dict[str, dict[str, float]]:
    """Return the seconds of every bar that is drawn, by worker and step."""
    script = """Object.fromEntries([...document.querySelectorAll('[data-instance]')].map((row) => [
        row.dataset.instance, Object.fromEntries([...row.querySelectorAll('[data-step]')].map(
            (bar) => [bar.dataset.step, Number(bar.dataset.seconds)]))]))"""
    bars: dict[str, dict[str, float]] = await page.run(script)
    return bars


def row(name: str, column: str) -> str:
    return f"document.querySelector('[data-worker=\"{name}\"] [data-column={column}]').innerText"


# --- what it shows --------------------------------------------------------------------------------


async def test_bars_appear_during_a_refit_and_agree_with_its_report(tmp_path: Path) -> None:
    run, writer, began = begin_run(tmp_path / "run")
    pairs = list(run.refit(began + 2, 1))
    report = next(entry["report"] for _, entry in pairs if entry["kind"] == "refit")
    async with open_page(tmp_path / "run") as page:
        writer.write_all(pair for pair in pairs if pair[1]["kind"] == "step")
        await page.wait_for("document.querySelectorAll('[data-instance]').length === 3")
        assert await page.run("document.querySelector('.outcome-running') !== null")
        assert all("load" in bars for bars in (await read_bars(page)).values())

        writer.write_all(pair for pair in pairs if pair[1]["kind"] != "step")
        await page.wait_for("document.querySelector('.outcome-running') === null")
        bars = await read_bars(page)
        for worker in report["workers"]:
            steps = bars[worker["instance_id"]]
            assert steps["preflight"] == pytest.approx(worker["preflight_seconds"], abs=2e-4)
            update = steps["load"] + steps["flush"] + steps["verify"]
            assert update == pytest.approx(worker["update_seconds"], abs=5e-4)
            pause = steps["leave"] + steps["pause"]
            assert pause == pytest.approx(worker["pause_seconds"], abs=5e-4)
            assert steps["open"] == pytest.approx(worker["resume_seconds"], abs=2e-4)


async def test_widths_of_bars_are_their_seconds(tmp_path: Path) -> None:
    run, writer, began = begin_run(tmp_path / "run")
    writer.write_all(run.refit(began + 2, 1))
    async with open_page(tmp_path / "run") as page:
        script = """[...document.querySelectorAll('[data-step]')].map((bar) => [
            bar.getBoundingClientRect().width, Number(bar.dataset.seconds)])"""
        ratios = [width / seconds for width, seconds in await page.run(script) if seconds > 0.02]
        assert max(ratios) == pytest.approx(min(ratios), rel=0.05)


async def test_a_row_turns_when_its_worker_dies_and_heals(tmp_path: Path) -> None:
    run, writer, began = begin_run(tmp_path / "run")
    pairs = list(run.kill(began + 2))
    async with open_page(tmp_path / "run") as page:
        assert await page.run(row("tiny-2", "state")) == "ready"
        assert await page.run(row("tiny-2", "version")) == "0"
        writer.write_all(iter(pairs[:2]))
        await page.wait_for(f"{row('tiny-2', 'state')} === 'exited'")
        assert (
            await page.run("document.querySelector('[data-worker=tiny-2]').className") == "row-bad"
        )
        assert await page.run(row("tiny-2", "version")) == "–"
        assert await page.run(row("tiny-1", "state")) == "ready"
        writer.write_all(iter(pairs[2:]))
        await page.wait_for(f"{row('tiny-2', 'state')} === 'ready'")
        await page.wait_for(f"{row('tiny-2', 'version')} === '0'")
        assert await page.run("document.querySelector('[data-worker=tiny-2]').className") == ""
        assert await page.run(row("tiny-2", "restarts")) in ("1", None)


async def test_an_answer_that_was_not_believed_is_counted(tmp_path: Path) -> None:
    _, writer, began = begin_run(tmp_path / "run")
    entry = {"kind": "rollouts", "t": began + 3, "seconds": 1.0, "count": 4, "tokens": 40,
             "not_believed": 1, "versions": {"0": 40}}  # fmt: skip
    figure = (
        "document.querySelector('dd[data-metric=rollway_answers_not_believed_total]').innerText"
    )
    async with open_page(tmp_path / "run") as page:
        assert await page.run(figure) == "0"
        writer.write("driver", entry)
        await page.wait_for(f"{figure} === '1'")


async def test_the_four_answers_change_with_what_happens(tmp_path: Path) -> None:
    _, writer, began = begin_run(tmp_path / "run")
    async with open_page(tmp_path / "run") as page:
        level = "document.querySelector('[data-answer=exact]').className"
        assert await page.run(level) == "answer unknown"
        for number, (k3, name) in enumerate([(1e-4, "good"), (5e-3, "warn"), (0.3, "bad")]):
            writer.write("driver", {"kind": "mismatch", "t": began + 3 + number, "version": number,
                                    "k1": 0.0, "k3": k3, "max": 0.1, "tokens": 100})  # fmt: skip
            await page.wait_for(f"{level} === 'answer {name}'")


async def test_text_from_outside_is_shown_as_text(tmp_path: Path) -> None:
    directory, began = tmp_path / "run", time.time()
    writer = Writer(directory)
    writer.write("supervisor", {**make_header(began, "supervisor", 1), "stack": MARKUP})
    worker = {"name": MARKUP, "instance": MARKUP, "node": MARKUP, "role": MARKUP, "model": MARKUP,
              "state": MARKUP, "version": 1}  # fmt: skip
    writer.write("supervisor", {"kind": "workers", "t": began, "workers": [worker]})
    writer.write("supervisor", {"kind": "event", "t": began, "event": MARKUP, "worker": MARKUP,
                                "detail": MARKUP})  # fmt: skip
    report = {"instance_id": MARKUP, "state": MARKUP, "proof": MARKUP, "error": MARKUP,
              "preflight_seconds": 1.0, "strategy": MARKUP}  # fmt: skip
    writer.write("driver", make_header(began, "driver", 2))
    writer.write("driver", {"kind": "refit", "t": began + 1, "began": began, "outcome": MARKUP,
                            "transport": MARKUP, "error": MARKUP, "bytes": 1,
                            "report": {"version": 1, "mode": MARKUP, "seconds": 1.0,
                                       "workers": [report]}})  # fmt: skip
    writer.write("driver", {"kind": "rollouts", "t": began, "seconds": 1, "count": 1, "tokens": 1,
                            "retries": {MARKUP: 1}})  # fmt: skip
    writer.write("driver", {"kind": "forks", "t": began, "reason": MARKUP, "count": 1})
    writer.write("driver", {"kind": "trainer", "t": began, "step": 1, "seconds": 1.0,
                            "parts": {MARKUP: 1.0}})  # fmt: skip
    source = open_directory(directory)
    source.log_dir = tmp_path / "logs"
    source.log_dir.mkdir()
    (source.log_dir / "tiny.log").write_text(f"{MARKUP}\n")
    async with open_page(source) as page:
        await page.wait_for("document.querySelectorAll('.event').length > 1")
        text = await page.run("document.body.innerText")
        assert text.count(MARKUP) > 10
        assert await page.run("document.querySelectorAll('main img, main b b').length") == 0
        assert await page.run("document.title") == f"{MARKUP} · Rollway"
        await page.run("import('/static/log.js').then((log) => log.openLog('tiny'))")
        await page.wait_for(f"document.getElementById('log-lines').textContent === {MARKUP!r}")


async def test_the_checks_of_these_tests_can_fail(tmp_path: Path) -> None:
    """The control: an inline script, a request to elsewhere and a console error are noticed."""
    begin_run(tmp_path / "run")
    async with open_page(tmp_path / "run") as page:
        await page.run("console.error('seen')")
        await page.run("""{ const script = document.createElement('script');
            try { script.textContent = '1'; } catch (error) { console.error(String(error)); }
            document.body.append(Object.assign(document.createElement('img'),
                                               {src: 'http://192.0.2.1/x.png'})); 0 }""")
        await page.wait_for("true")
        text = " ".join(page.problems)
        assert "seen" in text
        assert "192.0.2.1" in text
        assert "TrustedScript" in text
        page.problems.clear()
        page.requests = [url for url in page.requests if "192.0.2.1" not in url]


# --- how it is used -------------------------------------------------------------------------------


async def test_it_can_be_used_by_keyboard_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "run", workers=12, seconds=200, began=time.time() - 200)
    source = open_directory(tmp_path / "run")
    source.log_dir = tmp_path / "logs"
    source.log_dir.mkdir()
    for number in range(12):
        (source.log_dir / f"tiny-{number}.log").write_text(f"log of {number}\n")
    async with open_page(source) as page:
        focus = "document.activeElement.innerText || document.activeElement.id"
        names = "[...document.querySelectorAll('tbody tr')].map((tr) => tr.dataset.worker)"

        async def tab_to(condition: str) -> None:
            for _ in range(80):
                if await page.run(condition):
                    return
                await page.press("Tab")
            raise AssertionError(f"{condition} is never reached; at {await page.run(focus)}")

        assert (await page.run(names))[:3] == ["tiny-0", "tiny-1", "tiny-2"]
        await tab_to("document.activeElement.innerText === 'Worker'")
        await page.press("Enter")  # the other way round
        assert (await page.run(names))[:3] == ["tiny-11", "tiny-10", "tiny-9"]
        sort = "document.querySelector('th[data-key=name]').ariaSort"
        assert await page.run(sort) == "descending"

        await tab_to("document.activeElement.innerText === 'log'")
        await page.press("Enter")
        await page.wait_for("document.getElementById('log').open")
        await page.wait_for("document.getElementById('log-lines').innerText === 'log of 11'")
        await page.press("Escape")
        await page.wait_for("!document.getElementById('log').open")

        await tab_to("document.activeElement.id === 'refit-strip'")
        version = "document.querySelector('#refit-facts dd').innerText"
        newest = int(await page.run(version))
        await page.press("ArrowLeft")
        await page.wait_for(f"{version} === '{newest - 1}'")
        await page.press("End")
        await page.wait_for(f"{version} === '{newest}'")

        await page.press("e")  # jumps to the events
        assert await page.run("document.activeElement.id") == "event-list"
        await tab_to("document.activeElement.id === 'slider'")
        await page.press("Home")
        await page.wait_for("document.body.classList.contains('past')")
        await page.wait_for("document.getElementById('phase').innerText.startsWith('as it was')")
        await page.press("l")
        # The slider is an input, where letters belong to the reader.
        assert await page.run("document.body.classList.contains('past')")
        await page.press("Tab")
        assert await page.run("document.activeElement.id") == "live"
        await page.press("Enter")
        await page.wait_for("!document.body.classList.contains('past')")


async def test_a_link_to_a_moment_opens_it(tmp_path: Path) -> None:
    began = float(int(time.time())) - 200
    write_run(tmp_path / "run", workers=2, seconds=200, began=began)
    async with open_page(tmp_path / "run") as page:
        newest = int(await page.run("document.querySelector('#refit-facts dd').innerText"))
        assert newest > 10
        await page.run(f"location.hash = '#t={began + 30:.1f}'")
        await page.wait_for("document.body.classList.contains('past')")
        await page.wait_for("document.querySelector('#refit-facts dd')?.innerText === '2'")
        last = await page.run("document.querySelector('.event a').getAttribute('href').slice(3)")
        assert float(last) <= began + 30


async def test_events_are_filtered(tmp_path: Path) -> None:
    write_run(tmp_path / "run", workers=3, seconds=200, began=time.time() - 200)
    async with open_page(tmp_path / "run") as page:
        await page.run("""{ const field = document.getElementById('event-filter');
            field.value = 'TINY-2 exited'; field.dispatchEvent(new Event('input')); 0 }""")
        kinds = (
            "[...new Set([...document.querySelectorAll('.event .kind')].map((k) => k.innerText))]"
        )
        assert await page.run(kinds) == ["exited"]
        await page.run("""{ const field = document.getElementById('event-filter');
            field.value = ''; field.dispatchEvent(new Event('input'));
            const level = document.getElementById('event-level');
            level.value = 'bad'; level.dispatchEvent(new Event('change')); 0 }""")
        assert set(await page.run(kinds)) == {"exited", "refit failed"}


async def test_128_workers_are_shown_and_sorted(tmp_path: Path) -> None:
    write_run(tmp_path / "run", workers=128, seconds=60, began=time.time() - 60)
    async with open_page(tmp_path / "run") as page:
        rows = "document.querySelectorAll('#fleet-table tbody tr').length"
        assert await page.run(rows) == 128
        assert await page.run("document.querySelectorAll('[data-instance]').length") == 128
        await page.run("document.querySelector('th[data-key=kv] button').click()")
        cells = "[...document.querySelectorAll('td[data-column=kv]')]"
        shares = await page.run(f"{cells}.map((td) => parseInt(td.innerText))")
        assert shares == sorted(shares)
        await page.run("""{ const field = document.getElementById('fleet-filter');
            field.value = '10.0.0.16'; field.dispatchEvent(new Event('input')); 0 }""")
        assert await page.run(rows) == 8


# --- narrow, dark, and when things end ------------------------------------------------------------

CONTRAST = """(() => {
  const read = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map(
    (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  ).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const back = (node) => {
    for (; node; node = node.parentElement) {
      const color = read(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] > 0.99) return color;
    }
    return [255, 255, 255];
  };
  const worst = [];
  for (const node of document.querySelectorAll('main *, header *, footer *')) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || node.disabled || !node.checkVisibility() || node.closest('svg')) continue;
    const [a, b] = [light(read(getComputedStyle(node).color)), light(back(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) worst.push([node.tagName, node.className, node.innerText, ratio]);
  }
  return worst;
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_is_readable_at_400_pixels_light_and_dark(tmp_path: Path, scheme: str) -> None:
    write_run(tmp_path / "run", workers=4, seconds=200, began=time.time() - 200)
    async with open_page(tmp_path / "run", width=400, height=800) as page:
        await page.prefer(scheme)
        assert await page.run("document.documentElement.scrollWidth") == 400
        answers = (
            "[...document.querySelectorAll('.answer')].map((a) => a.getBoundingClientRect().bottom)"
        )
        assert max(await page.run(answers)) < 800  # all four without scrolling
        assert await page.run(CONTRAST) == []
        await page.resize(1280, 900)
        assert await page.run(CONTRAST) == []
        back = "getComputedStyle(document.body).backgroundColor"
        dark = await page.run(back)
        # The button overrides the system: light, then dark.
        await page.run("document.getElementById('theme').click()")
        assert await page.run("document.documentElement.dataset.theme") == "light"
        light = await page.run(back)
        assert (light == dark) == (scheme == "light")


async def test_the_page_survives_the_end_of_the_stack(tmp_path: Path) -> None:
    run, writer, began = begin_run(tmp_path / "run")
    source = open_directory(tmp_path / "run")
    phase = "live"
    source.get_phase = lambda: phase  # type: ignore[return-value, assignment]
    async with open_page(source) as page:
        await page.wait_for("document.getElementById('phase').innerText.startsWith('live')")
        phase = "ended"
        writer.write(*run.stop(began + 9))
        await page.wait_for("document.getElementById('phase').innerText.startsWith('ended')")
        assert "The stack has ended" in await page.run("document.getElementById('notes').innerText")
        assert await page.run("document.querySelectorAll('#fleet-table tbody tr').length") == 3


async def test_the_page_survives_a_restart_of_the_dashboard(tmp_path: Path) -> None:
    run, writer, began = begin_run(tmp_path / "run")
    async with open_browser() as browser:
        dashboard = Dashboard(open_directory(tmp_path / "run"))
        async with serve(dashboard, DashAccess(), "127.0.0.1", 0) as url:
            page = await browser.open(url)
            await page.wait_for(READY)
        await page.wait_for("document.getElementById('phase').innerText === 'no connection'")
        writer.write_all(run.refit(began + 2, 5))
        port = int(url.rstrip("/").rpartition(":")[2])
        dashboard = Dashboard(open_directory(tmp_path / "run"))
        async with serve(dashboard, DashAccess(), "127.0.0.1", port):
            await page.wait_for("document.querySelector('#refit-facts dd')?.innerText === '5'")
            text = await page.run("document.getElementById('phase').innerText")
            assert text != "no connection"


async def test_prefix_hits_have_a_row_per_worker_now_and_as_they_were(tmp_path: Path) -> None:
    write_run(tmp_path / "run", workers=12, seconds=120)
    async with open_page(tmp_path / "run") as page:
        await page.wait_for("!document.getElementById('hits').hidden")
        names = "[...document.querySelectorAll('#hits-names span')].map((each) => each.innerText)"
        assert await page.run(names) == [f"tiny-{number}" for number in range(12)]
        label = "document.getElementById('hits-canvas').getAttribute('aria-label')"
        assert "12 workers" in await page.run(label)
        # A cell is drawn: the canvas is not empty.
        drawn = """[...document.getElementById('hits-canvas').getContext('2d')
            .getImageData(0, 0, 60, 40).data].some((value) => value > 0)"""
        assert await page.run(drawn)
        before = await page.run("document.getElementById('hits-canvas').toDataURL()")
        await page.run("document.getElementById('slider').value = 300")
        await page.run("document.getElementById('slider').dispatchEvent(new Event('input'))")
        changed = f"document.getElementById('hits-canvas').toDataURL() !== {before!r}"
        await page.wait_for(changed)


async def test_a_conversation_is_shown_token_by_token(tmp_path: Path) -> None:
    write_run(tmp_path / "run", workers=2, seconds=30)
    source = open_directory(tmp_path / "run")
    source.store = tmp_path / "tiny.sqlite"
    store = SessionStore(source.store)
    session = await store.open(MARKUP)
    for number in (1, 2):
        turn = Turn(
            session=MARKUP, model=MARKUP, history=f"h{number}", new_ids=[1, 2], worker_id=7,
            token_ids=[2**62, number], logprobs=[-0.5, -0.25], version=4 + number,
            finish_reason="stop",
        )  # fmt: skip
        await store.record(session, [turn])
    store.close()
    async with open_page(source) as page:
        await page.run("document.querySelector('#conversations summary').click()")
        await page.wait_for("document.querySelectorAll('#session-list [role=option]').length === 1")
        await page.run("document.querySelector('#session-list [role=option]').click()")
        await page.wait_for("document.querySelectorAll('.turn').length === 2")
        tokens = "[...document.querySelectorAll('.token')].map((each) => each.innerText)"
        assert await page.run(tokens) == [str(2**62), "1", str(2**62), "2"]
        title = "document.querySelector('.turn:nth-of-type(2) .token').title"
        assert await page.run(title) == f"token {2**62}, log-prob -0.5, version 6"
        assert await page.run("document.querySelectorAll('img, #session b').length") == 0


async def test_a_store_of_another_version_is_named_with_the_cause_and_the_fix(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "run", workers=2, seconds=30)
    source = open_directory(tmp_path / "run")
    source.store = tmp_path / "tiny.sqlite"
    SessionStore(source.store).close()
    with closing(sqlite3.connect(source.store)) as db, db:
        db.execute("PRAGMA user_version = 7")
    async with open_page(source) as page:
        await page.run("document.querySelector('#conversations summary').click()")
        note = "document.getElementById('session-note').innerText"
        await page.wait_for(f"{note}.includes('of another version')")
        assert "Pass another file to --journal" in await page.run(note)


async def test_a_run_without_a_journal_says_how_to_give_one(tmp_path: Path) -> None:
    write_run(tmp_path / "run", workers=2, seconds=30)
    async with open_page(tmp_path / "run") as page:
        await page.run("document.querySelector('#conversations summary').click()")
        await page.wait_for(
            "document.getElementById('session-note').innerText.includes('--journal')"
        )


async def test_a_browser_gets_in_with_a_token_by_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `rollway dash --token --open` sends it there; a strict cookie survives no redirect."""
    write_run(tmp_path / "run", workers=2, seconds=30)
    monkeypatch.setenv("ROLLWAY_HOME", str(tmp_path / "home"))
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    access, source = DashAccess("0123456789abcdef"), open_directory(tmp_path / "run")
    async with AsyncExitStack() as stack:
        served = serve(Dashboard(source, access), access, "127.0.0.1", 0)
        url = await stack.enter_async_context(served)
        await stack.enter_async_context(open_in_browser(url))
        browser = await stack.enter_async_context(open_browser())
        page = await browser.open(opened[0])
        await page.wait_for(READY)
        assert await page.run("location.href") == url.partition("?")[0]
