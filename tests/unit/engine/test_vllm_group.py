"""vLLM's own weight transfer: what Rollway sends is what vLLM's receiver reads.

The receiver is vLLM's `NCCLWeightTransferEngine` with a real model; the group is gloo's (see
`tests/stack/gloo_transfer.py`), because NCCL needs a GPU for each rank.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import UsageError
from rollway.weights.transports import group
from rollway.weights.transports.entries import join_chunks
from rollway.weights.transports.vllm_group import (
    TensorInfo,
    VllmGroupSender,
    check_promise,
)
from tests.stack.gloo_transfer import Gloo, replaced
from tests.unit.engine.staging import parameters_of
from tests.unit.engine.vllm_models import Tensors, create_model, use_ranks, write_model

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


def describe(tensors: Tensors) -> list[TensorInfo]:
    return [TensorInfo.of(name, tensor) for name, tensor in tensors.items()]


def make_engine(directory: Path) -> Any:
    """Return vLLM's receiver, and its model."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    model, config = create_model(directory)
    transfer = WeightTransferConfig(backend="nccl")
    return NCCLWeightTransferEngine(transfer, config, torch.device("cpu"), model), model


@pytest.mark.filterwarnings("ignore:Tensor .* has size")
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=30),
    st.integers(1, 200),
)
def test_chunks_are_cut_where_vllm_cuts_them(sizes: list[Any], limit: int) -> None:
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    tensors = [(torch.arange(size) % 7).to(dtype) for size, dtype in sizes]
    named = iter([(str(number), tensor) for number, tensor in enumerate(tensors)])
    theirs = []
    while (chunk := pack_tensors(named, lambda item: item[1], limit)) is not None:
        theirs.append(chunk.packed_tensor)
    ours = list(join_chunks(tensors, limit))
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("chunk_bytes", [1, 3000, 1 << 30])
def test_vllms_receivers_load_what_is_sent(
    tmp_path: Path, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "Nccl", Gloo)
    tensors = write_model("qwen3", tmp_path)
    sender = VllmGroupSender(chunk_bytes)
    with use_ranks(), replaced(), ThreadPoolExecutor(3) as threads:
        receivers = [make_engine(tmp_path) for _ in range(2)]
        told = sender.make_id()
        joins = [
            threads.submit(
                engine.init_transfer_engine,
                engine.parse_init_info({**told, "rank_offset": rank, "world_size": 3}),
            )
            for rank, (engine, _) in enumerate(receivers, 1)
        ]
        sender.join(told["nccl_unique_id_b64"], 3)
        for join in joins:
            join.result(60)
        for version in (1, 2):
            published = {name: tensor + version for name, tensor in tensors.items()}
            promised = describe(published)
            names, dtypes, shapes, _ = (list(column) for column in zip(*promised, strict=True))
            info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
            updates = [threads.submit(receive, engine, info) for engine, _ in receivers]
            sent = sender.send(published.items(), promised)
            for update in updates:
                update.result(60)
            assert sent == sum(tensor.nbytes for tensor in tensors.values())
            expected = load_by_vllm(tmp_path, published)
            for _, model in receivers:
                held = parameters_of(model)
                assert all(torch.equal(held[name], expected[name]) for name in expected)


def receive(engine: Any, info: dict[str, Any]) -> None:
    """Receive as vLLM's worker does, without its layer-by-layer reload: nothing is packed here."""
    engine.update_weights(info)


def load_by_vllm(directory: Path, tensors: Tensors) -> Tensors:
    model, _ = create_model(directory)
    model.load_weights(iter(tensors.items()))
    return parameters_of(model)


def test_tensors_that_were_not_promised_are_not_sent() -> None:
    first, second = torch.zeros(2), torch.zeros(3)
    promised = describe({"a": first, "b": second})
    assert len(list(check_promise([("a", first), ("b", second)], promised))) == 2
    for wrong in ([("b", second)], [("a", second)], [("a", first.double())]):
        with pytest.raises(UsageError, match="the engines expect"):
            list(check_promise(wrong, promised))
    with pytest.raises(UsageError, match="expect nothing"):
        list(check_promise([("a", first), ("b", second), ("c", first)], promised))
    with pytest.raises(UsageError, match="does not send b"):
        list(check_promise([("a", first)], promised))
    with pytest.raises(UsageError, match="No group has formed"):
        VllmGroupSender(1).send([("a", first)], promised[:1])


def test_a_message_has_every_byte_once() -> None:
    tensors = [torch.randn(3, 5), torch.randn(7).to(torch.bfloat16), torch.zeros(0)]
    joined = torch.cat(list(join_chunks(tensors, 10)))
    assert joined.numel() == sum(math.prod(t.shape) * t.element_size() for t in tensors)
