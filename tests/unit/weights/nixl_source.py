"""A trainer rank in another process that publishes over NIXL, controlled through a pipe."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from rollway.weights.offer import Offer

WORD = "a secret of this test"
CONTEXT = multiprocessing.get_context("forkserver")
"""Starts processes that have imported torch already, which takes seconds. NIXL is not among the
modules: its threads do not survive a fork."""
CONTEXT.set_forkserver_preload([__name__, "rollway.weights.transports.nixl"])
Tensors = dict[str, torch.Tensor]


def tensors_of(version: int, layers: int = 6, rows: int = 64) -> Tensors:
    """Return tensors of several dtypes and odd sizes; every version differs from all others."""
    tensors: Tensors = {}
    random = torch.Generator().manual_seed(version)
    for layer in range(layers):
        tensors[f"{layer}.weight"] = torch.randn(rows, 96, generator=random).bfloat16()
        tensors[f"{layer}.norm"] = torch.randn(33, generator=random)
    tensors["scale"] = torch.tensor(float(version))
    tensors["none"] = torch.empty(0, 4)
    return tensors


class Trainer:
    """The test's end of the pipe."""

    def __init__(self, **options: Any) -> None:
        self._pipe, other_end = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(other_end, options), daemon=True)
        self.process.start()
        other_end.close()

    def ask(self, request: str, *args: Any) -> Any:
        self._pipe.send((request, *args))
        assert self._pipe.poll(120), "the trainer does not answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def publish(self, version: int, layers: int = 6, rows: int = 64) -> Offer:
        offer = self.ask("publish", version, layers, rows)
        assert isinstance(offer, Offer)
        return offer

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()


def _serve(pipe: Connection, options: dict[str, Any]) -> None:
    from rollway.weights.transports.nixl import NixlPublisher

    torch.set_num_threads(1)
    publisher = NixlPublisher(secret=WORD, **options)
    adopted: Tensors = {}
    while True:
        request, *args = pipe.recv()
        answer: Any = None
        if request == "publish":
            version, layers, rows = args
            answer = publisher.publish(version, tensors_of(version, layers, rows).items())
        elif request == "adopt":
            adopted = tensors_of(*args)
            publisher.adopt(adopted.items())
        elif request == "publish adopted":
            answer = publisher.publish(*args)
        elif request == "flip":
            raw = adopted[args[0]].view(-1).view(torch.uint8)
            raw[5] ^= 1
        elif request == "idle":
            before = time.process_time()
            time.sleep(args[0])  # what an idle trainer costs is measured over this time
            answer = (time.process_time() - before) / args[0]
        elif request == "end":
            publisher.close()
            pipe.send(None)
            os._exit(0)
        pipe.send(answer)
