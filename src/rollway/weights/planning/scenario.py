"""Plan from a short description: `megatron:tp=2,ep=8` to `vllm:tp=2`, for a model on disk.

Neither has to run. A `config.json` is enough: transformers knows which tensors follow from it, also
for models that would not fit on this machine. What the ranks of a Megatron trainer hold of them
follows from its parallel sizes (`describe`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollway.errors import UsageError
from rollway.weights.checkpoint import TensorHeader, read_config, read_headers
from rollway.weights.layout import Box, Placed, Role, Shape, Shard
from rollway.weights.megatron.geometry import ModelGeometry, Position, Topology
from rollway.weights.megatron.names import NameMap, role_of_name
from rollway.weights.megatron.pieces import (
    MegatronModel,
    RankLayout,
    cuts,
    is_legacy,
    place,
    sharding,
)
from rollway.weights.planning.plan import Costs, ResidentTensor, Source, Total, plan
from rollway.weights.planning.targets import Headers, engine_ranks, engine_targets, hf_targets

_SOURCES = {
    "hf": (),
    "fsdp": ("ranks",),
    "megatron": ("tp", "pp", "ep", "etp", "world", "padded_vocab"),
}
_TARGETS = {"hf": (), "vllm": ("tp", "ep")}
"""The sizes that a layout may have; the one without a name is `ranks`."""
_FUSED_NORM = ".layer_norm_"
_OTHER_EXPERTS = (".experts.local_experts.", ".experts.weight")
Config = Mapping[str, Any]


def plan_scenario(
    model: Path, source: str, target: str, costs: Costs | None = None
) -> tuple[Total, dict[str, Total]]:
    """Return what all ranks of one engine laid out as `target` would read in a refit by a trainer
    laid out as `source`, and what each of them would. All read at once.

    Parameters:
        model: a checkpoint directory, or a `config.json`.
        source: hf, fsdp:RANKS, or megatron:tp=..,pp=..,ep=..,etp=..
        target: hf, or vllm:tp=..,ep=..
        costs: speeds of the machines.
    """
    kind, sizes = _parse(target, _TARGETS)
    config, headers = read_model(model)
    sources = _make_sources(source, config, headers)
    if kind == "hf":
        receivers = {"receiver": hf_targets(headers)}
    else:
        ranks = enumerate(engine_ranks(config, **sizes))
        receivers = {f"rank{number}": engine_targets(rank, headers) for number, rank in ranks}
    total, totals = Total(), {name: Total() for name in receivers}
    for transfer in plan(sources, receivers.items(), costs):
        totals[transfer.receiver].add(transfer)
        total.add(transfer)
    total.seconds = max(each.seconds for each in totals.values())
    return total, totals


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


def _make_sources(spec: str, config: Config, headers: Headers) -> list[Source]:
    kind, sizes = _parse(spec, _SOURCES)
    if kind != "megatron":
        return fsdp_sources(headers, sizes.get("ranks", 1))
    padded_vocab = sizes.pop("padded_vocab", 0)
    names = NameMap(str(config.get("model_type")), ModelGeometry.from_hf_config(config))
    return megatron_sources(describe(headers, names, Topology(**sizes), padded_vocab=padded_vocab))


# --- the tensors of a model ----------------------------------------------------------------------


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, TensorHeader]]:
    """Return config and tensors of a checkpoint directory, or of a `config.json` alone."""
    config = read_config(path / "config.json" if path.is_dir() else path)
    has_weights = path.is_dir() and any(path.glob("model*.safetensors*"))
    return config, read_headers(path) if has_weights else hf_headers(config)


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


def fsdp_sources(headers: Headers, ranks: int) -> list[Source]:
    """Return sources for ranks that shard every tensor by rows, as FSDP2 does. The last ranks may
    have fewer rows than others, or none. A tensor without dimensions is on all ranks."""
    sources = []
    for rank in range(ranks):
        tensors = {}
        for name, header in headers.items():
            box = Box.whole(header.shape)
            if header.shape:
                rows, height = -(-header.shape[0] // ranks), header.shape[0]
                box = box.narrow(0, min(rank * rows, height), min((rank + 1) * rows, height))
            if box.elements:
                held = (Placed(box, (0,) * len(box.start)),)
                tensors[name] = ResidentTensor((name,), header.dtype, box.shape, held)
        sources.append(Source("trainer" if ranks == 1 else f"trainer{rank}", tensors))
    return sources


def megatron_sources(model: MegatronModel) -> list[Source]:
    """Return a source for every rank of a Megatron trainer, replicas included: the planner divides
    the load among them."""
    sources = []
    for rank, layout in model.ranks.items():
        tensors = {}
        for tensor, names in layout.names.items():
            shard = layout.shards[tensor]
            held = cuts(shard, len(names), model.geometry)
            tensors[tensor] = ResidentTensor(names, shard.dtype, shard.box.shape, held)
        sources.append(Source(f"trainer{rank}", tensors))
    return sources


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
