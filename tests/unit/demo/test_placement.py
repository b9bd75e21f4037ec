"""Where the demo runs: what it would start on GPUs, and what it refuses before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st

from rollway.api import make_spec
from rollway.cli import main
from rollway.demo import run
from rollway.demo.grpo import GrpoConfig
from rollway.demo.placement import (
    GIB,
    SMALLEST_WORKER_BYTES,
    TRAINER_BYTES,
    GpuMemory,
    compute_share,
)
from rollway.demo.run import DemoOptions, describe_weights, place_model
from rollway.errors import UsageError
from rollway.stack import preset
from rollway.stack.locks import Lease
from rollway.stack.plan import ProcessPlan, plan_stack
from rollway.weights.offer import Offer

H200 = GpuMemory(free=138 * GIB, total=140 * GIB)


def give_gpus(patch: pytest.MonkeyPatch, gpus: list[str], memory: GpuMemory = H200) -> None:
    """A stand-in for a machine with GPUs."""
    patch.setattr(preset, "list_gpus", lambda: gpus)
    patch.setattr(run, "read_gpu_memory", lambda: memory)


def plan_workers(options: DemoOptions, directory: Path) -> list[ProcessPlan]:
    """Return the workers that the demo would start."""
    device, model = place_model(options, GrpoConfig())
    assert device == "cuda"
    lease = Lease()
    (directory / "config.json").write_text('{"dtype": "float32"}')  # as the demo's own model
    spec = make_spec({"name": "demo", "models": [{"path": str(directory), **model}]})
    try:
        plan = plan_stack(spec, run_id="0" * 16, run_dir=directory, log_dir=directory, ports=lease)
    finally:
        lease.release()
    return plan.by_role("worker")


def read_option(worker: ProcessPlan, name: str) -> str:
    return worker.argv[worker.argv.index(f"--{name}") + 1]


@pytest.mark.parametrize(
    ("gpus", "workers", "visible"),
    [(["3"], 1, ["3"]), (["3"], 2, ["3", "3"]), (["0", "1"], 2, ["0", "1"])],
)
def test_workers_on_gpus(
    gpus: list[str],
    workers: int,
    visible: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers share one GPU by memory, or have one each; the KV cache is small."""
    give_gpus(monkeypatch, gpus)
    plans = plan_workers(DemoOptions(workers=workers), tmp_path)
    assert [plan.env["CUDA_VISIBLE_DEVICES"] for plan in plans] == visible
    for plan in plans:
        assert float(read_option(plan, "gpu-memory-utilization")) == pytest.approx(0.0285)
        assert int(read_option(plan, "kv-cache-memory-bytes")) == 128 << 20
        assert read_option(plan, "dtype") == "float32"
        assert plan.env["TRITON_F32_DEFAULT"] == "ieee"
        assert "--enforce-eager" in plan.argv
        assert "block-size" not in plan.argv, "the CPU's profile is not for GPUs"


def test_without_a_gpu_the_workers_are_those_of_the_cpu_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preset, "list_gpus", list)
    device, model = place_model(DemoOptions(), GrpoConfig())
    assert device == "cpu"
    assert "env" not in model and "gpu-memory-utilization" not in model["args"]


def test_a_gpu_that_is_nearly_full_is_refused_with_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_gpus(monkeypatch, ["0"], GpuMemory(free=6 * GIB, total=80 * GIB))
    device, model = place_model(DemoOptions(workers=1), GrpoConfig())
    assert device == "cuda" and model["args"]["gpu-memory-utilization"] == pytest.approx(3 / 80)
    with pytest.raises(UsageError, match=r"6\.0 of 80\.0 GiB free.* 2 worker.* need 7 GiB"):
        place_model(DemoOptions(workers=2), GrpoConfig())


@given(st.integers(0, 200 * GIB), st.integers(0, 100 * GIB), st.integers(1, 16))
def test_shares_fit_beside_the_trainer(free: int, used: int, workers: int) -> None:
    memory = GpuMemory(free, free + used + GIB)
    try:
        share = compute_share(memory, workers)
    except UsageError:
        assert free < TRAINER_BYTES + workers * SMALLEST_WORKER_BYTES
    else:
        assert 0 < share < 1
        assert workers * share * memory.total <= free - TRAINER_BYTES


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--device", "cuda"], "no GPU that vLLM can use"),
        (["--device", "cuda", "--engine", "mocker"], "uses no GPU"),
    ],
)
def test_without_a_gpu_cuda_is_refused_before_anything_is_created(
    arguments: list[str],
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(preset, "list_gpus", list)
    assert main(["demo", "--out", str(tmp_path / "run"), *arguments]) == 2
    message = capsys.readouterr().err
    assert cause in message and "--device" in message
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_only_vllm_can_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preset, "list_gpus", lambda: ["0"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="torch cannot") as refusal:
        place_model(DemoOptions(), GrpoConfig())
    assert "CUDA build" in (refusal.value.hint or "")


def test_the_cpu_is_refused_where_vllm_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, ["0"])
    with pytest.raises(UsageError, match="runs on a GPU"):
        place_model(DemoOptions(device="cpu"), GrpoConfig())


def test_the_table_says_how_weights_arrive() -> None:
    offer = Offer("cuda_ipc", 1, "0" * 8, 100, {"copied_bytes": 0})
    assert describe_weights(offer) == "cuda_ipc, in place"
    packed = Offer("cuda_ipc", 1, "0" * 8, 100, {"copied_bytes": 64})
    assert describe_weights(packed) == "cuda_ipc, 64 bytes copied"
    assert describe_weights(Path("v1")) == "checkpoint"
