"""The experts of a mixture-of-experts model that ran for each token, as engines report them.

Dynamo sends `{data, shape, start, dtype}` with base64 bytes, plain vLLM a base64 `.npy` file, NeMo
a string `nrlre1:<dtype>:<rows>x<layers>x<top_k>:<base64>` or nested lists. All of them become
`RoutedExperts`; inconsistent data is an error. A trainer that replays these choices
(`rollway.rollout.replay`) runs the same experts as the engine.
"""

from __future__ import annotations

import base64
import re
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
_ENVELOPE = re.compile(r"nrlre1:(\w{1,16}):(\d{1,18})x(\d{1,18})x(\d{1,18}):(.*)", re.DOTALL)
_NPY_MAGIC = b"\x93NUMPY"
# np.load would allocate whatever a header claims; this matches exactly what np.save writes.
_NPY_HEADER = re.compile(
    rb"\{'descr': '[<|]([iu])([1248])', 'fortran_order': (False|True), "
    rb"'shape': \((\d{1,18}), (\d{1,18}), (\d{1,18})\), \}[ \n]*"
)
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


def decode(raw: Any, *, experts: int | None = None, start: int = 0) -> RoutedExperts:
    """Read any of the forms. `experts`, the model's number of them, bounds the ids and sets the
    dtype. `start` is the position of row 0 for forms that do not contain it."""
    if isinstance(raw, dict):
        routed = _from_mapping(raw)
    elif isinstance(raw, str):
        routed = _from_envelope(raw, start) if raw.startswith("nrlre1:") else _from_npy(raw, start)
    elif isinstance(raw, list):
        routed = _from_lists(raw, start)
    else:
        raise RolloutError(
            f"Routed experts have the type {type(raw).__name__}, which is not a known form."
        )
    return routed if experts is None else routed.cast(experts)


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
    dtype: str | None = None


def _from_mapping(raw: dict[Any, Any]) -> RoutedExperts:
    try:
        fields = msgspec.convert(raw, _Mapping)
    except msgspec.ValidationError as error:
        raise RolloutError(f"Routed experts have the wrong shape: {error}.") from error
    ids = _array(_unbase64(fields.data), fields.dtype or "uint8", fields.shape)
    return RoutedExperts(ids, fields.start or 0)


def _from_envelope(raw: str, start: int) -> RoutedExperts:
    match = _ENVELOPE.fullmatch(raw)
    if match is None:
        raise RolloutError(
            f"Routed experts begin with `{raw[:40]}`, which is not "
            "nrlre1:<dtype>:<rows>x<layers>x<top_k>:<base64>."
        )
    dtype, *shape, data = match.groups()
    return RoutedExperts(_array(_unbase64(data), dtype, [int(size) for size in shape]), start)


def _from_npy(raw: str, start: int) -> RoutedExperts:
    data = _unbase64(raw)
    length, body = int.from_bytes(data[8:10], "little"), 10
    if data[6:7] > b"\x01":
        length, body = int.from_bytes(data[8:12], "little"), 12
    header = _NPY_HEADER.fullmatch(data, body, body + length)
    if not data.startswith(_NPY_MAGIC) or header is None:
        raise RolloutError(
            "A string of routed experts is base64, but not of a .npy file with three dimensions of "
            "integers."
        )
    kind, size, fortran, *shape = (group.decode() for group in header.groups())
    name = f"{'u' if kind == 'u' else ''}int{int(size) * 8}"
    sizes = [int(part) for part in shape]
    if fortran == "True":
        return RoutedExperts(_array(data[body + length :], name, sizes[::-1]).T, start)
    return RoutedExperts(_array(data[body + length :], name, sizes), start)


def _from_lists(raw: list[Any], start: int) -> RoutedExperts:
    try:
        ids = np.array(msgspec.convert(raw, list[list[list[int]]]), dtype=np.int32)
    except (ValueError, OverflowError) as error:
        raise RolloutError(f"A list of routed experts has the wrong shape: {error}.") from error
    return RoutedExperts(ids, start)


def _unbase64(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise RolloutError(f"Routed experts are not base64: {error}.") from error


def _array(data: bytes, name: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    dtype = _WIRE.get(name)
    if dtype is None:
        raise RolloutError(
            f"Routed experts have the dtype `{name[:40]}`.", f"Use one of {', '.join(_WIRE)}."
        )
    rows, layers, top_k = shape
    if rows < 0 or layers < 1 or top_k < 1:
        raise RolloutError(f"Routed experts have the invalid shape {list(shape)}.")
    wanted = rows * layers * top_k * dtype.itemsize
    if len(data) != wanted:
        raise RolloutError(
            f"Routed experts have {len(data)} bytes; {list(shape)} in {name} needs {wanted}."
        )
    return np.frombuffer(data, dtype=dtype).reshape(shape)
