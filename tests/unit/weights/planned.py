"""Run a plan on small arrays, by the methods it chose, and count the bytes that move."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollway.weights.checkpoint import TensorHeader
from rollway.weights.layout import Box
from rollway.weights.planning.plan import Costs, Method, Source, Total, Transfer, plan
from rollway.weights.planning.targets import Targets

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


def headers(model: Model) -> dict[str, TensorHeader]:
    return {name: TensorHeader(DTYPE, array.shape) for name, array in model.items()}


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def held_by(source: Source, model: Model) -> Model:
    """Return the source's own tensors, filled as its boxes say; padding is -1."""
    arrays = {}
    for tensor, resident in source.tensors.items():
        arrays[tensor] = np.full(resident.shape, -1, np.int32)
        for held in resident.held:
            values = model[resident.names[held.tensor]][slices(held.box)]
            values = values.swapaxes(-1, -2) if held.transposed else values
            extent = (1,) * (len(held.at) - values.ndim) + values.shape
            place = tuple(slice(a, a + n) for a, n in zip(held.at, extent, strict=True))
            arrays[tensor][place] = values
    return arrays


def carried_out(
    sources: list[Source], model: Model, wants: list[Targets], costs: Costs
) -> tuple[list[Model], Total]:
    """Return what every receiver has afterwards; fail if an element is written twice."""
    held = {source.name: held_by(source, model) for source in sources}
    receivers = {f"r{number}": targets for number, targets in enumerate(wants)}
    received = {
        name: {want.parameter: np.zeros(want.part.shape, np.int32) for want in targets.values()}
        for name, targets in receivers.items()
    }
    total = Total()
    for transfer in plan(sources, receivers.items(), costs):
        array = held[transfer.source][transfer.tensor]
        _carry(transfer, array, received[transfer.receiver])
        total.add(transfer)
    return list(received.values()), total


def _carry(transfer: Transfer, array: Array, mine: Model) -> None:
    """Run one transfer; check the bytes that it counts."""
    read = 0
    for target, cut in transfer.copies:
        values = array[cut.box.slices]
        read += values.nbytes
        values = values.swapaxes(-1, -2) if cut.transposed else values
        place = tuple(slice(a, a + n) for a, n in zip(cut.at, cut.extent, strict=True))
        assert not mine[target][place].any()
        mine[target][place] = values.reshape(cut.extent)
        if transfer.method is Method.DIRECT and transfer.reads == len(transfer.copies):
            assert values.flags["C_CONTIGUOUS"]
            assert mine[target][place].flags["C_CONTIGUOUS"]
    assert transfer.needed == read
    assert transfer.moved == (array.nbytes if transfer.method is Method.WHOLE else read)


def expected(model: Model, wants: Targets) -> Model:
    """Return what a receiver should have, straight from the whole tensors."""
    mine: Model = {}
    for name, want in wants.items():
        part = want.part
        target = mine.setdefault(want.parameter, np.zeros(part.shape, np.int32))
        values = model[name][slices(part.box)]
        extent = (1,) * (len(part.at) - values.ndim) + values.shape
        place = tuple(slice(a, a + n) for a, n in zip(part.at, extent, strict=True))
        target[place] = values
    return mine
