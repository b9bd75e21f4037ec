"""One start of a server: the stack behind it, its health, its manifest.

It has the two methods of Curator's `InferenceBackend`, and sets the server's host and port as
Curator's own backends do. The server's class creates a new one for every start.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import secrets
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollway import api, private_files
from rollway.errors import PortInUse, RollwayError, StartError, UsageError
from rollway.integrations.curator import translate
from rollway.integrations.curator.owner import OwnedStack, start_stack
from rollway.integrations.curator.translate import ConfigError
from rollway.spec import StackSpec, parse_spec

log = logging.getLogger(__name__)

ENGINE_PYTHON = "ROLLWAY_ENGINE_PYTHON"
"""Names the interpreter whose environment has Dynamo and the engine, if it is not the driver's."""
DEFAULT_HOST = "localhost"
DEFAULT_PORT = 8000
_TRUE = ("1", "true", "yes")
_POLL_SECONDS = 0.2
_REQUEST_SECONDS = 5.0


class ServerError(StartError, RuntimeError):
    """The server did not start. As with Curator's own error, `debug_context` has the details."""

    def __init__(self, error: RollwayError, models: list[str]) -> None:
        log_tail = getattr(error, "log_tail", "")
        super().__init__(error.message, error.hint, log_tail=log_tail)
        self.debug_context = {
            "backend": "rollway",
            "reason": error.message,
            "models_expected": models,
            "log_tail": log_tail,
        }

    def __str__(self) -> str:
        tail = f"\n\n--- log ---\n{self.log_tail}" if self.log_tail else ""
        return f"{self.message} {self.hint}{tail}"


class RollwayBackend:
    """Runs the models of a server as a stack; with an address, uses one that runs already."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._stack: OwnedStack | None = None
        self._is_port_written = False

    def start(self) -> None:
        """Start the stack and return when every replica of every model is ready."""
        server = self._server
        deadline = time.monotonic() + server.health_check_timeout_s
        port = server.port
        source = getattr(server.backend, "stack", None)
        try:
            if isinstance(source, str) and "://" in source:
                self._set_address(source)
                self._wait_for_models(sorted(_list_expected_models(server)), deadline)
                return
            spec = self._make_spec(source)
            self._stack = self._start_stack(spec)
            _warn_without_cpus(self._stack)
            self._set_address(self._stack.frontend)
            self._wait_for_models([model.name for model in spec.models], deadline)
            self._write_manifest(spec)
        except BaseException:
            self.stop()
            server.port = port
            raise

    def stop(self) -> None:
        """Stop the stack; one that was given by its address stays."""
        stack, self._stack = self._stack, None
        self._server._host = DEFAULT_HOST
        if stack is not None:
            stack.stop()

    def _make_spec(self, source: Any) -> StackSpec:
        try:
            return self._translate() if source is None else self._make_given_spec(source)
        except ConfigError:
            raise
        except UsageError as error:  # the spec's own errors are no ValueError, as Curator's are
            raise ConfigError(error.message, error.hint) from error

    def _translate(self) -> StackSpec:
        server = self._server
        run = secrets.token_hex(4)
        fields = translate.make_fields(
            server.models,
            server.backend,
            name=translate.make_stack_name(server.backend.namespace, server.name, run),
            port=server.port,
            start_seconds=server.health_check_timeout_s,
            python=find_engine_python(server.models),
        )
        return parse_spec({**fields, **make_launcher_fields()})

    def _make_given_spec(self, source: Any) -> StackSpec:
        """Return the spec of a `RollwayServerConfig`; the server's own port must agree with it."""
        spec = api.make_spec(source)
        asked, written = self._server.port, spec.frontend.port
        if written and asked not in (DEFAULT_PORT, written):
            raise ConfigError(
                f"The stack has frontend.port {written}, and the server port {asked}.",
                "Give the port in one of the two places.",
            )
        self._is_port_written = bool(written)
        if not written:
            frontend = spec.frontend.model_copy(update={"port": asked})
            spec = spec.model_copy(update={"frontend": frontend})
        return spec

    def _start_stack(self, spec: StackSpec) -> OwnedStack:
        models = [model.name for model in spec.models]
        try:
            try:
                return start_stack(spec)
            except PortInUse:
                if self._is_port_written:
                    raise
                # Curator's port is a preference: any free one is as good.
                frontend = spec.frontend.model_copy(update={"port": 0})
                return start_stack(spec.model_copy(update={"frontend": frontend}))
        except UsageError as error:
            raise ConfigError(error.message, error.hint) from error
        except RollwayError as error:
            raise ServerError(error, models) from error

    def _set_address(self, url: str) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port or 80
        except ValueError:  # out of range, or no number
            port = 0
        if parts.scheme != "http" or parts.hostname is None or not port:
            raise ConfigError(
                f"`{url}` is not an address that Curator's server can name.",
                "Give the frontend's as http://host:port.",
            )
        host = parts.hostname
        self._server._host = f"[{host}]" if ":" in host else host
        self._server.port = port

    def _wait_for_models(self, expected: list[str], deadline: float) -> None:
        """Wait until the models route lists all these models; without any, until it answers."""
        url = f"{self._server.endpoint}/models"
        listed: list[str] = []
        last_error = ""
        while True:
            try:
                with urllib.request.urlopen(url, timeout=_REQUEST_SECONDS) as answer:
                    listed = [str(entry["id"]) for entry in json.load(answer)["data"]]
                if set(expected) <= set(listed) and listed:
                    return
            except (OSError, ValueError, KeyError, TypeError, urllib.error.URLError) as error:
                last_error = str(error)
            if time.monotonic() > deadline:
                seconds = self._server.health_check_timeout_s
                timeout = StartError(
                    f"{f'Not all of the models {expected}' if expected else 'No model'} appeared "
                    f"at {url} within {seconds}s (listed: "
                    f"{listed or 'none'}{'; ' if last_error else ''}{last_error}).",
                    "Check that the address is a Dynamo frontend's, and that its workers run.",
                )
                raise ServerError(timeout, expected)
            time.sleep(_POLL_SECONDS)

    def _write_manifest(self, spec: StackSpec) -> None:
        """Write what Curator's users look for: the models, the endpoint, the placements."""
        assert self._stack is not None
        if not self._stack.log_dir:
            return
        manifest = {
            "models": sorted(model.name for model in spec.models),
            "endpoint": self._server.endpoint,
            "stack": spec.name,
            "etcd": spec.etcd_endpoints,
            "nats": spec.nats_server,
            "port": self._server.port,
            "placements": self._stack.placements,
            "ready": True,
            "timestamp": time.time(),
        }
        directory = Path(self._stack.log_dir)
        # The server runs without its manifest, too. The logs may be on a node that is not ours.
        with contextlib.suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = json.dumps(manifest, indent=2)
            private_files.replace_file(directory / "manifest.json", text.encode())


def _warn_without_cpus(stack: OwnedStack) -> None:
    """Warn if a pipeline would find no CPU: Curator's executors then wait without a word."""
    if stack.free_cpus is not None and stack.free_cpus < 1:
        log.warning(
            "The server holds all CPUs that this Ray cluster counts, so a pipeline would wait "
            "forever. Start Ray with more, as with RayClient(num_cpus=8): it only counts them."
        )


def make_launcher_fields() -> dict[str, Any]:
    """Return what puts a stack on the cluster where this driver's pipelines run."""
    head = os.environ.get("CURATOR_IGNORE_RAY_HEAD_NODE", "").strip().lower()
    ray = {"address": find_ray_address(), "head": "avoid" if head in _TRUE else "use"}
    return {"launcher": "ray", "ray": ray}


def find_ray_address() -> str | None:
    """Return the address of the cluster that this process is connected to, or would connect to."""
    # A driver that has not imported Ray is not connected.
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    return os.environ.get("RAY_ADDRESS") or None


def _list_expected_models(server: Any) -> set[str]:
    return {str(model.resolved_model_name) for model in server.models}


def find_engine_python(models: list[Any]) -> str | None:
    """Return the engines' interpreter; None if it is this one or a model names it."""
    if any(model.runtime_env.get("py_executable") for model in models):
        return None
    python = os.environ.get(ENGINE_PYTHON)
    if python is None and importlib.util.find_spec("dynamo") is None:
        raise ConfigError(
            "This environment has no Dynamo, and no model names one that has.",
            f"Set {ENGINE_PYTHON} to the Python of an environment with Dynamo and vLLM, or give "
            "the models runtime_env={'py_executable': …}.",
        )
    return python
