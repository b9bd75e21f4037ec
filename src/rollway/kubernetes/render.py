"""StackSpec to DGD."""

from __future__ import annotations

from rollway.kubernetes.names import Object
from rollway.kubernetes.spec import Infra


def render_part(infra: Infra, key: str) -> Object:
    raise NotImplementedError
