"""The connection rules, and which groups are leftovers. Ray is a stand-in that only remembers."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rollway import make_spec, processes
from rollway.errors import UsageError
from rollway.stack.ray import cluster, groups, launcher


class Connection:
    """Stands for Ray's connection of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_open: bool) -> None:
        self.is_open = is_open
        self.opened: list[str] = []
        self.closed = 0
        self.own: list[list[str]] = []
        """The command lines of raylets that run as this user."""
        monkeypatch.setattr(processes, "list_own_commands", lambda _: self.own)
        monkeypatch.setattr(cluster, "_is_node", lambda: True)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(ray, "is_initialized", lambda: self.is_open)
        monkeypatch.setattr(ray, "init", self.open)
        monkeypatch.setattr(ray, "shutdown", self.close)
        context = SimpleNamespace(gcs_address="10.0.0.1:6379")
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)

    def open(self, address: str, **_: Any) -> None:
        self.opened.append(address)
        self.is_open = True

    def close(self) -> None:
        self.closed += 1
        self.is_open = False


def test_a_users_connection_is_used_and_never_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Connection(monkeypatch, is_open=True)
    with cluster.connect(), cluster.connect("10.0.0.1:6379"):
        pass
    assert (fake.opened, fake.closed) == ([], 0)
    with pytest.raises(UsageError, match="connected to the Ray cluster at"):
        cluster.connect("10.0.0.2:6379").__enter__()


def test_an_own_connection_is_closed_by_its_last_user(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Connection(monkeypatch, is_open=False)
    first, second = cluster.connect(), cluster.connect()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        fake.own = [["raylet", f"--gcs-address={address}", "--node-id=0"]]
        first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (fake.opened, fake.closed) == ([address], 0)
    second.__exit__(None, None, None)
    assert fake.closed == 1


def test_an_address_is_asked_for_unless_one_cluster_is_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a container, for example, are seen but not reached: Ray would try for minutes."""
    fake = Connection(monkeypatch, is_open=False)
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # names none
    with (
        socket.socket() as unused,
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        unused.bind(("127.0.0.1", 0))  # and nobody listens
        ports = [each.getsockname()[1] for each in (unused, one, two)]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        lines = [["raylet", f"--gcs-address={address}"] for address in addresses]
        for own, cause in ((lines[:1], "no Ray cluster of yours"), (lines, "in several")):
            fake.own = own
            with pytest.raises(UsageError, match=cause) as failure:
                cluster.connect().__enter__()
            assert "--on ray=HOST:PORT" in failure.value.hint
        fake.own = [*lines[:2], lines[1]]
        assert cluster.find_address() == addresses[1]
    assert fake.opened == []


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(UsageError, match=f"no Ray cluster at {address}"):
        cluster.connect(address).__enter__()


@pytest.mark.parametrize("is_in_environment", [False, True])
@pytest.mark.parametrize("address", ["10.0.0.1", "local", "ray://10.0.0.1:10001", "10.0.0.1:gcs"])
def test_what_is_no_address_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, address: str, is_in_environment: bool
) -> None:
    """Ray would try the third for half a minute, and start a cluster of its own for `local`."""
    fake = Connection(monkeypatch, is_open=False)
    if is_in_environment:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UsageError, match=f"`{address}` is not the address") as failure:
        cluster.connect(None if is_in_environment else address).__enter__()
    assert "HOST:PORT" in failure.value.hint and fake.opened == []


def test_a_dead_cluster_in_the_environment_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray would try for two minutes, also for a command about stacks of this machine."""
    fake = Connection(monkeypatch, is_open=False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UsageError, match=f"no Ray cluster at {address}") as failure:
            cluster.connect().__enter__()
    assert "RAY_ADDRESS" in failure.value.hint and fake.opened == []


def test_a_machine_that_is_no_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of Ray needs a raylet beside it; Ray would look for one for a minute."""
    fake = Connection(monkeypatch, is_open=False)
    monkeypatch.setattr(cluster, "_is_node", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UsageError, match="This machine is no node") as failure:
            cluster.connect(address).__enter__()
    assert f"ray start --address {address}" in failure.value.hint and fake.opened == []


def test_a_connection_by_ray_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Connection(monkeypatch, is_open=True)
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    with pytest.raises(UsageError, match=r"Ray Client .* cannot run stacks"):
        cluster.connect().__enter__()


LIVING, DEAD, KEPT = "a" * 16, "b" * 16, "c" * 16


def test_only_groups_of_runs_without_any_actor_are_leftovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {
        f"rollway/{LIVING}/services": LIVING,
        f"rollway/{DEAD}/m-0": DEAD,
        f"rollway/{KEPT}/m-0": KEPT,
    }
    actors = [
        {"name": "rollway/a", "namespace": "rollway"},
        {"name": f"rollway/{KEPT}/node-0", "namespace": "rollway"},
        {"name": f"rollway/{DEAD}x/node-0", "namespace": "users"},  # a prefix is no name
    ]
    removed: list[str] = []
    head = SimpleNamespace(identify=SimpleNamespace(remote=lambda: {"run_id": LIVING}))
    monkeypatch.setattr(groups, "list_groups", lambda: known)
    monkeypatch.setattr(groups, "remove_groups", removed.extend)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: actors)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: head)
    monkeypatch.setattr(ray, "get", lambda ref, timeout: ref)
    assert groups.clear_leftovers() == removed == [f"rollway/{DEAD}/m-0"]

    def hang(*_: Any, **__: Any) -> None:
        raise ray.exceptions.GetTimeoutError

    removed.clear()
    monkeypatch.setattr(ray, "get", hang)
    assert groups.clear_leftovers() == removed == []


def test_stacks_are_found_where_they_were_started(
    monkeypatch: pytest.MonkeyPatch, own_home: Path
) -> None:
    """By the file of the start, as long as the cluster there is ours: a local stack's command dials
    nobody, and the port of a cluster that has ended may be another user's."""
    fake = Connection(monkeypatch, is_open=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        fake.own = [["raylet", f"--gcs-address={address}"]]
        assert not launcher.may_reach_cluster()  # nothing was started there
        monkeypatch.setattr(cluster, "get_address", lambda: address)
        launcher._remember(make_spec(model="org/m", name="policy", ray={"namespace": "a/b"}))
        (file,) = (own_home / "ray").iterdir()
        assert (file.name, file.stat().st_mode & 0o777) == ("a%2Fb%2Fpolicy", 0o600)
        assert launcher.may_reach_cluster()
        fake.own = []
        assert not launcher.may_reach_cluster()
        with pytest.raises(UsageError, match="no Ray cluster of yours"):
            launcher.find("a/b/policy")  # it can be on Ray alone
        file.write_bytes(b"\xff")
        assert not launcher.may_reach_cluster()
    assert fake.opened == []


def test_a_cluster_that_refuses_this_process_is_not_called_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ray start` asks for a token where the home has one; drivers do not send it by themselves."""
    fake = Connection(monkeypatch, is_open=False)

    def refuse(**_: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UsageError, match=r"does not accept this process.*RAY_AUTH_MODE=token"):
            cluster.connect(address).__enter__()
    assert not fake.is_open


@pytest.mark.parametrize(
    ("address", "current", "is_same"),
    [
        ("127.0.0.1:6379", "127.0.0.2:6379", True),  # both are this machine's
        ("localhost:6379", "127.0.0.1:6379", True),
        ("127.0.0.1:6379", "127.0.0.1:6380", False),
        ("127.0.0.1:6379", "203.0.113.9:6379", False),
        ("203.0.113.9:6379", "203.0.113.9:6379", True),
        ("no-such-host.invalid:6379", "203.0.113.9:6379", False),
        ("ray://127.0.0.1:6379", "127.0.0.1:6379", False),
    ],
)
def test_a_cluster_has_several_addresses(
    monkeypatch: pytest.MonkeyPatch, address: str, current: str, is_same: bool
) -> None:
    """Ray names a cluster by its node's address, Curator's client often by 127.0.0.1."""
    Connection(monkeypatch, is_open=True)
    context = SimpleNamespace(gcs_address=current)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    if is_same:
        with cluster.connect(address):
            pass
    else:
        with pytest.raises(UsageError, match="not to"):
            cluster.connect(address).__enter__()


def test_a_cluster_of_other_versions_is_named_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Connection(monkeypatch, is_open=False)

    def refuse(**_: Any) -> None:
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.10.1\n"
            "This process on node 10.0.0.2 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7"
        )

    monkeypatch.setattr(ray, "init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UsageError) as failure:
            cluster.connect(address).__enter__()
    assert "Ray: 2.9.0 Python: 3.10.1" in failure.value.message
    assert "Ray: 2.60.0" in failure.value.message
    assert "the cluster's versions of Ray and Python" in failure.value.hint
    assert not fake.is_open
