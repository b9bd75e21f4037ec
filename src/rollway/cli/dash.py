"""`rollway dash`, `top` and `report`: show a stack, or a recorded run."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import signal
import sys
import tempfile
import webbrowser
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rollway import callers
from rollway.cli.arguments import Parser, add_flag, add_listening, add_name, set_command
from rollway.cli.output import print_json, print_progress, print_result
from rollway.errors import RollwayError, UsageError
from rollway.observe.dash import live_table, open_run
from rollway.observe.dash.browsers import TOKEN, TOKEN_FIX, DashAccess
from rollway.observe.dash.conversations import Conversations
from rollway.observe.dash.server import Dashboard, serve
from rollway.observe.dash.view import RunSource, Watch
from rollway.observe.read import clean_text
from rollway.spec import is_loopback
from rollway.stack.state import make_home


def dash(options: argparse.Namespace) -> int:
    """Serve until a signal arrives."""
    _check_source(options)
    access = DashAccess(choose_token(options))
    if access.token and not is_loopback(options.host):
        print_progress(f"What the page shows crosses the network of {options.host} in the clear.")
    if options.journal is not None:
        try:
            Conversations(options.journal).check()
        except RollwayError as error:
            raise UsageError(clean_text(error.message), error.hint) from error
    with open_run.open_source(options.name, options.run) as source:
        source.store = options.journal or source.store
        asyncio.run(_serve(source, access, options))
    return 0


def _check_source(options: argparse.Namespace) -> None:
    if options.run is not None and options.name is not None:
        raise UsageError("A stack and a run directory are given.", "Give one of them.")


def top(options: argparse.Namespace) -> int:
    """Show a run in the terminal until the user ends it; with --once or --json, as it is now."""
    _check_source(options)
    if not 0.1 <= options.interval <= 3600:
        raise UsageError(f"--interval is {options.interval:g}.", "Give 0.1 to 3600 seconds.")
    is_once = options.once or options.json or not sys.stdout.isatty()
    with open_run.open_source(options.name, options.run) as source:
        watch = Watch(source)
        watch.settle()
        if not is_once:
            live_table.run_top(watch, options.interval)
        elif options.json:
            view = watch.view
            print_json({"sections": watch.make_model(), "events": view.get_events(),
                        "refit": view.get_refit("")})  # fmt: skip
        else:
            live_table.print_once(watch, None if sys.stdout.isatty() else 160)
    return 0


def report(options: argparse.Namespace) -> int:
    """Write the report of one run, or of two."""
    from rollway.observe.report import write_report

    if len(options.runs) > 2:
        raise UsageError(f"{len(options.runs)} runs are given.", "Give one, or two to compare.")
    directories = [open_run.find_run(text) for text in options.runs or [None]]
    out = options.out or Path(f"{'-'.join(path.name for path in directories)}.html")
    result = {"file": str(out.resolve()), **write_report(directories, out)}
    print_result(options, result, print_report)
    return 0


def print_report(result: Mapping[str, Any]) -> None:
    """Print the findings of a report, and where it is."""
    for run in result["runs"]:
        print(f"{run['stack']} {run['run']}: {run['text']}")
        for note in run["notes"]:
            print(f"  {note}")
        for finding in run["findings"]:
            print(f"  {finding['kind']}: {finding['text']}")
        if not run["findings"] and run["began"] is not None:
            print("  Nothing failed, nothing was slow, nothing was stale.")
    for each in result.get("differences", ()):
        if each["verdict"] in ("better", "worse"):
            print(f"  {each['verdict']}: {each['label']}: {each['first']} -> {each['second']}")
    print(f"report: {result['file']}")


def choose_token(options: argparse.Namespace) -> str:
    """Return the token of the environment, else a new one with `--token`. An address that others
    reach needs one; without, the text is empty."""
    token = callers.read_token(TOKEN) or (secrets.token_urlsafe(24) if options.token else "")
    callers.check_address(options.host, bool(token), TOKEN_FIX)
    return token


async def _serve(source: RunSource, access: DashAccess, options: argparse.Namespace) -> None:
    # Before the address is printed: whoever reads it may stop the dashboard at once.
    stop_requested = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop_requested.set)
    dashboard = Dashboard(source, access)
    async with serve(dashboard, access, options.host, options.port) as url:
        if options.json:
            print_json({"url": url, "shows": source.label})
        else:
            print(f"{source.label}: {url}  (Ctrl-C ends)", flush=True)
        is_opened = options.open and not options.json and sys.stdout.isatty()
        async with open_in_browser(url) if is_opened else nullcontext():
            await stop_requested.wait()


@asynccontextmanager
async def open_in_browser(url: str) -> AsyncIterator[None]:
    """Open an address in the user's browser. It goes there by a file that only this user can read:
    all users can read the arguments of a browser, and the address may have the token."""
    with tempfile.NamedTemporaryFile("w", suffix=".html", dir=make_home()) as file:
        file.write(f'<meta http-equiv="refresh" content="0; url={url}">\n')
        file.flush()
        with suppress(webbrowser.Error):
            await asyncio.to_thread(webbrowser.open, Path(file.name).as_uri())
        yield


def add_dash(parser: Parser) -> None:
    set_command(parser, dash)
    add_name(parser)
    parser.add_argument("--run", type=Path, metavar="DIR", help="a recorded run instead")
    text = "a gateway's (default: the stack's)"
    parser.add_argument("--journal", type=Path, metavar="FILE", help=text)
    add_listening(parser, 8180)
    add_flag(parser, "--token", "ask for a token: ROLLWAY_DASH_TOKEN, or a random one")
    text = "whether to open a browser (default: if a person starts it)"
    parser.add_argument("--open", action=argparse.BooleanOptionalAction, default=True, help=text)


def add_top(parser: Parser) -> None:
    set_command(parser, top)
    add_name(parser)
    parser.add_argument("--run", type=Path, metavar="DIR", help="a recorded run instead")
    add_flag(parser, "--once", "print it once")
    text = "seconds between two looks (default 1; more for a slow line)"
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help=text)


def add_report(parser: Parser) -> None:
    set_command(parser, report)
    text = "a run directory, or its name; the newest run without it; two are compared"
    parser.add_argument("runs", nargs="*", metavar="DIR", help=text)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: <name of DIR>.html")
