"""Run a plan on small arrays, by the methods it chose, and count the bytes that move."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollway.weights.layout import Box
from rollway.weights.planning.recipe import Method
from rollway.weights.planning.sources import Source
from rollway.weights.planning.targets import LocalTensor, Targets
from rollway.weights.planning.transfers import Plan, Transfer

Array = NDArray[np.int32]
Model = dict[str, Array]
DTYPE = "I32"


def some_model(shapes: dict[str, tuple[int, ...]]) -> Model:
    """Return arrays in which every element is different, and none is 0."""
    model, first = {}, 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        model[name] = np.arange(first, first + size, dtype=np.int32).reshape(shape)
        first += size
    return model


def headers(model: Model) -> dict[str, LocalTensor]:
    return {name: LocalTensor(DTYPE, array.shape) for name, array in model.items()}


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def held_by(source: Source, model: Model) -> Model:
    """Return the source's own tensors, filled as its boxes say; padding is -1."""
    arrays = {}
    for tensor, offer in source.offers.items():
        arrays[tensor] = np.full(offer.holding.shape, -1, np.int32)
        for held in offer.holding.held:
            values = model[offer.names[held.tensor]][slices(held.box)]
            values = values.swapaxes(-1, -2) if held.transposed else values
            extent = (1,) * (len(held.at) - values.ndim) + values.shape
            place = tuple(slice(a, a + n) for a, n in zip(held.at, extent, strict=True))
            arrays[tensor][place] = values
    return arrays


def carried_out(plan: Plan, sources: list[Source], model: Model, wants: Targets) -> list[Model]:
    """Return what every receiver has afterwards; fail if an element is written twice."""
    held = {source.name: held_by(source, model) for source in sources}
    received = []
    for number, receiver in enumerate(plan.receivers):
        mine: Model = {}
        for several in wants.values():
            for want in several:
                if (part := want.parts[number]) is not None:
                    mine.setdefault(want.target, np.zeros(part.shape, np.int32))
        moved = needed = 0
        for transfer in plan.transfers(receiver):
            array = held[transfer.source][transfer.tensor]
            moved += _carry(transfer, array, mine)
            needed += transfer.step.needed
        assert moved == plan.totals[receiver].moved
        assert needed == plan.totals[receiver].needed
        received.append(mine)
    return received


def _carry(transfer: Transfer, array: Array, mine: Model) -> int:
    """Run one transfer; return the bytes that were on the wire."""
    moved = 0
    for target, cut in transfer.copies():
        values = array[cut.box.slices]
        moved += values.nbytes
        values = values.swapaxes(-1, -2) if cut.transposed else values
        place = tuple(slice(a, a + n) for a, n in zip(cut.at, cut.extent, strict=True))
        assert not mine[target][place].any()
        mine[target][place] = values.reshape(cut.extent)
        if transfer.step.choice.method is Method.RANGE:
            assert values.flags["C_CONTIGUOUS"]
            assert mine[target][place].flags["C_CONTIGUOUS"]
    assert transfer.step.needed == moved
    if transfer.step.choice.method is Method.WHOLE:
        moved = array.nbytes
    assert transfer.step.choice.moved == moved
    return moved


def expected(model: Model, wants: Targets, number: int) -> Model:
    """Return what a receiver should have, straight from the whole tensors."""
    mine: Model = {}
    for name, several in wants.items():
        for want in several:
            part = want.parts[number]
            if part is None:
                continue
            target = mine.setdefault(want.target, np.zeros(part.shape, np.int32))
            values = model[name][slices(part.box)]
            extent = (1,) * (len(part.at) - values.ndim) + values.shape
            place = tuple(slice(a, a + n) for a, n in zip(part.at, extent, strict=True))
            target[place] = values
    return mine
