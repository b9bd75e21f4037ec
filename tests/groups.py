"""Which tests run one after the other in one process when pytest runs in two.

The real stacks are then started once. (xdist 3.8's own `loadgroup` has no effect with pytest 9.2,
which no longer reads the attribute that it sets.)
"""

from __future__ import annotations

from pathlib import PurePath

from xdist.scheduler import LoadFileScheduling

PROCESSES = {"bad_input", "chaos", "chaos_gateway", "lifecycle", "light_stack"}
"""Of tests/stack: those that start and kill stacks of their own."""
ALONE = {
    "bench_gpu_engine", "bench_router", "demo", "disaggregated_shapes", "join", "nemo_rl",
    "nemo_rl_extras", "nemo_rl_faults", "nemo_rl_stock", "prime_rl", "prime_rl_contract",
    "prime_rl_faults", "prime_rl_fleets", "prime_rl_groups", "prime_rl_inference",
    "ranks_over_machines", "wheel",
}  # fmt: skip
"""Of tests/stack: the same, each a group of its own for the process that has done its first group.
The others share real engines."""
ELSEWHERE = {
    "tests/device/test_models.py": "engines",
    "tests/security/test_admin_port.py": "engines",
    "tests/security/test_state_and_config.py": "processes",
}


def find_group(nodeid: str) -> str:
    """Return the group of a test; files are groups of their own unless they share a stack."""
    file = nodeid.split("::", 1)[0]
    name = PurePath(file).stem.removeprefix("test_")
    if PurePath(file).parts[:2] != ("tests", "stack"):
        return ELSEWHERE.get(file, file)
    if name in ALONE:
        return file
    return "processes" if name in PROCESSES else "engines"


class StackScheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return find_group(nodeid)
