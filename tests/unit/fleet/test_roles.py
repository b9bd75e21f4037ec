"""The order of the roles in a refit, and joiners of either pool."""

from __future__ import annotations

import pytest

from rollway.fleet.refit import split_in_shares, split_in_stages
from rollway.rollout.sampling import Sampling
from tests.unit.fleet.refit_machine import machine


def get_role(worker: str) -> str:
    return {"p": "prefill", "d": "decode"}.get(worker[0], "")


@pytest.mark.parametrize(
    ("mode", "stages"),
    [
        ("wait", [["p1", "p2"], ["d1"]]),  # decode workers still fetch what prefill workers hold
        ("abort", [["d1"], ["p1", "p2"]]),  # nobody fetches any more
    ],
)
def test_one_role_goes_after_the_other(mode: str, stages: list[list[str]]) -> None:
    assert split_in_stages(["p1", "d1", "p2"], mode, get_role) == stages
    assert split_in_stages(["a", "b"], mode, get_role) == [["a", "b"]]


@pytest.mark.parametrize(
    ("workers", "shares"),
    [
        ("p1 p2 d1 d2 d3 d4", [["p1", "d1", "d2"], ["p2", "d3", "d4"]]),
        ("p1 d1 d2", [["p1", "d1"], ["d2"]]),
        ("p1 d1", [["p1", "d1"]]),
        ("a b c d", [["a", "b"], ["c", "d"]]),
    ],
)
def test_rolling_moves_a_share_of_each_role(workers: str, shares: list[list[str]]) -> None:
    roles = {name: get_role(name) if len(name) > 1 else "" for name in workers.split()}
    assert split_in_shares(list(roles), 0.5, roles.__getitem__) == shares


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_of_either_role_is_moved_before_it_gets_requests(role: str) -> None:
    with machine(kind=("managed", "pools"), count=1) as m:
        run, process, world = m.loop.run_until_complete, m.processes[0], m.world
        assert run(process.refit(1)) == "done"
        next(worker for worker in world.workers.values() if worker.role == role).die()
        restarted = world.join()
        assert restarted.role == role
        m.advance(15.0)  # the dead worker is no longer listed
        run(process.fleet.refresh(now=True))
        assert not process.versions.is_served(1)  # the other pool alone does not serve it
        assert run(process.admit()) == "done"
        assert (restarted.label, restarted.weights) == (1, "w1")
        (rollout,) = run(process.rollouts.generate([1], Sampling(max_tokens=3)))
        assert rollout.weight_version == 1
        m.holds()
