"""verl's load balancer, with the names of what belongs together.

verl gives every turn a new request id, so an engine cannot tell which turns are one trajectory. Its
load balancer still knows: it hands out, with a server, the trajectory's id and the one of all
rollouts that began with the same prompt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cachetools import LRUCache, TTLCache
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from rollway.rollout.client import shared_session

CONFIG = Path(__file__).with_name("router.yaml")
"""For `rollout.router_config_path`; replicas set it where the user has not."""
_REMEMBERED = 100_000
_TOGETHER_SECONDS = 60.0
"""In which all rollouts of a prompt begin; the prompt of a later epoch is a group of its own."""


class SessionRouter(GlobalRequestLoadBalancer):  # type: ignore[misc]
    """verl's own choice of a server, as a `Session` with it."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]) -> None:
        super().__init__(servers)
        self._groups: LRUCache[str, str] = LRUCache(_REMEMBERED)
        self._begun: TTLCache[str, int] = TTLCache(_REMEMBERED, _TOGETHER_SECONDS)

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    def acquire_server(
        self, request_id: str, prompt_ids: Sequence[int] = ()
    ) -> tuple[str, Session]:
        server_id, server = super().acquire_server(request_id)
        group = self._groups.get(request_id)
        if group is None:  # the first turn: its prompt is the group's
            name = prompt_name(prompt_ids)
            index = self._begun.get(name, 0)
            self._begun[name] = index + 1
            group = self._groups[request_id] = shared_session(name, index)
        return server_id, Session(server, request_id, group)


def prompt_name(prompt_ids: Sequence[int]) -> str:
    return hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=12).hexdigest()


class Session:
    """A server as one trajectory sees it."""

    def __init__(self, server: Any, trajectory: str, group: str) -> None:
        self._server, self._ids = server, {"trajectory_id": trajectory, "group_id": group}

    @property
    def generate(self) -> Session:
        return self

    def remote(self, **arguments: Any) -> Any:
        return self._server.generate.remote(**arguments, **self._ids)
