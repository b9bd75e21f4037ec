"""Chains of deltas and snapshots: every version exact, an interrupted reading noticed, nothing
lost."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.errors import RollwayError, UsageError, WeightsError
from rollway.weights import leftovers
from rollway.weights.digest.checksums import word_sum
from rollway.weights.layout import Box, Piece, Shard
from rollway.weights.offer import Offer
from rollway.weights.sources import HeldTensor
from rollway.weights.transports.delta import DeltaPublisher, DeltaReader, packing
from rollway.weights.transports.delta.versions import DELTA, MANIFEST, SNAPSHOT, DeltaVersions
from tests.children import make_dead_writer_mark, start_child
from tests.tensors import receive, same
from tests.unit.weights.deltas import apply, serve

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


class History:
    """A publisher, and what each of its versions really was."""

    def __init__(self, root: Path, **options: int) -> None:
        self.root = root
        self.publisher = DeltaPublisher(root, **options)
        self.versions = DeltaVersions(root)
        self.state = model()
        self.truth: dict[int, State] = {}
        self.offers: dict[int, Offer] = {}

    def publish(self, *versions: int) -> None:
        for version in versions:
            train(self.state, version)
            self.offers[version] = self.publisher.publish(version, self.state.items())
            self.truth[version] = copy(self.state)

    def list_steps(self, served: int, wanted: int) -> list[int]:
        """Return the versions whose deltas lead from one version to another."""
        manifests = (self.versions.read_manifest(version) for version in (served, wanted))
        return [step.version for step in self.versions.find_deltas(*manifests)]

    def list_chain(self, wanted: int) -> list[int]:
        """Return the version whose snapshot leads to another one, and those in between."""
        chain = self.versions.find_snapshot(self.versions.read_manifest(wanted))
        return [step.version for step in chain]

    def patch(self, served: int, wanted: int) -> State:
        """Return what a worker has that serves one version and patches it to another."""
        reader = serve(self.root, self.offers[served])
        identity = self.offers[served].identity
        return apply(self.truth[served], reader.changes(self.offers[wanted], identity, 1 << 60))

    def read(self, wanted: int) -> State:
        return receive(DeltaReader(), self.offers[wanted])


def test_deltas_lead_from_version_to_version_and_snapshots_to_any(tmp_path: Path) -> None:
    history = History(tmp_path, snapshot_every=4, keep_recent=100)
    history.publish(1, 2, 3, 4, 5, 6, 7)
    assert [history.list_chain(n) for n in (1, 3, 5, 7)] == [[1], [1, 2, 3], [5], [5, 6, 7]]
    assert history.list_steps(4, 5) == [5]  # a follower never needs a snapshot
    assert history.list_steps(3, 7) == [4, 5, 6, 7]
    assert history.list_steps(5, 5) == []
    with pytest.raises(WeightsError, match="No deltas lead from there to version 5"):
        history.list_steps(7, 5)
    with pytest.raises(WeightsError, match="Version 8 is not in"):
        history.list_chain(8)


@given(st.integers(1, 5), st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=10))
@settings(max_examples=40)
def test_every_kept_version_can_be_read_from_anywhere(
    tmp_path_factory: pytest.TempPathFactory, every: int, keep: int, gaps: list[int]
) -> None:
    history = History(tmp_path_factory.mktemp("delta"), snapshot_every=every, keep_recent=keep)
    served = None
    version = 0
    for gap in gaps:
        version += gap
        history.publish(version)
        kept = sorted(history.truth)[-keep:]
        assert all(same(history.read(wanted), history.truth[wanted]) for wanted in kept)
        if served in kept:
            assert same(history.patch(served, version), history.truth[version])
        served = random.Random(version).choice(kept)
    # At most a snapshot's distance of older versions stays for the sake of the kept ones.
    assert len(history.versions.list_versions()) <= keep + every - 1
    assert {path.name for path in history.root.iterdir()} == {
        f"v{version}" for version in history.versions.list_versions()
    }


def test_a_delta_is_small_and_the_held_copy_stays_in_place(tmp_path: Path) -> None:
    publisher = DeltaPublisher(tmp_path)
    weight = torch.randn(1000, 1000)
    publisher.publish(1, [("w", weight)])
    (chunk,) = publisher._chunks
    where = chunk.words.data_ptr()
    weight.view(-1)[::100] += 0.001
    publisher.publish(2, [("w", weight)])
    delta, snapshot = tmp_path / "v2" / DELTA, tmp_path / "v1" / SNAPSHOT
    assert delta.stat().st_size < 0.02 * snapshot.stat().st_size
    assert publisher._chunks == [chunk] and chunk.words.data_ptr() == where
    assert torch.equal(chunk.view(0), weight)


@pytest.fixture
def history(tmp_path: Path) -> History:
    history = History(tmp_path, snapshot_every=3, keep_recent=10)
    history.publish(1, 2, 3, 4, 5)
    return history


def test_deltas_apply_only_to_the_version_that_they_start_from(
    history: History, tmp_path: Path
) -> None:
    other = History(tmp_path / "other", snapshot_every=3, keep_recent=10)
    other.state["embed"] += 1
    other.publish(1, 2, 3, 4, 5)
    with pytest.raises(WeightsError, match="did not come from the same deltas"):
        apply({}, serve(other.root, other.offers[4]).changes(history.offers[5], "0" * 32, 9))
    shutil.rmtree(history.root / "v3")
    (other.root / "v3").rename(history.root / "v3")  # of the same number
    with pytest.raises(WeightsError, match="another version than expected"):
        history.patch(2, 5)
    assert same(history.patch(4, 5), history.truth[5])


def test_a_truncated_delta_is_refused(history: History) -> None:
    path = history.root / "v5" / DELTA
    path.write_bytes(path.read_bytes()[:-8])
    for read in (lambda: history.patch(4, 5), lambda: history.read(5)):
        with pytest.raises(WeightsError, match="is cut short"):
            read()


def test_a_missing_version_is_an_error_or_bypassed(history: History) -> None:
    shutil.rmtree(history.root / "v3")
    with pytest.raises(WeightsError, match="Version 3 is not in"):
        history.patch(2, 5)
    with pytest.raises(WeightsError, match="Version 3 is not in"):
        history.read(3)
    assert same(history.read(5), history.truth[5])  # from the snapshot of version 4


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
        live = receive(slow, history.offers[at])
        held = at
        entries = history.versions.read_manifest(at).tensors
        assert {n: word_sum(t) for n, t in live.items()} == {n: e.sum for n, e in entries.items()}
    publisher.join()
    assert same(live, history.truth[last])


def test_a_reading_that_still_runs_blocks_no_other(history: History) -> None:
    """The staging of a discarded version, which stops at its next tensor or never."""
    reader = DeltaReader()
    earlier = reader.tensors(history.offers[4])
    received = dict([next(earlier)])
    assert same(receive(reader, history.offers[5]), history.truth[5])
    received.update(earlier)
    assert same(received, history.truth[4])
    half = reader.tensors(history.offers[5])
    next(half)
    half.close()  # type: ignore[attr-defined]
    assert same(receive(reader, history.offers[5]), history.truth[5])


@given(st.data())
@settings(max_examples=150)
def test_a_flipped_byte_is_detected(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """In whichever file: what is read is exactly what was published, or an error."""
    history = shared_history(tmp_path_factory)
    served, wanted = data.draw(st.sampled_from([(None, 4), (2, 5), (None, 5)]))
    chain = history.list_chain(wanted) if served is None else history.list_steps(served, wanted)
    files = [path for number in chain for path in (history.root / f"v{number}").iterdir()]
    path = data.draw(st.sampled_from(sorted(files)))
    good = path.read_bytes()
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        path.write_bytes(bad)
        live = history.read(wanted) if served is None else history.patch(served, wanted)
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
    root = tmp_path_factory.mktemp("manifest")
    (root / "v1").mkdir()
    (root / "v1" / MANIFEST).write_bytes(data)
    with pytest.raises(WeightsError, match="damaged"):
        DeltaVersions(root).read_manifest(1)


def list_files(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


def test_a_failed_publish_is_invisible_and_the_next_one_is_right(history: History) -> None:
    before = list_files(history.root)
    train(history.state, 6)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed", history.state["embed"]
        raise RuntimeError("the trainer broke")

    with pytest.raises(RuntimeError):
        history.publisher.publish(6, broken())
    assert list_files(history.root) == before
    history.publish(6, 7)
    assert history.list_chain(7) == [6, 7]
    assert same(history.read(7), history.truth[7])


def test_a_full_device_is_a_refusal_with_the_fix(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mock: only a GPU that is full raises this error."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    before = list_files(history.root)
    with monkeypatch.context() as patch:
        patch.setattr(history.publisher, "_write", fail)
        with pytest.raises(WeightsError, match=r"GB are free.*hold_on_cpu=True"):
            history.publisher.publish(6, history.state)
    assert list_files(history.root) == before
    history.publish(6)
    assert history.list_chain(6) == [6]


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
    assert history.versions.list_versions()[-1] == 5


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep_recent is 1"):
        DeltaPublisher(tmp_path, keep_recent=1, max_off_policy_steps=4)
    with pytest.raises(UsageError, match="snapshot_every"):
        DeltaPublisher(tmp_path, snapshot_every=0)
    with pytest.raises(UsageError, match="no compression lz4"):
        DeltaPublisher(tmp_path, compression="lz4")  # type: ignore[arg-type]
    publisher = DeltaPublisher(tmp_path)
    with pytest.raises(UsageError, match="no tensors"):
        publisher.publish(1, [])
    with pytest.raises(UsageError, match="came twice"):
        publisher.publish(1, [("a", torch.ones(1)), ("a", torch.ones(1))])
    publisher.publish(1, [("a", torch.ones(1))])
    with pytest.raises(RollwayError, match="Version 1 cannot follow version 1"):
        publisher.publish(1, [("a", torch.ones(1))])


def test_a_new_publisher_resumes_where_another_stopped(history: History) -> None:
    again = DeltaPublisher(history.root, keep_recent=2)
    train(history.state, 6)
    again.publish(6, history.state.items())
    assert history.list_chain(6) == [6]
    assert history.versions.list_versions() == [4, 5, 6]  # 5 is kept, and 4 is its snapshot


def test_a_killed_publisher_leaves_whole_versions_and_the_next_cleans_up(tmp_path: Path) -> None:
    program = f"""
        import torch
        from pathlib import Path
        from rollway.weights.transports.delta import DeltaPublisher
        publisher = DeltaPublisher(Path({str(tmp_path)!r}), snapshot_every=2)
        weight = torch.arange(100000.0)
        publisher.publish(1, [("a", weight), ("b", weight)])
        def stream():
            yield "a", weight + 1
            print("half", flush=True)
            sys.stdin.read()
        import sys
        publisher.publish(2, stream())
    """
    child, line = start_child(program)
    assert line == "half"
    files = list_files(tmp_path)
    assert len(files) == 3  # a manifest, a snapshot, half a delta
    DeltaPublisher(tmp_path)  # another one, while the first lives: its work is left alone
    assert list_files(tmp_path) == files
    child.kill()
    child.wait()
    assert DeltaVersions(tmp_path).list_versions() == [1]
    publisher = DeltaPublisher(tmp_path)
    offer = publisher.publish(2, [("a", torch.ones(3))])
    assert same(receive(DeltaReader(), offer), {"a": torch.ones(3)})
    assert {path.name for path in tmp_path.iterdir()} == {"v1", "v2"}


def test_only_leftovers_of_dead_publishers_are_removed(tmp_path: Path) -> None:
    mine = tmp_path / leftovers.scratch_name("v1")
    dead = tmp_path / f".v2.{make_dead_writer_mark()}.partial"
    trash = tmp_path / f".v2.{make_dead_writer_mark()}.trash"
    elsewhere = tmp_path / ".v3.0123456789ab-1-1.partial"
    forgotten = tmp_path / ".v4.0123456789ab-1-2.partial"
    long_ago = time.time() - leftovers.ABANDONED_SECONDS - 60
    for path in (mine, dead, trash, elsewhere, forgotten):
        path.mkdir()
        (path / DELTA).write_bytes(b"half")
    for path in (forgotten, forgotten / DELTA):
        os.utime(path, (long_ago, long_ago))
    DeltaPublisher(tmp_path)
    assert set(tmp_path.iterdir()) == {mine, elsewhere}


def test_snapshots_wait_for_the_disk_and_temporary_versions_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(os, "fsync", waits.append)
    with DeltaPublisher(tmp_path / "fast", temporary=True) as publisher:
        publisher.publish(1, model().items())
    assert waits == []
    publisher = DeltaPublisher(tmp_path / "safe")
    publisher.publish(1, model().items())
    assert len(waits) == 4  # the snapshot, the manifest, and two directories
    publisher.publish(2, model().items())
    assert len(waits) == 7  # the delta is not worth waiting for


def test_a_directory_that_cannot_be_written_is_reported() -> None:
    with pytest.raises(WeightsError, match="cannot be written to /proc/nowhere"):
        DeltaPublisher(Path("/proc/nowhere")).publish(1, model().items())


def test_a_manifest_lists_sums_and_what_changed(history: History) -> None:
    manifest = history.versions.read_manifest(5)
    assert {name: entry.sum for name, entry in manifest.tensors.items()} == {
        name: word_sum(tensor) for name, tensor in history.truth[5].items()
    }
    assert manifest.base == history.versions.read_manifest(4).as_base()
    assert manifest.tensors["frozen"].change is None
    assert list(manifest.tensors) == list(history.state)


def test_a_reader_follows_offers(tmp_path: Path) -> None:
    state = model()
    reader = DeltaReader()
    with DeltaPublisher(tmp_path, hold_on_cpu=True) as publisher:
        for version in (1, 2, 3):
            train(state, version)
            offer = publisher.publish(version, state.items())
            assert reader.headers(offer).keys() == state.keys()
            assert same(receive(reader, offer), state)
    reader.close()
    assert same(receive(reader, offer), state)


@pytest.mark.parametrize("chunk_bytes", [1, 5000])
def test_tensors_come_in_any_order_and_are_copied_as_they_come(
    tmp_path: Path, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer may gather each into the same memory; a chunk is packed when it is complete."""
    monkeypatch.setitem(packing.CHUNK_BYTES, "cpu", chunk_bytes)
    publisher, state = DeltaPublisher(tmp_path), model()
    state |= {f"w{n}": torch.randn(40, 40) for n in range(9)}
    memory = torch.empty(40, 40)

    def gather(names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            tensor = state[name]
            if tensor.shape == memory.shape:
                tensor = memory.copy_(tensor)
            yield name, tensor

    names = list(state)
    for version in (1, 2, 3):
        offer = publisher.publish(version, gather(names))
        assert same(receive(DeltaReader(), offer), state)
        random.Random(version).shuffle(names)
        train(state, version)
        for n in range(9):
            state[f"w{n}"][n] += 1
    with pytest.raises(UsageError, match="are missing: w3"):
        publisher.publish(4, gather([name for name in names if name != "w3"]))


def test_a_temporary_store_is_removed_with_its_publisher(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with DeltaPublisher(root, temporary=True) as publisher:
        publisher.publish(1, model().items())
        assert root.exists()
    assert not root.exists()


def test_whole_held_tensors_are_published_and_parts_refused(tmp_path: Path) -> None:
    def held(box: Box) -> HeldTensor:
        tensor = torch.ones(box.shape)
        return HeldTensor(Shard("w", "F32", (4,), box), tensor, [Piece("w", (4,), box, (0,))], True)

    publisher = DeltaPublisher(tmp_path)
    assert publisher.publish(1, [held(Box((0,), (4,)))]).nbytes == 16
    with pytest.raises(UsageError, match="only a part of w"):
        publisher.publish(2, [held(Box((0,), (2,)))])
    with pytest.raises(UsageError, match="no tensors"):
        publisher.publish(2)
    with pytest.raises(UsageError, match="cannot adopt"):
        publisher.adopt(model().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_sums_that_are_carried_over_are_those_of_the_tensors(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Whatever changed: little, nothing or everything."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 100, (3, 20_001), generator=generator).to(dtype)
    state = {"few": noise.clone(), "none": noise[0, :3].clone(), "small": noise[0, :5].clone()}
    state |= {"all": noise.clone()}
    publisher = DeltaPublisher(tmp_path, snapshot_every=100)
    publisher.publish(1, state.items())
    for version in range(2, 5):
        state["few"][version % 3, version::97] += 1
        state["small"] += 1
        state["all"] += 1
        offer = publisher.publish(version, state.items())
        entries = publisher.versions.read_manifest(version).tensors
        assert {n: e.sum for n, e in entries.items()} == {n: word_sum(t) for n, t in state.items()}
        assert same(receive(DeltaReader(), offer), state)


def test_torch_has_its_threads_again(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        publisher = DeltaPublisher(tmp_path)
        for version in (1, 2):
            publisher.publish(version, model().items())
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
