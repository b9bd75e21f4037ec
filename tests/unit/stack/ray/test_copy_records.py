"""The record of several nodes comes together in one directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollway.errors import StackNotRunning
from rollway.observe.read import Run
from rollway.observe.record import Recorder
from rollway.stack.ray import head_client, keeper
from rollway.stack.ray.head_client import copy_new, copy_records
from rollway.stack.ray.keeper import read_record
from tests.waiting import wait_until


class Nodes:
    """Stands in for the Head: the records of nodes that share nothing."""

    def __init__(self, directories: dict[str, Path]) -> None:
        self.directories = directories
        self.is_gone = False

    def fetch(
        self, known: dict[str, dict[str, int]], own: frozenset[str]
    ) -> dict[str, dict[str, bytes]]:
        if self.is_gone:
            raise StackNotRunning("it has ended")
        return {
            node: read_record(directory, known.get(node, {}), own)
            for node, directory in self.directories.items()
        }


def record(directory: Path, node: str) -> Recorder:
    recorder = Recorder(directory, "supervisor", stack="s", run="r")
    recorder.event("ready", node)
    recorder.write("sample", values={})
    recorder.flush()
    return recorder


def list_details(directory: Path) -> list[str]:
    return [e["detail"] for e in Run(directory).read() if e["kind"] == "event"]


def test_all_nodes_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    nodes = Nodes({"aa": tmp_path / "a", "bb": tmp_path / "b", "cc": here})
    recorders = [record(tmp_path / "a", "a"), record(tmp_path / "b", "b"), record(here, "here")]
    monkeypatch.setattr(keeper, "LARGEST_PIECE", 100)  # many calls, and lines that are cut
    while copy_new(here, nodes.fetch):
        pass
    assert sorted(list_details(here)) == ["a", "b", "here"]
    recorders[1].event("exited", "b again")
    recorders[1].flush()
    while copy_new(here, nodes.fetch):
        pass
    assert sorted(list_details(here)) == ["a", "b", "b again", "here"]
    assert Run(here).problems == {}
    for recorder in recorders:
        recorder.close()


def test_it_follows_until_the_stack_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_client, "_COPY_SECONDS", 0.02)
    nodes, here = Nodes({"aa": tmp_path / "a"}), tmp_path / "here"
    recorder = record(tmp_path / "a", "a")
    with copy_records(here, nodes.fetch):
        assert list_details(here) == ["a"]
        recorder.event("exited", "later")
        wait_until(lambda: list_details(here) == ["a", "later"])
        nodes.is_gone = True
    recorder.close()


def test_a_node_cannot_write_outside_of_the_directory(tmp_path: Path) -> None:
    hostile = {"aa": {"../../evil.jsonl": b"x"}}
    copy_new(tmp_path / "here", lambda *_: hostile)
    assert list((tmp_path / "here").iterdir()) == [] and not (tmp_path / "evil.jsonl").exists()
