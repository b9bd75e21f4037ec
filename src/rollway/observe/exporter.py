"""Keep what Prometheus reads of a stack true while the stack runs: `rollway observe export`.

    DIR/prometheus.yml            a whole config: two jobs, and the rules beside it
    DIR/targets/<stack>.json      frontends and workers, each with its labels
    DIR/pages/<stack>.json        Rollway's own page, while `--follow` serves it
    DIR/token                     what that page asks for, if it asks for a token

Prometheus notices by itself when a list of targets changes. A worker that died stays in the list
until it leaves the stack: Prometheus shall see that it does not answer. The lists are removed when
the exporter ends, so that Prometheus does not look for processes that are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

import rollway
from rollway.errors import REPOSITORY, PortInUse, RollwayError, StackNotRunning, UsageError
from rollway.fleet.workers import Worker
from rollway.model_spec import slug
from rollway.observe import metrics_endpoint
from rollway.observe.dash.open_run import find_on_ray, find_state
from rollway.observe.dash.view import RunSource
from rollway.stack import local, prometheus
from rollway.stack.commands import WILDCARDS
from rollway.stack.prometheus import Group

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
CLUSTER_SECONDS = 5.0
"""How often a stack that is not of this machine is asked for its workers."""
TARGETS, PAGES, TOKEN_FILE = "targets", "pages", "token"

ListGroups = Callable[[], Awaitable[list[Group]]]


# --- files ---------------------------------------------------------------------------------------


def make_config(scrape_seconds: float, *, has_token: bool = False) -> dict[str, Any]:
    """Return a config whose paths are relative to itself."""
    own: dict[str, Any] = {"job_name": "rollway", "file_sd_configs": _read_lists(PAGES)}
    if has_token:  # for Rollway's own page alone: workers must not see it
        own["authorization"] = {"credentials_file": TOKEN_FILE}
    span = f"{round(scrape_seconds * 1000)}ms"
    times = ("scrape_interval", "scrape_timeout", "evaluation_interval")
    return {
        "global": dict.fromkeys(times, span),
        "rule_files": ["*.rules.yml"],
        "scrape_configs": [
            own,
            {"job_name": "rollway-stack", "file_sd_configs": _read_lists(TARGETS)},
        ],
    }


def _read_lists(directory: str) -> list[dict[str, Any]]:
    # Prometheus watches the files; it reads them again this often for disks that tell no changes.
    return [{"files": [f"{directory}/*.json"], "refresh_interval": "30s"}]


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    return prometheus.write_file(
        directory / "prometheus.yml", yaml.safe_dump(config, sort_keys=False)
    )


def write_token(directory: Path, token: str) -> Path:
    """Write the token for this user and its group alone."""
    path = directory / TOKEN_FILE
    directory.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o640)
    with os.fdopen(handle, "w") as file:
        file.write(token)
    return path


def get_targets_path(directory: Path, name: str) -> Path:
    """Return the list of targets of a stack, given its name or its address."""
    return directory / TARGETS / f"{slug(name)}.json"


# --- while the stack runs ------------------------------------------------------------------------


class Exporter:
    """Follows one stack: its record, and its list of targets."""

    def __init__(
        self, stack: str, source: RunSource, list_groups: ListGroups, directory: Path
    ) -> None:
        self._stack = stack
        self._source = source
        self._list_groups = list_groups
        self._targets = get_targets_path(directory, stack)
        self._page = directory / PAGES / self._targets.name
        self._metrics = metrics_endpoint.RunMetrics(source.poll)
        self._groups: list[Group] | None = None
        self._is_gone = False

    @property
    def paths(self) -> list[Path]:
        return [self._targets, self._page]

    @asynccontextmanager
    async def serve(self, host: str, port: int, token: str) -> AsyncIterator[str]:
        """Serve Rollway's own page, and yield its address; remove the lists at the end."""
        await self.update()
        await asyncio.to_thread(self._render)  # the first page of a long run takes a while
        try:
            server = self._listen(host, port, token)
            try:
                # Prometheus may run elsewhere: for it, an address of all interfaces names nothing.
                shown = socket.gethostname() if host in WILDCARDS else host
                shown = f"[{shown}]" if ":" in shown else shown
                url = f"http://{shown}:{server.server_address[1]}"
                prometheus.write_groups(self._page, [prometheus.make_group(url, stack=self._stack)])
                yield f"{url}/metrics"
            finally:
                await asyncio.to_thread(metrics_endpoint.close, server)
        finally:
            for path in self.paths:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def _listen(self, host: str, port: int, token: str) -> ThreadingHTTPServer:
        try:
            return metrics_endpoint.listen(host, port, token, self._render)
        except OSError as error:
            raise (PortInUse if error.errno == errno.EADDRINUSE else UsageError)(
                f"Nothing can listen on port {port} of {host}: {error.strerror or error}.",
                "Choose another port with --port, 0 for a free one, or an address with --host.",
            ) from error

    def _render(self) -> str:
        return metrics_endpoint.render_page([({}, self._metrics.take())])

    async def follow(self, seconds: float = POLL_SECONDS) -> None:
        """Keep the list of targets true until the stack has ended."""
        while True:
            await self.update()
            if self._is_gone or await asyncio.to_thread(self._source.get_phase) == "ended":
                return
            await asyncio.sleep(seconds)

    async def update(self) -> None:
        """List the targets. A stack that cannot be asked now keeps those that it had."""
        try:
            groups = await self._list_groups()
        except StackNotRunning:
            groups, self._is_gone = [], True
        except RollwayError as error:
            log.warning("the targets cannot be listed at the moment: %s", error.message)
            return
        if groups != self._groups:
            self._groups = groups
            await asyncio.to_thread(prometheus.write_groups, self._targets, groups)


# --- who is there --------------------------------------------------------------------------------


@asynccontextmanager
async def open_listing(name: str) -> AsyncIterator[ListGroups]:
    """Yield a function that lists the targets of a stack, by its name or its address."""
    if name.startswith("dgd://"):
        raise UsageError(
            f"{name} is behind an API server.",
            f"Apply deploy/observe/podmonitors.yaml of {REPOSITORY} there.",
        )
    if "://" in name:
        async with rollway.attach(name, watch=False) as stack:

            async def list_attached() -> list[Group]:
                workers: list[Worker] = []
                # A frontend without RL routes has no such list; its own page is still there.
                with contextlib.suppress(RollwayError):
                    for model in stack.models:
                        workers += await stack.fleet_of(model).workers()
                return _list_attached_groups(name, stack.frontend_url, workers)

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
            return prometheus.list_groups(state)

        yield _ask_seldom(list_started) if is_far else list_started


def _list_attached_groups(stack: str, frontend: str, workers: Iterable[Worker]) -> list[Group]:
    """Return the frontend and the workers of a stack that Rollway did not start."""
    groups = [prometheus.make_group(frontend, stack=stack, process="frontend")]
    for worker in workers:
        if worker.admin_url:
            labels = {"worker": str(worker.instance_id), "role": worker.role}
            groups.append(prometheus.make_group(worker.admin_url, stack=stack, **labels))
    return groups


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
