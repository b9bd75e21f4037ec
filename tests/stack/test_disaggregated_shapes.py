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


def test_two_prefill_and_two_decode_workers_answer(base_model: Path, footprint: Footprint) -> None:
    model = {"path": str(base_model), "name": "tiny", "engine": "mocker", "args": {}}
    model |= {
        "serving": "disaggregated",
        "prefill": {"replicas": 2, "tensor_parallel": 2},
        "decode": {"replicas": 2},
    }
    used: dict[str, set[int]] = {"prefill_worker_id": set(), "decode_worker_id": set()}
    with rollway.up({"name": "t", "models": [model], "router": {"mode": "round-robin"}}) as stack:
        state = StackDir("t").read()
        assert state is not None
        roles = [process.worker_role for process in state.processes if process.role == "worker"]
        assert roles == ["prefill", "prefill", "decode", "decode"]
        for number in range(12):
            for name, worker in _ask(stack.frontend_url, number).items():
                if name in used:
                    used[name].add(worker)
    assert {name: len(ids) for name, ids in used.items()} == dict.fromkeys(used, 2)
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
