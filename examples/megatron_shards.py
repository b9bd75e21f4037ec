"""Publish from every rank of a Megatron-Core trainer. Nothing is gathered: each rank publishes what
it holds, and the workers put the shards together. On every rank, under torchrun:

    names = NameMap.from_hf_config(config)
    with rollway.attach("my-stack", watch=False) as stack, stack.publisher("shm") as weights:
        for step in range(1, steps):
            train()
            refit(stack, weights, step, rollway.from_megatron(model, names), store, rank, world)
"""

from collections.abc import Sequence

import msgspec
from torch.distributed import Store

import rollway
from rollway.weights.sources import HeldTensor


def refit(
    stack: rollway.Stack,
    weights: rollway.Publisher,
    version: int,
    held: Sequence[HeldTensor],
    store: Store,
    rank: int,
    world: int,
) -> None:
    """Publish this rank's shards; return when the workers serve the version."""
    offer = weights.publish(version, held)
    store.set(f"offer/{version}/{rank}", msgspec.json.encode(offer).decode())
    if rank == 0:
        texts = [store.get(f"offer/{version}/{other}") for other in range(world)]
        offers = [msgspec.json.decode(text, type=rollway.Offer) for text in texts]
        stack.refit(version, rollway.join_offers(offers))
        store.set(f"served/{version}", "")
    # The workers read the ranks' memory until then: it must not change.
    store.wait([f"served/{version}"])
