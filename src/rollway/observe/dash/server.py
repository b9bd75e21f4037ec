"""Serve the page of one run.

    run directory ── load, poll, in a thread ──► View ── every tick, what changed ──► each open page
                                            │
    GET /                  the page, and /static/… for its parts
    GET /api/model[?at=T]  everything, now or as it was
    GET /api/refit?key=K   the bars of one refit (with `at`, too)
    GET /api/hits          prefix hits of every worker over time (with `at`, too)
    GET /api/sessions, /api/session?name=N    conversations of a gateway; one, token by token
    GET /api/stream        server-sent events: first everything, then what changed
    GET /api/log?name=N    the log of one process, followed

It only reads, and only the run and log directories and the gateway's store. See `browsers` for who
is admitted.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import math
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rollway.callers import check_address
from rollway.errors import RollwayError
from rollway.gateway.connections import ServerConnections
from rollway.observe.dash.browsers import TOKEN_FIX, DashAccess, make_app, refuse
from rollway.observe.dash.conversations import Conversations
from rollway.observe.dash.view import PastEntries, RunSource, View, Watch
from rollway.observe.read import Run, clean_text
from rollway.observe.run_state import MOST_POINTS
from rollway.stack.logs import LogFollower

POLL_SECONDS = 0.5
TICK_SECONDS = 1.0
_HEARTBEAT_SECONDS = 15.0
_MOST_STREAMS = 64
_LOG_LINES, _LINE_LENGTH = 400, 4_000
STATIC = Path(__file__).parent / "static"


class Dashboard:
    """The page of one source, for any number of browsers."""

    def __init__(self, source: RunSource, access: DashAccess | None = None) -> None:
        self.source = source
        self.watch = Watch(source)
        self._access = access or DashAccess()
        # Without a token, every user of the machine can see the page.
        shows_all, store = bool(self._access.token), source.store
        self._conversations = Conversations(store, shows_all=shows_all) if store else None
        self._history: PastEntries | None = None
        self._history_lock = asyncio.Lock()
        self._past: tuple[float, View] | None = None
        self._changed = asyncio.Event()
        self._streams: list[asyncio.Task[Any]] = []
        """What sends to each open page, the oldest first."""
        self._is_closing = False

    @property
    def view(self) -> View:
        return self.watch.view

    def app(self) -> web.Application:
        app = make_app(self._access)
        app.router.add_get("/", self._send_index)
        app.router.add_static("/static", STATIC)
        app.router.add_get("/api/model", self._send_model)
        app.router.add_get("/api/refit", self._send_refit)
        app.router.add_get("/api/hits", self._send_hits)
        app.router.add_get("/api/sessions", self._send_sessions)
        app.router.add_get("/api/session", self._send_session)
        app.router.add_get("/api/stream", self._stream)
        app.router.add_get("/api/log", self._stream_log)
        app.cleanup_ctx.append(self._follow)
        app.on_shutdown.append(self._close)
        return app

    # --- the run ---------------------------------------------------------------------------------

    async def _follow(self, _: web.Application) -> AsyncIterator[None]:
        """Have something to show before anybody is answered: all of a record, the end of a long
        one."""
        is_long = await asyncio.to_thread(lambda: self.watch.is_long)
        await asyncio.to_thread(self.watch.look_at_end if is_long else self.watch.load)
        task = asyncio.create_task(self._poll_forever(is_long))
        yield
        self.watch.is_stopped = True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _poll_forever(self, is_long: bool) -> None:
        if is_long:
            await self._load()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._poll()

    async def _load(self) -> None:
        """Load a long record, and tell open pages how far it is."""
        loading = asyncio.create_task(asyncio.to_thread(self.watch.load))
        while not loading.done():
            await asyncio.wait([loading], timeout=TICK_SECONDS)
            self._tell_pages()
        await loading

    async def _poll(self) -> None:
        """Take all new entries, as `Watch.poll` does, and answer pages meanwhile."""
        watch = self.watch
        before, count = (watch.phase, watch.trouble), 0
        try:
            while entries := await asyncio.to_thread(self.source.poll):
                count += len(entries)
                for number, entry in enumerate(entries):
                    self.view.add(entry)
                    if number % 200 == 199:
                        await asyncio.sleep(0)
            watch.note_phase(await asyncio.to_thread(self.source.get_phase))
        except OSError as error:
            watch.note_trouble(error)
        if count or before != (watch.phase, watch.trouble):
            self._tell_pages()

    def _tell_pages(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- answers ---------------------------------------------------------------------------------

    async def _send_index(self, _: web.Request) -> web.FileResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _send_model(self, request: web.Request) -> web.Response:
        view, at = await self._get_view(request)
        page = self.watch.make_page(view)
        if at is not None:
            state = self.view.state
            page["sections"]["run"] |= {"at": at, "first": state.first, "last": state.now}
        return _make_json(page)

    async def _send_refit(self, request: web.Request) -> web.Response:
        view, _ = await self._get_view(request)
        refit = view.get_refit(request.query.get("key", "")[:60])
        if refit is None:
            return refuse(404, "There is no such refit; the last fifty are kept.")
        return _make_json(refit)

    async def _send_hits(self, request: web.Request) -> web.Response:
        view, _ = await self._get_view(request)
        return _make_json({"workers": view.state.workers.list_hits()})

    async def _send_sessions(self, _: web.Request) -> web.Response:
        if self._conversations is None:
            return _make_json({"is_known": False, "sessions": [], "left_out": 0})
        try:
            sessions = await asyncio.to_thread(self._conversations.list_sessions)
        except RollwayError as error:
            sessions = {"trouble": clean_text(str(error)), "sessions": [], "left_out": 0}
        hidden = self._conversations.has_hidden
        return _make_json({"is_known": True, "has_hidden": hidden, **sessions})

    async def _send_session(self, request: web.Request) -> web.Response:
        name, session = request.query.get("name", ""), None
        if self._conversations is not None:
            try:
                session = await asyncio.to_thread(self._conversations.read_session, name)
            except RollwayError as error:
                return refuse(404, clean_text(str(error)))
        if session is None:
            return refuse(404, "There is no such session; the newest are kept.")
        return _make_json(session)

    async def _get_view(self, request: web.Request) -> tuple[View, float | None]:
        """Return the view now, or as it was at the time that the request names."""
        text = request.query.get("at")
        if text is None:
            return self.view, None
        try:
            at = float(text)
        except ValueError:
            at = math.nan
        if not math.isfinite(at):
            raise web.HTTPBadRequest(reason="`at` is seconds since 1970.")
        async with self._history_lock:
            if self._past is None or self._past[0] != at:
                if self._history is None or self._history.until < min(at, self.view.state.now):
                    # A run of its own: the page has counted what cannot be read.
                    run = Run(self.source.run.directory)
                    self._history = await asyncio.to_thread(lambda: PastEntries(run.read()))
                self._past = (at, await asyncio.to_thread(self._history.view_at, at))
            return self._past[1], at

    # --- streams ---------------------------------------------------------------------------------

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        async with self._open_stream(request) as response:
            page = _Page(self)
            while not self._is_closing:
                changed = self._changed  # before the update: what comes meanwhile is not missed
                if update := page.make_update():
                    await response.send(update)
                    await asyncio.sleep(TICK_SECONDS)
                try:
                    await asyncio.wait_for(changed.wait(), _HEARTBEAT_SECONDS)
                except TimeoutError:
                    await response.send_heartbeat()
        return response.response

    async def _stream_log(self, request: web.Request) -> web.StreamResponse:
        path = await asyncio.to_thread(self.source.find_log, request.query.get("name", ""))
        if path is None:
            return refuse(404, "There is no such log.")
        async with self._open_stream(request) as response:
            follower = await asyncio.to_thread(LogFollower, path, _LOG_LINES)
            try:
                quiet = 0.0
                while not self._is_closing:
                    lines = await asyncio.to_thread(follower.read)
                    quiet = 0.0 if lines else quiet + POLL_SECONDS
                    if lines:
                        lines = [line[:_LINE_LENGTH] for line in lines[-_LOG_LINES:]]
                        await response.send(lines)
                    elif quiet >= _HEARTBEAT_SECONDS:
                        quiet = 0.0
                        await response.send_heartbeat()
                    await asyncio.sleep(POLL_SECONDS)
            finally:
                follower.close()
        return response.response

    @asynccontextmanager
    async def _open_stream(self, request: web.Request) -> AsyncIterator[_Stream]:
        if len(self._streams) >= _MOST_STREAMS:
            # Whoever holds them all shuts nobody out; a browser that still looks comes again.
            self._streams.pop(0).cancel()
        task = asyncio.current_task()
        assert task is not None
        self._streams.append(task)
        stream = _Stream(request)
        try:
            await stream.response.prepare(request)
            # Only a browser that went away ends it so.
            with contextlib.suppress(ConnectionError):
                yield stream
        finally:
            if task in self._streams:
                self._streams.remove(task)

    async def _close(self, _: web.Application) -> None:
        self._is_closing = True
        self._changed.set()


class _Stream:
    """Server-sent events, compressed as one stream: a message repeats most of those before it."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._compressor = None
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            self.response.headers["Content-Encoding"] = "gzip"
            self._compressor = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)

    async def send(self, message: object) -> None:
        await self._write(b"data: " + msgspec.json.encode(message) + b"\n\n")

    async def send_heartbeat(self) -> None:
        await self._write(b": still here\n\n")

    async def _write(self, data: bytes) -> None:
        if self._compressor is not None:
            data = self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)
        await self.response.write(data)


class _Page:
    """What one open page has been sent."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard
        self._begin(dashboard.view)

    def _begin(self, view: View) -> None:
        """Begin with a page that has nothing of a view."""
        self._view = view
        self._sections: dict[str, bytes] = {}
        self._points: dict[str, tuple[float, int]] = {}
        """The time of the last point of each plot, and how many the page has."""
        self._event = 0
        self._refit = b""
        self._is_first = True

    def make_update(self) -> dict[str, Any]:
        """Return what the page does not have yet; empty if nothing."""
        view = self._dashboard.view
        if view is not self._view:  # all of the record, after its end
            self._begin(view)
        update: dict[str, Any] = {}
        changed = {}
        for name, section in self._dashboard.watch.make_model().items():
            packed = msgspec.json.encode(section)
            if self._sections.get(name) != packed:
                self._sections[name], changed[name] = packed, section
        if changed:
            update["sections"] = changed
        if series := self._find_new_points(view.get_series()):
            update["series"] = series
        if events := view.get_events(self._event):
            update["events"], self._event = events, events[-1]["id"]
        refit = view.get_refit("")
        packed = msgspec.json.encode(refit)
        if packed != self._refit:
            update["refit"], self._refit = refit, packed
        if update and self._is_first:
            update["first"], self._is_first = True, False
        return update

    def _find_new_points(self, series: Mapping[str, dict[str, list[float]]]) -> dict[str, Any]:
        """Return the points after those that the page has; of a plot of which it has too many, all
        that are left, which take their place: they begin before."""
        new = {}
        for name, points in series.items():
            last, known = self._points.get(name, (-math.inf, 0))
            first = bisect.bisect_right(points["t"], last)
            if first == len(points["t"]):
                continue
            if known + len(points["t"]) - first > 2 * MOST_POINTS:
                first = known = 0
            new[name] = {key: values[first:] for key, values in points.items()}
            self._points[name] = points["t"][-1], known + len(points["t"]) - first
        return new


def _make_json(value: object) -> web.Response:
    response = web.Response(body=msgspec.json.encode(value), content_type="application/json")
    response.enable_compression()
    return response


@asynccontextmanager
async def serve(
    dashboard: Dashboard, access: DashAccess, host: str, port: int
) -> AsyncIterator[str]:
    """Listen, and yield the address to open, with the token if there is one."""
    check_address(host, bool(access.token), TOKEN_FIX)
    app, connections = dashboard.app(), ServerConnections()
    app.middlewares.insert(0, connections.follow)
    listener = await connections.listen(app, host, port)
    try:
        shown = f"[{host}]" if ":" in host else host
        query = f"?token={access.token}" if access.token else ""
        yield f"http://{shown}:{listener.port}/{query}"
    finally:
        await listener.close()
