"""The recipe as verl itself loads it: config, dataset, reward and tool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.retool import train
from tests.unit.verl.retool_rows import ROWS

MODEL = "actor_rollout_ref.model.path=some/model"


# --- Without verl ---


def test_the_users_overrides_replace_defaults() -> None:
    chosen = train.list_overrides(["data.train_batch_size=8", "++algorithm.adv_estimator=rloo"])
    assert chosen[-2:] == ["data.train_batch_size=8", "++algorithm.adv_estimator=rloo"]
    keys = [override.lstrip("+").partition("=")[0] for override in chosen]
    assert len(keys) == len(set(keys))


def test_print_shows_the_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    train.main(["--print", MODEL])
    printed = capsys.readouterr().out.splitlines()
    assert "actor_rollout_ref.rollout.name=dynamo" in printed and printed[-1] == MODEL


def test_a_model_must_be_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", train.__name__], cwd=train.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "There is no model to train." in done.stderr


def test_the_slurm_example_is_a_script() -> None:
    script = Path(__file__).parents[3] / "examples" / "retool" / "retool.slurm"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert train.__name__ in script.read_text()


# --- With verl ---


def test_unmodified_verl_composes_the_config() -> None:
    pytest.importorskip("verl")
    command = [sys.executable, "-m", train.__name__, MODEL, "data.train_batch_size=8", "--cfg=job"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=train.ROOT)
    for line in ("name: dynamo", "name: ReToolDataset", "default_agent_loop: tool_agent"):
        assert line in done.stdout
    assert "train_batch_size: 8" in done.stdout


def data_config(**more: Any) -> Any:
    from omegaconf import OmegaConf

    custom = {name: train.DEFAULTS[f"data.custom_cls.{name}"] for name in ("path", "name")}
    return OmegaConf.create({"custom_cls": custom, "filter_overlong_prompts": False, **more})


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One file of each source, with three rows."""
    pytest.importorskip("verl")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    paths = []
    for source, row in ROWS.items():
        path = tmp_path / source / "train.parquet"
        path.parent.mkdir()
        datasets.Dataset.from_list([row] * 3).to_parquet(str(path))
        paths.append(str(path))
    return paths


def test_verl_loads_every_source_into_one_dataset(files: list[str]) -> None:
    from verl.trainer.ppo.utils import create_rl_dataset

    dataset = create_rl_dataset(files, data_config(), tokenizer=None, processor=None)
    assert len(dataset) == 9
    rows = [dataset[index] for index in range(9)]
    assert [row["data_source"] for row in rows[::3]] == list(ROWS)
    assert {row["agent_name"] for row in rows} == {"tool_agent"}
    assert [row["index"] for row in rows] == [0, 1, 2] * 3
    assert all(row["raw_prompt"] == rows[0]["raw_prompt"] for row in rows)
    directory = create_rl_dataset([str(Path(files[1]).parent)], data_config(), None, None)
    assert directory[0]["raw_prompt"] == rows[0]["raw_prompt"]


def test_max_samples_keeps_the_rows_that_verl_keeps(files: list[str], tmp_path: Path) -> None:
    from verl.trainer.ppo.utils import create_rl_dataset
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from examples.retool.datasets import write_parquet

    written = tmp_path / "out" / "aime_2024.parquet"
    assert write_parquet(files[1], written) == 3
    config = data_config(shuffle=True, seed=11)
    ours = create_rl_dataset([files[1]], config, None, None, max_samples=2)
    theirs = RLHFDataset([str(written)], None, config, max_samples=2)
    again = create_rl_dataset([str(written)], config, None, None, max_samples=2)
    for mine, verls, mapped_twice in zip(ours, theirs, again, strict=True):
        for key in ("raw_prompt", "reward_model", "extra_info", "agent_name", "data_source"):
            assert mine[key] == verls[key]
        assert mapped_twice["raw_prompt"] == verls["raw_prompt"]


def test_wrong_answers_score_higher_with_calls() -> None:
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl.trainer.ppo.reward import get_custom_reward_fn

    function = {
        name: train.DEFAULTS[f"reward.custom_reward_function.{name}"] for name in ("path", "name")
    }
    score = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": function}}))
    assert score is not None

    def score_of(solution: str, turns: int | None) -> dict[str, Any]:
        return score(
            data_source="aime_2025",
            solution_str=solution,
            ground_truth="4",
            extra_info={"num_turns": turns},
        )

    assert score_of(r"so \boxed{4}", 2) == {"score": 1.0, "acc": True, "pred": "4"}
    assert score_of("so 4", 2) == {"score": -1.0, "acc": False, "pred": ""}
    assert score_of(r"\boxed{5}", 4)["score"] == pytest.approx(-0.9)
    assert score_of(r"\boxed{5}", 20)["score"] == -0.6
    with pytest.raises(Exception, match="how many turns"):
        score_of(r"\boxed{5}", None)


async def test_verl_makes_the_tool_and_calls_it() -> None:
    pytest.importorskip("verl")
    from verl.tools.tool_registry import load_all_tools

    (tool,) = load_all_tools(str(train.TOOL_CONFIG), None)
    instance, _ = await tool.create(create_kwargs={})
    response, reward, measured = await tool.execute(instance, {"code": "6 * 7"}, agent_data=None)
    assert (response.text, reward, measured["ending"]) == ("42", 0.0, "exit")
    await tool.release(instance)


async def test_the_agent_loop_gets_its_answers() -> None:
    pytest.importorskip("verl")
    pytest.importorskip("uvicorn", reason="verl's agent loop imports it")
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.experimental.agent_loop.tool_parser import FunctionCall
    from verl.tools.tool_registry import load_all_tools

    (tool,) = load_all_tools(str(train.TOOL_CONFIG), None)
    loop: Any = SimpleNamespace(
        tools={tool.name: tool}, max_tool_response_length=300, tool_response_truncate_side="middle"
    )

    async def call(arguments: Any) -> tuple[str, float]:
        function = FunctionCall(name="code_interpreter", arguments=json.dumps(arguments))
        response, reward, _ = await ToolAgentLoop._call_tool(loop, function, {}, SimpleNamespace())
        return response.text, reward

    assert await call({"code": "```python\nsum(range(5))\n```"}) == ("10", 0.0)
    assert (await call({"code": "x = 1"}))[0] == "[no output: print what you want to see]"
    assert "needs `code`" in (await call({"program": "1"}))[0]
    assert "needs `code`" in (await call([1]))[0]
    assert "ZeroDivisionError" in (await call({"code": "1/0"}))[0]


def test_the_tool_refuses_unknown_options() -> None:
    pytest.importorskip("verl")
    from examples.retool.code_tool import format_answer, make_sandbox
    from examples.retool.sandbox import Limits, Outcome
    from rollway.errors import UsageError

    with pytest.raises(UsageError, match="no option time_out"):
        make_sandbox({"type": "native", "time_out": 3})
    outcome = Outcome("1\n2\n", "", "timeout", -9, 3.0, {})
    assert format_answer(outcome, Limits(timeout=3)) == "1\n2\n[stopped after 3 s]"
