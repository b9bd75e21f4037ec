"""Ranks of a trainer without processes: sharding needs nothing sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def use_fake_rank(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a group that sends nothing."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        # torch remembers results by meshes that look alike, and with them the rank before.
        debug._clear_sharding_prop_cache()
        debug._clear_fast_path_sharding_prop_cache()
