"""NeMo-Gym's traffic through the gateway of a run: real vLLM, tools, templates that drop text."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

import rollway
from rollway.fleet.workers import RlListing
from rollway.integrations.nemo_rl.connection import Address
from rollway.integrations.nemo_rl.gym import GymServer
from rollway.processes import ProcessId
from tests.awkward_tokenizer import REASONING
from tests.children import start_child
from tests.light.spec import ROOT
from tests.stack.tool_model import TOOL
from tests.waiting import wait_until

pytestmark = pytest.mark.stack

ROLLOUTS, SOAK_ROLLOUTS = 80, 500
TURNS = 4
JUDGE = Path(__file__).with_name("nemo_rl_judge.py")
PYTHON = Path(os.environ.get("ROLLWAY_NEMO_RL_PYTHON", ROOT / ".venv-nemo-rl" / "bin" / "python"))
SOURCE = os.environ.get("ROLLWAY_NEMO_RL_SRC", "")
KEY = {"authorization": "Bearer dummy_key"}
DRIVER = """
    import json, sys
    from rollway.fleet.workers import RlListing
    from rollway.integrations.nemo_rl.connection import Address
    from rollway.integrations.nemo_rl.gym import GymServer
    frontend, rl, secret, model = sys.argv[1:]
    address = Address(frontend, "caller", RlListing(rl, frontend), 2048, secret)
    server = GymServer(address, {}, {"name": model})
    print(json.dumps({"url": server.url, "pid": server._child.process.pid}), flush=True)
"""


@contextmanager
def serve(stack: rollway.Stack, tokenizer: dict[str, Any], **cfg: Any) -> Iterator[str]:
    listing = RlListing(stack.rl_url, stack.frontend_url)
    address = Address(stack.frontend_url, "caller", listing, 2048, stack.weights_secret)
    server = GymServer(address, cfg, tokenizer)
    try:
        yield server.url
    finally:
        server.close()
        server.close()  # the second does nothing


class Agent:
    """One rollout: asks for sums, runs the tool, and keeps what Gym keeps."""

    def __init__(self, http: aiohttp.ClientSession, url: str, number: int) -> None:
        self.http, self.url = http, url
        self.choice = random.Random(number)
        self.messages: list[dict[str, Any]] = []
        self.output: list[dict[str, Any]] = []
        self.cut = 0

    async def run(self) -> None:
        for turn in range(TURNS):
            numbers = self.choice.randint(0, 4), self.choice.randint(0, 4)
            self.messages.append({"role": "user", "content": "add {} {}".format(*numbers)})
            message = await self.ask(self.choice.choice((3, 12, 80)))
            for call in message.get("tool_calls") or []:
                self.messages.append(
                    {"role": "tool", "content": str(sum(numbers)), "tool_call_id": call["id"]}
                )
            if self.messages[-1]["role"] == "tool" and turn < TURNS - 1:
                await self.ask(80)

    async def ask(self, limit: int) -> dict[str, Any]:
        body = {
            "model": "caller", "messages": self.messages, "tools": [TOOL], "max_tokens": limit,
            "temperature": 1.0, "top_p": 1.0, "logprobs": True, "top_logprobs": 0,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip
        async with self.http.post(f"{self.url}/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            choice = (await answer.json())["choices"][0]
        self.cut += choice["finish_reason"] == "length"
        message: dict[str, Any] = choice["message"]
        self.output.append(dict(message))
        # Gym sends reasoning back inside the text; the template drops it from earlier turns.
        if self.choice.random() < 0.5:
            thought = "<think>\nthe other tide\n</think>\n\n"
            message["content"] = thought + (message.get("content") or "")
        self.messages.append(message)
        return message

    @property
    def result(self) -> dict[str, Any]:
        """What Gym returns to NeMo-RL."""
        return {
            "response": {"output": self.output},
            "responses_create_params": {"input": self.messages[:1]},
            "reward": 1.0,
        }


async def run_agents(url: str, numbers: range) -> list[Agent]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=KEY) as http:
        agents = [Agent(http, url, number) for number in numbers]
        await asyncio.gather(*(agent.run() for agent in agents))
    return agents


def check_contiguous(output: list[dict[str, Any]]) -> None:
    """Check as NeMo-RL does: every prompt begins with all tokens before it."""
    seen: list[int] = []
    for item in output:
        assert seen == item["prompt_token_ids"][: len(seen)]
        assert len(item["generation_token_ids"]) == len(item["generation_log_probs"]) > 0
        seen = item["prompt_token_ids"] + item["generation_token_ids"]


def run_both_templates(
    stack: rollway.Stack, model: Path, home: Path, count: int, at_once: int
) -> list[Agent]:
    """Half of the rollouts have the model's own template, half one that drops reasoning."""
    finished = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(home))
        for start, template in ((0, "default"), (count // 2, REASONING)):
            tokenizer = {"name": str(model), "chat_template": template}
            with serve(stack, tokenizer) as url:
                for first in range(start, start + count // 2, at_once):
                    numbers = range(first, min(first + at_once, start + count // 2))
                    finished += asyncio.run(run_agents(url, numbers))
    return finished


def check_all(agents: list[Agent], count: int) -> None:
    """Check that every rollout is contiguous, and that each kind of trouble came about: calls of
    tools, turns cut short, reasoning that was dropped."""
    for agent in agents:
        check_contiguous(agent.output)
    assert len(agents) == count and min(len(agent.output) for agent in agents) >= TURNS
    assert any(message["role"] == "tool" for agent in agents for message in agent.messages)
    assert any(agent.cut for agent in agents)
    thoughts = [m for a in agents for m in a.messages if "<think>" in str(m.get("content"))]
    assert len(thoughts) > count


@pytest.fixture(scope="module")
def agents(
    tool_stack: rollway.Stack, tool_model: Path, session_home: Path
) -> Iterator[list[Agent]]:
    yield run_both_templates(tool_stack, tool_model, session_home, ROLLOUTS, ROLLOUTS // 2)


def test_every_rollout_is_contiguous(agents: list[Agent]) -> None:
    check_all(agents, ROLLOUTS)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_five_hundred_rollouts_are_contiguous(
    tool_stack: rollway.Stack, tool_model: Path, session_home: Path
) -> None:
    agents = run_both_templates(tool_stack, tool_model, session_home, SOAK_ROLLOUTS, 50)
    check_all(agents, SOAK_ROLLOUTS)
    print(f"{len(agents)} rollouts, {sum(len(agent.output) for agent in agents)} turns")


@pytest.mark.skipif(not SOURCE, reason="ROLLWAY_NEMO_RL_SRC names no checkout of NeMo-RL")
@pytest.mark.skipif(not PYTHON.exists(), reason=f"no environment of NeMo-RL at {PYTHON}")
def test_nemo_rl_accepts_every_rollout(agents: list[Agent], tool_model: Path) -> None:
    good = [agent.result for agent in agents]
    broken = json.loads(json.dumps(good[0]))  # the control
    broken["response"]["output"][1]["prompt_token_ids"][0] += 1
    job = {"tokenizer": str(tool_model), "results": [*good, broken]}
    judge = subprocess.run(
        [PYTHON, JUDGE], input=json.dumps(job), capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": SOURCE, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert judge.returncode == 0, judge.stderr[-2000:]
    *verdicts, control = json.loads(judge.stdout.splitlines()[-1])
    assert "Non-contiguous" in control["error"]
    for verdict, agent in zip(verdicts, agents, strict=True):
        assert verdict["roles"] == ["user", "assistant"] * len(agent.output), verdict
        assert verdict["dtypes"] == ["torch.int64"] and verdict["logprobs"] == ["torch.float32"]
        last = agent.output[-1]
        whole = len(last["prompt_token_ids"]) + len(last["generation_token_ids"])
        assert sum(verdict["lengths"]) == whole


def is_in_session(pid: int, session: int) -> bool:
    """Return whether a process lives in a session; a zombie does not live."""
    try:
        process = ProcessId.of(pid)
        return os.getsid(pid) == session and process is not None and process.alive
    except ProcessLookupError:
        return False


def test_the_gateway_ends_with_a_killed_driver(tool_stack: rollway.Stack, tool_model: Path) -> None:
    arguments = (tool_stack.frontend_url, tool_stack.rl_url, tool_stack.weights_secret)
    driver, line = start_child(DRIVER, *arguments, str(tool_model))
    started = json.loads(line)
    gateway, port = ProcessId.of(started["pid"]), urlsplit(started["url"]).port
    assert gateway is not None
    (agent,) = asyncio.run(run_agents(started["url"], range(1)))
    check_contiguous(agent.output)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not gateway.alive, 30.0)
    # It had a session of its own: whatever it could have started is in it.
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    assert [pid for pid in pids if is_in_session(pid, gateway.pid)] == []
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), 5.0):
        pass
