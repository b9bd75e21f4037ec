"""The judge of `rollway chaos --gateway`: it finds what it is there to find."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollway.bench.gateway import GatewayLoad, Tenth
from rollway.chaos.agents import Acknowledged, Agents, Answer, Episode
from rollway.chaos.clients import Address, Manner, Reply, Vanished, call
from rollway.chaos.gateway import FAULTS, GatewayReport, GatewayRound
from rollway.chaos.judge import Verdict, judge
from rollway.chaos.old_journal import OldRecorder
from rollway.chaos.small_disk import SmallDisk
from rollway.gateway.recorder import Turn
from rollway.rollout.sequence import TokenSequence

PROMPT, REPLY = "user <c1#1> go", "ab"
NEXT = "user <c1#2> go"


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def sequence(*parts: str, trained: bool = True) -> TokenSequence:
    """Prompts and replies in turn; each sampled token has a log-prob of its own."""
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for number, part in enumerate(parts):
        sampled = number % 2 == 1 and (trained or number == len(parts) - 1)
        tokens += ids(part)
        mask += [int(sampled)] * len(part)
        logprobs += [-ord(letter) / 1000 if sampled else 0.0 for letter in part]
    return TokenSequence(tokens, mask, logprobs, ())


def told(prompt: str, reply: str) -> Acknowledged:
    return Acknowledged(ids(prompt), ids(reply), [-ord(letter) / 1000 for letter in reply])


def episode() -> Episode:
    sent = {("<c1#1>",), ("<c1#1>", "<c1#2>"), ("<c1#1>", "<c1#3>")}
    turns = [told(PROMPT, REPLY), told(PROMPT + REPLY + NEXT, "cd")]
    return Episode("s", sent, turns)


def verdict_of(*sequences: TokenSequence, listed: tuple[str, ...] = ("s",)) -> Verdict:
    return judge([episode()], {"gone"}, listed, {"s": list(sequences)}, decode)  # type: ignore[arg-type]


WHOLE = sequence(PROMPT, REPLY, NEXT, "cd")


def test_turns_that_are_all_there_are_found() -> None:
    fork = sequence(PROMPT + REPLY, "", "user <c1#3> go", "ef")
    verdict = verdict_of(WHOLE, fork)
    assert (verdict.turns_checked, verdict.trajectories) == (2, 2)
    assert not verdict.examples and not verdict.spoiled


@pytest.mark.parametrize(
    "left",
    [
        [],
        [sequence(PROMPT, REPLY)],
        [sequence(PROMPT, REPLY, NEXT, "cd", trained=False)],  # the first turn is in no loss
        [sequence(PROMPT, "xb", NEXT, "cd")],
    ],
)
def test_a_turn_that_is_not_there_as_it_was_told_is_lost(left: list[TokenSequence]) -> None:
    verdict = verdict_of(*left)
    assert verdict.lost_turns >= 1 and verdict.spoiled == {"s"}


def test_a_log_prob_that_differs_in_its_last_bit_is_a_lost_turn() -> None:
    changed = list(WHOLE.logprobs)
    changed[-1] *= 1 + 2**-52
    verdict = verdict_of(TokenSequence(WHOLE.token_ids, WHOLE.loss_mask, changed, ()))
    assert verdict.lost_turns == 1


def test_a_turn_that_would_be_trained_on_twice_is_doubled() -> None:
    verdict = verdict_of(WHOLE, sequence(PROMPT, REPLY, "user <c1#3> go", "ef"))
    assert verdict.doubled_turns == 1 and verdict.lost_turns == 0


def test_a_trajectory_of_two_conversations_or_two_branches_is_mixed() -> None:
    for other in ("user <c7#9> go", "user <c1#2> go user <c1#3> go"):
        verdict = verdict_of(WHOLE, sequence(PROMPT + REPLY, "", other, "ef"))
        assert verdict.mixed_trajectories == 1, other


def test_a_deleted_session_that_is_listed_has_come_back() -> None:
    verdict = verdict_of(WHOLE, listed=("s", "gone"))
    assert verdict.returned_sessions == 1 and verdict.spoiled == {"gone"}


def test_of_a_session_that_is_being_deleted_nothing_is_certain() -> None:
    leaving = episode()
    leaving.fate = "deleting"
    assert judge([leaving], (), (), {}, decode).turns_checked == 0  # type: ignore[arg-type]


def test_answers_are_read_whole_and_streamed() -> None:
    bundle = {
        "prompt_token_ids": [1],
        "generation_token_ids": [2],
        "generation_log_probs": [-0.5],
    }
    message = {"role": "assistant", "content": "b", **bundle}
    body = {"choices": [{"message": message}], "recorded": False}
    answer = Answer.read(Reply(200, json.dumps(body).encode()))
    assert answer.bundle == Acknowledged([1], [2], [-0.5]) and not answer.recorded

    def stream(*events: object) -> Reply:
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return Reply(200, "".join(lines).encode())

    first = {"choices": [{"delta": {"content": "a"}}]}
    last = {"choices": [{"delta": {"content": "b", **bundle}}]}
    whole = stream(first, last)
    done = Reply(200, whole.body + b"data: [DONE]\n\n")
    answer = Answer.read(done)
    assert answer.text == "ab" and answer.recorded and answer.bundle is not None
    assert Answer.read(whole).trouble  # cut: nobody was told anything
    failed = Answer.read(stream(first, {"error": {"message": "no room", "code": 507}}))
    assert failed.status == 507 and not failed.trouble
    assert Answer.read(Reply(500, b"500 Internal Server Error")).trouble


async def test_clients_that_are_slow_or_vanish() -> None:
    arrived: list[str] = []

    async def echo(request: web.Request) -> web.StreamResponse:
        try:
            raw = await request.read()
        except ConnectionError:
            arrived.append("cut")
            raise
        arrived.append("whole")
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(raw), 7):
            await response.write(raw[start : start + 7])
        return response

    app = web.Application()
    app.router.add_post("/echo", echo)
    async with TestServer(app) as server:
        assert server.port is not None
        address = Address("127.0.0.1", server.port)
        body = b"x" * 300
        for manner in (Manner(), Manner(send_pause=0.001), Manner(read_pause=0.0001)):
            assert await call(address, "POST", "/echo", body, manner=manner) == Reply(200, body)
        for manner in (Manner(vanish="request"), Manner(vanish="answer")):
            with pytest.raises(Vanished):
                await call(address, "POST", "/echo", body, manner=manner)


async def test_an_answer_that_is_cut_is_no_answer() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    async with server:
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        with pytest.raises(EOFError):
            await call(address, "GET", "/")


async def test_a_gateway_that_does_not_answer_is_a_hang() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        agents = Agents(lambda: address, "m", count=3, seed=0, bound=0.05)
        agents.start()
        agents.release()
        while agents.ledger.hangs < 3:
            agents.raise_failures()
            await asyncio.sleep(0.01)
        agents.hold()
        await agents.wait_idle()
        await agents.stop()
    assert agents.ledger.acknowledged == 0


def test_a_small_disk_is_filled_freed_and_gone(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "disk", mebibytes=1)
    if not disk.mounted:
        disk.close()
        pytest.skip("mounting a tmpfs is not permitted here")
    with disk.journal.open("ab", buffering=0) as file:
        file.write(b"a line\n")
        disk.fill(os.getpid())
        assert file.write(b"x" * 8192) < 8192  # short: the rest of the last page
        with pytest.raises(OSError, match="No space"):
            file.write(b"x")
        disk.free(os.getpid())
        assert file.write(b"x" * 8192) == 8192
    disk.close()
    assert not disk.left_behind


def test_the_old_recorder_makes_the_old_mistakes(tmp_path: Path) -> None:
    """A line that is cut short takes the next one with it, and parents go wrong behind them."""

    def turn(parent: str | None, token: int) -> Turn:
        return Turn("s", "m", f"h{token}", [], [token], [-1.0], "stop", None, None, parent=parent)

    path = tmp_path / "journal.jsonl"
    recorder = OldRecorder(path)
    session = recorder.open("s")
    other = recorder.open("other")
    first, second, third, fourth = (turn(None, number) for number in range(1, 5))
    for cut in (first, second):  # of another conversation
        assert recorder.add(session, cut)
    os.truncate(path, path.stat().st_size - 40)  # as a full disk does, and then there is room
    assert recorder.add(session, third) and recorder.add(session, fourth)
    assert recorder.add(session, turn(fourth.id, 5))
    recorder.forget("other")
    assert recorder.add(other, Turn("other", "m", "h", [], [9], [-1.0], "stop", None, None))
    recorder.close()
    again = OldRecorder(path)
    kept = [sequence.token_ids for sequence in again.sessions["s"].trajectories()]
    # Two turns are gone, and the last does not go on from the fourth any more.
    assert kept == [[1], [4], [5]]
    assert "other" in again.sessions
    again.close()


def test_a_round_that_did_not_strike_proves_nothing() -> None:
    report = GatewayReport(turns_checked=5, detail=[GatewayRound(1, FAULTS[0], struck=True)])
    assert report.is_clean
    report.detail.append(GatewayRound(2, FAULTS[1]))
    assert not report.is_clean and not report.broken
    report.lost_turns = 1
    assert report.broken == ["lost_turns"]


def test_a_load_that_grows_is_not_flat() -> None:
    load = GatewayLoad(first=Tenth(300, 100, 1.0, 0, 1), last=Tenth(310, 100, 1.0, 10, 1))
    load.memory_ratio = 310 / 300
    assert load.flat
    for name, value in (("descriptors", 400), ("journal_mib", 20.0), ("log_per_request", 3000)):
        kept = getattr(load.last, name)
        setattr(load.last, name, value)
        assert not load.flat, name
        setattr(load.last, name, kept)
    load.memory_ratio = 1.5
    assert not load.flat
