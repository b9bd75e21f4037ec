"""A process of its own for tests of the collective transport: takes offers, or publishes some.

Requests and answers are lines of JSON, by standard input and output.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollway.engine.receivers import Receiver, receiver_for
from rollway.errors import RollwayError
from rollway.weights.digest.bits import raw_bytes
from rollway.weights.offer import parse_offer
from rollway.weights.transports.collective import CollectivePublisher

Facts = dict[str, list[Any]]


def awkward_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Every kind of tensor: dtypes, sizes, none at all, not contiguous, larger than a bucket."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    made = {
        "scalar": some(1)[0],
        "nothing": some(0, 7),
        "one byte": torch.tensor([seed % 256], dtype=torch.uint8),
        "three bytes": torch.tensor([1, 2, seed % 100], dtype=torch.int8),
        "large": some(700, 1000),
        "between": some(5).to(torch.float64),
        "larger": some(1100, 1003).to(torch.bfloat16),
        "turned": some(300, 200).t(),
        "half": some(33, 5).half(),
        "flags": some(999) > 0,
        "eight bits": some(64, 64).to(torch.float8_e4m3fn),
        "long": torch.arange(1000) * seed,
        "last nothing": some(0),
    }
    return made | {f"layer.{n}": some(65, 129) for n in range(30)}


def facts(name_and_tensor: tuple[str, torch.Tensor]) -> tuple[str, list[Any]]:
    name, tensor = name_and_tensor
    words = hashlib.sha256(raw_bytes(tensor).numpy().tobytes()).hexdigest()
    return name, [str(tensor.dtype), list(tensor.shape), words]


def receive(request: dict[str, Any], kept: dict[str, Receiver]) -> Facts:
    offer = parse_offer(request["offer"])
    receiver = receiver_for(offer, kept)
    assert receiver.headers(offer)
    taken: Facts = {}
    for name, tensor in receiver.tensors(offer):
        taken.update([facts((name, tensor))] if request.get("hash", True) else [])
        if request.get("die_at") == name:
            os.kill(os.getpid(), signal.SIGKILL)
        if request.get("break_at") == name:
            raise RollwayError("this tensor does not fit here")
        time.sleep(request.get("sleep", 0.0))
    return taken


def default_group(store: Path) -> None:
    """What a trainer has made before it publishes."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)


def default_group_works() -> bool:
    value = torch.ones(3)
    dist.all_reduce(value)
    return bool((value == 1).all()) and dist.get_world_size() == 1


def answer_requests() -> None:
    kept: dict[str, Receiver] = {}
    for line in sys.stdin:
        request = json.loads(line)
        began = time.monotonic()
        answer: dict[str, Any] = {"error": ""}
        try:
            answer["taken"] = receive(request, kept)
        except RollwayError as error:
            answer["error"] = str(error)
        answer["seconds"] = time.monotonic() - began
        answer["open"] = len(list(Path("/proc/self/fd").iterdir()))
        answer["default_group"] = dist.is_initialized()
        print(json.dumps(answer), flush=True)


def publish_beside_a_default_group(store: Path) -> None:
    default_group(store)
    with CollectivePublisher() as publisher:
        offer = publisher.publish(1, awkward_tensors(1).items(), receivers=2)
        print(json.dumps(offer.as_json()), flush=True)
        publisher.wait(1)
    assert default_group_works()
    dist.barrier(async_op=True).wait(timedelta(seconds=5))
    dist.destroy_process_group()
    print(json.dumps({"ok": True}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        publish_beside_a_default_group(Path(sys.argv[1]))
    else:
        print(json.dumps({"ready": True}), flush=True)
        answer_requests()
