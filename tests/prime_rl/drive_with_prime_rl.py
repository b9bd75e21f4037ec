"""Drive the server with prime-rl's own inference pool, unmodified, and print what happened.

Run by the interpreter of .venv-prime-rl, with a checkout of prime-rl on PYTHONPATH:
drive_with_prime_rl.py URL ADMIN_URL MODEL DIRECTORY…
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from prime_rl.configs.shared import ClientConfig
from prime_rl.utils.client import InferencePool, init_nccl_broadcast


async def drive(url: str, admin_url: str, model: str, *directories: str) -> dict[str, Any]:
    config = ClientConfig(base_url=url, admin_base_url=[admin_url], wait_for_ready_timeout=60)
    pool = InferencePool(config, model)
    await pool.wait_for_ready(model)
    for step, directory in enumerate(directories):
        await pool.update_weights(Path(directory), step=step)
    refusals = []
    await init_nccl_broadcast(pool.admin_clients, "127.0.0.1", 29501, 5, 1)  # it ignores our 409
    with tempfile.TemporaryDirectory() as elsewhere:  # prime-rl writes its own marker there
        for directory in (directories[0], f"{elsewhere}/step_9"):
            try:
                await pool.update_weights(Path(directory), step=9)
            except httpx.HTTPStatusError as error:
                message = error.response.json()["error"]["message"]
                refusals.append([error.response.status_code, message])
    await pool.update_weights(Path(directories[-1]), step=len(directories) - 1)
    await pool.stop()
    return {"refusals": refusals}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(drive(*sys.argv[1:]))))
