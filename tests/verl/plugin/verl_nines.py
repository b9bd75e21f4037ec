"""A tool for verl's own tool agent: whoever says 9 is told to go on from 0, and goes on.

The base policy writes digits and knows no words for a tool call, so a digit is one.
"""

from __future__ import annotations

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool


@ToolParser.register("nines")
class Nines(ToolParser):
    @property
    def stop_token_ids(self):
        return self.tokenizer.encode("9", add_special_tokens=False)

    async def extract_tool_calls(self, responses_ids, tools=None):
        text = self.tokenizer.decode(responses_ids)
        called = responses_ids[-1:] == self.stop_token_ids
        return text, [FunctionCall(name="go_on", arguments='{"digit": 9}')] if called else []


@function_tool("go_on")
def go_on(digit: int) -> str:
    """Where to go on.

    Args:
        digit: The last one.
    """
    return f"\nafter {digit} comes 0:"
