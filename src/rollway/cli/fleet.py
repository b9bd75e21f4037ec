"""`rollway fleet …`: the workers of a running stack."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rollway
from rollway.cli.arguments import Command, Parser, add_flag, add_name, make_group
from rollway.cli.output import print_json, print_progress, print_result, print_table
from rollway.errors import RefitError, RollwayError, UsageError
from rollway.fleet.admin import version_left
from rollway.fleet.report import RefitReport, SleepReport, WorkerSleep
from rollway.fleet.workers import Worker
from rollway.spec import AdminTimeouts
from rollway.stack.ray import launcher
from rollway.sync import Fleet


def ls(options: argparse.Namespace) -> int:
    with _attach(options) as fleet:
        workers = fleet.workers()
        served = fleet.read_versions() if workers else {}
        paused = [fleet.is_paused(worker) for worker in workers]
    rows = [
        {**_as_json(worker, served.get(worker.instance_id)), "paused": is_paused}
        for worker, is_paused in zip(workers, paused, strict=True)
    ]
    print_result(options, {"workers": rows}, _print_workers)
    return 0


def _print_workers(listing: dict[str, Any]) -> None:
    print_table(
        ("worker", "model", "role", "version", "admin address", "trouble"),
        (
            (row["instance_id"], row["model"], row["role"], _describe_version(row["version"]),
             row["admin_url"], row["error"] or ("paused: resume it" if row["paused"] else ""))
            for row in listing["workers"]
        ),
    )  # fmt: skip


def pause(options: argparse.Namespace) -> int:
    with _attach(options) as fleet:
        fleet.pause(options.mode)
        return _print_count(options, "paused", fleet)


def resume(options: argparse.Namespace) -> int:
    with _attach(options) as fleet:
        fleet.resume()
        return _print_count(options, "resumed", fleet)


def sleep(options: argparse.Namespace) -> int:
    with _attach(options) as fleet:
        report = fleet.sleep(options.level, options.mode)
    print_result(options, report.as_json(), lambda _: _print_sleep(report))
    return 0


def wake(options: argparse.Namespace) -> int:
    with _attach(options) as fleet:
        report = fleet.wake()
    print_result(options, report.as_json(), lambda _: _print_sleep(report))
    return 0


def refit(options: argparse.Namespace) -> int:
    with _attach(options) as fleet:
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
                print_json({**error.as_json(), "report": error.report.as_json()})
                return error.exit_code
            _print_report(error.report)
            raise
    print_result(options, report.as_json(), lambda _: _print_report(report))
    return 0


def versions(options: argparse.Namespace) -> int:
    with _attach(options) as fleet:
        served = fleet.read_versions()
    versions = {str(instance): version for instance, version in served.items()}
    print_result(options, {"versions": versions}, _print_versions)
    return 0


def _print_versions(listing: dict[str, Any]) -> None:
    for instance, version in listing["versions"].items():
        print(f"worker {instance}: {_describe_version(version)}")


def watch(options: argparse.Namespace) -> int:
    """Print a line for every change until Ctrl-C."""
    before: dict[str, dict[str, Any]] = {}
    with _attach(options) as fleet:
        while True:
            try:
                served, workers = fleet.read_versions(), fleet.workers()
            except RollwayError as error:  # the frontend restarts, or the only worker does
                print_progress(f"rollway: {error.message}")
                time.sleep(options.seconds)
                continue
            now = {str(w.instance_id): _as_json(w, served.get(w.instance_id)) for w in workers}
            for instance in before.keys() | now.keys():
                if before.get(instance) != now.get(instance):
                    _print_change(options, instance, before.get(instance), now.get(instance))
            before = now
            time.sleep(options.seconds)


@contextmanager
def _attach(options: argparse.Namespace) -> Iterator[Fleet]:
    target = launcher.resolve_name(options.name)
    # The other commands end at once: they must not begin a refit of a worker that joins.
    opening = rollway.attach(
        target,
        rl_url=options.rl_url,
        watch=options.run_command is watch,
        timeouts=_parse_timeouts(options.timeout),
    )
    with opening as stack:
        yield stack.fleet_of(options.model)


def _parse_timeouts(texts: list[str]) -> AdminTimeouts | None:
    """Parse `pause=900`; return None without any, so that those of the stack's spec apply."""
    if not texts:
        return None
    try:
        parts = [text.partition("=") for text in texts]
        return AdminTimeouts(**{name: float(seconds) for name, _, seconds in parts})
    except ValueError as error:
        raise UsageError(
            f"`--timeout {' '.join(texts)}` is not understood.",
            "For example: --timeout pause=900 --timeout update=1800",
        ) from error


def _as_json(worker: Worker, version: int | None) -> dict[str, Any]:
    return {
        "instance_id": str(worker.instance_id),  # 64 bits: more than a double can hold
        "model": worker.model,
        "role": worker.role,
        "version": version,
        "admin_url": worker.admin_url,
        "routes": sorted(worker.routes),
        "error": worker.error,
    }


def _describe_version(version: int | None) -> str:
    kept = version_left(version)
    if kept is not None:
        return f"left version {kept}: it sleeps, or waits for a refit"
    if version is not None and version < 0:
        return "between two versions"
    return "none declared" if version is None else f"version {version}"


def _print_count(options: argparse.Namespace, action: str, fleet: Fleet) -> int:
    count = len(fleet.workers())
    print_result(options, {action: count}, lambda _: print(f"{action} {count} workers"))
    return 0


def _print_report(report: RefitReport) -> None:
    steps = ("preflight", "pause", "update", "resume")
    rows = (
        (
            *(str(worker.instance_id), worker.state, worker.proof),
            *(f"{getattr(worker, f'{step}_seconds'):.3f}" for step in steps),
            worker.error or "",
        )
        for worker in report.workers
    )
    print_table(("worker", "state", "proof", *(f"{step} s" for step in steps), "error"), rows)
    print(
        f"version {report.version}: {report.serving} of {len(report.workers)} workers, "
        f"{report.seconds:.3f} s, paused for {report.paused_seconds:.3f} s"
    )


def _print_sleep(report: SleepReport) -> None:
    moments = ("before", "asleep", "after")

    def describe(worker: WorkerSleep, moment: str) -> str:
        return ", ".join(f"{rank['free'] / 1e9:.2f}" for rank in worker.memory.get(moment, []))

    rows = (
        (
            *(str(worker.instance_id), worker.state, str(worker.level or "")),
            "" if worker.version is None else str(worker.version),
            *(describe(worker, moment) for moment in moments),
            f"{sum(worker.seconds.values()):.3f}",
        )
        for worker in report.workers
    )
    free = (f"free {moment} GB" for moment in moments)
    print_table(("worker", "state", "level", "version", *free, "s"), rows)
    if not all(rank["releases"] for w in report.workers for r in w.memory.values() for rank in r):
        print("engines on CPU keep their memory while they sleep")
    if any(w.state == "asleep" and w.version is None for w in report.workers):
        print("workers without a version need a refit, which wakes them")


def _print_change(
    options: argparse.Namespace,
    instance: str,
    before: dict[str, Any] | None,
    now: dict[str, Any] | None,
) -> None:
    event = "joined" if before is None else "left" if now is None else "changed"
    facts = now or before or {}
    if options.json:
        print_json({"time": time.time(), "event": event, **facts})
        return
    trouble = f", {facts['error']}" if facts["error"] else ""
    print(f"{event}: worker {instance}, {_describe_version(facts['version'])}{trouble}", flush=True)


def add_fleet(parser: Parser) -> None:
    add_command = make_group(parser)

    def add(run: Command, text: str) -> Parser:
        parser = add_command(run.__name__, run, text)
        add_name(parser)
        parser.add_argument("--rl-url", help="address of the RL worker listing, if elsewhere")
        parser.add_argument("--model", help="one of several served models")
        text = "limit of a call: probe, pause (also the wait for running requests), update"
        parser.add_argument(
            "--timeout", action="append", default=[], metavar="CALL=SECONDS", help=text
        )
        return parser

    add(ls, "list the workers, also those in error")
    parser = add(pause, "stop generation and remove the workers from routing")
    parser.add_argument("--mode", choices=["wait", "keep", "abort"], default="wait")
    add(resume, "resume generation")
    parser = add(sleep, "release the workers' memory until a wake or a refit")
    text = "1 keeps the weights in the host's memory (default), 2 forgets them"
    parser.add_argument("--level", type=int, choices=[1, 2], default=1, help=text)
    parser.add_argument("--mode", choices=["wait", "abort"], default="wait")
    add(wake, "return workers that sleep at level 1 to service")
    parser = add(refit, "load a checkpoint into every worker")
    parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint directory")
    parser.add_argument("--version", type=int, required=True, help="higher than all before")
    modes = ["pause-all", "rolling", "in-flight"]
    parser.add_argument("--mode", choices=modes, default="pause-all")
    parser.add_argument("--share", type=float, default=0.5, help="of the workers at a time")
    add_flag(parser, "--allow-cast", "accept another dtype than the served one")
    add(versions, "show which weight version each worker serves")
    parser = add(watch, "show who joins and leaves; update workers that join")
    parser.add_argument("--seconds", type=float, default=2.0, help="between two polls (default 2)")
