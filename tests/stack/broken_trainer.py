"""A trainer that sends a part of a broadcast, says so, and then does nothing until it is killed.

python -m tests.stack.broken_trainer PORT RANKS CHECKPOINT
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from rollway.integrations.prime_rl.broadcast import CollectiveSender
from rollway.weights.transports.group import send
from rollway.weights.transports.state_dicts import make_messages, split_in_layers


class HalfChannel:
    """Passes on the first messages; then it waits."""

    def __init__(self, sender: CollectiveSender, messages: int) -> None:
        assert sender._group is not None
        self._group, self._left = sender._group, messages

    def broadcast(self, flat: Tensor) -> None:
        if self._left == 0:
            print("half", flush=True)
            signal.pause()
        self._left -= 1
        self._group.broadcast(flat)


def main() -> None:
    port, ranks, checkpoint = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    sender = CollectiveSender("127.0.0.1", port, ranks, 60)
    print(sender.port, flush=True)
    sender.connect()
    tensors = load_file(checkpoint / "model.safetensors")
    # The number of state dicts, the first of them, and the list of the second.
    messages = make_messages(split_in_layers(tensors.items()), torch.device("cpu"))
    send(HalfChannel(sender, 6), messages)


if __name__ == "__main__":
    main()
