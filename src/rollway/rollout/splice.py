"""Joins the exact ids of a conversation so far with what the chat template puts after them.

Rendering a conversation anew does not give back the ids that were sampled: text can be split into
tokens in many ways, and templates drop the reasoning of earlier turns. So the ids up to the last
model turn are kept as they were, and only what follows that turn is taken from the template. Where
it begins is found by counting end-of-turn tokens. Their position would not do: a template that
drops reasoning moves them, and a whole turn would be lost without a word.
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
    """`verbatim`, then what `template_full` has after the last model turn.

    `verbatim` is prompt and completion of that turn, `template_prefix` the rendering of the
    messages up to and with it, `template_full` the rendering of all messages."""
    if not verbatim:
        return list(template_full)
    cut = turn_end(template_prefix, template_full, end_of_turn)
    # The template's own end-of-turn token follows, so a sampled one would be there twice.
    kept = verbatim[:-1] if verbatim[-1] == end_of_turn else verbatim
    return [*kept, *template_full[cut:]]


def turn_end(template_prefix: Sequence[int], template_full: Sequence[int], end_of_turn: int) -> int:
    """Where in `template_full` the end-of-turn token of the last turn of `template_prefix` is."""
    turns = list(template_prefix).count(end_of_turn)
    if turns == 0:
        raise SpliceError(
            f"The chat template puts no end-of-turn token ({end_of_turn}) after the assistant's "
            "turn.",
            "Pass the token that this template ends a turn with.",
        )
    ends = [place for place, token in enumerate(template_full) if token == end_of_turn]
    if len(ends) < turns:
        raise SpliceError(
            f"The messages up to the last model turn have {turns} end-of-turn tokens, all messages "
            f"together have {len(ends)}.",
            "The chat template drops earlier turns; their exact ids cannot be kept with it.",
        )
    return ends[turns - 1]
