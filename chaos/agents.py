"""Agents that hold conversations through the gateway and remember every answer.

Each user message has a unique mark, `<conversation#number>`. A session has two conversations at
once, and sometimes an agent steps back and takes another turn. So marks distinguish every
trajectory, and every acknowledged turn has a unique prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from chaos.clients import POLITE, Address, Manner, Reply, Vanished, call

CALM = "calm"
DELETED, SLOW, VANISHED = "deleted_sessions", "slow_clients", "vanished_clients"
BEHAVIOURS = (DELETED, SLOW, VANISHED)

_CHAT = "/v1/chat/completions"
_RARELY, _OFTEN = 0.03, 0.5
_TURNS_PER_SESSION = (4, 9)
_LONGEST_CONVERSATION = 5  # so that a context of 512 tokens is enough
_EXPECTED = (200, 502, 503, 507)
"""502 and 503 come from the stack behind the gateway, 507 from the journal's disk."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A turn that the gateway acknowledged as recorded."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Episode:
    """A session, as its agent knows it."""

    name: str
    sent: set[tuple[str, ...]] = field(default_factory=set)
    """The marks of each request, whether answered or not."""
    acknowledged: list[Acknowledged] = field(default_factory=list)
    fate: Literal["kept", "deleting", "deleted"] = "kept"
    unsure: bool = False
    """Whether the answer to a DELETE never arrived: the next DELETE may find nothing."""
    finished: bool = False


@dataclass(slots=True)
class SessionLedger:
    """What all agents know together."""

    episodes: dict[str, Episode] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    """Sessions whose deletion was acknowledged; they never come back."""
    requests: int = 0
    acknowledged_turns: int = 0
    streamed_turns: int = 0
    not_recorded: int = 0
    """Answers that say so, because their session was deleted meanwhile."""
    vanished_clients: int = 0
    slow_clients: int = 0
    cut_requests: int = 0
    """Requests whose connection ended first, because the gateway was killed."""
    hangs: int = 0
    unexpected_answers: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if len(self.examples) < 10 and text[:300] not in self.examples:
            self.examples.append(text[:300])

    def drop(self, episode: Episode) -> None:
        """Keep only the name of a session that was deleted."""
        episode.fate = "deleted"
        self.deleted.add(episode.name)
        self.episodes.pop(episode.name, None)


@dataclass(slots=True)
class Answer:
    """A parsed reply, streamed or not."""

    status: int
    text: str = ""
    bundle: Acknowledged | None = None
    recorded: bool = True
    trouble: str = ""

    @classmethod
    def read(cls, reply: Reply) -> Answer:
        """Parse a reply; `trouble` says why it does not have OpenAI's form."""
        try:
            if reply.body.startswith(b"data:"):
                return cls._read_events(reply.body)
            return cls._read_whole(reply.status, json.loads(reply.body))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return cls(reply.status, trouble=f"{reply.status}, {error!r}: {reply.body[:120]!r}")

    @classmethod
    def _read_whole(cls, status: int, body: dict[str, Any]) -> Answer:
        if status != 200:
            return cls(status, trouble="" if body["error"]["message"] else "no message")
        message = body["choices"][0]["message"]
        recorded = body.get("recorded") is not False
        return cls(status, message["content"] or "", _bundle(message), recorded)

    @classmethod
    def _read_events(cls, body: bytes) -> Answer:
        answer = cls(200)
        lines = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
        for line in lines:
            if line == b"[DONE]":
                continue
            event = json.loads(line)
            if "error" in event:
                code = event["error"].get("code")
                return cls(code if isinstance(code, int) else 500, trouble=_stream_trouble(event))
            answer.recorded = answer.recorded and event.get("recorded") is not False
            for choice in event["choices"]:
                answer.text += choice["delta"].get("content") or ""
                answer.bundle = answer.bundle or _bundle(choice["delta"])
        if lines[-1] != b"[DONE]":
            raise ValueError("the stream has no end")
        return answer


def _bundle(message: dict[str, Any]) -> Acknowledged | None:
    if "prompt_token_ids" not in message:
        return None
    return Acknowledged(
        message["prompt_token_ids"],
        message["generation_token_ids"],
        message["generation_log_probs"],
    )


def _stream_trouble(event: dict[str, Any]) -> str:
    return "" if event["error"].get("message") else f"an error without a message: {event}"


@dataclass(slots=True)
class _Conversation:
    """Messages so far, and the marks in them."""

    label: str
    messages: list[dict[str, str]] = field(default_factory=list)
    marks: tuple[str, ...] = ()

    def step_back(self) -> None:
        """Drop the last exchange, so that the next turn is a fork."""
        self.messages, self.marks = self.messages[:-2], self.marks[:-1]


class Agents:
    """Many concurrent agents, which can be held and released."""

    def __init__(
        self, address: Callable[[], Address], model: str, *, count: int, seed: int, bound: float
    ) -> None:
        self.ledger = SessionLedger()
        self.emphasis = CALM
        """The behaviour that agents currently show often."""
        self._address = address
        self._model = model
        self._count = count
        self._bound = bound
        self._random = random.Random(seed)
        self._numbers = itertools.count(1)
        self._gate = asyncio.Event()
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run()) for _ in range(self._count)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def raise_failures(self) -> None:
        """Raise the error of an agent that died: a bug of chaos itself."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def release(self) -> None:
        self._gate.set()

    def hold(self) -> None:
        """Start no new requests; those in flight continue."""
        self._gate.clear()

    async def wait_idle(self) -> None:
        """Wait until no request is in flight; each has a time limit."""
        await self._idle.wait()

    async def delete(self, episode: Episode) -> None:
        """Delete a session; it stays `deleting` until the gateway confirms it."""
        episode.fate = "deleting"
        reply = await self._call("DELETE", f"/v1/rollway/trajectories/{episode.name}")
        if reply is None:
            episode.unsure = True
            return
        if reply.status == 404 and episode.acknowledged and not episode.unsure:
            self.ledger.unexpected_answers += 1
            self.ledger.note(f"{episode.name} was gone before it was deleted")
        if reply.status in (200, 404):
            self.ledger.drop(episode)
        else:
            self._judge_status(Answer.read(reply))

    async def _run(self) -> None:
        while True:
            episode = Episode(f"session-{next(self._numbers)}")
            self.ledger.episodes[episode.name] = episode
            talks = [_Conversation(f"c{next(self._numbers)}") for _ in range(2)]
            for _ in range(self._random.randint(*_TURNS_PER_SESSION)):
                await self._gate.wait()
                talk = self._random.choice(talks)
                if self._shows(DELETED) and episode.acknowledged:
                    await self._delete_in_flight(episode, talk)
                    break
                await self._turn(episode, talk)
            while episode.fate == "deleting":
                await self._gate.wait()
                await self.delete(episode)
                await asyncio.sleep(0.05)
            episode.finished = True

    async def _delete_in_flight(self, episode: Episode, talk: _Conversation) -> None:
        """Delete the session once the answer of a streamed turn has begun."""
        episode.fate = "deleting"
        begun = asyncio.Event()
        turn = asyncio.create_task(self._turn(episode, talk, stream=True, begun=begun))
        waiting = asyncio.create_task(begun.wait())
        try:
            await asyncio.wait((turn, waiting), return_when=asyncio.FIRST_COMPLETED)
            await self.delete(episode)
            await turn
        finally:
            waiting.cancel()
            turn.cancel()

    async def _turn(
        self,
        episode: Episode,
        talk: _Conversation,
        stream: bool | None = None,
        begun: asyncio.Event | None = None,
    ) -> None:
        if len(talk.marks) >= _LONGEST_CONVERSATION or (talk.marks and self._random.random() < 0.2):
            talk.step_back()
        mark = f"<{talk.label}#{next(self._numbers)}>"
        messages = [*talk.messages, {"role": "user", "content": f"{mark} go on"}]
        marks = (*talk.marks, mark)
        episode.sent.add(marks)
        stream = self._random.random() < 0.5 if stream is None else stream
        body = {
            "model": self._model,
            "messages": messages,
            "stream": stream,
            "max_tokens": self._random.randint(8, 24),
            "ignore_eos": True,
            "return_token_ids": True,
        }
        manner = POLITE if begun is not None else self._manner()
        reply = await self._call("POST", _CHAT, body, episode.name, manner, begun)
        if reply is None:
            return
        answer = Answer.read(reply)
        if self._judge_status(answer):
            self._acknowledge(episode, answer, stream)
            talk.messages = [*messages, {"role": "assistant", "content": answer.text}]
            talk.marks = marks
        else:
            await asyncio.sleep(0.1)  # like a client before a retry

    def _acknowledge(self, episode: Episode, answer: Answer, stream: bool) -> None:
        self.ledger.streamed_turns += stream
        if not answer.recorded:
            self.ledger.not_recorded += 1
        elif answer.bundle is not None:
            self.ledger.acknowledged_turns += 1
            episode.acknowledged.append(answer.bundle)

    def _judge_status(self, answer: Answer) -> bool:
        """Count an answer; return whether it is a success."""
        self.ledger.statuses[answer.status] += 1
        good = answer.status == 200 and not answer.trouble
        if answer.trouble or answer.status not in _EXPECTED or (good and answer.bundle is None):
            self.ledger.unexpected_answers += 1
            self.ledger.note(f"unexpected answer {answer.status}: {answer.trouble}")
            return False
        return good

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        session: str = "",
        manner: Manner = POLITE,
        begun: asyncio.Event | None = None,
    ) -> Reply | None:
        """Return the reply, or None if there is none; the ledger then says why."""
        raw = b"" if body is None else json.dumps(body).encode()
        headers = {"x-rollway-session": session} if session else {}
        ledger = self.ledger
        ledger.requests += 1
        self._busy += 1
        self._idle.clear()
        try:
            async with asyncio.timeout(self._bound):
                return await call(self._address(), method, path, raw, headers, manner, begun)
        except TimeoutError:
            ledger.hangs += 1
            ledger.note(f"{method} {path} of {session} took more than {self._bound:g} s")
        except Vanished:
            ledger.vanished_clients += 1
        except (OSError, EOFError):
            ledger.cut_requests += 1
            await asyncio.sleep(0.5)
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()
        return None

    def _shows(self, behaviour: str) -> bool:
        often = self.emphasis == behaviour
        return self._random.random() < (_OFTEN if often else _RARELY)

    def _manner(self) -> Manner:
        if self._shows(VANISHED):
            return Manner(vanish="request" if self._random.random() < 0.3 else "answer")
        if self._shows(SLOW):
            self.ledger.slow_clients += 1
            if self._random.random() < 0.5:
                return Manner(send_pause=0.05)
            return Manner(read_pause=0.0005)
        return POLITE
