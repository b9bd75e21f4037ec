"""Megatron shards to Hugging Face tensors, and back: the bytes, where `pieces` says the places.

Every element moves by slicing, one copy per piece, on whatever device the tensors are. `to_hf`
makes one tensor at a time, so no more than that is needed beside the shards themselves; a
`Translation` writes all of them over those of the step before, which asks little of Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rollway.errors import UsageError
from rollway.weights.copies import Copies, copy_all
from rollway.weights.layout import Box, Shape, Shard
from rollway.weights.megatron.geometry import ModelGeometry
from rollway.weights.megatron.model import MegatronModel, Part
from rollway.weights.megatron.pieces import Cut, cuts, hf_shapes, is_legacy

Tensors = Mapping[str, torch.Tensor]


def to_hf(
    model: MegatronModel, tensors: Mapping[int, Tensors], out: Tensors | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each Hugging Face tensor, made from the ranks' local tensors (by Megatron's names).

    What `out` has a tensor for is written there: memory that was used before is faster than new.
    Else a tensor that lies in one shard in one run is a view of it, not a copy."""
    for name, shape, _, parts in model.parts():
        sources = [_local(model, tensors, part) for part in parts]
        whole = out.get(name) if out else None
        if whole is None and len(parts) == 1:
            yield name, _view(sources[0], parts[0].cut).contiguous()
            continue
        if whole is None:
            whole = torch.empty(shape, dtype=sources[0].dtype, device=sources[0].device)
        copy_all(_pairs(name, shape, whole, parts, sources))
        yield name, whole


class Translation:
    """One translation, made step after step: what goes where is found once, and on a GPU the many
    small pieces are copied together. The ranks' tensors and those of `out` stay where they are."""

    def __init__(self, model: MegatronModel, tensors: Mapping[int, Tensors], out: Tensors) -> None:
        self._copies = Copies()
        for name, shape, _, parts in model.parts():
            if name not in out:
                raise UsageError(f"There is no tensor that {name} could be written to.")
            sources = [_local(model, tensors, part) for part in parts]
            for target, source in _pairs(name, shape, out[name], parts, sources):
                self._copies.add(target, source)

    def run(self) -> None:
        """Write all of `out` anew; on a GPU, by when its current stream gets there."""
        self._copies.run()


def _pairs(
    name: str, shape: Shape, whole: torch.Tensor, parts: list[Part], sources: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What to copy over what to make `whole` the Hugging Face tensor."""
    if tuple(whole.shape) != shape:
        raise UsageError(f"{name} has the shape {list(shape)}, not {list(whole.shape)}.")
    for part, source in zip(parts, sources, strict=True):
        if whole.dtype != source.dtype:
            raise UsageError(
                f"{part.source} of rank {part.rank} has {source.dtype}; {name} shall be "
                f"{whole.dtype}."
            )
    return [
        (whole[_slices(part.cut.box)], _view(source, part.cut))
        for part, source in zip(parts, sources, strict=True)
    ]


def from_hf(hf: Tensors, model: MegatronModel) -> dict[int, dict[str, torch.Tensor]]:
    """The local tensors of every rank, made from whole Hugging Face tensors."""
    return {rank: rank_from_hf(hf, model, rank) for rank in model.ranks}


def rank_from_hf(hf: Tensors, model: MegatronModel, rank: int) -> dict[str, torch.Tensor]:
    """The local tensors of one rank; rows that only pad are zero."""
    layout, local = model.ranks[rank], {}
    for name, shard in layout.shards.items():
        hf_names = layout.names[name]
        _check_shapes(hf, shard, hf_names, model.geometry)
        if not hf_names:
            raise UsageError(
                f"Rank {rank} has {name}, which Hugging Face has no tensor for.",
                "Copy it from the tensor that it is tied to.",
            )
        first = hf[hf_names[0]]
        made = torch.empty(shard.box.shape, dtype=first.dtype, device=first.device)
        found = cuts(shard, len(hf_names), model.geometry)
        if sum(cut.box.elements for cut in found) < shard.box.elements:
            made.zero_()
        for cut in found:
            _view(made, cut).copy_(hf[hf_names[cut.index]][_slices(cut.box)])
        local[name] = made.view(_own_shape(shard, model.geometry))
    return local


def _local(model: MegatronModel, tensors: Mapping[int, Tensors], part: Part) -> torch.Tensor:
    """A rank's tensor, in the shape that its pieces count in."""
    shard = model.ranks[part.rank].shards[part.source]
    try:
        tensor = tensors[part.rank][part.source]
    except KeyError as error:
        raise UsageError(f"Rank {part.rank} lacks {part.source}.") from error
    if tuple(tensor.shape) == shard.box.shape:
        return tensor
    if tuple(tensor.shape) == _own_shape(shard, model.geometry):
        return tensor.reshape(shard.box.shape)
    raise UsageError(
        f"{part.source} of rank {part.rank} has the shape {list(tensor.shape)} instead of "
        f"{list(shard.box.shape)}."
    )


def _own_shape(shard: Shard, geometry: ModelGeometry) -> Shape:
    """The shape that Megatron gives the tensor; see `local_view` for where they differ."""
    if is_legacy(shard.name) and shard.name.endswith("weight1"):
        return geometry.hidden, shard.box.elements // geometry.hidden
    return shard.box.shape


def _view(local: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The part of a local tensor that a cut is about, turned as Hugging Face has it."""
    extents = cut.box.shape[::-1] if cut.transposed else cut.box.shape
    view = local[tuple(slice(a, a + n) for a, n in zip(cut.at, extents, strict=True))]
    return view.t() if cut.transposed else view


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def _check_shapes(
    hf: Tensors, shard: Shard, names: tuple[str, ...], geometry: ModelGeometry
) -> None:
    for name, shape in zip(names, hf_shapes(shard, len(names), geometry), strict=True):
        if name not in hf:
            raise UsageError(f"There is no {name}, which {shard.name} is made from.")
        if tuple(hf[name].shape) != shape:
            raise UsageError(
                f"{name} has the shape {list(hf[name].shape)}; {shard.name} needs {list(shape)}."
            )
