"""Verification of the parameters of an engine: fused, padded, cast and packed, right and wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.engine.fingerprint import Proof, fingerprint
from rollway.weights.digest.checksums import word_sum

HIDDEN = 8


class Packed(torch.nn.Module):
    """A layer that hides its packed weights, as vLLM does on CPU."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.loaded = [make_linear(weight)]  # in a list, so that it is no part of the model
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


def make_linear(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(HIDDEN, len(weight), bias=False)
    linear.weight = torch.nn.Parameter(weight.clone())
    return linear


class Attention(torch.nn.Module):
    def __init__(self, qkv: torch.Tensor, packed: bool) -> None:
        super().__init__()
        self.qkv_proj = Packed(qkv) if packed else make_linear(qkv)


class Model(torch.nn.Module):
    """The checkpoint below, as an engine holds it."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, tensors: dict[str, torch.Tensor], *, packed: bool) -> None:
        super().__init__()
        qkv = torch.cat([tensors[f"attn.{part}_proj.weight"] for part in "qkv"])
        self.attn = Attention(qkv, packed)
        self.embed = torch.nn.Embedding(16, HIDDEN)  # padded from 10 rows
        padded = torch.zeros(16, HIDDEN)
        padded[:10] = tensors["embed.weight"]
        self.embed.weight = torch.nn.Parameter(padded)


def make_checkpoint(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"attn.q_proj.weight": 8, "attn.k_proj.weight": 4, "attn.v_proj.weight": 4}
    sizes["embed.weight"] = 10
    return {n: torch.randn(rows, HIDDEN, generator=generator) for n, rows in sizes.items()}


def verify(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    proof = Proof(model)
    seen: Iterator[tuple[str, torch.Tensor]] = proof.collect(tensors.items())
    assert [name for name, _ in seen] == list(tensors)
    layer = model.attn.qkv_proj
    if isinstance(layer, Packed):
        proof.measure_loaded("attn.qkv_proj", layer.loaded[0])
    proof.check(model)


@pytest.mark.parametrize("packed", [False, True])
def test_loaded_parameters_are_verified(packed: bool) -> None:
    tensors = make_checkpoint(1)
    verify(Model(tensors, packed=packed), tensors)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", list(make_checkpoint(1)))
def test_a_tensor_that_was_not_loaded_is_reported(packed: bool, name: str) -> None:
    tensors = make_checkpoint(1)
    model = Model({**tensors, name: make_checkpoint(2)[name]}, packed=packed)
    with pytest.raises(RuntimeError, match=r"1 of 2 parameters differ"):
        verify(model, tensors)


def test_a_packed_layer_that_was_not_loaded_again_is_reported() -> None:
    tensors = make_checkpoint(1)
    proof = Proof(Model(tensors, packed=True))
    assert len(list(proof.collect(tensors.items()))) == len(tensors)
    with pytest.raises(RuntimeError, match=r"1 of 2 .*attn\.qkv_proj\.weight"):
        proof.check(Model(tensors, packed=True))


@pytest.mark.parametrize("packed", [False, True])
def test_a_parameter_missing_from_the_checkpoint_is_reported(packed: bool) -> None:
    tensors = make_checkpoint(1)
    model = Model(tensors, packed=packed)
    del tensors["embed.weight"]
    with pytest.raises(RuntimeError, match=r"nothing for 1 parameters, for example embed\.weight"):
        verify(model, tensors)


def test_tensors_without_a_parameter_are_listed_before_loading() -> None:
    proof = Proof(Model(make_checkpoint(1), packed=False))
    names = [
        *make_checkpoint(1),
        "lm_head.weight",
        "attn.rotary_emb.inv_freq",
        "attn.q_proj.qweight",
    ]
    assert proof.list_unverifiable(names) == ["attn.q_proj.qweight"]


def test_a_flipped_bit_is_reported() -> None:
    tensors = make_checkpoint(1)
    model = Model(tensors, packed=False)
    bits = model.embed.weight.data.view(torch.int32)
    bits[3, 3] ^= 1
    with pytest.raises(RuntimeError, match=r"embed\.weight"):
        verify(model, tensors)


def test_a_checkpoint_is_compared_in_the_served_dtype() -> None:
    tensors = make_checkpoint(1)
    model = Model(tensors, packed=False).to(torch.bfloat16)
    verify(model, tensors)


@pytest.mark.parametrize("name", ["embed.weight", "attn.k_proj.weight"])
def test_a_tensor_changed_in_transit_is_reported(name: str) -> None:
    published = make_checkpoint(1)
    sums = {key: word_sum(tensor) for key, tensor in published.items()}
    arrived = {**published, name: make_checkpoint(2)[name]}
    model = Model(arrived, packed=False)
    for tensors in (published, arrived):
        proof = Proof(model, sums)
        assert [key for key, _ in proof.collect(tensors.items()) if key in proof.by_sum]
        with pytest.raises(RuntimeError, match=r"1 of 2 parameters differ"):
            proof.check(model)
    proof = Proof(Model(published, packed=False).to(torch.bfloat16), sums)
    assert not [key for key, _ in proof.collect(published.items()) if key in proof.by_sum]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64), st.data())
def test_fingerprints_add_up_over_any_split_and_order(
    values: list[float], data: st.DataObject
) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    cut = data.draw(st.integers(0, len(values)))
    order = torch.tensor(data.draw(st.permutations(range(len(values)))))
    mask = 2**64 - 1
    parts = fingerprint(tensor[:cut]) + fingerprint(tensor[cut:])
    assert parts & mask == fingerprint(tensor) & mask == fingerprint(tensor[order]) & mask
    padded = torch.cat([tensor, torch.zeros(5)])
    assert fingerprint(padded) == fingerprint(tensor)


def test_changes_that_keep_the_sum_of_few_bits_are_seen() -> None:
    """Elements of parameters whose rows are no whole words, for example a bias of three numbers."""
    for dtype in (torch.int8, torch.bfloat16):
        bits = torch.tensor([3, 5, 9], dtype=torch.int8 if dtype == torch.int8 else torch.int16)
        moved = bits + torch.tensor([1, -1, 0], dtype=bits.dtype)
        assert fingerprint(bits.view(dtype)) != fingerprint(moved.view(dtype))


# --- several ranks -------------------------------------------------------------------------------

RANKS = 4


class Stacking:
    """vLLM's mapper, which returns the name of the fused parameter of a tensor."""

    def apply_list(self, names: list[str]) -> list[str]:
        return [re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name) for name in names]


class Rank(torch.nn.Module):
    """One of four ranks that share two KV heads of two rows each."""

    packed_modules_mapping = Model.packed_modules_mapping
    hf_to_vllm_mapper = Stacking()

    def __init__(self, tensors: dict[str, torch.Tensor], rank: int) -> None:
        super().__init__()
        self.attn = Attention(torch.cat([part for _, part in cut_parts(tensors, rank)[:3]]), False)
        self.attn.qkv_proj.num_kv_head_replicas = 2
        self.embed = torch.nn.Embedding(4, HIDDEN)  # padded from 10 rows to 16
        padded = torch.zeros(16, HIDDEN)
        padded[:10] = tensors["embed.weight"]
        self.embed.weight = torch.nn.Parameter(padded[4 * rank : 4 * rank + 4].clone())
        self.norm = torch.nn.LayerNorm(HIDDEN, bias=False)
        self.norm.weight = torch.nn.Parameter(tensors["norm.weight"].clone())


def make_rank_checkpoint(seed: int) -> dict[str, torch.Tensor]:
    return {**make_checkpoint(seed), "norm.weight": make_checkpoint(seed + 100)["embed.weight"][0]}


def cut_parts(tensors: dict[str, torch.Tensor], rank: int) -> list[tuple[str, torch.Tensor]]:
    """Return the parts that a rank loads."""
    head = rank // 2
    rows = {"attn.q_proj.weight": (2 * rank, 2 * rank + 2)}
    rows |= {f"attn.{part}_proj.weight": (2 * head, 2 * head + 2) for part in "kv"}
    rows["embed.weight"] = (4 * rank, 4 * rank + 4)
    return [(name, tensors[name][slice(*bounds)]) for name, bounds in rows.items()]


def judge_together(models: list[Rank], proofs: list[Proof]) -> None:
    """Let all ranks inspect their models, then judge together."""
    local_sums: list[torch.Tensor] = []
    for proof, model in zip(proofs, models, strict=True):
        # Capture the values that the rank would send to the others.
        captured = list[torch.Tensor]()

        def capture(local: torch.Tensor, into: list[torch.Tensor] = captured) -> torch.Tensor:
            into.append(local)
            raise InterruptedError

        with pytest.raises(InterruptedError):
            proof.check(model, capture)
        local_sums += captured
    for proof, model in zip(proofs, models, strict=True):
        proof.check(model, lambda _: torch.stack(local_sums).sum(0))


def watch(models: list[Rank], tensors: dict[str, torch.Tensor], received: str) -> list[Proof]:
    sums = {name: word_sum(tensor) for name, tensor in tensors.items()}
    proofs = []
    for rank, model in enumerate(models):
        mine = (
            [(n, t) for n, t in cut_parts(tensors, rank) if len(t)] if received == "parts" else []
        )
        cuts = {name for name, _ in mine}
        proof = Proof(model, sums if received == "sums" else None, cuts)
        whole = [(name, tensor) for name, tensor in tensors.items() if name not in dict(mine)]
        assert len(list(proof.collect([*mine, *whole]))) == len(tensors)
        proofs.append(proof)
    return proofs


@pytest.mark.parametrize("received", ["whole", "sums", "parts"])
def test_ranks_verify_their_parameters_together(received: str) -> None:
    """Two ranks hold the same keys and values, and one rank holds only padding."""
    tensors = make_rank_checkpoint(1)
    models = [Rank(tensors, rank) for rank in range(RANKS)]
    judge_together(models, watch(models, tensors, received))


@pytest.mark.parametrize("received", ["whole", "sums", "parts"])
@pytest.mark.parametrize(
    ("layer", "row"), [("attn.qkv_proj", 0), ("attn.qkv_proj", 3), ("embed", 1), ("norm", 0)]
)
def test_a_flipped_bit_on_one_rank_is_reported(received: str, layer: str, row: int) -> None:
    tensors = make_rank_checkpoint(1)
    models = [Rank(tensors, rank) for rank in range(RANKS)]
    weight = models[2].get_submodule(layer).weight
    weight.data.view(-1, HIDDEN).view(torch.int32)[row, 1] ^= 1
    with pytest.raises(RuntimeError, match=rf"1 of 3 .*{layer}"):
        judge_together(models, watch(models, tensors, received))


def test_swapped_parts_of_two_ranks_are_reported_when_parts_were_received() -> None:
    """Together the ranks hold the right bits, so a sum over the ranks cannot detect it."""
    tensors = make_rank_checkpoint(1)
    models = [Rank(tensors, rank) for rank in (1, 0, 2, 3)]
    judge_together(models, watch(models, tensors, "whole"))
    proof = watch(models, tensors, "parts")[0]
    with pytest.raises(RuntimeError, match=r"2 of 3 .*attn\.qkv_proj\.weight, embed\.weight"):
        proof.check(models[0], lambda local: local)


def test_a_part_loaded_at_another_offset_is_reported() -> None:
    """A loader that reads outside the received part finds zeros."""
    tensors = make_rank_checkpoint(1)
    model = Rank({**tensors, "attn.k_proj.weight": torch.zeros(4, HIDDEN)}, 0)
    (proof,) = watch([model], tensors, "parts")
    with pytest.raises(RuntimeError, match=r"1 of 3 .*attn\.qkv_proj\.weight"):
        proof.check(model, lambda local: local)


def test_a_part_that_another_rank_holds_is_reported() -> None:
    """The sum over the ranks is then the one of this rank's part."""
    tensors = make_rank_checkpoint(1)
    right = Rank(tensors, 0)
    wrong = Rank({**tensors, "attn.k_proj.weight": torch.zeros(4, HIDDEN)}, 0)
    proofs = watch([right, wrong], tensors, "parts")[0], watch([wrong], tensors, "parts")[0]
    sums = [total for _, total in sorted(proofs[0].check(right).items())]
    with pytest.raises(RuntimeError, match=r"1 of 3 .*attn\.qkv_proj\.weight"):
        proofs[1].check(wrong, lambda _: torch.tensor(sums))


def test_mixing_parts_and_whole_tensors_of_one_parameter_is_refused() -> None:
    tensors = make_rank_checkpoint(1)
    proof = Proof(Rank(tensors, 0), cuts={"attn.q_proj.weight"})
    with pytest.raises(RuntimeError, match="cannot be summed"):
        list(proof.collect(tensors.items()))


def test_fused_and_replicated_keys_and_values_cannot_be_verified() -> None:
    proof = Proof(Rank(make_rank_checkpoint(1), 0))
    assert proof.list_unverifiable(["attn.q_proj.weight", "attn.k_proj.weight"]) == []
    assert proof.list_unverifiable(["attn.qkv_proj.weight"]) == ["attn.qkv_proj.weight"]
