"""Run Curator's `InferenceServer` on Rollway: as a subclass, or put into Curator by `install`."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rollway.errors import UsageError
from rollway.integrations.curator.backend import RollwayBackend
from rollway.spec import StackSpec

try:
    from nemo_curator.core.serve import BaseModelConfig, BaseServerConfig, DynamoServerConfig
    from nemo_curator.core.serve import InferenceServer as CuratorServer
except ModuleNotFoundError as error:
    raise UsageError(
        f"NeMo Curator is not installed here ({error}).",
        "Install it with `pip install 'rollway[curator]'` where your pipelines run; see "
        "docs/curator.md.",
    ) from error


@dataclass
class RollwayServerConfig(BaseServerConfig):  # type: ignore[misc]  # Curator is not typed
    """A server on a stack of your own: a stack file, a mapping, a `StackSpec`; or the address of a
    frontend that runs, which is used and left running.

    Its models are those of the stack, so give `models=[]`.

    Example:
        with InferenceServer(models=[], backend=RollwayServerConfig("stack.yaml")) as server:
            pipeline.run()
    """

    model_configs: ClassVar[tuple[type[BaseModelConfig], ...]] = ()

    stack: str | Path | Mapping[str, Any] | StackSpec = ""

    def __post_init__(self) -> None:
        if not self.stack or not isinstance(self.stack, (str, Path, Mapping, StackSpec)):
            raise UsageError(
                f"RollwayServerConfig names no stack: {self.stack!r}.",
                "Give stack= as a YAML file, a mapping, a StackSpec or an http address.",
            )


@dataclass
class InferenceServer(CuratorServer):  # type: ignore[misc]
    """Curator's server with Rollway in place of Curator's Dynamo backend.

    Fields, methods and errors are Curator's. Curator's Ray Serve backend is used as it is."""

    def start(self) -> None:
        """Start the models, and return when every replica is ready."""
        try:
            super().start()
        except BaseException:
            # Curator forgets a failed start, but not one that Ctrl-C ended.
            self._backend_impl = None
            atexit.unregister(self.stop)
            raise

    def _validate_model_configs(self) -> None:
        if isinstance(self.backend, RollwayServerConfig) and self.models:
            # A TypeError as in Curator, which says here that the config "accepts <none>".
            raise TypeError(
                "RollwayServerConfig takes its models from the stack, but `models` names some, "
                "too. Give models=[], and name them in the stack."
            )
        super()._validate_model_configs()

    def _create_backend(self) -> Any:
        return _choose_backend(self) or super()._create_backend()


def _choose_backend(server: Any) -> RollwayBackend | None:
    """Return a backend for configs that are Rollway's to serve."""
    if isinstance(server.backend, (DynamoServerConfig, RollwayServerConfig)):
        return RollwayBackend(server)
    return None


# --- install -------------------------------------------------------------------------------------

_lock = threading.Lock()
_is_installed = False


def _make_hook(below: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a stand-in for `_create_backend` that passes on what is not Rollway's.

    Every hook has its own method below. With one place for it, a hook that somebody wrapped, and
    that is installed again on top, would be below itself."""

    def create_backend(server: Any) -> Any:
        backend = _choose_backend(server) if _is_installed else None
        return backend or below(server)

    create_backend.below = below  # type: ignore[attr-defined]
    return create_backend


def install() -> None:
    """Serve Curator's `DynamoServerConfig` on Rollway in this process.

    Code that names Curator's own classes (the judge workflow, the PDF server) then runs on Rollway.
    Call it as often as you like; servers that run already are not touched."""
    global _is_installed
    with _lock:
        method = CuratorServer._create_backend
        if not hasattr(method, "below"):
            CuratorServer._create_backend = _make_hook(method)
        _is_installed = True


def uninstall() -> None:
    """Undo `install`: servers that start from now on have Curator's own backend."""
    global _is_installed
    with _lock:
        _is_installed = False
        # Somebody may have wrapped the method after us; then ours stays below, and passes on.
        method = CuratorServer._create_backend
        CuratorServer._create_backend = getattr(method, "below", method)
