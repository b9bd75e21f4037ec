"""Larger shapes of disaggregated serving, with Dynamo's mocker as the engine of both roles."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

import rollway
from rollway.stack.state import StackDir
from tests.conftest import Footprint

pytestmark = pytest.mark.stack


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"replicas": 2, "tensor_parallel": 2}, {"replicas": 2}),
        ({"replicas": 1}, {"replicas": 3, "tensor_parallel": 4}),
    ],
    ids=["2xTP2+2xTP1", "1xTP1+3xTP4"],
)
def test_all_workers_of_a_shape_answer(
    base_model: Path, footprint: Footprint, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    model = {"path": str(base_model), "name": "tiny", "engine": "mocker", "args": {}}
    model |= {"serving": "disaggregated", "prefill": prefill, "decode": decode}
    used: dict[str, set[int]] = {"prefill_worker_id": set(), "decode_worker_id": set()}
    with rollway.up({"name": "t", "models": [model], "router": {"mode": "round-robin"}}) as stack:
        state = StackDir("t").read()
        assert state is not None
        roles = [process.worker_role for process in state.processes if process.role == "worker"]
        assert roles == ["prefill"] * prefill["replicas"] + ["decode"] * decode["replicas"]
        for number in range(12):
            for name, worker in _ask(stack.frontend_url, number).items():
                if name in used:
                    used[name].add(worker)
    assert len(used["prefill_worker_id"]) == prefill["replicas"]
    assert len(used["decode_worker_id"]) == decode["replicas"]
    assert not used["prefill_worker_id"] & used["decode_worker_id"]
    assert footprint.new() == {}


def _ask(frontend_url: str, number: int) -> dict[str, int]:
    """Return which workers answered a prompt that nobody has sent before."""
    prompt = [10 + number, *range(20, 60)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    request = urllib.request.Request(
        f"{frontend_url}/v1/completions",
        json.dumps({**body, "nvext": {"extra_fields": ["worker_id"]}}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        ids: dict[str, int] = json.load(answer)["nvext"]["worker_id"]
        return ids
