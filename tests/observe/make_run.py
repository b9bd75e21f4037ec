"""Write a run directory as a stack writes it: believable figures, any number of workers."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollway.observe.record import SCHEMA

Entry = dict[str, Any]

RUN = "5f0c2a9be1d34a77"
STACK = "tiny"
STEP_SECONDS = 12.0


class MadeRun:
    """A training run: a refit every step, one worker that dies, one refit that fails."""

    def __init__(self, workers: int = 4, seed: int = 0, step_seconds: float = STEP_SECONDS) -> None:
        self.step_seconds = step_seconds
        self.random = random.Random(seed)
        self.names = [f"tiny-{number}" for number in range(workers)]
        # As large as Dynamo's: not exact in a double.
        self.instances = {name: str(2**61 + 7 * i) for i, name in enumerate(self.names)}
        self.versions: dict[str, int | None] = dict.fromkeys(self.names, 0)
        self.states = dict.fromkeys(self.names, "ready")
        self.restarts = dict.fromkeys(self.names, 0)

    def list_versions(self, t: float) -> Entry:
        """Return what a driver knows of the workers: their versions."""
        rows = [
            {"name": name, "instance": self.instances[name], "state": "serving",
             "version": self.versions[name]}
            for name in self.names
        ]  # fmt: skip
        return {"kind": "workers", "t": t, "workers": rows}

    def list_workers(self, t: float) -> Entry:
        """Return what a supervisor knows of the workers: all but their versions."""
        rows = [
            {
                "name": name,
                "instance": self.instances[name],
                "node": f"10.0.0.{1 + i // 8}",
                "role": "worker",
                "state": self.states[name],
                "restarts": self.restarts[name],
                "pid": 4000 + i,
                "model": "tiny",
            }
            for i, name in enumerate(self.names)
        ]
        return {"kind": "workers", "t": t, "workers": rows}

    def run(self, began: float, seconds: float) -> Iterator[tuple[str, Entry]]:
        """Yield the process that writes each entry, and the entry, in the order of time."""
        yield from self.start(began)
        t, step = began + 3.0, 0
        while t + self.step_seconds < began + seconds:
            step += 1
            yield from self.train(t, step)
            if step % 9 == 4:
                yield from self.kill(t + 4.0)
            t += self.step_seconds

    def start(self, began: float) -> Iterator[tuple[str, Entry]]:
        for process, pid in (("supervisor", 100), ("driver", 101), ("sampler", 100)):
            yield process, make_header(began, process, pid)
        yield "supervisor", {"kind": "event", "t": began, "event": "start", "detail": "tiny"}
        for name in self.names:
            fields = {"worker": name, "instance": self.instances[name], "detail": "in 1.2 s"}
            yield "supervisor", {"kind": "event", "t": began + 1.2, "event": "ready", **fields}
        yield "supervisor", self.list_workers(began + 1.3)
        yield "driver", self.list_versions(began + 1.4)

    def stop(self, t: float) -> tuple[str, Entry]:
        return "supervisor", {"kind": "event", "t": t, "event": "stopped", "detail": ""}

    def train(self, t: float, step: int) -> Iterator[tuple[str, Entry]]:
        """Yield one step: rollouts, a refit, the trainer's figures."""
        entries = [
            *self.generate(t, step),
            *self.refit(t + self.step_seconds - 4.0, step, fails=step % 17 == 13),
        ]
        entries.sort(key=lambda pair: pair[1]["t"])
        yield from entries
        parts = {"generate": 7.6, "wait": 0.3, "train": 2.4, "publish": 0.5, "paused": 0.4}
        parts = {name: part * self.random.uniform(0.9, 1.2) for name, part in parts.items()}
        yield (
            "driver",
            {"kind": "trainer", "t": t + self.step_seconds - 0.5, "step": step,
             "seconds": sum(parts.values()), "parts": parts},
        )  # fmt: skip

    def generate(self, t: float, step: int) -> Iterator[tuple[str, Entry]]:
        rng, count = self.random, len(self.names)
        for tick in range(int(self.step_seconds / 2)):
            at = t + 2.0 * tick
            alive = [name for name in self.names if self.states[name] == "ready"]
            values: dict[str, dict[str, float]] = {
                "vllm:num_requests_running": {n: rng.randint(8, 24) for n in alive},
                "vllm:num_requests_waiting": {n: rng.randint(0, 3) for n in alive},
                "vllm:kv_cache_usage_perc": {n: rng.uniform(0.3, 0.8) for n in alive},
                "vllm:prefix_cache_queries_total_per_second": dict.fromkeys(alive, 4000.0),
                "vllm:prefix_cache_hits_total_per_second": {
                    n: rng.uniform(2400, 3400) for n in alive
                },
            }
            labelled = {m: {f"worker={n}": v for n, v in by.items()} for m, by in values.items()}
            yield "sampler", {"kind": "sample", "t": at + 0.1, "values": labelled}
            rollouts = max(1, int(count * rng.uniform(5, 7)))
            wave = 1 + 0.1 * math.sin(step)
            latency = {"p50": 0.9 * wave, "p95": 1.6 * wave, "p99": 2.1 * wave}
            yield (
                "driver",
                {"kind": "rollouts", "t": at + 0.5, "seconds": 2.0, "count": rollouts,
                 "tokens": rollouts * 180, "prompt_tokens": rollouts * 640,
                 "cached_tokens": int(rollouts * 640 * rng.uniform(0.6, 0.85)),
                 "latency": latency,
                 "first_token": {name: value / 12 for name, value in latency.items()},
                 "lengths": {"p50": 170, "p95": 310, "p99": 390},
                 "retries": {"worker gone": 1} if rng.random() < 0.05 else {},
                 "cut": rng.randint(0, 3) if tick == 4 else 0,
                 "continued": rng.randint(0, 3) if tick == 4 else 0,
                 "not_believed": 1 if rng.random() < 0.02 else 0,
                 "versions": {str(step - 1): rollouts * 180}},
            )  # fmt: skip
        yield (
            "driver",
            {"kind": "mismatch", "t": t + 7.0, "version": step - 1, "k1": rng.gauss(0, 1e-4),
             "k3": abs(rng.gauss(2e-4, 5e-5)), "max": rng.uniform(0.01, 0.05), "tokens": 9000},
        )  # fmt: skip

    def refit(self, t: float, version: int, *, fails: bool = False) -> Iterator[tuple[str, Entry]]:
        rng, longest = self.random, 0.0
        workers: list[Entry] = []
        for number, name in enumerate(self.names):
            slow = 3.0 if number == version % (len(self.names) * 3) else 1.0
            seconds = {
                "preflight": 0.35, "leave": 0.01, "pause": 0.06, "load": 0.18 * slow,
                "flush": 0.02, "verify": 0.05, "open": 0.03,
            }  # fmt: skip
            seconds = {step: part * rng.uniform(0.8, 1.3) for step, part in seconds.items()}
            at = t + rng.uniform(0, 0.02)
            for step, part in seconds.items():
                yield (
                    "driver",
                    {"kind": "step", "t": at, "refit": version, "worker": self.instances[name],
                     "step": step},
                )  # fmt: skip
                at += part
            longest = max(longest, at - t)
            failed = fails and number == 0
            if not failed:
                self.versions[name] = version
            update = seconds["load"] + seconds["flush"] + seconds["verify"]
            steps = {"update" if s == "load" else s: v for s, v in seconds.items()}
            workers.append(
                {"instance_id": self.instances[name],
                 "state": "in doubt" if failed else "serving",
                 "version": None if failed else version, "proof": "parameters",
                 "strategy": "in place", "preflight_seconds": seconds["preflight"],
                 "pause_seconds": seconds["leave"] + seconds["pause"], "update_seconds": update,
                 "resume_seconds": seconds["open"], "waited_seconds": 0.0,
                 "paused_seconds": seconds["pause"] + update, "calls": 2, "steps": steps,
                 "memory": {},
                 "error": "The parameters differ from what was published." if failed else None}
            )  # fmt: skip
        report = {
            "version": version, "mode": "pause-all", "seconds": longest + 0.01,
            "paused_seconds": max(worker["paused_seconds"] for worker in workers),
            "waited_seconds": 0.0, "passes": 1, "workers": workers,
        }  # fmt: skip
        yield (
            "driver",
            {"kind": "refit", "t": t + longest + 0.01, "began": t, "transport": "shm",
             "bytes": 520_000_000, "report": report, "outcome": "failed" if fails else "ok",
             "error": f"Not every worker is on version {version}." if fails else None},
        )  # fmt: skip
        yield "driver", self.list_versions(t + longest + 0.02)

    def kill(self, t: float, number: int = -1) -> Iterator[tuple[str, Entry]]:
        """Yield the death of a worker, its restart, and its return on the newest version."""
        name = self.names[number]
        version, old = self.versions[name], self.instances[name]
        fields = {"worker": name, "instance": old}
        self.states[name], self.versions[name] = "exited", None
        yield "supervisor", {"kind": "event", "t": t, "event": "exited", "detail": "-9", **fields}
        yield "supervisor", self.list_workers(t + 0.01)
        self.states[name], self.restarts[name] = "starting", self.restarts[name] + 1
        yield "supervisor", {"kind": "event", "t": t + 0.2, "event": "restarting", **fields}
        yield "supervisor", self.list_workers(t + 0.21)
        self.instances[name] = str(int(old) + 1000)
        self.states[name], self.versions[name] = "ready", version
        fields = {"worker": name, "instance": self.instances[name]}
        yield "supervisor", {"kind": "event", "t": t + 2.0, "event": "ready", **fields}
        yield "supervisor", self.list_workers(t + 2.01)
        yield "driver", self.list_versions(t + 2.02)


def make_header(t: float, process: str, pid: int) -> Entry:
    return {"kind": "header", "schema": SCHEMA, "t": t, "process": process, "pid": pid,
            "host": "node-1", "stack": STACK, "run": RUN, "rollway": "0.1.0"}  # fmt: skip


def write_old_run(directory: Path) -> None:
    """Write a run that an earlier Rollway recorded."""
    directory.mkdir(parents=True)
    entries = [make_header(1.7e9, "driver", 1) | {"schema": 1}, {"kind": "old", "t": 1.7e9}]
    (directory / "driver-1-a.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in entries))


class Writer:
    """Appends entries to the file of their process."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def write(self, process: str, *entries: Entry) -> None:
        pid = 101 if process == "driver" else 100
        with (self._directory / f"{process}-{pid}-0a1b.jsonl").open("a") as file:
            file.write("".join(json.dumps(entry) + "\n" for entry in entries))

    def write_all(self, pairs: Iterator[tuple[str, Entry]]) -> None:
        by_process: dict[str, list[Entry]] = defaultdict(list)
        for process, entry in pairs:
            by_process[process].append(entry)
        for process, entries in by_process.items():
            self.write(process, *sorted(entries, key=lambda entry: float(entry["t"])))


def write_run(
    directory: Path, workers: int = 4, seconds: float = 300.0, began: float = 1.7e9
) -> MadeRun:
    """Write a whole run that has ended."""
    run = MadeRun(workers)
    writer = Writer(directory)
    writer.write_all(run.run(began, seconds))
    writer.write(*run.stop(began + seconds))
    return run
