"""Plans from any Megatron topology to any engine are exact, for all of Megatron's layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.errors import UsageError
from rollway.weights.megatron.geometry import Topology
from rollway.weights.megatron.names import NameMap
from rollway.weights.planning.plan import Costs, plan
from rollway.weights.planning.scenario import megatron_sources
from rollway.weights.planning.targets import engine_ranks, engine_targets
from tests.unit.weights.megatron_models import Experts, Norms, describe_as
from tests.unit.weights.megatron_plans import DENSE, MOE, model_of
from tests.unit.weights.planned import carried_out, expected

TOPOLOGIES = [
    Topology(),
    Topology(tp=2),
    Topology(tp=4, etp=2, ep=2),
    Topology(tp=2, pp=2, ep=4, world=8),
    Topology(ep=4),
    Topology(tp=4, etp=4),
    Topology(pp=2, etp=2, world=8),
]


@settings(max_examples=30, deadline=None)
@given(
    config=st.sampled_from([MOE, DENSE, {**MOE, "num_key_value_heads": 8}]),
    topology=st.sampled_from(TOPOLOGIES),
    experts=st.sampled_from(Experts),
    norms=st.sampled_from(Norms),
    engine=st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (2, 4), (8, 1)]),
    costs=st.sampled_from([Costs(), Costs(pack_gb_per_s=0), Costs(read_seconds=0)]),
)
def test_any_topology_to_any_engine(
    config: dict[str, Any],
    topology: Topology,
    experts: Experts,
    norms: Norms,
    engine: tuple[int, int],
    costs: Costs,
) -> None:
    model, headers = model_of(config)
    names = NameMap.from_hf_config(config)
    described = describe_as(headers, names, topology, padded_vocab=32, norms=norms, experts=experts)
    sources = megatron_sources(described)
    ranks = engine_ranks(config, *engine)
    wanted = [engine_targets(rank, headers) for rank in ranks]
    received, _ = carried_out(sources, model, wanted, costs)
    for mine, targets in zip(received, wanted, strict=True):
        for target, values in expected(model, targets).items():
            np.testing.assert_array_equal(mine[target], values, err_msg=target)


def test_the_error_names_a_tensor_of_a_missing_stage() -> None:
    _, headers = model_of(DENSE)
    names = NameMap.from_hf_config(DENSE)
    sources = megatron_sources(describe_as(headers, names, Topology(pp=2)))
    (rank,) = engine_ranks(DENSE)
    with pytest.raises(UsageError, match=r"No source holds model\.layers\.1\."):
        list(plan(sources[:1], [("r", engine_targets(rank, headers))]))
