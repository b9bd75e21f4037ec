"""Weights by broadcast: from a trainer's process into running engines, over gloo or NCCL.

    publisher                       its store                      receivers (one per rank)
    publish: digests, list ───────► manifest ────────────────────► read, compared with the offer
    wait for N of them ◄─────────── joined ◄────────────────────── get a rank
    go ───────────────────────────► go ──────────────────────────► wait
    ══════ a separate process group: each message is sent while the last one is used ══════
    wait for all ◄───────────────── ended ◄─────────────────────── digests compared, or the error
    done ─────────────────────────► done ────────────────────────► leave the group
    after any error: stop ────────► stop ────────────────────────► end, within a moment

Store and group exist only while one version is sent. A stranger who reaches the store can make a
transfer fail, with an error on both sides. Digests detect accidents; they do not stop an attacker
who joins and forges bytes with the same digest, so the network must keep strangers out.
"""

from rollway.weights.transports.collective.publisher import CollectivePublisher
from rollway.weights.transports.collective.reader import CollectiveReader

__all__ = ["CollectivePublisher", "CollectiveReader"]
