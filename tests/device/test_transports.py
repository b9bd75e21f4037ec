"""Every transport on the device that vLLM has here, with CUDA graphs: after sleep and wake, with
memory that is nearly full, and after a refit that was refused half way. `test_models.py` says how
to run it on a GPU machine.

Each version is compared with what was published by the sums of all parameters in the engine
(proof `parameters`), and its samples with transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import rollway
from rollway.errors import RollwayError
from rollway.weights.offer import Offer
from tests.device.stacks import (
    DEVICE,
    DEVICES,
    assert_of,
    base,
    describe,
    home,
    read_tensors,
    sample,
)
from tests.stack.policies import Policy, perturbed

__all__ = ["base", "home"]  # fixtures
pytestmark = [pytest.mark.stack]
MIB = 1 << 20
LEFT = 700 * MIB
"""What is free while memory is nearly full: less than the reserve that staging leaves."""
TRANSPORTS: list[tuple[Any, dict[str, Any]]] = [
    ("cuda_ipc", {}),
    ("cuda_ipc", {"in_place": True}),
    ("shm", {}),
    ("files", {}),
    ("delta", {}),
    ("delta", {"compression": "zstd"}),
]


class Run:
    """One stack, and versions that alternate between two policies."""

    def __init__(self, stack: rollway.Stack, policies: list[Policy]) -> None:
        self.stack, self.policies = stack, policies
        self.tensors = [read_tensors(policy.path) for policy in policies]
        self.version = self.served = 0

    def refit(self, publisher: Any, spoil: Callable[[Offer], None] | None = None) -> Any:
        self.version += 1
        offer = publisher.publish(self.version, list(self.tensors[self.version % 2].items()))
        if spoil is not None:
            spoil(offer)
        report = self.stack.refit(self.version, offer)
        (worker,) = report.workers
        print(f"{self.version}: {offer.transport}: {worker.strategy}")
        assert worker.proof == "parameters"
        self.served = self.version
        return worker

    def check(self) -> None:
        right, wrong = self.policies[self.served % 2], self.policies[1 - self.served % 2]
        assert_of(right, wrong, sample(self.stack, self.served))

    def refit_by_each(self) -> set[str]:
        """Refit twice by every transport, the second time from a version that it brought."""
        strategies = set()
        for transport, options in TRANSPORTS:
            if transport == "cuda_ipc" and DEVICE == "cpu":
                continue
            with self.stack.publisher(transport, **options) as publisher:
                for _ in range(2):
                    strategies.add(self.refit(publisher).strategy)
                    self.check()
        return strategies


@contextmanager
def fill_memory() -> Iterator[None]:
    """Leave little of the device's memory free."""
    if DEVICE == "cpu":
        yield
        return
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(max(0, free - LEFT), dtype=torch.uint8, device="cuda")
    print(
        f"filled {filler.nbytes / MIB:.0f} MiB, free {torch.cuda.mem_get_info()[0] / MIB:.0f} MiB"
    )
    yield
    del filler
    torch.cuda.empty_cache()


def read_used() -> int:
    if DEVICE == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def spoil_file(offer: Offer) -> None:
    """Change one byte in the middle of the largest file of a version."""
    root = Path(str(offer.where.get("path") or offer.where["root"]))
    largest = max((path for path in root.rglob("*") if path.is_file()), key=_size)
    with largest.open("r+b") as file:
        file.seek(_size(largest) // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def _size(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.parametrize("device", DEVICES)
def test_every_transport(device: str, base: Path, tmp_path: Path) -> None:
    policies = [Policy(path, device) for path in (base, perturbed(base, tmp_path / "p1", 1))]
    spec = describe(base, "transports", args={"enable-sleep-mode": True})
    if device == "cuda":
        spec["models"][0]["args"]["enforce-eager"] = False
    with rollway.up(spec) as stack:
        run = Run(stack, policies)
        print("with free memory:", run.refit_by_each())
        with fill_memory():
            print("nearly full:", run.refit_by_each())
        used = read_used()
        for transport in ("files", "delta"):
            with stack.publisher(transport, directory=tmp_path / transport) as publisher:
                with pytest.raises(RollwayError) as refused:
                    run.refit(publisher, spoil_file)
                print(f"{transport}, refused: {refused.value}")
                run.check()  # the version before still serves
        print(f"used before the refused refits {used / MIB:.0f} MiB, after {read_used() / MIB:.0f}")
        assert read_used() - used < 64 * MIB
        for level in (1, 2):
            stack.sleep(level=level)
            if level == 1:
                stack.wake()
                run.check()
            print(f"after sleep {level}:", run.refit_by_each())
