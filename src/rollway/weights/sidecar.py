"""Sidecars: a Megatron trainer's layout as JSON, which can be read without Megatron.

Every rank of a trainer writes its part with `dump`. `join` reads the parts of all ranks; `load`
reads one file that has all ranks. Everything is checked: another version, an unknown or missing
field, a box outside its tensor, and shards that do not make up whole Hugging Face tensors are
errors. A receiver never gets an incomplete layout.
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
from rollway.weights.untrusted import MAX_ELEMENTS, MAX_NAME, parse_json, reason

VERSION = 1

_MAX_BYTES = 64 << 20
_WRITE_AGAIN = "Write it again in the trainer, with the same version of Rollway."
_MAX_RANKS = 1 << 16
_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
_Size = Annotated[int, Field(ge=0, le=MAX_ELEMENTS)]
_Shape = Annotated[list[_Size], Field(max_length=8)]
_Number = Annotated[int, Field(ge=0, lt=_MAX_RANKS)]
_RankName = Annotated[str, Field(pattern=r"^[0-9]{1,6}$")]
_Ranks = Annotated[int, Field(ge=1, le=_MAX_RANKS)]


class _Strict(BaseModel):
    """A model whose fields are all required and are never converted, for example to a number."""

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
    """Not strict, because JSON has the value of the enum, and strict mode accepts only a member."""
    dtype: Annotated[str, Field(max_length=32)]
    shape: _Shape  # The whole shape, all ranks joined
    start: _Shape
    local: _Shape


class _Rank(_Strict):
    position: _Position
    names: dict[_Name, list[_Name]]
    """The Hugging Face tensors in each Megatron tensor, in order: q, k, v; gate, up; by expert."""
    tensors: dict[_Name, _Tensor]


class _Sidecar(_Strict):
    version: int
    world: _Ranks
    geometry: _Geometry
    ranks: Annotated[dict[_RankName, _Rank], Field(max_length=_MAX_RANKS)]


def dump(model: MegatronModel, world: int) -> str:
    """Return a sidecar of the ranks that `model` describes, as JSON text.

    Args:
        model: the layout of this rank, for example from `read_rank`, or of several ranks.
        world: how many ranks the trainer has.
    """
    ranks = {
        str(rank): {
            "position": asdict(layout.position),
            "names": layout.names,
            "tensors": {name: _dump_shard(shard) for name, shard in layout.shards.items()},
        }
        for rank, layout in model.ranks.items()
    }
    head = {"version": VERSION, "world": world, "geometry": asdict(model.geometry)}
    return json.dumps({**head, "ranks": ranks}, separators=(",", ":"))


def load(text: str | bytes) -> MegatronModel:
    """Return the trainer that one sidecar of all its ranks describes.

    Raises `UsageError` as `join` does."""
    return join([text])


def join(texts: Iterable[str | bytes]) -> MegatronModel:
    """Return the trainer that the sidecars of its ranks describe together.

    Args:
        texts: the JSON texts; together they describe every rank once.

    Raises `UsageError` if a text is not a sidecar, if a rank is missing or described twice, or if
    the shards do not make up whole tensors.
    """
    parts = [_parse(text) for text in texts]
    if not parts:
        raise UsageError("There is no sidecar to read.", "Every rank of the trainer writes one.")
    first, ranks = parts[0], {}
    for part in parts:
        if (part.world, part.geometry) != (first.world, first.geometry):
            raise UsageError(
                "The sidecars to join come from different trainers.", "Join those of one run."
            )
        for rank, rank_part in part.ranks.items():
            if int(rank) >= first.world:
                raise UsageError(
                    f"The sidecar has a rank {rank} among {first.world}.", _WRITE_AGAIN
                )
            if int(rank) in ranks:
                raise UsageError(f"Two sidecars describe rank {rank}.", "Join each rank once.")
            ranks[int(rank)] = _read_layout(rank, rank_part)
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


def _parse(text: str | bytes) -> _Sidecar:
    if len(text) > _MAX_BYTES:
        raise UsageError(
            f"The sidecar has {len(text)} bytes, more than {_MAX_BYTES}.",
            "Write one sidecar per rank in the trainer, and join them.",
        )
    try:
        raw: Any = parse_json(text)
    except ValueError as error:
        raise UsageError(f"The sidecar is not JSON ({reason(error)}).", _WRITE_AGAIN) from error
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
            _WRITE_AGAIN,
        ) from error


def _read_layout(rank: str, rank_part: _Rank) -> RankLayout:
    unpaired = sorted(rank_part.names.keys() ^ rank_part.tensors.keys())
    if unpaired:
        where = "names" if unpaired[0] in rank_part.names else "tensors"
        raise UsageError(
            f"Rank {rank} has {unpaired[0]} only among its {where} ({len(unpaired)} in all).",
            _WRITE_AGAIN,
        )
    position = Position(**rank_part.position.model_dump())
    shards = {name: _read_shard(rank, name, tensor) for name, tensor in rank_part.tensors.items()}
    for name, shard in shards.items():
        expected = place(name, shard.dtype, shard.box.shape, shard.role, position)
        if shard != expected:
            raise UsageError(
                f"{name} of rank {rank} is at {list(shard.box.start)} of {list(shard.shape)}; by "
                f"its role ({shard.role}) and position it would be at "
                f"{list(expected.box.start)} of {list(expected.shape)}.",
                _WRITE_AGAIN,
            )
    names = {name: tuple(hf) for name, hf in rank_part.names.items()}
    return RankLayout(position, shards, names)


def _read_shard(rank: str, name: str, tensor: _Tensor) -> Shard:
    shape, start, local = tuple(tensor.shape), tuple(tensor.start), tuple(tensor.local)
    # Check this before boxes are compared, which needs equal numbers of dimensions.
    fits = len(shape) == len(start) == len(local) and all(
        a + n <= whole for a, n, whole in zip(start, local, shape, strict=True)
    )
    if not fits:
        raise UsageError(
            f"{name} of rank {rank}: {list(local)} at {list(start)} is outside {list(shape)}.",
            _WRITE_AGAIN,
        )
    if tensor.dtype not in ELEMENT_BYTES:
        raise UsageError(
            f"{name} of rank {rank} has the unknown dtype {tensor.dtype!r}.", _WRITE_AGAIN
        )
    box = Box(start, tuple(a + n for a, n in zip(start, local, strict=True)))
    return Shard(name, tensor.dtype, shape, box, tensor.role)


def _dump_shard(shard: Shard) -> dict[str, Any]:
    return {
        "role": shard.role,
        "dtype": shard.dtype,
        "shape": shard.shape,
        "start": shard.box.start,
        "local": shard.box.shape,
    }
