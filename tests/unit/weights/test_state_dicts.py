"""prime-rl's broadcast on the wire: exact, in prime-rl's own form, and no list of it runs code."""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import DTYPES, dtype_name, raw_bytes
from rollway.weights.transports.group import read_unique_id, send, write_unique_id
from rollway.weights.transports.state_dicts import (
    MAX_LIST_BYTES,
    Receiver,
    Unfit,
    make_messages,
    read_list,
    split_in_layers,
    write_list,
)

CPU = torch.device("cpu")


class Tape:
    """A channel in memory: what is sent first is received first. Lengths must agree."""

    def __init__(self, *messages: bytes) -> None:
        self.messages = deque(messages)
        self.is_sending = True

    def broadcast(self, flat: Tensor) -> None:
        if self.is_sending:
            self.messages.append(bytes(flat.numpy()))
        else:
            raw = self.messages.popleft()
            assert len(raw) == flat.numel()
            flat.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else flat)


def headers(tensors: dict[str, Tensor]) -> dict[str, TensorHeader]:
    return {n: TensorHeader(dtype_name(t), tuple(t.shape), "") for n, t in tensors.items()}


def record(tensors: dict[str, Tensor]) -> Tape:
    tape = Tape()
    send(tape, make_messages(split_in_layers(tensors.items()), CPU))
    tape.is_sending = False
    return tape


def receive(
    tape: Tape, expected: dict[str, TensorHeader], **more: Any
) -> tuple[dict[str, Tensor], Receiver]:
    receiver = Receiver(tape, CPU, expected, more.pop("max_bytes", 1 << 24), **more)
    return {name: tensor.clone() for name, tensor in receiver.tensors()}, receiver


WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(12.0).view(4, 3),
    "model.layers.0.a": torch.ones(5, dtype=torch.bfloat16),
    "model.layers.0.b": torch.full((2, 2), 7.0),
    "model.layers.1.a": torch.zeros(0, 3),
    "model.norm.weight": torch.tensor(3.0),
}


def test_a_broadcast_is_what_prime_rls_trainer_sends() -> None:
    """By the text of its sender: the count, then for each state dict length, pickle and flats."""
    messages = list(record(WEIGHTS).messages)
    assert messages.pop(0) == struct.pack("<q", 3)  # two layers, and the rest
    for names in (("model.embed_tokens.weight", "model.norm.weight"),
                  ("model.layers.0.a", "model.layers.0.b"), ("model.layers.1.a",)):  # fmt: skip
        (length,) = struct.unpack("<q", messages.pop(0))
        raw = messages.pop(0)
        assert len(raw) == length
        listed = pickle.loads(raw)
        assert [entry[0] for entries in listed.values() for entry in entries] == list(names)
        for dtype, entries in listed.items():
            flat = torch.cat([WEIGHTS[name].flatten() for name, _, _ in entries])
            assert flat.dtype == dtype
            assert all(e == (e[0], WEIGHTS[e[0]].shape, WEIGHTS[e[0]].numel()) for e in entries)
            assert messages.pop(0) == bytes(raw_bytes(flat).numpy())
    assert not messages


def test_what_was_sent_arrives_and_ranks_can_compare_it() -> None:
    received, receiver = receive(record(WEIGHTS), headers(WEIGHTS))
    assert received.keys() == WEIGHTS.keys()
    assert all(torch.equal(received[name], WEIGHTS[name]) for name in WEIGHTS)
    _, other = receive(record(WEIGHTS), headers(WEIGHTS))
    changed = {**WEIGHTS, "model.norm.weight": torch.tensor(4.0)}
    _, third = receive(record(changed), headers(WEIGHTS))
    assert receiver.digest == other.digest != third.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.0.c": torch.ones(1)}, "model.layers.0.c is not part of the model"),
        ({"model.layers.0.a": torch.ones(6)}, r"model.layers.0.a has shape \[6\]"),
        ({"model.norm.weight": None}, "model.norm.weight is missing"),
        ({"model.layers.0.mlp.experts.w13_weight": torch.ones(1)}, "quantize_in_weight_transfer"),
        ({"model.layers.0.b": torch.ones(2, 2).to(torch.float8_e4m3fn)}, "kernel's layout"),
        ({"model.layers.0.x_scale": torch.ones(4).to(torch.float8_e8m0fnu)}, "kernel's layout"),
    ],
)
def test_tensors_that_do_not_fit_are_received_to_the_end(change: Any, message: str) -> None:
    changed = {name: t for name, t in {**WEIGHTS, **change}.items() if t is not None}
    tape = record(changed)
    with pytest.raises(Unfit, match=message):
        receive(tape, headers(WEIGHTS))
    assert not tape.messages, "the next broadcast would begin in the middle of this one"


def test_the_dtype_may_differ_and_a_tied_head_may_be_there_or_not() -> None:
    sent = {name: t.to(torch.bfloat16) for name, t in WEIGHTS.items()}
    assert receive(record(sent), headers(WEIGHTS))[0].keys() == WEIGHTS.keys()
    with_head = {**WEIGHTS, "lm_head.weight": torch.ones(4, 3)}
    assert "lm_head.weight" not in receive(record(with_head), headers(WEIGHTS), is_tied=True)[0]
    assert receive(record(WEIGHTS), headers(with_head), is_tied=True)[0].keys() == WEIGHTS.keys()
    with pytest.raises(Unfit, match=r"lm_head\.weight is missing"):
        receive(record(WEIGHTS), headers(with_head))


def number(value: int) -> bytes:
    return struct.pack("<q", value)


@pytest.mark.parametrize(
    "messages",
    [
        [number(0)],
        [number(-1)],
        [number(1 << 40)],
        [number(1), number(0)],
        [number(1), number(MAX_LIST_BYTES + 1)],
        [number(1), number(-5)],
        [number(1), number(3), b"abc"],
    ],
)
def test_impossible_numbers_are_refused_before_memory_is_taken(messages: list[bytes]) -> None:
    tape = Tape(*messages)
    tape.is_sending = False
    with pytest.raises(WeightsError):
        receive(tape, headers(WEIGHTS))


def test_more_bytes_than_the_model_can_have_are_refused_before_memory_is_taken() -> None:
    raw = pickle.dumps({torch.float32: [("a", torch.Size([1 << 40]), 1 << 40)]})
    tape = Tape(number(1), number(len(raw)), raw)
    tape.is_sending = False
    with pytest.raises(WeightsError, match="more than 1000 bytes"):
        receive(tape, {}, max_bytes=1000)


DTYPE = st.sampled_from(list(DTYPES.values()))
SHAPE = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NAME = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(st.dictionaries(NAME, st.tuples(DTYPE, SHAPE), max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_list_reads_back(facts: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in facts.items()}
    raw, groups = write_list(tensors)
    entries = {
        name: (dtype, shape) for dtype, listed in read_list(raw) for name, shape, _ in listed
    }
    assert entries == facts
    assert sum(len(group) for group in groups) == len(tensors)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_no_bytes_are_more_than_refused(raw: bytes) -> None:
    for read in (read_list, read_unique_id):
        with contextlib.suppress(WeightsError):
            read(raw)  # type: ignore[operator]


@given(st.binary(min_size=1, max_size=40), st.integers(0, 400))
@settings(max_examples=200, deadline=None)
def test_a_damaged_list_is_refused_or_still_a_list(damage: bytes, at: int) -> None:
    raw = bytearray(write_list(WEIGHTS)[0])
    at %= len(raw)
    raw[at : at + len(damage)] = damage
    try:
        messages = read_list(bytes(raw))
    except WeightsError:
        return
    assert all(isinstance(dtype, torch.dtype) for dtype, _ in messages)


class Hostile:
    def __init__(self, run: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = run, arguments

    def __reduce__(self) -> Any:
        return self._reduced


@pytest.mark.parametrize(
    "message",
    [
        Hostile(print, "run"),
        {torch.float32: [(Hostile(exec, "1/0"), torch.Size([1]), 1)]},
        {torch.float32: [("a", Hostile(torch.load, "x"), 1)]},
        {"F32": [("a", torch.Size([1]), 1)]},
        {torch.float32: [("a", torch.Size([1]), 2)]},
        {torch.float32: [("a", torch.Size([1]), True)]},
        {torch.float32: [("a", (-1,), -1)]},
        {torch.float32: [("", torch.Size([1]), 1)]},
        {torch.float32: "abc"},
        {torch.complex64: [("a", torch.Size([1]), 1)]},
        [torch.float32],
    ],
)
def test_a_list_of_anything_else_is_refused(
    message: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WeightsError):
        read_list(pickle.dumps(message))
    assert capsys.readouterr().out == ""


def test_vllms_unique_id_is_read_as_bytes() -> None:
    wrapper = pytest.importorskip("vllm.distributed.device_communicators.pynccl_wrapper")
    unique_id = wrapper.ncclUniqueId()
    for index in range(128):
        unique_id.internal[index] = index - 64
    assert read_unique_id(pickle.dumps(unique_id)) == bytes(unique_id)
    written = pickle.loads(write_unique_id(bytes(unique_id)))  # as prime-rl's workers read it
    assert isinstance(written, wrapper.ncclUniqueId) and bytes(written) == bytes(unique_id)
    for hostile in (Hostile(print, "x"), (1, 2), b"x" * 128):
        with pytest.raises(WeightsError):
            read_unique_id(pickle.dumps(hostile))
