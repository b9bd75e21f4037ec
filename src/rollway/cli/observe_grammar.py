"""The arguments of `rollway observe`."""

from __future__ import annotations

from pathlib import Path

from rollway.cli.arguments import Add, port


def add_observe_commands(add: Add) -> None:
    parser = add("export", "observe:export", "write files for Prometheus, Grafana, Kubernetes")
    kinds = ["prometheus", "grafana", "alerts", "podmonitors"]
    text = "a scrape config with targets; a dashboard; rules; the same for Prometheus' operator"
    parser.add_argument("what", choices=kinds, metavar="WHAT", help=f"{', '.join(kinds)}: {text}")
    text = "with prometheus: a stack, or a frontend's address; with podmonitors: a graph"
    parser.add_argument("name", nargs="?", metavar="NAME", help=text)
    text = "the directory to write to"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)
    text = "with prometheus: stay, keep the targets true, and serve Rollway's own metrics"
    parser.add_argument("--follow", action="store_true", help=text)
    text = "with --follow: where to listen (default: loopback)"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    text = "with --follow: 0 for a free one (default 8181)"
    parser.add_argument("--port", type=port, default=8181, help=text)
    text = "with --follow: admit only who has a token: that of ROLLWAY_DASH_TOKEN, or a random one"
    parser.add_argument("--token", action="store_true", help=text)
    text = "between two scrapes, and between two evaluations of rules (default 5)"
    parser.add_argument("--seconds", type=float, default=5.0, help=text)
    text = "a bound of an alert, for example mismatch_k3=0.01; repeatable"
    parser.add_argument("--bound", action="append", default=[], metavar="NAME=NUMBER", help=text)
