"""The shapes of the entries of a record, by their kind: what each line has to have.

    header    the first line of each file        event    joins, deaths, faults, versions, ends
    workers   all workers, after every change    step     a worker begins a step of a refit
    refit     a refit has ended                  rollouts what was returned since the entry before
    sample    scraped metrics                    mismatch trainer against engine, of one version
    trainer   a step of the trainer has ended    forks, gateway    counts of a gateway
    adapters  one was loaded or unloaded

Instance ids are text: they exceed what a double holds.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

Number = int | float


class Header(TypedDict):
    schema: int
    t: float
    process: str
    pid: NotRequired[int]
    start: NotRequired[int]
    host: NotRequired[str]
    stack: NotRequired[str]
    run: NotRequired[str]
    rollway: NotRequired[str]
    clock: NotRequired[dict[str, Number]]


class Event(TypedDict):
    t: float
    event: str
    detail: NotRequired[str]
    worker: NotRequired[str | None]
    instance: NotRequired[str | None]


class Step(TypedDict):
    t: float
    refit: int
    worker: str
    step: str


class WorkerReport(TypedDict):
    instance_id: str
    state: str
    version: NotRequired[int | None]
    proof: NotRequired[str]
    strategy: NotRequired[str]
    preflight_seconds: NotRequired[Number]
    pause_seconds: NotRequired[Number]
    update_seconds: NotRequired[Number]
    resume_seconds: NotRequired[Number]
    waited_seconds: NotRequired[Number]
    paused_seconds: NotRequired[Number]
    calls: NotRequired[int]
    steps: NotRequired[dict[str, Number]]
    memory: NotRequired[dict[str, list[dict[str, Any]]]]
    error: NotRequired[str | None]


class Report(TypedDict):
    version: int
    mode: NotRequired[str]
    seconds: NotRequired[Number]
    paused_seconds: NotRequired[Number]
    waited_seconds: NotRequired[Number]
    passes: NotRequired[int]
    workers: list[WorkerReport]


class Refit(TypedDict):
    t: float
    began: float
    report: Report
    outcome: str
    transport: NotRequired[str | None]
    bytes: NotRequired[int | None]
    error: NotRequired[str | None]


class Sample(TypedDict):
    t: float
    values: dict[str, dict[str, Number]]


class Rollouts(TypedDict):
    t: float
    seconds: Number
    count: int
    tokens: int
    prompt_tokens: NotRequired[int]
    cached_tokens: NotRequired[int]
    latency: NotRequired[dict[str, Number] | None]
    first_token: NotRequired[dict[str, Number] | None]
    lengths: NotRequired[dict[str, Number] | None]
    retries: NotRequired[dict[str, int]]
    cut: NotRequired[int]
    continued: NotRequired[int]
    not_believed: NotRequired[int]
    versions: NotRequired[dict[str, int]]
    histograms: NotRequired[dict[str, dict[int, int]]]
    """Counts of lengths by their number of bits: `prompt` and `sampled`."""


class Mismatch(TypedDict):
    t: float
    version: int | None
    k1: NotRequired[Number | None]
    k3: Number
    max: NotRequired[Number | None]
    tokens: NotRequired[int | None]


class Adapters(TypedDict):
    t: float
    versions: dict[str, int]
    """How many versions of each LoRA adapter the workers hold."""


class Forks(TypedDict):
    t: float
    reason: str
    count: int


class Gateway(TypedDict):
    t: float
    sessions: int
    turns: int


class Trainer(TypedDict):
    t: float
    step: int
    seconds: Number
    parts: dict[str, Number]


class WorkerState(TypedDict):
    name: str
    instance: str | None
    state: str
    node: NotRequired[str]
    role: NotRequired[str]
    version: NotRequired[int | None]
    restarts: NotRequired[int]
    pid: NotRequired[int | None]
    model: NotRequired[str | None]


class Workers(TypedDict):
    t: float
    workers: list[WorkerState]


SHAPES: dict[str, Any] = {
    "header": Header,
    "event": Event,
    "step": Step,
    "refit": Refit,
    "sample": Sample,
    "rollouts": Rollouts,
    "mismatch": Mismatch,
    "adapters": Adapters,
    "forks": Forks,
    "gateway": Gateway,
    "trainer": Trainer,
    "workers": Workers,
}
"""The fields of each kind of entry. Others are ignored: a newer Rollway may write them."""
