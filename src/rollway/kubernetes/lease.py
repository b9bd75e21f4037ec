"""One command at a time acts on a run: a Lease in its namespace says which.

    first command                  Lease rollway-math               second command

    create ──────────────────────▶ holder first, renewed at 0 s
    renew, twice per duration ───▶ holder first, renewed at 15 s ◀─ looks: the holder lives, refused
    (killed, or paused)            the same for 30 s ◀───────────── looks: takes it over, by a patch
                                   holder second, renewed at 50 s   of the version that it has read
    goes on: renew before a write
      409, another holder: it stops and undoes nothing
                                   no holder ◀───────────────────── the driver runs: released

A released Lease stays as long as the run, which owns it: a command that was paused for long must
see that others had the run in between. Nobody's clock is compared with another machine's: who looks
at a Lease waits until it is renewed, or for its duration. Only on one machine, where the holder's
process can be looked up, the answer comes at once.

A holder that has not renewed for a while (the API server was away) is still the holder if nobody
took over: a renewal names the version of the Lease that it replaces. Until it has succeeded, the
holder writes nothing (`Cluster.fence`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rollway.errors import ClusterError, Conflict, Gone, LeaseLost, RollwayError, RunExists
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.kinds import LEASE, Object
from rollway.kubernetes.names import MANAGED, RUN_LABEL, name_lease
from rollway.kubernetes.owners import make_reference
from rollway.processes import ProcessId, boot_id

SECONDS = 30.0
"""How long a holder that is not heard of keeps a run."""
LOOK_SECONDS = 2.0
PROCESS = "rollway.dev/process"
"""The annotation by which a holder is found on its own machine."""


class Lease:
    """The right to act on a run. Use it as a context: a Lease that is held is released at the end.

    Threads may call `fence`; the others are for the thread of the command.
    """

    def __init__(
        self,
        cluster: Cluster,
        run: str,
        seconds: float = SECONDS,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.run, self._cluster, self._seconds, self._report = run, cluster, seconds, report
        self._name = name_lease(run)
        self._identity = _make_identity()
        self._live: Object | None = None
        """The Lease as it was written last; None when it is not held."""
        self._renewed = 0.0
        self._owners: list[Object] | None = None
        """The owner references to write; None for those that are there."""
        self._is_new = False
        self._lost: ClusterError | None = None
        self._lock = threading.RLock()
        self._stop = threading.Event()

    def __enter__(self) -> Lease:
        """Take the Lease, and renew it in the background.

        Raises:
            RunExists: another command that lives has it.
        """
        self._acquire()
        threading.Thread(target=self._keep, daemon=True, name="lease").start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Release the Lease. One that a failed command has made for nothing is deleted."""
        self._stop.set()
        with self._lock, contextlib.suppress(RollwayError):  # else it expires by itself
            if self._live is None or self._lost is not None:
                return
            if error is not None and self._is_new and not self._owners:
                self.discard()
            else:
                self._write(holder=None)
                self._live = None

    # --- while it is held ------------------------------------------------------------------------

    def give_to(self, owner: Object) -> None:
        """Let the object that stands for the run own the Lease, so that both go together."""
        with self._lock:
            self._owners = [make_reference(owner)]
            self._renew()

    def fence(self) -> None:
        """Return if this command may write; renew first where the last renewal is old.

        Raises:
            LeaseLost: another command has taken over.
            ClusterError: somebody deleted the Lease, as `rollway k8s down` does.
        """
        with self._lock:
            if self._lost is None and self._live is not None and self._age > self._seconds * 2 / 3:
                self._renew()
            if self._lost is not None:
                raise self._lost

    def regain(self) -> None:
        """Make sure of the Lease before the run is taken down, also if it was deleted meanwhile;
        nothing that goes with the run owns it any more.

        Raises:
            LeaseLost: another command has it.
        """
        with self._lock:
            self._owners = []
            if self._lost is None:
                self._renew()
            if isinstance(self._lost, LeaseLost):
                raise self._lost
            if self._lost is None:
                return
            try:
                self._create()
            except Conflict:
                self._lost = self._make_lost(self._cluster.get(LEASE, self._name) or {})
                raise self._lost from None
            self._lost = None

    def discard(self) -> None:
        """Delete the Lease: nothing of the run is left."""
        with self._lock, contextlib.suppress(Conflict):
            if self._live is None:
                return
            meta, self._live = self._live["metadata"], None
            self._stop.set()
            self._cluster.delete(
                LEASE, self._name, uid=meta["uid"], resource_version=meta["resourceVersion"]
            )

    @property
    def _age(self) -> float:
        return _tick() - self._renewed

    def _keep(self) -> None:
        """Renew until the Lease is released or lost."""
        while not self._stop.wait(self._seconds / 2):
            # A server that does not answer is asked again, here and by `fence`.
            with self._lock, contextlib.suppress(RollwayError):
                if self._stop.is_set() or self._lost is not None:
                    return
                if self._age >= self._seconds / 2:
                    self._renew()

    def _renew(self) -> None:
        """Write that this command lives; note it if it has the Lease no more."""
        try:
            self._write(holder=self._identity)
        except Gone:
            self._lost = ClusterError(
                f"Somebody took run {self.run} down while it was started.",
                "Find out who did, then run again.",
            )
        except Conflict:
            live = self._cluster.get(LEASE, self._name)
            if live is not None and live["spec"].get("holderIdentity") == self._identity:
                self._live = live  # the answer to the last renewal was lost, or an editor was here
                self._write(holder=self._identity)
            else:
                self._lost = self._make_lost(live or {})

    def _write(self, holder: str | None) -> None:
        """Replace what was written last, and nothing else."""
        assert self._live is not None
        sent = _tick()
        body: dict[str, Any] = {"spec": {"holderIdentity": holder, "renewTime": _now()}}
        if self._owners is not None:
            body["metadata"] = {"ownerReferences": self._owners}
        version = self._live["metadata"]["resourceVersion"]
        self._live = self._cluster.patch(LEASE, self._name, body, resource_version=version)
        self._renewed = sent

    def _make_lost(self, live: Object) -> LeaseLost:
        who = describe_holder(live)
        return LeaseLost(
            f"Run {self.run} was taken over by {who} while this command could not act.",
            f"Nothing was rolled back; `rollway k8s status {self.run}` shows where the run stands.",
        )

    # --- take it ---------------------------------------------------------------------------------

    def _acquire(self) -> None:
        while True:
            with contextlib.suppress(Conflict):
                self._create()
                self._is_new = True
                return
            live = self._cluster.get(LEASE, self._name)
            if live is None or (live := self._wait_until_free(live)) is None:
                continue
            with contextlib.suppress(Conflict, Gone):  # somebody was quicker: look again
                self._take_over(live)
                return

    def _create(self) -> None:
        sent, now = _tick(), _now()
        labels = {**MANAGED, RUN_LABEL: self.run}
        metadata = {"name": self._name, "labels": labels, "annotations": {PROCESS: _locate()}}
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._seconds)),
            "leaseTransitions": 0,
            "acquireTime": now,
            "renewTime": now,
        }
        self._live = self._cluster.create(LEASE, {"metadata": metadata, "spec": spec})
        self._renewed = sent

    def _take_over(self, live: Object) -> None:
        if live["spec"].get("holderIdentity") not in (None, "", self._identity):
            self._report(f"take run {self.run} over from {describe_holder(live)}")
        sent, now = _tick(), _now()
        body = {
            "metadata": {"annotations": {PROCESS: _locate()}},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": max(1, round(self._seconds)),
                "leaseTransitions": (live["spec"].get("leaseTransitions") or 0) + 1,
                "acquireTime": now,
                "renewTime": now,
            },
        }
        version = live["metadata"]["resourceVersion"]
        self._live = self._cluster.patch(LEASE, self._name, body, resource_version=version)
        self._renewed = sent

    def _wait_until_free(self, live: Object) -> Object | None:
        """Return the Lease once it may be taken; None if it is gone.

        Raises:
            RunExists: its holder lives.
        """
        if not is_of_run(live, self.run):
            raise RunExists(
                f"Lease {self._name} exists and does not belong to run {self.run}.",
                "Choose another name, or delete it if it is yours.",
            )
        observation = Observation()
        while (state := observation.judge(live)) != "free":
            if live["spec"].get("holderIdentity") == self._identity:
                return live  # the answer to its own create was lost
            if state == "held":
                raise self._refuse(live)
            if observation.is_first:
                self._report(f"look whether {describe_holder(live)} still starts {self.run}")
            time.sleep(LOOK_SECONDS)
            looked = self._cluster.get(LEASE, self._name)
            if looked is None:
                return None
            live = looked
        return live

    def _refuse(self, live: Object) -> RunExists:
        seconds = _count_since(live["spec"].get("acquireTime"))
        return RunExists(
            f"Run {self.run} is being started by {describe_holder(live)}, for {seconds:.0f} s now.",
            f"Wait until it is done, or stop it; `rollway k8s down {self.run}` removes the run.",
        )


class Observation:
    """Finds out whether the holder of a Lease lives, without its clock."""

    def __init__(self) -> None:
        self._renewal: object = None
        self._since = 0.0
        self.is_first = False

    def judge(self, live: Object) -> Literal["free", "held", "unknown"]:
        """Judge a Lease as it is now; one that is not renewed for its duration is free."""
        spec, now = live["spec"], _tick()
        duration = float(spec.get("leaseDurationSeconds") or SECONDS)
        renewal = spec.get("renewTime")
        if not spec.get("holderIdentity"):
            return "free"
        if (process := _find_process(live)) is not None:  # of this machine, so its clock is ours
            return "held" if process.alive and _count_since(renewal) < duration else "free"
        self.is_first = self._renewal is None
        if renewal != self._renewal:
            self._renewal, self._since = renewal, now
            return "unknown" if self.is_first else "held"
        return "free" if now - self._since >= duration else "unknown"


def wait_until_released(
    cluster: Cluster, run: str, timeout: float, report: Callable[[str], None]
) -> Object | None:
    """Return the Lease of a run once no command that lives holds it; None if there is none.

    Raises:
        ClusterError: one still holds it after `timeout` seconds.
    """
    observation, end = Observation(), _tick() + timeout
    was_told = False
    while (live := cluster.get(LEASE, name_lease(run))) is not None and is_of_run(live, run):
        if observation.judge(live) == "free":
            return live
        if not was_told:
            report(f"wait until {describe_holder(live)} has ended, which starts {run}")
            was_told = True
        if _tick() >= end:
            raise ClusterError(
                f"Run {run} is still being started by {describe_holder(live)}.",
                f"Stop that command, then `rollway k8s down {run}` again.",
            )
        time.sleep(LOOK_SECONDS)
    return None


def is_of_run(live: Object, run: str) -> bool:
    return (live["metadata"].get("labels") or {}).get(RUN_LABEL) == run


def describe_holder(live: Object) -> str:
    """Say who has a Lease."""
    holder = str((live.get("spec") or {}).get("holderIdentity") or "")
    who, _, rest = holder.partition("/")
    pid = rest.partition("/")[0]
    return f"{who} (process {pid})" if pid.isdigit() else who or "another command"


def _make_identity() -> str:
    """Name this command: for people, and unlike any other."""
    user = os.environ.get("USER") or f"user {os.getuid()}"
    return f"{user}@{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"


def _locate() -> str:
    """Say where this process can be looked up: a boot, a PID namespace, a pid, a start time."""
    process = ProcessId.of(os.getpid())
    kernel = _read_kernel()
    return f"{kernel}/{process.pid}/{process.start}" if kernel and process else ""


def _read_kernel() -> str:
    try:
        return f"{boot_id()}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # a system without /proc: a holder's death shows when its Lease expires
        return ""


def _find_process(live: Object) -> ProcessId | None:
    """Return the holder's process, if it is one of this machine."""
    place = str((live["metadata"].get("annotations") or {}).get(PROCESS) or "")
    kernel, _, numbers = place.partition("]/")
    parts = numbers.split("/")
    if not kernel or f"{kernel}]" != _read_kernel() or not all(map(str.isdigit, parts)):
        return None
    return ProcessId(int(parts[0]), int(parts[1])) if len(parts) == 2 else None


def _tick() -> float:
    """Return seconds of a clock that goes on while a machine sleeps; `time.monotonic` stops, and a
    laptop that was closed for an hour would believe that it has just renewed."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _count_since(moment: object) -> float:
    """Return the seconds since a time of the API."""
    try:
        then = datetime.fromisoformat(str(moment).replace("Z", "+00:00"))
    except ValueError:
        return float("inf")
    return max(0.0, (datetime.now(UTC) - then).total_seconds())
