"""The real megatron-bridge gives the names that the stand-in of the unit tests does.

It needs megatron-core and megatron-bridge from PyPI (4 MB, in the cache directory), so it is asked
for: ROLLWAY_TEST_MEGATRON=1 pytest tests/megatron
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import UsageError
from rollway.weights.megatron.geometry import Position
from rollway.weights.megatron.names import NameMap
from tests.megatron import bridge_names
from tests.megatron.package import SECONDS, install_megatron
from tests.unit.weights.megatron_bridge import make_module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("ROLLWAY_TEST_MEGATRON") != "1",
        reason="installs megatron-bridge into the cache; ROLLWAY_TEST_MEGATRON=1 runs it",
    ),
]

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 128}
LAYER = "decoder.layers.1."
NAMES = [
    *("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"),
    *(f"{LAYER}self_attention.{name}" for name in ("linear_qkv.weight", "linear_proj.weight")),
    *(f"{LAYER}mlp.{name}" for name in ("linear_fc1.weight", "linear_fc2.weight")),
    f"{LAYER}self_attention.linear_qkv.layer_norm_weight",
    f"{LAYER}mlp.linear_fc1.layer_norm_weight",
    f"{LAYER}strange.weight",
]
EXPERTS = [
    *(f"{LAYER}mlp.experts.{name}" for name in ("linear_fc1.weight3", "linear_fc2.weight3")),
    *(f"{LAYER}mlp.{name}" for name in ("router.weight", "router.expert_bias")),
    f"{LAYER}mlp.shared_experts.linear_fc1.weight",
    f"{LAYER}pre_mlp_layernorm.weight",
]
GLM: dict[str, Any] = {
    **SIZES,
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 4,
}
NEMOTRON = {**SIZES, "model_type": "nemotron", "architectures": ["NemotronForCausalLM"]}


def _ask(names: NameMap, name: str) -> Any:
    try:
        return list(names.hf_names(name, Position()))
    except UsageError as error:
        return error.message


def test_the_stand_in_is_like_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [
        {"config": GLM, "names": [*NAMES, *EXPERTS]},
        {"config": NEMOTRON, "names": NAMES},
    ]
    packages = [str(install_megatron(name)) for name in ("megatron-core", "megatron-bridge")]
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "src"), *packages, os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, bridge_names.__file__],
        input=json.dumps(questions),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    real = json.loads(done.stdout.splitlines()[-1])

    monkeypatch.setitem(sys.modules, "megatron.bridge", make_module())
    for question, answer in zip(questions, real, strict=True):
        names = NameMap.from_hf_config(question["config"])
        expected = {name: _ask(names, name) for name in question["names"]}
        assert answer == {"gated": names.gated, **expected}
        assert sum(isinstance(said, str) for said in answer.values()) == 1  # the strange one
