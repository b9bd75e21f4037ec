"""verl's own sender of weights, in verl's environment, with our receiver in this one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollway.engine.foreign_senders import VerlBucketsReceiver
from rollway.weights.offer import Offer
from tests.verl.training import environment, verl_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SENDER = """
import asyncio, sys, torch
from safetensors.torch import load_file
from rollway.integrations.verl import verl_buckets
verl_buckets.MESSAGE_SECONDS = float(sys.argv[3])
sender = verl_buckets.BucketSender(sys.argv[1], 0, 1, 1, frozenset({"tied"}))
tensors = {**load_file(sys.argv[2]), "tied": torch.zeros(1)}
asyncio.run(sender.send(iter(tensors.items())))
"""


def start_sender(directory: Path, seconds: float) -> subprocess.Popen[str]:
    model = directory / "model.safetensors"
    command = [str(verl_python()), "-c", SENDER, directory.name, str(model), str(seconds)]
    return subprocess.Popen(
        command, env=environment(directory), stderr=subprocess.PIPE, text=True, cwd=directory
    )


def test_verls_sender_and_our_receiver_agree(tmp_path: Path) -> None:
    # More than one bucket of a megabyte, and dtypes that need alignment.
    sent = {
        f"w{number}": torch.randn(300, 301 + number).to(dtype)
        for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16) * 4)
    }
    save_file(sent, tmp_path / "model.safetensors")
    process = start_sender(tmp_path, 60.0)
    socket = f"/tmp/rl-colocate-zmq-{tmp_path.name}-rollway-rank-0.sock"
    where = {"sockets": [socket], "checkpoint": str(tmp_path), "seconds": 60.0}
    offer = Offer("verl_buckets", 1, "i" * 16, 1, where, repeatable=False)
    received = {n: t.clone() for n, t in VerlBucketsReceiver().tensors(offer)}
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert received.keys() == sent.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in sent.items())
    assert not Path(socket).exists()


def test_a_rank_without_an_engine_fails_within_its_limit(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    process = start_sender(tmp_path, 1.0)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Rank 0's engine did not receive its weights within 1 s" in errors
