"""`rollway gateway`: an OpenAI endpoint in front of a running stack."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from rollway.errors import UsageError


def add_grammar(child: argparse.ArgumentParser) -> None:
    child.add_argument(
        "stack", nargs="?", help="its name, or its frontend's address; none: the only one"
    )
    child.add_argument("--model", help="one of several served models")
    child.add_argument("--tokenizer", help="directory or name; the model's own where it is known")
    child.add_argument("--host", default="127.0.0.1", help="where to listen (default: loopback)")
    child.add_argument("--port", type=int, default=8100, help="0 for a free one (default 8100)")
    child.add_argument("--rl-url", help="address of the RL worker listing, where it is elsewhere")
    child.add_argument(
        "--journal", type=Path, help="file that sessions are kept in (default: Rollway's home)"
    )
    child.add_argument(
        "--journal-sync",
        action="store_true",
        help="wait for the disk before each answer, so that a power cut loses no turn",
    )
    child.add_argument(
        "--bundle",
        choices=["asked", "always", "never"],
        default="asked",
        help="whether answers carry their token ids",
    )
    child.add_argument(
        "--routed-experts",
        action="store_true",
        help="record which experts ran for each token (MoE; workers that return them)",
    )
    child.add_argument("--tls-cert", metavar="FILE", help="certificate (PEM), to serve https")
    child.add_argument("--tls-key", metavar="FILE", help="its key (PEM)")
    child.set_defaults(command=gateway)


def gateway(options: argparse.Namespace) -> int:
    """Run the gateway. Tokens come from the environment, so that no list of processes shows
    them."""
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
            print(
                f"Tokens and prompts cross the network of {options.host} in the clear. Give "
                "--tls-cert and --tls-key to serve https.",
                file=sys.stderr,
            )
    asyncio.run(serve(options, access, tls))
    return 0
