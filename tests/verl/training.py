"""Run verl's own trainer as a user would, on a machine without GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollway.demo.task import INSTRUCTION

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
VERL_PYTHON = "ROLLWAY_VERL_PYTHON"
"""Environment variable: the interpreter that has verl, if it is not that of .venv-verl."""
RAY_DIRECTORY = Path(tempfile.gettempdir(), f"rollway-ray-{os.getpid()}")
"""A short path: Ray puts sockets there, whose paths may have 107 characters."""
MAIN = "verl.trainer.main_ppo"
ANSWER = 16

Step = Mapping[str, float]


def verl_python() -> Path | None:
    path = Path(os.environ.get(VERL_PYTHON) or ROOT / ".venv-verl" / "bin" / "python")
    return path if path.is_file() else None


@dataclass
class Training:
    """One run of `verl.trainer.main_ppo`, to its end."""

    steps: list[Step]
    output: str
    returncode: int


def prepare(directory: Path, base_model: Path) -> None:
    """Write the model and data files that verl needs."""
    _copy_bare(base_model, directory / "model")
    rows = [json.dumps(_question(number)) for number in range(40)]
    (directory / "data.jsonl").write_text("\n".join(rows) + "\n")


def _copy_bare(base: Path, directory: Path) -> None:
    """Copy the demo's checkpoint with a chat template that adds nothing: its policy has learnt to
    answer questions without the marks of a chat."""
    shutil.copytree(base, directory)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))


def tie_embeddings(directory: Path) -> None:
    """Tie the prepared model's head to its embedding, and remove the head's tensor."""
    from safetensors.torch import load_file, save_file

    model = directory / "model"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def _question(number: int) -> dict[str, Any]:
    start = number % 10
    answer = "".join(str((start + 1 + i) % 10) for i in range(ANSWER))
    return {
        "data_source": "counting",
        "prompt": [{"role": "user", "content": f"{INSTRUCTION}{start}"}],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": number},
    }


def settings(directory: Path, *, trainer_gpus: int, ray_gpus: int, ray_cpus: int) -> dict[str, Any]:
    """Return the overrides that all runs share. Ray only counts the GPUs."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return {
        # The run.
        "algorithm.adv_estimator": "grpo",
        "trainer.total_training_steps": 3,
        "trainer.logger": '["console","file"]',
        "trainer.device": "cpu",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": trainer_gpus,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "data.train_files": directory / "data.jsonl",
        "data.val_files": directory / "data.jsonl",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 192,
        "data.max_response_length": ANSWER,
        "data.dataloader_num_workers": 0,
        "data.seed": 1,
        "reward.custom_reward_function.path": HERE / "plugin" / "verl_reward.py",
        "reward.num_workers": 1,
        # The policy: in float32 on both sides, and with steps that an engine cannot miss.
        "actor_rollout_ref.model.path": directory / "model",
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.optim.lr": 0.01,
        f"{actor}.ppo_mini_batch_size": 4,
        f"{actor}.ppo_micro_batch_size_per_gpu": 8,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"+{actor}.fsdp_config.mixed_precision.param_dtype": "fp32",
        # Rollouts.
        f"{rollout}.name": "dynamo",
        f"{rollout}.n": 4,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.dtype": "float32",
        f"{rollout}.max_num_seqs": 32,
        f"{rollout}.free_cache_engine": False,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 8,
        f"{rollout}.agent.num_workers": 1,
        f"+{rollout}.engine_kwargs.dynamo.python": sys.executable,
        f"+{rollout}.engine_kwargs.dynamo.log_dir": directory / "logs",
        # Ray, of this run alone. Too few CPUs would be a wait without end.
        "+ray_kwargs.ray_init.address": "local",
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init._temp_dir": RAY_DIRECTORY,
        "+ray_kwargs.ray_init.object_store_memory": 200 << 20,
        "ray_kwargs.ray_init.num_cpus": ray_cpus,
        "+ray_kwargs.ray_init.num_gpus": ray_gpus,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }


def environment(directory: Path, modules: Sequence[str] = ()) -> dict[str, str]:
    path = [ROOT / "src", ROOT, HERE / "plugin", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "VERL_USE_EXTERNAL_MODULES": ",".join(["verl_on_cpu", *modules]),
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # verl has no engine for CPUs; this one runs on any device
        "VERL_FILE_LOGGER_PATH": str(directory / "metrics.jsonl"),
        "ROLLWAY_RECORD": str(directory / "record"),
        "RAY_raylet_start_wait_time_s": "200",
        "RAY_DEDUP_LOGS": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }


def start(
    directory: Path,
    overrides: Mapping[str, Any],
    modules: Sequence[str] = (),
    module: str = MAIN,
) -> subprocess.Popen[bytes]:
    arguments = [f"{name}={value}" for name, value in overrides.items()]
    command = [str(verl_python()), "-m", module, *arguments]
    with (directory / "output.log").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=directory,
            env=environment(directory, modules),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


RUNS: list[tuple[str, list[Step]]] = []
"""The tests of this session and verl's metrics, printed at its end."""


def train(
    directory: Path,
    overrides: Mapping[str, Any],
    modules: Sequence[str] = (),
    *,
    module: str = MAIN,
    seconds: float = 900.0,
) -> Training:
    """Run to the end; kill a run that takes longer, with all its processes."""
    process = start(directory, overrides, modules, module)
    try:
        process.wait(seconds)
    finally:
        end(process)
    RUNS.append(
        (os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0], read_steps(directory))
    )
    return Training(read_steps(directory), read_output(directory), process.returncode)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a run, with Ray's processes, which are in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(RAY_DIRECTORY, ignore_errors=True)


def read_output(directory: Path) -> str:
    return (directory / "output.log").read_text(errors="replace")


def read_steps(directory: Path) -> list[Step]:
    """Return verl's metrics of each step, from its file logger."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line)["data"] for line in lines]
