"""A tool for verl's own tool agent, which loads it from `multi_turn.function_tool_path`.

The demo's policy writes digits and cannot express a tool call, so every answer counts as one; it
ends with a 9. As with a real tool, the result depends on the call, so rollouts of a group diverge.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from random import Random
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

from rollway.bench.verl import OBSERVATION_TOKENS, TOOL, TOOL_SECONDS, make_text


@ToolParser.register(TOOL)
class EveryAnswerIsACall(ToolParser):  # type: ignore[misc]
    @property
    def stop_token_ids(self) -> list[int]:
        return list(self.tokenizer.encode("9", add_special_tokens=False))

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids)
        return text, [FunctionCall(name=TOOL, arguments=json.dumps({"digits": text}))]


@function_tool(TOOL)  # type: ignore[untyped-decorator]
async def look_up(digits: str) -> str:
    """Look digits up.

    Args:
        digits: What to look up.
    """
    await asyncio.sleep(TOOL_SECONDS * Random(digits).uniform(0.5, 1.5))
    return f"\n{make_text(digits, OBSERVATION_TOKENS)}\nStart:0"
