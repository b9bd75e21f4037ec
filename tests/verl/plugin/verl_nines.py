"""A tool for verl's own tool agent: an answer that ends with 9 calls it, and continues from 0.

The base policy writes digits and cannot express a tool call, so a digit stands for one.
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
        return text, [FunctionCall(name="next_digit", arguments='{"digit": 9}')] if called else []


@function_tool("next_digit")
def next_digit(digit: int) -> str:
    """Return the digit to continue with.

    Args:
        digit: The last digit.
    """
    return f"\nafter {digit} comes 0:"
