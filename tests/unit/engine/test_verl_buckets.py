"""verl's hand-over as a worker receives it: exact, and nothing a message could call is called.

The sender here speaks as verl's does; tests/verl has verl's own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rollway.engine.verl_buckets import VerlBucketsReceiver, _read
from rollway.errors import UsageError, WeightsError
from rollway.weights.offer import Offer

Tensors = dict[str, torch.Tensor]
SIZE = 4096


def weights() -> Tensors:
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}


def meta(tensor: torch.Tensor, **other: Any) -> dict[str, Any]:
    said = {"name": "?", "shape": tensor.shape, "dtype": tensor.dtype, "offset": 64}
    return {**said, "handle": None, **other}


class Sender:
    """One bucket at `tmp_path`, and whatever messages it is told to send."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bucket = directory / "verl_weights_1"
        self.bucket.write_bytes(bytes(SIZE))
        self.path = directory / "sock"
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, 3000)
        self.alone = threading.Event()
        self.socket.bind(f"ipc://{self.path}")
        self.acknowledged = 0

    def write(self, tensor: torch.Tensor, offset: int) -> None:
        with self.bucket.open("r+b") as file:
            file.seek(offset)
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def say(self, message: Any, *, raw: bool = False) -> None:
        self.socket.send(message if raw else pickle.dumps(message))
        while not self.socket.poll(20):
            if self.alone.is_set():
                raise zmq.Again
        self.socket.recv()
        self.acknowledged += 1

    def send(self, given: Tensors) -> None:
        """A bucket for each tensor."""
        self.say({"name": self.bucket.name, "size": SIZE})
        for number, (name, tensor) in enumerate(given.items(), 1):
            self.write(tensor, 64)
            self.say({"bucket_meta": {name: meta(tensor)}, "is_last": number == len(given)})

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    made = Sender(tmp_path)
    yield made
    made.close()


def offer(sender: Sender, seconds: float = 3.0) -> Offer:
    model = sender.directory / "model"
    model.mkdir(exist_ok=True)
    save_file(weights(), model / "model.safetensors")
    where = {"sockets": ["/nobody", str(sender.path)], "like": str(model), "seconds": seconds}
    return Offer("verl_buckets", 1, "i" * 16, 54, where, repeatable=False)


def received(sender: Sender, work: Callable[[], None], seconds: float = 3.0) -> Tensors:
    """What arrives at an engine's second rank while the work is done."""

    def quietly() -> None:
        with contextlib.suppress(zmq.Again):  # the receiver went away
            work()

    thread = threading.Thread(target=quietly)
    thread.start()
    try:
        receiver = VerlBucketsReceiver(lambda: 1, sender.directory)
        return {n: t.clone() for n, t in receiver.tensors(offer(sender, seconds))}
    finally:
        sender.alone.set()
        thread.join()


def test_what_arrives_is_what_was_sent(sender: Sender) -> None:
    found = received(sender, lambda: sender.send(weights()))
    assert all(torch.equal(found[name], one) for name, one in weights().items())
    assert sender.acknowledged == 3
    headers = VerlBucketsReceiver(lambda: 1).headers(offer(sender))
    assert headers["b"].shape == (5,)


def test_other_tensors_than_the_models_are_refused(sender: Sender) -> None:
    with pytest.raises(UsageError, match="b is missing"):
        received(sender, lambda: sender.send({"a": weights()["a"]}))


def after_the_first(sender: Sender, message: Any, *, raw: bool = False) -> Callable[[], None]:
    def work() -> None:
        sender.say({"name": sender.bucket.name, "size": SIZE})
        sender.say(message, raw=raw)

    return work


class Calls:
    def __init__(self, what: Any, *arguments: Any) -> None:
        self._what, self._arguments = what, arguments

    def __reduce__(self) -> Any:
        return self._what, self._arguments


def test_a_message_that_would_call_something_calls_nothing(sender: Sender, tmp_path: Path) -> None:
    bad = {"bucket_meta": {}, "is_last": Calls(os.mkdir, str(tmp_path / "called"))}
    with pytest.raises(WeightsError, match=r"names (posix|os)\.mkdir"):
        received(sender, after_the_first(sender, bad))
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("what", [eval, getattr, torch.load, torch.empty, torch.Tensor, bytearray])
def test_only_shapes_and_dtypes_have_names(what: Any) -> None:
    with pytest.raises(WeightsError, match="which it never does"):
        _read(pickle.dumps({"x": Calls(what, "1")}))
    plain = {"shape": torch.Size([2, 3]), "dtype": torch.bfloat16, "n": [1, True, None, "x"]}
    assert _read(pickle.dumps(plain)) == plain


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_bytes_that_are_no_message_are_an_error(raw: bytes) -> None:
    with contextlib.suppress(WeightsError):
        assert isinstance(_read(raw), dict)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"offset": SIZE - 8}, "outside of its bucket"),
        ({"offset": -8}, "outside of its bucket"),
        ({"offset": 2}, "outside of its bucket"),
        ({"offset": 1.0}, "outside of its bucket"),
        ({"shape": torch.Size([1 << 40])}, "outside of its bucket"),
        ({"shape": torch.Size([-1])}, "outside of its bucket"),
        ({"shape": "ab"}, "what a is"),
        ({"dtype": "float32"}, "through the bucket"),
        ({"handle": ("f", ())}, "through the bucket"),
    ],
)
def test_a_tensor_lies_in_its_bucket(sender: Sender, wrong: dict[str, Any], words: str) -> None:
    listed = {"a": meta(weights()["a"], **wrong)}
    with pytest.raises(WeightsError, match=words):
        received(sender, after_the_first(sender, {"bucket_meta": listed, "is_last": True}))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"name": "../model/model.safetensors", "size": 8}, "no bucket of verl's"),
        ({"name": "rollway-weights-1", "size": 8}, "no bucket of verl's"),
        ({"name": "verl_weights_2", "size": 8}, "cannot be read"),
        ({"name": "verl_weights_1", "size": SIZE + 1}, "does not hold"),
        ({"name": "verl_weights_1"}, "names no bucket"),
        ([1], "is no mapping"),
    ],
)
def test_a_bucket_is_one_of_verls(sender: Sender, message: Any, words: str) -> None:
    with pytest.raises(WeightsError, match=words):
        received(sender, lambda: sender.say(message))


def test_a_sender_that_says_nothing_is_not_waited_for_without_end(sender: Sender) -> None:
    with pytest.raises(WeightsError, match=r"within 0\.3 s"):
        received(sender, lambda: None, seconds=0.3)
    sender.path.unlink()
    with pytest.raises(WeightsError, match="Nobody sends weights"):
        received(sender, lambda: None, seconds=0.3)
    sender.path.write_text("no socket")
    with pytest.raises(WeightsError, match="no socket of this user"):
        received(sender, lambda: None, seconds=0.3)
