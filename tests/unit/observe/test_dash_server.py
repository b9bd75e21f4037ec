"""The dashboard's server: who is admitted, what is sent, and that it only reads."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollway.errors import PortInUse, UsageError
from rollway.observe import workers
from rollway.observe.dash import open_run, verdicts
from rollway.observe.dash import view as source_module
from rollway.observe.dash.browsers import POLICY, DashAccess
from rollway.observe.dash.open_run import open_directory, open_stack
from rollway.observe.dash.server import STATIC, Dashboard, _Page, serve
from rollway.observe.dash.view import RunSource, View
from rollway.observe.read import Run
from rollway.observe.run_state import MOST_POINTS, Plot
from rollway.stack.state import StackState
from tests.observe.make_run import MadeRun, Writer, write_run
from tests.observe.names import NAMES
from tests.waiting import wait_until_async

T = 1.7e9
UPLOT = {
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of dist/uPlot.iife.min.js and dist/uPlot.min.css in uplot-1.6.32.tgz of npm."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", workers=4, seconds=120, began=T)
    return tmp_path / "run"


@asynccontextmanager
async def open_dash(source: RunSource | Path, token: str = "") -> AsyncIterator[Client]:
    source = open_directory(source) if isinstance(source, Path) else source
    access = DashAccess(token)
    async with (
        serve(Dashboard(source, access), access, "127.0.0.1", 0) as url,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
    ):
        yield Client(session, url.partition("?")[0])


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def get(self, path: str, **options: Any) -> tuple[int, bytes]:
        async with self.session.get(self.url + path, **options) as answer:
            return answer.status, await answer.read()

    async def get_json(self, path: str) -> Any:
        status, body = await self.get(path)
        assert status == 200, body
        return json.loads(body)

    @asynccontextmanager
    async def stream(self, path: str = "api/stream") -> AsyncIterator[AsyncIterator[Any]]:
        async with self.session.get(self.url + path, timeout=aiohttp.ClientTimeout(60)) as answer:
            assert answer.content_type == "text/event-stream"
            yield self._read(answer)

    async def _read(self, answer: aiohttp.ClientResponse) -> AsyncIterator[Any]:
        # A first message may exceed the longest line that the reader takes at once.
        rest = b""
        async for block in answer.content.iter_any():
            *messages, rest = (rest + block).split(b"\n\n")
            for message in messages:
                if message.startswith(b"data: "):
                    yield json.loads(message[6:])


# --- what is sent ---------------------------------------------------------------------------------


async def test_the_model_has_every_section(run_dir: Path) -> None:
    async with open_dash(run_dir) as client:
        model = await client.get_json("api/model")
    assert set(model) == {"sections", "series", "events", "refit"}
    assert model["sections"]["run"]["phase"] == "recorded"
    assert len(model["sections"]["fleet"]) == 4
    assert model["refit"]["rows"][0]["bars"]


async def test_a_stream_sends_everything_once_and_then_what_changed(tmp_path: Path) -> None:
    run, writer = MadeRun(2), Writer(tmp_path / "run")
    began = time.time()
    writer.write_all(run.start(began))
    async with open_dash(tmp_path / "run") as client, client.stream() as messages:
        first = await anext(messages)
        assert first["first"] is True
        assert [row["name"] for row in first["sections"]["fleet"]] == ["tiny-0", "tiny-1"]
        writer.write_all(run.refit(began + 5, 1))
        update = await anext(messages)
        assert "first" not in update
        assert update["sections"]["refits"][0]["version"] == 1
        assert {row["version"] for row in update["sections"]["fleet"]} == {1}
        assert "trainer" not in update["sections"]  # it did not change
        ids = {event["id"] for event in first["events"]}
        assert all(event["id"] not in ids for event in update["events"])


async def test_the_end_of_a_long_record_is_shown_while_the_rest_is_read(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "_LONG_BYTES", 1000)
    source, may_load = open_directory(run_dir), threading.Event()
    run, load = Run(run_dir), source.load

    def load_later() -> Iterator[dict[str, Any]]:
        may_load.wait(60)
        yield from load()

    source.load = load_later  # type: ignore[method-assign]
    source.run.read_end = lambda: run.read_end(15_000)  # type: ignore[method-assign, misc]
    async with open_dash(source) as client, client.stream() as messages:
        first = await anext(messages)
        assert first["first"] is True
        (note,) = first["sections"]["run"]["notes"]
        assert note.startswith("Reading the record: 0 %.")
        assert len(first["sections"]["fleet"]) == 4
        assert first["sections"]["top"][0]["level"] == "good"  # no token is called foreign
        may_load.set()
        async for whole in messages:
            if whole.get("first"):
                break
        assert whole["sections"]["run"]["notes"] == []
        counts = [each["sections"]["rollouts"]["totals"]["count"] for each in (first, whole)]
        assert 0 < counts[0] < counts[1]
        assert len(whole["sections"]["refits"]) > len(first["sections"]["refits"]) > 0
        assert len(whole["sections"]["fleet"]) == 4
    direct = View()
    for entry in Run(run_dir).read():
        direct.add(entry)
    assert (
        json.loads(json.dumps(direct.get_sections()["rollouts"])) == whole["sections"]["rollouts"]
    )


async def test_a_store_that_cannot_be_read_is_named_with_the_cause_and_the_fix(
    run_dir: Path, tmp_path: Path
) -> None:
    source = open_directory(run_dir)
    source.store = tmp_path / "tiny.sqlite"
    async with open_dash(source) as client:
        assert "trouble" not in await client.get_json("api/sessions")  # nothing is recorded yet
        source.store.write_text("a text " * 100)
        answer = await client.get_json("api/sessions")
        assert answer["sessions"] == []
        assert "is not the store of a gateway" in answer["trouble"]
        assert answer["trouble"].endswith(
            "Pass another file to --journal; this one stays as it is."
        )
        status, body = await client.get("api/session?name=a")
        assert (status, body.decode().strip()) == (404, answer["trouble"])


async def test_a_dashboard_ends_while_it_reads(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "_LONG_BYTES", 1000)
    source = open_directory(run_dir)
    gateway = {"kind": "gateway", "t": T, "sessions": 1, "turns": 1}
    source.load = lambda: itertools.repeat(gateway)  # type: ignore[method-assign]
    async with open_dash(source) as client:
        await client.get_json("api/model")


async def test_a_moment_of_the_past_is_as_it_was(run_dir: Path) -> None:
    async with open_dash(run_dir) as client:
        early = await client.get_json(f"api/model?at={T + 14.5}")
        late = await client.get_json("api/model")
        key = early["refit"]["key"]
        refit = await client.get_json(f"api/refit?key={key}&at={T + 14.5}")
    assert early["sections"]["run"]["at"] == T + 14.5
    assert len(early["sections"]["refits"]) == 1 < len(late["sections"]["refits"])
    assert max(event["t"] for event in early["events"]) <= T + 14.5
    assert refit == early["refit"]


@pytest.mark.parametrize("at", ["nan", "inf", "x", ""])
async def test_a_moment_that_is_none_is_refused(run_dir: Path, at: str) -> None:
    async with open_dash(run_dir) as client:
        assert (await client.get(f"api/model?at={at}"))[0] == 400


async def test_the_end_of_a_stack_is_told_and_its_record_stays(run_dir: Path) -> None:
    source = open_directory(run_dir)
    phases = iter(["live"])
    source.get_phase = lambda: next(phases, "ended")  # type: ignore[arg-type, return-value]
    async with open_dash(source) as client, client.stream() as messages:
        await anext(messages)
        while (await client.get_json("api/model"))["sections"]["run"]["phase"] != "ended":
            await anext(messages)
        assert len((await client.get_json("api/model"))["sections"]["fleet"]) == 4


async def test_lines_that_cannot_be_read_are_left_out_and_counted(run_dir: Path) -> None:
    file = run_dir / "driver-101-0a1b.jsonl"
    file.write_bytes(file.read_bytes() + b'{"kind":"nonsense","t":1}\nnot json\n{"kind":"ref')
    async with open_dash(run_dir) as client:
        notes = (await client.get_json("api/model"))["sections"]["run"]["notes"]
        await client.get_json(f"api/model?at={T + 14.5}")  # all is read again
        later = (await client.get_json("api/model"))["sections"]["run"]["notes"]
    assert any("1 damaged" in note and "1 unknown kind" in note for note in notes), notes
    assert later == notes


def test_a_page_that_is_open_for_long_gets_plots_anew(run_dir: Path) -> None:
    """It has every point since it was opened; the server's are fewer, and from the whole run."""
    dashboard = Dashboard(open_directory(run_dir))
    page, plot, known = _Page(dashboard), Plot(), list[float]()
    dashboard.view.state.plots["cached"] = plot
    for number in range(20_000):
        plot.add(T + number, number)
        points = page._find_new_points(dashboard.view.get_series())["cached"]["t"]
        known = points if known and points[0] <= known[-1] else known + points
        assert len(known) <= 2 * MOST_POINTS and known[-1] == T + number
    assert sum(t < T + 10_000 for t in known) > MOST_POINTS / 4


async def test_a_directory_that_goes_away_is_said_and_the_page_stays(run_dir: Path) -> None:
    def fail() -> list[dict[str, Any]]:
        raise OSError(5, "Input/output error")

    source = open_directory(run_dir)
    source.poll = fail  # type: ignore[method-assign]
    async with open_dash(source) as client:
        notes = (await client.get_json("api/model"))["sections"]["run"]["notes"]
    assert notes == ["The record cannot be read: Input/output error."]


async def test_many_workers_cost_little(tmp_path: Path) -> None:
    """The page and everything it shows at first, as it crosses the wire."""
    write_run(tmp_path / "run", workers=128, seconds=100, began=T)
    total = 0
    async with open_dash(tmp_path / "run") as client:
        for path in ("", "api/model", *(f"static/{path.name}" for path in STATIC.iterdir())):
            async with client.session.get(client.url + path, auto_decompress=False) as answer:
                total += len(await answer.read())
    assert total < 250_000


# --- who is admitted ------------------------------------------------------------------------------


PATHS = ["", "api/model", "api/refit", "api/log?name=x", "static/main.js", "nothing"]


@pytest.mark.parametrize("path", PATHS)
async def test_every_answer_has_the_policy(run_dir: Path, path: str) -> None:
    async with open_dash(run_dir) as client, client.session.get(client.url + path) as answer:
        assert answer.headers["Content-Security-Policy"] == POLICY
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "unsafe" not in POLICY


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_it_only_reads(run_dir: Path, method: str) -> None:
    before = {path: path.read_bytes() for path in run_dir.iterdir()}
    async with open_dash(run_dir) as client:
        for path in PATHS:
            async with client.session.request(method, client.url + path) as answer:
                assert answer.status == 405
    assert {path: path.read_bytes() for path in run_dir.iterdir()} == before


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "x@127.0.0.1", "[::"])
async def test_a_web_page_cannot_reach_it_under_its_own_name(run_dir: Path, host: str) -> None:
    async with open_dash(run_dir) as client:
        assert (await client.get("api/model", headers={"Host": host}))[0] == 403
        assert (await client.get("api/model", headers={"Host": "localhost:1"}))[0] == 200


async def test_a_token_admits_by_address_cookie_or_header(run_dir: Path) -> None:
    token = "0123456789abcdef"
    async with open_dash(run_dir, token) as client:
        assert (await client.get("api/model"))[0] == 401
        assert (await client.get("static/main.js"))[0] == 401
        assert (await client.get("?token=wrong"))[0] == 401
        bearer = {"Authorization": f"Bearer {token}"}
        assert (await client.get("api/model", headers=bearer))[0] == 200
        assert (await client.get("api/model", headers={"Authorization": "Bearer x"}))[0] == 401
        assert (await client.get("api/model"))[0] == 401
        async with client.session.get(f"{client.url}?token={token}") as answer:
            assert answer.headers["Refresh"] == "0; url=/"  # it does not stay in the address
            cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert (await client.get("api/model"))[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "127.evil.example"])
async def test_another_host_needs_a_token(run_dir: Path, host: str) -> None:
    with pytest.raises(UsageError, match="without a token"):
        async with serve(Dashboard(open_directory(run_dir)), DashAccess(), host, 0):
            pass


async def test_two_dashboards_on_one_port_are_an_error_that_says_so(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} of 127.0.0.1: .*in use"):
            async with serve(Dashboard(open_directory(run_dir)), DashAccess(), "127.0.0.1", port):
                pass


# --- logs -----------------------------------------------------------------------------------------


async def test_only_logs_of_the_directory_are_shown(run_dir: Path, tmp_path: Path) -> None:
    source = open_directory(run_dir)
    source.log_dir = tmp_path / "logs"
    source.log_dir.mkdir()
    (tmp_path / "secret.log").write_text("secret\n")
    (source.log_dir / "link.log").symlink_to(tmp_path / "secret.log")
    (source.log_dir / "tiny-0.log").write_text("one\n<b>two</b>\n")
    async with open_dash(source) as client:
        for name in ("link", "../secret", "..%2Fsecret", "%2Fetc%2Fpasswd", "", "tiny-0%00"):
            assert (await client.get(f"api/log?name={name}"))[0] == 404
        async with client.stream("api/log?name=tiny-0") as messages:
            assert await anext(messages) == ["one", "<b>two</b>"]
            with (source.log_dir / "tiny-0.log").open("a") as file:
                file.write("three\n")
            assert await anext(messages) == ["three"]


async def test_without_a_log_directory_there_are_none(run_dir: Path) -> None:
    async with open_dash(run_dir) as client:
        assert (await client.get("api/log?name=tiny-0"))[0] == 404


async def test_a_stream_ends_with_the_dashboard(run_dir: Path) -> None:
    access = DashAccess()
    async with aiohttp.ClientSession() as session:
        async with serve(Dashboard(open_directory(run_dir)), access, "127.0.0.1", 0) as url:
            answer = await session.get(f"{url}api/stream")
            await answer.content.readany()
        await asyncio.wait_for(answer.content.read(), 10)


async def test_a_page_that_leaves_is_forgotten(run_dir: Path) -> None:
    dashboard = Dashboard(open_directory(run_dir))
    async with serve(dashboard, DashAccess(), "127.0.0.1", 0) as url:
        async with aiohttp.ClientSession() as session, session.get(f"{url}api/stream") as answer:
            await answer.content.readany()
            assert len(dashboard._streams) == 1
        await wait_until_async(lambda: not dashboard._streams)


# --- the page's files -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", UPLOT)
def test_uplot_is_the_published_package(name: str) -> None:
    assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == UPLOT[name]


def test_the_notice_of_uplot_is_kept() -> None:
    notice = (STATIC / "uplot-license.txt").read_text()
    assert "Permission is hereby granted, free of charge" in notice
    assert "Leon Sorokin" in notice


def read_own(*kinds: str) -> dict[str, str]:
    own = (path for path in STATIC.iterdir() if not path.name.startswith("uplot"))
    return {path.name: path.read_text() for path in own if path.name.endswith(kinds)}


def test_the_page_names_no_other_machine_and_takes_no_markup() -> None:
    for name, text in read_own(".js", ".css", ".html").items():
        addresses = set(re.findall(r"https?://[^\s\"')]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, f"{name}: {word}"
        assert 'style="' not in text, name


def test_every_figure_of_the_page_is_a_metric() -> None:
    names, text = set(NAMES), "\n".join(read_own(".js", ".html").values())
    used = set(re.findall(r'"((?:rollway_|vllm:|dynamo_)\w+)"', text))
    # Percentiles are written as the name without its end.
    whole = {name for name in used if name not in {"rollway_rollout_seconds",
             "rollway_first_token_seconds", "rollway_rollout_tokens"}}  # fmt: skip
    assert len(whole) > 20
    assert whole <= names
    assert {f"{name}_p99" for name in used - whole} <= names
    source = inspect.getsource(verdicts) + inspect.getsource(workers)
    behind = set(re.findall(r'"((?:rollway_|vllm:)\w+)"', source))
    assert len(behind) > 8
    assert behind <= names


def test_a_stack_that_another_rollway_records_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StackState("old", "0" * 16, 1, 1, "/run", "/logs", record_dir=str(tmp_path))
    monkeypatch.setattr(open_run, "find_state", lambda _: state)
    assert open_stack("old").poll() == []  # it has just started
    header = {"kind": "header", "schema": 1, "t": T, "process": "supervisor"}
    (tmp_path / "supervisor-1-a.jsonl").write_text(json.dumps(header) + "\n")
    with pytest.raises(UsageError, match="its schema is 1"):
        open_stack("old")
