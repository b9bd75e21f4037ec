"""`rollway bench gpu`: the speed of each step of a transfer, compared with a copy of GPU memory.

All steps run on one device in one run, and their results are verified. Rates count the bytes of the
weights once, also for the copy: `fraction` is a rate divided by that of a plain copy. A step that
needs a missing package is skipped and reported; digests, translation and comparison need only
torch. Also `python -m rollway.bench.gpu --json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollway.bench import round_floats
from rollway.errors import UsageError
from rollway.weights.digest import checksums
from rollway.weights.digest.changes import (
    Comparison,
    compare_pairs,
    encode_gaps,
    find_changes,
    split_planes,
    zigzag,
)
from rollway.weights.digest.checksums import digest, digests, integers
from rollway.weights.megatron.geometry import ModelGeometry, Topology
from rollway.weights.megatron.model import describe
from rollway.weights.megatron.names import NameMap
from rollway.weights.megatron.tensors import Translation, from_hf, to_hf
from rollway.weights.planning.scenario import hf_headers

_REPEATS = 5
_SHARE = 0.01  # of the elements, changed by a step
_DENSE = {"model_type": "qwen3", "num_hidden_layers": 8, "head_dim": 128, "dtype": "bfloat16"}
_MOE = {**_DENSE, "model_type": "qwen3_moe"}

Model = dict[str, Tensor]
Work = Callable[[], object]


@dataclass(slots=True)
class _Bench:
    """One run on a device: the figures so far, and the parts that were skipped or failed."""

    device: torch.device
    megabytes: int
    copy_gb_per_s: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def measure_part(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Measure a part; if it fails, the other parts are still measured."""
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            self.figures[name] = self.add_fractions(work())
        except Exception as error:  # noqa: BLE001 (it is reported)
            if isinstance(error.__cause__ or error, ImportError):
                self.skipped[name] = str(error)
            else:
                traceback.print_exc()
                self.failed[name] = f"{type(error).__name__}: {error}"[:500]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the next part needs the memory, in another shape

    def add_fractions(self, figures: dict[str, Any]) -> dict[str, Any]:
        if not self.copy_gb_per_s:
            return figures
        fractions = {
            key.replace("gb_per_s", "fraction"): value / self.copy_gb_per_s
            for key, value in figures.items()
            if key.endswith("gb_per_s")
        }
        return {**figures, **fractions}

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # kernels run asynchronously
        return time.perf_counter()

    def time_best(self, work: Work) -> float:
        times = []
        for _ in range(_REPEATS):
            began = self.now()
            result = work()
            times.append(self.now() - began)
            del result  # freed after the clock stops, and before the next run allocates
        return min(times)

    def measure_rates(self, size: int, works: dict[str, Work]) -> dict[str, Any]:
        """Return seconds and GB/s of each work, after one warm-up."""
        rates: dict[str, Any] = {}
        for name, work in works.items():
            work()
            seconds = self.time_best(work)
            rates[f"{name}seconds"] = seconds
            rates[f"{name}gb_per_s"] = size / 1e9 / seconds
        return rates


def bench_gpu(device: str = "cuda", megabytes: int = 4096) -> dict[str, Any]:
    """Measure all parts with models of about that size."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("There is no GPU that torch can use.", "Give --device cpu to try it.")
    bench = _Bench(torch.device(device, 0 if device == "cuda" else None), megabytes)
    bench.measure_part("copy", partial(_copy, bench))
    bench.copy_gb_per_s = bench.figures.get("copy", {}).get("gb_per_s", 0.0)
    dense, moe = _dense_config(megabytes), _moe_config(megabytes)

    checksums.warm_up()  # torch would do the first of the work

    def measure_both(name: str, part: Callable[[_Bench, dict[str, Any]], dict[str, Any]]) -> None:
        bench.measure_part(f"{name}_dense", partial(part, bench, dense))
        bench.measure_part(f"{name}_moe", partial(part, bench, moe))

    measure_both("digest", _digest)
    bench.measure_part("translate_dense_tp2", partial(_translate, bench, dense, Topology(tp=2)))
    bench.measure_part("translate_moe_ep2", partial(_translate, bench, moe, Topology(ep=2)))
    measure_both("compare", _compare)
    measure_both("delta_encode", _encode)
    measure_both("hand_over", _hand_over)
    figures = {
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(bench.device),
        "torch": torch.__version__,
        "megabytes": megabytes,
        "share_changed": _SHARE,
        "digests_by": "triton" if checksums.uses_triton(bench.device) else "torch",
        **bench.figures,
        "skipped": bench.skipped,
        "failed": bench.failed,
    }
    return round_floats(figures, ".4g")


def _copy(bench: _Bench) -> dict[str, Any]:
    size = max(bench.megabytes, 2048 if bench.device.type == "cuda" else 0) << 20
    source = torch.ones(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    rates = bench.measure_rates(size, {"": lambda: target.copy_(source)})
    return {"gigabytes": size / 1e9, **rates}


def _digest(bench: _Bench, config: dict[str, Any]) -> dict[str, Any]:
    model = list(_make_model(config, bench.device).values())
    small = model[-1].view(-1)[: (1 << 20) + 3]
    if digest(small) != digest(small.cpu()):
        raise RuntimeError("the digest on the device differs from the one on the CPU")
    works: dict[str, Work] = {
        "": lambda: digests(model),
        "prepared_": _prepare_digests(model),
        "one_by_one_": lambda: [digest(tensor) for tensor in model],
    }
    return {**_size_of(model), **bench.measure_rates(_nbytes(model), works)}


def _prepare_digests(model: list[Tensor]) -> Work:
    """Return the digest of tensors that stay in place: their addresses are collected only once."""
    if not checksums.uses_triton(model[0].device):
        return lambda: digests(model)
    from rollway.weights.digest.gpu import DigestKernel

    kernel = DigestKernel(model)
    return lambda: kernel.start()()


def _translate(bench: _Bench, config: dict[str, Any], topology: Topology) -> dict[str, Any]:
    truth = _make_model(config, bench.device)
    names = NameMap(config["model_type"], ModelGeometry.from_hf_config(config))
    layout = describe(hf_headers(config), names, topology)
    local = from_hf(truth, layout)
    out = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
    began = bench.now()
    translation = Translation(layout, local, out)
    prepared = bench.now() - began
    works: dict[str, Work] = {
        "": translation.run,
        "one_by_one_": lambda: [name for name, _ in to_hf(layout, local, out)],
    }
    rates = {}
    for name, work in works.items():
        for tensor in out.values():
            tensor.zero_()  # the previous work's result must not pass for this one's
        rates.update(bench.measure_rates(_nbytes(truth.values()), {name: work}))
        if not all(torch.equal(integers(out[n]), integers(truth[n])) for n in truth):
            raise RuntimeError("the translated tensors differ from the model's")
    return {**_size_of(truth.values()), "prepare_seconds": prepared, **rates}


def _compare(bench: _Bench, config: dict[str, Any]) -> dict[str, Any]:
    """Compare two models; then also pack the changes, on the device."""
    old = _make_model(config, bench.device)
    pairs = [(integers(old[name]), integers(new)) for name, new in _change_some(old).items()]

    def find() -> tuple[Comparison, tuple[Tensor, Tensor, Tensor]]:
        comparison = compare_pairs(pairs)
        return comparison, comparison.gather(0, len(pairs))

    def pack() -> int:
        comparison, (positions, old_bits, new_bits) = find()
        stream, _ = encode_gaps(positions, [count for count in comparison.counts if count])
        return int(stream.numel() + split_planes(zigzag(new_bits - old_bits)).contiguous().numel())

    def one_by_one() -> int:
        return sum(find_changes(*pair)[0].numel() for pair in pairs)

    count = one_by_one()
    if find()[1][0].numel() != count:
        raise RuntimeError("comparing all tensors together finds other changes than one by one")
    works: dict[str, Work] = {
        "": find,
        "count_": lambda: compare_pairs(pairs),
        "count_and_digest_": lambda: compare_pairs(pairs, with_checksums=True),
        "with_packing_": pack,
        "one_by_one_": one_by_one,
    }
    share = count / sum(after.numel() for _, after in pairs)
    rates = bench.measure_rates(_nbytes(old.values()), works)
    return {**_size_of(old.values()), "share_found": share, **rates}


def _encode(bench: _Bench, config: dict[str, Any]) -> dict[str, Any]:
    """Encode a delta: from tensors on the device to compressed bytes on the host, with digests."""
    from rollway.weights.transports.delta import format as delta
    from rollway.weights.transports.delta.reader import apply

    old = _make_model(config, bench.device)
    new = _change_some(old)
    before = dict(zip(old, digests(list(old.values())), strict=True))

    def encode() -> list[delta.Encoded]:
        return delta.encode_all([(n, old[n], new[n], before[n]) for n in old])

    def one_by_one() -> list[delta.Encoded]:
        return [delta.encode(n, old[n], new[n], before=before[n]) for n in old]

    packed = encode()
    for entry in packed:  # applying verifies the digests
        apply(entry, old[entry.header.name], torch.empty_like(old[entry.header.name]))
    size = _nbytes(old.values())
    encoded = sum(len(part) for entry in packed for part in entry.parts())
    rates = bench.measure_rates(size, {"": encode, "one_by_one_": one_by_one})
    return {**_size_of(old.values()), "bytes_fraction": encoded / size, **rates}


def _hand_over(bench: _Bench, config: dict[str, Any]) -> dict[str, Any]:
    from rollway.bench.gpu_hand_over import hand_over

    return hand_over(_make_model(config, bench.device), bench.now)


def _dense_config(megabytes: int) -> dict[str, Any]:
    """Return the config of the widest model that fits: in 4 GB, with the layers of Qwen3-8B."""
    for hidden in (4096, 2048, 1024, 512, 256, 128):
        config = {**_DENSE, **_sizes(hidden), "intermediate_size": 3 * hidden}
        if _config_bytes(config) <= megabytes << 20:
            break
    return config


def _moe_config(megabytes: int) -> dict[str, Any]:
    """Return a config with as many layers of Qwen3-30B-A3B as fit, or with smaller layers."""
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
    return sum(2 * torch.Size(header.shape).numel() for header in hf_headers(config).values())


def _make_model(config: dict[str, Any], device: torch.device) -> Model:
    """Draw random weights, the same ones every time."""
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.randn(header.shape, generator=generator, device=device, dtype=torch.bfloat16)
        for name, header in hf_headers(config).items()
    }


def _change_some(old: Model) -> Model:
    """Move some random elements to a neighbouring value, as a small optimizer step does."""
    new = {}
    for name, tensor in old.items():
        generator = torch.Generator(tensor.device).manual_seed(1)
        drawn = torch.rand(tensor.shape, generator=generator, device=tensor.device)
        step = (drawn < _SHARE).to(torch.int16) - 2 * (drawn < _SHARE / 2).to(torch.int16)
        new[name] = (tensor.view(torch.int16) + step).view(torch.bfloat16)
    return new


def _nbytes(tensors: Collection[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _size_of(tensors: Collection[Tensor]) -> dict[str, Any]:
    return {"gigabytes": _nbytes(tensors) / 1e9, "tensors": len(tensors)}


def format_figures(figures: dict[str, Any]) -> str:
    """Format the figures as text."""
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
    print(json.dumps(figures) if options.json else format_figures(figures))
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    # The flags of `rollway bench gpu`, for machines that have torch but not the CLI's packages.
    parser = argparse.ArgumentParser(prog="rollway.bench.gpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--megabytes", type=int, default=4096)
    sys.exit(run_command(parser.parse_args()))
