"""`rollway gateway`: serve an OpenAI endpoint in front of a running stack."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rollway.cli.arguments import add_name, set_command
from rollway.cli.output import print_progress
from rollway.errors import UsageError


def add_gateway(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("--model", help="one of several served models")
    parser.add_argument(
        "--tokenizer", help="a directory or a name; the model's own where it is known"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: loopback)")
    parser.add_argument("--port", type=int, default=8100, help="0 for a free one (default 8100)")
    parser.add_argument("--rl-url", help="address of the RL worker listing, if it is elsewhere")
    parser.add_argument(
        "--journal", type=Path, help="file that sessions are recorded in (default: Rollway's home)"
    )
    parser.add_argument(
        "--journal-sync",
        action="store_true",
        help="wait for the disk before each answer, so that a power cut loses no turn",
    )
    parser.add_argument(
        "--bundle",
        choices=["asked", "always", "never"],
        default="asked",
        help="whether answers carry their token ids",
    )
    parser.add_argument(
        "--routed-experts",
        action="store_true",
        help="record which experts ran for each token (MoE; workers that return them)",
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate (PEM), to serve https")
    parser.add_argument("--tls-key", metavar="FILE", help="its key (PEM)")
    set_command(parser, gateway)


def gateway(options: argparse.Namespace) -> int:
    """Run the gateway until a signal ends it.

    Tokens come from the environment: the list of processes would show an argument to everybody."""
    import asyncio

    from rollway.gateway.access import AGENT_TOKENS, OPERATOR_TOKENS, Access, is_loopback_host
    from rollway.gateway.command import serve, tls_context

    access = Access.from_environment(os.environ)
    tls = tls_context(options.tls_cert, options.tls_key)
    host = f"[{options.host}]" if ":" in options.host else options.host
    if not is_loopback_host(host):
        if not access.needs_token:
            raise UsageError(
                f"Listening on {options.host} without a token would let anybody in.",
                f"Set {AGENT_TOKENS} (agents) or {OPERATOR_TOKENS} (operators) to one or more "
                "tokens.",
            )
        if tls is None:
            print_progress(
                f"Tokens and prompts cross the network of {options.host} in the clear. Give "
                "--tls-cert and --tls-key to serve https."
            )
    options.stack = options.name
    asyncio.run(serve(options, access, tls))
    return 0
