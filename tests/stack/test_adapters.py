"""LoRA adapters over the transports, on a real vLLM worker, against merged weights in torch."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rollway
from rollway.errors import AdminError, RequestFailed, RolloutError, UsageError
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.http import Http
from rollway.observe.read import Run
from rollway.observe.run_state import RunState
from rollway.rollout.completion import Completion
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import DynamoAssembly, completion_request
from rollway.stack.state import StackDir
from rollway.weights.adapter import HOME
from rollway.weights.transports.collective import CollectivePublisher
from rollway.weights.transports.delta import DeltaPublisher
from rollway.weights.transports.files import FilesPublisher
from rollway.weights.transports.nixl import NixlPublisher
from rollway.weights.transports.shm import ShmPublisher
from tests.stack.policies import ALPHA, RANK, Policy, write_adapter
from tests.stack.prime_rl import GENERATE, PrimeServer, check_reply, distance, make_request
from tests.stack.stacks import VLLM_ARGS
from tests.waiting import wait_until, wait_until_async

pytestmark = pytest.mark.stack

TOLERANCE = 1e-4
PROMPT = list(range(30, 90))
SAMPLING = Sampling(max_tokens=8, ignore_eos=True)
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"]}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def adapter_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def stack(adapter_home: Path, base_model: Path) -> Iterator[rollway.Stack]:
    args = {**VLLM_ARGS, "enable-lora": True, "max-lora-rank": 8, "max-cpu-loras": 4}
    model = {"path": str(base_model), "name": "tiny", "args": args}
    model |= {"env": {"DYN_LORA_ENABLED": "true"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLWAY_HOME", str(adapter_home))
        opening = rollway.up({"name": "adapters", "models": [model]})
        running = opening.__enter__()
    yield running
    opening.__exit__(None, None, None)
    assert not list(HOME.glob("rollway-adapters-*"))


@pytest.fixture(autouse=True)
def known_home(adapter_home: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see the home that the stack runs in."""
    monkeypatch.setenv("ROLLWAY_HOME", str(adapter_home))


def made(policy: Policy, directory: Path, seed: int) -> tuple[Policy, Tensors]:
    adapted = write_adapter(directory / f"adapter-{seed}", policy, seed)
    return adapted, load_file(directory / f"adapter-{seed}" / "adapter_model.safetensors")


async def ask(stack: rollway.Stack, model: str, **options: Any) -> Any:
    body = completion_request(model, PROMPT, SAMPLING, **options)
    async with Http() as http:
        return await http.post(f"{stack.frontend_url}/v1/completions", body, timeout=60.0)


def assert_answers(
    stack: rollway.Stack, policy: Policy, other: Policy, *, version: int = 0, **options: Any
) -> None:
    """The same prompt each time: a cached block of another version would show."""
    for _ in range(2):
        (rollout,) = stack.rollouts(**options).generate(PROMPT, SAMPLING)
        assert (rollout.adapter or "").startswith(options.get("adapter", ""))
        assert rollout.weight_version == version and rollout.logprobs is not None
        assert policy.distance(PROMPT, rollout.token_ids, rollout.logprobs) < TOLERANCE
        assert other.distance(PROMPT, rollout.token_ids, rollout.logprobs) > 0.01


async def ask_plainly(stack: rollway.Stack, model: str) -> Completion:
    """Return the answer of a model by its name, once the frontend lists it."""

    async def answer() -> Any:
        try:
            return await ask(stack, model)
        except RequestFailed as error:
            if error.status not in (404, 503):
                raise
            return None

    assembly = DynamoAssembly(SAMPLING, len(PROMPT))
    assembly.add(await wait_until_async(answer, every=0.1))
    return assembly.finish()


async def test_adapters_and_sleep_through_the_admin(
    stack: rollway.Stack, policies: list[Policy], tmp_path: Path
) -> None:
    """`DynamoAdmin` on a fresh worker; later tests load adapters of their own."""
    async with Http() as http, rollway.attach(stack.frontend_url) as client:
        admin = DynamoAdmin(http, secret=stack.weights_secret)
        (worker,) = await client.fleet.workers()
        for seed in (1, 2):  # the second under the same name, which Dynamo would ignore
            adapted = write_adapter(tmp_path / f"adapter-{seed}", policies[0], seed)
            await admin.load_lora(worker, "style", tmp_path / f"adapter-{seed}")
            answer = await ask_plainly(stack, "style")
            assert adapted.distance(PROMPT, answer.token_ids, answer.logprobs or []) < TOLERANCE
            assert policies[0].distance(PROMPT, answer.token_ids, answer.logprobs or []) > 0.01
        listed = await http.get(f"{stack.frontend_url}/v1/models", timeout=10.0)
        assert {entry["id"] for entry in listed["data"]} == {"tiny", "style"}
        await admin.unload_lora(worker, "style")
        with pytest.raises(AdminError, match="refused `unload_lora`"):
            await admin.unload_lora(worker, "style")

        with pytest.raises(UsageError, match="adapters are enabled"):
            stack.sleep(level=2)
        assert stack.sleep().asleep == 1
        with pytest.raises(RolloutError, match="1 workers sleep"):
            await client.rollouts(patience=1.0).generate(PROMPT, SAMPLING)
        assert [w.state for w in stack.wake().workers] == ["serving"]
        (rollout,) = await client.rollouts(patience=30.0).generate(PROMPT, SAMPLING)
        distance = policies[0].distance(PROMPT, rollout.token_ids, rollout.logprobs or [])
        assert rollout.weight_version == 0 and distance < TOLERANCE


@pytest.fixture
def server(stack: rollway.Stack, tmp_path: Path) -> Iterator[PrimeServer]:
    running = PrimeServer(stack.name, tmp_path).start()
    yield running
    running.end()


def test_one_name_of_prime_rl_is_the_newest_adapter(
    server: PrimeServer, policies: list[Policy]
) -> None:
    """prime-rl broadcasts under one constant name; an engine would keep the first for ever."""
    request = {**make_request(PROMPT), "model": "policy"}
    assert server.post(GENERATE, request)[0] == 404
    for step in (1, 2, 3):
        directory = server.output_dir / "broadcasts" / f"step_{step}"
        directory.mkdir(parents=True)
        adapted = write_adapter(directory, policies[0], step)
        (directory / "STABLE").touch()
        body = {"lora_name": "policy", "lora_path": f"broadcasts/step_{step}"}
        status, answer = server.post("/load_lora_adapter", body)
        assert (status, answer.get("served_as")) == (200, f"policy@{step}"), answer
        status, answer = server.post(GENERATE, request)
        assert status == 200, answer
        check_reply(answer)
        assert distance(adapted, PROMPT, answer) < TOLERANCE
    base, _, entry = server.get("/v1/models")[1]["data"]
    assert entry["id"] == "policy" and entry["parent"] == base["id"] == str(policies[0].path)
    assert entry["root"].endswith("step_3") and entry["max_model_len"] > 0
    # The base model is still itself, and evals know the alias too.
    assert distance(policies[0], PROMPT, server.generate(PROMPT)) < TOLERANCE
    chat = {"model": "policy", "messages": [{"role": "user", "content": "1"}], "max_tokens": 4}
    assert server.post("/v1/chat/completions", chat)[0] == 200
    assert server.post("/unload_lora_adapter", {"lora_name": "policy"})[0] == 200
    assert server.post(GENERATE, request)[0] == 404


def read_metric(stack: rollway.Stack, name: str) -> dict[str, float]:
    """Return the newest value of a metric in the record of the stack."""
    assert stack.record_dir is not None
    series = RunState()
    for entry in Run(stack.record_dir).read():
        series.add(entry)
    return series.values.get(name, {})


def test_versions_of_an_adapter(
    stack: rollway.Stack, policies: list[Policy], tmp_path: Path
) -> None:
    """Each answers as the base with its product added to the weights, also the older one."""
    base = policies[0]
    first, tensors = made(base, tmp_path, 1)
    second, newer = made(base, tmp_path, 2)
    with ShmPublisher() as publisher:
        offer = publisher.publish(1, tensors.items())
        assert stack.fleet.load_adapter("style", 1, offer, CONFIG) == "style@1"
        assert_answers(stack, first, base, adapter="style")
        offer = publisher.publish(2, newer.items())
        assert stack.fleet.load_adapter("style", 2, offer, CONFIG) == "style@2"
    wait_until(lambda: read_metric(stack, "rollway_adapters") == {"adapter=style": 2})
    assert_answers(stack, second, first, adapter="style")
    assert_answers(stack, first, second, adapter="style@1")
    assert_answers(stack, base, second)
    with rollway.attach(stack.frontend_url) as attached:
        assert attached.models == ["tiny"]
        (rollout,) = attached.rollouts(adapter="style@1").generate(PROMPT, SAMPLING)
    assert rollout.adapter == "style@1"


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_stays(
    stack: rollway.Stack, policies: list[Policy], tmp_path: Path
) -> None:
    second, tensors = made(policies[0], tmp_path, 2)
    name = next(iter(tensors))
    wide = {**tensors, name: torch.zeros(RANK, tensors[name].shape[1] * 2)}
    half = {other: tensor for other, tensor in tensors.items() if other != name}
    elsewhere = {other.replace("layers.0", "layers.7"): t for other, t in tensors.items()}
    with ShmPublisher() as publisher:
        for number, wrong, words in (
            (1, wide, "has shape"),
            (2, half, "only one of lora_A and lora_B"),
            (3, elsewhere, "the served model has no layer for"),
        ):
            offer = publisher.publish(number, wrong.items())
            with pytest.raises(UsageError, match=words):
                stack.fleet.load_adapter("style", 3, offer, CONFIG)
        offer = publisher.publish(4, tensors.items())
        with pytest.raises(UsageError, match="max_lora_rank"):
            stack.fleet.load_adapter("style", 3, offer, {**CONFIG, "r": 16})
        with pytest.raises(UsageError, match="alpha_pattern"):
            stack.fleet.load_adapter("style", 3, offer, {**CONFIG, "alpha_pattern": {"q": 1}})
        with pytest.raises(UsageError, match="already names other weights"):
            stack.fleet.load_adapter("style", 2, offer, {**CONFIG, "lora_alpha": 1})
    assert_answers(stack, second, policies[0], adapter="style")


@pytest.mark.parametrize("way", ["delta", "files", "collective", "nixl"])
def test_other_transports(
    stack: rollway.Stack, policies: list[Policy], tmp_path: Path, way: str
) -> None:
    """Names that never meet: each transport's adapter is one of its own."""
    if way == "nixl":
        pytest.importorskip("nixl_cu12", reason="there is no NIXL for this machine")
    with ExitStack() as cleanup:
        publisher: Any = {
            "delta": lambda: DeltaPublisher(tmp_path / "deltas"),
            "files": lambda: FilesPublisher(tmp_path / "v", policies[0].path, keep_recent=2),
            "collective": lambda: cleanup.enter_context(CollectivePublisher()),
            "nixl": lambda: cleanup.enter_context(NixlPublisher(secret=stack.weights_secret)),
        }[way]()
        before = policies[0]
        for version in (1, 2):
            adapted, tensors = made(policies[0], tmp_path, 10 + version)
            offer = publisher.publish(version, tensors.items())
            stack.fleet.load_adapter(way, version, offer, CONFIG, keep=1)
            assert_answers(stack, adapted, before, adapter=way)
            before = adapted
    stack.fleet.unload_adapter(way)


def test_a_refit_of_the_base_below_an_adapter(
    stack: rollway.Stack, policies: list[Policy], tmp_path: Path
) -> None:
    """The policy changes, the adapter stays; requests for it follow the policy's version."""
    before, tensors = made(policies[0], tmp_path, 5)
    after, _ = made(policies[1], tmp_path, 5)
    with ShmPublisher() as publisher:
        served = stack.fleet.load_adapter("deep", 1, publisher.publish(1, tensors.items()), CONFIG)
        assert_answers(stack, before, policies[0], adapter=served)
        stack.refit(1, policies[1].path)
    assert_answers(stack, after, before, version=1, adapter=served)
    with pytest.raises(RequestFailed):  # nobody has that taint any more
        asyncio.run(ask(stack, served, required_taint="rollway-v0"))
    asyncio.run(ask(stack, served, required_taint="rollway-v1"))


def test_a_restarted_worker_loads_the_adapters(
    stack: rollway.Stack, policies: list[Policy], tmp_path: Path
) -> None:
    adapted, tensors = made(policies[2], tmp_path, 6)
    stack.refit(2, policies[2].path)
    with ShmPublisher() as publisher:
        offer = publisher.publish(9, tensors.items())
        stack.fleet.load_adapter("again", 1, offer, CONFIG)
        assert_answers(stack, adapted, policies[2], version=2, adapter="again")
        state = StackDir("adapters").read()
        assert state is not None
        (worker,) = [process.id for process in state.processes if process.instance]
        assert worker is not None
        worker.send(signal.SIGKILL)
        assert_answers(stack, adapted, policies[2], version=2, adapter="again", patience=180.0)
