"""`Conversation`: many turns with a model, token-exact, and what a trainer makes of them.

    conversation = Conversation(tokenizer, tools=[schema])
    conversation.add({"role": "user", "content": "What is 17 * 3?"})
    while True:
        (rollout,) = await rollouts.generate(conversation.prompt(), Sampling(max_tokens=512))
        call = parse_tool_call(tokenizer.decode(rollout.token_ids))
        conversation.took(rollout, call.message if call else None)
        if call is None:
            break
        conversation.add({"role": "tool", "content": call.run()})
    batch = conversation.sequences()

Sampled ids are never decoded and encoded again: the next prompt begins with the prompt and the
completion of the turn before it, id for id. What the model saw and said is then one sequence, its
log-probs belong to its tokens, and the workers find it in their prefix caches. The chat template
says what comes after the completion: tool results, user turns, the opening of the next turn.

Where a template cannot be followed without a change of earlier tokens, the sequence ends and a new
one begins (a fork). Nothing is patched.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rollway.errors import RolloutError, UsageError
from rollway.rollout.history import History
from rollway.rollout.sequence import Fork, SequenceBuilder, TokenSequence
from rollway.rollout.splice import SpliceError
from rollway.rollout.template import ChatTemplate, Message, Tokenizer, first_difference
from rollway.rollout.trajectory import Rollout

__all__ = ["Conversation", "Fork", "TokenSequence"]

View = Literal["verbatim", "template"]

_PROBE: Message = {"role": "assistant", "content": "a"}


@dataclass(frozen=True, slots=True)
class _Next:
    """The prompt of the turn to come."""

    ids: list[int]
    turns: int
    """End-of-turn tokens in the template's own rendering of it."""
    begins: bool = False
    """Whether a new sequence begins with it, `fork` then saying why."""
    fork: Fork | None = None


class Conversation:
    """Turns of one conversation. `history` says what the model sees of its earlier turns:
    "verbatim" is exactly what it sampled; "template" is what the template makes of them, at the
    price of a fork whenever that differs (many templates drop earlier reasoning)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Any] | None = None,
        history: View = "verbatim",
        end_of_turn: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if history not in get_args(View):
            raise UsageError(f"history is `{history}`.", "Use `verbatim` or `template`.")
        chosen = tokenizer.eos_token_id if end_of_turn is None else end_of_turn
        if not isinstance(chosen, int):
            raise UsageError(
                "The tokenizer has no end-of-sequence token.",
                "Pass the id of the token that ends a turn as end_of_turn=.",
            )
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, tools, template_kwargs or {})
        self._history = history
        self._end_of_turn = chosen
        self._messages: list[Message] = []
        self._taken = 0  # messages up to and with the last assistant turn
        self._turns = 0  # end-of-turn tokens in the template's rendering of the last prompt
        self._builders: list[SequenceBuilder] = []
        self._next: _Next | None = None

    def add(self, *messages: Message) -> None:
        """Append system, user and tool messages, in OpenAI's form."""
        for message in messages:
            role = message.get("role")
            if role == "assistant":
                raise UsageError(
                    "An assistant message was added.",
                    "Pass the rollout that sampled it to took(); its exact ids are needed.",
                )
            if not isinstance(role, str):
                raise UsageError(f"A message has the role {role!r}.", "Give each message a role.")
        self._messages += copy.deepcopy(messages)
        self._next = None

    def prompt(self) -> list[int]:
        """The ids to send for the next assistant turn."""
        return list(self._planned().ids)

    def took(self, rollout: Rollout, message: Message | None = None) -> None:
        """Append the assistant's turn, sampled from `prompt()`.

        `message` is how the template is to see it (`content`, `tool_calls`, `reasoning_content`);
        by default its content is the text of the ids."""
        planned = self._planned()
        self._check_taken(rollout, planned.ids)
        said = self._as_message(rollout, message)
        if planned.begins:
            self._begin(planned.fork)
        self._builders[-1].add(rollout)
        self._turns = planned.turns
        self._messages.append(said)
        self._taken = len(self._messages)
        self._next = None

    def sequences(self) -> list[TokenSequence]:
        """All that was sampled so far, ready for training: one sequence, and one more for each
        fork. Tokens after the last sampled one are left out."""
        return [builder.sequence() for builder in self._builders if builder.sampled]

    def _planned(self) -> _Next:
        if self._next is None:
            self._next = self._plan()
        if not self._next.begins:
            self._check_extends(self._next.ids)
        return self._next

    def _plan(self) -> _Next:
        if not self._messages:
            raise UsageError("The conversation is empty.", "add() a message first.")
        if not self._builders:
            return self._first()
        if self._history == "template":
            return self._rendered()
        return self._spliced()

    def _first(self) -> _Next:
        ids = self._template.render(self._messages, generate=True)
        answered = self._template.render([*self._messages, _PROBE], generate=False)
        difference = first_difference(self._tokenizer, ids, answered)
        if difference is None or self._end_of_turn not in answered[difference.position :]:
            text = self._tokenizer.decode([self._end_of_turn])
            raise UsageError(
                f"The chat template does not end an assistant turn with {self._end_of_turn} "
                f"({text!r}).",
                "Pass the id of the token that it ends a turn with as end_of_turn=.",
            )
        return _Next(ids, ids.count(self._end_of_turn), begins=True)

    def _rendered(self) -> _Next:
        """The template's view of the history, as a fork unless it extends the ids so far."""
        ids = self._template.render(self._messages, generate=True)
        so_far = self._so_far
        difference = first_difference(self._tokenizer, so_far, ids[: len(so_far)])
        turns = ids.count(self._end_of_turn)
        if difference is None:
            return _Next(ids, turns)
        why = f"The chat template renders earlier turns differently. {difference}"
        return _Next(ids, turns, begins=True, fork=self._fork(ids, why))

    def _spliced(self) -> _Next:
        history = History(self._template, self._end_of_turn, self._messages, self._taken)
        try:
            return _Next(history.extend(self._so_far, self._turns), history.turns)
        except SpliceError as error:
            ids = self._template.render(self._messages, generate=True)
            fork = self._fork(ids, str(error))
            return _Next(ids, history.turns, begins=True, fork=fork)

    def _fork(self, ids: list[int], why: str) -> Fork | None:
        """From the last sequence that is of use; None when there is none."""
        place = len(self._builders) - 1 if self._builders[-1].sampled else len(self._builders) - 2
        if place < 0:
            return None
        before = self._builders[place].token_ids
        difference = first_difference(self._tokenizer, before, ids[: len(before)])
        return Fork(place, difference.position if difference else len(before), why)

    def _begin(self, fork: Fork | None) -> None:
        if self._builders and not self._builders[-1].sampled:
            self._builders.pop()  # there is nothing in it to train on
        self._builders.append(SequenceBuilder(forked_from=fork))

    @property
    def _so_far(self) -> list[int]:
        """Prompt and completion of the last turn."""
        return self._builders[-1].token_ids if self._builders else []

    def _check_extends(self, ids: list[int]) -> None:
        so_far = self._so_far
        difference = first_difference(self._tokenizer, so_far, ids[: len(so_far)])
        if difference is not None:
            raise RolloutError(
                f"The next prompt does not begin with the last prompt and completion. {difference}",
                "Train on none of it; this is a fault of Rollway.",
            )

    def _check_taken(self, rollout: Rollout, prompt: list[int]) -> None:
        if rollout.finish_reason == "aborted":
            raise RolloutError(
                "An aborted rollout is no turn: the model had not finished it.",
                "Sample the turn again from prompt().",
            )
        difference = first_difference(self._tokenizer, prompt, rollout.prompt_ids)
        if difference is not None:
            raise RolloutError(
                f"The rollout was sampled from another prompt. {difference}",
                "Send what prompt() returns, and add() nothing before took().",
            )
        if rollout.logprobs is not None and len(rollout.logprobs) != len(rollout.token_ids):
            raise RolloutError(
                f"{len(rollout.token_ids)} token ids came with {len(rollout.logprobs)} log-probs."
            )

    def _as_message(self, rollout: Rollout, message: Message | None) -> Message:
        if message is None:
            ids = rollout.token_ids
            said = ids[:-1] if ids and ids[-1] == self._end_of_turn else ids
            return {"role": "assistant", "content": self._tokenizer.decode(said)}
        if message.get("role", "assistant") != "assistant":
            raise UsageError(
                f"The message of a rollout has the role {message['role']!r}.",
                "It is the assistant's; append others with add().",
            )
        return {"role": "assistant", **copy.deepcopy(message)}
