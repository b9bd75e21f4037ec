"""prime-rl's weight broadcast on the wire: state dicts, one after another, from rank 0 of a group.

    trainer (rank 0)                                                 ranks 1 … W of engines
    int64[1]   how many state dicts ───────────────────────────────►
    for each of them: the tensors outside of layers, then layer 0, 1, …
      int64[1]   the length of its list ───────────────────────────►
      uint8[…]   the list, a pickle of {dtype: [(name, shape, numel), …]} ─► read as plain values
      flat       for each dtype, its tensors one after another ────► views of one received tensor

prime-rl's trainer forms the group with the ranks of all engines, by vLLM's `StatelessProcessGroup`,
and keeps it for its run. It has no CPU trainer: over gloo the same messages run between CPU workers
and a trainer of one's own (`rollway.integrations.prime_rl.broadcast`).

All ranks must stay in step: a rank that missed a message would take the next one for it. So
tensors that do not fit are received to the end of the broadcast, and refused only then (`Unfit`).
After any other error, the group is of no use any more.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from rollway.errors import WeightsError
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import DTYPES, digest, raw_bytes
from rollway.weights.layout import is_kernel_layout
from rollway.weights.offer import Count, Dims, Text
from rollway.weights.transports.base import NamedTensor
from rollway.weights.transports.group import (
    BrokenOff,
    Group,
    Place,
    connect_store,
    form_group,
)
from rollway.weights.untrusted import check_shape, read_pickle

MAX_STATE_DICTS = 1 << 16
MAX_LIST_BYTES = 64 << 20
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_TOLD = "It is received once: the trainer must send again, after /init_broadcaster."
Entries = list[tuple[Text, Dims, Count]]


class Unfit(WeightsError):
    """A whole broadcast arrived, and its tensors are not those of the served model."""


def join_group(place: Place, rank: int, device: torch.device, watch: Callable[[], None]) -> Group:
    """Join a trainer's group as a rank of an engine. The trainer may begin to listen only later."""
    store, line = connect_store(place, watch, place.init_seconds)
    try:
        return form_group(place, rank, store, device, watch, line)
    except BaseException as error:
        line.close()
        if not isinstance(error, RuntimeError):
            raise
        raise BrokenOff(f"The group did not form: {str(error)[:300]}") from error


# --- sending -------------------------------------------------------------------------------------


def split_in_layers(tensors: Iterable[NamedTensor]) -> list[dict[str, Tensor]]:
    """Return the state dicts that prime-rl sends: first what is in no layer, then each layer."""
    layers: dict[int, dict[str, Tensor]] = {-1: {}}
    for name, tensor in tensors:
        match = _LAYER.search(name)
        layers.setdefault(int(match[1]) if match else -1, {})[name] = tensor.detach()
    return [layers[number] for number in sorted(layers)]


def write_list(state_dict: Mapping[str, Tensor]) -> tuple[bytes, list[list[Tensor]]]:
    """Return the list of a state dict, and the tensors of each of its flat messages."""
    groups: dict[torch.dtype, list[NamedTensor]] = {}
    for name, tensor in state_dict.items():
        groups.setdefault(tensor.dtype, []).append((name, tensor))
    listed = {
        dtype: [(name, tensor.shape, tensor.numel()) for name, tensor in pairs]
        for dtype, pairs in groups.items()
    }
    return pickle.dumps(listed), [[tensor for _, tensor in pairs] for pairs in groups.values()]


def make_messages(
    state_dicts: Sequence[Mapping[str, Tensor]], device: torch.device
) -> Iterator[Tensor]:
    """Yield the messages of a broadcast."""
    yield _as_message(len(state_dicts), device)
    for state_dict in state_dicts:
        raw, groups = write_list(state_dict)
        listed = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
        # Joined before its list is sent, while the last state dict is still under way.
        flats = [raw_bytes(_flatten(tensors, device)) for tensors in groups]
        yield from (_as_message(len(raw), device), listed, *flats)


def _flatten(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    flat = [tensor.to(device).flatten() for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _as_message(number: int, device: torch.device) -> Tensor:
    return raw_bytes(torch.tensor([number], dtype=torch.int64, device=device))


# --- receiving -----------------------------------------------------------------------------------


def read_list(raw: bytes) -> list[tuple[torch.dtype, Entries]]:
    """Return the tensors of each flat message; raise `WeightsError` if a list says anything else
    than names, shapes and dtypes."""
    listed = read_pickle(raw, "the trainer")
    if not isinstance(listed, dict) or not all(isinstance(key, torch.dtype) for key in listed):
        raise WeightsError("The trainer's list of tensors is not ordered by dtype.")
    try:
        messages = [(dtype, msgspec.convert(found, Entries)) for dtype, found in listed.items()]
        for name, shape, numel in (entry for _, entries in messages for entry in entries):
            if numel != math.prod(check_shape(shape)):
                raise ValueError(f"{name[:200]!a} has {numel} elements and the shape {shape}")
    except (ValueError, RecursionError) as error:  # also of msgspec
        raise WeightsError(f"The trainer's list of tensors is damaged: {error}.") from error
    return messages


@dataclass(slots=True)
class Receiver:
    """Receives one broadcast; rank 0 of the group sends it."""

    group: Group
    device: torch.device
    expected: Mapping[str, TensorHeader]
    """The tensors of the served model; dtypes may differ."""
    max_bytes: int
    """A broadcast of more bytes is broken off."""
    is_tied: bool = False
    """Whether the head is tied to the embeddings: it may then be sent or not, and is not used."""
    problems: list[str] = field(default_factory=list)
    _received: dict[str, TensorHeader] = field(default_factory=dict)
    _nbytes: int = 0
    _digest: Any = field(default_factory=hashlib.sha256)

    @property
    def digest(self) -> str:
        """Identifies the bytes that arrived: equal on all ranks that received the same."""
        return str(self._digest.hexdigest()[:32])

    def tensors(self) -> Generator[NamedTensor, None, None]:
        """Yield the tensors as they come."""
        count = self._receive_number()
        if not 0 < count <= MAX_STATE_DICTS:
            raise WeightsError(f"The trainer announces {count} state dicts.")
        for _ in range(count):
            length = self._receive_number()
            if not 0 < length <= MAX_LIST_BYTES:
                raise WeightsError(f"The trainer announces a list of {length} bytes.")
            raw = bytes(self._receive_bytes(length).cpu().numpy())
            for dtype, entries in read_list(raw):
                message = self._receive_flat(dtype, entries)
                if not self.problems:
                    yield from message
        missing = sorted(self.expected.keys() - self._received.keys())
        self.problems += [f"{name} is missing" for name in missing if not self._is_optional(name)]
        if self.problems:
            more = f" and {len(self.problems) - 5} more" if len(self.problems) > 5 else ""
            raise Unfit(
                "The broadcast does not fit the model that is served: "
                f"{'; '.join(self.problems[:5])}{more}.",
                _TOLD,
            )

    def _receive_flat(self, dtype: torch.dtype, entries: Entries) -> list[NamedTensor]:
        self._judge(dtype, entries)
        flat = self._receive_bytes(sum(numel for *_, numel in entries) * dtype.itemsize)
        self._digest.update(digest(flat).encode())
        tensors, at = [], 0
        for name, shape, numel in entries:
            end = at + numel * dtype.itemsize
            if name in self.expected:
                tensors.append((name, flat[at:end].view(dtype).view(shape)))
            at = end
        return tensors

    def _judge(self, dtype: torch.dtype, entries: Entries) -> None:
        """Note what does not fit the served model."""
        kind = _NAMES.get(dtype, str(dtype))
        for name, shape, _ in entries:
            expected = self.expected.get(name)
            if is_kernel_layout(name, kind):
                self.problems.append(
                    f"{name} ({kind}) is in a kernel's layout, and the engine makes its own scales "
                    "(set quantize_in_weight_transfer = false)"
                )
            elif name in self._received:
                self.problems.append(f"{name} came twice")
            elif expected is None and not self._is_optional(name):
                self.problems.append(f"{name} is not part of the model")
            elif expected is not None and expected.shape != shape:
                self.problems.append(f"{name} has shape {list(shape)}, served is {expected}")
            self._received[name] = TensorHeader(kind, shape, "")

    def _is_optional(self, name: str) -> bool:
        return self.is_tied and name.endswith("lm_head.weight")

    def _receive_number(self) -> int:
        return int(self._receive_bytes(8).view(torch.int64).item())

    def _receive_bytes(self, nbytes: int) -> Tensor:
        self._nbytes += nbytes
        if self._nbytes > self.max_bytes:
            raise WeightsError(
                f"The trainer sends more than {self.max_bytes} bytes, which the model cannot have."
            )
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.group.broadcast(flat)
        return flat
