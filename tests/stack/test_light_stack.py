"""Fleet and refits over light workers: real Dynamo, a numpy engine that starts in a second."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

import rollway
from rollway.errors import RefitError, RolloutError, StartError, UsageError
from rollway.fleet.fleet import Fleet
from rollway.fleet.report import RefitMode
from rollway.fleet.updates import FromDisk
from rollway.fleet.workers import HealthListing, RlListing, StaticList, discover
from rollway.http import Http
from rollway.integrations.verl.pool import Pool
from rollway.signed_calls import REFIT, STAGE
from rollway.stack.state import ProcessState
from rollway.weights.checkpoint import read_headers
from rollway.weights.offer import Offer
from tests.conftest import Cli, Footprint
from tests.light.spec import light
from tests.stack.policies import Policy
from tests.stack.serving import LONG, SHORT, TOLERANCE, first_tokens, read_state, worst
from tests.waiting import wait_until, wait_until_async

PROMPT = list(range(40, 100))


@pytest.fixture
def stack(base_model: Path) -> Iterator[rollway.Stack]:
    with rollway.up(light(base_model, "light")) as running:
        yield running


@pytest.mark.parametrize("mode", ["pause-all", "rolling", "in-flight"])
def test_every_mode_refits_every_worker(
    stack: rollway.Stack, policies: list[Policy], mode: str
) -> None:
    warm = stack.rollouts().generate(PROMPT, SHORT, n=4)
    assert worst(policies[0], warm) < TOLERANCE
    report = stack.refit(1, policies[1].path, mode=mode)
    assert [(w.state, w.proof) for w in report.workers] == [("serving", "parameters")] * 2
    group = stack.rollouts().generate(PROMPT, SHORT, n=4)
    assert {rollout.weight_version for rollout in group} == {1}
    assert worst(policies[1], group) < TOLERANCE
    assert any(rollout.cached_tokens == 0 for rollout in group)  # one was the first


@pytest.mark.parametrize("mode", ["pause-all", "in-flight"])
async def test_a_later_refit_sends_two_requests_to_each_worker(
    base_model: Path, policies: list[Policy], mode: RefitMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them waits for a worker's event loop, also while it carries hundreds of streams."""
    urls: list[str] = []

    async def note(_: Http, method: str, url: str, body: object) -> None:
        urls.append(url)

    spec = light(base_model, "calls", LIGHT_STEP_SECONDS="0.01")
    async with rollway.aio.up(spec) as stack:
        await stack.refit(1, policies[1].path)
        await stack.unwatch()  # the watcher lists now and then
        rollouts = stack.rollouts()
        sampling = [asyncio.create_task(rollouts.generate(PROMPT, LONG, n=4)) for _ in range(4)]
        workers = await stack.fleet.workers()
        await first_tokens(stack.frontend_url, workers)
        monkeypatch.setattr(Http, "before_request", note)
        report = await stack.refit(2, policies[2].path, mode=mode)
        groups = await asyncio.gather(*sampling)
    for worker in workers:
        asked = [url for url in urls if url.startswith(worker.admin_url)]
        assert [url.rpartition("/")[2] for url in asked] == [STAGE, REFIT]
    assert [worker.calls for worker in report.workers] == [2, 2]
    assert urls.count(f"{stack.frontend_url}/health") == 2
    assert not any(url.startswith(stack.rl_url) for url in urls)
    spans = [[span.version for span in rollout.spans] for group in groups for rollout in group]
    assert all(versions in ([1], [2], [1, 2]) for versions in spans)
    assert ([1, 2] in spans) == (mode == "in-flight")


@pytest.mark.parametrize(
    ("env", "policy"),
    [
        ({}, 2),
        # The successor has the new weights already, so its answer to a canary stays the same.
        ({"LIGHT_FOREIGN": "1"}, 0),
    ],
    ids=["managed", "canary-of-the-base-weights"],
)
async def test_a_worker_that_joins_between_refits_is_listed_and_moved(
    base_model: Path, policies: list[Policy], env: dict[str, str], policy: int
) -> None:
    async with rollway.aio.up(light(base_model, "joined", **env)) as stack:
        await stack.unwatch()
        await stack.refit(1, policies[1].path)
        state = read_state("joined")
        os.kill(next(p.pid for p in state.processes if p.instance) or 0, signal.SIGKILL)
        before = {worker.instance_id for worker in await stack.fleet.workers(fresh=False)}

        async def is_replaced() -> bool:
            listed = await stack.fleet.workers()
            labels = await stack.fleet.read_versions()
            new = {w.instance_id for w in listed if w.error is None} - before
            return any(labels[instance] is not None for instance in new)

        await wait_until_async(is_replaced, 60)
        report = await stack.refit(2, policies[policy].path)
        assert report.serving == 2
        assert len({worker.proof for worker in report.workers if worker.version == 2}) == 1


@pytest.mark.parametrize("replicas", [2, 1])
async def test_verls_pool_goes_on_when_an_engine_dies(
    base_model: Path, policies: list[Policy], replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frontend lists a dead engine for 10 s. Also a pool's only engine may die. verl itself,
    whose place its calls take here, is in another environment (tests/verl/test_deaths.py)."""
    replica = ModuleType("verl.workers.rollout.replica")
    replica.TokenOutput = SimpleNamespace  # type: ignore[attr-defined]
    for name in ("verl", "verl.workers", "verl.workers.rollout"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, replica.__name__, replica)
    rollout = SimpleNamespace(
        engine_kwargs={"dynamo": {"abort_seconds": 30}},
        prompt_length=8,
        response_length=8,
        tensor_model_parallel_size=1,
    )
    pool = Pool("hybrid", rollout, SimpleNamespace(path=str(base_model)), expected=replicas)

    async def update(version: int) -> None:
        """Make verl's calls for engines on GPUs of their own."""
        where = {"path": str(policies[version].path)}
        await pool.abort_all_requests()
        await pool.refit(Offer("files", version, "identity", 1, where).as_json(), version)
        await pool.clear_kv_cache()
        await pool.set_global_steps(version)
        await pool.resume_generation()

    killed: list[int] = []

    def list_living() -> list[int]:
        pids = (p.pid for p in read_state("verl").processes if p.instance)
        return [pid for pid in pids if pid and pid not in killed]

    async with rollway.aio.up(light(base_model, "verl", replicas)) as stack:
        pool.serve(stack)
        await update(1)
        for version in (2, 3):
            await wait_until_async(lambda: bool(list_living()), 60)
            killed.append(list_living()[0])
            os.kill(killed[-1], signal.SIGKILL)
            running = pool.generate([40, 41], {"temperature": 1.0, "logprobs": True}, "r")
            if version == 2:
                await update(version)
            output = await asyncio.wait_for(running, 60)
            assert output.extra_fields["global_steps"] == 2


def test_a_canary_verifies_workers_without_our_engine_methods(
    base_model: Path, policies: list[Policy], tmp_path: Path
) -> None:
    with rollway.up(light(base_model, "canary", LIGHT_FOREIGN="1")) as stack:
        report = stack.refit(1, policies[1].path)
        assert [w.proof for w in report.workers] == ["canary", "canary"]
        # Weights equal to the served ones look like an update that did nothing.
        with pytest.raises(RefitError, match="exactly as before the update"):
            stack.refit(2, policies[1].path)
        wrong = Policy(policies[2].path).model
        wrong.resize_token_embeddings(16)
        wrong.save_pretrained(tmp_path / "wrong")
        with pytest.raises(UsageError, match="does not fit the model that is served"):
            stack.refit(3, tmp_path / "wrong")


def test_a_second_process_continues_after_the_refits_of_the_first(
    stack: rollway.Stack, policies: list[Policy]
) -> None:
    with rollway.attach(stack.name) as other:
        assert other.rollouts().generate(PROMPT, SHORT)[0].weight_version == 0
        stack.refit(1, policies[1].path)
        group = other.rollouts().generate(PROMPT, SHORT, n=2)
        assert {rollout.weight_version for rollout in group} == {1}
        assert worst(policies[1], group) < TOLERANCE
        with pytest.raises(UsageError, match="Version 1 already names other weights"):
            other.refit(1, policies[2].path)


def test_a_restarted_worker_is_admitted_by_a_watching_process(
    stack: rollway.Stack, policies: list[Policy], cli: Cli
) -> None:
    """Also by a process that did not refit: the checkpoint is on record."""
    done = cli("fleet", "refit", str(policies[1].path), "--version", "1", "--json")
    assert done.returncode == 0, done.stderr
    first = stack.fleet.workers()[0].instance_id
    status = json.loads(cli("status", "--json").stdout)["stacks"][0]
    victim = next(p for p in status["processes"] if p["instance"] == str(first))
    subprocess.run(["kill", "-9", str(victim["pid"])], check=True)

    def is_admitted() -> bool:
        versions = stack.fleet.read_versions()
        alive = [w.instance_id for w in stack.fleet.workers() if w.error is None]
        return len(alive) == 2 and first not in alive and all(versions.get(i) == 1 for i in alive)

    wait_until(is_admitted, every=0.2)
    assert worst(policies[1], stack.rollouts().generate(PROMPT, SHORT, n=4)) < TOLERANCE


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_restarted_worker_that_nobody_watches_gets_no_plain_request(
    base_model: Path, policies: list[Policy], cli: Cli, tmp_path: Path, replicas: int
) -> None:
    """It has the base weights, and a plain client requires no version."""
    spec = tmp_path / "stack.yaml"
    spec.write_text(json.dumps(light(base_model, "alone", replicas)))
    started = cli("up", str(spec), "--json")
    assert started.returncode == 0, started.stderr
    frontend = read_state("alone").frontend

    def refit(version: int) -> None:
        path = str(policies[version].path)
        done = cli("fleet", "refit", path, "--version", str(version))
        assert done.returncode == 0, done.stderr

    def find_worker() -> ProcessState:
        return next(p for p in read_state("alone").processes if p.role == "worker")

    refit(1)
    victim = find_worker().pid
    os.kill(victim or 0, signal.SIGKILL)
    wait_until(lambda: find_worker().pid != victim and find_worker().instance is not None, 60)
    answers = [ask_plainly(frontend, [n, *PROMPT]) for n in range(24)]
    served = [answer for answer in answers if answer is not None]
    assert all(policies[1].distance(*answer) < TOLERANCE for answer in served)
    assert len(served) == (24 if replicas == 2 else 0)
    assert find_worker().state == "waiting for a refit"
    assert "out of routing" in cli("status", "alone").stdout
    assert "waits for a refit" in cli("fleet", "ls", "alone").stdout

    refit(2)
    wait_until(lambda: find_worker().state == "ready")
    wait_until(lambda: count_routed(frontend) == replicas)
    answers = [ask_plainly(frontend, [n, *PROMPT]) for n in range(8)]
    assert all(answer and policies[2].distance(*answer) < TOLERANCE for answer in answers)


def ask_plainly(
    frontend: str, prompt: list[int]
) -> tuple[list[int], list[int], list[float]] | None:
    """Ask as a client that knows nothing of Rollway; return the prompt, tokens and log-probs."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "logprobs": 1, "top_k": -1}
    body |= {"nvext": {"extra_fields": ["completion_token_ids"]}, "ignore_eos": True}
    request = urllib.request.Request(
        f"{frontend}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            reply = json.load(answer)
    except urllib.error.HTTPError:
        return None
    logprobs = reply["choices"][0]["logprobs"]["token_logprobs"]
    return prompt, reply["nvext"]["completion_token_ids"], logprobs


def count_routed(frontend: str) -> int:
    """Return to how many workers the frontend sends requests."""
    with urllib.request.urlopen(f"{frontend}/health", timeout=10) as answer:
        instances = json.load(answer)["instances"]
    return sum(entry["endpoint"] == "generate" for entry in instances)


def test_a_lost_registration_is_repaired(base_model: Path, tmp_path: Path) -> None:
    spec = light(base_model, "lost", LIGHT_LOSE_REGISTRATION=str(tmp_path / "lost"))
    with rollway.up(spec) as stack:
        assert (tmp_path / "lost").exists()
        assert len(stack.fleet.workers()) == 2


async def test_health_and_static_lists_find_the_same_workers(
    stack: rollway.Stack, policies: list[Policy]
) -> None:
    async with Http() as http:
        listed = await discover(http, RlListing(stack.rl_url))
        ports = {worker.instance_id: urlsplit(worker.admin_url).port for worker in listed}
        for worker in listed:
            # The admin port is one for all workers there: pods have an address each.
            port = ports[worker.instance_id] or 0
            seen = await discover(http, HealthListing(stack.frontend_url, system_port=port))
            assert [w.instance_id for w in seen] == [w.instance_id for w in listed]
            mine = next(w for w in seen if w.instance_id == worker.instance_id)
            assert mine.admin_url == worker.admin_url and mine.error is None
        workers = StaticList(tuple(worker.admin_url for worker in listed))
        fleet = Fleet(http, workers, secret=stack.weights_secret)
        report = await fleet.refit(5, policies[1].path)
        assert [w.state for w in report.workers] == ["serving", "serving"]
        assert set((await fleet.read_versions()).values()) == {5}


def test_bad_input_is_refused_and_nothing_changes(
    base_model: Path, policies: list[Policy], tmp_path: Path
) -> None:
    spec = {**light(base_model, "roots"), "checkpoint_roots": [str(policies[1].path.parent)]}
    with rollway.up(spec) as stack:
        before = {worker.instance_id for worker in stack.fleet.workers()}
        with pytest.raises(UsageError, match="outside the allowed checkpoint roots"):
            stack.refit(1, tmp_path)
        stack.refit(2, policies[1].path)
        with pytest.raises(UsageError, match="older than 2"):
            stack.refit(1, policies[2].path)
        with pytest.raises(UsageError, match="already names other weights"):
            stack.refit(2, policies[2].path)
        assert {worker.instance_id for worker in stack.fleet.workers()} == before
        assert set(stack.fleet.read_versions().values()) == {2}
        assert worst(policies[1], stack.rollouts().generate(PROMPT, SHORT, n=2)) < TOLERANCE


def test_another_dtype_is_accepted_only_on_request(
    stack: rollway.Stack, policies: list[Policy], tmp_path: Path
) -> None:
    halved = Policy(policies[1].path).model.half()
    halved.save_pretrained(tmp_path / "half")
    assert {header.dtype for header in read_headers(tmp_path / "half").values()} == {"F16"}
    with pytest.raises(UsageError, match=r"is F16\[.*served is F32"):
        stack.refit(1, tmp_path / "half")
    assert set(stack.fleet.read_versions().values()) == {0}


def test_the_fleet_command(stack: rollway.Stack, policies: list[Policy], cli: Cli) -> None:
    listed = json.loads(cli("fleet", "ls", "--json").stdout)["workers"]
    assert [worker["version"] for worker in listed] == [0, 0]
    assert {worker["error"] for worker in listed} == {None}
    report = cli("fleet", "refit", str(policies[1].path), "--version", "3", "--mode", "rolling")
    assert "version 3: 2 of 2 workers" in report.stdout
    assert set(json.loads(cli("fleet", "versions", "--json").stdout)["versions"].values()) == {3}
    refused = cli("fleet", "refit", str(policies[1].path), "--version", "2", "--json")
    assert refused.returncode == 2 and "older than 3" in json.loads(refused.stdout)["message"]
    assert json.loads(cli("fleet", "pause", "--mode", "abort", "--json").stdout) == {"paused": 2}
    assert json.loads(cli("fleet", "resume", "--json").stdout) == {"resumed": 2}
    assert stack.rollouts().generate(PROMPT, SHORT)[0].weight_version == 3


async def test_a_paused_fleet_is_named_to_all_who_wait_or_look(base_model: Path, cli: Cli) -> None:
    async def command(*words: str) -> str:
        return (await asyncio.to_thread(cli, *words)).stdout

    async with rollway.aio.up(light(base_model, "paused")) as stack:
        rollouts, teacher = stack.rollouts(patience=2.0), stack.teacher(patience=2.0)

        async def stream() -> None:
            async for _ in rollouts.stream(PROMPT, SHORT):
                pass

        for own in (True, False):
            await (stack.fleet.pause() if own else command("fleet", "pause"))
            for work in (rollouts.generate(PROMPT, SHORT), stream(), teacher.score([PROMPT])):
                with pytest.raises(RolloutError, match="The fleet is paused"):
                    await asyncio.wait_for(work, 20.0)
            assert (await command("fleet", "ls")).count("paused: resume it") == 2
            await wait_until_async(
                lambda: [p.state for p in read_state("paused").processes].count("paused") == 2
            )
            assert "rollway fleet resume" in await command("status")
            assert "2 workers are paused" in await command("top", "--once")
            await (stack.fleet.resume() if own else command("fleet", "resume"))
            await rollouts.generate(PROMPT, SHORT)
            await wait_until_async(
                lambda: {p.state for p in read_state("paused").processes} == {"ready"}
            )


async def test_a_version_that_is_over_and_a_dead_worker_are_named_as_the_cause(
    base_model: Path, policies: list[Policy]
) -> None:
    spec = light(base_model, "causes", LIGHT_STEP_SECONDS="0.02")
    async with rollway.aio.up(spec) as stack:
        for version in (1, 2):
            await stack.refit(version, policies[version].path)
        rollouts = stack.rollouts()
        with pytest.raises(
            RolloutError, match="No worker serves weight version 1: the fleet's is 2"
        ):
            await asyncio.wait_for(rollouts.generate(PROMPT, SHORT, version=1), 20.0)

        async def stream(started: asyncio.Event) -> str:
            try:
                async for _ in rollouts.stream(PROMPT, LONG):
                    started.set()
            except RolloutError as error:
                return str(error)
            return ""

        starts = [asyncio.Event() for _ in range(8)]
        streams = [asyncio.create_task(stream(started)) for started in starts]
        await asyncio.gather(*(started.wait() for started in starts))
        victim = next(p for p in read_state("causes").processes if p.role == "worker")
        os.kill(victim.pid or 0, signal.SIGKILL)
        errors = list(filter(None, await asyncio.gather(*streams)))
        assert errors and not any("weights changed" in error for error in errors)


def test_watch_reports_changes(stack: rollway.Stack, policies: list[Policy]) -> None:
    command = [sys.executable, "-m", "rollway.cli", "fleet", "watch", "--json", "--seconds", "0.2"]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert watching.stdout is not None
        first = [json.loads(watching.stdout.readline()) for _ in range(2)]
        assert {line["event"] for line in first} == {"joined"}
        stack.refit(1, policies[1].path)
        while (line := json.loads(watching.stdout.readline()))["version"] != 1:
            assert line["event"] == "changed"
    finally:
        watching.terminate()
        watching.wait()


async def test_128_workers_are_refitted_at_once(
    base_model: Path, policies: list[Policy], footprint: Any
) -> None:
    """4 processes with 32 workers each; `rollway bench fleet` measures it."""
    spec = light(base_model, "many", replicas=4)
    spec["models"][0]["args"] = {"count": 32}
    async with rollway.up({**spec, "warmup": False}) as stack, Http() as http:
        fleet = Fleet(http, stack.rl_url, secret=stack.weights_secret)

        async def all_listed() -> bool:
            return len(await fleet.workers()) == 128

        await wait_until_async(all_listed, every=0.2)
        report = await fleet.refit(1, FromDisk(policies[1].path))
        assert len(report.workers) == 128 and report.serving == 128
        assert {w.proof for w in report.workers} == {"parameters"}
    assert footprint.settle() == {}


def test_the_bench_of_a_fleet(base_model: Path, tmp_path: Path, cli: Cli) -> None:
    """It has a fleet of its own, which must sign what it orders."""
    (tmp_path / "stack.yaml").write_text(json.dumps(light(base_model, "benched")))
    report = cli("bench", "fleet", str(tmp_path / "stack.yaml"), "--json")
    figures = json.loads(report.stdout)
    assert report.returncode == 0 and figures["workers"] == 2, report
    assert figures["refit_seconds"] > 0 and "order_seconds" in figures


def test_workers_sleep_and_come_back_with_what_they_had_or_were_given(
    stack: rollway.Stack, policies: list[Policy]
) -> None:
    """A light worker without weights, or without memory, dies if it computes."""
    workers = {worker.instance_id for worker in stack.fleet.workers()}
    report = stack.sleep()
    assert report.asleep == 2 and report.released_bytes == 4 * 10**9
    with pytest.raises(RolloutError, match="2 workers sleep"):
        stack.rollouts(patience=1.0).generate(PROMPT, SHORT)
    with rollway.attach(stack.name) as other, pytest.raises(RolloutError, match="2 workers sleep"):
        other.rollouts(patience=1.0).generate(PROMPT, SHORT)
    report = stack.wake()
    assert [(w.state, w.version) for w in report.workers] == [("serving", 0)] * 2
    group = stack.rollouts().generate(PROMPT, SHORT, n=4)
    assert worst(policies[0], group) < TOLERANCE
    assert any(rollout.cached_tokens == 0 for rollout in group)  # the cache was dropped
    for version, level in enumerate((1, 2), 1):
        stack.sleep(level=level)
        if level == 2:
            assert [w.version for w in stack.wake().workers] == [None, None]
        refit = stack.refit(version, policies[version].path)
        assert all({"asleep", "after"} == w.memory.keys() for w in refit.workers)
        group = stack.rollouts().generate(PROMPT, SHORT, n=4)
        assert {rollout.weight_version for rollout in group} == {version}
        assert worst(policies[version], group) < TOLERANCE
    assert {worker.instance_id for worker in stack.fleet.workers()} == workers


def test_workers_sleep_by_command(stack: rollway.Stack, cli: Cli) -> None:
    def run(*arguments: str) -> tuple[int, Any]:
        done = cli("fleet", *arguments, stack.name, "--json")
        return done.returncode, json.loads(done.stdout)

    code, report = run("sleep", "--level", "1")
    assert code == 0 and report["asleep"] == 2 and report["level"] == 1
    assert [set(w["memory"]) for w in report["workers"]] == [{"before", "asleep"}] * 2
    code, refusal = run("sleep", "--level", "2")
    assert code == 2 and "sleeps at level 1 already" in refusal["message"]
    done = cli("fleet", "wake", stack.name)
    assert done.returncode == 0 and "serving" in done.stdout, done.stdout
    code, report = run("wake")
    assert [w["state"] for w in report["workers"]] == ["awake", "awake"]


def test_engines_without_sleep_mode_are_refused_with_the_fix(base_model: Path) -> None:
    with rollway.up(light(base_model, "sleepless", 1, LIGHT_NO_SLEEP_MODE="1")) as stack:
        with pytest.raises(UsageError, match="set `enable-sleep-mode: true`"):
            stack.sleep()
        assert stack.rollouts().generate(PROMPT, SHORT)[0].weight_version == 0


def test_a_model_that_does_not_start_is_named_and_ends_the_stack(
    base_model: Path, footprint: Footprint
) -> None:
    spec = light(base_model, "pair", replicas=1)
    broken = {**spec["models"][0], "name": "org/Broken.One", "module": "tests.light.missing"}
    with pytest.raises(StartError) as failure:
        rollway.up({**spec, "models": [spec["models"][0], broken]}).__enter__()
    assert "broken-one-0, a worker of the model `org/Broken.One`," in str(failure.value)
    assert footprint.settle() == {}


def test_a_missing_working_dir_is_named(base_model: Path, footprint: Footprint) -> None:
    spec = {**light(base_model, "nowhere", replicas=1), "runtime_env": {"working_dir": "/no/dir"}}
    with pytest.raises(StartError, match=r"`working_dir` of `.*`, /no/dir, is no directory"):
        rollway.up(spec).__enter__()
    assert footprint.settle() == {}
