"""`rollway prime-rl`: commands for prime-rl's orchestrator and trainer."""

from __future__ import annotations

import argparse
import asyncio

from rollway.cli.programs import check_exposure, read_gateway_options
from rollway.errors import UsageError


def serve(options: argparse.Namespace) -> int:
    """Run prime-rl's inference server until a signal ends it."""
    from rollway.integrations.prime_rl import serve as server

    if options.gate_seconds <= 0:
        raise UsageError(f"--gate-seconds is {options.gate_seconds:g}.", "Use more than 0.")
    if options.output_dir is not None and not options.output_dir.is_dir():
        raise UsageError(
            f"--output-dir {options.output_dir} is not a directory.",
            "Give the directory in which the trainer is started, and create it first.",
        )
    hosts = [options.host] if options.admin_port is None else [options.host, options.admin_host]
    access, tls = check_exposure(options, hosts)
    serve_options = server.ServeOptions(
        read_gateway_options(options),
        admin_host=options.admin_host,
        admin_port=options.admin_port,
        output_dir=options.output_dir,
        marker=options.marker,
        gate_seconds=options.gate_seconds,
    )
    asyncio.run(server.serve(serve_options, access, tls))
    return 0
