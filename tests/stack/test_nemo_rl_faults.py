"""Deaths and hangs around NeMo-RL's refits, with light workers: the cause is named in bounded time,
nothing is left, and no worker is resumed on old weights."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.faults import Joiner
from chaos.target import Target
from rollway.api import make_spec
from rollway.errors import RefitError, RollwayError, UsageError
from rollway.fleet.workers import RlListing, Worker, discover
from rollway.http import Http
from rollway.integrations.nemo_rl.generation import Generation
from rollway.integrations.nemo_rl.synchronizer import Synchronizer
from tests.children import start_child
from tests.conftest import Footprint
from tests.light.spec import light
from tests.stack.nemo_rl import make_config
from tests.stack.nemo_rl_runs import (
    BOUND,
    FOREIGN,
    check_samples,
    expect_failure,
    make_synchronizer,
    opened,
    read_versions,
)
from tests.stack.policies import Policy
from tests.unit.weights.nixl_pieces import nixl
from tests.waiting import wait_until, wait_until_async

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


def find_pid(generation: Generation, role: str) -> int:
    state = generation.connection.stack.read_state()
    assert state is not None
    return next(process.pid for process in state.processes if process.role == role) or 0


def strike_at(generation: Generation, step: str, act: Callable[[Worker], None]) -> None:
    """Do something when the first worker comes to a step of a refit."""

    async def observe(current: str, worker: Worker) -> None:
        if current == step:
            generation.connection.fleet.observer = None
            act(worker)

    generation.connection.fleet.observer = observe


# --- the driver ----------------------------------------------------------------------------------

DRIVER = """
    import asyncio, json, sys
    from transformers import AutoModelForCausalLM
    from tests.stack.nemo_rl import InProcessPolicy as Policy
    from rollway.integrations.nemo_rl.config import WeightSync
    from rollway.integrations.nemo_rl.generation import Generation
    from rollway.integrations.nemo_rl.synchronizer import Synchronizer
    generation = Generation(None, json.loads(sys.argv[1]))
    policy = Policy(AutoModelForCausalLM.from_pretrained(sys.argv[2]))
    async def stop(step, worker):
        if step == sys.argv[3]:
            print(step, flush=True)
            await asyncio.Event().wait()  # until it is killed
    generation.connection.fleet.observer = stop
    Synchronizer(policy, generation, WeightSync(method="files"), get=list).sync_weights()
"""


@pytest.mark.parametrize("step", ["preflight", "update", "resume"])
def test_after_a_driver_killed_in_a_refit_the_next_one_refits_all(
    base_model: Path, policies: list[Policy], footprint: Footprint, step: str
) -> None:
    """The stack is not the driver's (`frontend_url`). Its workers take single calls, so that the
    driver's death leaves them paused between two of them."""
    spec = light(base_model, "foreign", **FOREIGN)
    with opened(spec) as owner:
        where = {"frontend_url": owner.frontend_url.removesuffix("/v1")}
        where["rl_url"] = owner.connection.stack.rl_url
        config = make_config(owner.cfg["model_name"], **where)
        driver, line = start_child(DRIVER, json.dumps(config), str(policies[1].path), step)
        assert line == step
        driver.kill()
        driver.wait()
        check_none_old(owner, policies[0], step)
        synchronizer = make_synchronizer(owner, policies[2])
        figures = synchronizer.sync_weights()
        assert figures["workers"] == 2
        check_samples(owner, policies[2], int(figures["version"]))
        synchronizer.shutdown()
    assert footprint.settle() == {}  # nor anything that the driver published


def check_none_old(generation: Generation, old: Policy, step: str) -> None:
    """Before any update, all serve the old version; after one, no paused worker answers."""
    if step == "preflight":
        check_samples(generation, old, 0)
        return
    versions = read_versions(generation)
    assert all(version != 0 for version in versions.values()), versions


# --- workers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "env"),
    [
        pytest.param("update", {}, id="update-managed"),
        pytest.param("preflight", FOREIGN, id="preflight-foreign"),
        # Half a minute each, most of it deadlines that pass.
        pytest.param("preflight", {}, id="preflight-managed", marks=pytest.mark.soak),
        pytest.param("update", FOREIGN, id="update-foreign", marks=pytest.mark.soak),
    ],
)
def test_a_worker_that_hangs_in_a_load_is_named_and_serves_nothing_old(
    base_model: Path,
    policies: list[Policy],
    footprint: Footprint,
    step: str,
    env: dict[str, str],
) -> None:
    with opened(light(base_model, "hung", **env)) as generation:
        synchronizer = make_synchronizer(generation, policies[1], seconds=5.0)
        hung = find_pid(generation, "worker")
        strike_at(generation, step, lambda _: os.kill(hung, signal.SIGSTOP))
        error = expect_failure(synchronizer, r"longer than 5 s\. No answer from worker \d+ \(http")
        assert error.hint
        if Path(f"/proc/{hung}").exists():  # it was not replaced
            os.kill(hung, signal.SIGCONT)
        figures = wait_for_refit(synchronizer)
        check_samples(generation, policies[1], int(figures["version"]))
        synchronizer.shutdown()
    assert footprint.settle() == {}


def wait_for_refit(synchronizer: Synchronizer) -> dict[str, float]:
    """Refit again until both workers serve: a replaced worker takes a moment to start."""

    def sync() -> dict[str, float] | None:
        try:
            figures = synchronizer.sync_weights()
        except RollwayError:
            return None
        return figures if figures["workers"] == 2 else None

    figures = wait_until(sync, 120, every=0.5)
    assert figures is not None
    return figures


def test_a_fleet_that_never_stops_changing_is_an_error(
    base_model: Path, policies: list[Policy], footprint: Footprint
) -> None:
    """Whenever a worker is updated, another one joins."""
    spec = light(base_model, "restless", replicas=1)
    with opened(spec) as generation:
        target = Target(make_spec(spec))
        target.open()
        synchronizer = make_synchronizer(generation, policies[1])
        fleet, rl_url = generation.connection.fleet, generation.connection.stack.rl_url
        joiner = Joiner(target, Http())
        wanted = 1

        async def is_listed() -> bool:
            async with Http() as http:
                listed = await discover(http, RlListing(rl_url))
            return len([worker for worker in listed if worker.error is None]) == wanted

        async def join(step: str, _: Worker) -> None:
            nonlocal wanted
            if step == "update":
                joiner.start()
                wanted += 1
                await wait_until_async(is_listed)

        fleet.observer = join
        try:
            with pytest.raises(RefitError, match="joined after 3 passes") as raised:
                synchronizer.sync_weights()
            fleet.observer = None
            assert raised.value.report is not None and raised.value.report.passes == 3
            assert synchronizer.is_stale
            # Those that were moved serve, and no request reaches the one that was not.
            check_samples(generation, policies[1], 1)
        finally:
            fleet.observer = None
            asyncio.run(joiner.end_all())
        synchronizer.shutdown()
    assert footprint.settle() == {}


# --- the services --------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "preflight", "update"])
def test_a_refit_survives_a_frontend_that_restarts_or_says_so(
    base_model: Path, policies: list[Policy], footprint: Footprint, moment: str
) -> None:
    with opened(light(base_model, "front")) as generation:
        synchronizer = make_synchronizer(generation, policies[1])

        def kill(_: Worker | None = None) -> None:
            os.kill(find_pid(generation, "frontend"), signal.SIGKILL)

        if moment == "before":
            kill()
        else:
            strike_at(generation, moment, kill)
        began = time.monotonic()
        try:
            figures = synchronizer.sync_weights()
        except RollwayError as error:
            assert "/health" in str(error) or "frontend" in str(error) or "listed" in str(error)
            figures = wait_for_refit(synchronizer)
        assert time.monotonic() - began < 2 * BOUND
        check_samples(generation, policies[1], int(figures["version"]))
        synchronizer.shutdown()
    assert footprint.settle() == {}


CATALOG = """
    import sys
    from rollway.weights.transports.nixl.catalog import CatalogServer
    print(CatalogServer(port=int(sys.argv[1]), secret=sys.argv[2]).url, flush=True)
"""


@nixl
@pytest.mark.parametrize("moment", ["publishing", "preflight"])
def test_a_killed_catalog_is_named_and_the_workers_go_on(
    base_model: Path, policies: list[Policy], footprint: Footprint, moment: str
) -> None:
    with opened(light(base_model, "listed")) as generation:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        def start() -> subprocess.Popen[str]:
            child, url = start_child(CATALOG, str(port), generation.connection.secret)
            assert url.endswith(f":{port}")
            return child

        catalog = start()
        mx = {"enabled": True, "mx_server_url": f"rollway://127.0.0.1:{port}"}
        synchronizer = make_synchronizer(
            generation, policies[1], method="nixl", shards=True, mx_config=mx
        )
        assert synchronizer.sync_weights()["workers"] == 2
        check_samples(generation, policies[1], 1)
        if moment == "publishing":
            end(catalog)
        else:
            strike_at(generation, moment, lambda _: end(catalog))
        expect_failure(synchronizer, rf"catalog.*{port}|{port}.*catalog")
        # Nobody was paused for weights that cannot be read.
        assert set(read_versions(generation).values()) == {1}
        check_samples(generation, policies[1], 1)
        catalog = start()
        figures = synchronizer.sync_weights()
        check_samples(generation, policies[1], int(figures["version"]))
        synchronizer.shutdown()
        end(catalog)
    assert footprint.settle() == {}


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()


# --- copies --------------------------------------------------------------------------------------

COPY = """
import asyncio, json, pickle, sys
from types import SimpleNamespace
from rollway.errors import UsageError
from rollway.integrations.nemo_rl.synchronizer import Synchronizer
from tests.stack.nemo_rl import collect, make_batch
copy = pickle.load(sys.stdin.buffer)
output = asyncio.run(collect(copy, make_batch([1, 2, 3])))[0]
refused = ""
try:
    Synchronizer(SimpleNamespace(), copy, get=list)
except UsageError as error:
    refused = str(error)
print(json.dumps({
    "versions": output["weight_versions"].tolist(),
    "lengths": output["generation_lengths"].tolist(),
    "flushed": copy.invalidate_kv_cache(),
    "synchronizer": copy.weight_synchronizer,
    "refused": refused,
    "metrics": copy.get_logger_metrics(),
    "closed": copy.shutdown() and copy.shutdown(),
}))
"""


def test_a_copy_in_another_process_generates_and_flushes_and_refits_nothing(
    base_model: Path, policies: list[Policy], footprint: Footprint
) -> None:
    with opened(light(base_model, "copied")) as generation:
        synchronizer = make_synchronizer(generation, policies[1])
        generation.weight_synchronizer = synchronizer
        synchronizer.sync_weights()
        before = read_versions(generation)
        child = subprocess.run(
            [sys.executable, "-c", COPY], input=pickle.dumps(generation), capture_output=True,
            timeout=120,
        )  # fmt: skip
        assert child.returncode == 0, child.stderr.decode()[-2000:]
        report = json.loads(child.stdout.splitlines()[-1])
        assert report["versions"] == [[1, 1]] and report["lengths"] == [8]
        assert report["flushed"] and report["synchronizer"] is None and report["closed"]
        assert "copy in another process" in report["refused"] and report["metrics"] == {}
        assert read_versions(generation) == before  # it changed and stopped nothing
        assert generation.get_inference_world_size() == 2
        check_samples(generation, policies[1], 1)
        with pytest.raises(UsageError, match="copy"):
            copy: Generation = pickle.loads(pickle.dumps(generation))
            make_synchronizer(copy, policies[1])
        synchronizer.shutdown()
    assert footprint.settle() == {}
