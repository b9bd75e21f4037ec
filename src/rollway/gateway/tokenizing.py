"""A tokenizer that refuses text which cannot fit the context, before or soon after it begins.

Tokenizing 8 MB takes 12 s. A text has at least its length divided by the longest token's as tokens,
where each token stands for a bounded piece of text; and the tokens of its beginning, up to the last
words, are those of the whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollway.gateway.messages import context_exceeded

_CHARACTERS_PER_TOKEN = 8
"""Few texts have more. A text with more for each token of the context is tried with its beginning
first."""
_COMPOSITION = 4
"""Unicode composes at most so many characters into one."""


class BoundedTokenizer:
    """A tokenizer of transformers, as the chat template and the gateway use it."""

    def __init__(self, tokenizer: Any, longest: int | None, slack: int = 1) -> None:
        """`longest` is what `longest_token` tells of it. With `slack`, text is refused that has so
        many times more tokens than the context."""
        self._tokenizer = tokenizer
        self._longest = longest
        self._slack = slack
        self._renders = _renders_text(tokenizer)
        self.limit: int | None = None
        """How many tokens the context has, where it is known."""

    @property
    def eos_token_id(self) -> Any:
        return self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with those that the tokenizer adds around it."""
        self.check(text)
        return [int(token) for token in self._tokenizer.encode(text)]

    def decode(self, token_ids: Sequence[int], /) -> str:
        return str(self._tokenizer.decode(list(token_ids)))

    def apply_chat_template(
        self, conversation: Any, /, *, tokenize: bool, return_dict: bool, **settings: Any
    ) -> Any:
        """Render, look at the length, and tokenize as the tokenizer's own method does."""
        if not self._renders:  # its template gives ids, not text
            return self._tokenizer.apply_chat_template(
                conversation, tokenize=tokenize, return_dict=return_dict, **settings
            )
        text = self._tokenizer.apply_chat_template(conversation, tokenize=False, **settings)
        self.check(text)
        return self._tokenizer(text, padding=False, truncation=False, add_special_tokens=False)[
            "input_ids"
        ]

    def check(self, text: str) -> None:
        """Refuse a text that has more tokens than the context, as far as that is cheap to know."""
        if self.limit is None or len(text) <= self.limit:
            return
        most = self.limit * self._slack
        if self._longest is not None and len(text) > most * self._longest:
            raise context_exceeded(-(-len(text) // self._longest), self.limit, at_least=True)
        size = most * _CHARACTERS_PER_TOKEN
        if len(text) > 2 * size and (count := self._settled_tokens(text[:size])) > most:
            raise context_exceeded(count, self.limit, at_least=True)

    def _settled_tokens(self, beginning: str) -> int:
        """Return how many tokens of a beginning are the same in any text that goes on from it.
        Text is split into words from left to right, and tokens do not cross words; only the last
        words depend on what follows them."""
        encoded = self._tokenizer(beginning, add_special_tokens=False)
        try:
            words = encoded.word_ids(0)
        except ValueError:  # a tokenizer in Python knows no words
            return 0
        last = next((word for word in reversed(words) if word is not None), 0)
        return sum(1 for word in words if word is not None and word < last - 1)


def longest_token(tokenizer: Any) -> int | None:
    """Return how many characters of text one token stands for at most; None where a token can
    stand for any number of them, as one for unknown characters or dropped spaces may."""
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
    """Return by how much a normalizer can shorten text; None where that has no bound."""
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
    """Tell whether splitting into words drops no character."""
    kind = splitter and splitter["type"]
    if kind == "Sequence":
        return all(_keeps_all(part) for part in splitter["pretokenizers"])
    if kind in ("Split", "Punctuation"):
        return bool(splitter["behavior"] != "Removed")
    return kind in (None, "ByteLevel", "Metaspace", "Digits")


def _covers_all(model: Any, splitter: Any) -> bool:
    """Tell whether every character becomes at least one token or a part of one."""
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
    """Tell whether the chat template gives text that is tokenized like any other."""
    from transformers import PreTrainedTokenizerBase

    method = getattr(type(tokenizer), "apply_chat_template", None)
    return method is PreTrainedTokenizerBase.apply_chat_template
