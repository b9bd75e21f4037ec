"""Calls of the code tool from a policy that writes digits: an answer that ends with 9 is one."""

from __future__ import annotations

import json

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

PROGRAM = "digit = (9 + 1) % 10\nprint(f'\\nafter 9 comes {digit}:')"


@ToolParser.register("programs")
class Programs(ToolParser):
    @property
    def stop_token_ids(self):
        return self.tokenizer.encode("9", add_special_tokens=False)

    async def extract_tool_calls(self, responses_ids, tools=None):
        called = responses_ids[-1:] == self.stop_token_ids
        call = FunctionCall(name="code_interpreter", arguments=json.dumps({"code": PROGRAM}))
        return self.tokenizer.decode(responses_ids), [call] if called else []
