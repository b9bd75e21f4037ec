"""`rollway weights` and `rollway bench plan`, as they are typed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.plan import QWEN3_30B_A3B, SYNTHETIC_1T, measure
from rollway.cli import main
from rollway.weights.megatron.geometry import Topology
from rollway.weights.planning.scenario import hf_headers
from tests.checkpoints import write_checkpoint

SMALL = {
    **QWEN3_30B_A3B,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "vocab_size": 130,
}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


# --- plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "sources", "receivers"),
    [
        ("fsdp", "vllm:tp=2", 1, 2),
        ("fsdp:3", "vllm:tp=4,ep=1", 3, 4),
        ("megatron:tp=2,pp=2,ep=2,etp=1", "vllm:tp=2,ep=4", 4, 4),
        ("megatron:etp=2,ep=2", "vllm", 4, 1),
    ],
)
def test_plans_of_many_layouts_are_exact(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    source: str,
    target: str,
    sources: int,
    receivers: int,
) -> None:
    words = ["weights", "plan", "--model", str(config), "--source", source, "--target", target]
    code, shown = run(capsys, *words)
    assert code == 0
    assert len(shown["receivers"]) == receivers
    assert len({s for r in shown["receivers"].values() for s in r["bytes_by_source"]}) == sources
    for receiver in shown["receivers"].values():
        assert receiver["bytes_moved"] == receiver["bytes_needed"] > 0
        assert receiver["bytes_moved"] == sum(receiver["bytes_by_source"].values())


def test_a_plan_is_shown_as_a_table(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--source", "megatron:ep=2", "--target", "vllm:tp=2", "--wire", "5"]
    assert main(["weights", "plan", "--model", str(config), *words]) == 0
    shown = capsys.readouterr().out
    assert "rank1" in shown and "descriptors" in shown


def test_a_checkpoint_is_planned_by_its_weight_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(
        {name: np.zeros(h.shape, np.float16) for name, h in hf_headers(SMALL).items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    words = ["--model", str(tmp_path), "--source", "fsdp:2", "--target", "vllm"]
    code, shown = run(capsys, "weights", "plan", *words)
    assert code == 0
    size = (tmp_path / "model.safetensors").stat().st_size
    assert 0.9 * size < shown["receivers"]["rank0"]["bytes_moved"] < size


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("deepspeed:2", "vllm"),
        ("fsdp", "sglang:tp=2"),
        ("fsdp", "vllm:tp=x"),
        ("fsdp:x", "vllm"),
        ("megatron:tp=0", "vllm"),
        ("megatron:cp=2", "vllm"),
        ("megatron:pp=3", "vllm"),
        ("fsdp:0", "vllm"),
        ("fsdp", "vllm:tp=3"),
        ("fsdp", "vllm:tp=2,replicas=2"),
    ],
)
def test_impossible_layouts(
    config: Path, capsys: pytest.CaptureFixture[str], source: str, target: str
) -> None:
    words = ["weights", "plan", "--model", str(config), "--source", source, "--target", target]
    code, shown = run(capsys, *words)
    assert code == 2
    assert shown["error"] == "UsageError"


def test_a_speed_of_zero_is_refused(config: Path) -> None:
    words = ["--source", "fsdp", "--target", "vllm", "--wire", "0"]
    with pytest.raises(SystemExit):
        main(["weights", "plan", "--model", str(config), *words])


def test_a_tensor_that_megatron_would_not_hold_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {name: np.zeros(h.shape, np.float16) for name, h in hf_headers(SMALL).items()}
    tensors["model.strange.weight"] = np.zeros(2, np.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    words = ["--model", str(tmp_path), "--source", "megatron:tp=2", "--target", "vllm"]
    code, shown = run(capsys, "weights", "plan", *words)
    assert code == 2 and "model.strange.weight" in shown["message"]


def test_models_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--source", "fsdp", "--target", "vllm"]
    for text in ("not json", "[]", '{"model_type": "strange"}'):
        (tmp_path / "config.json").write_text(text)
        assert run(capsys, "weights", "plan", "--model", str(tmp_path), *words)[0] == 2
    assert run(capsys, "weights", "plan", "--model", str(tmp_path / "no"), *words)[0] == 2


# --- the tool for developers -----------------------------------------------------------------


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "scripts")
    return importlib.import_module("inspect_weights")


def test_tensors_of_equal_shape_are_one_group(tmp_path: Path, tool: Any) -> None:
    shapes = {f"model.layers.{n}.norm.weight": (4,) for n in range(3)} | {"lm_head.weight": (8, 4)}
    lines = tool.list_tensors(write_checkpoint(tmp_path / "a", shapes=shapes))
    assert lines[0] == f"a: 4 tensors, {4 * (12 + 32)} B"
    assert "  3 x F32[4] model.layers.*.norm.weight" in lines


def test_checkpoints_are_compared_by_element(tmp_path: Path, tool: Any) -> None:
    first, second = write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b")
    assert tool.main([str(first), str(second)]) == 0
    tensors = load_file(second / "model.safetensors")
    changed = tensors["model.norm.weight"].copy()
    changed[1] += 0.5
    changed[2] = np.nan
    save_file(
        {"model.norm.weight": changed, "new": np.zeros(3, np.int8)}, second / "model.safetensors"
    )
    assert tool.compare(first, second) == [
        "only in the first: model.embed_tokens.weight",
        "only in the second: new",
        "model.norm.weight: 2 of 4 elements differ, by 0.5 at most",
    ]
    assert tool.main([str(first), str(second)]) == 1


# --- bench ----------------------------------------------------------------------------------


def test_the_described_models_have_the_tensors_of_the_real_ones() -> None:
    headers = hf_headers(QWEN3_30B_A3B)
    assert len(headers) == 18_867
    assert sum(int(np.prod(header.shape)) for header in headers.values()) == 30_532_122_624
    assert sum(int(np.prod(h.shape)) for h in hf_headers(SYNTHETIC_1T).values()) > 10**12


def test_planning_a_large_model_is_exact() -> None:
    figures = measure(QWEN3_30B_A3B, Topology(ep=8), tp=2, repeats=1)
    assert (figures["megatron_tensors"], figures["hf_tensors"]) == (12_627, 18_867)
    assert figures["bytes_ratio"] == 1.0
    assert figures["busiest_source"] < 1.1


def test_bench_plan_prints_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.plan.QWEN3_30B_A3B", LARGER)
    monkeypatch.setattr("benchmarks.plan.SYNTHETIC_1T", LARGER)
    code, shown = run(capsys, "bench", "plan")
    assert code == 0
    assert {"seconds", "megatron_tensors", "hf_tensors", "bytes_ratio", "descriptors"} <= set(
        shown["qwen3_30b_a3b"]
    )
    assert shown["synthetic_1t"]["peak_rss_mb"] > 0
    assert main(["bench", "plan"]) == 0
    assert "qwen3_30b_a3b.ep8_to_tp2.descriptors: " in capsys.readouterr().out


LARGER = SMALL | {"num_attention_heads": 16, "num_experts": 64, "vocab_size": 256}
