"""Addresses of workers become names of pods."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollway.kubernetes import address
from rollway.kubernetes.address import Forwarder


def test_a_new_worker_is_found_at_once_and_a_stranger_is_not_looked_for_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pods = {"10.0.0.1": "policy-worker-0"}
    listings: list[int] = []

    def list_pods(*_: Any) -> list[Any]:
        listings.append(len(pods))
        return [{"status": {"podIP": ip}, "metadata": {"name": n}} for ip, n in pods.items()]

    monkeypatch.setattr(address, "_list_pods", list_pods)
    forwarder = Forwarder(None, "policy-frontend", "policy")  # type: ignore[arg-type]

    async def find(*addresses: str) -> list[str | None]:
        return [await forwarder._find_pod(each) for each in addresses]

    assert asyncio.run(find("10.0.0.1", "10.0.0.1")) == ["policy-worker-0"] * 2
    pods["10.0.0.2"] = "policy-worker-1"  # joins within the same second
    assert asyncio.run(find("10.0.0.2")) == ["policy-worker-1"]
    assert len(listings) == 2
    assert asyncio.run(find("10.9.9.9", "10.9.9.9", "10.9.9.9")) == [None] * 3
    assert len(listings) == 3
    pods["10.9.9.9"] = "policy-worker-2"  # its address was known before its pod
    forwarder._read = 0.0
    assert asyncio.run(find("10.9.9.9")) == ["policy-worker-2"]
