"""Write what the ranks of Megatron models held, without the bytes: one JSON file per topology.

python tests/data/megatron/make_digests.py DIRECTORY    # holds <topology>/rank0.safetensors, …
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from safetensors.numpy import load_file

HERE = Path(__file__).parent


def main(directory: Path) -> None:
    for topology in sorted(path for path in directory.iterdir() if (path / "rank0.json").is_file()):
        ranks = [digests(path) for path in sorted(topology.glob("rank*.json"), key=_number)]
        lines = ",\n".join(json.dumps(rank, separators=(",", ":")) for rank in ranks)
        (HERE / f"{topology.name}.json").write_text(f"[\n{lines}\n]\n")


def digests(described: Path) -> dict[str, object]:
    rank = json.loads(described.read_text())
    arrays = load_file(described.with_suffix(".safetensors"))
    for name, tensor in rank["tensors"].items():
        tensor["sha256"] = hashlib.sha256(arrays[name].tobytes()).hexdigest()
    return rank


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("rank"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
