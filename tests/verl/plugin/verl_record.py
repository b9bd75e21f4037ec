"""Record the requests and answers of a run's engines, and the weights of each step.

Every request of a trajectory is recorded twice: as verl's client sees it (`call`), and as the JSON
between Rollway and the engine (`wire`); `affinity=trajectory` makes the trajectory known. Lines are
in $ROLLWAY_RECORD, a file for each process, beside the weights.
"""

from __future__ import annotations

import contextvars
import json
import os
import time
from pathlib import Path

from rollway.http import Http
from rollway.integrations.verl.requests import Requests
from rollway.integrations.verl.verl_buckets import iterate
from rollway.integrations.verl.weights import WeightSender

DIRECTORY = Path(os.environ["ROLLWAY_RECORD"])

_trajectory = contextvars.ContextVar("trajectory", default=None)
_sample, _post, _send = Requests.sample, Http.post, WeightSender.send


def note(kind: str, **fields) -> None:
    with (DIRECTORY / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, "time": time.time(), **fields}) + "\n")


async def sample(self, prompt, params, group, trajectory):
    _trajectory.set(trajectory)
    output = await _sample(self, prompt, params, group, trajectory)
    note(
        "call",
        trajectory=trajectory,
        prompt=prompt,
        tokens=output["token_ids"],
        logprobs=output["log_probs"],
        stop_reason=output["stop_reason"],
        step=output["extra_fields"].get("global_steps"),
    )
    return output


async def post(self, url, body, **options):
    answer = await _post(self, url, body, **options)
    trajectory = _trajectory.get()
    if trajectory is not None and url.endswith("/v1/completions"):
        tokens = (answer.get("nvext") or {}).get("completion_token_ids") or []
        note("wire", trajectory=trajectory, prompt=body["nvext"]["token_data"], tokens=tokens)
    return answer


async def send(self, weights, pool, step):
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().clone() async for name, tensor in iterate(weights)}
    save_file({name: t.contiguous() for name, t in tensors.items()}, DIRECTORY / f"{step}.weights")
    return await _send(self, iter(tensors.items()), pool, step)


Requests.sample, Http.post, WeightSender.send = sample, post, send
