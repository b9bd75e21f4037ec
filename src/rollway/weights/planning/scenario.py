"""Say what a refit over NIXL would move: from `megatron:tp=2,ep=8` to `vllm:tp=2`, for a model.

    what each rank publishes     boxes of Hugging Face tensors, divided where the engine cuts them
    what each rank needs         vLLM's shards (`targets`)
    what each rank reads         all pieces of its shard; all of a tensor if a piece would be cut

Neither side has to run. A `config.json` is enough: transformers knows which tensors follow from it,
also for models that would not fit on this machine. What the ranks of a Megatron trainer hold of
them follows from its parallel sizes (`describe`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader, read_config, read_headers
from rollway.weights.layout import ELEMENT_BYTES, Box, Role, Shape, Shard
from rollway.weights.megatron.geometry import ModelGeometry, Position, Topology
from rollway.weights.megatron.names import NameMap, role_of_name
from rollway.weights.megatron.pieces import (
    MegatronModel,
    RankLayout,
    is_legacy,
    pieces,
    place,
    sharding,
)
from rollway.weights.planning.targets import EngineRank, Headers, cells, engine_ranks, part_of

_SOURCES = {
    "fsdp": ("ranks",),
    "megatron": ("tp", "pp", "ep", "etp", "world", "padded_vocab"),
}
_TARGETS = {"vllm": ("tp", "ep")}
"""The sizes that a layout may have; the one without a name is `ranks`."""
_FUSED_NORM = ".layer_norm_"
_OTHER_EXPERTS = (".experts.local_experts.", ".experts.weight")
Config = Mapping[str, Any]
Published = Mapping[str, Mapping[Box, str]]
"""By Hugging Face tensor: its pieces, and the rank that publishes each of them."""


@dataclass(slots=True)
class Total:
    """What a rank of an engine needs, and what it reads."""

    needed: int = 0  # Bytes
    reads: int = 0  # Pieces
    sources: Counter[str] = field(default_factory=Counter)  # Bytes read, by source

    @property
    def moved(self) -> int:
        return self.sources.total()


def plan_scenario(model: Path, source: str, target: str) -> dict[str, Total]:
    """Return what each rank of one engine laid out as `target` would read in a refit by a trainer
    laid out as `source`.

    Parameters:
        model: a checkpoint directory, or a `config.json`.
        source: fsdp:RANKS, or megatron:tp=..,pp=..,ep=..,etp=..
        target: vllm:tp=..,ep=..
    """
    _, sizes = _parse(target, _TARGETS)
    config, headers = read_model(model)
    ranks = engine_ranks(config, **sizes)
    published = divide(_publish(source, config, headers), headers, sizes.get("tp", 1))
    return {f"rank{number}": plan(published, headers, rank) for number, rank in enumerate(ranks)}


def plan(published: Published, headers: Headers, rank: EngineRank) -> Total:
    """Return what a rank of an engine reads of tensors that are published in these pieces."""
    parameters: dict[str, str] = {}
    inside: dict[str, list[Box]] = {}  # The pieces that have an element of the rank's part
    total, received_whole = Total(), set()
    for name, header in headers.items():
        try:
            parameters[name], part = part_of(name, headers, rank)
            box = part.box if part else None
        except (UsageError, IndexError):  # without a rule, it is received whole
            parameters[name], box = name, Box.whole(header.shape)
        inside[name] = _list_inside(published[name], box) if box else []
        if box:
            total.needed += box.elements * ELEMENT_BYTES[header.dtype]
            # A part of a piece cannot be verified, nor one tensor of a parameter alone.
            if sum(piece.elements for piece in inside[name]) != box.elements:
                received_whole.add(parameters[name])
    for name, header in headers.items():
        is_whole = parameters[name] in received_whole
        for piece in published[name] if is_whole else inside[name]:
            total.reads += 1
            size = piece.elements * ELEMENT_BYTES[header.dtype]
            total.sources[published[name][piece]] += size
    return total


def _list_inside(published: Mapping[Box, str], box: Box) -> list[Box]:
    return [box] if box in published else [piece for piece in published if piece.intersect(box)]


def _parse(spec: str, kinds: Mapping[str, tuple[str, ...]]) -> tuple[str, dict[str, int]]:
    """Parse `kind:a=1,b=2`, or `kind:8` for a number of ranks."""
    kind, _, rest = spec.partition(":")
    if kind not in kinds:
        raise UsageError(f"`{spec}` is no layout that Rollway knows.", f"Use {', '.join(kinds)}.")
    sizes = {}
    for word in filter(None, rest.split(",")):
        name, _, number = word.rpartition("=")
        name = name or "ranks"
        if name not in kinds[kind] or not number.isdecimal() or int(number) < 1:
            known = ", ".join(kinds[kind]) or "no sizes"
            raise UsageError(f"`{word}` in `{spec}` is no size.", f"{kind} accepts {known}.")
        sizes[name] = int(number)
    return kind, sizes


def _publish(spec: str, config: Config, headers: Headers) -> Published:
    kind, sizes = _parse(spec, _SOURCES)
    if kind == "fsdp":
        return publish_rows(headers, sizes.get("ranks", 1))
    padded_vocab = sizes.pop("padded_vocab", 0)
    names = NameMap(str(config.get("model_type")), ModelGeometry.from_hf_config(config))
    model = describe(headers, names, Topology(**sizes), padded_vocab=padded_vocab)
    published = publish_shards(model)
    if missing := headers.keys() - published.keys():
        raise UsageError(
            f"Rollway does not know where Megatron keeps {min(missing)}.",
            "Plan for a model without it.",
        )
    return published


# --- the tensors of a model ----------------------------------------------------------------------


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, TensorHeader]]:
    """Return config and tensors of a checkpoint directory, or of a `config.json` alone."""
    config = read_config(path / "config.json" if path.is_dir() else path)
    has_weights = path.is_dir() and any(path.glob("model*.safetensors*"))
    headers = read_headers(path) if has_weights else hf_headers(config)
    if config.get("tie_word_embeddings"):
        headers.pop("lm_head.weight", None)  # the same tensor as the embedding
    return config, headers


def hf_headers(config: Config) -> dict[str, TensorHeader]:
    """Return name, dtype and shape of the tensors of the model that `config` describes."""
    ModelGeometry.from_hf_config(config)  # refuses sizes with which a model takes hours to build
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from rollway.weights.sources import from_module

        known = AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(known, dtype=known.dtype or torch.bfloat16)
    except Exception as error:  # transformers raises errors of many kinds
        raise UsageError(
            f"transformers cannot build the model of this config.json: {str(error)[:300]}",
            "Give a directory with the model's weight files, or install transformers and torch.",
        ) from error
    shards = (held.shard for held in from_module(model))
    return {shard.name: TensorHeader(shard.dtype, shard.shape) for shard in shards}


# --- trainers that do not run --------------------------------------------------------------------


def publish_rows(headers: Headers, ranks: int) -> Published:
    """Return what ranks publish that shard every tensor by rows, as FSDP2 does. The last ranks may
    have fewer rows than others, or none. The first has tensors without dimensions."""
    published: dict[str, dict[Box, str]] = {}
    for name, header in headers.items():
        whole, height = Box.whole(header.shape), header.shape[0] if header.shape else 1
        rows = -(-height // ranks)
        parts = published[name] = {}
        for rank, start in enumerate(range(0, height, rows)):
            stop = min(start + rows, height)
            parts[whole.narrow(0, start, stop) if header.shape else whole] = f"trainer{rank}"
    return published


def publish_shards(model: MegatronModel) -> Published:
    """Return what the ranks of a Megatron trainer publish."""
    published: dict[str, dict[Box, str]] = {}
    for rank, layout in model.ranks.items():
        for tensor, names in layout.names.items():
            if layout.owns(tensor):
                for piece in pieces(layout.shards[tensor], names, model.geometry):
                    published.setdefault(piece.name, {})[piece.box] = f"trainer{rank}"
    return published


def divide(published: Published, headers: Headers, ranks: int) -> Published:
    """Return pieces divided where engines of `ranks` tensor ranks cut their tensors."""
    return {
        name: {
            inside: source
            for piece, source in parts.items()
            for cell in cells(name, headers, ranks)
            if (inside := cell.intersect(piece))
        }
        for name, parts in published.items()
    }


def describe(
    hf: Headers,
    names: NameMap,
    topology: Topology,
    *,
    padded_vocab: int = 0,
    templates: Sequence[str] | None = None,
) -> MegatronModel:
    """Return what the ranks of a trainer hold of a model with these Hugging Face tensors.

    `padded_vocab` counts the rows of the embedding over all ranks, if it is padded. `templates` are
    the names of `names.table` that its modules have, by default those with Transformer Engine:
    norms in the linear layer that follows, grouped experts. Of two names for one tensor, the first
    counts. The second copy of tied embeddings, on the last pipeline stage, is left out."""
    vocab = max(padded_vocab, names.geometry.vocab)
    if templates is None:
        chosen = (name for name in names.table if not any(mark in name for mark in _OTHER_EXPERTS))
        templates = sorted(chosen, key=lambda name: _FUSED_NORM not in name)
    layouts: dict[int, RankLayout] = {}
    shared: dict[tuple[int, int], list[tuple[Shard, tuple[str, ...]]]] = {}
    for rank, position in enumerate(topology.positions()):
        stage = position.pp, position.ep  # the names of a rank's tensors depend only on these
        if stage not in shared:
            shared[stage] = list(_list_tensors(hf, names, position, templates, vocab))
        shards = {tensor.name: _make_shard(tensor, position) for tensor, _ in shared[stage]}
        hf_names = {tensor.name: parts for tensor, parts in shared[stage]}
        layouts[rank] = RankLayout(position, shards, hf_names)
    return MegatronModel(names.geometry, layouts)


def _list_tensors(
    hf: Headers, names: NameMap, position: Position, templates: Sequence[str], vocab: int
) -> Iterator[tuple[Shard, tuple[str, ...]]]:
    """Yield Megatron's tensors, all tensor-parallel ranks joined, and the HF tensors in each."""
    used: set[str] = set()
    for template, name in _list_names(templates, names.geometry, position):
        hf_names = names.hf_names(name, position)
        if not hf_names or any(n not in hf or n in used for n in hf_names):
            continue
        if _FUSED_NORM in name:
            # A norm is fused only into a linear layer that the model has.
            linear = name.rpartition(_FUSED_NORM)[0] + ".weight"
            if not all(n in hf for n in names.hf_names(linear, position)):
                continue
        used.update(hf_names)
        role = role_of_name(template)
        shape = _join_shapes(name, role, [hf[n].shape for n in hf_names])
        if role is Role.VOCAB_PARALLEL:
            shape = (vocab, *shape[1:])
        yield Shard(name, hf[hf_names[0]].dtype, shape, Box.whole(shape), role), hf_names


def _list_names(
    templates: Sequence[str], geometry: ModelGeometry, position: Position
) -> Iterator[tuple[str, str]]:
    """Yield every name that a rank could have, after the template that it is made from."""
    first, last = position.pp == 0, position.pp == position.pp_size - 1
    layers, rest = divmod(geometry.layers, position.pp_size)
    if rest:
        raise UsageError(
            f"{geometry.layers} layers cannot be shared evenly by {position.pp_size} stages.",
            "Use a pipeline parallel size that divides them.",
        )
    experts = range(position.local_experts(geometry)) if geometry.experts else range(0)
    for template in templates:
        if ".experts." in template and not experts:
            continue
        if "{layer}" in template:
            for layer in range(position.pp * layers, (position.pp + 1) * layers):
                named = template.replace("{layer}", str(layer))
                for expert in experts if "{expert}" in template else (0,):
                    yield template, named.replace("{expert}", str(expert))
        elif first if template.startswith("embedding.") else last:
            yield template, template


def _make_shard(tensor: Shard, position: Position) -> Shard:
    """Return what a rank holds of a tensor."""
    name, shape, role = tensor.name, tensor.shape, tensor.role
    axis, _, size = sharding(role, is_legacy(name), len(shape), position)
    if axis is not None:
        length, rest = divmod(shape[axis], size)
        if rest:
            raise UsageError(
                f"{name} ({list(shape)}) cannot be cut evenly at {position}.",
                "Use other parallel sizes, or a padded_vocab that they divide.",
            )
        shape = (*shape[:axis], length, *shape[axis + 1 :])
    return place(name, tensor.dtype, shape, role, position)


def _join_shapes(name: str, role: Role, shapes: list[Shape]) -> Shape:
    """Return the shape of Megatron's tensor, all tensor-parallel ranks joined."""
    rows, *columns = shapes[0]
    if is_legacy(name):
        # Transposed, expert after expert; gate and up side by side.
        experts = len(shapes) if role is Role.EXPERT_ROW else len(shapes) // 2
        width = rows * len(shapes) // experts
        return experts * columns[0], width
    return (sum(shape[0] for shape in shapes), *columns)
