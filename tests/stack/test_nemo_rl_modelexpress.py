"""NeMo-RL's recipe for ModelExpress on light workers: a server records the versions. The server is
a stand-in (tests/modelexpress_server.py), because the real one is a container image."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.conftest import Footprint
from tests.light.spec import light
from tests.modelexpress_server import ModelExpressServer
from tests.stack.nemo_rl_runs import (
    check_samples,
    expect_failure,
    make_synchronizer,
    opened,
    read_versions,
)
from tests.stack.policies import Policy
from tests.unit.weights.nixl_pieces import nixl

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300), nixl]

RECIPE = Path(__file__).parents[2] / "examples" / "nemo_rl" / "modelexpress.yaml"


@pytest.mark.parametrize("shards", [False, True])
def test_a_server_records_the_versions_of_a_run(
    base_model: Path, policies: list[Policy], footprint: Footprint, shards: bool
) -> None:
    sync = yaml.safe_load(RECIPE.read_text())["cluster"]["weight_sync"]
    with (
        ModelExpressServer() as server,
        opened(light(base_model, "recorded")) as generation,
    ):
        sync["mx_config"]["mx_server_url"] = server.address
        synchronizer = make_synchronizer(generation, policies[1], shards=shards, **sync)
        for version in (1, 2, 3):
            assert synchronizer.sync_weights()["workers"] == 2
            check_samples(generation, policies[1], version)
        names = {uid.rpartition("-")[2]: state for uid, state in server.list_states().items()}
        assert names == {"v1": "RELEASING", "v2": "READY", "v3": "READY"}  # two are kept
        models = {version.model_name for version in server.versions.values()}
        assert models == {generation.connection.model}
        server.close()
        expect_failure(synchronizer, f"ModelExpress at {server.address} failed")
        # Nobody was paused for weights that nobody records.
        assert set(read_versions(generation).values()) == {3}
        check_samples(generation, policies[1], 3)
        with ModelExpressServer(server.port) as again:  # it has forgotten the versions
            figures = synchronizer.sync_weights()
            check_samples(generation, policies[1], int(figures["version"]))
            synchronizer.shutdown()
            assert set(again.list_states().values()) == {"RELEASING"}
    assert footprint.settle() == {}
