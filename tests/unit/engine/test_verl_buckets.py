"""Weights of verl's own sender, received in a worker: exact, and messages cannot run code.

The sender here imitates verl's; tests/verl uses verl's own.
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

from rollway.engine.foreign_senders import Bucket, BucketContents, VerlBucketsReceiver, read_message
from rollway.errors import UsageError, WeightsError
from rollway.weights.offer import Offer
from rollway.weights.untrusted import read_pickle

Tensors = dict[str, torch.Tensor]
SIZE = 4096


def weights() -> Tensors:
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}


def meta(tensor: torch.Tensor, **other: Any) -> dict[str, Any]:
    fields = {"name": "?", "shape": tensor.shape, "dtype": tensor.dtype, "offset": 64}
    return {**fields, "handle": None, **other}


class Sender:
    """One bucket in a directory, and any messages."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bucket = directory / "verl_weights_1"
        self.bucket.write_bytes(bytes(SIZE))
        self.path = directory / "sock"
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, 3000)
        self.receiver_ended = threading.Event()
        self.socket.bind(f"ipc://{self.path}")
        self.acknowledged = 0

    def write(self, tensor: torch.Tensor, offset: int) -> None:
        with self.bucket.open("r+b") as file:
            file.seek(offset)
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def send_message(self, message: Any, *, raw: bool = False) -> None:
        self.socket.send(message if raw else pickle.dumps(message))
        while not self.socket.poll(20):
            if self.receiver_ended.is_set():
                raise zmq.Again
        self.socket.recv()
        self.acknowledged += 1

    def send(self, tensors: Tensors) -> None:
        """Send a bucket for each tensor."""
        self.send_message({"name": self.bucket.name, "size": SIZE})
        for number, (name, tensor) in enumerate(tensors.items(), 1):
            self.write(tensor, 64)
            self.send_message(
                {"bucket_meta": {name: meta(tensor)}, "is_last": number == len(tensors)}
            )

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    bucket_sender = Sender(tmp_path)
    yield bucket_sender
    bucket_sender.close()


def offer(sender: Sender, seconds: float = 3.0) -> Offer:
    model = sender.directory / "model"
    model.mkdir(exist_ok=True)
    save_file(weights(), model / "model.safetensors")
    where = {"sockets": ["/nobody", str(sender.path)], "checkpoint": str(model), "seconds": seconds}
    return Offer("verl_buckets", 1, "i" * 16, 54, where, repeatable=False)


def receive(sender: Sender, work: Callable[[], None], seconds: float = 3.0) -> Tensors:
    """Run `work` on a thread, and return what an engine's second rank receives meanwhile."""

    def run() -> None:
        with contextlib.suppress(zmq.Again):  # the receiver has ended
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        receiver = VerlBucketsReceiver(sender.directory)
        receiver.rank = 1
        return {n: t.clone() for n, t in receiver.tensors(offer(sender, seconds))}
    finally:
        sender.receiver_ended.set()
        thread.join()


def test_received_tensors_equal_the_sent_ones(sender: Sender) -> None:
    tensors = receive(sender, lambda: sender.send(weights()))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in weights().items())
    assert sender.acknowledged == 3
    headers = VerlBucketsReceiver().headers(offer(sender))
    assert headers["b"].shape == (5,)


def test_tensors_that_differ_from_the_models_are_refused(sender: Sender) -> None:
    with pytest.raises(UsageError, match="b is missing"):
        receive(sender, lambda: sender.send({"a": weights()["a"]}))


def send_second(sender: Sender, message: Any, *, raw: bool = False) -> Callable[[], None]:
    def work() -> None:
        sender.send_message({"name": sender.bucket.name, "size": SIZE})
        sender.send_message(message, raw=raw)

    return work


class Calls:
    def __init__(self, what: Any, *arguments: Any) -> None:
        self._what, self._arguments = what, arguments

    def __reduce__(self) -> Any:
        return self._what, self._arguments


def test_a_message_cannot_call_anything(sender: Sender, tmp_path: Path) -> None:
    bad = {"bucket_meta": {}, "is_last": Calls(os.mkdir, str(tmp_path / "called"))}
    with pytest.raises(WeightsError, match=r"names (posix|os)\.mkdir"):
        receive(sender, send_second(sender, bad))
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("what", [eval, getattr, torch.load, torch.empty, torch.Tensor, bytearray])
def test_messages_may_name_shapes_and_dtypes_alone(what: Any) -> None:
    with pytest.raises(WeightsError, match="which is not allowed"):
        read_pickle(pickle.dumps({"x": Calls(what, "1")}), "verl")
    plain = {"shape": torch.Size([2, 3]), "dtype": torch.bfloat16, "n": [1, True, None, "x"]}
    assert read_pickle(pickle.dumps(plain), "verl") == plain


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_are_an_error(raw: bytes) -> None:
    with contextlib.suppress(WeightsError):
        assert isinstance(read_message(raw, BucketContents), BucketContents)


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"offset": SIZE - 8}, "outside of its bucket"),
        ({"offset": -8}, "describes no TensorPlace"),
        ({"offset": 2}, "outside of its bucket"),
        ({"offset": 1.0}, "describes no TensorPlace"),
        ({"shape": torch.Size([1 << 40])}, "outside of its bucket"),
        ({"shape": torch.Size([-1])}, "describes no TensorPlace"),
        ({"shape": "ab"}, "describes no TensorPlace"),
        ({"dtype": "float32"}, "describes no TensorPlace"),
        ({"handle": ("f", ())}, "describes no TensorPlace"),
    ],
)
def test_a_tensor_must_be_inside_its_bucket(
    sender: Sender, wrong: dict[str, Any], cause: str
) -> None:
    entries = {"a": meta(weights()["a"], **wrong)}
    with pytest.raises(WeightsError, match=cause):
        receive(sender, send_second(sender, {"bucket_meta": entries, "is_last": True}))


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ({"name": "../model/model.safetensors", "size": 8}, "not a bucket of verl's"),
        ({"name": "rollway-weights-1", "size": 8}, "not a bucket of verl's"),
        ({"name": "verl_weights_2", "size": 8}, "cannot be read"),
        ({"name": "verl_weights_1", "size": SIZE + 1}, "does not hold"),
        ({"name": "verl_weights_1"}, "describes no Bucket"),
        ([1], "describes no Bucket"),
    ],
)
def test_a_bucket_must_be_one_of_verls(sender: Sender, message: Any, cause: str) -> None:
    with pytest.raises(WeightsError, match=cause):
        receive(sender, lambda: sender.send_message(message))


def test_sockets_and_buckets_of_another_user_are_refused(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: sender.path.stat().st_uid + 1)
    with pytest.raises(WeightsError, match="not a socket of this user"):
        receive(sender, lambda: None, seconds=0.3)
    with pytest.raises(WeightsError, match="belongs to another user"):
        VerlBucketsReceiver(sender.directory)._map(Bucket("verl_weights_1", SIZE))


def test_waiting_for_a_sender_has_a_limit(sender: Sender) -> None:
    with pytest.raises(WeightsError, match=r"within 0\.3 s"):
        receive(sender, lambda: None, seconds=0.3)
    sender.path.unlink()
    with pytest.raises(WeightsError, match="No rank sends weights"):
        receive(sender, lambda: None, seconds=0.3)
    sender.path.write_text("no socket")
    with pytest.raises(WeightsError, match="not a socket of this user"):
        receive(sender, lambda: None, seconds=0.3)
