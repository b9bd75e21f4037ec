# temporary: tests of other rooms import these names from here
from __future__ import annotations

from typing import Any

from rollway.weights.offer import Offer
from rollway.weights.transports.shm import ShmPublisher
from rollway.weights.transports.shm.shards import ShardReader
from rollway.weights.transports.shm.shards import group_by_tensor as _by_tensor
from rollway.weights.transports.shm.shards import join_offers as joined

__all__ = ["ShardReader", "_by_tensor", "joined", "publish_shards"]


def publish_shards(publisher: ShmPublisher, version: int, held: Any) -> Offer:
    return publisher.publish(version, held)
