"""One command at a time acts on a run: two at once, a holder that dies, is paused or overtaken."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import ClusterError, LeaseLost, RunExists
from rollway.kubernetes.cluster import Cluster
from rollway.kubernetes.kinds import DGD, LEASE, RAYCLUSTER, RAYJOB
from rollway.kubernetes.lease import PROCESS
from rollway.kubernetes.names import RUN_LABEL, name_lease
from rollway.kubernetes.teardown import take_down
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.flows import (
    QUICK,
    RUN,
    World,
    make_env,
    make_graph,
    meanwhile,
    open_world,
    write_infra,
)
from tests.waiting import stays, wait_until

NAME = name_lease(RUN)
SHORT = dataclasses.replace(QUICK, lease=3.0)
SLEEP: dict[str, Any] = {"launch": {"entrypoint": "sleep 60", "ttl_seconds": 600}}
COMMAND = """
import sys
from rollway.kubernetes import lease
lease.SECONDS = 3.0  # before the limits of a run take it over
from rollway.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def world(admin: Cluster, kubeconfig: Path, tmp_path: Path) -> Iterator[World]:
    with open_world(admin, kubeconfig, tmp_path) as world:
        yield world


class Command:
    """`rollway k8s run` as a process, with a lease of three seconds."""

    def __init__(self, world: World, *arguments: str) -> None:
        infra = write_infra(world.folder / "cli", make_graph("policy"), **SLEEP)
        command = world.command("run", "--infra", infra, "--no-wait", *arguments)
        at = command.index("rollway.cli")
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *command[at + 1 :]], stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL, text=True, env=make_env(), start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_for(self, step: str) -> None:
        wait_until(lambda: step in self.text, 60, every=0.02, what=f"{step!r} in {self.lines}")

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> int:
        status = self._process.wait(60)
        self._reader.join(10)
        return status


def list_uids(world: World) -> set[str]:
    return {
        body["metadata"]["uid"] for kind in (RAYJOB, RAYCLUSTER, DGD) for body in world.list(kind)
    }


def test_a_second_command_is_refused_while_the_first_starts_the_run(world: World) -> None:
    world.dynamo.get_faults("policy").never_ready = True
    first = Command(world)
    first.wait_for("wait for the gates")
    before = list_uids(world)
    infra = world.folder / "cli" / "infra.yaml"
    for arguments in (["run"], ["run", "--recreate"], ["up"]):
        answer = world.call(*arguments, "--infra", infra, status=1)
        assert answer["error"] == "RunExists"
        assert f"process {first.pid}" in answer["message"]
    assert list_uids(world) == before
    world.dynamo.get_faults("policy").never_ready = False
    assert first.end() == 0, first.text
    lease = world.get(LEASE, NAME)
    assert "holderIdentity" not in lease["spec"]
    assert [owner["kind"] for owner in lease["metadata"]["ownerReferences"]] == ["RayJob"]
    assert world.call("run", "--infra", infra, "--no-wait")["state"] == "submitted"
    world.admin.delete(RAYJOB, RUN)  # the Lease goes with the run
    world.wait_until_empty()


def test_a_run_of_a_killed_command_is_taken_over_at_once(world: World) -> None:
    """On the machine of the holder, where its process is known to be dead."""
    world.dynamo.get_faults("policy").never_ready = True
    first = Command(world)
    first.wait_for("wait for the gates")
    first.send(signal.SIGKILL)
    first.end()
    world.dynamo.get_faults("policy").never_ready = False
    assert f"/{first.pid}/" in world.get(LEASE, NAME)["spec"]["holderIdentity"]
    infra, _ = world.load(make_graph("policy"), **SLEEP)
    reports: list[str] = []
    assert world.run(infra, reports=reports).state == "submitted"
    assert any(f"over from {os.environ.get('USER') or 'user'}" in text for text in reports)
    assert world.get(LEASE, NAME)["spec"]["leaseTransitions"] == 1
    take_down(world.cluster, RUN)
    world.wait_until_empty()


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_command_that_was_paused_does_not_undo_the_run_of_another(
    world: World, interrupted: bool
) -> None:
    world.dynamo.get_faults("policy").never_ready = True
    first = Command(world)
    first.wait_for("wait for the gates")
    first.send(signal.SIGSTOP)
    world.dynamo.get_faults("policy").never_ready = False
    infra, _ = world.load(make_graph("policy"), **SLEEP)

    def run_second() -> bool:
        try:
            return world.run(infra).state == "submitted"
        except RunExists:
            return False

    wait_until(run_second, 60, every=1.0, what="the second command takes over")
    before = list_uids(world)
    if interrupted:  # it begins its rollback when it goes on
        first.send(signal.SIGINT)
    first.send(signal.SIGCONT)
    assert first.end() == (130 if interrupted else 1), first.text
    assert "taken over" in first.text and "othing was rolled back" in first.text
    assert "roll back math" not in first.text
    assert list_uids(world) == before
    assert world.get(RAYJOB, RUN)["status"].get("jobDeploymentStatus") == "Running"
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_a_holder_of_another_machine_is_waited_for(world: World) -> None:
    """It may live: it is refused if it renews, and taken over if it does not for its duration."""
    infra, _ = world.load(make_graph("policy"), **SLEEP)
    spec = {
        "holderIdentity": "anna@elsewhere/7/ab12", "leaseDurationSeconds": 3,
        "acquireTime": "2026-01-01T00:00:00.000000Z", "renewTime": "2099-01-01T00:00:00.000000Z",
    }  # fmt: skip
    metadata = {"name": NAME, "labels": {RUN_LABEL: RUN}, "annotations": {PROCESS: "x/pid:[1]/7/7"}}
    world.admin.create(LEASE, {"metadata": metadata, "spec": spec})
    reports: list[str] = []

    def renew() -> None:
        wait_until(lambda: any("look whether" in text for text in reports), 30)
        change = {"spec": {"renewTime": "2020-01-01T00:00:00.000000Z"}}
        world.admin.patch(LEASE, NAME, change)

    refused = pytest.raises(RunExists, match=r"started by anna@elsewhere \(process 7\)")
    with meanwhile(renew), refused:
        world.run(infra, reports=reports)
    assert not world.list(RAYJOB)
    assert world.run(infra).state == "submitted"
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_a_command_that_is_overtaken_stops_and_leaves_the_run(world: World) -> None:
    world.dynamo.get_faults("policy").never_ready = True
    infra, _ = world.load(make_graph("policy"), **SLEEP)

    def overtake() -> None:
        wait_until(lambda: world.list(DGD), 30)
        change = {"spec": {"holderIdentity": "bob@elsewhere/8/cd34"}}
        world.admin.patch(LEASE, NAME, change)

    with meanwhile(overtake), pytest.raises(LeaseLost, match=r"by bob@elsewhere \(process 8\)"):
        world.run(infra, limits=SHORT)
    assert len(world.list(RAYJOB)) == len(world.list(DGD)) == 1
    assert world.get(LEASE, NAME)["spec"]["holderIdentity"] == "bob@elsewhere/8/cd34"
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_a_run_that_is_taken_down_while_it_starts_leaves_nothing(world: World) -> None:
    world.dynamo.get_faults("policy").never_ready = True
    infra, _ = world.load(make_graph("policy"), **SLEEP)

    def end() -> None:
        wait_until(lambda: world.list(DGD), 30)
        world.call("down", RUN)

    with meanwhile(end), pytest.raises(ClusterError):
        world.run(infra, limits=SHORT)
    world.wait_until_empty()


@pytest.mark.parametrize("order", ["suspended", "inference-first"])
def test_an_api_server_that_is_away_for_longer_than_the_lease_costs_only_time(
    world: World, control_plane: ControlPlane, order: str
) -> None:
    world.dynamo.get_faults("policy").ready_after = 8.0
    infra, _ = world.load(make_graph("policy"), **SLEEP)

    def restart() -> None:
        wait_until(lambda: world.list(DGD), 30)
        control_plane.kill()
        assert stays(lambda: True, SHORT.lease + 2)
        control_plane.revive()

    limits = dataclasses.replace(SHORT, gates=120, driver=120)
    with meanwhile(restart):
        result = world.run(infra, order=order, limits=limits)
    assert result.state == "submitted"
    assert world.get(LEASE, NAME)["spec"]["leaseTransitions"] == 0
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_a_lease_of_somebody_else_is_not_touched(world: World) -> None:
    world.admin.create(LEASE, {"metadata": {"name": NAME}, "spec": {"holderIdentity": "theirs"}})
    infra, _ = world.load(make_graph("policy"), **SLEEP)
    with pytest.raises(RunExists, match="does not belong to run math"):
        world.run(infra)
    take_down(world.cluster, RUN)
    assert world.get(LEASE, NAME)["spec"]["holderIdentity"] == "theirs"


def test_servers_without_a_job_leave_a_lease_that_down_removes(world: World) -> None:
    infra, _ = world.load(make_graph("policy"), **SLEEP)
    world.up(infra)
    assert "holderIdentity" not in world.get(LEASE, NAME)["spec"]
    world.call("down", RUN)
    world.wait_until_empty()
