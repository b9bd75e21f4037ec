"""One command at a time starts a run: two at once, one that dies, is paused or overtaken."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import ClusterError, RunExists
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import CONFIG_MAP, DGD, RAYCLUSTER, RAYJOB, name_mark
from rollway.kubernetes.teardown import take_down
from tests.kubernetes.flows import (
    RUN,
    World,
    make_env,
    make_graph,
    meanwhile,
    open_world,
    write_infra,
)
from tests.waiting import wait_until

NAME = name_mark(RUN)
SLEEP: dict[str, Any] = {"launch": {"entrypoint": "sleep 60", "ttl_seconds": 600}}


@pytest.fixture
def world(admin: Cluster, kubeconfig: Path, tmp_path: Path) -> Iterator[World]:
    with open_world(admin, kubeconfig, tmp_path) as world:
        yield world


class Command:
    """`rollway k8s run` as a process."""

    def __init__(self, world: World, *arguments: str) -> None:
        infra = write_infra(world.folder / "cli", make_graph("policy"), **SLEEP)
        command = world.command("run", "--infra", infra, "--no-wait", *arguments)
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=make_env(),
            start_new_session=True,
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
    for command in ("run", "up"):
        answer = world.call(command, "--infra", infra, status=1)
        assert answer["error"] == "RunExists"
        assert f"process {first.pid}" in answer["message"]
    assert list_uids(world) == before
    world.dynamo.get_faults("policy").never_ready = False
    assert first.end() == 0, first.text
    assert world.call("run", "--infra", infra, status=1)["error"] == "RunExists"
    mark = world.get(CONFIG_MAP, NAME)
    assert mark["data"]["holder"] == ""
    assert [owner["kind"] for owner in mark["metadata"]["ownerReferences"]] == ["RayJob"]
    world.admin.delete(RAYJOB, RUN)  # the mark goes with the run
    world.wait_until_empty()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGINT])
def test_a_run_is_resumed_and_the_first_command_does_not_undo_it(
    world: World, number: signal.Signals
) -> None:
    """The first was killed, goes on after a pause, or begins its rollback after a pause."""
    world.dynamo.get_faults("policy").never_ready = True
    first = Command(world)
    first.wait_for("wait for the gates")
    first.send(signal.SIGKILL if number == signal.SIGKILL else signal.SIGSTOP)
    infra, _ = world.load(make_graph("policy"), **SLEEP)
    with pytest.raises(RunExists, match=f"process {first.pid}"):
        world.run(infra)
    world.dynamo.get_faults("policy").never_ready = False
    reports: list[str] = []
    assert world.run(infra, resume=True, reports=reports).state == "submitted"
    assert any(f"(process {first.pid})" in text for text in reports)
    before = list_uids(world)
    if number != signal.SIGKILL:
        if number == signal.SIGINT:
            first.send(number)
        first.send(signal.SIGCONT)
        assert first.end() == (130 if number == signal.SIGINT else 1), first.text
        assert "taken over" in first.text and "othing was rolled back" in first.text
        assert "roll back math" not in first.text
    assert list_uids(world) == before
    assert world.get(RAYJOB, RUN)["status"].get("jobDeploymentStatus") == "Running"
    take_down(world.cluster, RUN)
    world.wait_until_empty()


def test_a_run_that_is_taken_down_while_it_starts_leaves_nothing(world: World) -> None:
    world.dynamo.get_faults("policy").never_ready = True
    infra, _ = world.load(make_graph("policy"), **SLEEP)

    def end() -> None:
        wait_until(lambda: world.list(DGD), 30)
        world.call("down", RUN)

    with meanwhile(end), pytest.raises(ClusterError):
        world.run(infra)
    world.wait_until_empty()


def test_servers_without_a_job_leave_a_mark_that_down_removes(world: World) -> None:
    infra, _ = world.load(make_graph("policy"), **SLEEP)
    world.up(infra)
    assert world.get(CONFIG_MAP, NAME)["data"]["holder"] == ""
    world.call("down", RUN)
    world.wait_until_empty()
