"""The part of the brake that vLLM imports: called at every step, it changes no logits."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

from tests.stack.brake import VARIABLE

STEP_SECONDS = 0.01


class Brake(LogitsProcessor):  # type: ignore[misc]  # vLLM is not typed
    def __init__(self, *_: Any) -> None:
        self._brake = Path(os.environ[VARIABLE])

    def update_state(self, batch_update: Any) -> None:
        if self._brake.exists():
            time.sleep(STEP_SECONDS)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True
