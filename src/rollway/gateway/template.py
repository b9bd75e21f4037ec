"""Renders messages to token ids, and keeps the ids that were sampled.

Short prompts are rendered at once, long ones in a thread with a deadline (see `threads`).
"""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollway.errors import RolloutError, RollwayError, UsageError
from rollway.gateway.messages import Message, Prefix, context_exceeded, without_bundle
from rollway.gateway.requests import measure
from rollway.gateway.threads import Threads
from rollway.gateway.tokenizing import BoundedTokenizer, longest_token
from rollway.rollout.history import History
from rollway.rollout.template import ChatTemplate

_LONG = 20_000
"""Longer texts, in characters or ids, are tokenized outside the event loop."""
_MAX_SETTINGS = 64
_MAX_NUMBER = 1_000_000
# Clients cannot set these, nor any parameter of the tokenizer's own method.
_OURS = frozenset({
    "chat_template", "conversation", "conversations", "messages", "tools", "documents", "padding",
    "truncation", "max_length", "tokenize", "tokenizer", "tokenizer_kwargs", "return_dict",
    "return_tensors", "return_assistant_tokens_mask", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "processor_kwargs", "self", "kwargs",
    "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token",
    "additional_special_tokens", "raise_exception", "strftime_now", "range", "namespace",
})  # fmt: skip


class Template:
    """The chat template and tokenizer of one model."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(path))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"No tokenizer can be loaded from {path}: {error}", "Pass one with --tokenizer."
            ) from error
        self.end_of_turn = _end_of_turn(self.tokenizer)
        self.threads = Threads()
        self._turns = TurnCounts()
        longest = longest_token(self.tokenizer)
        self._bounded = BoundedTokenizer(self.tokenizer, longest)
        # Sampled ids may represent their text with fewer tokens than the tokenizer would.
        self._for_history = BoundedTokenizer(self.tokenizer, longest, slack=4)
        parameters = inspect.signature(self.tokenizer.apply_chat_template).parameters
        self._refused = _OURS | set(parameters)

    def limit(self, tokens: int) -> None:
        """Refuse texts with more tokens from now on."""
        self._bounded.limit = self._for_history.limit = tokens

    async def prompt(
        self, body: Mapping[str, Any], messages: Sequence[Message], prefix: Prefix | None
    ) -> list[int]:
        """Return the ids to send; raise `SpliceError` if the template does not fit the prefix."""
        known, limit = 0 if prefix is None else len(prefix.token_ids), self._bounded.limit
        if limit is not None and known > limit:
            raise context_exceeded(known, limit)
        plain, settings = without_bundle(messages), self.settings(body)

        def render() -> list[int]:
            try:
                return self._render(body, plain, prefix, settings)
            except RollwayError:
                raise
            except Exception as error:  # the template is the model author's code
                reason = (str(error) or type(error).__name__)[:500]
                raise UsageError(
                    f"The chat template does not accept these messages: {reason}"
                ) from error

        if measure([plain, body.get("tools"), settings]).is_short and known <= _LONG:
            return render()
        return await self.threads.run(render, "Rendering the chat template")

    def settings(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the client's template settings. It may not set parameters of the tokenizer's
        method: with its own template it could loop for ever."""
        settings = body.get("chat_template_kwargs") or {}
        if not isinstance(settings, Mapping) or len(settings) > _MAX_SETTINGS:
            raise UsageError(
                f"chat_template_kwargs must be an object of at most {_MAX_SETTINGS} settings."
            )
        if refused := sorted(self._refused & settings.keys()):
            raise UsageError(f"chat_template_kwargs cannot set {', '.join(refused)}.")
        if settings and measure(settings).largest > _MAX_NUMBER:
            raise UsageError(f"chat_template_kwargs has a number above {_MAX_NUMBER}.")
        if body.get("reasoning_effort") is None:
            return dict(settings)
        return {**settings, "reasoning_effort": body["reasoning_effort"]}

    async def encode(self, text: str) -> list[int]:
        return (await self.encode_all([text]))[0]

    async def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts, in a thread if they are long together."""

        def work() -> list[list[int]]:
            return [self._bounded.encode(text) for text in texts]

        if sum(map(len, texts)) <= _LONG:
            return work()
        return await self.threads.run(work, "Tokenizing the text")

    async def decode(self, ids: Sequence[int]) -> str:
        if len(ids) <= _LONG:
            return self._bounded.decode(ids)
        return await self.threads.run(lambda: self._bounded.decode(ids), "Decoding the tokens")

    def _render(
        self,
        body: Mapping[str, Any],
        plain: list[dict[str, Any]],
        prefix: Prefix | None,
        settings: dict[str, Any],
    ) -> list[int]:
        tools = None if body.get("tool_choice") == "none" else body.get("tools")
        continues = bool(body.get("continue_final_message", False))
        generate = bool(body.get("add_generation_prompt", not continues))
        if prefix is None:
            kwargs = {**settings, "continue_final_message": True} if continues else settings
            ids = ChatTemplate(self._bounded, tools, kwargs).render(plain, generate=generate)
            if generate and not continues:
                self._turns.put((plain, tools, settings), ids.count(self.end_of_turn))
            return ids
        template = ChatTemplate(self._for_history, tools, settings)
        history = History(template, self.end_of_turn, plain, prefix.messages, generate)
        before = plain[: prefix.messages - 1]
        turns = self._turns.get((before, tools, settings))
        if turns is None:
            turns = template.render(before, generate=True).count(self.end_of_turn)
        if generate and history.plain:
            self._turns.put((plain, tools, settings), history.turns)
        prompt = history.extend(prefix.token_ids, turns)
        if prompt[: len(prefix.token_ids)] != prefix.token_ids:
            raise RolloutError("A prompt does not begin with the sampled ids.")
        return prompt


class TurnCounts:
    """Caches the number of end-of-turn tokens of prompts. The next request of a conversation needs
    the count of the one before it, and would have to render that prompt again."""

    def __init__(self, most: int = 65536) -> None:
        self._most = most
        self._counts: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def get(self, prompt: Any) -> int | None:
        return self._counts.get(_digest(prompt))

    def put(self, prompt: Any, count: int) -> None:
        with self._lock:  # long prompts are rendered in threads
            self._counts[_digest(prompt)] = count
            if len(self._counts) > self._most:
                del self._counts[next(iter(self._counts))]


def _digest(prompt: Any) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(prompt), digest_size=16).digest()


def _end_of_turn(tokenizer: Any) -> int:
    """Return the token with which the template ends an assistant turn: the tokenizer's eos token if
    it is there, else the last special token."""
    question = [{"role": "user", "content": "a"}]
    try:
        template = ChatTemplate(tokenizer)
        prompt = template.render(question, generate=True)
        reply = {"role": "assistant", "content": "a"}
        answered = template.render([*question, reply], generate=False)
    except Exception as error:  # the template is the model author's code
        raise UsageError(f"The chat template cannot be used: {error}") from error
    tail, eos = answered[len(prompt) :], tokenizer.eos_token_id
    if eos in tail:
        return int(eos)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    candidates = [token for token in tail if token in special]
    if not candidates and eos is None:
        raise UsageError("The chat template ends a turn with no special token.")
    return candidates[-1] if candidates else int(eos)
