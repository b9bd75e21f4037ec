"""The footprint of a test blames no test that runs beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollway.stack.locks import FIRST
from rollway.weights import adapter
from tests import footprint

LISTEN = """
import socket, sys, time
for port in range(int(sys.argv[1]), 65536):
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError:
        continue
    print(port, flush=True)
    time.sleep(600)
"""


def test_a_process_of_another_run_that_starts_during_the_look_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, never_seen = footprint.Footprint(), footprint.Footprint()
    monkeypatch.setenv(footprint.RUN, "another")
    other = subprocess.Popen(
        [sys.executable, "-c", LISTEN, str(FIRST)], stdout=subprocess.PIPE, text=True
    )
    monkeypatch.undo()
    try:
        assert other.stdout is not None
        port = other.stdout.readline().strip()
        find = footprint._foreign_pids
        looks: list[set[int]] = []

        def overlook_at_first() -> set[int]:
            pids = find()
            looks.append(pids)
            return pids - {other.pid} if len(looks) == 1 else pids

        monkeypatch.setattr(footprint, "_foreign_pids", overlook_at_first)
        assert port not in before.new().get("ports", set())
        assert len(looks) >= 2

        monkeypatch.setattr(footprint, "_foreign_pids", lambda: find() - {other.pid})
        assert port in never_seen.new()["ports"]
    finally:
        other.kill()
        other.communicate()


def test_another_run_is_known_by_the_processes_that_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel shows the environment of a process's start: a pytest process has no id there."""
    run = subprocess.Popen([sys.executable, "-c", LISTEN, str(FIRST)], stdout=subprocess.PIPE)
    monkeypatch.setenv(footprint.RUN, str(run.pid))
    child = subprocess.Popen([sys.executable, "-c", LISTEN, str(FIRST)], stdout=subprocess.PIPE)
    monkeypatch.undo()
    try:
        assert run.stdout is not None and run.stdout.readline()
        assert child.stdout is not None and child.stdout.readline()
        assert {run.pid, child.pid} <= footprint._foreign_pids()
    finally:
        for process in (run, child):
            process.kill()
            process.communicate()


def test_the_adapters_of_another_run_are_known_by_their_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process has the directory open; a file in it names the worker."""
    monkeypatch.setattr(adapter, "HOME", tmp_path)
    monkeypatch.setattr(footprint.processes, "SHM", tmp_path)
    home = adapter.create_adapter_home("a worker")
    assert footprint._shared_memory(set()) == {home.name}
    assert footprint._shared_memory({os.getpid()}) == set()


def test_what_a_killed_worker_of_another_run_leaves_to_its_successor_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "HOME", tmp_path)
    monkeypatch.setattr(footprint.processes, "SHM", tmp_path)
    worker = os.getpid()
    monkeypatch.setattr(footprint, "_foreign_pids", lambda: {worker})
    before = footprint.Footprint()
    home = adapter.create_adapter_home("a worker")
    monkeypatch.setattr(footprint, "_foreign_pids", set)
    assert home.name not in before.new().get("shared memory", set())
    assert footprint._shared_memory(set()) == {home.name}
