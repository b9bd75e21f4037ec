"""`rollway weights` and `rollway bench plan`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rollway.bench.plan import QWEN3_30B_A3B, SYNTHETIC_1T, measure
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
        ("hf", "vllm:tp=2", 1, 2),
        ("fsdp:3", "vllm:tp=4,ep=1", 3, 4),
        ("megatron:tp=2,pp=2,ep=2,etp=1", "vllm:tp=2,ep=4", 4, 4),
        ("megatron:etp=2,ep=2", "hf", 4, 1),
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
    assert len(shown["total"]["bytes_by_source"]) == sources
    assert shown["total"]["bytes_ratio"] == 1.0 or shown["total"]["bytes_beyond_need"]
    assert shown["total"]["bytes_needed"] == sum(
        receiver["bytes_needed"] for receiver in shown["receivers"].values()
    )


def test_a_plan_is_shown_as_a_table_with_its_fan_out(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--source", "megatron:ep=2", "--target", "vllm:tp=2,replicas=4"]
    assert main(["weights", "plan", "--model", str(config), *words]) == 0
    shown = capsys.readouterr().out
    assert "rank1" in shown
    assert "fan-out, level 1: replica0 -> replica1, replica0 -> replica2" in shown


def test_the_plan_explains_why_a_source_that_cannot_pack_moves_more(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--source", "hf", "--target", "vllm:tp=2", "--pack", "0"]
    assert main(["weights", "plan", "--model", str(config), *words]) == 0
    assert "more than needed: " in capsys.readouterr().out


def test_a_checkpoint_is_planned_by_its_weight_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(
        {name: np.zeros(h.shape, np.float16) for name, h in hf_headers(SMALL).items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    words = ["--model", str(tmp_path), "--source", "fsdp:2", "--target", "hf"]
    code, shown = run(capsys, "weights", "plan", *words)
    assert code == 0
    size = (tmp_path / "model.safetensors").stat().st_size
    assert 0.9 * size < shown["total"]["bytes_moved"] < size


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("deepspeed:2", "hf"),
        ("hf", "sglang:tp=2"),
        ("hf", "vllm:tp=x"),
        ("hf:2", "hf"),
        ("megatron:tp=0", "hf"),
        ("megatron:cp=2", "hf"),
        ("fsdp:0", "hf"),
        ("hf", "vllm:tp=3"),
        ("hf", "vllm:tp=2,replicas=0"),
    ],
)
def test_impossible_layouts(
    config: Path, capsys: pytest.CaptureFixture[str], source: str, target: str
) -> None:
    words = ["weights", "plan", "--model", str(config), "--source", source, "--target", target]
    code, shown = run(capsys, *words)
    assert code == 2
    assert shown["error"] == "UsageError"


def test_models_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--source", "hf", "--target", "hf"]
    for text in ("not json", "[]", '{"model_type": "strange"}'):
        (tmp_path / "config.json").write_text(text)
        assert run(capsys, "weights", "plan", "--model", str(tmp_path), *words)[0] == 2
    assert run(capsys, "weights", "plan", "--model", str(tmp_path / "no"), *words)[0] == 2


# --- inspect --------------------------------------------------------------------------------


def test_inspect_groups_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {f"model.layers.{n}.norm.weight": (4,) for n in range(3)} | {"lm_head.weight": (8, 4)}
    write_checkpoint(tmp_path / "a", shapes=shapes)
    code, shown = run(capsys, "weights", "inspect", str(tmp_path / "a"))
    assert code == 0
    (part,) = shown["parts"]
    assert (part["tensors"], part["bytes"], part["dtypes"]) == (4, 4 * (12 + 32), ["F32"])
    groups = {group["name"]: group["tensors"] for group in part["groups"]}
    assert groups == {"model.layers.*.norm.weight": 3, "lm_head.weight": 1}
    assert main(["weights", "inspect", str(tmp_path / "a")]) == 0
    assert "model.layers.*.norm.weight" in capsys.readouterr().out


def test_inspect_shows_the_ranks_of_a_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        name = "decoder.layers.0.mlp.experts.linear_fc1.weight0"
        save_file({name: np.ones((2, 3), np.float32)}, tmp_path / f"rank{rank}.safetensors")
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"position": {"ep": rank}}))
    code, shown = run(capsys, "weights", "inspect", str(tmp_path))
    assert code == 0
    assert [part["position"] for part in shown["parts"]] == [{"ep": 0}, {"ep": 1}]
    assert shown["parts"][0]["groups"][0]["name"].endswith("linear_fc1.weight*")
    both = {"version": 1, "ranks": {"1": {"position": {"ep": 1, "ep_size": 2}}}}
    (tmp_path / "rank1.json").write_text(json.dumps(both))
    _, again = run(capsys, "weights", "inspect", str(tmp_path))
    assert again == shown
    (tmp_path / "rank1.json").write_text("{}")
    assert run(capsys, "weights", "inspect", str(tmp_path))[0] == 2
    (tmp_path / "rank1.json").unlink()
    (tmp_path / "rank1.safetensors").write_bytes(b"short")
    assert run(capsys, "weights", "inspect", str(tmp_path))[0] == 2
    assert run(capsys, "weights", "inspect", str(tmp_path / "no"))[0] == 2


# --- diff -----------------------------------------------------------------------------------


def test_equal_checkpoints_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b")
    assert run(capsys, "weights", "diff", str(first), str(second))[0] == 0
    assert main(["weights", "diff", str(first), str(second)]) == 0
    assert "equal: 2 of 2" in capsys.readouterr().out


def test_diff_counts_elements_and_reports_distances(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b")
    tensors = load_file(second / "model.safetensors")
    changed = tensors["model.norm.weight"].copy()
    changed[1] += 0.5
    changed[2] = np.nan
    save_file(
        {"model.norm.weight": changed, "new": np.zeros(3, np.int8)}, second / "model.safetensors"
    )
    code, shown = run(capsys, "weights", "diff", str(first), str(second))
    assert code == 1
    assert shown["missing"] == ["model.embed_tokens.weight"]
    assert shown["extra"] == ["new"]
    (difference,) = shown["different"]
    assert (difference["elements"], difference["of"], difference["max_abs"]) == (2, 4, 0.5)
    assert main(["weights", "diff", str(first), str(second)]) == 1
    assert "only in the first: model.embed_tokens.weight" in capsys.readouterr().out


def test_diff_reads_bfloat16_and_names_other_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    for name, value, rows in (("a", 1.0, 2), ("b", 1.5, 3)):
        directory = tmp_path / name
        directory.mkdir()
        tensors = {
            "w": torch.full((4,), value, dtype=torch.bfloat16),
            "i": torch.full((4,), int(value * 2), dtype=torch.int32),
            "rows": torch.zeros(rows, 2),
        }
        save_torch(tensors, directory / "model.safetensors")
    code, shown = run(capsys, "weights", "diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 1
    assert {difference["name"]: difference["max_abs"] for difference in shown["different"]} == {
        "i": None,
        "w": 0.5,
    }
    assert shown["reshaped"] == {"rows": ["F32[2, 2]", "F32[3, 2]"]}


# --- bench ----------------------------------------------------------------------------------


def test_the_described_models_have_the_tensors_of_the_real_ones() -> None:
    headers = hf_headers(QWEN3_30B_A3B)
    assert len(headers) == 18_867
    assert sum(int(np.prod(header.shape)) for header in headers.values()) == 30_532_122_624
    assert sum(int(np.prod(h.shape)) for h in hf_headers(SYNTHETIC_1T).values()) > 10**12


def test_planning_a_large_model_is_exact_and_shares_its_recipes() -> None:
    figures = measure(QWEN3_30B_A3B, Topology(ep=8), tp=2, repeats=1)
    assert (figures.megatron_tensors, figures.hf_tensors) == (12_627, 18_867)
    assert figures.bytes_ratio == 1.0
    assert figures.recipes < 300
    assert figures.busiest_source < 1.01


def test_bench_plan_prints_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rollway.bench.plan.QWEN3_30B_A3B", LARGER)
    monkeypatch.setattr("rollway.bench.plan.SYNTHETIC_1T", LARGER)
    code, shown = run(capsys, "bench", "plan")
    assert code == 0
    assert {"seconds", "megatron_tensors", "hf_tensors", "bytes_ratio", "descriptors"} <= set(
        shown["qwen3_30b_a3b"]
    )
    assert shown["synthetic_1t"]["peak_rss_mb"] > 0
    assert main(["bench", "plan"]) == 0
    assert "EP8 to TP2" in capsys.readouterr().out


LARGER = SMALL | {"num_attention_heads": 16, "num_experts": 64, "vocab_size": 256}
