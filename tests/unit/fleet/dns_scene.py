"""A program that lists the pods of a headless Service by a real name server, and prints them.

It serves port 53 of loopback, so it needs a network and a `/etc/resolv.conf` of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from rollway.errors import Unreachable
from rollway.fleet.workers import (
    NEEDED_ROUTES,
    DnsListing,
    RlListing,
    discover,
    resolve_addresses,
)
from rollway.http import Http
from tests.unit.fleet.fake_fleet import serving

NAMES = {
    "pods.rl.": ["127.0.0.2", "127.0.0.3", "127.0.0.4"],
    "worker-b.rl.": ["127.0.0.3"],
    "empty.rl.": [],
}
BROKEN = "broken.rl."


def answer(raw: bytes) -> bytes:
    """Return the reply of a name server that knows `NAMES`."""
    query = dns.message.from_wire(raw)
    question, reply = query.question[0], dns.message.make_response(query)
    name = question.name.to_text()
    if name == BROKEN:
        reply.set_rcode(dns.rcode.SERVFAIL)
    elif name not in NAMES:
        reply.set_rcode(dns.rcode.NXDOMAIN)
    elif NAMES[name] and question.rdtype == dns.rdatatype.A:
        reply.answer.append(dns.rrset.from_text(name, 0, "IN", "A", *NAMES[name]))
    reply.flags |= dns.flags.RA
    return reply.to_wire()


def serve_names() -> None:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))

    def run() -> None:
        while True:
            raw, peer = server.recvfrom(4096)
            server.sendto(answer(raw), peer)

    threading.Thread(target=run, daemon=True).start()


async def resolve(name: str) -> list[str] | str:
    try:
        return await resolve_addresses(name)
    except Unreachable as error:
        return error.message


async def main() -> dict[str, Any]:
    serve_names()
    urls = ["http://127.0.0.2:9090", "http://worker-b.rl:9091"]
    entries = [
        {"instance_id": n, "model": "m", "system_url": url, "routes": [*NEEDED_ROUTES]}
        for n, url in enumerate(urls, 1)
    ]
    async with Http() as http, serving("/v1/rl/workers", {"workers": entries}) as listing:
        source = DnsListing("pods.rl", (RlListing(listing),))
        workers = await discover(http, source)
        entries.append({"instance_id": 3, "system_url": "http://broken.rl:9092"})
        try:
            failure = f"listed {await discover(http, source)}"
        except Unreachable as error:
            failure = error.message
    return {
        "failure": failure,
        "workers": [[each.admin_url, each.error] for each in workers],
        "names": {name: await resolve(f"{name}.rl") for name in ("empty", "unknown", "broken")},
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
