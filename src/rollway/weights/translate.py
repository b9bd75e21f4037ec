"""Convert between Megatron shards and Hugging Face tensors.

Every element is moved by slicing, one copy per box, on the device of the tensors. `to_hf` makes one
tensor at a time, so it needs little memory beside the shards. A `Translation` overwrites the
tensors of the step before, which needs few Python calls per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rollway.errors import UsageError
from rollway.weights.copies import Copies, copy_all
from rollway.weights.layout import Placed, Shape, Shard
from rollway.weights.megatron.geometry import ModelGeometry
from rollway.weights.megatron.model import MegatronModel, Part
from rollway.weights.megatron.pieces import cuts, hf_shapes, is_legacy

Tensors = Mapping[str, torch.Tensor]


def to_hf(
    model: MegatronModel, tensors: Mapping[int, Tensors], out: Tensors | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each Hugging Face tensor with its name, made from the ranks' local tensors.

    Parameters:
        model: the layout of all ranks.
        tensors: the local tensors by rank and by Megatron's name.
        out: tensors to write to, by Hugging Face name: memory that was used before is faster than
            new memory. Without one, a tensor that is contiguous in one shard is a view of it.

    Raises `UsageError` if a rank lacks a tensor, or shapes or dtypes do not fit.
    """
    for name, shape, _, parts in model.parts():
        sources = [_get_local(model, tensors, part) for part in parts]
        whole = out.get(name) if out else None
        if whole is None and len(parts) == 1:
            yield name, _view(sources[0], parts[0].cut).contiguous()
            continue
        if whole is None:
            whole = torch.empty(shape, dtype=sources[0].dtype, device=sources[0].device)
        copy_all(_pair(name, shape, whole, parts, sources))
        yield name, whole


class Translation:
    """A conversion to Hugging Face tensors that is repeated for every step.

    The copies are planned once, and on a GPU the many small ones run together. The addresses of
    all tensors must not change. The parameters are those of `to_hf`; `out` has every tensor."""

    def __init__(self, model: MegatronModel, tensors: Mapping[int, Tensors], out: Tensors) -> None:
        self._copies = Copies()
        for name, shape, _, parts in model.parts():
            if name not in out:
                raise UsageError(
                    f"There is no tensor that {name} could be written to.", "Add it to `out`."
                )
            sources = [_get_local(model, tensors, part) for part in parts]
            for target, source in _pair(name, shape, out[name], parts, sources):
                self._copies.add(target, source)

    def run(self) -> None:
        """Overwrite all of `out`; on a GPU, enqueue the copies on its current stream."""
        self._copies.run()


def _pair(
    name: str, shape: Shape, whole: torch.Tensor, parts: list[Part], sources: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the (target, source) views whose copies fill `whole`."""
    if tuple(whole.shape) != shape:
        raise UsageError(
            f"{name} has the shape {list(shape)}, not {list(whole.shape)}.",
            "Give a tensor of the shape that Hugging Face has.",
        )
    for part, source in zip(parts, sources, strict=True):
        if whole.dtype != source.dtype:
            raise UsageError(
                f"{part.source} of rank {part.rank} has {source.dtype}; {name} shall be "
                f"{whole.dtype}.",
                "Use the same dtype on both sides.",
            )
    return [
        (whole[part.cut.box.slices], _view(source, part.cut))
        for part, source in zip(parts, sources, strict=True)
    ]


def from_hf(hf: Tensors, model: MegatronModel) -> dict[int, dict[str, torch.Tensor]]:
    """Return the local tensors of every rank, made from whole Hugging Face tensors.

    `rank_from_hf` describes parameters and errors."""
    return {rank: rank_from_hf(hf, model, rank) for rank in model.ranks}


def rank_from_hf(hf: Tensors, model: MegatronModel, rank: int) -> dict[str, torch.Tensor]:
    """Return the local tensors of one rank by Megatron's names; rows of padding are zero.

    Parameters:
        hf: whole Hugging Face tensors by name.
        model: the layout of the trainer.
        rank: the rank whose tensors are made.

    Raises `UsageError` if a tensor is missing or has a shape that does not fit.
    """
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
        tensor = torch.empty(shard.box.shape, dtype=first.dtype, device=first.device)
        boxes = cuts(shard, len(hf_names), model.geometry)
        if sum(cut.box.elements for cut in boxes) < shard.box.elements:
            tensor.zero_()
        for cut in boxes:
            _view(tensor, cut).copy_(hf[hf_names[cut.tensor]][cut.box.slices])
        local[name] = tensor.view(_megatron_shape(shard, model.geometry))
    return local


def _get_local(model: MegatronModel, tensors: Mapping[int, Tensors], part: Part) -> torch.Tensor:
    """Return a rank's tensor in the shape that its boxes refer to."""
    shard = model.ranks[part.rank].shards[part.source]
    try:
        tensor = tensors[part.rank][part.source]
    except KeyError as error:
        raise UsageError(
            f"Rank {part.rank} lacks {part.source}.", "Give all local tensors of all ranks."
        ) from error
    if tuple(tensor.shape) == shard.box.shape:
        return tensor
    if tuple(tensor.shape) == _megatron_shape(shard, model.geometry):
        return tensor.reshape(shard.box.shape)
    raise UsageError(
        f"{part.source} of rank {part.rank} has the shape {list(tensor.shape)} instead of "
        f"{list(shard.box.shape)}.",
        "Check the parallel sizes in the layout.",
    )


def _megatron_shape(shard: Shard, geometry: ModelGeometry) -> Shape:
    """Return the shape that Megatron gives the tensor; see `pieces.local_view`."""
    if is_legacy(shard.name) and shard.name.endswith("weight1"):
        return geometry.hidden, shard.box.elements // geometry.hidden
    return shard.box.shape


def _view(local: torch.Tensor, cut: Placed) -> torch.Tensor:
    """Return the view of a cut in a local tensor, with the axes as Hugging Face has them."""
    view = local[cut.destination.slices]
    return view.t() if cut.transposed else view


def _check_shapes(
    hf: Tensors, shard: Shard, names: tuple[str, ...], geometry: ModelGeometry
) -> None:
    for name, shape in zip(names, hf_shapes(shard, len(names), geometry), strict=True):
        if name not in hf:
            raise UsageError(
                f"There is no {name}, which {shard.name} is made from.", "Give all tensors."
            )
        if tuple(hf[name].shape) != shape:
            raise UsageError(
                f"{name} has the shape {list(hf[name].shape)}; {shard.name} needs {list(shape)}.",
                "Check that the checkpoint and the layout are of the same model.",
            )
