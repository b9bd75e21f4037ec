"""What several tests of weights share."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from rollway.weights import device_copies


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tensors in CPU memory go to the host in the way of those on a GPU."""
    start_copy = device_copies._start_copy

    def start(tensor: Tensor) -> Any:
        return start_copy(tensor) if tensor.is_cuda else (tensor.clone(), lambda: None)

    monkeypatch.setattr(device_copies, "_start_copy", start)
