"""Requests of each generation of prime-rl, byte for byte as they were captured, and the answers.

Bodies are those that httpx and openai wrote; only directories are filled in. Answers that a client
compares are compared as bytes, others by the fields that it reads.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.stack.policies import Policy
from tests.stack.prime_rl import (
    PrimeServer,
    broadcast,
    check_reply,
    home,
    in_module_home,
    output_dir,
    read_logprobs,
    server,
    stack,
)
from tests.stack.serving import TOLERANCE

__all__ = ["home", "in_module_home", "output_dir", "server", "stack"]  # fixtures

pytestmark = pytest.mark.stack

HTTPX = {"accept": "*/*", "accept-encoding": "gzip, deflate", "user-agent": "python-httpx/0.28.1"}
OPENAI = {
    "accept": "application/json", "accept-encoding": "gzip, deflate", "x-stainless-lang": "python",
    "user-agent": "AsyncOpenAI/Python 2.8.1", "x-session-id": "2d1c7c1be6a04a2d",
}  # fmt: skip
PROMPT = [12, 40, 77, 101, 13, 55, 21, 90]


@dataclass(frozen=True)
class Call:
    """A request, and the whole answer where the client is strict."""

    method: str
    path: str
    body: str = ""
    answer: bytes | None = None

    def send(self, server: PrimeServer, headers: dict[str, str], directory: Path) -> bytes:
        """Send it; return the body of the answer, which must be 200."""
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = self.body.replace("$DIR", str(directory)).replace("$STEP", directory.name[5:])
        sent = {**headers, "authorization": f"Bearer {server.token}"}  # $VLLM_API_KEY
        sent |= {"content-type": "application/json"} if body else {}
        try:
            connection.request(self.method, self.path, body.encode() or None, sent)
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        assert response.status == 200, (self, raw)
        assert self.answer is None or raw == self.answer, (self, raw)
        return raw


PAUSE = Call("POST", "/pause?mode=keep&clear_cache=false", answer=b'{"status":"paused"}')
RESUME = Call("POST", "/resume", answer=b'{"status":"resumed"}')
AUGUST = (
    Call("GET", "/health"),
    Call("GET", "/v1/models"),
    PAUSE,
    Call("POST", "/update_weights", '{"weight_dir":"$DIR"}'),
    RESUME,
)
MAIN = (
    Call("GET", "/health"),
    Call("GET", "/v1/models"),
    PAUSE,
    Call("POST", "/update_weights", '{"weight_dir":"$DIR","version_uid":"5f3c-$STEP"}'),
    RESUME,
    Call("POST", "/finish_session?session_id=2d1c7c1be6a04a2d"),
)
DYNAMO_PLANE = (
    Call("GET", "/v1/rl/workers"),
    Call("GET", "/v1/rl/workers"),
    Call("GET", "/health"),
    PAUSE,
    Call(
        "POST",
        "/collective_rpc",
        '{"method":"update_weights_from_path","timeout":1200,"args":["$DIR"],"kwargs":{}}',
        b'{"results":[null]}',
    ),
    RESUME,
)
UPDATES = {"August": AUGUST, "main": MAIN, "#3491": DYNAMO_PLANE}
MARKERS = {"main": (".sender_ready", ".receiver_ready", ".started", ".finished")}

GENERATE = Call(
    "POST",
    "/inference/v1/generate",
    '{"model":"tiny","token_ids":[12,40,77,101,13,55,21,90],"sampling_params":{"temperature":1.0,'
    '"top_p":1.0,"max_tokens":6,"top_k":-1,"min_p":0.0,"return_token_ids":true,"stop_token_ids":[1],'
    '"logprobs":1,"skip_special_tokens":false},"cache_salt":"3"}',
)
BRIDGED = Call(
    "POST",
    "/inference/v1/generate",
    '{"model":"tiny","token_ids":[12,40,77,101,13,55,21,90],"sampling_params":{"temperature":1.0,'
    '"top_p":1.0,"top_k":-1,"min_p":0.0,"return_token_ids":true,"routed_experts_prompt_start":4,'
    '"stop_token_ids":[1],"logprobs":1,"skip_special_tokens":false,"max_tokens":2},"cache_salt":"3",'
    '"priority":0}',
)
EVAL = Call(
    "POST",
    "/v1/chat/completions",
    '{"messages":[{"role":"user","content":"1 + 1"}],"model":"tiny","max_completion_tokens":4,'
    '"temperature":1.0}',
)


def play(server: PrimeServer, calls: Sequence[Call], directory: Path) -> dict[str, Any]:
    """Send the calls in order; return the last answer to each path."""
    raw = {call.path: call.send(server, HTTPX, directory) for call in calls}
    return {path: json.loads(answer) for path, answer in raw.items()}


@pytest.mark.parametrize(("number", "generation"), list(enumerate(UPDATES)))
def test_a_generation_updates_the_fleet_by_its_own_calls(
    server: PrimeServer, output_dir: Path, policies: list[Policy], base_model: Path,
    number: int, generation: str,
) -> None:  # fmt: skip
    policy = policies[1 + number % 2]
    markers = MARKERS.get(generation, ("STABLE", "NCCL_READY"))
    directory = broadcast(output_dir, 50 + number, policy.path, markers=markers)
    answers = play(server, UPDATES[generation], directory)
    reply = json.loads(GENERATE.send(server, OPENAI, directory))
    check_reply(reply)
    ids = reply["choices"][0]["token_ids"]
    assert policy.distance(PROMPT, ids, read_logprobs(reply)) < TOLERANCE
    if models := answers.get("/v1/models"):
        assert {"tiny", str(base_model)} == {model["id"] for model in models["data"]}
        assert {model["max_model_len"] for model in models["data"]} == {2048}
    if listing := answers.get("/v1/rl/workers"):
        check_listing(listing, server, base_model)


def check_listing(listing: dict[str, Any], server: PrimeServer, model: Path) -> None:
    """Apply the checks of #3491, which waits without an end for another listing."""
    assert listing["protocol_version"] == 1
    (worker,) = listing["workers"]
    assert worker["model"] == str(model) and worker["world_size"] == 1 and not worker.get("error")
    assert worker["admin_base_url"] == worker["system_url"] == server.url
    assert type(worker["instance_id"]) is int and worker["namespace"] and worker["component"]


def test_rollouts_of_each_generation_are_answered_where_it_looks(
    server: PrimeServer, tmp_path: Path
) -> None:
    bridged = json.loads(BRIDGED.send(server, OPENAI, tmp_path))
    check_reply(bridged)
    assert len(bridged["choices"][0]["token_ids"]) <= 2
    answer = json.loads(EVAL.send(server, OPENAI, tmp_path))
    assert answer["choices"][0]["message"]["role"] == "assistant"
