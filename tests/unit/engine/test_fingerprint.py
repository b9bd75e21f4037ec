"""Proof of what an engine holds: fused, padded, cast and packed parameters, right and wrong."""

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
    """A layer that keeps its weights where nobody can look, as vLLM's do on CPU."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.hidden = weight
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.input_size_per_partition = weight.shape[1]

    def cpu_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return x @ self.hidden.T


class Attention(torch.nn.Module):
    def __init__(self, qkv: torch.Tensor, packed: bool) -> None:
        super().__init__()
        self.qkv_proj = Packed(qkv) if packed else torch.nn.Linear(HIDDEN, len(qkv), bias=False)
        if not packed:
            self.qkv_proj.weight = torch.nn.Parameter(qkv.clone())


class Model(torch.nn.Module):
    """What an engine makes of the checkpoint below."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, tensors: dict[str, torch.Tensor], *, packed: bool) -> None:
        super().__init__()
        qkv = torch.cat([tensors[f"attn.{part}_proj.weight"] for part in "qkv"])
        self.attn = Attention(qkv, packed)
        self.embed = torch.nn.Embedding(16, HIDDEN)  # padded from 10 rows
        padded = torch.zeros(16, HIDDEN)
        padded[:10] = tensors["embed.weight"]
        self.embed.weight = torch.nn.Parameter(padded)


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"attn.q_proj.weight": 8, "attn.k_proj.weight": 4, "attn.v_proj.weight": 4}
    sizes["embed.weight"] = 10
    return {n: torch.randn(rows, HIDDEN, generator=generator) for n, rows in sizes.items()}


def proof_of(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    proof = Proof(model)
    seen: Iterator[tuple[str, torch.Tensor]] = proof.watching(tensors.items())
    assert [name for name, _ in seen] == list(tensors)
    proof.check(model)


@pytest.mark.parametrize("packed", [False, True])
def test_what_was_loaded_is_proved(packed: bool) -> None:
    tensors = checkpoint(1)
    proof_of(Model(tensors, packed=packed), tensors)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", list(checkpoint(1)))
def test_one_tensor_that_was_not_loaded_is_noticed(packed: bool, name: str) -> None:
    tensors = checkpoint(1)
    model = Model({**tensors, name: checkpoint(2)[name]}, packed=packed)
    with pytest.raises(RuntimeError, match=r"1 of 2 parameters differ"):
        proof_of(model, tensors)


@pytest.mark.parametrize("packed", [False, True])
def test_a_tensor_that_the_checkpoint_lacks_is_noticed(packed: bool) -> None:
    tensors = checkpoint(1)
    model = Model(tensors, packed=packed)
    del tensors["embed.weight"]
    with pytest.raises(RuntimeError, match=r"nothing for 1 parameters, for example embed\.weight"):
        proof_of(model, tensors)


def test_tensors_without_a_parameter_are_named_before_anything_is_loaded() -> None:
    proof = Proof(Model(checkpoint(1), packed=False))
    names = [*checkpoint(1), "lm_head.weight", "attn.rotary_emb.inv_freq", "attn.q_proj.qweight"]
    assert proof.unknown_among(names) == ["attn.q_proj.qweight"]


def test_a_single_bit_is_noticed() -> None:
    tensors = checkpoint(1)
    model = Model(tensors, packed=False)
    bits = model.embed.weight.data.view(torch.int32)
    bits[3, 3] ^= 1
    with pytest.raises(RuntimeError, match=r"embed\.weight"):
        proof_of(model, tensors)


def test_a_checkpoint_of_another_dtype_is_compared_as_it_is_served() -> None:
    tensors = checkpoint(1)
    model = Model(tensors, packed=False).to(torch.bfloat16)
    proof_of(model, tensors)


@pytest.mark.parametrize("name", ["embed.weight", "attn.k_proj.weight"])
def test_what_changed_under_way_is_not_what_was_published(name: str) -> None:
    published = checkpoint(1)
    sums = {each: word_sum(tensor) for each, tensor in published.items()}
    arrived = {**published, name: checkpoint(2)[name]}
    model = Model(arrived, packed=False)
    for tensors in (published, arrived):
        proof = Proof(model, sums)
        assert [each for each, _ in proof.watching(tensors.items()) if each in proof.by_sum]
        with pytest.raises(RuntimeError, match=r"1 of 2 parameters differ"):
            proof.check(model)
    proof = Proof(Model(published, packed=False).to(torch.bfloat16), sums)
    assert not [each for each, _ in proof.watching(published.items()) if each in proof.by_sum]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64), st.data())
def test_a_fingerprint_adds_up_over_any_cut_and_order(
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


# --- several ranks -------------------------------------------------------------------------------

RANKS = 4


class Stacking:
    """vLLM's mapper, which names the parameter that a tensor is fused into."""

    def apply_list(self, names: list[str]) -> list[str]:
        return [re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name) for name in names]


class Rank(torch.nn.Module):
    """One of four that share two heads of keys and values, each of two rows."""

    packed_modules_mapping = Model.packed_modules_mapping
    hf_to_vllm_mapper = Stacking()

    def __init__(self, tensors: dict[str, torch.Tensor], rank: int) -> None:
        super().__init__()
        self.attn = Attention(torch.cat([part for _, part in parts(tensors, rank)[:3]]), False)
        self.attn.qkv_proj.num_kv_head_replicas = 2
        self.embed = torch.nn.Embedding(4, HIDDEN)  # padded from 10 rows to 16
        padded = torch.zeros(16, HIDDEN)
        padded[:10] = tensors["embed.weight"]
        self.embed.weight = torch.nn.Parameter(padded[4 * rank : 4 * rank + 4].clone())
        self.norm = torch.nn.LayerNorm(HIDDEN, bias=False)
        self.norm.weight = torch.nn.Parameter(tensors["norm.weight"].clone())


def of_ranks(seed: int) -> dict[str, torch.Tensor]:
    return {**checkpoint(seed), "norm.weight": checkpoint(seed + 100)["embed.weight"][0]}


def parts(tensors: dict[str, torch.Tensor], rank: int) -> list[tuple[str, torch.Tensor]]:
    """What a rank takes of them."""
    head = rank // 2
    rows = {"attn.q_proj.weight": (2 * rank, 2 * rank + 2)}
    rows |= {f"attn.{part}_proj.weight": (2 * head, 2 * head + 2) for part in "kv"}
    rows["embed.weight"] = (4 * rank, 4 * rank + 4)
    return [(name, tensors[name][slice(*some)]) for name, some in rows.items()]


def judged(models: list[Rank], proofs: list[Proof]) -> None:
    """All ranks look, then judge together."""
    held: list[torch.Tensor] = []
    for proof, model in zip(proofs, models, strict=True):
        proof.look(model)
    for proof in proofs:  # what each would tell the others
        proof_only = list[torch.Tensor]()

        def tell(local: torch.Tensor, into: list[torch.Tensor] = proof_only) -> torch.Tensor:
            into.append(local)
            raise InterruptedError

        with pytest.raises(InterruptedError):
            proof.judge(tell)
        held += proof_only
    for proof in proofs:
        proof.judge(lambda _: torch.stack(held).sum(0))


def watched(models: list[Rank], tensors: dict[str, torch.Tensor], brought: str) -> list[Proof]:
    sums = {name: word_sum(tensor) for name, tensor in tensors.items()}
    proofs = []
    for rank, model in enumerate(models):
        mine = [(n, t) for n, t in parts(tensors, rank) if len(t)] if brought == "parts" else []
        cuts = {name for name, _ in mine}
        proof = Proof(model, sums if brought == "sums" else None, cuts)
        whole = [(name, tensor) for name, tensor in tensors.items() if name not in dict(mine)]
        assert len(list(proof.watching([*mine, *whole]))) == len(tensors)
        proofs.append(proof)
    return proofs


@pytest.mark.parametrize("brought", ["whole", "sums", "parts"])
def test_ranks_prove_what_they_share(brought: str) -> None:
    """Also keys and values that two ranks hold, and a rank that holds padding alone."""
    tensors = of_ranks(1)
    models = [Rank(tensors, rank) for rank in range(RANKS)]
    judged(models, watched(models, tensors, brought))


@pytest.mark.parametrize("brought", ["whole", "sums", "parts"])
@pytest.mark.parametrize(
    ("layer", "row"), [("attn.qkv_proj", 0), ("attn.qkv_proj", 3), ("embed", 1), ("norm", 0)]
)
def test_a_bit_on_one_of_several_ranks_is_noticed(brought: str, layer: str, row: int) -> None:
    tensors = of_ranks(1)
    models = [Rank(tensors, rank) for rank in range(RANKS)]
    weight = models[2].get_submodule(layer).weight
    weight.data.view(-1, HIDDEN).view(torch.int32)[row, 1] ^= 1
    with pytest.raises(RuntimeError, match=rf"1 of 3 .*{layer}"):
        judged(models, watched(models, tensors, brought))


def test_a_rank_that_holds_the_part_of_another_is_noticed_where_parts_were_brought() -> None:
    """Together they hold the right bits, and no sum over the ranks could tell."""
    tensors = of_ranks(1)
    models = [Rank(tensors, rank) for rank in (1, 0, 2, 3)]
    judged(models, watched(models, tensors, "whole"))
    proof = watched(models, tensors, "parts")[0]
    proof.look(models[0])
    with pytest.raises(RuntimeError, match=r"2 of 3 .*attn\.qkv_proj\.weight, embed\.weight"):
        proof.judge_alone()
    with pytest.raises(RuntimeError, match=r"2 of 3"):
        proof.judge(lambda local: local)


def test_a_part_that_was_loaded_in_another_place_is_noticed() -> None:
    """A loader that cuts where nothing was brought finds zeros."""
    tensors = of_ranks(1)
    model = Rank({**tensors, "attn.k_proj.weight": torch.zeros(4, HIDDEN)}, 0)
    (proof,) = watched([model], tensors, "parts")
    proof.look(model)
    with pytest.raises(RuntimeError, match=r"1 of 3 .*attn\.qkv_proj\.weight"):
        proof.judge_alone()


def test_parts_and_wholes_of_one_parameter_are_not_mixed() -> None:
    tensors = of_ranks(1)
    proof = Proof(Rank(tensors, 0), cuts={"attn.q_proj.weight"})
    with pytest.raises(RuntimeError, match="cannot be summed"):
        list(proof.watching(tensors.items()))


def test_keys_and_values_that_are_fused_and_held_twice_are_not_vouched_for() -> None:
    proof = Proof(Rank(of_ranks(1), 0))
    assert proof.unknown_among(["attn.q_proj.weight", "attn.k_proj.weight"]) == []
    assert proof.unknown_among(["attn.qkv_proj.weight"]) == ["attn.qkv_proj.weight"]
