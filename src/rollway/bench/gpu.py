"""`rollway bench gpu`: how near each part of the way comes to what the device's memory allows.

Everything in one run on one device, and checked. Rates count the bytes of the weights once, also
those of the copy that they are compared with: `fraction` is a rate over that of a plain copy. A
part that needs a package which is not there is skipped, and the figures say so; translation,
comparing and digests need torch alone. Also `python -m rollway.bench.gpu --json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollway.errors import UsageError
from rollway.weights.digest import bits
from rollway.weights.digest.bits import digest, digests, integers
from rollway.weights.digest.changes import (
    Comparison,
    compare_pairs,
    encode_gaps,
    find_changes,
    split_planes,
    zigzag,
)
from rollway.weights.megatron.describe import describe
from rollway.weights.megatron.geometry import ModelGeometry, Topology
from rollway.weights.megatron.names import NameMap
from rollway.weights.planning.hf_model import hf_headers
from rollway.weights.translate import Translation, from_hf, to_hf

_REPEATS = 5
_SHARE = 0.01
_DENSE = {"model_type": "qwen3", "num_hidden_layers": 8, "head_dim": 128, "dtype": "bfloat16"}
_MOE = {**_DENSE, "model_type": "qwen3_moe"}

Model = dict[str, Tensor]


@dataclass(slots=True)
class _Bench:
    """One run: the device, what was found so far, and what was not measured."""

    device: torch.device
    megabytes: int
    copy_gb_per_s: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def part(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Measure a part; one that goes wrong does not cost the others."""
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            self.figures[name] = self.with_fractions(work())
        except Exception as error:  # noqa: BLE001 (it is reported)
            if isinstance(error.__cause__ or error, ImportError):
                self.skipped[name] = str(error)
            else:
                traceback.print_exc()
                self.failed[name] = f"{type(error).__name__}: {error}"[:500]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def with_fractions(self, figures: dict[str, Any]) -> dict[str, Any]:
        found = dict(figures)
        for key, value in figures.items():
            if key.endswith("gb_per_s") and self.copy_gb_per_s:
                found[key.replace("gb_per_s", "fraction")] = value / self.copy_gb_per_s
        return found

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def best(self, work: Callable[[], object]) -> float:
        times = []
        for _ in range(_REPEATS):
            began = self.now()
            kept = work()
            times.append(self.now() - began)
            del kept
        return min(times)

    def rates(self, size: int, works: dict[str, Callable[[], object]]) -> dict[str, Any]:
        """Seconds and GB/s of each, after one that does not count."""
        found: dict[str, Any] = {}
        for name, work in works.items():
            work()
            seconds = self.best(work)
            found[f"{name}seconds"] = seconds
            found[f"{name}gb_per_s"] = size / 1e9 / seconds
        return found


def bench_gpu(device: str = "cuda", megabytes: int = 4096) -> dict[str, Any]:
    """Measure all parts with models of about that size."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("There is no GPU that torch can use.", "Give --device cpu to try it.")
    bench = _Bench(torch.device(device, 0 if device == "cuda" else None), megabytes)
    bench.part("copy", partial(_copy, bench))
    bench.copy_gb_per_s = bench.figures.get("copy", {}).get("gb_per_s", 0.0)
    dense = _dense_config(megabytes)
    moe = _moe_config(megabytes)
    for name, config in (("dense", dense), ("moe", moe)):
        bench.part(f"digest_{name}", partial(_digest, bench, config))
    bench.part("translate_dense_tp2", partial(_translate, bench, dense, Topology(tp=2)))
    bench.part("translate_moe_ep2", partial(_translate, bench, moe, Topology(ep=2)))
    for name, config in (("dense", dense), ("moe", moe)):
        bench.part(f"compare_{name}", partial(_compare, bench, config))
    for name, config in (("dense", dense), ("moe", moe)):
        bench.part(f"delta_encode_{name}", partial(_encode, bench, config))
    for name, config in (("dense", dense), ("moe", moe)):
        bench.part(f"hand_over_{name}", partial(_hand_over, bench, config))
    figures: dict[str, Any] = _rounded(
        {
            "device": _described(bench.device),
            "torch": torch.__version__,
            "megabytes": megabytes,
            "share_changed": _SHARE,
            "digests_by": "triton" if bits.by_triton(bench.device) else "torch",
            **bench.figures,
            "skipped": bench.skipped,
            "failed": bench.failed,
        }
    )
    return figures


def _copy(bench: _Bench) -> dict[str, Any]:
    size = max(bench.megabytes, 2048 if bench.device.type == "cuda" else 0) << 20
    source = torch.ones(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return {"gigabytes": size / 1e9, **bench.rates(size, {"": lambda: target.copy_(source)})}


def _digest(bench: _Bench, config: dict[str, Any]) -> dict[str, Any]:
    model = list(_model(config, bench.device).values())
    small = model[-1].view(-1)[: (1 << 20) + 3]
    if digest(small) != digest(small.cpu()):
        raise RuntimeError("a digest on the device is not that of the CPU")
    works: dict[str, Callable[[], object]] = {
        "": lambda: digests(model),
        "prepared_": _prepared_digests(model),
        "one_by_one_": lambda: [digest(tensor) for tensor in model],
    }
    return {**_size_of(model), **bench.rates(_nbytes(model), works)}


def _prepared_digests(model: list[Tensor]) -> Callable[[], object]:
    """As for tensors that stay where they are: without the time it takes to say where that is."""
    if not bits.by_triton(model[0].device):
        return lambda: digests(model)
    from rollway.weights.digest.gpu import Summing

    summing = Summing(model)
    return lambda: summing.start()()


def _translate(bench: _Bench, config: dict[str, Any], topology: Topology) -> dict[str, Any]:
    truth = _model(config, bench.device)
    names = NameMap(config["model_type"], ModelGeometry.from_hf_config(config))
    layout = describe(hf_headers(config), names, topology)
    local = from_hf(truth, layout)
    out = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
    began = bench.now()
    translation = Translation(layout, local, out)
    prepared = bench.now() - began
    works: dict[str, Callable[[], object]] = {
        "": translation.run,
        "one_by_one_": lambda: [name for name, _ in to_hf(layout, local, out)],
    }
    rates = {}
    for name, work in works.items():
        for tensor in out.values():
            tensor.zero_()
        rates.update(bench.rates(_nbytes(list(truth.values())), {name: work}))
        if not all(torch.equal(integers(out[n]), integers(truth[n])) for n in truth):
            raise RuntimeError("translated tensors are not those of the model")
    return {**_size_of(list(truth.values())), "prepare_seconds": prepared, **rates}


def _compare(bench: _Bench, config: dict[str, Any]) -> dict[str, Any]:
    """Comparing alone, and then also what is packed, laid out on the device."""
    old = _model(config, bench.device)
    pairs = [(integers(old[name]), integers(new)) for name, new in _stepped(old).items()]

    def find() -> tuple[Comparison, tuple[Tensor, Tensor, Tensor]]:
        found = compare_pairs(pairs)
        return found, found.gather(0, len(pairs))

    def pack() -> int:
        found, (positions, old_bits, new_bits) = find()
        stream, _ = encode_gaps(positions, [count for count in found.counts if count])
        return int(stream.numel() + split_planes(zigzag(new_bits - old_bits)).contiguous().numel())

    def one_by_one() -> int:
        return sum(find_changes(*pair)[0].numel() for pair in pairs)

    count = one_by_one()
    if find()[1][0].numel() != count:
        raise RuntimeError("together, other elements are found to have changed")
    works: dict[str, Callable[[], object]] = {
        "": find,
        "count_": lambda: compare_pairs(pairs),
        "count_and_digest_": lambda: compare_pairs(pairs, with_digests=True),
        "with_packing_": pack,
        "one_by_one_": one_by_one,
    }
    share = count / sum(after.numel() for _, after in pairs)
    size = _nbytes(list(old.values()))
    return {**_size_of(list(old.values())), "share_found": share, **bench.rates(size, works)}


def _encode(bench: _Bench, config: dict[str, Any]) -> dict[str, Any]:
    """To the compressed bytes on the host; digests included."""
    from rollway.weights.transports.delta import format as delta

    old = _model(config, bench.device)
    new = _stepped(old)
    before = dict(zip(old, digests(list(old.values())), strict=True))

    def encode() -> list[delta.Encoded]:
        return delta.encode_all([(n, old[n], new[n], before[n]) for n in old])

    def one_by_one() -> list[delta.Encoded]:
        return [delta.encode(n, old[n], new[n], before=before[n]) for n in old]

    packed = encode()
    for one in packed:
        delta.apply(one, old[one.header.name], torch.empty_like(old[one.header.name]))
    size = _nbytes(list(old.values()))
    moved = sum(len(part) for one in packed for part in one.parts())
    return {
        **_size_of(list(old.values())),
        "bytes_fraction": moved / size,
        **bench.rates(size, {"": encode, "one_by_one_": one_by_one}),
    }


def _hand_over(bench: _Bench, config: dict[str, Any]) -> dict[str, Any]:
    from rollway.bench.gpu_hand_over import hand_over

    return hand_over(_model(config, bench.device), bench.now)


def _dense_config(megabytes: int) -> dict[str, Any]:
    """As wide as fits: Qwen3-8B's layers in 4 GB."""
    for hidden in (4096, 2048, 1024, 512, 256, 128):
        config = {**_DENSE, **_sizes(hidden), "intermediate_size": 3 * hidden}
        if _config_bytes(config) <= megabytes << 20:
            break
    return config


def _moe_config(megabytes: int) -> dict[str, Any]:
    """As many layers of Qwen3-30B-A3B as fit, or smaller ones."""
    for hidden, experts in ((2048, 128), (1024, 64), (512, 32), (256, 8), (128, 4)):
        sizes = {**_sizes(hidden), "num_experts": experts, "num_hidden_layers": 1}
        config = {**_MOE, **sizes, "intermediate_size": 3 * hidden}
        config["moe_intermediate_size"] = hidden * 3 // 8
        layers = (megabytes << 20) // _config_bytes(config)
        if layers:
            break
    return {**config, "num_hidden_layers": max(1, layers)}


def _sizes(hidden: int) -> dict[str, int]:
    heads = max(4, hidden // 128)
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": max(2, heads // 4),
        "vocab_size": 4 * hidden,
    }


def _config_bytes(config: dict[str, Any]) -> int:
    return sum(2 * torch.Size(one.shape).numel() for one in hf_headers(config).values())


def _model(config: dict[str, Any], device: torch.device) -> Model:
    """Weights without a pattern, the same ones every time."""
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.randn(one.shape, generator=generator, device=device, dtype=torch.bfloat16)
        for name, one in hf_headers(config).items()
    }


def _stepped(old: Model) -> Model:
    """Some elements at random moved to a neighbouring value, as by a small optimizer step."""
    new = {}
    for name, tensor in old.items():
        generator = torch.Generator(tensor.device).manual_seed(1)
        drawn = torch.rand(tensor.shape, generator=generator, device=tensor.device)
        bits = tensor.view(torch.int16)
        step = (drawn < _SHARE).to(torch.int16) - 2 * (drawn < _SHARE / 2).to(torch.int16)
        new[name] = (bits + step).view(torch.bfloat16)
    return new


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _size_of(tensors: list[Tensor]) -> dict[str, Any]:
    return {"gigabytes": _nbytes(tensors) / 1e9, "tensors": len(tensors)}


def _described(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def shown(figures: dict[str, Any]) -> str:
    """The figures as lines for people."""
    lines = [f"{figures['device']}, torch {figures['torch']}"]
    for name, part in figures.items():
        if isinstance(part, dict) and "gb_per_s" in part:
            share = f", {part['fraction']} of a copy" if "fraction" in part else ""
            lines.append(f"{name}: {part['gb_per_s']} GB/s{share} ({part['gigabytes']} GB)")
    lines += [f"{name}: skipped: {why}" for name, why in figures["skipped"].items()]
    lines += [f"{name}: failed: {why}" for name, why in figures["failed"].items()]
    return "\n".join(lines)


def run_command(options: argparse.Namespace) -> int:
    figures = bench_gpu(options.device, options.megabytes)
    print(json.dumps(figures) if options.json else shown(figures))
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    # The same words as `rollway bench gpu`, whose imports a machine with torch alone does not have.
    parser = argparse.ArgumentParser(prog="rollway.bench.gpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--megabytes", type=int, default=4096)
    sys.exit(run_command(parser.parse_args()))
