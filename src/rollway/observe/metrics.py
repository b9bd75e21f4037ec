"""The table of all metrics: what a recorded run, the page, the sinks and Prometheus call them.

    METRICS ──► docs/metrics.md (scripts/metrics_page.py; a test compares)
       │
       ├── SCRAPED: families of Dynamo and vLLM that the sampler keeps, under their own names
       └── OWN: `rollway_…`, which `rollway.observe.run_state` computes from entries of the record

A name stays. Dynamo and vLLM rename families between releases: the first name of a metric is the
one that Rollway uses, `aliases` are what other releases call it. A counter of theirs is recorded as
its rate, `NAME_per_second`, and where `keeps_total` also as the sum since sampling began, which
does not fall when a process restarts. A histogram is recorded as `NAME_p50`, `NAME_p95` and
`NAME_p99` of what was observed since the sample before, over all workers of one role.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["gauge", "counter", "histogram"]
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
RATE = "_per_second"
Values = dict[str, dict[str, float]]
"""Values by the name of a metric, and by the key of their labels."""
_SIGNS = re.compile(r"[,=]")
"""Signs that divide labels; a model's name may have them."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or one family of a scraped page."""

    name: str
    kind: MetricKind
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    source: str = ""
    """Where it comes from: `worker`, `frontend`, or a kind of entry of the record."""
    aliases: tuple[str, ...] = ()
    """Names of the same family in other releases, in the order in which they are looked for."""
    keeps_total: bool = False
    """Whether the sum of a scraped counter is recorded, besides its rate."""

    @property
    def is_scraped(self) -> bool:
        return self.source in ("worker", "frontend")

    def list_names(self) -> Iterator[str]:
        """Yield the names under which values are recorded."""
        if not self.is_scraped or self.kind == "gauge":
            yield self.name
        elif self.kind == "counter":
            yield f"{self.name}{RATE}"
            if self.keeps_total:
                yield self.name
        else:
            yield from (f"{self.name}_{percentile}" for percentile in PERCENTILES)


def _of_workers(
    name: str,
    kind: MetricKind,
    help: str,
    unit: str = "",
    *aliases: str,
    keeps_total: bool = False,
) -> Metric:
    labels = ("role",) if kind == "histogram" else ("worker", "role")
    return Metric(name, kind, help, unit, labels, "worker", aliases, keeps_total)


def _of_frontend(
    name: str, kind: MetricKind, help: str, unit: str = "", *aliases: str, keeps_total: bool = False
) -> Metric:
    return Metric(name, kind, help, unit, (), "frontend", aliases, keeps_total)


SCRAPED = (
    # --- every worker's system port ---------------------------------------------------------
    _of_workers("vllm:num_requests_running", "gauge", "Requests in the engine's batch.", "requests",
                "dynamo_component_inflight_requests"),
    _of_workers("vllm:num_requests_waiting", "gauge", "Requests that wait for the batch.",
                "requests", "dynamo_work_handler_queue_depth"),
    _of_workers("vllm:kv_cache_usage_perc", "gauge", "KV cache in use; 1 is full.", "share",
                "vllm:gpu_cache_usage_perc", "dynamo_component_gpu_cache_usage_percent"),
    _of_workers("vllm:num_preemptions_total", "counter",
                "Requests that lost their KV blocks to others.", "requests"),
    _of_workers("vllm:prompt_tokens_total", "counter", "Prompt tokens computed or found.",
                "tokens", keeps_total=True),
    _of_workers("vllm:generation_tokens_total", "counter", "Tokens sampled.", "tokens",
                "vllm:generation_tokens", keeps_total=True),
    _of_workers("vllm:prefix_cache_queries_total", "counter",
                "Prompt tokens looked up in the prefix cache. With prefill and decode apart, those "
                "of the prefill workers count.", "tokens", "vllm:gpu_prefix_cache_queries_total",
                keeps_total=True),
    _of_workers("vllm:prefix_cache_hits_total", "counter",
                "Prompt tokens found in the prefix cache.", "tokens",
                "vllm:gpu_prefix_cache_hits_total", keeps_total=True),
    _of_workers("vllm:external_prefix_cache_queries_total", "counter",
                "Prompt tokens looked up outside the worker.", "tokens"),
    _of_workers("vllm:external_prefix_cache_hits_total", "counter",
                "Prompt tokens whose KV came from outside. Of a decode worker this is what its "
                "prefill workers sent, and no hit of a cache.", "tokens", keeps_total=True),
    _of_workers("vllm:engine_sleep_state", "gauge",
                "1 for the state of the engine: awake, or a level of sleep.", "",),
    _of_workers("dynamo_component_requests_total", "counter", "Requests that reached the worker.",
                "requests"),
    _of_workers("dynamo_component_kv_cache_hit_rate", "gauge",
                "Share of the prompt that the worker found, as Dynamo reports it.", "share"),
    _of_workers("vllm:request_queue_time_seconds", "histogram", "Wait for the engine's batch.",
                "seconds"),
    _of_workers("vllm:time_to_first_token_seconds", "histogram",
                "From a request's arrival at the worker to its first token.", "seconds"),
    _of_workers("vllm:inter_token_latency_seconds", "histogram", "Time between two tokens.",
                "seconds", "vllm:time_per_output_token_seconds"),
    _of_workers("vllm:e2e_request_latency_seconds", "histogram", "A whole request at the worker.",
                "seconds"),
    # --- the frontend -----------------------------------------------------------------------
    _of_frontend("dynamo_frontend_inflight_requests", "gauge", "Requests under way.", "requests"),
    _of_frontend("dynamo_frontend_queued_requests", "gauge",
                 "Requests that have no first token yet.", "requests"),
    _of_frontend("dynamo_frontend_active_requests", "gauge", "Requests that receive tokens.",
                 "requests"),
    _of_frontend("dynamo_frontend_disconnected_clients", "gauge", "Clients that hung up.",
                 "clients"),
    _of_frontend("dynamo_frontend_router_queue_pending_requests", "gauge",
                 "Requests that the router holds back.", "requests"),
    _of_frontend("dynamo_frontend_requests_total", "counter", "Requests that ended.", "requests"),
    _of_frontend("dynamo_frontend_output_tokens_total", "counter", "Tokens sent to clients.",
                 "tokens", keeps_total=True),
    _of_frontend("dynamo_frontend_model_migration_total", "counter",
                 "Requests that moved to another worker.", "requests"),
    _of_frontend("dynamo_component_router_kv_selected_cached_prefix_tokens_total", "counter",
                 "Prompt tokens that the chosen workers had cached.", "tokens"),
    _of_frontend("dynamo_component_router_non_max_overlap_selections_total", "counter",
                 "Requests sent to another worker than the one with most of the prefix.",
                 "requests"),
    _of_frontend("dynamo_frontend_request_duration_seconds", "histogram", "A whole request.",
                 "seconds"),
    _of_frontend("dynamo_frontend_time_to_first_token_seconds", "histogram",
                 "From a request to its first token.", "seconds"),
    _of_frontend("dynamo_frontend_inter_token_latency_seconds", "histogram",
                 "Time between two tokens.", "seconds"),
    _of_frontend("dynamo_frontend_input_sequence_tokens", "histogram", "Length of prompts.",
                 "tokens"),
    _of_frontend("dynamo_frontend_output_sequence_tokens", "histogram", "Length of answers.",
                 "tokens"),
    _of_frontend("dynamo_component_router_kv_hit_rate", "histogram",
                 "Share of the prompt that the chosen worker had cached.", "share"),
)  # fmt: skip
"""The families that are kept by default."""

OWN = (
    # --- refits -------------------------------------------------------------------------------
    Metric("rollway_refits_total", "counter", "Refits that ended.", "refits", ("outcome",),
           "refit"),
    Metric("rollway_refit_seconds", "gauge", "The last refit, from its start to its end.",
           "seconds", ("outcome",), "refit"),
    Metric("rollway_refit_phase_seconds", "gauge",
           "The slowest worker of the last refit in each phase: preflight, pause, update, resume.",
           "seconds", ("phase",), "refit"),
    Metric("rollway_refit_paused_seconds", "gauge",
           "The longest time for which a worker generated nothing because of the last refit.",
           "seconds", (), "refit"),
    Metric("rollway_refit_waited_seconds", "gauge",
           "How long running requests took to end before the last refit.", "seconds", (), "refit"),
    Metric("rollway_refit_bytes", "gauge", "The size of the weights of the last refit.", "bytes",
           ("transport",), "refit"),
    Metric("rollway_refit_transfer_seconds", "gauge",
           "How long the slowest worker took to check and stage the weights of the last refit.",
           "seconds", ("transport",), "refit"),
    # --- versions and workers -----------------------------------------------------------------
    Metric("rollway_weight_version", "gauge", "The weight version that a worker serves.", "",
           ("worker", "role"), "workers"),
    Metric("rollway_version_spread", "gauge",
           "The newest version that a worker serves, less the oldest.", "versions", (), "workers"),
    Metric("rollway_workers", "gauge", "Workers by state.", "workers", ("state", "role"),
           "workers"),
    Metric("rollway_restarts_total", "counter", "Restarts of a worker.", "restarts",
           ("worker", "role"), "workers"),
    # --- rollouts -----------------------------------------------------------------------------
    Metric("rollway_rollouts_total", "counter", "Rollouts that were returned.", "rollouts", (),
           "rollouts"),
    Metric("rollway_rollouts_per_second", "gauge", "Rollouts returned per second.", "rollouts/s",
           (), "rollouts"),
    Metric("rollway_tokens_total", "counter", "Sampled tokens that were returned.", "tokens", (),
           "rollouts"),
    Metric("rollway_tokens_per_second", "gauge", "Sampled tokens returned per second.", "tokens/s",
           (), "rollouts"),
    Metric("rollway_prompt_tokens_total", "counter", "Prompt tokens of returned rollouts.",
           "tokens", (), "rollouts"),
    Metric("rollway_cached_tokens_total", "counter",
           "Prompt tokens of returned rollouts that came from a prefix cache.", "tokens", (),
           "rollouts"),
    Metric("rollway_cached_share", "gauge",
           "Prompt tokens from a prefix cache, as a share of all prompt tokens.", "share", (),
           "rollouts"),
    *(Metric(f"rollway_rollout_seconds_{percentile}", "gauge",
             f"Time of a rollout with all its retries, {percentile}.", "seconds", (), "rollouts")
      for percentile in PERCENTILES),
    *(Metric(f"rollway_first_token_seconds_{percentile}", "gauge",
             f"Time to the first token of a streamed rollout, {percentile}.", "seconds", (),
             "rollouts") for percentile in PERCENTILES),
    *(Metric(f"rollway_rollout_tokens_{percentile}", "gauge",
             f"Sampled tokens of a rollout, {percentile}.", "tokens", (), "rollouts")
      for percentile in PERCENTILES),
    Metric("rollway_retries_total", "counter", "Requests that were sent again, by cause.",
           "requests", ("cause",), "rollouts"),
    Metric("rollway_rollouts_cut_total", "counter",
           "Times that a refit or a death cut a rollout.", "cuts", (), "rollouts"),
    Metric("rollway_rollouts_continued_total", "counter",
           "Rollouts that were returned with more than one leg.", "rollouts", (), "rollouts"),
    Metric("rollway_answers_not_believed_total", "counter",
           "Answers that were discarded, because their version was not certain.", "answers", (),
           "rollouts"),
    Metric("rollway_version_tokens_total", "counter", "Returned tokens by the version that "
           "sampled them.", "tokens", ("version",), "rollouts"),
    # --- exactness ----------------------------------------------------------------------------
    Metric("rollway_mismatch_k1", "gauge", "Mean of engine minus trainer log-prob.", "nats",
           ("version",), "mismatch"),
    Metric("rollway_mismatch_k3", "gauge", "The usual mismatch KL of trainer and engine.", "nats",
           ("version",), "mismatch"),
    Metric("rollway_mismatch_max", "gauge", "Largest difference of two log-probs.", "nats",
           ("version",), "mismatch"),
    Metric("rollway_adapters", "gauge", "Versions of a LoRA adapter that the workers hold.",
           "versions", ("adapter",), "adapters"),
    Metric("rollway_forks_total", "counter",
           "Conversations whose prompt did not extend the one before, by reason.", "forks",
           ("reason",), "forks"),
    Metric("rollway_gateway_sessions", "gauge", "Sessions that a gateway holds.", "sessions", (),
           "gateway"),
    Metric("rollway_gateway_turns_total", "counter", "Turns that a gateway has recorded.", "turns",
           (), "gateway"),
    # --- the trainer's steps ------------------------------------------------------------------
    Metric("rollway_step", "gauge", "The last step that the trainer ended.", "", (), "trainer"),
    Metric("rollway_step_seconds", "gauge", "The last step as a whole.", "seconds", (), "trainer"),
    Metric("rollway_step_part_seconds", "gauge",
           "The last step by part: generate, wait, train, publish, paused.", "seconds", ("part",),
           "trainer"),
    # --- the observer itself --------------------------------------------------------------------
    Metric("rollway_scrape_seconds", "gauge", "How long the last scrape of all pages took.",
           "seconds", (), "sample"),
    Metric("rollway_scrape_failed", "gauge", "1 for a process whose page could not be read.", "",
           ("worker", "role"), "sample"),
    Metric("rollway_process_resident_bytes", "gauge", "Memory of a process of Rollway.", "bytes",
           ("process",), "sample"),
    Metric("rollway_process_cpu_seconds_per_second", "gauge", "CPU of a process of Rollway.",
           "cores", ("process",), "sample"),
    Metric("rollway_record_dropped_total", "counter", "Entries that could not be recorded.",
           "entries", ("process",), "sample"),
)  # fmt: skip
"""Rollway's own."""

METRICS = (*SCRAPED, *OWN)


TRAINER_PREFIX = "generation_metrics/"
TRAINER_NAMES = {
    "inflight_batch_sizes": "vllm:num_requests_running",
    "num_pending_samples": "vllm:num_requests_waiting",
    "kv_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "generation_tokens": "vllm:generation_tokens_total",
}
"""What users of trainers call these metrics; see rollway.observe.sinks.make_trainer_values."""
LENGTHS = {
    "prompt": f"{TRAINER_PREFIX}histogram/input_tokens_length",
    "sampled": f"{TRAINER_PREFIX}histogram/gen_tokens_length",
}
"""Histograms of lengths in an entry `rollouts`, and what trainers call them."""


def find_metric(name: str) -> Metric | None:
    """Return the metric of a recorded name."""
    return _BY_NAME.get(name)


_BY_NAME = {name: metric for metric in METRICS for name in metric.list_names()}


def make_labels_key(**labels: str) -> str:
    """Return labels as the key of a sample's values; empty ones are left out.

    Example:
        make_labels_key(worker="tiny-0", role="prefill")  # "worker=tiny-0,role=prefill"
    """
    return ",".join(
        f"{name}={_SIGNS.sub('_', str(value))}" for name, value in labels.items() if value != ""
    )


def parse_labels_key(key: str) -> dict[str, str]:
    """Return the labels of a key."""
    pairs = (part.partition("=") for part in key.split(",") if part)
    return {name: value for name, _, value in pairs}
