"""`rollway bench plan`: the time to say what a refit of a large model over nixl would move.

Layouts are built from config numbers, so nothing is downloaded and no weights are in memory.
`seconds` is the time from the pieces that the trainer's ranks publish to what each rank of the
engine reads: the best of several runs, because the work is always the same but other processes
disturb it. `layout_seconds` is the time to describe the trainer's ranks.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from collections import Counter
from typing import Any

from benchmarks import round_floats
from rollway.weights.megatron.geometry import Topology
from rollway.weights.megatron.names import NameMap
from rollway.weights.megatron.pieces import MegatronModel
from rollway.weights.planning.scenario import describe, divide, hf_headers, plan, publish_shards
from rollway.weights.planning.targets import engine_ranks

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "vocab_size": 151936,
    "dtype": "bfloat16",
}
SYNTHETIC_1T = {
    **QWEN3_30B_A3B,
    "num_hidden_layers": 64,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 1408,
    "num_experts": 512,
    "vocab_size": 163840,
}


_OF_EP8 = ("megatron_tensors", "hf_tensors", "bytes_ratio", "descriptors")


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    ep8 = measure(QWEN3_30B_A3B, Topology(ep=8), tp=2)
    etp4 = measure(QWEN3_30B_A3B, Topology(tp=4, etp=4), tp=2)
    large = measure(SYNTHETIC_1T, Topology(tp=8, ep=64), tp=16, repeats=1)
    qwen = {
        "seconds": max(ep8["seconds"], etp4["seconds"]),
        **{name: ep8[name] for name in _OF_EP8},
        "ep8_to_tp2": ep8,
        "etp4_to_tp2": etp4,
    }
    # The peak of the process, so of its largest plan: the synthetic model's.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    synthetic = {**large, "tensors": large["hf_tensors"], "peak_rss_mb": peak}
    return 0, round_floats({"qwen3_30b_a3b": qwen, "synthetic_1t": synthetic}, ".4f")


def measure(
    config: dict[str, Any], topology: Topology, tp: int, repeats: int = 3
) -> dict[str, Any]:
    """Plan from a Megatron trainer of this topology to one vLLM engine of `tp` ranks."""
    headers = hf_headers(config)
    began = time.monotonic()
    names = NameMap.from_hf_config(config)
    model = describe(headers, names, topology)
    published = publish_shards(model)
    layout_seconds = time.monotonic() - began
    seconds, cpu_seconds = [], []
    for _ in range(repeats):
        began, cpu_began = time.monotonic(), time.process_time()
        divided = divide(published, headers, tp)
        totals = [plan(divided, headers, rank) for rank in engine_ranks(config, tp)]
        seconds.append(time.monotonic() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    sources: Counter[str] = Counter()
    for total in totals:
        sources.update(total.sources)
    needed = sum(total.needed for total in totals)
    return {
        "seconds": min(seconds),
        "cpu_seconds": min(cpu_seconds),
        "layout_seconds": layout_seconds,
        "megatron_tensors": _count_tensors(model),
        "hf_tensors": len(headers),
        "parameters": sum(math.prod(header.shape) for header in headers.values()),
        "sources": len(model.ranks),
        "receivers": tp,
        "bytes_needed": needed,
        "bytes_ratio": sources.total() / needed,
        "descriptors": sum(total.reads for total in totals),
        # Against the mean of the sources that send any bytes.
        "busiest_source": max(sources.values()) * len(sources) / sources.total(),
    }


def _count_tensors(model: MegatronModel) -> int:
    """Count the tensors of all ranks; the shards of a tensor count once, whatever their names."""
    return len({names for layout in model.ranks.values() for names in layout.names.values()})
