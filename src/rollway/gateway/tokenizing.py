"""A tokenizer that refuses text that cannot fit the context, without tokenizing all of it.

Tokenizing 8 MB takes 12 s. There are two shortcuts. A text has at least as many tokens as its
length divided by the length of the longest token, if every token represents a bounded piece of
text. And the tokens of its beginning, except for the last words, are also tokens of the whole text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollway.gateway.messages import context_exceeded

_CHARACTERS_PER_TOKEN = 8
"""Few texts have more. For longer texts, only the beginning is tokenized first."""
_COMPOSITION = 4
"""Unicode composes at most this many characters into one."""


class BoundedTokenizer:
    """A tokenizer of transformers that checks the length of texts first."""

    def __init__(self, tokenizer: Any, longest: int | None, slack: int = 1) -> None:
        """`longest` is the result of `longest_token`. A text may have `slack` times as many tokens
        as the context."""
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
            raise context_exceeded(-(-len(text) // self._longest), self.limit, at_least=True)
        size = most * _CHARACTERS_PER_TOKEN
        if len(text) > 2 * size and (count := self._count_settled(text[:size])) > most:
            raise context_exceeded(count, self.limit, at_least=True)

    def _count_settled(self, beginning: str) -> int:
        """Count the tokens of a beginning that no continuation can change. Text is split into words
        from left to right and tokens do not cross words, so only the last words can change."""
        encoded = self._tokenizer(beginning, add_special_tokens=False)
        try:
            words = encoded.word_ids(0)
        except ValueError:  # slow tokenizers have no words
            return 0
        last = next((word for word in reversed(words) if word is not None), 0)
        return sum(1 for word in words if word is not None and word < last - 1)


def longest_token(tokenizer: Any) -> int | None:
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
