"""Messages to token ids, with the ids that were sampled left as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollway.errors import RolloutError, RollwayError, UsageError
from rollway.gateway.messages import Message, Prefix, without_bundle
from rollway.rollout.history import History
from rollway.rollout.template import ChatTemplate

_LONG_TEXT = 20_000
"""Characters above which a prompt is rendered outside the event loop."""


class Template:
    """The chat template and tokenizer of one model."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(path))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"No tokenizer can be loaded from {path}: {error}", "Give one with --tokenizer."
            ) from error
        self.end_of_turn = _end_of_turn(self.tokenizer)

    async def prompt(
        self, body: Mapping[str, Any], messages: Sequence[Message], prefix: Prefix | None
    ) -> list[int]:
        """The ids to send; `SpliceError` when the prefix and the template do not fit together."""
        plain = without_bundle(messages)

        def make() -> list[int]:
            try:
                return self._made(body, plain, prefix)
            except RollwayError:
                raise
            except Exception as error:  # the template is code of the model's author
                raise UsageError(
                    f"The chat template does not take these messages: {error}"
                ) from error

        if sum(len(str(message.get("content") or "")) for message in plain) > _LONG_TEXT:
            return await asyncio.to_thread(make)
        return make()

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def _made(
        self, body: Mapping[str, Any], plain: list[dict[str, Any]], prefix: Prefix | None
    ) -> list[int]:
        settings = dict(body.get("chat_template_kwargs") or {})
        if body.get("reasoning_effort") is not None:
            settings["reasoning_effort"] = body["reasoning_effort"]
        tools = None if body.get("tool_choice") == "none" else body.get("tools")
        goes_on = bool(body.get("continue_final_message", False))
        generate = bool(body.get("add_generation_prompt", not goes_on))
        if prefix is None:
            last = {**settings, "continue_final_message": True} if goes_on else settings
            return ChatTemplate(self.tokenizer, tools, last).render(plain, generate=generate)
        template = ChatTemplate(self.tokenizer, tools, settings)
        asked = template.render(plain[: prefix.messages - 1], generate=True)
        history = History(template, self.end_of_turn, plain, prefix.messages, generate)
        made = history.extend(prefix.token_ids, asked.count(self.end_of_turn))
        if made[: len(prefix.token_ids)] != prefix.token_ids:
            raise RolloutError("A prompt does not begin with the ids that were sampled.")
        return made


def _end_of_turn(tokenizer: Any) -> int:
    """The token that the template ends an assistant turn with: the tokenizer's own, if it is
    there, else the last special one."""
    asked = [{"role": "user", "content": "a"}]
    try:
        template = ChatTemplate(tokenizer)
        opened = template.render(asked, generate=True)
        told = template.render([*asked, {"role": "assistant", "content": "a"}], generate=False)
    except Exception as error:  # the template is code of the model's author
        raise UsageError(f"The chat template cannot be used: {error}") from error
    tail, eos = told[len(opened) :], tokenizer.eos_token_id
    if eos in tail:
        return int(eos)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    found = [token for token in tail if token in special]
    if not found and eos is None:
        raise UsageError("The chat template ends a turn with no special token.")
    return found[-1] if found else int(eos)
