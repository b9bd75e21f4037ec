"""The experts of a mixture-of-experts model that ran for each token, as engines report them.

Dynamo sends `{data, shape, start, dtype}` with base64 bytes, plain vLLM a base64 `.npy` file. Both
become `RoutedExperts`; inconsistent data is an error. A trainer that replays these choices
(`examples/moe/replay_experts.py`) runs the same experts as the engine.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollway.errors import RolloutError, UsageError

# All are little endian on the wire. vLLM sends unsigned ones and int16; NeMo has signed ones.
_WIRE: dict[str, np.dtype[Any]] = {
    "int8": np.dtype("<i1"),
    "uint8": np.dtype("<u1"),
    "uint16": np.dtype("<u2"),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
}
_ENOUGH_ZEROS = 16  # with top-1 routing, fewer zeros may be the router's own choice
_BYPASSED = (
    "A fused MoE kernel (FlashInfer, TRT-LLM) routes without the engine's capture: turn that "
    "kernel off, or start the workers with the Triton MoE backend "
    "(`args: {moe-backend: triton}`)."
)


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def count_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts that a model's config.json names."""
    parts = (config, config.get("text_config") or {})
    counts = (part.get(name) for part in parts for name in _COUNTS)
    for count in counts:
        if isinstance(count, int) and count > 0:
            return count
    raise UsageError(
        f"The model's config.json names no number of experts ({', '.join(_COUNTS)}).",
        "Routed experts are of mixture-of-experts models; leave them out for a dense one.",
    )


def dtype_for(experts: int) -> np.dtype[Any]:
    """Return the dtype for a model with that many experts, whatever ids a sample has."""
    if experts < 1:
        raise UsageError(f"A model has at least one expert, not {experts}.")
    if experts <= 2**8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if experts <= 2**16 else np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """Expert ids by position, sparse layer and rank."""

    ids: npt.NDArray[Any]
    """[rows, layers, top_k]; the layers are the sparse ones, in order."""
    start: int = 0
    """The position in the sequence (prompt, then completion) of row 0."""

    def __post_init__(self) -> None:
        if self.ids.ndim != 3 or 0 in self.ids.shape[1:] or self.ids.dtype.kind not in "iu":
            raise RolloutError(
                f"Routed experts are integers in [rows, layers, top_k], not {self.ids.dtype} in "
                f"{list(self.ids.shape)}."
            )
        if self.start < 0:
            raise RolloutError(f"Routed experts start at position {self.start}.")

    @property
    def rows(self) -> int:
        return int(self.ids.shape[0])

    @property
    def layers(self) -> int:
        return int(self.ids.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[2])

    @property
    def end(self) -> int:
        """The first position after the last row."""
        return self.start + self.rows

    def since(self, position: int) -> RoutedExperts:
        """Return the rows from a position on: what a later leg of a rollout adds."""
        if not self.start <= position <= self.end:
            raise UsageError(
                f"Routed experts of positions {self.start} to {self.end} do not reach {position}."
            )
        return RoutedExperts(self.ids[position - self.start :], position)

    def cast(self, experts: int) -> RoutedExperts:
        """Return a copy in the dtype of a model with that many experts."""
        dtype = dtype_for(experts)
        self._check_range(experts)
        return replace(self, ids=self.ids.astype(dtype, copy=False))

    def check(self, tokens: int, experts: int) -> None:
        """Raise unless this can be the routing of `tokens` tokens (prompt and completion) in a
        model with `experts` experts. One row may be missing: no forward pass runs on the last
        sampled token."""
        if self.end not in (tokens - 1, tokens):
            raise RolloutError(
                f"The routed experts end at position {self.end}; there are {tokens} tokens.",
                "Include the prompt, and use stop token ids: a stop string cuts an answer before "
                "its routing arrives.",
            )
        self._check_range(experts)
        self.check_capture(experts)

    def _check_range(self, experts: int) -> None:
        if self.rows and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < experts:
            raise RolloutError(
                f"Routed experts have ids from {self.ids.min()} to {self.ids.max()}; the model "
                f"has {experts} experts.",
                "Does the engine serve the model that is trained?",
            )

    def check_capture(self, experts: int = 1) -> None:
        """Raise if some rows were not captured. The experts of a token differ, so zeros are wrong
        with top-2 and above; with top-1 they may be right, unless there are many and `experts`."""
        nothing = self.rows and not self.ids.any()
        if nothing and (self.top_k > 1 or (experts > 1 and self.ids.size >= _ENOUGH_ZEROS)):
            raise RolloutError("The routed experts are all 0: nothing was captured.", _BYPASSED)
        ordered = np.sort(self.ids, axis=-1)
        repeated = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
        if repeated.any():
            row, layer = (int(index) for index in np.argwhere(repeated)[0])
            raise RolloutError(
                f"{int(repeated.any(axis=-1).sum())} of {self.rows} rows of routed experts name an "
                f"expert twice, first {self.ids[row, layer].tolist()} at position "
                f"{self.start + row}, sparse layer {layer}: they were not captured.",
                _BYPASSED,
            )

    def as_json(self) -> dict[str, Any]:
        """Return Dynamo's form; `decode` reads it."""
        name = self.ids.dtype.name
        wire = _WIRE.get(name, _WIRE["int64"])
        data = np.ascontiguousarray(self.ids, dtype=wire).tobytes()
        return {
            "data": base64.b64encode(data).decode("ascii"),
            "shape": list(self.ids.shape),
            "start": self.start,
            "dtype": wire.name,
        }

    def as_envelope(self, tokens: int) -> str:
        """Return NeMo's string for a sequence of `tokens` tokens: -1 in the rows of those on which
        no forward pass ran, in the narrowest signed dtype."""
        if self.start != 0 or self.end > tokens:
            raise RolloutError(
                f"Routed experts cover positions {self.start} to {self.end} of {tokens} tokens."
            )
        largest = int(self.ids.max()) if self.rows else 0
        name = next(n for n in ("int8", "int16", "int32") if largest <= np.iinfo(n).max)
        rows = np.full((tokens, self.layers, self.top_k), -1, dtype=_WIRE[name])
        rows[: self.rows] = self.ids
        data = base64.b64encode(rows.data).decode("ascii")
        return f"nrlre1:{name}:{tokens}x{self.layers}x{self.top_k}:{data}"


def join(*parts: RoutedExperts) -> RoutedExperts:
    """Join consecutive parts: prompt and completion, or several legs."""
    if not parts:
        raise UsageError("There are no routed experts to join.")
    for before, after in pairwise(parts):
        if before.ids.shape[1:] != after.ids.shape[1:]:
            raise RolloutError(
                f"Routed experts of {before.layers} layers and top-{before.top_k} cannot be joined "
                f"with those of {after.layers} layers and top-{after.top_k}.",
                "All parts must come from one model.",
            )
        if after.start != before.end:
            raise RolloutError(
                f"Routed experts end at position {before.end} and continue at {after.start}.",
                "Remove duplicate rows with `since`; a gap cannot be filled.",
            )
    return RoutedExperts(np.concatenate([part.ids for part in parts]), parts[0].start)


def decode(raw: Any) -> RoutedExperts:
    """Read either form."""
    return _from_npy(raw) if isinstance(raw, str) else _from_mapping(raw)


def read_capture(raw: Any) -> RoutedExperts:
    """Read the experts of an answer; raise if there are none, or none were captured."""
    if raw is None:
        raise RolloutError(
            "The engine returned no routed experts.",
            "Start it with --enable-return-routed-experts; only MoE models have them.",
        )
    routed = decode(raw)
    # Rows that were not captured are zero. Two ranks show that, and all of them take 50 ms.
    if routed.top_k > 1 and (routed.ids[..., 0] == routed.ids[..., 1]).any():
        routed.check_capture()
    return routed


def join_whole(parts: Sequence[RoutedExperts], tokens: int) -> RoutedExperts:
    """Join the parts of a sequence of `tokens` tokens; raise unless they cover all of them but the
    last sampled one, on which no forward pass runs."""
    routed = join(*parts)
    if routed.start != 0 or routed.end not in (tokens - 1, tokens):
        raise RolloutError(
            f"Routed experts cover positions {routed.start} to {routed.end} of {tokens} tokens."
        )
    return routed


class _Mapping(msgspec.Struct):
    data: str
    shape: tuple[int, int, int]
    start: int | None = None
    dtype: str = "uint8"


def _from_mapping(raw: Any) -> RoutedExperts:
    try:
        fields = msgspec.convert(raw, _Mapping)
        data = base64.b64decode(fields.data, validate=True)
        ids = np.frombuffer(data, dtype=_WIRE[fields.dtype]).reshape(fields.shape)
    except (ValueError, KeyError) as error:
        raise RolloutError(f"Routed experts cannot be read: {error}.") from error
    return RoutedExperts(ids, fields.start or 0)


def _from_npy(raw: str) -> RoutedExperts:
    try:
        file = io.BytesIO(base64.b64decode(raw, validate=True))
        ids = np.lib.format.read_array(file)  # type: ignore[no-untyped-call]
    except Exception as error:  # numpy parses the header as Python, and raises what that raises
        raise RolloutError(f"Routed experts are no .npy file: {error}.") from error
    return RoutedExperts(ids)
