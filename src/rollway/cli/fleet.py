"""`rollway fleet …`: the workers of a running stack, by its name or by its frontend's address."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import rollway
from rollway.config import AdminTimeouts
from rollway.errors import RefitError, RollwayError, UsageError
from rollway.fleet.discovery import Worker
from rollway.fleet.report import RefitReport
from rollway.stack import local
from rollway.sync import SyncFleet

Add = Callable[..., argparse.ArgumentParser]
out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def add_grammar(child: argparse.ArgumentParser) -> None:
    commands = child.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> Any:
        one = commands.add_parser(name, help=text, description=text)
        one.add_argument("--json", action="store_true", help="JSON on stdout")
        one.add_argument("--stack", help="its name, or its frontend's address; none: the only one")
        one.add_argument("--rl-url", help="address of the RL worker listing, where it is elsewhere")
        one.add_argument("--model", help="one of several served models")
        one.add_argument(
            "--timeout",
            action="append",
            default=[],
            metavar="CALL=SECONDS",
            help="bound of one call: probe, pause (also the wait for running requests), update",
        )
        one.set_defaults(command=command)
        return one

    add("ls", ls, "list the workers, also those in trouble")
    one = add("pause", pause, "stop generation and take the workers out of the routing")
    one.add_argument("--mode", choices=["wait", "keep", "abort"], default="wait")
    add("resume", resume, "go on generating")
    one = add("refit", refit, "bring every worker to a checkpoint")
    one.add_argument("path", type=Path, metavar="PATH", help="a checkpoint directory")
    one.add_argument(
        "--version", type=int, required=True, help="its number, higher than any before"
    )
    one.add_argument("--mode", choices=["pause-all", "rolling", "in-flight"], default="pause-all")
    one.add_argument("--share", type=float, default=0.5, help="of the workers at a time (rolling)")
    one.add_argument(
        "--allow-cast", action="store_true", help="take weights of another dtype than the served"
    )
    add("versions", versions, "show which weight version each worker serves")
    one = add("watch", watch, "show who joins and leaves; bring joiners up to date")
    one.add_argument("--seconds", type=float, default=2.0, help="between two looks (default 2)")


def ls(options: argparse.Namespace) -> int:
    with _fleet(options) as fleet:
        workers = fleet.workers()
        served = fleet.read_versions() if workers else {}
    if options.json:
        print(json.dumps({"workers": [_as_json(w, served.get(w.instance_id)) for w in workers]}))
        return 0
    table = Table(box=None, pad_edge=False)
    for column in ("worker", "model", "version", "admin address", "trouble"):
        table.add_column(column, overflow="fold")
    for worker in workers:
        version = _words(served.get(worker.instance_id))
        table.add_row(
            str(worker.instance_id), worker.model, version, worker.admin_url, worker.error or ""
        )
    out.print(table)
    return 0


def pause(options: argparse.Namespace) -> int:
    with _fleet(options) as fleet:
        fleet.pause(options.mode)
        return _say(options, {"paused": len(fleet.workers())}, "paused {paused} workers")


def resume(options: argparse.Namespace) -> int:
    with _fleet(options) as fleet:
        fleet.resume()
        return _say(options, {"resumed": len(fleet.workers())}, "resumed {resumed} workers")


def refit(options: argparse.Namespace) -> int:
    with _fleet(options) as fleet:
        try:
            report = fleet.refit(
                options.version,
                options.path,
                mode=options.mode,
                share=options.share,
                allow_cast=options.allow_cast,
            )
        except RefitError as error:
            if options.json:
                print(json.dumps({**error.as_json(), "report": error.report.as_json()}))
                return error.exit_code
            _print_report(error.report)
            raise
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        _print_report(report)
    return 0


def versions(options: argparse.Namespace) -> int:
    with _fleet(options) as fleet:
        served = fleet.read_versions()
    if options.json:
        print(json.dumps({"versions": {str(i): v for i, v in served.items()}}))
    else:
        for instance, version in served.items():
            print(f"worker {instance}: {_words(version)}")
    return 0


def watch(options: argparse.Namespace) -> int:
    """Polls from here, so that a line is printed as soon as it is known; ends with Ctrl-C."""
    before: dict[str, Any] = {}
    with _fleet(options) as fleet:
        while True:
            try:
                served, listed = fleet.read_versions(), fleet.workers()
            except RollwayError as error:  # the frontend restarts, or the only worker does
                print(f"rollway: {error.message}", file=sys.stderr, flush=True)
                time.sleep(options.seconds)
                continue
            now = {str(w.instance_id): _as_json(w, served.get(w.instance_id)) for w in listed}
            for instance in before.keys() | now.keys():
                if before.get(instance) != now.get(instance):
                    _print_change(options, instance, before.get(instance), now.get(instance))
            before = now
            time.sleep(options.seconds)


@contextmanager
def _fleet(options: argparse.Namespace) -> Iterator[SyncFleet]:
    target = options.stack or local.resolve_name(None)
    # A command that ends at once must not begin to bring a worker up to date.
    watching = options.command is watch
    with rollway.attach(
        target, rl_url=options.rl_url, watch=watching, timeouts=_timeouts(options.timeout)
    ) as stack:
        yield stack.fleet_of(options.model)


def _timeouts(said: list[str]) -> AdminTimeouts | None:
    """`pause=900`, as often as wanted; None when nothing was said: then the stack's spec counts."""
    if not said:
        return None
    try:
        parts = [one.partition("=") for one in said]
        return AdminTimeouts(**{name: float(text) for name, _, text in parts})
    except ValueError as error:
        raise UsageError(
            f"`--timeout {' '.join(said)}` is not understood.",
            "For example: --timeout pause=900 --timeout update=1800",
        ) from error


def _as_json(worker: Worker, version: int | None) -> dict[str, Any]:
    return {
        "instance_id": str(worker.instance_id),  # beyond what a double can hold
        "model": worker.model,
        "version": version,
        "admin_url": worker.admin_url,
        "routes": sorted(worker.routes),
        "error": worker.error,
    }


def _words(version: int | None) -> str:
    if version is not None and version < 0:
        return "between two versions"
    return "none declared" if version is None else f"version {version}"


def _say(options: argparse.Namespace, facts: dict[str, Any], words: str) -> int:
    print(json.dumps(facts) if options.json else words.format(**facts))
    return 0


def _print_report(report: RefitReport) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("worker", "state", "proof", "pause s", "update s", "resume s", "error"):
        table.add_column(column, overflow="fold")
    for w in report.workers:
        times = (f"{t:.3f}" for t in (w.pause_seconds, w.update_seconds, w.resume_seconds))
        table.add_row(str(w.instance_id), w.state, w.proof, *times, w.error or "")
    out.print(table)
    out.print(
        f"version {report.version}: {report.serving} of {len(report.workers)} workers, "
        f"{report.seconds:.3f} s, stood still for {report.paused_seconds:.3f} s"
    )


def _print_change(
    options: argparse.Namespace,
    instance: str,
    was: dict[str, Any] | None,
    now: dict[str, Any] | None,
) -> None:
    event = "joined" if was is None else "left" if now is None else "changed"
    facts = now or was or {}
    if options.json:
        print(json.dumps({"time": time.time(), "event": event, **facts}), flush=True)
        return
    trouble = f", {facts['error']}" if facts["error"] else ""
    print(f"{event}: worker {instance}, {_words(facts['version'])}{trouble}", flush=True)
