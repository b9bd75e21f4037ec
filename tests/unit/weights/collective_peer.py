"""A peer process for tests of the collective transport: it receives offers, or publishes one.

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

from rollway.engine.incoming import get_reader
from rollway.errors import RollwayError
from rollway.weights.digest.checksums import raw_bytes
from rollway.weights.offer import parse_offer
from rollway.weights.transports.base import Reader
from rollway.weights.transports.collective import CollectivePublisher

Facts = dict[str, list[Any]]


def awkward_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Every kind of tensor: dtypes, sizes, none at all, not contiguous, larger than a bucket."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {
        "scalar": random(1)[0],
        "nothing": random(0, 7),
        "one byte": torch.tensor([seed % 256], dtype=torch.uint8),
        "three bytes": torch.tensor([1, 2, seed % 100], dtype=torch.int8),
        "large": random(700, 1000),
        "between": random(5).to(torch.float64),
        "larger": random(1100, 1003).to(torch.bfloat16),
        "turned": random(300, 200).t(),
        "half": random(33, 5).half(),
        "flags": random(999) > 0,
        "eight bits": random(64, 64).to(torch.float8_e4m3fn),
        "long": torch.arange(1000) * seed,
        "last nothing": random(0),
    }
    return tensors | {f"layer.{n}": random(65, 129) for n in range(30)}


def facts(name_and_tensor: tuple[str, torch.Tensor]) -> tuple[str, list[Any]]:
    name, tensor = name_and_tensor
    checksum = hashlib.sha256(raw_bytes(tensor).numpy().tobytes()).hexdigest()
    return name, [str(tensor.dtype), list(tensor.shape), checksum]


def receive(request: dict[str, Any], readers: dict[str, Reader]) -> Facts:
    offer = parse_offer(request["offer"])
    reader = get_reader(offer, readers)
    assert reader.headers(offer)
    received: Facts = {}
    for name, tensor in reader.tensors(offer):
        received.update([facts((name, tensor))] if request.get("hash", True) else [])
        if request.get("die_at") == name:
            os.kill(os.getpid(), signal.SIGKILL)
        if request.get("break_at") == name:
            raise RollwayError("this tensor does not fit here")
    return received


def default_group(store: Path) -> None:
    """Make the default group that a trainer has before it publishes."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)


def default_group_works() -> bool:
    value = torch.ones(3)
    dist.all_reduce(value)
    return bool((value == 1).all()) and dist.get_world_size() == 1


def answer_requests() -> None:
    readers: dict[str, Reader] = {}
    for line in sys.stdin:
        request = json.loads(line)
        began = time.monotonic()
        answer: dict[str, Any] = {"error": ""}
        try:
            answer["received"] = receive(request, readers)
        except RollwayError as error:
            answer["error"] = str(error)
        answer["seconds"] = time.monotonic() - began
        answer["open"] = len(list(Path("/proc/self/fd").iterdir()))
        answer["default_group"] = dist.is_initialized()
        print(json.dumps(answer), flush=True)


def publish_beside_a_default_group(store: Path) -> None:
    default_group(store)
    with CollectivePublisher() as publisher:
        publisher.expect(2)
        offer = publisher.publish(1, awkward_tensors(1).items())
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
