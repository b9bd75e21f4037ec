"""Proof that a model holds the tensors of a checkpoint.

An engine fuses tensors (q, k, v into one), cuts them over ranks, pads the vocabulary, and may pack
them into a form of its own. So a tensor's fingerprint is a sum over its bits, eight bytes at a time
where rows and cuts allow it: equal for any order and any cut, unchanged by zeros. Where a packed
layer keeps no weights to look at, it is asked for its product with a known vector instead, and the
same product is made from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rollway.weights.digest.bits import word_sum

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LINEAR, _SQUARE = -7046029254386353131, -4658895280553007687  # odd 64-bit constants of splitmix
_CHUNK = 1 << 16  # stays in a core's cache
_WORD = 8
Reduce = Callable[[torch.Tensor], torch.Tensor]
_COMPUTED = "rotary_emb.inv_freq"
# Tied to the embeddings, or computed and not loaded.
_WITHOUT_PARAMETER = ("lm_head.weight", _COMPUTED)
_EXPERTS = {"gate_proj": "w13_weight", "up_proj": "w13_weight", "down_proj": "w2_weight"}


def fingerprint(tensor: torch.Tensor, *, words: bool = False) -> int:
    """64 bits of a tensor's elements, or of its words of eight bytes, whatever their order; zeros
    do not count.

    Words are summed, which is as fast as memory. Elements are few bits, and many are alike: their
    squares count as well."""
    if words:
        return _signed(word_sum(tensor))
    flat = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    linear = torch.zeros((), dtype=torch.int64, device=flat.device)
    square = torch.zeros_like(linear)
    for part in flat.split(_CHUNK):
        bits = part.to(torch.int64)
        linear += bits.sum()
        square += (bits * bits).sum()
    return _signed(int(linear) * _LINEAR + int(square) * _SQUARE)


def _by_words(tensor: torch.Tensor) -> bool:
    """Whether no word of eight bytes crosses a row's end."""
    width = tensor.shape[-1] if tensor.dim() else 1
    return bool(width * tensor.element_size() % _WORD == 0)


@dataclass(slots=True)
class _Group:
    """The checkpoint's tensors that make up one parameter of the engine."""

    products: dict[str, torch.Tensor] = field(default_factory=dict)
    """With the probe vector, by part; only where the engine keeps no weights to look at."""
    fingerprint: int = 0
    """Of what all ranks together hold; of what this one does, where parts were brought."""
    cut: bool = False
    """Whether the tensors were brought as this rank's parts of them."""
    words: bool = False
    held: int | None = None
    """What the engine's parameter has, once looked at; None when it cannot be."""


class Proof:
    """Watches the tensors of a checkpoint go by, then checks a model against them."""

    def __init__(
        self,
        model: torch.nn.Module,
        sums: Mapping[str, int] | None = None,
        cuts: Container[str] = (),
    ) -> None:
        """`sums` are what `bits.word_sum` gave for tensors where they came from: what the model
        holds is then compared with that, and not with what arrived. `cuts` names the tensors of
        which only this rank's part goes by: that and nothing else is what this rank must hold."""
        self._sums = dict(sums or {})
        self._cuts = cuts
        self._replicas = _replicas(model)
        self._packed: dict[str, list[str]] = dict(getattr(model, "packed_modules_mapping", {}))
        self._fused_into = {part: whole for whole, parts in self._packed.items() for part in parts}
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._parameters = _parameters(model)
        self._groups: dict[str, _Group] = {}
        self.by_sum: set[str] = set()
        """Tensors that went by without being read: the model must hold their published sums."""
        self._wrong: list[str] = []
        self._device = torch.device("cpu")

    def unknown_among(self, names: Iterable[str]) -> list[str]:
        """Tensors that could not be vouched for: no parameter is found for them, or a part of
        them is held more often than the rest."""
        return [
            name
            for name in names
            if (self._target(name) is None and not name.endswith(_WITHOUT_PARAMETER))
            or self._copies(name) is None
        ]

    @property
    def packed(self) -> bool:
        """Whether some layers keep no weights to look at, only what they made of them."""
        return any(parameter.numel() == 0 for parameter in self._parameters.values())

    def watching(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self._note(name, tensor)
            yield name, tensor

    def check(self, model: torch.nn.Module, reduced: Reduce = torch.clone) -> None:
        """Raise unless every parameter holds what went by; `reduced` sums over the ranks among
        which parameters are cut."""
        self.look(model)
        self.judge(reduced)

    def look(self, model: torch.nn.Module) -> None:
        """Take the fingerprints of what this rank holds."""
        parameters = _parameters(model)
        missing = sorted(
            name for name in parameters.keys() - self._groups.keys() if not name.endswith(_COMPUTED)
        )
        if missing:
            raise RuntimeError(
                f"the checkpoint has nothing for {len(missing)} parameters, for example "
                f"{', '.join(missing[:3])}"
            )
        self._wrong = []
        for name, group in self._groups.items():
            parameter = parameters[name]
            if parameter.numel():
                group.held = fingerprint(parameter, words=group.words)
                if group.cut and group.held != _signed(group.fingerprint):
                    self._wrong.append(name)
            elif not self._product_agrees(model, name):
                self._wrong.append(name)
        self._device = next(iter(parameters.values())).device

    def judge(self, reduced: Reduce = torch.clone) -> None:
        """Compare them, all ranks at the same time, with what went by."""
        # By name: ranks need not have seen their tensors in the same order.
        seen = {n: group for n, group in sorted(self._groups.items()) if group.held is not None}
        local = [group.held for group in seen.values()]
        total = reduced(torch.tensor(local, dtype=torch.int64, device=self._device)).tolist()
        self._refuse(
            self._wrong
            + [
                name
                for (name, group), all_ranks in zip(seen.items(), total, strict=True)
                # A whole parameter, the same on all ranks, or one that is cut among them.
                if not group.cut and _signed(group.fingerprint) not in (group.held, all_ranks)
            ]
        )

    def judge_alone(self) -> None:
        """As far as this rank can without the others."""
        self._refuse(self._wrong)

    def _refuse(self, wrong: list[str]) -> None:
        if wrong:
            raise RuntimeError(
                f"{len(wrong)} of {len(self._groups)} parameters do not hold what the checkpoint "
                f"has, for example {', '.join(sorted(wrong)[:3])}"
            )

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        target = self._target(name)
        if target is None:
            return
        parameter = self._parameters[target]
        values = tensor.to(parameter.dtype)
        words = _by_words(values) and _by_words(parameter)
        cut = name in self._cuts
        group = self._groups.setdefault(target, _Group(words=words, cut=cut))
        if (group.words and not words) or group.cut != cut:
            raise RuntimeError(f"{name} cannot be summed up with the other parts of {target}")
        if parameter.numel():
            lost = parameter.device.type == "meta"  # an update failed: there is no device to use
            values = values if lost or name in self._sums else values.to(parameter.device)
            known = self._sums.get(name) if group.words and values is tensor else None
            if known is None:
                found = fingerprint(values, words=group.words)
            else:
                found = known
                self.by_sum.add(name)
            group.fingerprint += found if cut else found * (self._copies(name) or 1)
        else:
            group.products[name.split(".")[-2]] = values.float() @ _probe(values.shape[1])

    def _mapped(self, name: str) -> str:
        """As the engine spells it, before it fuses anything."""
        return self._mapper.apply_list([name])[0] if self._mapper is not None else name

    def _target(self, name: str) -> str | None:
        """The engine's parameter that a tensor of the checkpoint goes into."""
        mapped = self._mapped(name)
        words = mapped.split(".")
        if len(words) > 2 and words[-2] in self._fused_into:
            words[-2] = self._fused_into[words[-2]]
        if "experts" in words and words[-2] in _EXPERTS:
            home = words[: words.index("experts") + 1]
            inner = [[], ["routed_experts"]]  # vLLM has moved them there
            targets = [".".join([*home, *more, _EXPERTS[words[-2]]]) for more in inner]
        else:
            targets = [".".join(words), mapped]
        return next((target for target in targets if target in self._parameters), None)

    def _copies(self, name: str) -> int | None:
        """How often the ranks of an engine hold a tensor that they cut: keys and values more than
        once, where there are fewer heads of them than ranks. None for a tensor of which that is
        true in part: queries, keys and values that are one in the checkpoint."""
        if not self._replicas:
            return 1
        target = self._target(name) or ""
        copies = self._replicas.get(target.rpartition(".")[0], 1)
        if copies == 1:
            return 1
        order = self._packed.get(target.split(".")[-2], [])
        # As the checkpoint has it, or renamed; vLLM's mapper may name what it is fused into.
        parts = [one.split(".")[-2] for one in (name, self._mapped(name))]
        part = next((part for part in parts if part in order), None)
        if part is None:
            return None
        return 1 if part == order[0] else copies

    def _product_agrees(self, model: torch.nn.Module, name: str) -> bool:
        """Whether a packed layer multiplies as the checkpoint's tensors would."""
        layer: Any = model.get_submodule(name.rpartition(".")[0])
        layer = getattr(layer, "base_layer", layer)
        kernel = getattr(layer, "cpu_linear", None)
        group = self._groups[name]
        order = self._packed.get(name.split(".")[-2], list(group.products))
        if kernel is None or set(order) != set(group.products):
            return False
        expected = torch.cat([group.products[part] for part in order])
        probe = _probe(_width(layer)).to(layer.weight.dtype)
        made = kernel(probe[None], layer.weight, None)[0].float()
        if made.numel() != expected.numel():
            return False
        scale = expected.abs().max().clamp(min=1e-6)
        precise = layer.weight.dtype == torch.float32
        return bool((made - expected).abs().max() / scale < (1e-4 if precise else 3e-2))


def _parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """By the names that they have without adapters, which wrap a layer as its `base_layer`."""
    return {name.replace(".base_layer.", "."): value for name, value in model.named_parameters()}


def _replicas(model: torch.nn.Module) -> dict[str, int]:
    """By the name of an attention's layer of queries, keys and values: how often vLLM's ranks
    hold the latter two, where that is more than once."""
    found = {name: getattr(one, "num_kv_head_replicas", 1) for name, one in model.named_modules()}
    return {n.replace(".base_layer", ""): many for n, many in found.items() if many > 1}


def _probe(width: int) -> torch.Tensor:
    return torch.cos(torch.arange(width, dtype=torch.float32) * 1.7 + 0.3)


def _width(layer: Any) -> int:
    return int(getattr(layer, "input_size_per_partition", None) or layer.embedding_dim)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
