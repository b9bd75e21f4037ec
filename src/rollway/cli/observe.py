"""`rollway observe export`: files for Prometheus, Grafana and Kubernetes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
from collections.abc import Awaitable
from pathlib import Path

import yaml

from rollway.cli.dash import read_token
from rollway.cli.output import print_json, print_progress
from rollway.errors import UsageError
from rollway.observe.dash import open_run
from rollway.observe.dash.access import Access
from rollway.observe.dash.source import Source
from rollway.observe.export import following, podmonitors, prometheus, rules
from rollway.observe.export.grafana import make_dashboard
from rollway.stack import targets
from rollway.stack.ray import launcher


def export(options: argparse.Namespace) -> int:
    """Write the files of one kind, and with `--follow` keep them true."""
    _check(options)
    match options.what:
        case "prometheus":
            return _export_prometheus(options)
        case "grafana":
            content = json.dumps(make_dashboard(), indent=1) + "\n"
            paths = [targets.write_file(options.out / "rollway.json", content)]
        case "alerts":
            content = yaml.safe_dump(_make_rules(options), sort_keys=False, width=1000)
            paths = [targets.write_file(options.out / "rollway.rules.yml", content)]
        case _:
            monitors = podmonitors.make_podmonitors(options.name)
            objects = [*monitors, podmonitors.make_rule_object(_make_rules(options))]
            content = yaml.safe_dump_all(objects, sort_keys=False, width=1000)
            paths = [targets.write_file(options.out / "podmonitors.yaml", content)]
    _show(options, paths)
    return 0


def _make_rules(options: argparse.Namespace) -> rules.Rules:
    return rules.make_rules(rules.parse_bounds(options.bound))


def _check(options: argparse.Namespace) -> None:
    if not 0 < options.seconds <= 3600:
        raise UsageError(
            f"Prometheus cannot scrape every {options.seconds:g} s.", "Give --seconds up to 3600."
        )
    if options.follow and options.what != "prometheus":
        raise UsageError(
            f"The files of {options.what} do not change.", "Leave out --follow, or say prometheus."
        )


def _show(options: argparse.Namespace, paths: list[Path], url: str | None = None) -> None:
    if options.json:
        print_json({"files": [str(path) for path in paths], "url": url})
    else:
        print("\n".join(map(str, paths)), flush=True)


def _export_prometheus(options: argparse.Namespace) -> int:
    name = options.name
    if name is None or "://" not in name:
        name = launcher.resolve_name(name)
    access = Access(read_token(options) if options.follow else "")
    access.check_host(options.host)
    config = prometheus.make_config(options.seconds, has_token=bool(access.token))
    paths = [prometheus.write_config(options.out, config)]
    if access.token:
        paths.append(prometheus.write_token(options.out, access.token))
    if options.follow:
        with open_run.open_source(name, None) as source:
            asyncio.run(_follow(source, name, access, paths, options))
    else:
        paths.append(asyncio.run(_write_once(name, options.out)))
        _show(options, paths)
    return 0


async def _write_once(name: str, directory: Path) -> Path:
    async with following.open_listing(name) as list_groups:
        path = following.get_targets_path(directory, _get_stack(name))
        return targets.write_groups(path, await list_groups())


def _get_stack(name: str) -> str:
    """Return what targets are labelled with: the name without its Ray namespace, or an address."""
    return name if "://" in name else name.rpartition("/")[2]


async def _follow(
    source: Source, name: str, access: Access, paths: list[Path], options: argparse.Namespace
) -> None:
    stop_requested = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop_requested.set)
    async with following.open_listing(name) as list_groups:
        follower = following.Follower(_get_stack(name), source, list_groups, options.out)
        async with following.serve(follower, access, options.host, options.port) as url:
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
