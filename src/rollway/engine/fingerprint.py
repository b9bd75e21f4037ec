"""Verify that a model holds the tensors of a checkpoint.

An engine fuses tensors (q, k, v into one), divides them among ranks, pads the vocabulary, and may
pack them into its own form. So a tensor's fingerprint is a sum over its bits, eight bytes at a time
where rows and cuts allow it: it does not depend on order, cuts or zeros. A packed layer keeps no
readable weights, so its fingerprint is computed after vLLM loaded it and before vLLM packs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from rollway.engine.layers import list_loaded_parameters
from rollway.weights.checkpoint import TensorHeader
from rollway.weights.digest.checksums import (
    DTYPES,
    dtype_name,
    integers,
    raw_bytes,
    split_words,
    word_sum,
)

_LINEAR, _SQUARE = -7046029254386353131, -4658895280553007687  # odd 64-bit constants of splitmix
_CHUNK = 1 << 16  # stays in a core's cache
_DEVICE_CHUNK = 1 << 22  # bounds the memory that a device needs for it
_WORD = 8
Reduce = Callable[[torch.Tensor], torch.Tensor]
_COMPUTED = "rotary_emb.inv_freq"
# Tensors of a checkpoint without a parameter: tied to the embeddings, or computed by the engine.
_WITHOUT_PARAMETER = ("lm_head.weight", _COMPUTED)
_CAST = ("F64", "F32", "F16", "BF16")
_ADAPTED = (".base_layer.", ".")
_EXPERTS = {"gate_proj": "w13_weight", "up_proj": "w13_weight", "down_proj": "w2_weight"}


def fingerprint(tensor: torch.Tensor, *, words: bool = False) -> int:
    """Return 64 bits that depend on a tensor's elements, or on its words of eight bytes, but not on
    their order or on zeros.

    Words are only summed, which is as fast as memory allows. Elements have few bits and many equal
    values, so different tensors may have equal sums; their squares count too."""
    return read_fingerprints([start_fingerprint(tensor, words=words)])[0]


def start_fingerprint(tensor: torch.Tensor, *, words: bool) -> torch.Tensor:
    """Start a fingerprint on the device's current stream, without waiting for it."""
    if not words:
        return _sum_elements(tensor)
    if tensor.device.type == "cpu":
        return torch.tensor(_to_signed(word_sum(tensor)))
    return split_words(raw_bytes(tensor))[0].sum()  # no bytes remain: rows are whole words


def _sum_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum of all elements and of their squares."""
    flat = integers(tensor)
    linear = torch.zeros((), dtype=torch.int64, device=flat.device)
    square = torch.zeros_like(linear)
    for part in flat.split(_CHUNK if flat.device.type == "cpu" else _DEVICE_CHUNK):
        bits = part.to(torch.int64)
        linear += bits.sum()
        square += (bits * bits).sum()
    return linear * _LINEAR + square * _SQUARE


def read_fingerprints(started: Sequence[torch.Tensor]) -> list[int]:
    """Wait for fingerprints; all of one device come to the host in one transfer."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for total in started:
        by_device.setdefault(total.device, []).append(total)
    values = {device: iter(torch.stack(sums).tolist()) for device, sums in by_device.items()}
    return [next(values[total.device]) for total in started]


def list_non_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that have NaN or infinity.

    Either of them stays in a sum. On a GPU it takes as long as a fingerprint of words, needs no
    memory, and is waited for once. A sum that is not finite may also be too large: that tensor is
    read once more."""
    known = {DTYPES[name] for name in _CAST}
    floats = {name: t.detach() for name, t in tensors.items() if t.dtype in known and t.numel()}
    if not floats:
        return []
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in floats.values()])
    suspects = [n for n, ok in zip(floats, sums.isfinite().tolist(), strict=True) if not ok]
    return [name for name in suspects if not floats[name].isfinite().all()]


def _fits_words(tensor: torch.Tensor) -> bool:
    """Return whether no word of eight bytes crosses the end of a row."""
    width = tensor.shape[-1] if tensor.dim() else 1
    return bool(width * tensor.element_size() % _WORD == 0)


@dataclass(slots=True)
class _Group:
    """The checkpoint's tensors that form one parameter of the engine."""

    cut: bool
    """Whether this rank received only its parts of the tensors."""
    words: bool
    """Whether the fingerprint sums words of eight bytes; otherwise it sums elements."""
    parts: list[tuple[str, int]] = field(default_factory=list)
    """The tensors, and how often the ranks together hold each."""
    fingerprint: int = 0
    """The sum of all ranks together; with `cut`, the sum of this rank."""


class Proof:
    """Collects fingerprints of a checkpoint's tensors, then compares a model with them."""

    def __init__(
        self,
        model: torch.nn.Module,
        sums: Mapping[str, int] | None = None,
        cuts: Container[str] = (),
    ) -> None:
        """Prepare to verify a model. `sums` are the publisher's word sums: the model is then
        compared with these, and not with the received tensors. `cuts` names the tensors of which
        this rank receives only its part; it must then hold exactly that part."""
        self._sums = dict(sums or {})
        self._cuts = cuts
        self._replicas = _count_replicas(model)
        self._packed: dict[str, list[str]] = dict(getattr(model, "packed_modules_mapping", {}))
        self._fused_into = {part: whole for whole, parts in self._packed.items() for part in parts}
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._parameters = _strip_adapters(list_loaded_parameters(model))
        names = (name for name, _ in model.named_parameters())
        self._full_names = dict(zip(self._parameters, names, strict=True))
        # Kept: vLLM's mapper tries many patterns, and this is asked several times a tensor while
        # the engine's thread waits for Python's lock.
        self._find_parameter = functools.cache(self._map_name)
        self._groups: dict[str, _Group] = {}
        self.by_sum: set[str] = set()
        """Tensors that this proof did not read: the model must have their published sums."""
        self._started: dict[str, torch.Tensor] = {}
        """The fingerprints of tensors that have a parameter, until `finish_collecting`."""
        self._collected: dict[str, int] = {}
        """The same from then on."""
        self._loaded: dict[str, int] = {}
        """The fingerprints of parameters before they were packed."""
        self._is_complete = False

    def list_unverifiable(self, names: Iterable[str]) -> list[str]:
        """Return the tensors that cannot be verified: they have no parameter, or ranks hold a part
        of them more often than the rest."""
        return [
            name
            for name in names
            if (self._find_parameter(name) is None and not name.endswith(_WITHOUT_PARAMETER))
            or self._count_copies(name) is None
        ]

    def read_served(
        self, headers: Mapping[str, TensorHeader], dtype: torch.dtype
    ) -> dict[str, TensorHeader]:
        """Return a checkpoint's headers with the dtypes that an engine of this `dtype` serves.

        The engine casts all tensors to its dtype, but for the few parameters that it always keeps
        in another one: there the trainer's tensors have the dtype of the checkpoint."""
        served = dict(headers)
        for name, header in headers.items():
            parameter = self._parameters.get(self._find_parameter(name) or "")
            actual = torch.empty(0, dtype=dtype) if parameter is None else parameter
            if header.dtype in _CAST and DTYPES[header.dtype] not in (dtype, actual.dtype):
                served[name] = replace(header, dtype=dtype_name(actual))
        return served

    def list_missing(self, names: Iterable[str]) -> list[str]:
        """Return the parameters for which none of these tensors is."""
        filled = {self._find_parameter(name) for name in names}
        return sorted(n for n in self._parameters if n not in filled and not n.endswith(_COMPUTED))

    def collect(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, and collect their fingerprints."""
        for name, tensor in tensors:
            self._add(name, tensor)
            yield name, tensor

    def check_copies(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Raise unless copies of the collected tensors have the same fingerprints."""
        started = {
            name: start_fingerprint(self._cast(name, tensor), words=self._groups[parameter].words)
            for name, tensor in copies.items()
            if (parameter := self._find_parameter(name)) in self._groups
        }
        self.finish_collecting()
        actual = zip(started, read_fingerprints(list(started.values())), strict=True)
        wrong = [name for name, value in actual if value != self._collected[name]]
        if wrong:
            raise RuntimeError(
                f"{wrong[0]} and {len(wrong) - 1} more tensors arrived damaged, or changed while "
                "they were read: a trainer must not change them before the refit has returned"
            )

    def list_non_finite(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of tensors that have NaN or infinity in the dtype of their parameter:
        a cast can overflow."""
        narrowed = {name for name, tensor in tensors.items() if self._is_narrowed(name, tensor)}
        names = list_non_finite({n: t for n, t in tensors.items() if n not in narrowed})
        for name in sorted(narrowed):  # one after the other, because each cast takes memory
            names += list_non_finite({name: self._cast(name, tensors[name])})
        return names

    def measure_loaded(self, name: str, layer: torch.nn.Module) -> None:
        """Compute the fingerprints of a layer that vLLM is about to pack, for `measure`."""
        for key, parameter in layer.named_parameters(recurse=False):
            parameter_name = f"{name}.{key}".replace(*_ADAPTED)
            if parameter_name in self._groups:
                words = self._groups[parameter_name].words
                self._loaded[parameter_name] = fingerprint(parameter, words=words)

    def measure(self, model: torch.nn.Module) -> dict[str, int]:
        """Return the fingerprints of this rank's parameters that can be read."""
        parameters = _strip_adapters(dict(model.named_parameters()))
        held, self._loaded = self._loaded, {}
        started = {
            name: start_fingerprint(parameters[name], words=group.words)
            for name, group in self._groups.items()
            if name not in held and parameters[name].numel()
        }
        held |= zip(started, read_fingerprints(list(started.values())), strict=True)
        return held

    def finish_collecting(self) -> None:
        """Wait for the tensors' fingerprints, and add them up; raise if some parameter has no
        tensor. `check` does it too; done before, it is no part of the pause."""
        if self._is_complete:
            return
        missing = self.list_missing(name for g in self._groups.values() for name, _ in g.parts)
        if missing:
            raise RuntimeError(
                f"the checkpoint has nothing for {len(missing)} parameters, for example "
                f"{', '.join(missing[:3])}"
            )
        started, self._started = self._started, {}
        self._collected |= zip(started, read_fingerprints(list(started.values())), strict=True)
        for group in self._groups.values():
            total = sum(self._collected[name] * times for name, times in group.parts)
            group.fingerprint = _to_signed(total)
        self._is_complete = True

    def check(self, model: torch.nn.Module, reduced: Reduce = torch.clone) -> dict[str, int]:
        """Raise unless every parameter holds the collected tensors; return the fingerprints of this
        rank's. `reduced` sums over ranks; all of them must call this at the same time."""
        self.finish_collecting()
        held = self.measure(model)
        # Sort by name: ranks may have received their tensors in different orders.
        groups = sorted(self._groups.items())
        total = local = [held.get(name, 0) for name, _ in groups]
        if reduced is not torch.clone:
            device = next(model.parameters()).device
            total = reduced(torch.tensor(local, dtype=torch.int64, device=device)).tolist()
        wrong = []
        for (name, group), all_ranks in zip(groups, total, strict=True):
            # A parameter is either whole and equal on all ranks, or divided among them.
            known = [held.get(name)] if group.cut else [held.get(name), all_ranks]
            if name not in held or group.fingerprint not in known:
                wrong.append(name)
        if wrong:
            raise RuntimeError(
                f"{len(wrong)} of {len(self._groups)} parameters differ from the checkpoint, for "
                f"example {', '.join(wrong[:3])}"
            )
        return held

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        target = self._find_parameter(name)
        if target is None:
            return
        self._is_complete = False
        parameter = self._parameters[target]
        values = tensor.to(parameter.dtype)
        words = _fits_words(values) and _fits_words(parameter)
        cut = name in self._cuts
        group = self._groups.setdefault(target, _Group(cut, words))
        # The first tensor decides for the group. Any tensor can be summed by elements, but not any
        # by words.
        if (group.words and not words) or group.cut != cut:
            raise RuntimeError(f"{name} cannot be summed with the other parts of {target}")
        # A published sum counts the words of the tensor as it was sent, not after a cast.
        published = self._sums.get(name) if group.words and values is tensor else None
        if published is None:
            self._started[name] = start_fingerprint(values, words=group.words)
        else:
            self._collected[name] = _to_signed(published)
            self.by_sum.add(name)
        group.parts.append((name, 1 if cut else self._count_copies(name) or 1))

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the dtype of the parameter into which it is loaded."""
        parameter = self._parameters.get(self._find_parameter(name) or "")
        return tensor if parameter is None else tensor.to(parameter.dtype)

    def _is_narrowed(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether the parameter's dtype has a smaller range than a tensor's."""
        served = self._cast(name, tensor.new_empty(0)).dtype
        if not (served.is_floating_point and tensor.is_floating_point()):
            return False
        return bool(torch.finfo(served).max < torch.finfo(tensor.dtype).max)

    def _rename(self, name: str) -> str:
        """Return the engine's name of a tensor, before fusing."""
        return self._mapper.apply_list([name])[0] if self._mapper is not None else name

    def target_of(self, name: str) -> str | None:
        """Return the parameter into which a tensor is loaded, as the model names it."""
        return self._full_names.get(self._find_parameter(name) or "")

    def _map_name(self, name: str) -> str | None:
        """Return the engine's parameter into which a tensor is loaded."""
        mapped = self._rename(name)
        parts = mapped.split(".")
        if len(parts) > 2 and parts[-2] in self._fused_into:
            parts[-2] = self._fused_into[parts[-2]]
        if "experts" in parts and parts[-2] in _EXPERTS:
            module = parts[: parts.index("experts") + 1]
            targets = [".".join([*module, "routed_experts", _EXPERTS[parts[-2]]])]
        else:
            targets = [".".join(parts), mapped]
        return next((target for target in targets if target in self._parameters), None)

    def _count_copies(self, name: str) -> int | None:
        """Return how often the ranks together hold a tensor. Keys and values are replicated if
        there are fewer KV heads than ranks. Return None if only a part of the tensor is
        replicated: queries, keys and values that are fused in the checkpoint."""
        if not self._replicas:
            return 1
        target = self._find_parameter(name) or ""
        copies = self._replicas.get(target.rpartition(".")[0], 1)
        if copies == 1:
            return 1
        order = self._packed.get(target.split(".")[-2], [])
        # Try both names: vLLM's mapper may return the name of the fused parameter.
        parts = [full_name.split(".")[-2] for full_name in (name, self._rename(name))]
        part = next((part for part in parts if part in order), None)
        if part is None:
            return None
        return 1 if part == order[0] else copies


def _strip_adapters(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return parameters by their names without adapters, which wrap a layer as `base_layer`."""
    return {name.replace(*_ADAPTED): value for name, value in parameters.items()}


def _count_replicas(model: torch.nn.Module) -> dict[str, int]:
    """Return the number of KV replicas of fused QKV layers by name, where it is more than one."""
    replicas = {n: getattr(m, "num_kv_head_replicas", 1) for n, m in model.named_modules()}
    return {n.replace(".base_layer", ""): count for n, count in replicas.items() if count > 1}


def _to_signed(value: int) -> int:
    """Return the lower 64 bits as a signed number, as torch's int64 has it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
