"""The parts of a run and the specs of their stacks. No Ray: keepers are stand-ins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollway.errors import SpecError
from rollway.spec import StackSpec, load_spec
from rollway.stack.ray.cluster import NodeInfo
from rollway.stack.ray.node_check import check_runtime_envs, get_python
from rollway.stack.ray.parts import Parts
from rollway.stack.ray.placement import RankPlace, ReplicaPlace
from rollway.stack.state import is_ray_part

RUN = "0123456789abcdef"
JOIN = {
    "discovery": "etcd",
    "etcd_endpoints": "http://10.0.0.1:2379",
    "join": {"namespace": "n", "frontend": "http://10.0.0.1:8000", "rl": "http://10.0.0.1:8001"},
}


class Keeper:
    """Accepts a start, and leases three ports."""

    def __init__(self) -> None:
        self.specs: list[StackSpec] = []
        self.start = SimpleNamespace(remote=self._start)
        self.lease_ports = SimpleNamespace(remote=self._lease)
        self.leases = 0

    async def _start(self, fields: dict[str, Any], after: list[str]) -> None:
        self.specs.append(StackSpec.model_validate(fields))

    async def _lease(self, host: str) -> tuple[int, int, int]:
        self.leases += 1
        return 21000, 21001, 21002


def make_parts(**fields: Any) -> tuple[Parts, dict[str, Keeper]]:
    spec = load_spec({"name": "s", "models": [{"path": "org/m", "replicas": 3}], **fields},
                     launcher="ray")  # fmt: skip
    parts = Parts(spec, RUN, None)
    nodes = {"one": "10.0.0.1", "two": "10.0.0.2"}.items()
    parts.note_nodes([NodeInfo(node, address, False, 8, 8, {}) for node, address in nodes])
    keepers = {"one": Keeper(), "two": Keeper()}
    parts.keepers = dict(keepers)
    return parts, keepers


def whole(replica: int, node: str) -> ReplicaPlace:
    return ReplicaPlace("m", replica, "", (RankPlace(node, 0, 1, 1),))


async def test_each_node_has_one_part_for_its_whole_replicas() -> None:
    parts, keepers = make_parts(log_dir="/logs")
    places = [whole(0, "one"), whole(1, "two"), whole(2, "two")]
    first, second = parts.divide(places, services="one")
    await parts.launch(first, {"discovery": "etcd"})
    await parts.launch(second, JOIN)
    (services,), (joined,) = keepers["one"].specs, keepers["two"].specs
    assert services.join is None and joined.join is not None
    assert (services.admin_host, services.frontend.host) == ("10.0.0.1", "10.0.0.1")
    assert joined.admin_host == "10.0.0.2"
    assert services.placed is not None and [w.replica for w in services.placed] == [0]
    assert joined.placed is not None and [w.replica for w in joined.placed] == [1, 2]
    assert services.name == "ray-s-01234567-0" and is_ray_part(services.name)
    assert joined.log_dir == Path("/logs/node-1")
    assert services.launcher == joined.launcher == "local"


async def test_ranks_of_a_replica_over_nodes_are_parts_of_their_own_and_meet() -> None:
    parts, keepers = make_parts()
    place = ReplicaPlace("m", 0, "", (RankPlace("one", 0, 1, 1), RankPlace("two", 1, 1, 1)))
    parts.groups._gpus = {(place, 0): ["3"], (place, 1): ["5"]}
    all_parts = parts.divide([place], services="one")
    assert [part.shares_replica for part in all_parts] == [False, True, True]
    for part in all_parts:
        await parts.launch(part, JOIN if part.number else {"discovery": "etcd"})
    first, second = keepers["one"].specs[1].placed, keepers["two"].specs[0].placed
    assert first is not None and second is not None
    assert first[0].master == second[0].master == "10.0.0.1:21000"
    assert (first[0].node_rank, second[0].node_rank) == (0, 1)
    assert (first[0].gpus, second[0].gpus) == (["3"], ["5"])
    assert keepers["one"].leases == 1


def test_py_executable_is_the_interpreter_of_the_engines() -> None:
    def python(**fields: Any) -> str | None:
        return get_python(load_spec({"models": [{"path": "org/m"}], **fields}))

    assert python() is None
    assert python(runtime_env={"py_executable": "/e/python"}) == "/e/python"
    assert python(python="/e/python", runtime_env={"py_executable": "/e/python"}) == "/e/python"
    with pytest.raises(SpecError, match="several interpreters"):
        python(python="/f/python", runtime_env={"py_executable": "/e/python"})


@pytest.mark.parametrize(
    ("runtime_env", "cause"),
    [
        ({"py_modules": ["/w"]}, "has `py_modules`, which Rollway does not provide"),
        ({"working_dir": "s3://b/w.zip"}, "`working_dir` of .* is an address"),
        ({"pip": "requirements.txt"}, "`pip` .* has `-r requirements.txt`, which is not a package"),
        ({"uv": ["git+https://host/x"]}, "has `git.*`, which is not a package with a name"),
        ({"uv": {"packages": [1]}}, "has `1`, which is not a package with a name"),
    ],
)
def test_what_nobody_would_provide_is_refused(runtime_env: dict[str, Any], cause: str) -> None:
    spec = load_spec({"models": [{"path": "org/m", "runtime_env": runtime_env}]})
    with pytest.raises(SpecError, match=cause):
        check_runtime_envs(spec)


def test_packages_may_be_named() -> None:
    """Each node is asked whether it has them."""
    check_runtime_envs(load_spec({"models": [{"path": "org/m", "runtime_env": {"pip": ["x"]}}]}))
