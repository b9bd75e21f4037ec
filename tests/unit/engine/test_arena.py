"""A parameter arena is never overwritten while a tensor uses its memory."""

from __future__ import annotations

import torch

from rollway.engine.shadow import ParameterArena


class Model(torch.nn.Module):
    """A model whose first layer the engine packs and whose second it serves unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = torch.nn.Linear(7, 5)
        self.plain = torch.nn.Embedding(11, 3)
        self.small = torch.nn.Parameter(torch.empty(3, dtype=torch.bfloat16))


def load(arena: ParameterArena, seed: int) -> Model:
    model = Model()
    arena.place(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def serve(arena: ParameterArena, seed: int) -> Model:
    model = load(arena, seed)
    for name in ("weight", "bias"):  # vLLM leaves empty parameters in a packed layer
        setattr(model.packed, name, torch.nn.Parameter(torch.empty(0)))
    with torch.no_grad():
        arena.release(model)
    return model


def test_the_next_model_does_not_overwrite_the_serving_one() -> None:
    arena = ParameterArena()
    assert arena.is_free
    first = serve(arena, 1)
    before = {name: parameter.clone() for name, parameter in first.named_parameters()}
    assert arena.is_free and arena.nbytes >= 4 * (35 + 5 + 33) + 2 * 3
    serve(arena, 2)
    assert all(torch.equal(parameter, before[name]) for name, parameter in first.named_parameters())


def test_an_arena_with_a_loaded_model_is_not_free() -> None:
    arena = ParameterArena()
    model = load(arena, 1)
    assert not arena.is_free
    del model
    assert arena.is_free


def test_an_arena_with_a_hidden_reference_is_not_free() -> None:
    arena = ParameterArena()
    model = load(arena, 1)
    kernel = model.packed.weight.data.t()  # a packed layer may keep this in a closure
    for layer in (model.packed, model.plain):
        layer.weight = torch.nn.Parameter(torch.empty(0))
    model.packed.bias = torch.nn.Parameter(torch.empty(0))
    model.small = torch.nn.Parameter(torch.empty(0))
    assert not arena.is_free
    del kernel
    assert arena.is_free
