"""NeMo-RL's own asynchronous trainer, from a checkout, on a stack of light workers: its loop, its
collector and replay buffer in Ray's actors, its multi-turn rollouts, its loss."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rollway.observe.read import list_runs
from tests.children import find_processes_in
from tests.conftest import Cli
from tests.light.spec import light
from tests.nemo_rl.environment import RECIPE, find_source, run_script
from tests.steps import check_steps, read_steps
from tests.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, IN_FLIGHT_STEPS = 14, 4
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "val_temperature": 1.0, "val_top_p": 1.0}


def train(base_model: Path, home: Path, steps: int, *, in_flight: bool, **light_env: str) -> Any:
    """Run NeMo-RL's trainer; return what the script saw."""
    spec = light(base_model, "nemo-train", **light_env)
    question = {
        "config": str(find_source() / RECIPE),
        "stack": spec | {"python": sys.executable},
        "model": str(base_model),
        "steps": steps,
        "in_flight": in_flight,
        "rollouts": not in_flight,  # what comes before the training; once is enough
        "generation": {"max_new_tokens": 12, **SAMPLING},
        "vllm_cfg": {"max_model_len": 512},
        "policy": {"train_global_batch_size": 80, "make_sequence_length_divisible_by": 1},
        "data": {"num_workers": 0, "shuffle": False},
    }
    seen = run_script("drive_async_grpo.py", question, home, timeout=800)
    wait_until(lambda: not find_processes_in(home))
    return {**seen, "home": home}


@pytest.fixture(scope="module")
def seen(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(base_model, tmp_path_factory.mktemp("home"), STEPS, in_flight=False)


@pytest.fixture(scope="module")
def seen_in_flight(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    # Rollouts of 12 tokens take longer than an optimizer step, so they run when it ends. Workers
    # that take orders stamp every token; a rollout on others begins again on the new weights.
    slow = {"LIGHT_STEP_SECONDS": "0.7"}
    home = tmp_path_factory.mktemp("home")
    return train(base_model, home, IN_FLIGHT_STEPS, in_flight=True, **slow)


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


def test_its_steps_are_recorded_under_its_numbers(seen: Any, cli: Cli) -> None:
    """Its collector has the rollouts, in another process, which records them into the same run."""
    (record,) = list_runs(seen["home"] / "runs")
    check_steps(record, range(1, STEPS + 1), cli, generates=False)
    # The first step has those that this script made before it trained.
    assert {step["parts"]["generate"] for step in read_steps(record)[1:]} == {0.0}
    texts = [path.read_text() for path in record.glob("driver-*.jsonl")]
    assert sum('"kind":"rollouts"' in text for text in texts) >= 2


def test_it_learns(seen: Any) -> None:
    rewards = seen["rewards"]
    print([round(each, 3) for each in rewards], max(seen["mismatches"]))
    assert sum(rewards[-2:]) > 2 * sum(rewards[:2]), rewards


def test_weights_change_under_running_rollouts(seen_in_flight: Any) -> None:
    """Every token has the log-prob of a version that was served: the present one, or the one
    before. A sample that a refit cut has tokens of both."""
    seen = seen_in_flight
    assert len(seen["rewards"]) == IN_FLIGHT_STEPS
    assert [refit["version"] for refit in seen["refits"]] == list(range(1, IN_FLIGHT_STEPS + 2))
    assert max(seen["token_mismatches"]) < 1e-3
    print("samples of two versions, by step:", seen["mixed"])
    assert sum(seen["mixed"]) > 0


def test_without_updates_in_flight_no_sample_has_two_versions(seen: Any) -> None:
    assert sum(seen["mixed"]) == 0
