"""The judge of `rollway chaos --gateway` detects every fault that it checks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.gateway import GatewayLoad, Tenth
from chaos.agents import Acknowledged, Agents, Answer, Episode
from chaos.clients import Address, Manner, Reply, Vanished, call
from chaos.control import OldStore
from chaos.gateway import FAULTS, GatewayReport, GatewayRound
from chaos.gateway_process import SmallDisk
from chaos.judge import Verdict, judge
from rollway.gateway.turns import Turn
from rollway.rollout.sequence import TokenSequence
from tests.waiting import wait_until_async

PROMPT, REPLY = "user <c1#1> go", "ab"
NEXT = "user <c1#2> go"


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def make_sequence(*parts: str, trained: bool = True) -> TokenSequence:
    """Make a sequence of alternating prompts and replies; a log-prob identifies its token."""
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for number, part in enumerate(parts):
        sampled = number % 2 == 1 and (trained or number == len(parts) - 1)
        tokens += encode(part)
        mask += [int(sampled)] * len(part)
        logprobs += [-ord(letter) / 1000 if sampled else 0.0 for letter in part]
    return TokenSequence(tokens, mask, logprobs, ())


def make_acknowledged(prompt: str, reply: str) -> Acknowledged:
    return Acknowledged(encode(prompt), encode(reply), [-ord(letter) / 1000 for letter in reply])


def make_episode() -> Episode:
    sent = {("<c1#1>",), ("<c1#1>", "<c1#2>"), ("<c1#1>", "<c1#3>")}
    turns = [make_acknowledged(PROMPT, REPLY), make_acknowledged(PROMPT + REPLY + NEXT, "cd")]
    return Episode("s", sent, turns)


def judge_sequences(*sequences: TokenSequence, listed: tuple[str, ...] = ("s",)) -> Verdict:
    return judge([make_episode()], {"gone"}, listed, {"s": list(sequences)}, decode)  # type: ignore[arg-type]


WHOLE = make_sequence(PROMPT, REPLY, NEXT, "cd")


def test_complete_turns_pass() -> None:
    fork = make_sequence(PROMPT + REPLY, "", "user <c1#3> go", "ef")
    verdict = judge_sequences(WHOLE, fork)
    assert (verdict.turns_checked, verdict.trajectories) == (2, 2)
    assert not verdict.examples and not verdict.spoiled


@pytest.mark.parametrize(
    "sequences",
    [
        [],
        [make_sequence(PROMPT, REPLY)],
        [make_sequence(PROMPT, REPLY, NEXT, "cd", trained=False)],  # the first turn is in no loss
        [make_sequence(PROMPT, "xb", NEXT, "cd")],
    ],
)
def test_a_missing_or_changed_turn_is_lost(sequences: list[TokenSequence]) -> None:
    verdict = judge_sequences(*sequences)
    assert verdict.lost_turns >= 1 and verdict.spoiled == {"s"}


def test_a_log_prob_that_differs_in_its_last_bit_is_a_lost_turn() -> None:
    changed = list(WHOLE.logprobs)
    changed[-1] *= 1 + 2**-52
    verdict = judge_sequences(TokenSequence(WHOLE.token_ids, WHOLE.loss_mask, changed, ()))
    assert verdict.lost_turns == 1


def test_a_turn_that_would_be_trained_on_twice_is_doubled() -> None:
    verdict = judge_sequences(WHOLE, make_sequence(PROMPT, REPLY, "user <c1#3> go", "ef"))
    assert verdict.doubled_turns == 1 and verdict.lost_turns == 0


def test_a_trajectory_of_two_conversations_or_two_branches_is_mixed() -> None:
    for other in ("user <c7#9> go", "user <c1#2> go user <c1#3> go"):
        verdict = judge_sequences(WHOLE, make_sequence(PROMPT + REPLY, "", other, "ef"))
        assert verdict.mixed_trajectories == 1, other


def test_a_deleted_session_that_is_listed_is_reported() -> None:
    verdict = judge_sequences(WHOLE, listed=("s", "gone"))
    assert verdict.returned_sessions == 1 and verdict.spoiled == {"gone"}


def test_sessions_that_are_being_deleted_are_not_judged() -> None:
    leaving = make_episode()
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
    assert Answer.read(whole).trouble  # truncated: no turn was acknowledged
    failed = Answer.read(stream(first, {"error": {"message": "no room", "code": 507}}))
    assert failed.status == 507 and not failed.trouble
    assert Answer.read(Reply(500, b"500 Internal Server Error")).trouble


async def test_clients_can_be_slow_or_vanish() -> None:
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


async def test_a_truncated_answer_is_an_error() -> None:
    async def send_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(send_half, "127.0.0.1", 0)
    async with server:
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        with pytest.raises(EOFError):
            await call(address, "GET", "/")


async def test_a_gateway_that_does_not_answer_counts_as_a_hang() -> None:
    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(stay_silent, "127.0.0.1", 0)
    async with server:
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        agents = Agents(lambda: address, "m", count=3, seed=0, bound=0.05)
        agents.start()
        agents.release()

        def have_all_hung() -> bool:
            agents.raise_failures()
            return agents.ledger.hangs >= 3

        await wait_until_async(have_all_hung)
        agents.hold()
        await agents.wait_idle()
        await agents.stop()
    assert agents.ledger.acknowledged_turns == 0


def test_a_small_disk_is_filled_freed_and_removed(tmp_path: Path) -> None:
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
    assert not disk.still_exists


async def test_the_old_store_makes_the_old_mistakes(tmp_path: Path) -> None:
    """A truncated line loses the next one, too, and the turns after them get wrong parents."""

    def make_turn(parent: str | None, token: int) -> Turn:
        return Turn("s", "m", f"h{token}", [], [token], [-1.0], "stop", None, None, parent=parent)

    path = tmp_path / "gateway.sqlite"
    store = OldStore(path)
    session = await store.open("s")
    other = await store.open("other")
    first, second, third, fourth = (make_turn(None, number) for number in range(1, 5))
    for damaged in (first, second):  # turns of another conversation
        assert await store.record(session, [damaged])
    os.truncate(path, path.stat().st_size - 40)  # as a disk that was full for a moment does
    assert await store.record(session, [third]) and await store.record(session, [fourth])
    assert await store.record(session, [make_turn(fourth.id, 5)])
    await store.delete("other")
    assert await store.record(other, [Turn("other", "m", "h", [], [9], [-1.0], "stop", None, None)])
    store.close()
    again = OldStore(path)
    recorded = [sequence.token_ids for sequence in (await again.open("s")).trajectories()]
    # Two turns are lost, and the last no longer continues the fourth.
    assert recorded == [[1], [4], [5]]
    assert "other" in again.sessions
    again.close()


def test_a_round_whose_fault_did_not_strike_is_not_clean() -> None:
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
        value_before = getattr(load.last, name)
        setattr(load.last, name, value)
        assert not load.flat, name
        setattr(load.last, name, value_before)
    load.memory_ratio = 1.5
    assert not load.flat
