"""Limits within which a hostile input must be refused."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def limit_memory(extra_bytes: int) -> Iterator[None]:
    """Allow this process so much more memory than it has; beyond it is a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra_bytes, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
