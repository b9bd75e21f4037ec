"""The mark of a run: a ConfigMap that names the command that starts it.

    first command                 ConfigMap rollway-math             second command

    create ─────────────────────▶ holder: first ◀─────────────────── run: refused
    (killed, or still there)      holder: second ◀────────────────── run --resume: a patch of the
    looks before its next write:                                     version that it has read
      another holder: it stops
      and undoes nothing
                                  holder: "" ◀────────────────────── the driver runs: released

Creating is atomic, so two commands never start one run. Nobody guesses whether another command
lives: a person says so, with `--resume`, `--recreate` or `down`. A released mark stays as long as
the run, which owns it: a command that was paused for long must see that others had the run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from rollway.errors import ClusterError, Conflict, Gone, RollwayError, RunExists, RunTaken
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import (
    CONFIG_MAP,
    MANAGED,
    RUN_LABEL,
    Object,
    make_reference,
    name_mark,
)


class RunMark:
    """The right of a command to act on a run."""

    def __init__(self, cluster: Cluster, run: str) -> None:
        self.run, self._cluster, self._name = run, cluster, name_mark(run)
        user = os.environ.get("USER") or f"user {os.getuid()}"
        who = f"{user}@{socket.gethostname()} (process {os.getpid()})"
        self._holder = f"{who} {secrets.token_hex(4)}"
        self._owners: list[Object] | None = None
        """What the mark goes with after this command; None if this command has made it."""

    @contextmanager
    def hold(self, *, take_over: bool, report: Callable[[str], None]) -> Iterator[None]:
        """Take the mark, and release it at the end; one that was made for nothing is deleted.

        Raises:
            RunExists: another command has it, and `take_over` is not asked for.
        """
        try:
            self.take(take_over=take_over, report=report)
            yield
        except BaseException:
            with contextlib.suppress(RollwayError):
                self.discard() if self._owners is None else self.release()
            raise
        try:
            self.release()
        except RollwayError as error:  # what it was held for is done
            report(f"leave the mark of run {self.run}, so the next one needs --resume: {error}")

    def take(self, *, take_over: bool, report: Callable[[str], None]) -> None:
        """Become the holder."""
        while True:
            with contextlib.suppress(Conflict):
                self._create()
                self._owners = None
                return
            live = self._cluster.get(CONFIG_MAP, self._name)
            if live is None:
                continue
            if not _is_of(live, self.run):
                raise RunExists(
                    f"ConfigMap {self._name} exists and does not belong to run {self.run}.",
                    "Choose another name, or delete it if it is yours.",
                )
            holder = _read_holder(live)
            if holder == self._holder:
                return  # the answer to its own request was lost
            if holder and not take_over:
                raise RunExists(
                    f"Run {self.run} is being started by {_describe_holder(live)}, since "
                    f"{live['data'].get('since')}, or that command was killed.",
                    "If it has ended, --resume goes on with the run; "
                    f"`rollway k8s down {self.run}` removes it.",
                )
            if holder:
                report(f"take run {self.run} over from {_describe_holder(live)}")
            self._owners = live["metadata"].get("ownerReferences") or []
            with contextlib.suppress(Conflict, Gone):  # somebody was quicker: look again
                # Without an owner: what is deleted now must not take the mark with it.
                self._patch(live, self._holder, [])
                return

    def check(self) -> Object:
        """Return the mark if this command has it.

        Raises:
            RunTaken: another command has taken over.
            ClusterError: the mark is gone, as after `rollway k8s down`.
        """
        live = self._cluster.get(CONFIG_MAP, self._name)
        if live is None:
            raise ClusterError(
                f"Somebody took run {self.run} down while it was started.",
                "Find out who did, then run again.",
            )
        if _read_holder(live) != self._holder:
            raise RunTaken(
                f"Run {self.run} was taken over by {_describe_holder(live)}.",
                "Nothing was rolled back; "
                f"`rollway k8s status {self.run}` shows where the run stands.",
            )
        return live

    def give_to(self, owner: Object) -> None:
        """Let the object that stands for the run own the mark, so that both go together."""
        owners = [make_reference(owner)]
        self._write(self._holder, owners)
        self._owners = owners

    def regain(self) -> None:
        """Make sure of the mark before the run is taken down; nothing that goes owns it any more.
        If somebody deleted it, what this command made since is still to be removed.

        Raises:
            RunTaken: another command has the run.
        """
        try:
            self._write(self._holder, [])
        except RunTaken:
            raise
        except ClusterError:
            try:
                self._create()
            except Conflict:
                self.check()

    def discard(self) -> None:
        """Delete the mark, if this command has it: nothing of the run is left."""
        live = self._cluster.get(CONFIG_MAP, self._name)
        if live is not None and _read_holder(live) == self._holder:
            uid, version = live["metadata"]["uid"], live["metadata"]["resourceVersion"]
            with contextlib.suppress(Conflict):  # somebody has taken it meanwhile
                self._cluster.delete(CONFIG_MAP, self._name, uid=uid, resource_version=version)

    def release(self) -> None:
        self._write("", self._owners or [])

    def _create(self) -> None:
        labels = {**MANAGED, RUN_LABEL: self.run}
        data = {"holder": self._holder, "since": _now()}
        body = {"metadata": {"name": self._name, "labels": labels}, "data": data}
        self._cluster.create(CONFIG_MAP, body)

    def _write(self, holder: str, owners: list[Object]) -> None:
        while True:
            live = self.check()
            with contextlib.suppress(Conflict, Gone):  # changed in between: look again
                self._patch(live, holder, owners)
                return

    def _patch(self, live: Object, holder: str, owners: list[Object]) -> None:
        data = {"holder": holder, "since": _now()}
        body = {"data": data, "metadata": {"ownerReferences": owners}}
        version = live["metadata"]["resourceVersion"]
        self._cluster.patch(CONFIG_MAP, self._name, body, resource_version=version)


def take_mark(cluster: Cluster, run: str) -> RunMark | None:
    """Take the mark of a run that is taken down, whoever has it; None if it has none.

    The command that starts the run stops before its next write."""
    live = cluster.get(CONFIG_MAP, name_mark(run))
    if live is None or not _is_of(live, run):
        return None
    mark = RunMark(cluster, run)
    mark.take(take_over=True, report=lambda _: None)
    return mark


def _is_of(live: Object, run: str) -> bool:
    return bool((live["metadata"].get("labels") or {}).get(RUN_LABEL) == run)


def _describe_holder(live: Object) -> str:
    return _read_holder(live).rpartition(" ")[0] or "another command, which has ended"


def _read_holder(live: Object) -> str:
    return str((live.get("data") or {}).get("holder") or "")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
