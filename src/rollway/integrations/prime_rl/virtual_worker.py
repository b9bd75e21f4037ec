"""The fleet as one worker of Dynamo, for prime-rl's `client.dynamo`, which discovers workers.

    GET /v1/rl/workers        one entry: this server, world size 1, at the address it was asked at
    POST /collective_rpc      the reply is exactly one null

They end in the same pause, update and resume as the plain calls. What a caller may run in the
engines is a list: other method names are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollway.errors import UsageError
from rollway.gateway.replies import Refused
from rollway.integrations.prime_rl.groups import read_arguments
from rollway.integrations.prime_rl.updates import WeightUpdates

Body = Mapping[str, Any]
Answer = dict[str, Any]

PROTOCOL = 1
NAMESPACE = "rollway"
_DONE: Answer = {"results": [None]}


@dataclass(slots=True)
class VirtualWorker:
    """Answers the calls that prime-rl sends to one worker."""

    model: str
    updates: WeightUpdates

    def list_workers(self, origin: str, error: str = "") -> Answer:
        """Return the listing. The address is the one that the caller used: what a server listens
        on may be 0.0.0.0."""
        # The same after a restart of this server: prime-rl ends when its worker changes.
        seed = f"{self.updates.memory.record.run}/{self.model}".encode()
        entry: Answer = {
            "namespace": NAMESPACE,
            "component": "fleet",
            "model": self.model,
            "instance_id": int.from_bytes(hashlib.sha256(seed).digest()[:6]),
            "world_size": 1,
            "admin_base_url": origin,
            "system_url": origin,
        }
        if error:
            entry["error"] = error
        return {"protocol_version": PROTOCOL, "namespace": NAMESPACE, "workers": [entry]}

    async def call_method(self, body: Body) -> Answer:
        """Carry out an allowed method as one operation of the fleet."""
        method, args = body.get("method"), body.get("args") or []
        if body.get("kwargs") or not isinstance(args, list):
            raise UsageError("args must be a list, and kwargs empty.")
        if method == "init_broadcaster":
            await self.updates.init_broadcaster(lambda: read_arguments(args))
            return _DONE
        if method == "update_weights_from_path":
            if len(args) != 1 or not isinstance(args[0], str):
                raise UsageError("args must be one path.")
            await self.updates.update(args[0])
            return _DONE
        if method == "liveness_probe":
            return _DONE
        raise Refused(403, f"The engine method {method!a} may not be called.")
