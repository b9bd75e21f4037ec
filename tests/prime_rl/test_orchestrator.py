"""prime-rl's own orchestrator, env servers, watcher and client, unmodified, train on Rollway.

prime-rl is not on a package index: ROLLWAY_PRIME_RL_SRC names a checkout of August 2026, and
ROLLWAY_VERIFIERS_SRC one of the verifiers of that time (its submodule deps/verifiers). Both run on
CPU in .venv-prime-rl-src, which `make setup-prime-rl` creates when the variable is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollway.integrations.prime_rl.inference import make_stack, read_config
from tests.prime_rl.environment import HERE, ROOT, SOURCE
from tests.prime_rl.training import (
    ANSWER,
    MISMATCH,
    RENDERER,
    RISE,
    STEPS,
    Adapter,
    Broadcast,
    Trainer,
    counting_env,
    report,
    run_steps,
    send_adapters,
    send_by_group,
    send_files,
)
from tests.stack.prime_rl import PrimeServer

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

VERIFIERS = "ROLLWAY_VERIFIERS_SRC"
PYTHON = ROOT / ".venv-prime-rl-src" / "bin" / "python"
# Tests of its own that need neither a GPU nor vLLM.
OWN_TESTS = (
    "test_parsers.py", "orchestrator/test_advantage.py", "orchestrator/test_algorithms.py",
    "orchestrator/test_batch.py", "orchestrator/test_curriculum.py",
    "orchestrator/test_metrics.py", "orchestrator/test_orchestrator_setup.py",
    "utils/test_client.py", "utils/test_metrics_server.py", "utils/test_pathing.py",
    "utils/test_sequence.py",
)  # fmt: skip
WRITE_CONFIG = """
import json, sys
from prime_rl.configs.inference import InferenceConfig
from prime_rl.utils.config import dump_resolved_config
config = InferenceConfig(vllm={"model": sys.argv[1], "data_parallel_size": 2, "max-num-seqs": 64})
left_out = {"deployment", "slurm", "output_dir", "dry_run"}
print(json.dumps(dump_resolved_config(config, exclude=left_out)))
"""


@dataclass
class PrimeRl:
    """A checkout of prime-rl, and the processes that were started from it."""

    source: Path
    verifiers: Path
    directory: Path
    token: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, module: str, config: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Run one of its entry points with a resolved config, as its launcher does."""
        name = f"{module.rpartition('.')[2]}-{len(self.processes)}"
        file = self.directory / f"{name}.json"
        file.write_text(json.dumps(config))
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(PYTHON), "-m", module, "@", str(file)],
                cwd=self.directory, env=self.environment(), stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def environment(self) -> dict[str, str]:
        paths = [
            HERE / "stand_ins", HERE / "plugin", self.source / "src",
            self.source / "packages/prime-rl-configs/src", self.verifiers,
        ]  # fmt: skip
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "VLLM_API_KEY": self.token,
            "TORCHDYNAMO_DISABLE": "1",  # torch would ask the stand-in of triton for its version
            "OMP_NUM_THREADS": "1",
        }

    def read_log(self, module: str) -> str:
        (log,) = self.directory.glob(f"{module}-*.log")
        return re.sub(r"\x1b\[\d+m", "", log.read_text(errors="replace"))

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def prime_rl(tmp_path: Path) -> Iterator[PrimeRl]:
    source, verifiers = os.environ.get(SOURCE), os.environ.get(VERIFIERS)
    if not source:
        pytest.skip(f"{SOURCE} names no checkout of prime-rl, which is not on a package index")
    if not PYTHON.is_file():
        pytest.skip(f"there is no .venv-prime-rl-src: run `make setup-prime-rl` with {SOURCE}")
    verifiers = verifiers or str(Path(source, "deps", "verifiers"))
    if not Path(verifiers, "verifiers").is_dir():
        pytest.skip(f"{VERIFIERS} names no checkout of verifiers, and {verifiers} is empty")
    running = PrimeRl(Path(source), Path(verifiers), tmp_path)
    yield running
    running.end()


def orchestrator_config(
    server: PrimeServer, addresses: Sequence[str], steps: int, model: Path, **more: Any
) -> dict[str, Any]:
    """Return what a user would write for a run without an [inference] block."""
    sources = [
        {"name": name, "env": counting_env(turns), "serve": {"address": address}}
        for (name, turns), address in zip(ENVS.items(), addresses, strict=True)
    ]
    client = {"base_url": f"{server.url}/v1", "admin_base_url": [f"{server.admin_url}/v1"]}
    return {
        "output_dir": ".",  # weight_dir is then relative, as in many runs
        "max_steps": steps,
        "batch_size": 80,
        "group_size": 8,
        "seq_len": 512,
        # Strictly on policy, so that the mismatch is that of the broadcast alone.
        "max_off_policy_steps": 0,
        "model": {"name": str(model), "client": client},  # it loads the tokenizer by this name
        "renderer": RENDERER,
        "rollout_transport": {"type": "filesystem"},
        "train": {"source": sources, "sampling": {"max_completion_tokens": ANSWER}},
        "concurrency": {"max_inflight": 80},
        **more,
    }


ENVS = {"counting": 1, "counting_by_tool": 2}


def start_envs(prime_rl: PrimeRl) -> list[str]:
    """Start one of prime-rl's env servers for each environment; return their addresses."""
    addresses = []
    for turns in ENVS.values():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            addresses.append(f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        serve = {"address": addresses[-1], "pool": {"type": "static", "num_workers": 1}}
        config = {"env": counting_env(turns), "serve": serve}
        prime_rl.start("prime_rl.entrypoints.env_server", config)
    return addresses


@pytest.mark.parametrize("vllm_server", ["filesystem", "nccl"], indirect=True)
def test_its_own_orchestrator_trains(
    prime_rl: PrimeRl, vllm_server: PrimeServer, base_model: Path
) -> None:
    trainer, broadcast = Trainer(base_model), vllm_server.options[-1]
    with contextlib.ExitStack() as cleanup:
        if broadcast == "nccl":  # over gloo: the workers have no GPU
            send, join = cleanup.enter_context(send_by_group(trainer, prime_rl.directory))
        else:
            send, join = send_files(trainer, prime_rl.directory), {}
        weight_broadcast = {"type": broadcast, **join}
        train(prime_rl, vllm_server, trainer, send, base_model, weight_broadcast=weight_broadcast)


def test_its_own_orchestrator_trains_adapters(
    prime_rl: PrimeRl, lora_server: PrimeServer, base_model: Path
) -> None:
    trainer = Trainer(base_model, lora=True)
    send = send_adapters(trainer, prime_rl.directory)
    train(prime_rl, lora_server, trainer, send, base_model, lora="run")


def train(
    prime_rl: PrimeRl, server: PrimeServer, trainer: Trainer, send: Broadcast, model: Path,
    *, lora: str | None = None, **more: Any,
) -> None:  # fmt: skip
    """Train with prime-rl's orchestrator; assert that it has learnt, from the right weights."""
    prime_rl.token = server.token
    config = orchestrator_config(server, start_envs(prime_rl), STEPS, model, **more)
    if lora is not None:
        config["model"]["lora"] = {"name": lora, "rank": Adapter.RANK, "alpha": Adapter.ALPHA}
    orchestrator = prime_rl.start("prime_rl.entrypoints.orchestrator", config)
    try:
        steps = run_steps(trainer, prime_rl.directory, STEPS, send, orchestrator, last=False)
    except BaseException:
        print(prime_rl.read_log("orchestrator")[-6000:])
        raise
    lines = re.findall(r"Step (\d+) .* Reward ([\d.]+) .*", prime_rl.read_log("orchestrator"))
    rows = [{"step": int(step), "reward": float(reward)} for step, reward in lines]
    rise, worst = report(steps, rows)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rise > RISE and worst < MISMATCH


def test_its_own_tests_pass_in_this_environment(prime_rl: PrimeRl) -> None:
    """So what runs here is prime-rl as it was meant. Its conftest.py ends processes by name, and
    is never loaded."""
    tests = prime_rl.source / "tests" / "unit"
    ran = subprocess.run(
        [str(PYTHON), "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider",
         "-c", os.devnull, "--rootdir", str(prime_rl.source), "-o", "asyncio_mode=auto",
         *(str(tests / name) for name in OWN_TESTS)],
        cwd=prime_rl.directory, env={**prime_rl.environment(), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    print(ran.stdout.splitlines()[-1])
    assert ran.returncode == 0, ran.stdout[-3000:]


def test_the_config_that_its_launcher_writes_is_a_stack(
    prime_rl: PrimeRl, base_model: Path
) -> None:
    ran = subprocess.run(
        [str(PYTHON), "-c", WRITE_CONFIG, str(base_model)],
        env=prime_rl.environment(), capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    (prime_rl.directory / "inference.json").write_text(ran.stdout)
    config = read_config(prime_rl.directory / "inference.json")
    assert (config.port, config.admin_port) == (8000, 8100)
    (model,) = make_stack(config)["models"]
    assert (model["path"], model["replicas"]) == (str(base_model), 2)
    assert model["args"]["max-num-seqs"] == 64
