"""Receivers pull weights over NIXL: RDMA between machines, direct reads on one machine.

    trainer rank ── publish: copy into a registered pool, digest ──► announce ──► catalog
                       ▲                                                            │ look up
    worker ────────────┴── READ of the planned slices into its own pool ◄───────────┘
           ── verify digests, yield the tensor ── … ── acknowledge ──► trainer rank, catalog

The trainer does nothing during a transfer. It has one pool for each version that it keeps, which is
registered once and reused in turn. It withdraws a pool's listing before it overwrites the pool. A
reader that is still reading then finds wrong digests, so it never yields a tensor that differs from
the published one. With `fanout`, a reader keeps the version that it received and serves peers.
"""

from rollway.weights.transports.nixl.publisher import NixlPublisher
from rollway.weights.transports.nixl.reader import NixlReader

__all__ = ["NixlPublisher", "NixlReader"]
