"""NeMo-RL's own asynchronous trainer, from a checkout, on a stack of light workers: its loop, its
collector and replay buffer in Ray's actors, its multi-turn rollouts, its loss."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.children import find_processes_in
from tests.light.spec import light
from tests.nemo_rl.environment import RECIPE, find_source, run_script
from tests.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 14
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "val_temperature": 1.0, "val_top_p": 1.0}


@pytest.fixture(scope="module")
def seen(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    spec = light(base_model, "nemo-train")
    question = {
        "config": str(find_source() / RECIPE),
        "stack": spec | {"python": sys.executable},
        "model": str(base_model),
        "steps": STEPS,
        "in_flight": False,
        "generation": {"max_new_tokens": 12, **SAMPLING},
        "vllm_cfg": {"max_model_len": 512},
        "policy": {"train_global_batch_size": 80, "make_sequence_length_divisible_by": 1},
        "data": {"num_workers": 0, "shuffle": False},
    }
    home = tmp_path_factory.mktemp("home")
    seen = run_script("drive_async_grpo.py", question, home, timeout=800)
    wait_until(lambda: not find_processes_in(home))
    return seen


def test_multi_turn_rollouts_of_nemo_rl_have_the_policys_logprobs(seen: Any) -> None:
    rollouts = seen["rollouts"]
    assert len(rollouts["turns"]) == 20 and max(rollouts["turns"]) == 3
    assert ["user", "assistant", "user", "assistant", "user", "assistant", "user"] in (
        rollouts["roles"]
    )
    assert rollouts["ends_right"] and rollouts["dtypes"] == ["torch.float32"]
    assert rollouts["mismatch"] < 1e-3


def test_a_copy_in_another_actor_generates_and_refits_nothing(seen: Any) -> None:
    assert seen["copy"]["pid"] != seen["own"]["pid"]
    assert seen["copy"]["ids"] == seen["own"]["ids"]
    assert seen["copy"]["is_flushed"] and not seen["copy"]["has_synchronizer"]


def test_every_step_refits_and_trains_on_what_was_served(seen: Any) -> None:
    assert seen["synchronizer"] == "rollway.integrations.nemo_rl.synchronizer.Synchronizer"
    versions = [refit["version"] for refit in seen["refits"]]
    assert len(seen["rewards"]) == STEPS
    # One before the rollouts, one after each step. The trainer asks whether the first is stale.
    assert versions == list(range(1, STEPS + 2))
    assert all(refit["workers"] == 2 for refit in seen["refits"])
    assert max(seen["mismatches"]) < 1e-3


def test_it_learns(seen: Any) -> None:
    rewards = seen["rewards"]
    print([round(each, 3) for each in rewards], max(seen["mismatches"]))
    assert sum(rewards[-2:]) > 2 * sum(rewards[:2]), rewards
