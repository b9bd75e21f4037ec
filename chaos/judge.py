"""Check the gateway's promises: compare what agents know with what a trainer fetches.

Every acknowledged turn is in exactly one trajectory as trainable tokens, byte for byte. No
trajectory has messages that no agent sent in this order. No deleted session is back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from chaos.agents import Acknowledged, Episode
from rollway.rollout.sequence import TokenSequence

Decode = Callable[[Sequence[int]], str]
_MARK = re.compile(r"<c\d+#\d+>")


@dataclass(slots=True)
class Verdict:
    """The number of checks and broken promises."""

    turns_checked: int = 0
    trajectories: int = 0
    lost_turns: int = 0
    """Acknowledged turns that no trajectory contains unchanged and in its loss."""
    doubled_turns: int = 0
    """Turns that are in the loss of two trajectories."""
    mixed_trajectories: int = 0
    """Trajectories that mix two conversations or two branches."""
    returned_sessions: int = 0
    """Deleted sessions that came back."""
    spoiled: set[str] = field(default_factory=set)
    """Sessions with a broken promise; later checks skip them, so that each counts once."""
    examples: list[str] = field(default_factory=list)

    def note(self, session: str, text: str) -> None:
        self.spoiled.add(session)
        if len(self.examples) < 20:
            self.examples.append(f"{session}: {text}"[:300])


def judge(
    episodes: Iterable[Episode],
    deleted: Collection[str],
    listed: Collection[str],
    fetched: Mapping[str, Sequence[TokenSequence]],
    decode: Decode,
) -> Verdict:
    """Compare what agents know with what the gateway returns."""
    verdict = Verdict()
    for name in sorted(set(deleted) & set(listed)):
        verdict.returned_sessions += 1
        verdict.note(name, "it was deleted and came back")
    for episode in episodes:
        if episode.fate == "kept":  # nothing is certain about a session that is being deleted
            sequences = fetched.get(episode.name, [])
            _judge_turns(verdict, episode, sequences)
            _judge_trajectories(verdict, episode, sequences, decode)
    return verdict


def _judge_turns(verdict: Verdict, episode: Episode, sequences: Sequence[TokenSequence]) -> None:
    for turn in episode.acknowledged:
        verdict.turns_checked += 1
        places = sum(_trains(sequence, turn) for sequence in sequences)
        if places == 0:
            verdict.lost_turns += 1
            verdict.note(episode.name, f"a turn of {len(turn.token_ids)} tokens is lost")
        elif places > 1:
            verdict.doubled_turns += 1
            verdict.note(episode.name, f"a turn is in {places} trajectories")


def _trains(sequence: TokenSequence, turn: Acknowledged) -> bool:
    """Return whether a trajectory has this turn after its exact prompt, and in its loss."""
    start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.token_ids)
    return (
        sequence.token_ids[start:end] == turn.token_ids
        and sequence.logprobs[start:end] == turn.logprobs
        and sequence.loss_mask[start:end] == [1] * (end - start)
        and sequence.token_ids[:start] == turn.prompt_ids
    )


def _judge_trajectories(
    verdict: Verdict, episode: Episode, sequences: Sequence[TokenSequence], decode: Decode
) -> None:
    for sequence in sequences:
        verdict.trajectories += 1
        marks = tuple(_MARK.findall(decode(sequence.token_ids)))
        if marks not in episode.sent:
            verdict.mixed_trajectories += 1
            verdict.note(episode.name, f"nobody sent {' '.join(marks)}")
