"""`Conversation`: a token-exact conversation of many turns, ready for training.

    conversation = Conversation(tokenizer, tools=[schema])
    conversation.add({"role": "user", "content": "What is 17 * 3?"})
    while True:
        (rollout,) = await rollouts.generate(conversation.prompt(), Sampling(max_tokens=512))
        call = parse_tool_call(tokenizer.decode(rollout.token_ids))
        conversation.add_rollout(rollout, call.message if call else None)
        if call is None:
            break
        conversation.add({"role": "tool", "content": call.run()})
    batch = conversation.sequences()

Sampled ids are never decoded and re-encoded. The next prompt begins, id for id, with the prompt and
completion of the turn before it. So the whole conversation is one sequence, its log-probs belong to
its tokens, and the workers find it in their prefix caches. The chat template renders what follows
the completion: tool results, user turns, the opening of the next turn.

If the template would change earlier tokens, the sequence ends and a new one begins (a fork).
Nothing is patched.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rollway.errors import RolloutError, UsageError
from rollway.rollout.sequence import Fork, SequenceBuilder, TokenSequence
from rollway.rollout.template import (
    ChatTemplate,
    History,
    Message,
    SpliceError,
    Tokenizer,
    find_first_difference,
)
from rollway.rollout.trajectory import Rollout

__all__ = ["Conversation", "Fork", "TokenSequence"]

View = Literal["verbatim", "template"]

_PROBE: Message = {"role": "assistant", "content": "a"}


@dataclass(frozen=True, slots=True)
class _Next:
    """The prompt of the next turn."""

    ids: list[int]
    turns: int
    """The number of end-of-turn tokens in the template's own rendering of it."""
    begins: bool = False
    """Whether a new sequence begins with it; `fork` then says why."""
    fork: Fork | None = None


class Conversation:
    """A conversation of many turns, token for token as the model saw it.

    Sampled ids are never decoded and encoded again: the next prompt begins with the prompt and
    the completion of the turn before it, id for id.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        tools: tool schemas for the template.
        history: what the model sees of its earlier turns: "verbatim" is exactly what it sampled,
            "template" is what the template makes of them (many drop earlier reasoning). Wherever
            that differs, a new sequence begins (a fork).
        end_of_turn: the token id that ends a turn; by default the tokenizer's end of sequence.
        template_kwargs: further arguments of the template.

    Raises:
        UsageError: the template and `end_of_turn` do not fit together.

    Example:
        conversation = rollway.Conversation(tokenizer)
        conversation.add({"role": "user", "content": "What is 17 * 3?"})
        (rollout,) = stack.rollouts().generate(conversation.prompt())
        conversation.add_rollout(rollout)
        (sequence,) = conversation.sequences()
    """

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
        self._known = 0  # messages up to and including the last assistant turn
        self._turns = 0  # end-of-turn tokens in the template's rendering of the last prompt
        self._builders: list[SequenceBuilder] = []
        self._next: _Next | None = None

    def add(self, *messages: Message) -> None:
        """Append system, user and tool messages.

        Args:
            messages: messages in OpenAI's form.

        Raises:
            UsageError: an assistant message, or a message without a role.
        """
        for message in messages:
            role = message.get("role")
            if role == "assistant":
                raise UsageError(
                    "An assistant message was added.",
                    "Pass the rollout that sampled it to add_rollout(); its exact ids are needed.",
                )
            if not isinstance(role, str):
                raise UsageError(f"A message has the role {role!r}.", "Give each message a role.")
        self._messages += copy.deepcopy(messages)
        self._next = None

    def prompt(self) -> list[int]:
        """Return the token ids to sample the next assistant turn from.

        Raises:
            UsageError: the conversation is empty.
        """
        return list(self._plan_next().ids)

    def add_rollout(self, rollout: Rollout, message: Message | None = None) -> None:
        """Append the assistant's turn that was sampled from `prompt()`.

        Args:
            rollout: the sampled turn.
            message: the turn as the template should see it (`content`, `tool_calls`,
                `reasoning_content`); by default its content is the text of the ids.

        Raises:
            RolloutError: the rollout was aborted, or was sampled from another prompt.
        """
        planned = self._plan_next()
        self._check_rollout(rollout, planned.ids)
        reply = self._as_message(rollout, message)
        if planned.begins:
            self._begin(planned.fork)
        self._builders[-1].add(rollout)
        self._turns = planned.turns
        self._messages.append(reply)
        self._known = len(self._messages)
        self._next = None

    def sequences(self) -> list[TokenSequence]:
        """Return all sampled turns, ready for training: one sequence, and one more for each fork.
        Tokens after the last sampled one are left out."""
        return [builder.sequence() for builder in self._builders if builder.has_samples]

    def _plan_next(self) -> _Next:
        if self._next is None:
            self._next = self._plan()
        if not self._next.begins:
            self._check_extends(self._next.ids)
        return self._next

    def _plan(self) -> _Next:
        if not self._messages:
            raise UsageError("The conversation is empty.", "add() a message first.")
        if not self._builders:
            return self._render_first()
        if self._history == "template":
            return self._render_history()
        return self._splice_history()

    def _render_first(self) -> _Next:
        ids = self._template.render(self._messages, generate=True)
        with_reply = self._template.render([*self._messages, _PROBE], generate=False)
        difference = find_first_difference(self._tokenizer, ids, with_reply)
        if difference is None or self._end_of_turn not in with_reply[difference.position :]:
            text = self._tokenizer.decode([self._end_of_turn])
            raise UsageError(
                f"The chat template does not end an assistant turn with {self._end_of_turn} "
                f"({text!r}).",
                "Pass the id of the token with which it ends a turn as end_of_turn=.",
            )
        return _Next(ids, ids.count(self._end_of_turn), begins=True)

    def _render_history(self) -> _Next:
        """Render the whole history; it is a fork unless it extends the ids so far."""
        ids = self._template.render(self._messages, generate=True)
        so_far = self._so_far
        difference = find_first_difference(self._tokenizer, so_far, ids[: len(so_far)])
        turns = ids.count(self._end_of_turn)
        if difference is None:
            return _Next(ids, turns)
        why = f"The chat template renders earlier turns differently. {difference}"
        return _Next(ids, turns, begins=True, fork=self._fork(ids, why))

    def _splice_history(self) -> _Next:
        history = History(self._template, self._end_of_turn, self._messages, self._known)
        try:
            return _Next(history.extend(self._so_far, self._turns), history.turns)
        except SpliceError as error:
            ids = self._template.render(self._messages, generate=True)
            fork = self._fork(ids, str(error))
            return _Next(ids, history.turns, begins=True, fork=fork)

    def _fork(self, ids: list[int], why: str) -> Fork | None:
        """Describe a fork from the last sequence with samples; return None if there is none."""
        place = (
            len(self._builders) - 1 if self._builders[-1].has_samples else len(self._builders) - 2
        )
        if place < 0:
            return None
        before = self._builders[place].token_ids
        difference = find_first_difference(self._tokenizer, before, ids[: len(before)])
        return Fork(place, difference.position if difference else len(before), why)

    def _begin(self, fork: Fork | None) -> None:
        if self._builders and not self._builders[-1].has_samples:
            self._builders.pop()  # it has nothing to train on
        self._builders.append(SequenceBuilder(forked_from=fork))

    @property
    def _so_far(self) -> list[int]:
        """The prompt and completion of the last turn."""
        return self._builders[-1].token_ids if self._builders else []

    def _check_extends(self, ids: list[int]) -> None:
        so_far = self._so_far
        difference = find_first_difference(self._tokenizer, so_far, ids[: len(so_far)])
        if difference is not None:
            raise RolloutError(
                f"The next prompt does not begin with the last prompt and completion. {difference}",
                "Do not train on it, and report this: it is a bug in Rollway.",
            )

    def _check_rollout(self, rollout: Rollout, prompt: list[int]) -> None:
        if rollout.finish_reason == "aborted":
            raise RolloutError(
                "An aborted rollout is not a turn: the model did not finish it.",
                "Sample the turn again from prompt().",
            )
        difference = find_first_difference(self._tokenizer, prompt, rollout.prompt_ids)
        if difference is not None:
            raise RolloutError(
                f"The rollout was sampled from another prompt. {difference}",
                "Send what prompt() returns, and add() nothing before add_rollout().",
            )
        if rollout.logprobs is not None and len(rollout.logprobs) != len(rollout.token_ids):
            raise RolloutError(
                f"The rollout has {len(rollout.token_ids)} ids and "
                f"{len(rollout.logprobs)} log-probs."
            )

    def _as_message(self, rollout: Rollout, message: Message | None) -> Message:
        if message is None:
            ids = rollout.token_ids
            text_ids = ids[:-1] if ids and ids[-1] == self._end_of_turn else ids
            return {"role": "assistant", "content": self._tokenizer.decode(text_ids)}
        if message.get("role", "assistant") != "assistant":
            raise UsageError(
                f"The message of a rollout has the role {message['role']!r}.",
                "It must be `assistant`; append other messages with add().",
            )
        return {"role": "assistant", **copy.deepcopy(message)}
