"""A run on a cluster, as all its orders share it: apply objects, await, own and undo them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from rollway.errors import Conflict, RollwayError, RunExists, RunTaken
from rollway.kubernetes import gates
from rollway.kubernetes.client import Cluster, make_deleted_error
from rollway.kubernetes.conversion import convert
from rollway.kubernetes.driver import Driver, find_dashboard, is_provisioned
from rollway.kubernetes.entrypoint import resolve_entrypoint
from rollway.kubernetes.manifests import Manifests
from rollway.kubernetes.objects import (
    ALPHA,
    DGD,
    KEY_LABEL,
    RAYCLUSTER,
    RAYJOB,
    RUN_LABEL,
    Object,
    ObjectKind,
    add_owner,
    find_kind,
    make_reference,
)
from rollway.kubernetes.run_mark import RunMark
from rollway.kubernetes.spec import TRAINING, Infra
from rollway.kubernetes.teardown import Report, delete_objects, list_objects
from rollway.kubernetes.waits import (
    Deadline,
    wait_for,
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


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `rollway k8s run` and `up` are asked for, beside the infra file."""

    order: Order = "auto"
    wait: bool = True
    recreate: bool = False
    resume: bool = False
    """Go on with a run that another command has begun, and take it over from that command."""
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


class ClusterRun:
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
        self.mark = RunMark(cluster, infra.name)
        self.cluster = cluster.add_fence(self.mark.check)
        self.infra, self.manifests = infra, manifests
        self.options, self.limits, self.report = options, options.limits, report
        self.name = infra.name
        self.result = RunResult(infra.name, cluster.namespace, order)
        self._began = time.monotonic()

    # --- steps -----------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether each part must be ready before the next; only `up --no-wait` goes on."""
        return self.options.wait or self.result.order != "up"

    def finish(self, step: str) -> None:
        self.result.steps[step] = round(time.monotonic() - self._began, 3)

    def hold(self) -> AbstractContextManager[None]:
        """Be the one command that starts this run."""
        take_over = self.options.resume or self.options.recreate
        return self.mark.hold(take_over=take_over, report=self.report)

    @contextmanager
    def undo_on_failure(self, *, keep_what_is_there: bool = False) -> Iterator[None]:
        """Delete the run's objects if the block fails, however it fails; of a run whose parts have
        other users only those that were not there before."""
        keep = {
            body["metadata"]["uid"]
            for _, body in (list_objects(self.cluster, self.name) if keep_what_is_there else ())
        }
        try:
            yield
        except (RunExists, RunTaken):
            raise  # that run is not this one's to undo
        except BaseException as error:
            words = self._roll_back(keep)
            if isinstance(error, RollwayError):
                error.hint = f"{error.hint} {words}".strip()
            raise

    def _roll_back(self, keep: Collection[str]) -> str:
        try:
            self.mark.regain()
            self.report(f"roll back {self.name}")
            self.take_down(keep)
            if not keep:
                self.mark.discard()
        except RunTaken as error:
            self.report(str(error))  # also where Ctrl-C leaves no room for it
            return f"{error.message} Nothing was rolled back."
        except RollwayError as error:
            return (
                f"The rollback failed as well: {error.message} "
                f"`rollway k8s down {self.name}` tries again."
            )
        return f"Nothing of {self.name} was left behind."

    def take_down(self, keep: Collection[str] = ()) -> None:
        """Delete the run's objects, and wait until they are gone; the mark stays."""
        delete_objects(
            self.cluster, self.name, timeout=self.limits.gone, keep=keep, report=self.report
        )

    # --- objects ---------------------------------------------------------------------------------

    def create_or_take_up(self, kind: ObjectKind, body: Object) -> tuple[Object, bool]:
        """Create the object that stands for the run; return it, and whether it was there.

        One that a killed CLI left is taken up. One that is going away is waited for.
        """
        name, deadline = body["metadata"]["name"], Deadline(self.limits.gone)
        existed = True
        while True:
            live = self.cluster.get(kind, name)
            if live is None:
                existed = False
                with suppress(Conflict):  # the answer to the request was lost: it is there
                    return self.cluster.create(kind, body), existed
                continue
            self.check_is_ours(kind, live)
            if "deletionTimestamp" not in live["metadata"]:
                return live, existed
            self._wait_until_gone(kind, name, deadline)

    def _wait_until_gone(self, kind: ObjectKind, name: str, deadline: Deadline) -> None:
        self.report(f"wait for the {kind.kind} {name} of before, which is going away")
        wait_until_gone(self.cluster, kind, [name], deadline)

    def check_is_ours(self, kind: ObjectKind, live: Object) -> None:
        labels = live["metadata"].get("labels") or {}
        if labels.get(RUN_LABEL) != self.name:
            raise RunExists(
                f"{kind.kind} {live['metadata']['name']} exists and does not belong to this run.",
                "Choose another name, or delete it if it is yours.",
            )

    def apply_all(self, bodies: Sequence[Object], owner: Object | None) -> list[Object]:
        """Apply objects at once, owned by `owner`; one that is going away is replaced."""
        return do_at_once(lambda body: self._apply(add_owner(body, owner)), bodies)

    def _apply(self, body: Object) -> Object:
        kind, name = find_kind(body), body["metadata"]["name"]
        live = self.cluster.get(kind, name)
        if live is not None and self.options.recreate:
            self.check_is_ours(kind, live)
            self.cluster.delete(kind, name, uid=live["metadata"]["uid"])
        is_leaving = live is not None and "deletionTimestamp" in live["metadata"]
        if live is not None and (is_leaving or self.options.recreate):
            self._wait_until_gone(kind, name, Deadline(self.limits.gone))
        applied = self.cluster.apply(kind, body)
        self.report(f"applied {kind.kind} {name}")
        return applied

    def check_drift(self, kind: ObjectKind, body: Object) -> None:
        """Raise RunExists if an object that is taken up is not the one that is asked for."""
        if drift := self.cluster.find_drift(kind, body):
            name = body["metadata"]["name"]
            raise RunExists(
                f"{kind.kind} {name} of run {self.name} exists with other fields: "
                f"{', '.join(drift)}.",
                "Use another name, or --recreate to replace it.",
            )

    def check_graphs(self, owner: Object) -> None:
        """Raise RunExists if graphs that a killed CLI left are not those that are asked for."""
        for body in self.manifests.graphs.values():
            live = self.cluster.get(DGD, body["metadata"]["name"])
            if live is not None and "deletionTimestamp" not in live["metadata"]:
                self.check_is_ours(DGD, live)
                self.check_drift(DGD, add_owner(body, owner))

    # --- servers ---------------------------------------------------------------------------------

    def bring_up_servers(self, owner: Object | None) -> None:
        """Apply deployments, then graphs, then clusters of other roles, and wait for each."""
        if self.manifests.deployments:
            self._bring_up_deployments(owner)
        if self.manifests.graphs:
            self._bring_up_graphs(owner)
        others = {role: body for role, body in self.manifests.clusters.items() if role != TRAINING}
        if others:
            self.apply_all(list(others.values()), owner)
        for role, body in others.items() if self.waits else ():
            self.start_daemon(role, body["metadata"]["name"])
            self.finish("roles")

    def _bring_up_deployments(self, owner: Object | None) -> None:
        deployments, services = self.manifests.deployments, self.manifests.services
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

    def _bring_up_graphs(self, owner: Object | None) -> None:
        graphs = self.manifests.graphs
        live = self.apply_all(list(graphs.values()), owner)
        for body in graphs.values() if self.cluster.has_old_graphs else ():
            for loss in convert(body, ALPHA).losses:
                self.report(f"warning: graph {body['metadata']['name']} loses `{loss}` in {ALPHA}")
        self.finish("graphs applied")
        self.result.graphs = [body["metadata"]["name"] for body in live]
        if not self.waits:
            return
        self.report(f"wait for the gates of {', '.join(self.result.graphs)}")
        timeouts = {
            body["metadata"]["name"]: self.limits.gates or self.infra.dynamo[key].ready_timeout
            for key, body in graphs.items()
        }
        on_change = gates_reporter(self.report)
        gates.wait_until_ready(self.cluster, live, timeout=timeouts, on_change=on_change)
        self.finish("gates")

    def start_daemon(self, role: str, name: str) -> Object:
        """Wait until a cluster is provisioned, submit its daemon, if it has one, and wait until
        that answers; return the cluster."""
        self.report(f"wait until RayCluster {name} is provisioned")
        live = wait_for(
            self.cluster, RAYCLUSTER, name, lambda body: body if is_provisioned(body) else None,
            timeout=self.limits.driver, what="was not provisioned",
        )  # fmt: skip
        daemon = self.infra.kuberay[role].daemon
        if daemon is not None:
            self.report(f"start the daemon of {role}")
            dashboard, field = find_dashboard(self.cluster, live), f"kuberay.{role}.daemon"
            names, environment = self.manifests.names, {"env_vars": daemon.env}
            command = resolve_entrypoint(daemon.entrypoint, names, f"{field}.entrypoint")
            submission = f"{self.name}-{role}"
            dashboard.submit(submission, command, runtime_env=environment if daemon.env else None)
            if daemon.health is not None:
                wait_for_answer(self.cluster, dashboard.service, daemon.health)
        return live

    def note_driver(self, driver: Driver) -> None:
        self.result.driver, self.result.state = driver, "submitted"
        self.report(f"driver {driver.id} was submitted by {driver.by}")
        self.finish("driver")

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
        there = {body["metadata"]["name"] for kind, body in owned if kind == DGD}
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


def move_owner(
    cluster: Cluster, kind: ObjectKind, body: Object, new: Object, old: Iterable[str] = ()
) -> None:
    """Make `new` own a live object instead of the owners with the UIDs `old`, in one patch; who
    changes them at the same time is not overwritten."""
    reference, dropped = make_reference(new), {*old, new["metadata"]["uid"]}

    def change(live: Object) -> Object | None:
        references = live["metadata"].get("ownerReferences") or []
        kept = [each for each in references if each["uid"] not in dropped]
        wanted = [*kept, reference]
        return None if references == wanted else {"metadata": {"ownerReferences": wanted}}

    cluster.change(kind, body, change)
