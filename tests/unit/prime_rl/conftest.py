"""Fixtures of prime-rl's tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from rollway.http import Http
from tests.unit.prime_rl.recording import RecordingServer, serve


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with Http() as client:
        yield client


@pytest.fixture
async def servers() -> AsyncIterator[list[RecordingServer]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serve()) for _ in range(2)]
