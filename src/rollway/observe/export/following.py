"""Keep what Prometheus reads of a stack true while the stack runs: `--follow`.

    record of the run ── poll ──► Series ──► GET /metrics          Rollway's own metrics
    state of the stack ── poll ──► DIR/targets/<stack>.json        frontends and workers

No other process serves Rollway's own metrics. The files are removed when this one ends, so that
Prometheus does not look for processes that are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

import rollway
from rollway.errors import RollwayError, StackNotRunning, UsageError
from rollway.fleet.discovery import Worker
from rollway.model_spec import slug
from rollway.observe.dash.access import Access, make_app
from rollway.observe.dash.open_run import find_on_ray, find_state
from rollway.observe.dash.server import listen
from rollway.observe.dash.source import Source
from rollway.observe.export import prometheus
from rollway.observe.export.prometheus import PAGES, TARGETS
from rollway.observe.series import Series
from rollway.observe.sinks.prometheus import PAGE_TYPE, keep_newest_versions, render_page
from rollway.stack import local, targets
from rollway.stack.commands import WILDCARDS
from rollway.stack.targets import Group

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
CLUSTER_SECONDS = 5.0
"""How often a stack that is not of this machine is asked for its workers."""

ListGroups = Callable[[], Awaitable[list[Group]]]


class Follower:
    """Follows one stack: its record, and its list of targets."""

    def __init__(
        self, stack: str, source: Source, list_groups: ListGroups, directory: Path
    ) -> None:
        self._stack = stack
        self._source = source
        self._list_groups = list_groups
        self._targets = get_targets_path(directory, stack)
        self._page = directory / PAGES / self._targets.name
        self._series = Series()
        self._groups: list[Group] | None = None
        self._is_gone = False

    def app(self, access: Access) -> web.Application:
        app = make_app(access)
        app.router.add_get("/metrics", self._send_metrics)
        return app

    @property
    def paths(self) -> list[Path]:
        return [self._targets, self._page]

    async def _send_metrics(self, _: web.Request) -> web.Response:
        page = render_page(keep_newest_versions(self._series.values))
        return web.Response(text=page, headers={"Content-Type": PAGE_TYPE})

    def announce(self, url: str) -> None:
        """Tell Prometheus where Rollway's own page is."""
        group = targets.make_group(url, stack=self._stack)
        targets.write_groups(self._page, [group])

    def retract(self) -> None:
        """Remove the lists of targets."""
        for path in self.paths:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    async def follow(self, seconds: float = POLL_SECONDS) -> None:
        """Follow until the stack has ended."""
        while True:
            await self.update()
            if self._is_gone or await asyncio.to_thread(self._source.get_phase) == "ended":
                return
            await asyncio.sleep(seconds)

    async def update(self) -> None:
        """Take what is new. A stack that cannot be asked now keeps the targets that it had."""
        while entries := await asyncio.to_thread(self._source.poll):
            for number, entry in enumerate(entries):
                self._series.add(entry)
                if number % 200 == 199:
                    await asyncio.sleep(0)  # the page is answered meanwhile
        try:
            groups = await self._list_groups()
        except StackNotRunning:
            groups, self._is_gone = [], True
        except RollwayError as error:
            log.warning("the targets cannot be listed at the moment: %s", error.message)
            return
        if groups != self._groups:
            self._groups = groups
            await asyncio.to_thread(targets.write_groups, self._targets, groups)


def get_targets_path(directory: Path, name: str) -> Path:
    """Return the list of targets of a stack, given its name or its address."""
    return directory / TARGETS / f"{slug(name)}.json"


@asynccontextmanager
async def serve(follower: Follower, access: Access, host: str, port: int) -> AsyncIterator[str]:
    """Serve Rollway's own page, and yield its address; remove the lists of targets at the end."""
    access.check_host(host)
    await follower.update()  # the first page has everything that is there
    try:
        async with listen(follower.app(access), host, port) as bound:
            # Prometheus may run elsewhere: for it, an address of all interfaces names nothing.
            shown = socket.gethostname() if host in WILDCARDS else host
            url = f"http://[{shown}]:{bound}" if ":" in shown else f"http://{shown}:{bound}"
            follower.announce(url)
            yield f"{url}/metrics"
    finally:
        follower.retract()


# --- who is there --------------------------------------------------------------------------------


@asynccontextmanager
async def open_listing(name: str) -> AsyncIterator[ListGroups]:
    """Yield a function that lists the targets of a stack, by its name or its address."""
    if name.startswith("dgd://"):
        raise UsageError(
            f"{name} is behind an API server.", "Use `rollway observe export podmonitors`."
        )
    if "://" in name:
        async with rollway.attach(name, watch=False) as stack:

            async def list_attached() -> list[Group]:
                workers: list[Worker] = []
                # A frontend without RL routes has no such list; its own page is still there.
                with contextlib.suppress(RollwayError):
                    for model in stack.models:
                        workers += await stack.fleet_of(model).workers()
                return prometheus.list_attached_groups(name, stack.frontend_url, workers)

            yield _ask_seldom(list_attached)
    else:
        state = await asyncio.to_thread(find_state, name)
        is_far = state is not None and bool(state.ray_namespace)
        # A cluster that does not answer for a moment is no stack that has ended.
        find = find_on_ray if is_far else find_state

        async def list_started() -> list[Group]:
            state = await asyncio.to_thread(find, name)
            if state is None or not state.is_supervised:
                raise local.make_not_running_error(name)
            return targets.list_groups(state)

        yield _ask_seldom(list_started) if is_far else list_started


def _ask_seldom(list_groups: ListGroups) -> ListGroups:
    """Return a function that remembers its answer for a while: a listing costs the frontend a probe
    of every worker."""
    last: list[Group] = []
    next_time = 0.0

    async def ask() -> list[Group]:
        nonlocal last, next_time
        now = asyncio.get_running_loop().time()
        if now >= next_time:
            last = await list_groups()
            next_time = now + CLUSTER_SECONDS
        return last

    return ask
