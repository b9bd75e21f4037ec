"""Fixtures of several security tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.small_disk import mount_small_disk
from tests.unit.cli.conftest import no_ray_cluster

__all__ = ["no_ray_cluster"]  # a fixture


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mount_small_disk(tmp_path) as disk:
        yield disk
