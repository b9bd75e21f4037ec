"""A peer process for tests of prime-rl's broadcast: one more worker in the trainer's group.

Requests and answers are lines of JSON, by standard input and output.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from rollway.engine.foreign_senders import PrimeRlBroadcastReader
from rollway.errors import RollwayError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import dtype_name
from rollway.weights.offer import STILL, Offer, parse_offer

WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(120_000.0).view(400, 300),
    "model.layers.0.a": torch.ones(50_000, dtype=torch.bfloat16),
    "model.layers.0.b": torch.full((200, 20), 7.0),
    "model.layers.1.a": torch.zeros(0, 3),
    "model.norm.weight": torch.tensor(3.0),
}


def headers() -> dict[str, TensorHeader]:
    return {n: TensorHeader(dtype_name(t), tuple(t.shape), "") for n, t in WEIGHTS.items()}


def join_offer(port: int, world_size: int, seconds: float = 20) -> Offer:
    place = {
        "host": "127.0.0.1", "port": port, "receivers": world_size - 1,
        "init_seconds": seconds, "step_seconds": seconds,
    }  # fmt: skip
    return Offer("prime_rl_broadcast", 0, f"group-{port}", 0, {"place": place, "first_rank": 0})


def stage_offer(group: Offer, number: int) -> Offer:
    return Offer("prime_rl_broadcast", 0, f"version-{number}", 1 << 20, {"group": group.identity})


def main() -> None:
    reader = PrimeRlBroadcastReader(headers())
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, object]
        try:
            if "join" in request:
                offer = parse_offer(request["join"])
                reader.join(offer, request["rank"], torch.device("cpu"))
                _wait(reader, offer)
                answer = {"joined": True}
            else:
                offer = parse_offer(request["stage"])
                reader.headers(offer)
                for _ in reader.tensors(offer):
                    pass
                answer = {"digest": reader.get_digest(offer)}
        except (RollwayError, RuntimeError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def _wait(reader: PrimeRlBroadcastReader, offer: Offer) -> None:
    while True:
        try:
            return reader.check_joined(offer.identity)
        except RuntimeError as error:
            if STILL not in str(error):
                raise
        time.sleep(0.02)  # between two questions to the reader


if __name__ == "__main__":
    main()
