"""The demo's counting task as an environment of `verifiers`, in one turn or by a tool.

It is imported by the name of its taskset and harness, in the processes of `verifiers` 0.4 and of
the verifiers that prime-rl had in August 2026.

With two turns or more, the policy's digits are the argument of a call of the tool `next_start`,
which answers with the digit to count on from: the last one of the call. Each turn is graded
against the digit that it was given.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import verifiers.v1 as vf
from openai import AsyncOpenAI
from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens
from renderers.configs import BaseRendererConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["CountingHarness", "CountingRenderer", "CountingTaskset"]

ANSWER = 12
TOOL = {
    "type": "function",
    "function": {
        "name": "next_start",
        "description": "Say where the count stands.",
        "parameters": {"type": "object", "properties": {"digits": {"type": "string"}}},
    },
}


class CountingData(vf.TaskData):
    start: int
    turns: int


class CountingTask(vf.Task[CountingData]):
    @vf.reward(weight=1.0)
    async def count_right_digits(self, trace: vf.Trace) -> float:
        """Return the share of right digits, over all turns."""
        start, rewards = self.data.start, []
        for message in trace.branches[-1].messages:
            if message.role == "assistant":
                digits = read_digits(message)
                expected = "".join(str((start + 1 + i) % 10) for i in range(ANSWER))
                right = sum(a == b for a, b in zip(digits, expected, strict=False))
                rewards.append(right / max(ANSWER, len(digits)))
                start = find_start(digits)
        return sum(rewards) / self.data.turns


class CountingConfig(vf.TasksetConfig):
    instruction: str = ""
    """The text before the start digit."""
    turns: int = 1


class CountingTaskset(vf.Taskset[CountingTask, CountingConfig]):
    INFINITE = True

    def load(self) -> Any:
        index = 0
        while True:
            start = index * 7 % 10  # each digit once before any digit again
            prompt = f"{self.config.instruction}{start}"
            data = CountingData(idx=index, start=start, turns=self.config.turns, prompt=prompt)
            yield CountingTask(data, self.config.task)
            index += 1


class CountingHarness(Harness[HarnessConfig]):
    """Talks in the environment's own process: the usual ones start a program per rollout."""

    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        tools = [TOOL] if data.turns > 1 else None
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for turn in range(data.turns):
                reply = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools
                )
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if turn + 1 == data.turns or not message.tool_calls:
                    break
                messages += [_answer_call(call) for call in message.tool_calls]
        return ProgramResult(0, "", "")


def _answer_call(call: Any) -> dict[str, Any]:
    digits = json.loads(call.function.arguments)["digits"]
    return {"role": "tool", "tool_call_id": call.id, "content": f"\nStart:{find_start(digits)}"}


def find_start(digits: str) -> int:
    """Return the digit that an answer ends with; 0 if it ends with something else."""
    last = digits[-1:]
    return int(last) if last.isascii() and last.isdigit() else 0


def read_digits(message: Any) -> str:
    """Return what the policy has said, as text or as the argument of a call."""
    if message.tool_calls:
        return str(json.loads(message.tool_calls[0].arguments)["digits"])
    return message.content or ""


class CountingRendererConfig(BaseRendererConfig):
    pass


class CountingRenderer:
    """Messages as bare text: the demo's policy has learnt to answer without the marks of a chat.

    With tools, every answer is a call."""

    config_class = CountingRendererConfig
    supports_tools = True
    is_prefix_stable = True
    effective_thinking_retention = "all"

    def __init__(self, tokenizer: Any, config: Any = None) -> None:
        self._tokenizer = tokenizer
        self.config = config or CountingRendererConfig()

    def render(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        return self._extend([], messages)

    def render_ids(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        return self._extend([], messages).token_ids

    def bridge_to_next_turn(
        self, previous_prompt_ids: Any, previous_completion_ids: Any, new_messages: Any, **_: Any
    ) -> RenderedTokens:
        return self._extend([*previous_prompt_ids, *previous_completion_ids], new_messages)

    def parse_response(
        self, token_ids: Any, *, tools: Any = None, prompt_ids: Any = None
    ) -> ParsedResponse:
        stops = self.get_stop_token_ids()
        text = self._tokenizer.decode([token for token in token_ids if token not in stops])
        if not tools:
            return ParsedResponse(content=text)
        call = ParsedToolCall(raw=text, name="next_start", arguments={"digits": text})
        return ParsedResponse(content="", tool_calls=[call])

    def get_stop_token_ids(self) -> list[int]:
        return [self._tokenizer.eos_token_id]

    def _extend(self, ids: list[int], messages: Any) -> RenderedTokens:
        ids, owners = list(ids), [-1] * len(ids)
        for index, message in enumerate(messages):
            new = self._tokenizer.encode(_find_text(message), add_special_tokens=False)
            ids += new
            owners += [index] * len(new)
        roles = [message["role"] for message in messages]
        return RenderedTokens(token_ids=ids, message_indices=owners, message_roles=roles)


def _find_text(message: Any) -> str:
    calls = message.get("tool_calls") or []
    if not calls:
        return message.get("content") or ""
    arguments = calls[0]["function"]["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(arguments["digits"])
