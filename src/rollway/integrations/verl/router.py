"""verl's load balancer, which also names the trajectory and the group of each request.

verl gives every turn a new request id, so an engine cannot tell which turns belong to one
trajectory. The load balancer can: with a server, it returns the id of the trajectory and the id
shared by all rollouts that began with the same prompt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cachetools import LRUCache, TTLCache
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from rollway.rollout.client import share_session

CONFIG = Path(__file__).with_name("router.yaml")
"""For `rollout.router_config_path`; replicas set it unless the user has."""
_MAX_REMEMBERED = 100_000
_GROUP_SECONDS = 60.0
"""Within which all rollouts of a prompt begin; in a later epoch, the prompt is another group."""


class SessionRouter(GlobalRequestLoadBalancer):  # type: ignore[misc]
    """Chooses servers as verl does, and returns each as a `Session`."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]) -> None:
        super().__init__(servers)
        self._groups: LRUCache[str, str] = LRUCache(_MAX_REMEMBERED)
        self._rollouts: TTLCache[str, int] = TTLCache(_MAX_REMEMBERED, _GROUP_SECONDS)

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    def acquire_server(
        self, request_id: str, prompt_ids: Sequence[int] = ()
    ) -> tuple[str, Session]:
        server_id, server = super().acquire_server(request_id)
        group = self._groups.get(request_id)
        if group is None:  # the first turn, so this is the prompt that the group shares
            name = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=12).hexdigest()
            index = self._rollouts.get(name, 0)
            self._rollouts[name] = index + 1
            group = self._groups[request_id] = share_session(name, index)
        return server_id, Session(server, request_id, group)


class Session:
    """A server as one trajectory sees it; it adds the ids to `generate.remote`."""

    def __init__(self, server: Any, trajectory: str, group: str) -> None:
        self._server, self._ids = server, {"trajectory_id": trajectory, "group_id": group}

    @property
    def generate(self) -> Session:
        return self

    def remote(self, **arguments: Any) -> Any:
        return self._server.generate.remote(**arguments, **self._ids)
