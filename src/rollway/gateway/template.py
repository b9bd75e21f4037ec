"""Render messages to token ids, and keep the ids that were sampled.

A text that cannot fit the context is refused without tokenizing all of it: 8 MB take 12 s. There
are two shortcuts. A text has at least as many tokens as its length divided by the length of the
longest token, if every token represents a bounded piece of text. And the tokens of its beginning,
except for the last words, are also tokens of the whole text.

Short prompts are rendered at once, long ones in a thread with a deadline (see `threads`).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollway.errors import RolloutError, RollwayError, UsageError
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

    def __init__(self, tokenizer: Any, longest: int | None, slack: int = 1) -> None:
        """`longest` comes from `find_longest_token`. A text may have `slack` times the tokens of
        the context."""
        self._tokenizer = tokenizer
        self._longest = longest
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
        if self._longest is not None and len(text) > most * self._longest:
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


def find_longest_token(tokenizer: Any) -> int | None:
    """Return the largest number of characters that one token represents. Return None if there is no
    bound, for example if a token may represent unknown characters or dropped spaces."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    spec = json.loads(backend.to_str())
    shrink = _shrink(spec.get("normalizer"))
    added = spec.get("added_tokens") or []
    if (
        shrink is None
        or spec.get("truncation")
        or not _keeps_all(spec.get("pre_tokenizer"))
        or not _covers_all(spec["model"], spec.get("pre_tokenizer"))
        or any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return None
    tokens = [*spec["model"]["vocab"], *(token["content"] for token in added)]
    return max(map(len, tokens)) * shrink


def _shrink(normalizer: Any) -> int | None:
    """Return the factor by which a normalizer can shorten text, or None without a bound."""
    kind = normalizer and normalizer["type"]
    if kind in (None, "Prepend", "NFD", "NFKD", "ByteLevel"):
        return 1
    if kind in ("NFC", "NFKC"):
        return _COMPOSITION
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        return 1 if pattern and len(normalizer["content"]) >= len(pattern) else None
    if kind == "Sequence":
        factor = 1
        for part in normalizer["normalizers"]:
            shrink = _shrink(part)
            if shrink is None:
                return None
            factor *= shrink
        return factor
    return None


def _keeps_all(splitter: Any) -> bool:
    """Return whether splitting into words drops no character."""
    kind = splitter and splitter["type"]
    if kind == "Sequence":
        return all(_keeps_all(part) for part in splitter["pretokenizers"])
    if kind in ("Split", "Punctuation"):
        return bool(splitter["behavior"] != "Removed")
    return kind in (None, "ByteLevel", "Metaspace", "Digits")


def _covers_all(model: Any, splitter: Any) -> bool:
    """Return whether every character becomes at least a part of a token."""
    if model["type"] != "BPE":
        return False
    vocabulary = model["vocab"]
    if _has_bytes(splitter):
        from tokenizers.pre_tokenizers import ByteLevel

        return all(letter in vocabulary for letter in ByteLevel.alphabet())
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return model.get("unk_token") in vocabulary and not model.get("fuse_unk")


def _has_bytes(splitter: Any) -> bool:
    kind = splitter and splitter["type"]
    if kind == "Sequence":
        return any(_has_bytes(part) for part in splitter["pretokenizers"])
    return bool(kind == "ByteLevel")


def _renders_text(tokenizer: Any) -> bool:
    """Return whether the chat template renders text, which is then tokenized."""
    from transformers import PreTrainedTokenizerBase

    method = getattr(type(tokenizer), "apply_chat_template", None)
    return method is PreTrainedTokenizerBase.apply_chat_template


# --- rendering -----------------------------------------------------------------------------------


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
        longest = find_longest_token(self.tokenizer)
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
