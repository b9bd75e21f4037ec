"""A delta is written into the serving parameters exactly where vLLM's loader would put it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.engine import memory, patching
from rollway.engine.fingerprint import Proof
from rollway.engine.incoming import Incoming
from rollway.engine.loading import BatchedCopy, LoadPlan, PlannedCopy, Region, record_plan
from rollway.engine.memory import FreeMemory
from rollway.engine.patching import Patch, Translation, get_served
from rollway.engine.staging import Staging
from rollway.weights.digest.checksums import raw_bytes
from rollway.weights.layout import Slices
from rollway.weights.offer import Offer
from rollway.weights.transports.delta import DeltaPublisher, DeltaReader
from rollway.weights.transports.delta.versions import DELTA
from tests.unit.engine.vllm_models import (
    CONFIGS,
    Tensors,
    change,
    create_model,
    create_worker,
    headers_of,
    use_ranks,
    write_model,
)
from tests.waiting import wait_until

CPU = torch.device("cpu")
EVERYTHING = 1 << 60


def elements_of(tensors: Tensors) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in tensors.items()}


def state_of(model: torch.nn.Module) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(raw_bytes(tensor), raw_bytes(right[name])), name


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_patched_model_is_what_vllm_would_load(
    kind: str, tp: int, steps: int, tmp_path: Path
) -> None:
    """Fused, biased and tied parameters, experts, a padded vocabulary, replicated keys."""
    first = write_model(kind, tmp_path)
    publisher, reader = DeltaPublisher(tmp_path / "deltas"), DeltaReader()
    base = publisher.publish(1, first.items())
    reader.headers(base)
    reader.finish(base)
    last, offer = first, base
    for step in range(steps):
        last = change(last, step)
        offer = publisher.publish(2 + step, last.items())
    changes = reader.changes(offer, base.identity, EVERYTHING)
    assert changes.refusal == "" and len(changes.steps) == steps
    for rank in range(tp):
        with use_ranks(tp, rank):
            loaded, _ = create_model(tmp_path)
            patched, _ = create_model(tmp_path)
            plan = record_plan(patched, headers_of(first), Proof(patched).target_of, {})
            loaded.load_weights(iter(last.items()))
        BatchedCopy(plan, patched, first, Slices()).run()
        patch = Patch(plan, patched, elements_of(first))
        for step in changes.steps:
            patch.add(step, CPU)
        before = state_of(patched)
        patch.warm_up()
        assert_same(state_of(patched), before)
        patch.run()
        assert_same(state_of(patched), state_of(loaded))
        assert 0 < patch.count <= sum(p.numel() for p in patched.parameters()) * 0.04 * steps


@st.composite
def view_pairs(draw: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a source and a target, and views of them with equal shapes."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    views = []
    for start in (0, 1000):
        room = [size + draw(st.integers(0, 2)) for size in shape]
        order = draw(st.permutations(range(len(shape))))
        whole = torch.arange(start, start + torch.Size(room).numel()).view([room[i] for i in order])
        view = whole.permute([order.index(i) for i in range(len(shape))])
        for axis, size in enumerate(shape):
            first = draw(st.integers(0, view.shape[axis] - size))
            view = view.narrow(axis, first, size)
        views += [whole, view]
    return views[0], views[1], views[2], views[3]


@given(view_pairs(), st.data())
@settings(max_examples=300)
def test_positions_are_translated_through_any_copy(pair: Any, data: Any) -> None:
    source, source_view, target, target_view = pair
    copy = PlannedCopy("p", Region.of(target_view), "t", Region.of(source_view))
    translation = Translation.of(copy, source.numel())
    positions = torch.tensor(
        sorted(data.draw(st.sets(st.integers(0, source.numel() - 1)))), dtype=torch.int64
    )
    expected = target.clone().contiguous()
    moved = torch.full((source.numel(),), -1).scatter(0, positions, positions).view(source.shape)
    moved_view = moved.as_strided(source_view.shape, source_view.stride(), copy.source.offset)
    expected_view = copy.destination.view(expected)
    expected_view.copy_(torch.where(moved_view >= 0, moved_view, expected_view))
    places, bits = translation.translate(positions, positions)
    actual = target.clone().contiguous().view(-1).scatter_(0, places, bits)
    assert torch.equal(actual.view(expected.shape), expected)


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (2, 1)])
def test_views_whose_elements_repeat_have_no_translation(strides: tuple[int, int]) -> None:
    copy = PlannedCopy("p", Region(0, (2, 3), (3, 1)), "t", Region(0, (2, 3), strides))
    with pytest.raises(patching.NoPatch, match="positions in t cannot be translated"):
        Patch(LoadPlan(copies=(copy,)), torch.nn.ParameterDict({"p": torch.zeros(2, 3)}), {"t": 6})


@given(st.lists(st.dictionaries(st.integers(0, 20), st.integers(-9, 9)), min_size=1, max_size=4))
def test_later_bits_replace_earlier_ones(steps: list[dict[int, int]]) -> None:
    expected: dict[int, int] = {}
    written = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    for step in steps:
        expected |= step
        later = torch.tensor(list(step.items()), dtype=torch.int64).view(-1, 2).t().contiguous()
        written = patching.overlay(patching._sort(*written), (later[0], later[1]))
    places, bits = written
    assert sorted(zip(places.tolist(), bits.tolist(), strict=True)) == sorted(expected.items())


class Fleet:
    """A worker, and a publisher of deltas to it."""

    def __init__(self, directory: Path) -> None:
        self.tensors = write_model("qwen3", directory)
        self.root = directory / "deltas"
        self.publisher = DeltaPublisher(self.root, snapshot_every=100)
        self.reader = DeltaReader()
        self.directory = directory
        with use_ranks():
            self.worker = create_worker(directory)
        self.version = 0

    def publish(self, share: float = 0.03) -> Offer:
        self.version += 1
        self.tensors = change(self.tensors, self.version, share)
        return self.publisher.publish(self.version, self.tensors.items())

    def stage(self, offer: Offer) -> tuple[Staging, dict[str, Any]]:
        headers = self.reader.headers(offer)
        incoming = Incoming(self.worker, self.reader, offer, headers, torch.clone)
        staging = Staging(incoming, headers, [])
        wait_until(lambda: staging.report()["state"] != "running")
        return staging, staging.report()

    def refit(self, offer: Offer) -> dict[str, Any]:
        staging, report = self.stage(offer)
        assert report["state"] == "ready", report["error"]
        return staging.swap()

    def assert_serving(self) -> None:
        with use_ranks():
            model, _ = create_model(self.directory)
            model.load_weights(iter(self.tensors.items()))
        assert_same(state_of(self.worker.model_runner.get_model()), state_of(model))


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_deltas_are_patched_and_the_first_version_is_loaded(fleet: Fleet) -> None:
    result = fleet.refit(fleet.publish())
    assert result["strategy"] == "device"
    assert result["reason"].endswith("no patch, because it is not known which version is served")
    addresses = [p.data_ptr() for p in fleet.worker.model_runner.get_model().parameters()]
    for _ in range(3):
        staging, report = fleet.stage(fleet.publish())
        assert report["state"] == "ready", report
        assert staging.incoming.seconds.keys() == {"plan", "load"}
        result = staging.swap()
        assert result["strategy"] == "patch"
        assert "elements changed since the served version" in result["reason"]
        assert result["seconds"].keys() == {"copy", "verify"}
        fleet.assert_serving()
    assert [p.data_ptr() for p in fleet.worker.model_runner.get_model().parameters()] == addresses


def test_a_version_that_was_left_out_is_part_of_the_next_patch(fleet: Fleet) -> None:
    fleet.refit(fleet.publish())
    fleet.publish()
    fleet.publish()
    assert fleet.refit(fleet.publish())["strategy"] == "patch"
    fleet.assert_serving()


def test_the_same_weights_again_change_nothing(fleet: Fleet) -> None:
    fleet.refit(fleet.publish())
    result = fleet.refit(fleet.publish(share=0.0))
    assert result["reason"] == "0 elements changed since the served version"
    fleet.assert_serving()


def test_a_patch_that_is_not_finite_is_refused_before_the_pause(fleet: Fleet) -> None:
    fleet.refit(fleet.publish())
    fleet.tensors["model.norm.weight"][3] = torch.nan
    _, report = fleet.stage(fleet.publish(share=0.0))
    assert report["state"] == "failed"
    assert report["error"].startswith("model.norm.weight of version 2 has NaN or infinity")


def test_a_tensor_that_changed_everywhere_is_patched(fleet: Fleet) -> None:
    fleet.refit(fleet.publish())
    fleet.tensors["model.norm.weight"] = fleet.tensors["model.norm.weight"] + 1
    fleet.tensors["model.layers.0.input_layernorm.weight"] = torch.randn(32)
    assert fleet.refit(fleet.publish())["strategy"] == "patch"
    fleet.assert_serving()


def put_other_versions(fleet: Fleet) -> None:
    """Another publisher at the same place numbers its versions alike."""
    fleet.publisher.close()
    shutil.rmtree(fleet.root)
    other = fleet.publisher = DeltaPublisher(fleet.root, snapshot_every=100)
    other.publish(fleet.version, change(fleet.tensors, 77).items())


def put_other_store(fleet: Fleet) -> None:
    fleet.root = fleet.directory / "elsewhere"
    fleet.publisher = DeltaPublisher(fleet.root)


def change_a_parameter(fleet: Fleet) -> None:
    with torch.no_grad():
        next(iter(fleet.worker.model_runner.get_model().parameters())).view(-1)[5] += 1


def forget_sums(fleet: Fleet) -> None:
    fleet.reader.sums = lambda offer: {}  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("disturb", "share", "reason"),
    [
        (put_other_versions, 0.03, "No deltas lead from there to version 2"),
        (put_other_store, 0.03, "did not come from the same deltas"),
        (change_a_parameter, 0.03, "not as they were after the last swap"),
        (forget_sums, 0.03, "cannot be verified by a published sum"),
        (lambda fleet: None, 0.6, "elements changed"),
    ],
)
def test_otherwise_whole_tensors_are_loaded(
    disturb: Callable[[Fleet], None], share: float, reason: str, fleet: Fleet
) -> None:
    fleet.refit(fleet.publish())
    disturb(fleet)
    result = fleet.refit(fleet.publish(share))
    assert result["strategy"] == "device" and reason in result["reason"]
    fleet.assert_serving()
    assert fleet.refit(fleet.publish())["strategy"] == (
        "device" if disturb is forget_sums else "patch"
    )
    fleet.assert_serving()


def test_without_memory_for_a_patch_the_reason_has_figures(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.refit(fleet.publish())
    nothing = FreeMemory("a device", 100, 100)
    monkeypatch.setattr(memory, "read_device_memory", lambda *_: nothing)
    result = fleet.refit(fleet.publish())
    assert result["strategy"] == "host" and "no patch, because a patch needs" in result["reason"]
    fleet.assert_serving()


def test_parameters_that_change_before_the_swap_leave_the_worker_in_doubt(fleet: Fleet) -> None:
    fleet.refit(fleet.publish())
    staging, _ = fleet.stage(fleet.publish())
    assert staging.strategy == "patch" and get_served(fleet.worker) is not None
    change_a_parameter(fleet)
    with pytest.raises(RuntimeError, match=r"1 of .* parameters differ"):
        staging.swap()
    assert get_served(fleet.worker) is None


def test_a_discarded_patch_changes_nothing(fleet: Fleet) -> None:
    fleet.refit(fleet.publish())
    before = state_of(fleet.worker.model_runner.get_model())
    staging, _ = fleet.stage(fleet.publish())
    staging.discard()
    assert_same(state_of(fleet.worker.model_runner.get_model()), before)
    assert fleet.refit(fleet.publish())["strategy"] == "patch"  # since the version that is served
    fleet.assert_serving()


def test_a_damaged_delta_is_not_patched(fleet: Fleet) -> None:
    """Also where the damage only moves a step: the sums of the parameters do not show that."""
    fleet.publisher = DeltaPublisher(fleet.root, snapshot_every=100, compression="none")
    fleet.refit(fleet.publish())
    name = max(fleet.tensors, key=lambda name: fleet.tensors[name].numel())
    fleet.tensors[name].view(torch.int32).view(-1)[8::16] += 1
    offer = fleet.publish(share=0.0)
    path = fleet.root / "v2" / DELTA
    good = path.read_bytes()
    at = good.index(bytes([15] * 20))
    for place, bit in ((at, 4), (at + 5, 4), (at + 5, 1), (len(good) - 1, 2)):
        path.write_bytes(good[:place] + bytes([good[place] ^ bit]) + good[place + 1 :])
        # There is no other way to the version, whose snapshot is the one before.
        staging, report = fleet.stage(offer)
        assert report["state"] == "failed" and f"in {name} is damaged" in report["error"]
        staging.discard()
    path.write_bytes(good)
    assert fleet.refit(offer)["strategy"] == "patch"
    fleet.assert_serving()


@pytest.mark.parametrize("call", [1, 2])
def test_memory_that_ends_in_a_patch_loads_whole_tensors_or_refuses_with_figures(
    call: int, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.refit(fleet.publish())
    before = state_of(fleet.worker.model_runner.get_model())
    offer = fleet.publish()

    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr(patching.Patch, "add", fail)
        if call == 2:
            patch.setattr(memory, "allocate", fail)
        staging, report = fleet.stage(offer)
    assert_same(state_of(fleet.worker.model_runner.get_model()), before)
    if call == 1:
        assert report["state"] == "ready" and staging.strategy == "device"
        assert "no patch, because the device's memory does not hold it" in staging.reason
    else:
        assert report["state"] == "failed" and staging._staged is None
        assert "memory does not hold version 2" in report["error"] and "free" in report["error"]
    staging.discard()
    assert fleet.refit(offer)["strategy"] == "patch"  # nothing was changed, so it still fits
    fleet.assert_serving()
