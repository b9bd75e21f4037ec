"""Render messages to token ids, and keep the ids that were sampled.

A text that cannot fit the context is refused without tokenizing all of it: 8 MB take 12 s. It is
longer than all tokens of the context can be; or its beginning has too many tokens, which are also
tokens of the whole text, except for the last words.

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

from rollway.errors import RolloutError, RollwayError, UsageError, require
from rollway.gateway.messages import Message, Prefix, make_context_error, remove_bundle
from rollway.gateway.requests import measure
from rollway.gateway.threads import Threads
from rollway.rollout.template import ChatTemplate, History

_CHARACTERS_PER_TOKEN = 8
"""Few texts have more. For longer texts, only the beginning is tokenized first."""
_COMPOSITION = 4
"""Unicode composes at most this many characters into one."""


class BoundedTokenizer:
    """A tokenizer of transformers that checks the length of texts first."""

    def __init__(self, tokenizer: Any, slack: int = 1) -> None:
        """A text may have `slack` times the tokens of the context."""
        self._tokenizer = tokenizer
        # A token may represent a few characters more than it has, which Unicode composes.
        self._longest = _COMPOSITION * max(map(len, tokenizer.get_vocab()))
        self._slack = slack
        self._renders = _renders_text(tokenizer)
        self.limit: int | None = None
        """The context length in tokens, if known."""

    @property
    def eos_token_id(self) -> Any:
        return self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, including special tokens that the tokenizer adds."""
        self.check(text)
        return [int(token) for token in self._tokenizer.encode(text)]

    def decode(self, token_ids: Sequence[int], /) -> str:
        return str(self._tokenizer.decode(list(token_ids)))

    def apply_chat_template(
        self, conversation: Any, /, *, tokenize: bool, return_dict: bool, **settings: Any
    ) -> Any:
        """Render, check the length, and tokenize as the tokenizer's own method does."""
        if not self._renders:  # its template returns ids, not text
            return self._tokenizer.apply_chat_template(
                conversation, tokenize=tokenize, return_dict=return_dict, **settings
            )
        text = self._tokenizer.apply_chat_template(conversation, tokenize=False, **settings)
        self.check(text)
        return self._tokenizer(text, padding=False, truncation=False, add_special_tokens=False)[
            "input_ids"
        ]

    def check(self, text: str) -> None:
        """Raise if a text has more tokens than the context, as far as that is cheap to find out."""
        if self.limit is None or len(text) <= self.limit:
            return
        most = self.limit * self._slack
        if len(text) > most * self._longest:
            raise make_context_error(-(-len(text) // self._longest), self.limit, at_least=True)
        size = most * _CHARACTERS_PER_TOKEN
        if len(text) > 2 * size and (count := self._count_settled(text[:size])) > most:
            raise make_context_error(count, self.limit, at_least=True)

    def _count_settled(self, beginning: str) -> int:
        """Count the tokens of a beginning that no continuation can change. Text is split into words
        from left to right and tokens do not cross words, so only the last words can change."""
        encoded = self._tokenizer(beginning, add_special_tokens=False)
        try:
            word_ids = encoded.word_ids(0)
        except ValueError:  # slow tokenizers have no words
            return 0
        last = next((word for word in reversed(word_ids) if word is not None), 0)
        return sum(1 for word in word_ids if word is not None and word < last - 1)


def _renders_text(tokenizer: Any) -> bool:
    """Return whether the chat template renders text, which is then tokenized."""
    from transformers import PreTrainedTokenizerBase

    method = getattr(type(tokenizer), "apply_chat_template", None)
    return method is PreTrainedTokenizerBase.apply_chat_template


# --- rendering -----------------------------------------------------------------------------------


_LONG = 20_000
"""Longer texts, in characters or ids, are tokenized outside the event loop."""
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

    def __init__(
        self,
        path: str | Path,
        *,
        chat_template: str | None = None,
        keep_tools: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the tokenizer. `chat_template` is Jinja text in place of the model's own template;
        with `keep_tools`, tools are rendered for `tool_choice: none` too."""
        require("cpu", "transformers")
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise UsageError(
                f"No tokenizer can be loaded from {path}: {error}", "Pass one with --tokenizer."
            ) from error
        if chat_template is not None:
            self.tokenizer.chat_template = chat_template
        self._keep_tools = keep_tools
        self.end_of_turn = _end_of_turn(self.tokenizer)
        self.threads = Threads()
        self._turns = TurnCounts()
        self._bounded = BoundedTokenizer(self.tokenizer)
        # Sampled ids may represent their text with fewer tokens than the tokenizer would.
        self._for_history = BoundedTokenizer(self.tokenizer, slack=4)
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
            raise make_context_error(known, limit)
        plain, settings = remove_bundle(messages), self.settings(body)

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

        if measure([plain, body.get("tools"), settings]) and known <= _LONG:
            return render()
        return await self.threads.run(render, "Rendering the chat template")

    def settings(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the client's template settings. It may not set parameters of the tokenizer's
        method: with its own template it could loop for ever."""
        settings = body.get("chat_template_kwargs") or {}
        if refused := sorted(self._refused & settings.keys()):
            raise UsageError(f"chat_template_kwargs cannot set {', '.join(refused)}.")
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
        is_unused = body.get("tool_choice") == "none" and not self._keep_tools
        tools = None if is_unused else body.get("tools")
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
