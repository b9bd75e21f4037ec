"""`rollway gateway` as a process: what happens at the moment it is ready."""

from __future__ import annotations

import subprocess
import sys

SERVE = """
import asyncio, os, signal
from types import SimpleNamespace
from rollway.gateway import command

class Server:
    port = 1
    async def close(self):
        os.write(1, b"closed\\n")

async def listen(*_):
    return Server()

def write_and_stop(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)  # whoever reads the address may be this fast

command.listen, command.print = listen, write_and_stop
gateway = SimpleNamespace(model="m")
asyncio.run(command.serve_until_signal(command.ListeningGateway(gateway, "127.0.0.1", 0)))
"""


def test_a_stop_right_after_the_address_is_printed_closes_the_server() -> None:
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"closed\n"), done.stderr
