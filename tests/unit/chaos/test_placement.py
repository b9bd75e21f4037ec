"""Where chaos starts its own workers: on the machine's GPUs, or on its CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.target import place_workers
from chaos.traffic import TOLERANCE, Traffic
from rollway.cli import main
from rollway.errors import UsageError
from rollway.rollout.client import Rollout, Span

MODEL = {"replicas": 2, "args": {"dtype": "float32"}}


def test_workers_on_a_cpu_get_nothing_of_a_gpu() -> None:
    assert place_workers(MODEL, None, []) == MODEL


@pytest.mark.parametrize(("gpus", "visible"), [(["3"], "3"), (["0", "1"], None)])
def test_two_workers_share_one_gpu_or_have_one_each(gpus: list[str], visible: str | None) -> None:
    model = place_workers(MODEL, "cuda", gpus)
    assert model["replicas"] == 2 and model["args"]["dtype"] == "float32"
    assert model["env"].get("CUDA_VISIBLE_DEVICES") == visible
    # Two that run, and two that start before others have ended, must fit.
    assert 4 * model["args"]["gpu-memory-utilization"] < 1
    assert model["env"]["TRITON_F32_DEFAULT"] == "ieee"
    assert MODEL["args"] == {"dtype": "float32"}, "the next run has its own spec"


def test_a_device_that_the_machine_has_not_is_refused() -> None:
    with pytest.raises(UsageError, match="no GPU"):
        place_workers(MODEL, "cuda", [])
    with pytest.raises(UsageError, match="runs on a GPU"):
        place_workers(MODEL, "cpu", ["0"])


def test_a_stack_file_decides_where_its_workers_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stack.yaml").write_text("name: x\n")
    assert main(["chaos", str(tmp_path / "stack.yaml"), "--device", "cuda"]) == 2
    assert "given together" in capsys.readouterr().err


def test_the_report_says_how_close_right_tokens_came_to_the_tolerance() -> None:
    traffic = Traffic(None, None, seed=0, vocabulary=8, callers=1, hang_seconds=1.0)  # type: ignore[arg-type]
    rollout = Rollout([1], [2, 3], [-1.0, -2.0], "length", (Span(0, 2, 0, 7),), 0)
    traffic._judge_span(rollout, rollout.spans[0], 0, [-1.0 - TOLERANCE / 2, -3.0])
    assert traffic.ledger.largest_difference == pytest.approx(TOLERANCE / 2)
    assert traffic.ledger.wrong_logprobs == 1
