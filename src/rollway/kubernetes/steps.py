"""The steps that all orders of a run share: apply objects, wait for them, own them, undo them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

from rollway.errors import Conflict, KindMissing, LeaseLost, RollwayError, RunExists
from rollway.kubernetes import gates
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.conversion import convert
from rollway.kubernetes.drift import find_drift
from rollway.kubernetes.driver import Driver
from rollway.kubernetes.kinds import DGD, DGD_ALPHA, RAYJOB, Kind, Object, find_kind
from rollway.kubernetes.lease import SECONDS, Lease
from rollway.kubernetes.manifests import Manifests
from rollway.kubernetes.names import KEY_LABEL, RUN_LABEL
from rollway.kubernetes.owners import add_owner, move_owner
from rollway.kubernetes.spec import TRAINING, Infra
from rollway.kubernetes.teardown import Report, list_objects, take_down
from rollway.kubernetes.waits import (
    Deadline,
    make_deleted_error,
    wait_for_answer,
    wait_for_deployments,
    wait_until_gone,
)

Order = Literal["auto", "suspended", "inference-first"]
Item = TypeVar("Item")
Value = TypeVar("Value")

_AT_ONCE = 16  # requests


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that each wait of a run may take."""

    gates: float | None = None
    """Of the gates; None for each graph's own `ready_timeout`."""
    suspend: float = 120.0
    cluster: float = 300.0
    """From the resumption to the RayCluster's UID."""
    deployments: float = 600.0
    grace: float = 90.0
    """From a provisioned cluster to our own submission of the driver."""
    driver: float = 3600.0
    """From the RayCluster's UID to a driver: its pods pull images first."""
    gone: float = 300.0
    lease: float = SECONDS
    """How long a command that is not heard of keeps others from the run."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `rollway k8s run` and `up` are asked for, beside the infra file."""

    order: Order = "auto"
    wait: bool = True
    recreate: bool = False
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True)
class RunResult:
    """Where a run stands when the command returns."""

    name: str
    namespace: str
    order: str
    graphs: list[str] = field(default_factory=list)
    deployments: list[str] = field(default_factory=list)
    job: str = ""
    ray_cluster: str = ""
    driver: Driver | None = None
    state: str = "ready"
    """`ready`, `submitted`, or how the job ended."""
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds from the start to the end of each step."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Run:
    """What all orders share: the objects of a run, applied, awaited, owned, taken back."""

    def __init__(
        self,
        cluster: Cluster,
        infra: Infra,
        manifests: Manifests,
        options: RunOptions,
        report: Report,
        order: str,
    ) -> None:
        self.lease = Lease(cluster, infra.name, options.limits.lease, report)
        self.cluster = cluster.add_fence(self.lease.fence)
        self.infra, self.manifests = infra, manifests
        self.options, self.limits, self._report = options, options.limits, report
        self.name = infra.name
        self.result = RunResult(infra.name, cluster.namespace, order)
        self.keep: set[str] = set()
        """UIDs that a rollback leaves."""
        self._began = time.monotonic()

    # --- steps -----------------------------------------------------------------------------------

    def report(self, text: str) -> None:
        self._report(text)

    @property
    def waits(self) -> bool:
        """Whether each part must be ready before the next; only `up --no-wait` goes on."""
        return self.options.wait or self.result.order != "up"

    def finish(self, step: str) -> None:
        self.result.steps[step] = round(time.monotonic() - self._began, 3)

    @contextmanager
    def undo_on_failure(self) -> Iterator[None]:
        """Delete the run's objects if the block fails, however it fails."""
        try:
            yield
        except (RunExists, LeaseLost):
            raise  # that run is not this one's to undo
        except BaseException as error:
            words = self._roll_back()
            if isinstance(error, RollwayError):
                error.hint = f"{error.hint} {words}".strip()
            raise

    def _roll_back(self) -> str:
        try:
            self.lease.regain()
            self.report(f"roll back {self.name}")
            self.take_down(keep=self.keep)
            if not self.keep:
                self.lease.discard()
        except LeaseLost as error:
            self.report(str(error))  # also where Ctrl-C leaves no room for it
            return f"{error.message} Nothing was rolled back."
        except RollwayError as error:
            return (
                f"The rollback failed as well: {error.message} "
                f"`rollway k8s down {self.name}` tries again."
            )
        return f"Nothing of {self.name} was left behind."

    def take_down(self, keep: Collection[str] = ()) -> None:
        """Delete the run's objects, and wait until they are gone; the Lease stays."""
        take_down(
            self.cluster, self.name, timeout=self.limits.gone, keep=keep, keep_lease=True,
            report=self.report,
        )  # fmt: skip

    def keep_what_is_there(self) -> None:
        """Exempt the run's objects that exist from a rollback: long-lived ones have other users."""
        there = list_objects(self.cluster, self.name)
        self.keep = {body["metadata"]["uid"] for _, body in there}

    # --- objects ---------------------------------------------------------------------------------

    def create_or_take_up(self, kind: Kind, body: Object) -> tuple[Object, bool]:
        """Create the object that stands for the run; return it, and whether it was there.

        One that a killed CLI left is taken up. One that is going away is waited for.
        """
        name, waits = body["metadata"]["name"], Deadline(self.limits.gone)
        while True:
            try:
                return self.cluster.create(kind, body), False
            except Conflict:
                live = self.cluster.get(kind, name)
            if live is None:
                continue  # it went in between
            self.check_is_ours(kind, live)
            if "deletionTimestamp" in live["metadata"]:
                self.report(f"wait for the {kind.kind} {name} of before, which is going away")
                wait_until_gone(self.cluster, kind, [name], waits.left)
            else:
                return live, True

    def check_is_ours(self, kind: Kind, live: Object) -> None:
        labels = live["metadata"].get("labels") or {}
        if labels.get(RUN_LABEL) != self.name:
            raise RunExists(
                f"{kind.kind} {live['metadata']['name']} exists and does not belong to this run.",
                "Choose another name, or delete it if it is yours.",
            )

    def apply_all(self, bodies: Sequence[Object], owner: Object | None) -> list[Object]:
        """Apply objects at once, owned by `owner`; one that is going away is replaced."""
        there: dict[Kind, dict[str, Object]] = {}
        for kind in {find_kind(body) for body in bodies}:
            there[kind] = self.cluster.list_by_name(kind)
        return do_at_once(lambda body: self._apply(add_owner(body, owner), there), bodies)

    def _apply(self, body: Object, there: dict[Kind, dict[str, Object]]) -> Object:
        kind, name = find_kind(body), body["metadata"]["name"]
        live = there[kind].get(name)
        if live is not None and self.options.recreate:
            self.check_is_ours(kind, live)
            self.cluster.delete(kind, name, uid=live["metadata"]["uid"])
            live["metadata"]["deletionTimestamp"] = "now"
        if live is not None and "deletionTimestamp" in live["metadata"]:
            self.report(f"wait for the {kind.kind} {name} of before, which is going away")
            wait_until_gone(self.cluster, kind, [name], self.limits.gone)
            live = None
        applied = self.cluster.apply(kind, body, live=live)
        self.report(f"applied {kind.kind} {name}")
        return applied

    # --- inference -------------------------------------------------------------------------------

    def bring_up_deployments(self, owner: Object | None) -> None:
        """Apply the servers beside the training, and wait until they answer."""
        deployments, services = self.manifests.deployments, self.manifests.services
        if not deployments:
            return
        self.apply_all([*deployments.values(), *services.values()], owner)
        names = [body["metadata"]["name"] for body in deployments.values()]
        self.result.deployments = names
        if not self.waits:
            return
        self.report(f"wait for {', '.join(names)}")
        wait_for_deployments(self.cluster, self.name, names, self.limits.deployments)
        for key, spec in self.infra.deployments.items():
            if spec.health is not None and key in services:
                wait_for_answer(self.cluster, services[key]["metadata"]["name"], spec.health)
        self.finish("deployments")

    def check_graphs(self, owner: Object) -> None:
        """Raise RunExists if graphs that a killed CLI left are not those that are asked for."""
        try:
            there = self.cluster.list_by_name(DGD)
        except KindMissing:
            self._convert_graphs()
            there = self.cluster.list_by_name(DGD_ALPHA)
        for body in self.manifests.graphs.values():
            name = body["metadata"]["name"]
            if name not in there or "deletionTimestamp" in there[name]["metadata"]:
                continue
            self.check_is_ours(DGD, there[name])
            if drift := find_drift(self.cluster, find_kind(body), add_owner(body, owner)):
                paths = ", ".join(field.path for field in drift)
                raise RunExists(
                    f"Run {self.name} exists with another graph {name}: {paths}.",
                    "Use another name, or --recreate to replace it.",
                )

    def bring_up_graphs(self, owner: Object | None) -> None:
        if not self.manifests.graphs:
            return
        try:
            live = self.apply_all(list(self.manifests.graphs.values()), owner)
        except KindMissing:
            self._convert_graphs()
            live = self.apply_all(list(self.manifests.graphs.values()), owner)
        self.finish("graphs applied")
        self.result.graphs = [body["metadata"]["name"] for body in live]
        if self.waits:
            self.wait_for_gates(live)

    def _convert_graphs(self) -> None:
        """Go on with the graphs in the version that an old operator serves."""
        graphs = {}
        for key, graph in self.manifests.graphs.items():
            conversion = convert(graph, DGD_ALPHA.version)
            for loss in conversion.losses:
                name = graph["metadata"]["name"]
                self.report(f"warning: graph {name} loses `{loss}` in {DGD_ALPHA.version}")
            graphs[key] = conversion.graph
        self.manifests = replace(self.manifests, graphs=graphs)

    def wait_for_gates(self, graphs: list[Object]) -> None:
        names = ", ".join(body["metadata"]["name"] for body in graphs)
        self.report(f"wait for the gates of {names}")
        timeouts = {
            body["metadata"]["name"]: self.limits.gates or self.infra.dynamo[key].ready_timeout
            for key, body in self.manifests.graphs.items()
        }
        on_change = gates_reporter(self.report)
        gates.wait_until_ready(self.cluster, graphs, timeout=timeouts, on_change=on_change)
        self.finish("gates")

    def give_to(self, owner: Object, old: Sequence[str] = ()) -> None:
        """Make `owner` own the graphs and deployments of the run, instead of the UIDs `old`."""
        owned = [
            (kind, body)
            for kind, body in list_objects(self.cluster, self.name)
            if body["metadata"]["uid"] != owner["metadata"]["uid"]
            and kind != RAYJOB
            and KEY_LABEL in body["metadata"]["labels"]
            and body["metadata"]["labels"][KEY_LABEL] != f"kuberay.{TRAINING}"
            and "deletionTimestamp" not in body["metadata"]
        ]
        there = {body["metadata"]["name"] for kind, body in owned if kind.kind == DGD.kind}
        for body in self.manifests.graphs.values():
            if body["metadata"]["name"] not in there:
                raise make_deleted_error(DGD, body["metadata"]["name"])
        do_at_once(lambda each: move_owner(self.cluster, *each, owner, old), owned)
        self.report(f"{owner['kind']} {owner['metadata']['name']} owns {len(owned)} objects")
        self.finish("owned")


def gates_reporter(report: Report) -> Callable[[Mapping[str, gates.GateState]], None]:
    """Return a function that reports each graph when what it waits for changes."""
    shown: dict[str, gates.GateState] = {}

    def show(states: Mapping[str, gates.GateState]) -> None:
        for name, state in states.items():
            if shown.get(name) != state:
                shown[name] = state
                report(f"{name}: {state.why or 'ready'}")

    return show


def do_at_once(function: Callable[[Item], Value], items: Sequence[Item]) -> list[Value]:
    """Call a function for all items in threads; raise the first error once all have ended.

    All end before the error is raised: a rollback must not race with an apply.
    """
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, max(len(items), 1))) as pool:
        futures = [pool.submit(function, item) for item in items]
    return [future.result() for future in futures]
