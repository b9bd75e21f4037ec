"""`rollway dash`: serve the page of a stack, or of a recorded run, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
import webbrowser

from rollway.cli.output import print_json, print_progress
from rollway.config import is_loopback
from rollway.errors import UsageError
from rollway.observe.dash import open_run
from rollway.observe.dash.access import TOKEN, Access
from rollway.observe.dash.server import Dashboard, serve
from rollway.observe.dash.source import Source


def dash(options: argparse.Namespace) -> int:
    """Serve until a signal arrives."""
    if options.run is not None and options.name is not None:
        raise UsageError("A stack and a run directory are given.", "Give one of them.")
    access = Access(read_token(options))
    access.check_host(options.host)
    if access.token and not is_loopback(options.host):
        print_progress(f"What the page shows crosses the network of {options.host} in the clear.")
    with open_run.open_source(options.name, options.run) as source:
        asyncio.run(_serve(source, access, options))
    return 0


def read_token(options: argparse.Namespace) -> str:
    """Return the token, or an empty text. It is no argument: all users can read those."""
    token = os.environ.get(TOKEN, "").strip()
    if TOKEN in os.environ and len(token) < 16:
        raise UsageError(f"{TOKEN} has fewer than 16 characters.", "Unset it, and use --token.")
    return token or (secrets.token_urlsafe(24) if options.token else "")


async def _serve(source: Source, access: Access, options: argparse.Namespace) -> None:
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
        if options.open and not options.json and sys.stdout.isatty():
            with contextlib.suppress(webbrowser.Error):
                await asyncio.to_thread(webbrowser.open, url)
        await stop_requested.wait()
