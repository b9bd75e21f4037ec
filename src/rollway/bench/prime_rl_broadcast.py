"""Measure prime-rl's `nccl` broadcast, over gloo, against Rollway's `collective`.

Both send the same weights from one process to others, which verify them and copy them into
parameters, as an engine does when it stages a version. Rounds alternate between the two.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from rollway.weights.checkpoint import TensorHeader
from rollway.weights.offer import Offer, parse_offer

LAYERS = 24
SECONDS = 120.0
Shapes = dict[str, tuple[int, ...]]


def list_shapes(megabytes: int, layers: int = LAYERS) -> Shapes:
    """Return the float32 tensors of a model of about this size, as a decoder has them."""
    # A layer has 4 + 3·3 squares of this width, the embeddings 26.
    width = max(8, int((megabytes * 1e6 / 4 / (13 * layers + 26)) ** 0.5) // 8 * 8)
    shapes: Shapes = {"model.embed_tokens.weight": (26 * width, width)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (width, width) for part in "qkvo"}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (3 * width, width) for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (width, 3 * width)
        shapes[f"{name}.input_layernorm.weight"] = (width,)
    return shapes


def measure(megabytes: int = 500, receivers: int = 2, rounds: int = 3) -> dict[str, Any]:
    """Return the median seconds of a version by each, and the ratio of their speeds.

    `ratio` is above 1 if the broadcast is the faster one."""
    import torch

    from rollway.integrations.prime_rl.broadcast import CollectiveSender
    from rollway.weights.transports.collective import CollectivePublisher

    weights = {name: torch.randn(shape) for name, shape in list_shapes(megabytes).items()}
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    seconds: dict[str, list[float]] = {"broadcast": [], "collective": []}
    with (
        _open_receivers(megabytes, receivers) as pipes,
        CollectivePublisher(receivers=receivers, init_seconds=SECONDS) as publisher,
        CollectiveSender("127.0.0.1", 0, receivers, SECONDS) as sender,
    ):
        group = _make_seat(sender.port, receivers)
        for rank, pipe in enumerate(pipes):
            pipe.send(("join", group.as_json(), rank))
        sender.connect()
        _collect(pipes)

        def broadcast(number: int) -> None:
            offer = _make_broadcast(group, number, nbytes)
            _send_all(pipes, offer)
            sender.send(number, weights.items())

        def publish(number: int) -> None:
            _send_all(pipes, publisher.publish(number, weights.items()))
            publisher.wait(number)

        ways: dict[str, Callable[[int], None]] = {"broadcast": broadcast, "collective": publish}
        for number in range(rounds + 1):  # the first warms up
            for name, run in ways.items():
                began = time.perf_counter()
                run(number + 1)
                _collect(pipes)
                if number:
                    seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "bytes": nbytes,
        "receivers": receivers,
        "rounds": rounds,
        "seconds": medians,
        "all_seconds": seconds,
        "ratio": medians["collective"] / medians["broadcast"],
    }


def _make_seat(port: int, receivers: int) -> Offer:
    place = {
        "host": "127.0.0.1",
        "port": port,
        "world_size": receivers + 1,
        "join_seconds": SECONDS,
        "message_seconds": SECONDS,
    }
    where = {"place": place, "first_rank": 0}
    return Offer("prime_rl_broadcast", 0, "bench-group", 0, where, repeatable=False)


def _make_broadcast(group: Offer, number: int, nbytes: int) -> Offer:
    where = {"group": group.identity}
    return Offer("prime_rl_broadcast", 0, f"broadcast-{number}", nbytes, where, repeatable=False)


def _send_all(pipes: list[Connection], offer: Offer) -> None:
    for pipe in pipes:
        pipe.send(("receive", offer.as_json(), 0))


def _collect(pipes: list[Connection]) -> None:
    for pipe in pipes:
        if not pipe.poll(SECONDS):
            raise RuntimeError("a receiver does not answer")
        if error := pipe.recv():
            raise RuntimeError(error)


@contextmanager
def _open_receivers(megabytes: int, count: int) -> Iterator[list[Connection]]:
    """Start processes that receive; they end with this one."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_run_receiver, args=(theirs, megabytes), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run_receiver(pipe: Connection, megabytes: int) -> None:
    import torch

    from rollway.engine.incoming import get_reader
    from rollway.engine.prime_rl_broadcast import PrimeRlBroadcastReader
    from rollway.weights.transports.base import Reader

    torch.set_num_threads(1)
    shapes = list_shapes(megabytes)
    parameters = {name: torch.empty(shape) for name, shape in shapes.items()}
    headers = {name: TensorHeader("F32", shape, "") for name, shape in shapes.items()}
    broadcasts = PrimeRlBroadcastReader(headers)
    readers: dict[str, Reader] = {"prime_rl_broadcast": broadcasts}
    while True:
        try:
            what, raw, rank = pipe.recv()
        except EOFError:
            return
        error = ""
        try:
            offer = parse_offer(raw)
            if what == "join":
                broadcasts.join(offer, rank, torch.device("cpu"))
                _wait_joined(broadcasts, offer)
            else:
                reader = get_reader(offer, readers)
                reader.headers(offer)
                for name, tensor in reader.tensors(offer):
                    parameters[name].copy_(tensor)
        except Exception as problem:  # noqa: BLE001 (the other process raises it)
            error = f"{type(problem).__name__}: {problem}"
        pipe.send(error)


def _wait_joined(reader: Any, offer: Offer) -> None:
    from rollway.weights.offer import STILL

    while True:
        try:
            return reader.check_joined(offer.identity)  # type: ignore[no-any-return]
        except RuntimeError as error:
            if STILL not in str(error):
                raise
        time.sleep(0.01)
