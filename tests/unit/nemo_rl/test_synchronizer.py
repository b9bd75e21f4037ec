"""One refit as NeMo-RL asks for it: versions, deadlines, and what the policy's ranks are told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rollway.errors import RefitError, RollwayError, UsageError
from rollway.fleet.report import RefitReport, WorkerReport
from rollway.integrations.nemo_rl.config import MxConfig, WeightSync
from rollway.integrations.nemo_rl.publish import RankPublisher
from rollway.integrations.nemo_rl.synchronizer import Synchronizer
from rollway.weights.offer import Offer


class FakeStack:
    """The stack of a `Generation`, without processes: what a refit does is said by the test."""

    def __init__(self) -> None:
        self.name = "run"
        self.receivers = [2]
        self.refits: list[int] = []
        self.outcome: Callable[[], Coroutine[Any, Any, None]] | None = None
        worker = SimpleNamespace(
            admin_url="http://127.0.0.1:9", world_size=1, instance_id=1, error=None
        )
        self.versions = SimpleNamespace(newest=None)

        async def workers(fresh: bool = True) -> list[Any]:
            return [worker]

        async def read_versions() -> dict[int, int]:
            return {}

        async def choose_version(identity: str) -> int:
            return 1 + max(self.versions.newest or 0, self.claimed)

        self.claimed = 0
        self.fleet = SimpleNamespace(
            workers=workers, read_versions=read_versions, choose_version=choose_version
        )

    def find_checkpoint(self, model: str) -> str:
        return "/models/policy"

    async def count_receivers(self, model: str) -> int:
        return self.receivers.pop(0) if len(self.receivers) > 1 else self.receivers[0]

    async def refit(self, version: int, offer: Offer, **_: Any) -> RefitReport:
        self.refits.append(version)
        if self.outcome is not None:
            await self.outcome()
        self.versions.newest = version
        return RefitReport(version, workers=[WorkerReport(1, "serving", version)], passes=1)


class FakeGeneration:
    is_copy = False
    requires_kv_scale_sync = False

    def __init__(self, stack: FakeStack) -> None:
        self.dynamo_cfg: Any = SimpleNamespace(
            weight_sync=WeightSync(), refit_timeout_s=None, refit_mode="pause-all"
        )
        self.connection = SimpleNamespace(
            stack=stack, fleet=stack.fleet, model="policy", secret="secret", run=asyncio.run
        )
        self.figures: list[Any] = []

    def note_refit(self, figures: Any) -> None:
        self.figures.append(figures)


class FakePolicy:
    """Two ranks that record their calls; the first offers what it was told to publish."""

    def __init__(self, counted: bool = False) -> None:
        self.calls: list[str] = []
        self.scales: Any = None
        self.drafts = [0, 0]
        self.worker_group = self
        self.workers = [0, 1]
        self._next = (0, 0)
        self._counted = counted

    def run_all_workers_single_data(self, name: str, **fields: Any) -> list[Any]:
        assert name == "checkpoint_engine_rpc"
        method, kwargs = fields["checkpoint_method"], fields["method_kwargs"]
        self.calls.append(method)
        if method == "begin":
            self._next = kwargs["version"], kwargs["receivers"]
            self.scales = kwargs["kv_scales"]
        if method == "count_drafts":
            return list(self.drafts)
        if method == "take_offer":
            where = {"receivers": self._next[1]} if self._counted else {}
            return [Offer("shm", self._next[0], "x" * 8, 1000, where).as_json(), None]
        return [None, None]


def make(policy: FakePolicy | None = None, **options: Any) -> tuple[Synchronizer, FakeStack]:
    stack = FakeStack()
    generation: Any = FakeGeneration(stack)
    return Synchronizer(policy or FakePolicy(), generation, get=list, **options), stack


def test_versions_rise_above_whatever_was_served() -> None:
    synchronizer, stack = make()
    stack.versions.newest = 17  # of an earlier run
    assert synchronizer.is_stale
    figures = synchronizer.sync_weights()
    synchronizer.sync_weights()  # NeMo-RL has one number for both
    assert stack.refits == [18, 19]
    assert not synchronizer.is_stale
    assert figures["version"] == 18
    assert figures["workers"] == 1
    assert figures["bytes"] == 1000


def test_versions_rise_above_what_a_killed_driver_claimed() -> None:
    synchronizer, stack = make()
    stack.claimed = 4  # and no worker serves it
    assert synchronizer.sync_weights()["version"] == 5


def test_a_version_is_used_up_by_a_refit_that_failed() -> None:
    policy = FakePolicy()
    synchronizer, stack = make(policy)

    async def fail() -> None:
        raise RefitError("no worker", report=None)

    stack.outcome = fail
    with pytest.raises(RefitError):
        synchronizer.sync_weights()
    assert synchronizer.is_stale
    assert policy.calls[-1] == "cancel"
    stack.outcome = None
    synchronizer.sync_weights()
    assert stack.refits == [1, 2]
    assert policy.calls[-1] == "complete"


def test_a_broadcast_to_a_fleet_that_changed_is_published_again() -> None:
    policy = FakePolicy(counted=True)
    synchronizer, stack = make(policy)
    stack.receivers = [2, 3, 3, 3]  # one joined after the first version was published
    synchronizer.sync_weights()
    assert stack.refits == [2]
    assert policy.calls.count("send_weights_via_checkpoint_engine") == 2
    assert policy.calls.count("cancel") == 1


def test_a_fleet_that_never_stops_changing_is_an_error() -> None:
    synchronizer, stack = make(FakePolicy(counted=True))
    stack.receivers = [1, 2, 3, 4, 5]
    with pytest.raises(RollwayError, match="changed twice"):
        synchronizer.sync_weights()
    assert stack.refits == []
    assert synchronizer.is_stale


def test_a_deadline_is_honoured() -> None:
    synchronizer, stack = make(refit_timeout_s=0.05)

    async def hang() -> None:
        await asyncio.Event().wait()

    stack.outcome = hang
    with pytest.raises(RollwayError, match=r"longer than 0\.05 s"):
        synchronizer.sync_weights()
    assert synchronizer.is_stale


def test_the_limit_of_model_express_is_that_of_a_refit() -> None:
    mx = MxConfig(enabled=True, timeout_seconds=0.05)
    synchronizer, stack = make(sync=WeightSync(method="nixl", mx_config=mx))

    async def hang() -> None:
        await asyncio.Event().wait()

    stack.outcome = hang
    with pytest.raises(RollwayError, match=r"longer than 0\.05 s"):
        synchronizer.sync_weights()
    assert make(sync=WeightSync())[0]._seconds is None


def test_a_rank_publishes_by_the_card_of_the_recipe() -> None:
    pytest.importorskip("torch")
    mx = MxConfig(enabled=True, nic_pin="mlx5_3")
    synchronizer, _ = make(sync=WeightSync(method="nixl", mx_config=mx))
    options = synchronizer._make_options()
    assert RankPublisher(options, 0, 1)._list_nixl_options(False)["net_devices"] == ("mlx5_3:1",)
    off = replace(options, nic_pin="off")
    assert "net_devices" not in RankPublisher(off, 0, 1)._list_nixl_options(False)


def test_ranks_are_told_what_mx_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("NRL_MX_EXPERT_TENSOR_PATTERN", "bank")
    server = {"enabled": True, "mx_server_url": "mx:8001"}
    first, second = (make(sync=WeightSync(mx_config=server))[0]._make_options() for _ in range(2))
    assert first.catalog == "" and first.same_rank and first.expert_pattern == "bank"
    assert first.modelexpress | {"run": ""} == {"server": "mx:8001", "model": "policy", "run": ""}
    assert first.modelexpress["run"] != second.modelexpress["run"]
    options = RankPublisher(first, 0, 2)._list_nixl_options(is_shard=True)
    assert options["same_rank"] and options["modelexpress"]["server"] == "mx:8001"
    own = {"enabled": True, "mx_server_url": "rollway://catalog:7070", "same_rank_only": False}
    options = make(sync=WeightSync(mx_config=own))[0]._make_options()
    assert options.catalog == "http://catalog:7070" and not options.modelexpress
    assert not options.same_rank
    # Without `enabled`, what NeMo-RL's names say does not count.
    options = make(sync=WeightSync())[0]._make_options()
    assert not (options.modelexpress or options.catalog or options.same_rank)


def test_scales_of_a_cache_are_refused_before_anything_is_published() -> None:
    policy = FakePolicy()
    synchronizer, stack = make(policy)
    with pytest.raises(UsageError, match="FP8 KV cache"):
        synchronizer.sync_weights(kv_scales={"model.layers.0.self_attn.k_scale": 1.0})
    assert policy.calls == [] and stack.refits == []


def test_scales_of_a_cache_travel_with_the_version() -> None:
    policy = FakePolicy()
    synchronizer, stack = make(policy)
    generation: Any = synchronizer._generation
    generation.requires_kv_scale_sync = True
    name = "model.layers.0.self_attn.k_scale"
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="a scale is a positive number"):
            synchronizer.sync_weights(kv_scales={name: wrong})
    assert policy.calls == [] and stack.refits == []
    synchronizer.sync_weights(kv_scales={name: 0.5})
    assert policy.scales == {name: 0.5} and stack.refits == [1]
    synchronizer.sync_weights()  # before the first calibration, and by the asynchronous trainer
    assert policy.scales == {}


def test_a_draft_model_that_the_publishing_rank_does_not_hold_is_refused() -> None:
    policy = FakePolicy()
    synchronizer, stack = make(policy)
    policy.drafts = [0, 12]  # on the second pipeline stage
    with pytest.raises(UsageError, match="later pipeline stage"):
        synchronizer.sync_weights()
    assert stack.refits == [] and policy.calls[-1] == "cancel"
    policy.drafts = [12, 12]
    synchronizer.sync_weights()
    assert stack.refits == [2]


def test_the_time_of_a_refit_is_nemo_rls() -> None:
    seen = []

    class Timer:
        @contextlib.contextmanager
        def time(self, name: str) -> Any:
            seen.append(name)
            yield

    synchronizer, _ = make()
    synchronizer.sync_weights(timer=Timer())
    assert seen == ["prepare_for_generation/transfer_and_update_weights"]
    synchronizer.mark_stale()
    assert synchronizer.is_stale
    synchronizer.shutdown()
    synchronizer.shutdown()  # idempotent
