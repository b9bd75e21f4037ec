"""What benchmarks are given: a stack file, the names of parts, the demo's model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rollway.api import make_spec
from rollway.cli.output import get_spec_file
from rollway.errors import UsageError
from rollway.spec import StackSpec
from rollway.stack.preset import cache_dir


def read_spec(options: argparse.Namespace) -> StackSpec | None:
    """Read the stack file, in which `path: demo` is the demo's model."""
    from chaos.target import demo_path

    file = get_spec_file(options)
    return make_spec(file, overrides=[*demo_path(file), *options.set]) if file else None


def read_parts(options: argparse.Namespace, known: Sequence[str]) -> list[str]:
    """Return the parts that --only names; all without it."""
    unknown = sorted(set(options.only) - set(known))
    if unknown:
        raise UsageError(f"There is no part `{unknown[0]}`.", f"Parts: {', '.join(known)}.")
    return list(options.only or known)


def build_demo_model() -> Path:
    from rollway.demo.model import build_base

    return build_base(cache_dir() / "demo")
