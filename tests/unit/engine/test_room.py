"""Memory that is kept for the next version is never written over while something uses it."""

from __future__ import annotations

import torch

from rollway.engine.shadow import ParameterArena


class Model(torch.nn.Module):
    """Whose first layer is packed by an engine, and whose second is served as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = torch.nn.Linear(7, 5)
        self.plain = torch.nn.Embedding(11, 3)
        self.small = torch.nn.Parameter(torch.empty(3, dtype=torch.bfloat16))


def loaded(room: ParameterArena, seed: int) -> Model:
    model = Model()
    room.place(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def served(room: ParameterArena, seed: int) -> Model:
    model = loaded(room, seed)
    for name in ("weight", "bias"):  # as vLLM leaves a layer whose weights it has packed
        setattr(model.packed, name, torch.nn.Parameter(torch.empty(0)))
    with torch.no_grad():
        room.release(model)
    return model


def test_a_model_that_serves_is_not_touched_by_the_next() -> None:
    room = ParameterArena()
    assert room.is_free
    first = served(room, 1)
    before = {name: one.clone() for name, one in first.named_parameters()}
    assert room.is_free and room.nbytes >= 4 * (35 + 5 + 33) + 2 * 3
    served(room, 2)
    assert all(torch.equal(one, before[name]) for name, one in first.named_parameters())


def test_a_room_that_a_model_is_loaded_into_is_not_free() -> None:
    room = ParameterArena()
    model = loaded(room, 1)
    assert not room.is_free
    del model
    assert room.is_free


def test_a_room_that_something_hidden_holds_on_to_is_not_free() -> None:
    room = ParameterArena()
    model = loaded(room, 1)
    kernel = model.packed.weight.data.t()  # what a packed layer may keep in a closure
    for parameter in (model.packed, model.plain):
        parameter.weight = torch.nn.Parameter(torch.empty(0))
    model.packed.bias = torch.nn.Parameter(torch.empty(0))
    model.small = torch.nn.Parameter(torch.empty(0))
    assert not room.is_free
    del kernel
    assert room.is_free
