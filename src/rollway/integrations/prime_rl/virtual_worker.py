"""The fleet as one worker of Dynamo, for the generations of prime-rl that discover workers.

    GET /v1/rl/workers        one entry: this server, world size 1, at the address it was asked at
    POST /collective_rpc      `client.dynamo` (September 2026): the reply is exactly one null
    POST /engine/<route>      `client.backend = "dynamo"` (June 2026): Dynamo's own routes

All of them end in the same pause, update and resume as the plain calls. What a caller may run in
the engines is a list: other method names are refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from rollway.errors import UsageError
from rollway.gateway.replies import Refused
from rollway.integrations.prime_rl.groups import read_arguments, read_request
from rollway.integrations.prime_rl.lora import AdapterAliases
from rollway.integrations.prime_rl.updates import WeightUpdates

Body = Mapping[str, Any]
Answer = dict[str, Any]

PROTOCOL = 1
NAMESPACE = "rollway"
_VERSION = re.compile(r"(?:step_)?(\d{1,15})")
_DONE: Answer = {"results": [None]}


@dataclass(slots=True)
class VirtualWorker:
    """Answers the calls that prime-rl sends to one worker."""

    model: str
    updates: WeightUpdates
    adapters: AdapterAliases

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
            "routes": sorted(self.routes),
        }
        if error:
            entry["error"] = error
        return {"protocol_version": PROTOCOL, "namespace": NAMESPACE, "workers": [entry]}

    async def call_method(self, body: Body) -> Answer:
        """Carry out an allowed method as one operation of the fleet."""
        method, args = body.get("method"), body.get("args") or []
        if method == "reload_weights" and not args and isinstance(body.get("kwargs"), dict):
            await self.updates.update(_read_text(body["kwargs"], "weights_path"))  # as in #3296
            return _DONE
        if body.get("kwargs") or not isinstance(args, list):
            raise UsageError("args must be a list, and kwargs empty.")
        if method == "init_broadcaster":
            await self.updates.init_broadcaster(lambda: read_arguments(args))
            return _DONE
        if method == "update_weights_from_path":
            await self.updates.update(_read_text({"args": args[0] if args else None}, "args"))
            return _DONE
        if method == "liveness_probe":
            return _DONE
        raise Refused(403, f"The engine method {method!a} may not be called.")

    async def call_route(self, name: str, body: Body) -> Answer:
        """Answer one of Dynamo's engine routes."""
        if name not in self.routes:
            raise Refused(404, f"There is no route /engine/{name[:60]!a}.", kind="not_found")
        return await self.routes[name](body)

    @property
    def routes(self) -> dict[str, Callable[[Body], Awaitable[Answer]]]:
        return {
            "pause_generation": self._pause,
            "resume_generation": self._resume,
            "update_weights_from_disk": self._update,
            "update_weights_from_distributed": self._receive,
            "init_weights_update_group": self._init_group,
            "get_weight_version": self._get_version,
            "load_lora": self._load_adapter,
            "unload_lora": self._unload_adapter,
            # The names of Dynamo's unified backend, which #3296 looks for.
            "control/pause_generation": self._pause,
            "control/resume_generation": self._resume,
            "control/is_paused": self._is_paused,
            "control/get_weight_version": self._get_version,
            "update/update_weight_version": self._confirm_version,
        }

    async def _pause(self, body: Body) -> Answer:
        self.updates.pause()
        return {"status": "ok", "message": "Engine paused"}

    async def _resume(self, body: Body) -> Answer:
        await self.updates.resume()
        return {"status": "ok", "message": "Engine resumed"}

    async def _update(self, body: Body) -> Answer:
        if body.get("engine_rpc", "reload_weights") != "reload_weights":
            raise Refused(403, f"engine_rpc {body['engine_rpc']!a} may not be called.")
        step = _read_version(body.get("weight_version"))
        await self.updates.update(_read_text(body, "model_path"), step)
        return {"status": "ok", "version": body.get("weight_version"), "version_declared": True}

    async def _receive(self, body: Body) -> Answer:
        """Update from a broadcast over the group; the directory has only markers."""
        if body.get("engine_rpc") != "update_weights_from_path":
            raise Refused(403, f"engine_rpc {body.get('engine_rpc')!a} may not be called.")
        step = _read_version(body.get("weight_version"))
        await self.updates.update(_read_text(body, "weight_dir"), step)
        return {"status": "ok", "version": body.get("weight_version"), "version_declared": True}

    async def _init_group(self, body: Body) -> Answer:
        if body.get("engine_rpc", "init_broadcaster") != "init_broadcaster":
            raise Refused(403, f"engine_rpc {body['engine_rpc']!a} may not be called.")
        await self.updates.init_broadcaster(lambda: read_request(body))
        return {"status": "ok", "message": "The group has formed"}

    async def _get_version(self, body: Body) -> Answer:
        step = self.updates.memory.record.step
        version = None if step is None else str(step)
        declared = {"version": version, "weight_version": version}
        return {"status": "ok", **declared, "version_declared": step is not None}

    async def _is_paused(self, body: Body) -> Answer:
        return {"status": "ok", "is_paused": not self.updates.is_open}

    async def _confirm_version(self, body: Body) -> Answer:
        """Accept the name of what is served: a label changes no weights."""
        step, served = _read_version(body.get("new_version")), self.updates.memory.record.step
        if step is None or step != served:
            raise UsageError(f"new_version is {step}, and step {served} is served.")
        return {"status": "ok", "message": "Weight version updated"}

    async def _load_adapter(self, body: Body) -> Answer:
        name, source = _read_text(body, "lora_name"), body.get("source")
        uri = _read_text(source if isinstance(source, dict) else {}, "uri")
        parts = urlsplit(uri)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            raise UsageError(f"source.uri is {uri!a}.", "Use file:///directory.")
        await self.adapters.load(name, unquote(parts.path))
        return {"status": "success", "lora_name": name, "lora_id": 1}

    async def _unload_adapter(self, body: Body) -> Answer:
        name = _read_text(body, "lora_name")
        await self.adapters.unload(name)
        return {"status": "success", "lora_name": name}


def _read_text(body: Body, name: str) -> str:
    text = body.get(name)
    if not isinstance(text, str) or not text:
        raise UsageError(f"{name} must be a text.")
    return text


def _read_version(raw: Any) -> int | None:
    """Return the step of a weight version, which some send as `7` and some as `step_7`."""
    if raw is None:
        return None
    match = _VERSION.fullmatch(str(raw))
    if match is None:
        raise UsageError(f"weight_version is {raw!a}.", "Use a step: `7` or `step_7`.")
    return int(match[1])
