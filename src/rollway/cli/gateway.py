"""`rollway gateway`: serve an OpenAI endpoint in front of a running stack."""

from __future__ import annotations

import argparse
import asyncio
import os

from rollway.cli.output import print_progress
from rollway.errors import UsageError
from rollway.gateway.access import AGENT_TOKENS, OPERATOR_TOKENS, Access, is_loopback_host
from rollway.gateway.command import serve, tls_context


def gateway(options: argparse.Namespace) -> int:
    """Run the gateway until a signal ends it.

    Tokens come from the environment: the list of processes would show an argument to everybody."""

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
