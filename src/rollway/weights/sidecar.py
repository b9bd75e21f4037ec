"""What a receiver must know of a trainer's layout, as JSON: no Megatron is needed to read it.

Every rank of a trainer writes its part (`dump`), the parts are put together (`join`), and `load`
gives back the model that they describe. All of it is looked at on the way in: an old version, a
field too many or too few, boxes outside their tensors, or shards that do not make up whole Hugging
Face tensors are errors. There is no way to go on with half of a layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollway.errors import UsageError
from rollway.weights.layout import ELEMENT_BYTES, Box, Role, Shard
from rollway.weights.megatron.geometry import ModelGeometry, Position
from rollway.weights.megatron.model import MegatronModel, RankLayout
from rollway.weights.megatron.pieces import place
from rollway.weights.untrusted import MOST_ELEMENTS, MOST_NAME, parse_json, reason

VERSION = 1

_MOST_BYTES = 64 << 20
_MOST_RANKS = 1 << 16
_Name = Annotated[str, Field(min_length=1, max_length=MOST_NAME)]
_Size = Annotated[int, Field(ge=0, le=MOST_ELEMENTS)]
_Shape = Annotated[list[_Size], Field(max_length=8)]
_Number = Annotated[int, Field(ge=0, lt=_MOST_RANKS)]
_RankName = Annotated[str, Field(pattern=r"^[0-9]{1,6}$")]
_Ranks = Annotated[int, Field(ge=1, le=_MOST_RANKS)]


class _Strict(BaseModel):
    """Every field must be there and have its own type; JSON's numbers are not words."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Geometry(_Strict):
    layers: _Size
    hidden: _Size
    heads: _Size
    query_groups: _Size
    head_dim: _Size
    vocab: _Size
    ffn: _Size
    moe_ffn: _Size
    experts: _Size
    padded_vocab: _Size
    tied_embeddings: bool
    attention_output_gate: bool
    gated: bool


class _Position(_Strict):
    tp: _Number
    tp_size: _Ranks
    pp: _Number
    pp_size: _Ranks
    ep: _Number
    ep_size: _Ranks
    etp: _Number
    etp_size: _Ranks
    dp: _Number
    dp_size: _Ranks
    edp: _Number
    edp_size: _Ranks
    first_layer: _Size | None


class _Tensor(_Strict):
    role: Annotated[Role, Field(strict=False)]
    """Strict would want an enum's member, which JSON cannot hold."""
    dtype: Annotated[str, Field(max_length=32)]
    shape: _Shape
    """Of all ranks together."""
    start: _Shape
    local: _Shape


class _Rank(_Strict):
    position: _Position
    names: dict[_Name, list[_Name]]
    """Hugging Face names of what lies in each tensor: q, k, v; gate, up; by expert."""
    tensors: dict[_Name, _Tensor]


class _Sidecar(_Strict):
    version: int
    world: _Ranks
    geometry: _Geometry
    ranks: Annotated[dict[_RankName, _Rank], Field(max_length=_MOST_RANKS)]


def dump(model: MegatronModel, world: int) -> str:
    """Those ranks of a trainer of `world` ranks that `model` describes."""
    ranks = {
        str(rank): {
            "position": asdict(layout.position),
            "names": layout.names,
            "tensors": {name: _tensor(shard) for name, shard in layout.shards.items()},
        }
        for rank, layout in model.ranks.items()
    }
    head = {"version": VERSION, "world": world, "geometry": asdict(model.geometry)}
    return json.dumps({**head, "ranks": ranks}, separators=(",", ":"))


def load(text: str | bytes) -> MegatronModel:
    """The whole trainer that a sidecar describes."""
    return _whole([_parsed(text)])


def join(texts: Iterable[str | bytes]) -> MegatronModel:
    """The whole trainer that the sidecars of its ranks describe together."""
    return _whole([_parsed(text) for text in texts])


def _whole(parts: list[_Sidecar]) -> MegatronModel:
    if not parts:
        raise UsageError("There is no sidecar to read.", "Every rank of the trainer writes one.")
    first, ranks = parts[0], {}
    for part in parts:
        if (part.world, part.geometry) != (first.world, first.geometry):
            raise UsageError("The sidecars to join come from different trainers.")
        for rank, described in part.ranks.items():
            if int(rank) >= first.world:
                raise UsageError(f"The sidecar has a rank {rank} among {first.world}.")
            if int(rank) in ranks:
                raise UsageError(f"Two sidecars describe rank {rank}.")
            ranks[int(rank)] = _layout(rank, described)
    if len(ranks) < first.world:
        missing = next(rank for rank in range(first.world) if rank not in ranks)
        raise UsageError(
            f"The sidecar lacks {first.world - len(ranks)} of {first.world} ranks, the first is "
            f"{missing}.",
            "Join the sidecars of all ranks.",
        )
    model = MegatronModel(ModelGeometry(**first.geometry.model_dump()), dict(sorted(ranks.items())))
    model.check_whole()
    return model


def _parsed(text: str | bytes) -> _Sidecar:
    if len(text) > _MOST_BYTES:
        raise UsageError(
            f"The sidecar has {len(text)} bytes, more than {_MOST_BYTES}.",
            "Let every rank write its own part, and join those.",
        )
    try:
        raw: Any = parse_json(text)
    except ValueError as error:
        raise UsageError(
            f"The sidecar is not JSON ({reason(error)}).", "It was cut short."
        ) from error
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != VERSION:
        raise UsageError(
            f"The sidecar has version {version!r:.40}; this Rollway reads version {VERSION}.",
            "Use the same Rollway in the trainer and at the receivers.",
        )
    try:
        return _Sidecar.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            f"The sidecar is wrong at {where[:300]}: {first['msg'][:300]} "
            f"({error.error_count()} in all).",
            "Let the trainer write it again, with the same Rollway.",
        ) from error


def _layout(rank: str, described: _Rank) -> RankLayout:
    unpaired = sorted(described.names.keys() ^ described.tensors.keys())
    if unpaired:
        where = "names" if unpaired[0] in described.names else "tensors"
        raise UsageError(
            f"Rank {rank} has {unpaired[0]} only among its {where} ({len(unpaired)} in all).",
            "The sidecar is not whole.",
        )
    position = Position(**described.position.model_dump())
    shards = {name: _shard(rank, name, tensor) for name, tensor in described.tensors.items()}
    for name, shard in shards.items():
        expected = place(name, shard.dtype, shard.box.shape, shard.role, position)
        if shard != expected:
            raise UsageError(
                f"{name} of rank {rank} is at {list(shard.box.start)} of {list(shard.shape)}; by "
                f"its role ({shard.role}) and position it would be at "
                f"{list(expected.box.start)} of {list(expected.shape)}."
            )
    names = {name: tuple(hf) for name, hf in described.names.items()}
    return RankLayout(position, shards, names)


def _shard(rank: str, name: str, tensor: _Tensor) -> Shard:
    """Dimensions must agree before boxes can be compared."""
    shape, start, local = tuple(tensor.shape), tuple(tensor.start), tuple(tensor.local)
    fits = len(shape) == len(start) == len(local) and all(
        a + n <= whole for a, n, whole in zip(start, local, shape, strict=True)
    )
    if not fits:
        raise UsageError(
            f"{name} of rank {rank}: {list(local)} at {list(start)} lies outside {list(shape)}."
        )
    if tensor.dtype not in ELEMENT_BYTES:
        raise UsageError(f"{name} of rank {rank} has the unknown dtype {tensor.dtype!r}.")
    box = Box(start, tuple(a + n for a, n in zip(start, local, strict=True)))
    return Shard(name, tensor.dtype, shape, box, tensor.role)


def _tensor(shard: Shard) -> dict[str, Any]:
    return {
        "role": shard.role,
        "dtype": shard.dtype,
        "shape": shard.shape,
        "start": shard.box.start,
        "local": shard.box.shape,
    }
