"""Joins the exact ids of a conversation with the messages that the chat template renders after
them.

Rendering a conversation again does not give back the sampled ids: text can be tokenised in many
ways, and templates drop the reasoning of earlier turns. So Rollway keeps the ids up to the last
model turn, and uses only what the template renders after that turn. It finds that place by counting
end-of-turn tokens. Their position would not do: a template that drops reasoning moves them, and a
whole turn would silently be lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollway.errors import RolloutError


class SpliceError(RolloutError):
    """The end of the last model turn cannot be found in what the template renders."""


def splice(
    verbatim: Sequence[int],
    template_prefix: Sequence[int],
    template_full: Sequence[int],
    end_of_turn: int,
) -> list[int]:
    """Return `verbatim`, followed by what `template_full` has after the last model turn.

    `verbatim` is the prompt and completion of that turn, `template_prefix` the rendering of the
    messages up to and including it, `template_full` the rendering of all messages."""
    if not verbatim:
        return list(template_full)
    cut = turn_end(template_prefix, template_full, end_of_turn)
    # The template adds its own end-of-turn token, so a sampled one would appear twice.
    head = verbatim[:-1] if verbatim[-1] == end_of_turn else verbatim
    return [*head, *template_full[cut:]]


def turn_end(template_prefix: Sequence[int], template_full: Sequence[int], end_of_turn: int) -> int:
    """Return the index in `template_full` of the end-of-turn token that ends `template_prefix`."""
    turns = list(template_prefix).count(end_of_turn)
    if turns == 0:
        raise SpliceError(
            f"The chat template puts no end-of-turn token ({end_of_turn}) after the assistant's "
            "turn.",
            "Pass the token with which this template ends a turn.",
        )
    ends = [place for place, token in enumerate(template_full) if token == end_of_turn]
    if len(ends) < turns:
        raise SpliceError(
            f"The messages up to the last model turn have {turns} end-of-turn tokens, all messages "
            f"together have {len(ends)}.",
            "The chat template drops earlier turns; their exact ids cannot be kept with it.",
        )
    return ends[turns - 1]
