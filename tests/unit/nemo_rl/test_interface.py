"""The shape of NeMo-RL's interfaces, as data, against our classes.

`tests/nemo_rl/test_setup.py` compares them with the classes of a checkout.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollway.errors import UsageError
from rollway.fleet.workers import RlListing
from rollway.integrations import nemo_rl
from rollway.integrations.nemo_rl.batches import make_output
from rollway.integrations.nemo_rl.config import parse_generation
from rollway.integrations.nemo_rl.connection import Address
from rollway.integrations.nemo_rl.generation import Generation
from rollway.integrations.nemo_rl.publish import ShardPublishing
from rollway.rollout.trajectory import Rollout, Span

EMPTY = inspect.Parameter.empty
ANY = "*args, **kwargs"
# Each parameter with its default; after "*" those that are passed by name.
GENERATION: dict[str, Mapping[str, Any] | str] = {
    "__init__": {"cluster": EMPTY, "config": EMPTY, "tokenizer": None, "tokenizer_config": None},
    "init_collective": {
        "ip": EMPTY,
        "port": EMPTY,
        "world_size": EMPTY,
        "*": None,
        "train_world_size": EMPTY,
    },
    "generate": {"data": EMPTY, "greedy": False},
    "generate_async": {"data": EMPTY, "greedy": False},
    "prepare_for_generation": ANY,
    "finish_generation": ANY,
    "pause_generation": {"*": None, "clear_cache": True},
    "resume_generation": {},
    "shutdown": {},
    "prepare_refit_info": {"state_dict_info": EMPTY},
    "update_weights_via_ipc_zmq": {},
    "update_weights_from_collective": {"refit_timeout_s": None},
    "get_collective_sender_spec": {},
    "get_inference_world_size": {},
    "prepare_nccl_reshard_refit_info": {"refit_info": EMPTY},
    "nccl_reshard_refit": {},
    "attach_fleet_health": {"monitor": EMPTY, "selector": EMPTY},
    "invalidate_kv_cache": {},
    "blocks_training": {},
    "wake_carries_weight_updates": {},
    "clear_logger_metrics": {},
    "get_logger_metrics": {},
    "update_weights_via_mx": {"*": None, "version": EMPTY, "mx_config": None},  # pull request 2429
}
WORKER: dict[str, Mapping[str, Any] | str] = {
    "stream_weights_via_mx": {
        "*": None, "version": EMPTY, "mx_config": EMPTY, "kv_scales": None,
    },
}  # fmt: skip
SYNCHRONIZER: dict[str, Mapping[str, Any] | str] = {
    "sync_weights": {"*": None, "timer": None, "kv_scales": None},
    "init_communicator": {},
    "mark_stale": {},
    "shutdown": {},
}
OUTPUT = {
    "output_ids": (torch.int64, 2),
    "logprobs": (torch.float32, 2),
    "generation_lengths": (torch.int64, 1),
    "unpadded_sequence_lengths": (torch.int64, 1),
    "truncated": (torch.bool, 1),
    "weight_versions": (torch.int64, 2),  # ours
}
CORE = {
    "rollway", "aiohttp", "msgspec", "psutil", "pydantic", "yaml", "rich", "zstandard",
    # what these import themselves
    "aiohappyeyeballs", "aiosignal", "annotated_types", "attr", "attrs", "frozenlist", "idna",
    "markdown_it", "mdurl", "multidict", "propcache", "pydantic_core", "pygments",
    "typing_extensions", "typing_inspection", "yarl",
}  # fmt: skip
ADDRESS = Address("http://10.0.0.5:8000", "m", RlListing("http://10.0.0.5:8001"), 4096, "secret")
RECIPE = {
    "backend": "dynamo",
    "dynamo_cfg": {"frontend_url": "http://10.0.0.5:8000"},
    "model_name": "m",
    "_pad_token_id": 0,
}


def describe(function: Any) -> Mapping[str, Any] | str:
    """Return the parameters of a method as the tables above have them."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return ANY
    described: dict[str, Any] = {}
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY:
            described.setdefault("*", None)
        described[each.name] = each.default
    return described


@pytest.mark.parametrize("name", GENERATION)
def test_generation_has_the_interfaces_methods(name: str) -> None:
    assert describe(getattr(Generation, name)) == GENERATION[name]


@pytest.mark.parametrize("name", SYNCHRONIZER)
def test_the_synchronizer_has_the_interfaces_methods(name: str) -> None:
    module = pytest.importorskip("rollway.integrations.nemo_rl.synchronizer")
    assert describe(getattr(module.Synchronizer, name)) == SYNCHRONIZER[name]
    assert isinstance(module.Synchronizer.is_stale, property)


@pytest.mark.parametrize("name", WORKER)
def test_policy_workers_have_the_pull_requests_methods(name: str) -> None:
    assert describe(getattr(ShardPublishing, name)) == WORKER[name]


def test_a_refit_under_the_names_of_model_express_is_the_synchronizers() -> None:
    copy = restore(RECIPE)
    with pytest.raises(UsageError, match="refits nothing"):
        copy.update_weights_via_mx(version=3)
    calls: list[str] = []
    copy.weight_synchronizer = SimpleNamespace(sync_weights=lambda: calls.append("sync"))
    assert copy.update_weights_via_mx(version=3, mx_config={}) == [] and calls == ["sync"]
    worker = ShardPublishing()
    worker.stream_weights_via_mx(version=3, mx_config={})
    with pytest.raises(UsageError, match="FP8 KV cache"):
        worker.stream_weights_via_mx(version=3, mx_config={}, kv_scales={"k": 1.0})


def test_the_gyms_dispatch_finds_its_addresses() -> None:
    """NeMo-RL gives them to Gym's actors as they are; none without a server."""
    assert restore(RECIPE).dp_openai_server_base_urls == []
    copy = object.__new__(Generation)
    cfg = parse_generation({**RECIPE, "vllm_cfg": {"expose_http_server": True}}).model_dump()
    urls = ["http://10.0.0.5:1234/v1"]
    copy.__setstate__({"cfg": cfg, "urls": urls, "address": ADDRESS})
    assert pickle.loads(pickle.dumps(copy)).dp_openai_server_base_urls == urls


def test_what_is_asked_as_an_attribute_is_there() -> None:
    assert inspect.isasyncgenfunction(Generation.generate_async)
    assert isinstance(Generation.requires_kv_scale_sync, property)
    copy = restore(RECIPE)
    assert copy.cfg["backend"] == "dynamo" and copy.frontend_url == "http://10.0.0.5:8000/v1"
    assert copy.dp_openai_server_base_urls == [] and copy.weight_synchronizer is None


def test_an_output_has_the_interfaces_keys() -> None:
    rollout = Rollout([1, 2], [3], [-0.5], "stop", (Span(0, 1, 4, 1),), 0)
    output = make_output([rollout], torch.zeros(1, 1, dtype=torch.int64), 0)
    assert {key: (value.dtype, value.ndim) for key, value in output.items()} == OUTPUT


def test_answers_that_need_no_stack() -> None:
    copy = restore(RECIPE)
    assert copy.prepare_for_generation(tags=["weights"]) is True
    assert copy.finish_generation(release_gpu=False) is True
    assert copy.blocks_training() is False and copy.wake_carries_weight_updates() is False
    assert copy.get_logger_metrics() == {} and copy.requires_kv_scale_sync is False
    copy.clear_logger_metrics()
    copy.attach_fleet_health(None, None)
    for _ in range(2):  # some heads of NeMo-RL call it twice
        assert copy.prepare_refit_info({"w": (1, 2)}) is None
    fp8 = restore({**RECIPE, "vllm_cfg": {"kv_cache_dtype": "fp8_e4m3"}})
    assert fp8.requires_kv_scale_sync is True


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("init_collective", {"ip": "a", "port": 1, "world_size": 2, "train_world_size": 1}),
        ("update_weights_via_ipc_zmq", {}),
        ("update_weights_from_collective", {}),
        ("get_collective_sender_spec", {}),
        ("prepare_nccl_reshard_refit_info", {"refit_info": {}}),
        ("nccl_reshard_refit", {}),
    ],
)
def test_calls_of_nemo_rls_own_transports_are_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=name) as raised:
        getattr(restore(RECIPE), name)(**arguments)
    assert "weight_synchronizer" in raised.value.hint


# --- copies --------------------------------------------------------------------------------------


def restore(recipe: Mapping[str, Any]) -> Generation:
    """Return a copy as an actor gets it, of a Generation that opened no stack."""
    copy = object.__new__(Generation)
    cfg = parse_generation(recipe).model_dump()
    copy.__setstate__({"cfg": cfg, "urls": [], "address": ADDRESS})
    return copy


def test_a_copy_owns_nothing() -> None:
    copy = pickle.loads(pickle.dumps(restore(RECIPE)))
    assert copy.weight_synchronizer is None and copy._connection is None and not copy._is_owner
    assert copy._sampler is None and copy._gym is None
    assert copy.shutdown() is True and copy.shutdown() is True


def test_an_empty_batch_asks_nobody() -> None:
    copy = restore(RECIPE)
    assert copy.generate({"input_ids": torch.zeros(0, 3)}) == {}

    async def collect() -> list[Any]:
        return [each async for each in copy.generate_async({"input_ids": torch.zeros(0, 3)})]

    assert asyncio.run(collect()) == [] and copy._connection is None


def test_a_copy_is_restored_without_nemo_rl_and_ray() -> None:
    """Rollout actors run in NeMo-RL's vLLM environment."""
    code = (
        "import pickle, sys; copy = pickle.load(sys.stdin.buffer);"
        "print(sorted({'ray', 'nemo_rl', 'torch', 'vllm', 'dynamo'} & set(sys.modules)))"
    )
    state = pickle.dumps(restore(RECIPE))
    done = subprocess.run([sys.executable, "-c", code], input=state, capture_output=True)
    assert done.stdout.decode().strip() == "[]", done.stderr.decode()


def test_all_modules_import_with_the_core_dependencies_only() -> None:
    """The driver and the actors have NeMo-RL's packages, an interpreter of its own has none."""
    names = [
        f"{nemo_rl.__name__}.{module.name}"
        for module in pkgutil.iter_modules(nemo_rl.__path__)
        if module.name != "auto"  # importing it plugs in, so it needs NeMo-RL
    ]
    assert len(names) >= 11
    code = f"""
import importlib, sys
core = {sorted(CORE)!r}
class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        is_own = top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        if not is_own and top not in core:
            raise ModuleNotFoundError(f"{{name}} is no dependency of the core", name=name)
sys.meta_path.insert(0, Block())
for name in {names!r}:
    importlib.import_module(name)
print(len({names!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == str(len(names)), done.stderr[-2000:]
