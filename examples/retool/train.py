"""Start a ReTool run: verl's own trainer with ReTool's settings.

    python -m examples.retool.train actor_rollout_ref.model.path=... [override ...]
    python -m examples.retool.train --print [override ...]

Every argument is passed to verl unchanged and overrides a default of the same key; `--print` prints
the resulting overrides. `python -m verl.trainer.main_ppo` with these overrides does the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.retool.datasets import AGENT, SOURCES
from rollway.errors import UsageError

PACKAGE = "pkg://examples.retool"
ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
TOOL_CONFIG = Path(__file__).with_name("code_tool.yaml")
MODEL = "actor_rollout_ref.model.path"
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"

DEFAULTS = {
    # ReTool itself.
    "data.custom_cls.path": f"{PACKAGE}.verl_dataset",
    "data.custom_cls.name": "ReToolDataset",
    "data.train_files": SOURCES["math_dapo"],
    "data.val_files": SOURCES["aime_2025"],
    "reward.custom_reward_function.path": f"{PACKAGE}.reward",
    "reward.custom_reward_function.name": "compute_score",
    f"{ROLLOUT}.name": "dynamo",
    f"{ROLLOUT}.mode": "async",
    f"{ROLLOUT}.multi_turn.enable": "True",
    f"{ROLLOUT}.multi_turn.tool_config_path": str(TOOL_CONFIG),
    f"{ROLLOUT}.multi_turn.format": "hermes",  # Qwen's; other models write tool calls differently
    f"{ROLLOUT}.agent.default_agent_loop": AGENT,
    f"{ROLLOUT}.calculate_log_probs": "True",
    "algorithm.adv_estimator": "grpo",
    # Ray's workers import this package too.
    "++ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH": PYTHONPATH,
    # Sizes to start with; verl's defaults are for one short turn.
    "data.max_prompt_length": "2048",
    "data.max_response_length": "16384",
    "data.filter_overlong_prompts": "True",
    "data.train_batch_size": "512",
    f"{ROLLOUT}.multi_turn.max_user_turns": "8",
    f"{ROLLOUT}.multi_turn.max_assistant_turns": "8",
    f"{ROLLOUT}.multi_turn.max_tool_response_length": "1024",
    f"{ROLLOUT}.n": "16",
    f"{ROLLOUT}.val_kwargs.n": "30",
    f"{ROLLOUT}.val_kwargs.do_sample": "True",
    f"{ROLLOUT}.val_kwargs.temperature": "1.0",
    f"{ROLLOUT}.val_kwargs.top_p": "0.6",
    f"{ACTOR}.ppo_mini_batch_size": "128",
    f"{ACTOR}.use_dynamic_bsz": "True",
    f"{ACTOR}.ppo_max_token_len_per_gpu": "18432",  # one prompt with its response
    f"{ACTOR}.clip_ratio_low": "0.2",
    f"{ACTOR}.clip_ratio_high": "0.28",
    f"{ACTOR}.optim.lr": "1e-6",
    "trainer.project_name": "retool",
}


def list_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the defaults that `arguments` do not set, followed by `arguments`."""
    keys = {argument.lstrip("+~").partition("=")[0] for argument in arguments}
    defaults = {key: value for key, value in DEFAULTS.items() if key.lstrip("+") not in keys}
    return [f"{key}={value}" for key, value in defaults.items()] + [*arguments]


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    overrides = list_overrides([argument for argument in arguments if argument != "--print"])
    if "--print" in arguments:
        print("\n".join(overrides))
        return
    if not any(argument.lstrip("+").startswith(f"{MODEL}=") for argument in arguments):
        raise UsageError("There is no model to train.", f"Add {MODEL}=<path or hub name>.")
    try:
        from verl.trainer import main_ppo
    except ModuleNotFoundError as error:
        if error.name != "verl":
            raise
        raise UsageError("verl is not installed.", "Run `pip install rollway[verl]`.") from None
    sys.argv = ["verl.trainer.main_ppo", *overrides]  # hydra reads its arguments there
    main_ppo.main()


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
