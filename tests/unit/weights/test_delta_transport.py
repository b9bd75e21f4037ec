"""Chains of deltas and snapshots: every version exact, an interrupted reading noticed, nothing
lost."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.errors import RollwayError, UsageError, WeightsError
from rollway.weights.digest import changes
from rollway.weights.digest.checksums import digest, word_sum
from rollway.weights.layout import Box, Piece, Shard
from rollway.weights.offer import Offer
from rollway.weights.sources import HeldTensor
from rollway.weights.transports.delta import (
    DeltaPublisher,
    DeltaReader,
    DeltaVersions,
    SharedMemory,
    Step,
    Store,
)
from rollway.weights.transports.delta.reader import write_steps
from tests.tensors import same

State = dict[str, torch.Tensor]


def model() -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(50, 8, generator=generator).to(torch.bfloat16),
        "layer.weight": torch.randn(40, 40, generator=generator),
        "layer.scale": torch.tensor(1.0),
        "frozen": torch.ones(10, dtype=torch.int8),
        "empty": torch.zeros(0, 3),
    }


def train(state: State, seed: int) -> None:
    """Change a few elements of some tensors, in place."""
    generator = torch.Generator().manual_seed(seed)
    for name in ("embed", "layer.weight", "layer.scale")[: 1 + seed % 3]:
        tensor = state[name]
        noise = torch.randn(tensor.shape, generator=generator)
        chosen = torch.rand(tensor.shape, generator=generator) < 0.05
        tensor.add_((noise * chosen).to(tensor.dtype))


def copy(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def follow(versions: DeltaVersions, live: State, steps: list[Step]) -> None:
    write_steps(versions, live, steps, steps[-1].manifest)


class History:
    """A publisher, and what each of its versions really was."""

    def __init__(self, root: Path, **options: int) -> None:
        self.store = Store(root)
        self.publisher = DeltaPublisher(self.store, **options)
        self.reader = DeltaVersions(self.store)
        self.state = model()
        self.truth: dict[int, State] = {}
        self.offers: dict[int, Offer] = {}

    def publish(self, *versions: int) -> None:
        for version in versions:
            train(self.state, version)
            self.offers[version] = self.publisher.publish(version, self.state.items())
            self.truth[version] = copy(self.state)

    def chain(self, held: int | None, wanted: int) -> list[str]:
        return [str(step) for step in self.reader.find_chain(held, wanted)]


def test_the_chain_with_the_fewest_bytes_is_chosen(tmp_path: Path) -> None:
    history = History(tmp_path, snapshot_every=4, keep_recent=100)
    history.publish(1, 2, 3, 4, 5, 6, 7)
    assert history.chain(None, 1) == ["snapshot 1"]
    assert history.chain(None, 3) == ["snapshot 1", "delta 1->2", "delta 2->3"]
    assert history.chain(None, 5) == ["snapshot 5"]
    assert history.chain(4, 5) == ["delta 4->5"]  # a follower never needs a snapshot
    assert history.chain(3, 7) == [f"delta {n}->{n + 1}" for n in (3, 4, 5, 6)]
    assert history.chain(99, 6) == ["snapshot 5", "delta 5->6"]
    assert history.chain(7, 2) == ["snapshot 1", "delta 1->2"]  # backwards too
    assert history.chain(5, 5) == []
    with pytest.raises(WeightsError, match="is not there"):
        history.reader.find_chain(3, 8)


@given(st.integers(1, 5), st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=10))
@settings(max_examples=40)
def test_every_kept_version_can_be_read_from_anywhere(
    tmp_path_factory: pytest.TempPathFactory, every: int, keep: int, gaps: list[int]
) -> None:
    root = tmp_path_factory.mktemp("delta")
    history = History(root, snapshot_every=every, keep_recent=keep)
    follower: State = {}
    held: int | None = None
    version = 0
    for gap in gaps:
        version += gap
        history.publish(version)
        kept = sorted(history.truth)[-keep:]
        for wanted in kept:
            fresh: State = {}
            follow(history.reader, fresh, history.reader.find_chain(None, wanted))
            assert same(fresh, history.truth[wanted])
        if random.Random(version).random() < 0.5:
            wanted = random.Random(version).choice(kept)
            if held != wanted:
                follow(history.reader, follower, history.reader.find_chain(held, wanted))
            held = wanted
            assert same(follower, history.truth[wanted])
    # At most a snapshot's distance of older versions stays for the sake of the kept ones.
    assert len(history.reader.list_versions()) <= keep + every - 1
    manifests = [
        history.reader.read_manifest(version) for version in history.reader.list_versions()
    ]
    objects = sorted(item.key for manifest in manifests for item in manifest.objects)
    assert history.store.keys("objects/") == objects


def test_a_delta_is_small_and_live_tensors_stay_in_place(tmp_path: Path) -> None:
    store = Store(tmp_path)
    publisher = DeltaPublisher(store)
    weight = torch.randn(1000, 1000)
    publisher.publish(1, [("w", weight)])
    full = publisher.versions.read_manifest(1)
    live = {"w": weight.clone()}
    where = live["w"].data_ptr()
    weight.view(-1)[::100] += 0.001
    publisher.publish(2, [("w", weight)])
    manifest = publisher.versions.read_manifest(2)
    assert manifest.delta is not None and full.snapshot is not None
    assert manifest.delta.size < 0.02 * full.snapshot.size
    follow(publisher.versions, live, publisher.versions.find_chain(1, 2))
    assert torch.equal(live["w"], weight)
    assert live["w"].data_ptr() == where


def test_shared_memory_stores_the_same_versions() -> None:
    with SharedMemory("test") as store:
        publisher = DeltaPublisher(store)
        state = model()
        publisher.publish(1, state.items())
        train(state, 2)
        publisher.publish(2, state.items())
        reader = DeltaVersions(Store(store.root))
        live: State = {}
        follow(reader, live, reader.find_chain(None, 2))
        assert same(live, state)


@pytest.fixture
def history(tmp_path: Path) -> History:
    history = History(tmp_path, snapshot_every=3, keep_recent=10)
    history.publish(1, 2, 3, 4, 5)
    return history


def test_a_wrong_base_is_reported(history: History) -> None:
    for truth, held in ((2, 3), (1, 4), (5, 2)):
        live = copy(history.truth[truth])
        with pytest.raises(WeightsError, match="is not of the version it is recorded as"):
            follow(history.reader, live, history.reader.find_chain(held, 5)[:1])
    live = copy(history.truth[2])
    live["frozen"][3] = 7  # which no delta touches
    with pytest.raises(WeightsError, match="frozen does not match its checksum in version 5"):
        follow(history.reader, live, history.reader.find_chain(2, 5))


def test_another_model_is_refused(history: History) -> None:
    live = copy(history.truth[4])
    del live["embed"]
    with pytest.raises(WeightsError, match="differ in embed"):
        follow(history.reader, live, history.reader.find_chain(4, 5))
    live["embed"] = torch.zeros(50, 9, dtype=torch.bfloat16)
    for other in (live, {}):
        with pytest.raises(WeightsError, match="no embed that the change applies to"):
            follow(history.reader, other, history.reader.find_chain(4, 5))


def test_a_truncated_object_is_refused(history: History) -> None:
    chain = history.reader.find_chain(4, 5)
    path = history.store.root / chain[0].object.key
    path.write_bytes(path.read_bytes()[:-1])
    live = copy(history.truth[4])
    with pytest.raises(WeightsError, match=r"delta 4->5 has .* bytes instead of"):
        follow(history.reader, live, chain)


def test_a_missing_delta_is_an_error_or_bypassed(history: History) -> None:
    history.store.delete(history.reader.read_manifest(3).delta.key)  # type: ignore[union-attr]
    live = copy(history.truth[2])
    with pytest.raises(WeightsError, match="is not there"):
        follow(history.reader, live, history.reader.find_chain(2, 5))
    history.store.delete(history.store.keys("manifests/000000000000003")[0])
    assert history.chain(2, 5) == ["snapshot 4", "delta 4->5"]  # bypasses it
    with pytest.raises(WeightsError, match="is not there"):
        history.reader.find_chain(2, 3)


def test_a_kept_version_can_be_read_whatever_is_held(history: History) -> None:
    history.store.delete(history.reader.read_manifest(3).delta.key)  # type: ignore[union-attr]
    for held, state in ((2, history.truth[2]), (4, history.truth[1]), (9, history.truth[3])):
        reader = DeltaReader()
        reader._held = (str(history.store.root), held, copy(state))
        for _ in range(2):
            assert same(dict(reader.tensors(history.offers[5])), history.truth[5])


def test_a_reader_of_kept_versions_never_fails(tmp_path: Path) -> None:
    """A slow reader, and a publisher that removes all but the versions it keeps."""
    keep, last = 3, 30
    history = History(tmp_path, snapshot_every=4, keep_recent=keep)
    history.publish(1)
    reading = threading.Condition()
    at = 1

    def publish() -> None:
        for version in range(2, last + 1):
            with reading:
                reading.wait_for(lambda version=version: version - keep < at, timeout=60)  # type: ignore[misc]
            history.publish(version)

    publisher = threading.Thread(target=publish)
    publisher.start()
    slow, held = DeltaReader(), None
    while held != last:
        with reading:
            at = max(history.offers)
            reading.notify()
        live = dict(slow.tensors(history.offers[at]))
        held = at
        assert {name: digest(tensor) for name, tensor in live.items()} == {
            name: entry.digest for name, entry in history.reader.read_manifest(at).tensors.items()
        }
    publisher.join()
    assert same(live, history.truth[last])


@given(st.data())
@settings(max_examples=150)
def test_a_flipped_byte_is_detected(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    history = shared_history(tmp_path_factory)
    chain = history.reader.find_chain(*data.draw(st.sampled_from([(None, 4), (2, 5), (None, 5)])))
    held = {2: history.truth[2]}.get(2 if chain[0].kind == "delta" else 0, {})
    path = history.store.root / data.draw(
        st.sampled_from(
            [
                *(step.object.key for step in chain),
                *(f"manifests/{step.manifest.version:015d}.json" for step in chain),
            ]
        )
    )
    good = path.read_bytes()
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    live = copy(held)
    try:
        path.write_bytes(bad)
        wanted = chain[-1].manifest.version
        steps = history.reader.find_chain(2 if held else None, wanted)
        follow(history.reader, live, steps)
    except WeightsError:
        pass
    else:
        assert same(live, history.truth[wanted])
    finally:
        path.write_bytes(good)


_shared: list[History] = []


def shared_history(factory: pytest.TempPathFactory) -> History:
    if not _shared:
        _shared.append(History(factory.mktemp("flips"), snapshot_every=3, keep_recent=10))
        _shared[0].publish(1, 2, 3, 4, 5)
    return _shared[0]


@given(st.binary(max_size=300))
def test_any_manifest_is_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    store = Store(tmp_path_factory.mktemp("manifest"))
    store.put("manifests/000000000000001.json", data)
    with pytest.raises(WeightsError, match="damaged"):
        DeltaVersions(store).find_chain(None, 1)


def test_a_failed_publish_is_invisible_and_the_next_one_is_right(history: History) -> None:
    before = history.store.keys()
    train(history.state, 6)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed", history.state["embed"]
        raise RuntimeError("the trainer broke")

    with pytest.raises(RuntimeError):
        history.publisher.publish(6, broken())
    assert history.store.keys() == before
    history.publish(6, 7)
    assert history.chain(5, 7) == ["snapshot 6", "delta 6->7"]
    live: State = {}
    follow(history.reader, live, history.reader.find_chain(None, 7))
    assert same(live, history.truth[7])


def test_a_full_device_is_a_refusal_with_the_fix(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mock: only a GPU that is full raises this error."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    before = history.store.keys()
    with monkeypatch.context() as patch:
        patch.setattr(history.publisher, "_write", fail)
        with pytest.raises(WeightsError, match=r"GB are free.*hold_on_cpu=True"):
            history.publisher.publish(6, history.state)
    assert history.store.keys() == before
    history.publish(6)
    assert history.chain(None, 6) == ["snapshot 6"]


Change = Callable[[State], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("embed"), "are missing: embed"),
        (lambda state: state.update(more=torch.ones(1)), "more came twice, or was not part"),
        (lambda state: state.update(embed=torch.ones(1)), "only values may change"),
    ],
)
def test_other_tensors_than_last_time_are_refused(
    history: History, change: Change, message: str
) -> None:
    state = copy(history.state)
    change(state)
    with pytest.raises(UsageError, match=message):
        history.publisher.publish(6, state.items())
    assert history.reader.list_versions()[-1] == 5


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(UsageError, match="keep_recent is 1"):
        DeltaPublisher(store, keep_recent=1, max_off_policy_steps=4)
    with pytest.raises(UsageError, match="snapshot_every"):
        DeltaPublisher(store, snapshot_every=0)
    with pytest.raises(UsageError, match="no compression lz4"):
        DeltaPublisher(store, compression="lz4")  # type: ignore[arg-type]
    publisher = DeltaPublisher(store)
    with pytest.raises(UsageError, match="no tensors"):
        publisher.publish(1, [])
    with pytest.raises(UsageError, match="came twice"):
        publisher.publish(1, [("a", torch.ones(1)), ("a", torch.ones(1))])
    publisher.publish(1, [("a", torch.ones(1))])
    with pytest.raises(RollwayError, match="Version 1 cannot follow version 1"):
        publisher.publish(1, [("a", torch.ones(1))])


def test_a_new_publisher_resumes_where_another_stopped(history: History) -> None:
    again = DeltaPublisher(history.store, keep_recent=2)
    train(history.state, 6)
    again.publish(6, history.state.items())
    assert history.chain(5, 6) == ["snapshot 6"]
    assert history.reader.list_versions() == [4, 5, 6]  # 5 is kept, and 4 is its snapshot


def test_a_killed_publisher_leaves_whole_versions_and_the_next_cleans_up(tmp_path: Path) -> None:
    code = f"""
import sys, torch
from pathlib import Path
from rollway.weights.transports.delta import DeltaPublisher, Store
store = Store(Path({str(tmp_path)!r}))
publisher = DeltaPublisher(store, snapshot_every=2)
weight = torch.arange(100000.0)
publisher.publish(1, [("a", weight), ("b", weight)])
put = store.put
def stuck(key, data, **options):
    if {{at}}(key):
        print("half", flush=True)
        sys.stdin.read()
    return put(key, data, **options)
store.put = stuck
def stream():
    yield "a", weight + 1
    if {{midway}}:
        print("half", flush=True)
        sys.stdin.read()
    yield "b", weight + 1
publisher.publish(2, stream())
"""
    for version, (at, midway) in enumerate(
        [("(lambda key: False)", True), ("(lambda key: key.startswith('manifests'))", False)]
    ):
        root = tmp_path / str(version)
        text = code.replace("{at}", at).replace("{midway}", str(midway))
        text = text.replace(repr(str(tmp_path)), repr(str(root)))
        process = subprocess.Popen(
            [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        store = Store(root)
        files = {path for path in root.rglob("*") if path.is_file()}
        assert len(files) > 2
        DeltaPublisher(store)  # another one, while the first lives: its work is left alone
        assert {path for path in root.rglob("*") if path.is_file()} == files
        process.kill()
        process.wait()
        live: State = {}
        reader = DeltaVersions(store)
        assert reader.list_versions() == [1]
        follow(reader, live, reader.find_chain(None, 1))
        assert torch.equal(live["b"], torch.arange(100000.0))
        DeltaPublisher(store).publish(2, live.items())
        assert len([path for path in root.rglob("*") if path.is_file()]) == 4


def test_a_manifest_lists_digests_and_extents(history: History) -> None:
    manifest = history.reader.read_manifest(5)
    assert {name: entry.digest for name, entry in manifest.tensors.items()} == {
        name: digest(tensor) for name, tensor in history.truth[5].items()
    }
    text = msgspec.json.decode(history.store.get("manifests/000000000000005.json"))
    assert text["base"] == 4
    assert text["tensors"]["frozen"]["delta"] is None  # it did not change


def test_a_reader_follows_offers_and_frees_its_tensors_at_close(tmp_path: Path) -> None:
    state = model()
    reader = DeltaReader()
    with DeltaPublisher(Store(tmp_path), hold_on_cpu=True) as publisher:
        for version in (1, 2, 3):
            train(state, version)
            offer = publisher.publish(version, state.items())
            assert reader.headers(offer).keys() == state.keys()
            assert same({name: tensor.clone() for name, tensor in reader.tensors(offer)}, state)
    reader.close()
    assert same(dict(reader.tensors(offer)), state)  # from a snapshot again


def test_a_temporary_store_is_removed_with_its_publisher(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with DeltaPublisher(Store(root), temporary=True) as publisher:
        publisher.publish(1, model().items())
        assert root.exists()
    assert not root.exists()


def test_whole_held_tensors_are_published_and_parts_refused(tmp_path: Path) -> None:
    def held(box: Box) -> HeldTensor:
        tensor = torch.ones(box.shape)
        return HeldTensor(Shard("w", "F32", (4,), box), tensor, [Piece("w", (4,), box, (0,))], True)

    publisher = DeltaPublisher(Store(tmp_path))
    assert publisher.publish(1, [held(Box((0,), (4,)))]).nbytes == 16
    with pytest.raises(UsageError, match="only a part of w"):
        publisher.publish(2, [held(Box((0,), (2,)))])
    with pytest.raises(UsageError, match="no tensors"):
        publisher.publish(2)
    with pytest.raises(UsageError, match="cannot adopt"):
        publisher.adopt(model().items())


def _misjudge(tensor: torch.Tensor) -> torch.Tensor:
    """Change every element that a sample does not look at."""
    flat = tensor.clone().view(-1)
    step = max(1, flat.numel() // changes._SAMPLE)
    chosen = torch.arange(flat.numel()) % step != 0
    flat[chosen] += 1
    return flat.view(tensor.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_checksums_that_are_carried_over_are_those_of_the_tensors(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Whatever changed: little, nothing, everything, or more than a sample shows."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 100, (3, 20_001), generator=generator).to(dtype)
    state = {"few": noise.clone(), "none": noise[0, :3].clone(), "small": noise[0, :5].clone()}
    state |= {"all": noise.clone(), "misjudged": noise.clone()}
    publisher = DeltaPublisher(Store(tmp_path), snapshot_every=100)
    publisher.publish(1, state.items())
    held = {name: tensor.data_ptr() for name, tensor in publisher._held.items()}
    reader = DeltaReader()
    for version in range(2, 5):
        state["few"][version % 3, version::97] += 1
        state["small"] += 1
        state["all"] += 1
        state["misjudged"] = _misjudge(state["misjudged"])
        offer = publisher.publish(version, state.items())
        entries = publisher.versions.read_manifest(version).tensors
        for name, tensor in state.items():
            assert entries[name].digest == digest(tensor), name
            assert entries[name].sum == word_sum(tensor), name
            assert torch.equal(publisher._held[name], tensor)
        received = dict(reader.tensors(offer))
        assert all(torch.equal(received[name], tensor) for name, tensor in state.items())
    assert {name: tensor.data_ptr() for name, tensor in publisher._held.items()} == held
