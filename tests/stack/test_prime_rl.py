"""prime-rl's calls, as they were captured, against the server in front of light workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import rollway
from rollway.observe.dash.view import View
from rollway.observe.read import Run
from rollway.signed_calls import SECRET
from tests.conftest import Cli
from tests.light.spec import light
from tests.stack.policies import Policy
from tests.stack.prime_rl import (
    GENERATE,
    PAUSE,
    PrimeServer,
    broadcast,
    distance,
    home,
    in_module_home,
    make_request,
    output_dir,
    read_logprobs,
    server,
    stack,
)
from tests.stack.serving import TOLERANCE, fresh_prompt, read_state
from tests.waiting import wait_until

__all__ = ["home", "in_module_home", "output_dir", "server", "stack"]  # fixtures

pytestmark = pytest.mark.stack


def test_the_calls_of_a_start_in_their_order(
    server: PrimeServer, output_dir: Path, policies: list[Policy], base_model: Path
) -> None:
    """The orchestrator broadcasts the first weights before any rollout, by a relative path."""
    assert server.get("/health")[0] == 200
    status, models = server.get("/v1/models")
    # prime-rl loads the tokenizer of rollouts by the name of the model.
    assert status == 200 and models["data"][0]["id"] == str(base_model)
    assert models["data"][0]["max_model_len"] > 0
    broadcast(output_dir, 0, policies[1].path)
    server.update("broadcasts/step_0")
    prompt = fresh_prompt(20)
    answer = server.generate(prompt)
    assert distance(policies[1], prompt, answer) < TOLERANCE
    assert answer["weight_version"] == 1  # 0 is the checkpoint that the workers started with
    assert answer["usage"]["total_tokens"] == 20 + len(answer["choices"][0]["token_ids"])


def test_a_request_waits_at_the_gate_and_a_running_one_goes_on(
    server: PrimeServer, output_dir: Path, policies: list[Policy]
) -> None:
    prompts = [fresh_prompt(20) for _ in range(4)]
    old, new = policies[1], policies[2]
    broadcast(output_dir, 1, old.path)
    server.update("broadcasts/step_1")
    broadcast(output_dir, 2, new.path)
    with ThreadPoolExecutor(8) as pool:
        long = {"ignore_eos": True, "stop_token_ids": []}
        running = [pool.submit(server.generate, p, 300, **long) for p in prompts]
        before = server.generate(fresh_prompt(20), 100, **long)["weight_version"]
        assert server.post(PAUSE)[0] == 200
        waiting = pool.submit(server.generate, prompts[0])
        wait_until(lambda: server.metrics()["rollway_gate_waiting"] == 1)
        status, answer = server.post("/update_weights", {"weight_dir": "broadcasts/step_2"})
        assert status == 200
        # Running requests pass the gate after the swap; the new one does not.
        answers = [future.result(60) for future in running]
        assert not waiting.done()
        assert server.post("/resume")[0] == 200
        assert waiting.result(60)["weight_version"] == answer["weight_version"]
    cut = [a for a in answers if len(a["spans"]) > 1]
    assert cut and all([v for _, _, v in a["spans"]] == [before, before + 1] for a in cut)
    for prompt, done in zip(prompts, answers, strict=True):
        ids, logprobs = done["choices"][0]["token_ids"], read_logprobs(done)
        assert len(ids) == 300  # nothing lost, nothing doubled
        for start, end, version in done["spans"]:
            policy = old if version == before else new
            part = policy.distance(prompt + ids[:start], ids[start:end], logprobs[start:end])
            assert part < TOLERANCE


def test_a_repeated_update_joins_the_one_that_runs(
    server: PrimeServer, output_dir: Path, policies: list[Policy]
) -> None:
    """prime-rl repeats a call after a timeout: the workers must not change twice."""
    broadcast(output_dir, 3, policies[1].path)
    before = server.metrics()["rollway_weight_updates"]
    assert server.post(PAUSE)[0] == 200 and server.post(PAUSE)[0] == 200
    body = {"weight_dir": "broadcasts/step_3"}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.post("/update_weights", body), range(4)))
    again = server.post("/update_weights", body)  # its answer got lost
    assert {status for status, _ in (*answers, again)} == {200}
    assert len({answer["weight_version"] for _, answer in (*answers, again)}) == 1
    assert server.metrics()["rollway_weight_updates"] == before + 1
    assert server.post("/resume")[0] == 200 and server.post("/resume")[0] == 200


def test_a_resumed_run_begins_at_a_lower_step(
    server: PrimeServer, output_dir: Path, policies: list[Policy]
) -> None:
    broadcast(output_dir, 4, policies[1].path)
    server.update("broadcasts/step_4")
    version = server.generate(fresh_prompt(20))["weight_version"]
    broadcast(output_dir, 2, policies[2].path, markers=(".sender_ready", ".finished"))
    server.update("broadcasts/step_2")
    prompt = fresh_prompt(20)
    answer = server.generate(prompt)
    assert answer["weight_version"] == version + 1
    assert distance(policies[2], prompt, answer) < TOLERANCE


def test_refusals_are_4xx_and_nothing_changes(
    server: PrimeServer, stack: rollway.Stack, output_dir: Path, policies: list[Policy],
    tmp_path: Path, cli: Cli,
) -> None:  # fmt: skip
    """prime-rl repeats a 5xx for minutes, and ends with the answer of a 4xx."""
    whole = broadcast(output_dir, 20, policies[1].path)
    half = broadcast(output_dir, 22, policies[1].path)
    (half / "model-00002-of-00002.safetensors").unlink()
    outside = broadcast(tmp_path, 23, policies[1].path)
    shaped = broadcast(output_dir, 24, policies[1].path)
    file = shaped / "model-00001-of-00002.safetensors"
    save_file({name: tensor[:-1] for name, tensor in load_file(file).items()}, file)
    (shaped / "STABLE").touch()
    before = server.generate(fresh_prompt(20))["weight_version"]
    status, answer = server.post("/update_weights", {"weight_dir": str(whole)})
    assert status == 409 and "without /pause" in answer["error"]["message"]
    assert server.post(PAUSE)[0] == 200
    failures = server.metrics()["rollway_weight_update_failures"]
    for body, reason in (
        ({"weight_dir": str(half)}, "lacks weight files"),
        ({"weight_dir": str(outside)}, "outside the allowed checkpoint roots"),
        ({"weight_dir": str(shaped)}, "does not fit the model that is served"),
        ({"weight_dir": "../../etc"}, "outside the allowed checkpoint roots"),
    ):
        status, answer = server.post("/update_weights", body)
        assert status == 400 and reason in answer["error"]["message"], answer
        # prime-rl drops the answer's text, so it is said where its user looks.
        assert reason in server.log.read_text()
    assert server.metrics()["rollway_weight_update_failures"] == failures + 4
    shown = cli("status", "prime").stdout
    assert "prime-rl: /update_weights was refused. '../../etc' is absent, of another user" in shown
    wait_until(lambda: "'../../etc' is absent" in _read_bad_events(stack))
    assert server.post("/update_weights", {"weight_dir": None})[0] == 400
    assert server.post("/resume") == (200, {"status": "resumed"})
    assert server.generate(fresh_prompt(20))["weight_version"] == before
    assert server.post("/pause?mode=never")[0] == 400


def _read_bad_events(stack: rollway.Stack) -> str:
    """Return what the dashboard shows in red."""
    assert stack.record_dir is not None
    view = View()
    for entry in Run(stack.record_dir).read():
        view.add(entry)
    return "\n".join(e["detail"] for e in view.get_events() if e["level"] == "bad")


def test_a_group_that_cannot_form_is_named_twice(server: PrimeServer) -> None:
    """prime-rl ignores every answer to /init_broadcaster but 404."""
    body = {"host": "127.0.0.1", "port": 29501, "rank_offset": 0, "inference_world_size": 3,
            "timeout": 1200, "quantize_in_weight_transfer": False}  # fmt: skip
    for status, answer in (server.post("/init_broadcaster", body), server.post(PAUSE)):
        assert status == 409 and "the fleet has 2 workers" in answer["error"]["message"]
    assert server.post(PAUSE)[0] == 200  # the next run may use files
    assert server.post("/resume")[0] == 200


def test_the_fleet_is_one_virtual_worker(
    server: PrimeServer, output_dir: Path, policies: list[Policy], base_model: Path
) -> None:
    """The calls of `client.dynamo`."""
    status, listing = server.get("/v1/rl/workers")
    assert status == 200 and listing["protocol_version"] == 1
    (worker,) = listing["workers"]
    assert worker["model"] == str(base_model) and worker["world_size"] == 1
    assert "error" not in worker
    assert worker["admin_base_url"] == worker["system_url"] == server.url
    assert server.get("/v1/rl/workers")[1] == listing
    broadcast(output_dir, 31, policies[2].path)
    assert server.post(PAUSE)[0] == 200
    call = {"timeout": 60.0, "args": ["broadcasts/step_31"], "kwargs": {}}
    answer = server.post("/collective_rpc", {**call, "method": "update_weights_from_path"})
    assert answer == (200, {"results": [None]})
    assert server.post("/resume")[0] == 200
    prompt = fresh_prompt(20)
    assert distance(policies[2], prompt, server.generate(prompt)) < TOLERANCE
    assert server.post("/collective_rpc", {**call, "method": "save_sharded_state"})[0] == 403


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_ids": []}, "no token"),
        ({"token_ids": list(range(100000))}, "context length"),
        ({"stream": True}, "stream"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"sampling_params": {"stop": ["x"]}}, "stop_token_ids"),
        ({"sampling_params": {"structured_outputs": {}}}, "structured_outputs"),
        ({"sampling_params": {"n": 2}}, "n is 2"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"sampling_params": {"stop_token_ids": [1.5]}}, "stop_token_ids"),
        ({"cache_salt": 7}, "cache_salt"),
        # Refused by Dynamo's frontend: prime-rl would repeat a 5xx.
        ({"sampling_params": {"temperature": 3.0}}, "emperature"),
    ],
)
def test_a_wrong_request_is_named(
    server: PrimeServer, change: dict[str, object], reason: str
) -> None:
    status, answer = server.post(GENERATE, {**make_request([5, 6, 7]), **change})
    assert status == 400 and reason in answer["error"]["message"], answer


def test_sessions_and_unknown_models(server: PrimeServer) -> None:
    headers = {"X-Session-ID": "trace-1"}
    for _ in range(2):
        assert server.post(GENERATE, make_request([5, 6, 7]), **headers)[0] == 200
        assert server.post("/finish_session?session_id=trace-1")[0] == 200
    assert server.post("/finish_session")[0] == 400
    assert server.post(GENERATE, {**make_request([5, 6, 7]), "model": "other"})[0] == 404
    assert server.get("/liveness") == (200, {"status": "ok"})


def test_two_addresses_and_their_tokens(server: PrimeServer, output_dir: Path, home: Path) -> None:
    env = {"ROLLWAY_HOME": str(home), "ROLLWAY_GATEWAY_TOKENS": "agent"}
    env["ROLLWAY_GATEWAY_OPERATOR_TOKENS"] = "operator"
    server.end()
    other = PrimeServer("prime", output_dir, ("--admin-port", "0"), env).start()
    try:
        agent = {"Authorization": "Bearer agent"}
        operator = {"Authorization": "Bearer operator"}
        request = make_request([5, 6, 7])
        assert other.post(GENERATE, request, **agent)[0] == 200
        assert other.post(GENERATE, request)[0] == 401  # the token that the other server made
        assert other.post(PAUSE, **operator)[0] == 404  # the rollouts' address
        other.ready["url"] = other.ready["admin_url"]
        assert other.post(PAUSE, **agent)[0] == 403
        assert other.post(PAUSE, Authorization="Bearer wrong")[0] == 401
        assert other.post(GENERATE, request, **agent)[0] == 404
        assert other.get("/v1/models", **agent)[0] == 200
        assert other.post(PAUSE, **operator)[0] == 200
        assert other.post("/resume", **operator)[0] == 200
    finally:
        other.end()
        server.start()


def test_a_server_attached_by_address_does_the_same(
    server: PrimeServer,
    stack: rollway.Stack,
    output_dir: Path,
    base_model: Path,
    policies: list[Policy],
    tmp_path: Path,
) -> None:
    """As in a cluster: no files of the stack, only its addresses and its secret."""
    state = read_state("prime")
    options = ("--rl-url", state.rl, "--model", "tiny", "--tokenizer", str(base_model))
    env = {"ROLLWAY_HOME": str(tmp_path), SECRET: stack.weights_secret}
    server.end()
    other = PrimeServer(state.frontend, output_dir, options, env).start()
    try:
        broadcast(output_dir, 60, policies[1].path)
        other.update("broadcasts/step_60")
        prompt = fresh_prompt(20)
        assert distance(policies[1], prompt, other.generate(prompt)) < TOLERANCE
        assert other.post(PAUSE)[0] == 200
        other.end(kill=True)
        other.start()
        assert other.metrics()["rollway_gate_open"] == 0  # it remembers where it was
        assert other.post("/resume")[0] == 200
        versions = stack.fleet.read_versions().values()
        assert set(versions) == {other.generate(prompt)["weight_version"]}
    finally:
        other.end()
        server.start()


@pytest.mark.soak
@pytest.mark.parametrize("count", [8, 64])
def test_many_workers_behind_one_admin_url(
    base_model: Path, tmp_path: Path, policies: list[Policy], count: int
) -> None:
    """Two processes with half of the workers each; prime-rl sees one server."""
    spec = light(base_model, "many")
    spec["models"][0]["args"] = {"count": count // 2}
    with rollway.up({**spec, "warmup": False}) as many:
        wait_until(lambda: len(many.fleet.workers()) == count, 120)
        server = PrimeServer("many", tmp_path).start()
        try:
            for step in (0, 1, 2):
                policy = policies[1 + step % 2]
                broadcast(tmp_path, step, policy.path)
                server.update(f"broadcasts/step_{step}")
                assert set(many.fleet.read_versions().values()) == {step + 1}
                prompts = [fresh_prompt(20) for _ in range(2 * count)]
                with ThreadPoolExecutor(32) as pool:
                    for prompt, done in zip(
                        prompts, pool.map(server.generate, prompts), strict=True
                    ):
                        assert distance(policy, prompt, done) < TOLERANCE
        finally:
            server.end()
