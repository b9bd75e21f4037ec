"""Turn entries of a record into values of the metrics in the table: one naming for every reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollway.observe.metrics import PERCENTILES, make_labels_key
from rollway.observe.record import Entry

Values = dict[str, dict[str, float]]
_PHASES = ("preflight", "pause", "update", "resume")


class Series:
    """The present value of every metric, as the entries so far tell it.

    Example:
        series = Series()
        for entry in Run(directory).read():
            series.add(entry)
        series.values["rollway_version_spread"][""]
    """

    def __init__(self) -> None:
        self.values: Values = {}

    def add(self, entry: Entry) -> None:
        """Take an entry; one that tells no metric changes nothing."""
        match entry["kind"]:
            case "sample":
                # A process that did not answer has no value now, so the last sample counts alone.
                names = [name for name in self.values if not name.startswith("rollway_")]
                for name in [*names, "rollway_scrape_failed"]:
                    self.values.pop(name, None)
                self.values |= {name: dict(keys) for name, keys in entry["values"].items()}
            case "refit":
                self._add_refit(entry)
            case "workers":
                self._add_workers(entry["workers"])
            case "rollouts":
                self._add_rollouts(entry)
            case "mismatch":
                key = make_labels_key(version=str(entry["version"]))
                for name in ("k1", "k3", "max"):
                    self._set(f"rollway_mismatch_{name}", key, entry.get(name))
            case "adapters":
                self.values["rollway_adapters"] = {
                    make_labels_key(adapter=name): count
                    for name, count in entry["versions"].items()
                }
            case "forks":
                key = make_labels_key(reason=entry["reason"])
                self._count("rollway_forks_total", key, entry["count"])
            case "gateway":
                self._set("rollway_gateway_sessions", "", entry["sessions"])
                self._set("rollway_gateway_turns_total", "", entry["turns"])
            case "trainer":
                self._set("rollway_step", "", entry["step"])
                self._set("rollway_step_seconds", "", entry["seconds"])
                self.values["rollway_step_part_seconds"] = {
                    make_labels_key(part=part): seconds for part, seconds in entry["parts"].items()
                }

    def _add_refit(self, entry: Entry) -> None:
        report, outcome = entry["report"], make_labels_key(outcome=entry["outcome"])
        self._count("rollway_refits_total", outcome, 1)
        self.values["rollway_refit_seconds"] = {outcome: report.get("seconds", 0.0)}
        self._set("rollway_refit_paused_seconds", "", report.get("paused_seconds"))
        self._set("rollway_refit_waited_seconds", "", report.get("waited_seconds"))
        slowest = {
            phase: max((w.get(f"{phase}_seconds", 0.0) for w in report["workers"]), default=0.0)
            for phase in _PHASES
        }
        self.values["rollway_refit_phase_seconds"] = {
            make_labels_key(phase=phase): seconds for phase, seconds in slowest.items()
        }
        transport = make_labels_key(transport=entry.get("transport") or "unknown")
        self._set("rollway_refit_bytes", transport, entry.get("bytes"))
        self._set("rollway_refit_transfer_seconds", transport, slowest["preflight"])

    def _add_workers(self, workers: list[dict[str, Any]]) -> None:
        states: Counter[str] = Counter()
        served, restarts = {}, {}
        for worker in workers:
            role = worker.get("role", "")
            key = make_labels_key(worker=worker["name"], role=role)
            states[make_labels_key(state=worker["state"], role=role)] += 1
            restarts[key] = float(worker.get("restarts", 0))
            if (version := worker.get("version")) is not None:
                served[key] = float(version)
        self.values["rollway_workers"] = dict(states)
        self.values["rollway_restarts_total"] = restarts
        self.values["rollway_weight_version"] = served
        if served:
            spread = max(served.values()) - min(served.values())
            self.values["rollway_version_spread"] = {"": spread}

    def _add_rollouts(self, entry: Entry) -> None:
        seconds = entry["seconds"]
        for name, field in (("rollouts", "count"), ("tokens", "tokens")):
            self._count(f"rollway_{name}_total", "", entry[field])
            if seconds > 0:
                self._set(f"rollway_{name}_per_second", "", entry[field] / seconds)
        for field in ("prompt_tokens", "cached_tokens"):
            self._count(f"rollway_{field}_total", "", entry.get(field, 0))
        if entry.get("prompt_tokens"):
            share = entry.get("cached_tokens", 0) / entry["prompt_tokens"]
            self._set("rollway_cached_share", "", share)
        for name, field in (
            ("rollout_seconds", "latency"),
            ("first_token_seconds", "first_token"),
            ("rollout_tokens", "lengths"),
        ):
            for percentile in PERCENTILES:
                value = (entry.get(field) or {}).get(percentile)
                self._set(f"rollway_{name}_{percentile}", "", value)
        self._count("rollway_rollouts_cut_total", "", entry.get("cut", 0))
        self._count("rollway_rollouts_continued_total", "", entry.get("continued", 0))
        self._count("rollway_answers_not_believed_total", "", entry.get("not_believed", 0))
        self._count_each("rollway_retries_total", "cause", entry.get("retries", {}))
        self._count_each("rollway_version_tokens_total", "version", entry.get("versions", {}))

    def _set(self, name: str, key: str, value: float | None) -> None:
        if value is not None:
            self.values.setdefault(name, {})[key] = value

    def _count(self, name: str, key: str, value: float) -> None:
        values = self.values.setdefault(name, {})
        values[key] = values.get(key, 0) + value

    def _count_each(self, name: str, label: str, counts: Mapping[str, int]) -> None:
        for value, count in counts.items():
            self._count(name, make_labels_key(**{label: value}), count)
