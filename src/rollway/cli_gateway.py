"""`rollway gateway`: an OpenAI endpoint in front of a running stack."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from rollway.errors import UsageError

_TOKENS = "ROLLWAY_GATEWAY_TOKENS"


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
    child.set_defaults(command=gateway)


def gateway(options: argparse.Namespace) -> int:
    """Bearer tokens come from the environment, so that they show in
    no list of processes."""
    tokens = frozenset(os.environ.get(_TOKENS, "").replace(",", " ").split())
    if options.host not in ("127.0.0.1", "localhost", "::1") and not tokens:
        raise UsageError(
            f"Listening on {options.host} without a token would let anybody in.",
            f"Set {_TOKENS} to one or more tokens.",
        )
    from rollway.gateway.command import serve

    asyncio.run(serve(options, tokens))
    return 0
