"""Child processes of benchmarks: start them, serve in them, and read their CPU time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
from aiohttp import web

from chaos import make_environment
from rollway import processes
from rollway.errors import StartError
from rollway.stack.state import ProcessState, StackDir

_START_SECONDS = 240.0
_END_SECONDS = 10.0


@asynccontextmanager
async def start_child(*argv: str) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """Run a module until the block ends; yield its pid, and the line of JSON that it prints when it
    is ready."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *argv),
        env=make_environment(),
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=processes.die_with_parent,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), _START_SECONDS)
        if not line.startswith(b"{"):
            raise StartError(f"`{' '.join(argv)}` did not start.", "Its error is above.")
        yield process.pid, json.loads(line)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()


async def serve(app: web.Application) -> None:
    """Serve on a free port, say which, as `start_child` expects it, and do not return."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
    await asyncio.Event().wait()


def list_processes(stack: str) -> Iterator[tuple[ProcessState, list[int]]]:
    """Yield the running processes of a stack, each with its pid and those of its descendants."""
    state = StackDir(stack).read()
    for process in state.processes if state is not None else ():
        if process.pid is not None:
            children = psutil.Process(process.pid).children(recursive=True)
            yield process, [process.pid, *(child.pid for child in children)]


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process; 0 if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0
