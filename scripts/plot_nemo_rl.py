"""Plot reward and mismatch KL of the trainings in tests/nemo_rl/test_training.py.

    python scripts/plot_nemo_rl.py docs/nemo-rl.png                     # runs them: some minutes
    python scripts/plot_nemo_rl.py out.png collective=run.log …         # of `pytest -s` output

Needs `rollway[demo]`, for matplotlib.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TESTS = "tests/nemo_rl/test_training.py"
CONTROL = "no refits"
TRAININGS = {
    "shm, shards": "test_it_learns[shm-shards]",
    "nixl, shards": "test_it_learns[nixl-shards]",
    "collective": "test_it_learns[collective]",
    "files": "test_it_learns[files]",
    "delta": "test_it_learns[delta]",
    "Megatron, shm": "test_it_trains_from_megatron_ranks[shm]",
    "a worker dies": "test_it_learns_while_a_worker_dies",
    CONTROL: "test_without_refits_it_does_not",
}
"""Tests, by the names of their lines."""
_STEP = re.compile(r"^step (\d+): reward ([\d.]+), KL (\S+)$", re.MULTILINE)
Line = list[tuple[int, float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("image", type=Path, help="the PNG to write")
    parser.add_argument("logs", nargs="*", metavar="NAME=FILE", help="outputs of earlier runs")
    options = parser.parse_args()
    logs = dict(each.split("=", 1) for each in options.logs)
    texts = {name: Path(file).read_text() for name, file in logs.items()}
    if not texts:
        texts = {name: run(test) for name, test in TRAININGS.items()}
    plot({name: read_steps(name, text) for name, text in texts.items()}, options.image)


def run(test: str) -> str:
    """Run one of the trainings; return what it prints."""
    command = [sys.executable, "-m", "pytest", f"{_TESTS}::{test}", "-n", "0", "-q", "-s"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{test} failed:\n{done.stdout[-3000:]}")
    return done.stdout


def read_steps(name: str, text: str) -> Line:
    """Return step, reward and mismatch KL of each step."""
    steps = [(int(number), float(reward), float(kl)) for number, reward, kl in _STEP.findall(text)]
    if not steps:
        raise SystemExit(f"the output of {name} has no steps; was it run with -s?")
    return steps


def plot(lines: dict[str, Line], image: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rewards, mismatches) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, steps in lines.items():
        numbers, reward, kl = zip(*steps, strict=True)
        style = {"color": "black", "linestyle": "--"} if name == CONTROL else {}
        rewards.plot(numbers, reward, label=name, **style)
        # 0 has no logarithm; nothing below this is more than rounding.
        mismatches.plot(numbers, [max(each, 1e-16) for each in kl], label=name, **style)
    mismatches.axhline(1e-3, color="grey", linewidth=0.8)
    mismatches.set_yscale("log")
    rewards.set_title("reward")
    mismatches.set_title("largest mismatch KL (limit: grey)")
    for axes in (rewards, mismatches):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    rewards.legend(fontsize=8)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=100)
    print(f"{image}: {image.stat().st_size} bytes, {len(lines)} trainings")


if __name__ == "__main__":
    main()
