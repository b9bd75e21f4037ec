"""Run directories for tests; they are made as the benchmark makes its own."""

from __future__ import annotations

from rollway.bench.made_run import RUN, STACK, STEP_SECONDS, MadeRun, Writer, make_header, write_run

__all__ = ["RUN", "STACK", "STEP_SECONDS", "MadeRun", "Writer", "make_header", "write_run"]
