"""`rollway observe export`: what Prometheus reads of a stack."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Awaitable
from pathlib import Path

from rollway.cli.arguments import Parser, add_flag, add_listening, add_name, make_group
from rollway.cli.dash import choose_token
from rollway.cli.output import print_progress, print_result
from rollway.errors import UsageError
from rollway.observe import exporter
from rollway.observe.dash import open_run
from rollway.observe.dash.view import RunSource
from rollway.stack import prometheus
from rollway.stack.ray import launcher


def export(options: argparse.Namespace) -> int:
    """Write a scrape config with its targets, and with `--follow` keep them true."""
    if not 0 < options.seconds <= 3600:
        raise UsageError(
            f"Prometheus cannot scrape every {options.seconds:g} s.", "Give --seconds up to 3600."
        )
    name = options.name
    if name is None or "://" not in name:
        name = launcher.resolve_name(name)
    token = choose_token(options) if options.follow else ""
    config = exporter.make_config(options.seconds, has_token=bool(token))
    paths = [exporter.write_config(options.out, config)]
    if token:
        paths.append(exporter.write_token(options.out, token))
    if options.follow:
        with open_run.open_source(name, None) as source:
            asyncio.run(_follow(source, name, token, paths, options))
    else:
        paths.append(asyncio.run(_write_once(name, options.out)))
        _show(options, paths)
    return 0


def _show(options: argparse.Namespace, paths: list[Path], url: str | None = None) -> None:
    files = [str(path) for path in paths]
    show = "\n".join(files)
    print_result(options, {"files": files, "url": url}, lambda _: print(show, flush=True))


async def _write_once(name: str, directory: Path) -> Path:
    async with exporter.open_listing(name) as list_groups:
        path = exporter.get_targets_path(directory, _get_stack(name))
        return prometheus.write_groups(path, await list_groups())


def _get_stack(name: str) -> str:
    """Return what targets are labelled with: the name without its Ray namespace, or an address."""
    return name if "://" in name else name.rpartition("/")[2]


async def _follow(
    source: RunSource, name: str, token: str, paths: list[Path], options: argparse.Namespace
) -> None:
    stop_requested = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop_requested.set)
    async with exporter.open_listing(name) as list_groups:
        follower = exporter.Exporter(_get_stack(name), source, list_groups, options.out)
        async with follower.serve(options.host, options.port, token) as url:
            _show(options, [*paths, *follower.paths], url)
            if not options.json:
                print(f"{source.label}: {url}  (Ctrl-C ends)", flush=True)
            if not await _is_first(stop_requested.wait(), follower.follow()):
                print_progress(f"{source.label} has ended.")


async def _is_first(first: Awaitable[object], second: Awaitable[object]) -> bool:
    """Return whether the first of two ended before the other, which is then cancelled."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    for task in done:
        task.result()
    return tasks[0] in done


def add_observe(parser: Parser) -> None:
    group = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add = make_group(group.add_parser("export", help="give a stack to Prometheus"))
    parser = add("prometheus", export, "write a scrape config with targets")
    add_name(parser, "a stack, or a frontend's address")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")
    add_flag(parser, "--follow", "stay, keep the targets true, serve Rollway's own metrics")
    add_listening(parser, 8181)
    add_flag(parser, "--token", "ask for a token: ROLLWAY_DASH_TOKEN, or a random one")
    text = "between two scrapes, and between two evaluations of rules (default 5)"
    parser.add_argument("--seconds", type=float, default=5.0, help=text)
