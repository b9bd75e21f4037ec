"""The part of the brake that vLLM imports: called at every step, it changes no logits.

While the brake is on, a pause of the engine ends as it does on a GPU: in the loop that waits for
work. There steps overlap, so that one is always under way; on a CPU vLLM overlaps none, and ends
a pause at once."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.sample.logits_processor import LogitsProcessor

from tests.stack.brake import VARIABLE

STEP_SECONDS = 0.01


class Brake(LogitsProcessor):  # type: ignore[misc]  # vLLM is not typed
    def __init__(self, *_: Any) -> None:
        brake = self._brake = Path(os.environ[VARIABLE])
        ends_at_once = EngineCoreProc._pause_complete

        def end_later(engine: EngineCoreProc) -> bool:
            return not brake.exists() and ends_at_once(engine)

        EngineCoreProc._pause_complete = end_later

    def update_state(self, batch_update: Any) -> None:
        if self._brake.exists():
            time.sleep(STEP_SECONDS)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True
