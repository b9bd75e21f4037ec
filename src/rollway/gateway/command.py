"""What `rollway gateway` runs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys

from aiohttp import web

import rollway
from rollway.errors import UsageError
from rollway.gateway.recorder import Recorder
from rollway.gateway.server import Gateway, made_gateway
from rollway.gateway.template import Template
from rollway.stack import local
from rollway.stack.state import StackDir, home


async def serve(options: argparse.Namespace, tokens: frozenset[str]) -> None:
    """Until it is told to end."""
    target = options.stack or local.resolve_name(None)
    async with rollway.attach(target, rl_url=options.rl_url) as stack:
        model = options.model or (stack.models[0] if len(stack.models) == 1 else None)
        tokenizer = options.tokenizer or _model_path(stack.name, model)
        journal = options.journal or home() / "gateway" / f"{stack.name or 'attached'}.jsonl"
        recorder = Recorder(journal, sync=options.journal_sync)
        try:
            made = await made_gateway(
                stack,
                Template(tokenizer),
                recorder,
                model,
                tokens=tokens,
                bundle=options.bundle,
                routed_experts=options.routed_experts,
            )
            await _until_told(made, options)
        finally:
            recorder.close()


def _model_path(stack: str, model: str | None) -> str:
    state = StackDir(stack).read() if stack else None
    path = state.model_paths.get(model or "") if state else None
    if path is None:
        raise UsageError(
            "It is not known which tokenizer the model has.", "Give it with --tokenizer."
        )
    return path


async def _until_told(made: Gateway, options: argparse.Namespace) -> None:
    # A client that has gone does not wait for its answer: its request ends on the worker too.
    runner = web.AppRunner(
        made.app(), access_log=None, shutdown_timeout=5.0, handler_cancellation=True
    )
    await runner.setup()
    site = web.TCPSite(runner, options.host, options.port, backlog=4096)
    try:
        await site.start()
        port = runner.addresses[0][1]
        print(f"http://{options.host}:{port}/v1 serves {made.model}", flush=True)
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):
                asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await ended.wait()
        print("ending", file=sys.stderr)
    finally:
        await runner.cleanup()
