"""`rollway gateway`: an OpenAI endpoint of a stack that records tokens."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from ssl import SSLContext

from rollway.callers import check_address
from rollway.cli.arguments import (
    Parser,
    add_flag,
    add_listening,
    add_name,
    pick_fields,
    set_command,
)
from rollway.cli.output import print_progress
from rollway.gateway.command import GatewayOptions, make_tls_context, serve
from rollway.gateway.tokens import AGENT_TOKENS, OPERATOR_TOKENS, Access
from rollway.spec import is_loopback


def gateway(options: argparse.Namespace) -> int:
    """Run the gateway until a signal ends it."""
    access, tls = check_exposure(options, [options.host])
    asyncio.run(serve(read_gateway_options(options), access, tls))
    return 0


def check_exposure(
    options: argparse.Namespace, hosts: Sequence[str]
) -> tuple[Access, SSLContext | None]:
    """Return who may call a gateway, and its TLS; refuse to let strangers in.

    Tokens come from the environment: the list of processes would show an argument to everybody."""
    access = Access.from_environment(os.environ)
    tls = make_tls_context(options.tls_cert, options.tls_key)
    fix = f"Set {AGENT_TOKENS} (agents) or {OPERATOR_TOKENS} (operators) to one or more tokens."
    for host in hosts:
        check_address(host, access.needs_token, fix)
        if tls is None and not is_loopback(host):
            print_progress(
                f"Tokens and prompts cross the network of {host} in the clear. Give "
                "--tls-cert and --tls-key to serve https."
            )
    return access, tls


def read_gateway_options(options: argparse.Namespace) -> GatewayOptions:
    return GatewayOptions(**pick_fields(GatewayOptions, options) | {"stack": options.name})


def add_gateway(parser: Parser) -> None:
    add_gateway_options(set_command(parser, gateway))


def add_gateway_options(parser: Parser) -> None:
    add_name(parser)
    parser.add_argument("--model", help="one of several served models")
    parser.add_argument("--tokenizer", help="a directory or a name (default: the model's own)")
    add_listening(parser, 8100)
    parser.add_argument("--rl-url", help="address of the RL worker listing, if it is elsewhere")
    parser.add_argument("--journal", type=Path, help="where to record (default: Rollway's home)")
    add_flag(parser, "--journal-sync", "wait for the disk before each answer")
    modes, text = ["asked", "always", "never"], "whether answers carry their token ids"
    parser.add_argument("--bundle", choices=modes, default="asked", help=text)
    add_flag(parser, "--routed-experts", "record which experts ran for each token (MoE)")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate (PEM), to serve https")
    parser.add_argument("--tls-key", metavar="FILE", help="its key (PEM)")
