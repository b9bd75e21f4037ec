"""Experts that transformers 5 keeps in one parameter, as the tensors that their checkpoints have.

    experts.gate_up_proj [experts, 2 ffn, hidden]  ─►  experts.7.gate_proj.weight [ffn, hidden]
                                                       experts.7.up_proj.weight   [ffn, hidden]
    experts.down_proj    [experts, hidden, ffn]    ─►  experts.7.down_proj.weight [hidden, ffn]

Engines load the names of the checkpoint. transformers knows how it joined them when it loaded one
(`conversion_mapping`), so families whose checkpoints have one tensor for all experts stay as they
are. A rank may hold any box of the joined tensor.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from rollway.weights.layout import Box, Shape

_MERGE, _JOIN = "MergeModulelist", "Concatenate"


class Fused(NamedTuple):
    """A parameter of all experts of a layer."""

    suffix: str
    """How its name ends."""
    parts: tuple[str, ...]
    """What takes the suffix's place in the names of the checkpoint; `*` is the expert's number."""


class ExpertPart(NamedTuple):
    """What a rank holds of one expert's tensor."""

    name: str
    shape: Shape
    box: Box
    within: tuple[slice | int, ...]
    """Where it is in the rank's part of the joined tensor."""


def find_fused(module: torch.nn.Module) -> list[Fused]:
    """Return the parameters that transformers joins for the models in a module."""
    configs = (getattr(inner, "config", None) for inner in module.modules())
    families = {getattr(config, "model_type", None) for config in configs}
    fused: list[Fused] = []
    for family in sorted(family for family in families if isinstance(family, str)):
        fused += filter(None, map(_read_converter, _list_converters(family)))
    return fused


def split_experts(name: str, shape: Shape, box: Box, fused: list[Fused]) -> Iterator[ExpertPart]:
    """Yield the parts of a box of a joined tensor; nothing for any other tensor."""
    joined = next((each for each in fused if name.endswith(each.suffix)), None)
    if joined is None or len(shape) != 3:
        return
    prefix, parts = name.removesuffix(joined.suffix), joined.parts
    rows, columns = shape[1] // len(parts), (box.start[2], box.stop[2])
    for expert in range(box.start[0], box.stop[0]):
        for number, part in enumerate(parts):
            # The part's own rows, as far as this box reaches.
            first = max(box.start[1] - number * rows, 0)
            last = min(box.stop[1] - number * rows, rows)
            if first < last:
                above = number * rows - box.start[1]
                yield ExpertPart(
                    prefix + part.replace("*", str(expert)),
                    (rows, shape[2]),
                    Box((first, columns[0]), (last, columns[1])),
                    (expert - box.start[0], slice(above + first, above + last)),
                )


def _list_converters(family: str) -> list[Any]:
    try:
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
    except ImportError:  # before transformers 5, every expert has its own parameters
        return []
    return mapping.get_checkpoint_conversion_mapping(family) or []


def _read_converter(converter: Any) -> Fused | None:
    """Return what a converter joins, if it joins whole tensors of experts by rows."""
    steps = [
        (type(step).__name__, getattr(step, "dim", None))
        for step in getattr(converter, "operations", ())
    ]
    sources, targets = (
        _list_names(converter.source_patterns),
        _list_names(converter.target_patterns),
    )
    expected = [(_MERGE, 0), (_JOIN, 1)] if len(sources) > 1 else [(_MERGE, 0)]
    is_plain = all(name.replace("*", "").replace(".", "").isidentifier() for name in sources)
    if steps != expected or len(targets) != 1 or not is_plain:
        return None
    return Fused(targets[0], tuple(sources))


def _list_names(patterns: Any) -> list[str]:
    several = [patterns] if isinstance(patterns, str) else list(patterns)
    return [pattern.replace(r"\.", ".") for pattern in several]
