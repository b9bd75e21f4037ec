"""The engine's worker object, whose methods `engine_rpc` calls by name, and its weight faults.

`reload_weights` is vLLM's own and fails as vLLM's does: it destroys first and looks later. The
`rollway_*` methods mirror Rollway's worker extension: they look first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollway.signed_calls import Verifier, read_stack_secret
from tests.light.checkpoint import Tensors, share_tensors
from tests.light.model import Qwen3

if TYPE_CHECKING:
    from rollway.weights.checkpoint import TensorHeader
    from tests.light.broadcasts import Broadcasts


class LightWorker:
    def __init__(self, path: Path) -> None:
        self.model = Qwen3.load(path)
        self._path = path
        self._shapes = {name: array.shape for name, array in self.model.tensors.items()}
        self._served: dict[str, TensorHeader] | None = None
        self._destroyed = False
        self._poison: str | None = None
        self.secret = read_stack_secret()
        self.verifier = Verifier(self.secret)
        self._staged: tuple[str, Path, Tensors] | None = None
        self._broadcasts: Broadcasts | None = None

    @property
    def usable(self) -> bool:
        return not self._destroyed and self._poison is None

    def call(self, method: str, kwargs: dict[str, Any]) -> object:
        """Call any method by its name, as the real engine lets its clients do."""
        return self._method(method)(**kwargs)

    def reload_weights(self, weights_path: str) -> None:
        if self._poison is not None:
            raise RuntimeError(self._poison)
        was_destroyed, self._destroyed = self._destroyed, True  # before any look at the files
        fresh = share_tensors(Path(weights_path))
        if unknown := sorted(fresh.keys() - self._shapes.keys()):
            raise ValueError(f"There is no module or parameter named {unknown[0]!r}")
        for name, array in fresh.items():
            wanted = self._shapes[name]
            if array.shape != wanted:
                self._poison = (
                    f"The size of tensor a ({wanted[0]}) must match the size of tensor b "
                    f"({array.shape[0]}) at non-singleton dimension 0"
                )
                raise AssertionError  # without a message, as there
        # What the checkpoint lacks keeps its old value, and nobody says so. Where an earlier
        # update lost the old values, that is not enough.
        self._use(fresh)
        self._destroyed = was_destroyed and fresh.keys() != self._shapes.keys()

    def forget(self) -> None:
        """Lose the weights, as in a sleep at level 2: an engine that computes now dies."""
        self._destroyed = True

    def stage(self, identity: str, path: Path, allow_cast: bool) -> None:
        """Load a checkpoint beside the one that serves."""
        self._check(str(path), allow_cast)
        self._staged = identity, path, share_tensors(path)

    def has_staged(self, identity: str) -> bool:
        return self._staged is not None and self._staged[0] == identity

    def rollway_swap(self, identity: str) -> None:
        assert self._staged is not None and self._staged[0] == identity
        self._use(self._staged[2])
        self._staged = None

    def rollway_unstage(self, identity: str = "") -> None:
        if not identity or self.has_staged(identity):
            self._staged = None
        elif self._broadcasts is not None:
            self._broadcasts.discard()

    def rollway_join(self, offer: dict[str, Any], tell: str) -> None:
        from rollway.weights.offer import read_offer

        self.broadcasts.join(read_offer(offer, self.secret), tell)

    def rollway_joined(self, identity: str) -> None:
        self.broadcasts.reader.check_joined(identity)

    def rollway_leave(self, identity: str) -> None:
        self.broadcasts.reader.leave(identity)

    def get_broadcast_state(self, identity: str) -> dict[str, Any] | None:
        """Return how far a broadcast is; None if there is none of this identity."""
        return None if self._broadcasts is None else self._broadcasts.get_state(identity)

    @property
    def broadcasts(self) -> Broadcasts:
        if self._broadcasts is None:
            from tests.light.broadcasts import Broadcasts  # torch makes every start slower

            self._broadcasts = Broadcasts(self._path)
        return self._broadcasts

    def _check(self, path: str, allow_cast: bool = False) -> None:
        """Refuse a checkpoint that this worker could not serve. Changes nothing."""
        # Here, because importing the package would make every start slower.
        from rollway.weights.checkpoint import differences, read_headers, refuse_differences

        new = read_headers(Path(path))
        if self._served is None:
            self._served = read_headers(self._path)
        refuse_differences(differences(new, self._served, allow_cast=allow_cast), path)

    def _use(self, fresh: Tensors) -> None:
        whole = fresh.keys() == self._shapes.keys()
        # A whole checkpoint is used as it is, so that workers of one process share its arrays.
        self.model.swap(fresh if whole else Tensors(self.model.tensors, **fresh))
        self._destroyed = False

    def _method(self, name: str) -> Callable[..., object]:
        unknown = name.startswith("_") or (
            name.startswith("rollway_") and os.environ.get("LIGHT_FOREIGN") == "1"
        )
        if unknown:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        method: Callable[..., object] = getattr(self, name)
        return method
