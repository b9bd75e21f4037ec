"""What prefill and decode workers get beside the options of any worker.

    request ─► frontend ─► prefill worker: computes the KV of the prompt, keeps the blocks
                  │            │ where they are: side channel host:port, block ids
                  │ ◄──────────┘
                  └──────► decode worker: fetches the blocks over NIXL, generates

The workers of a role have a component of their own, by whose name discovery tells the role.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollway.config import is_loopback
from rollway.errors import PortInUse, StartError
from rollway.model_spec import ModelSpec
from rollway.roles import RawArgs, WorkerRole
from rollway.stack import preset
from rollway.stack.locks import Lease

NIXL_CONNECTOR = "NixlConnector"
NIXL_ADVICE = (
    "Install it with `pip install nixl`; on a machine without CUDA `pip install nixl-cu12` and "
    "`pip install --no-deps nixl` are enough."
)
_RDMA_DEVICES = Path("/sys/class/infiniband")
_FIND_NIXL = "from importlib.util import find_spec; print(find_spec('nixl') is not None)"


def make_role_args(model: ModelSpec, role: WorkerRole) -> RawArgs:
    """Return the engine's options for workers of a role; the user's own win."""
    if not role:
        return {}
    args: RawArgs = {"disaggregation-mode": role}
    if model.engine == "vllm":
        # A prefill worker without this option does not start.
        transfer = {"kv_connector": NIXL_CONNECTOR, "kv_role": "kv_both"}
        if not preset.list_gpus():
            transfer["kv_buffer_device"] = "cpu"
        args["kv-transfer-config"] = transfer
    return args


def make_role_env(host: str, port: int) -> dict[str, str]:
    """Return the environment of a worker whose KV others fetch, or that fetches it."""
    env = {
        # vLLM's own detection fails on machines with a loopback address only.
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }
    if not has_rdma():
        # UCX otherwise tries transports that are not there, and its peers disagree.
        cuda = ",cuda_copy,cuda_ipc" if preset.list_gpus() else ""
        env["UCX_TLS"] = f"tcp,sm,self{cuda}"
        if is_loopback(host):
            env["UCX_NET_DEVICES"] = "lo"
    return env


def reserve_side_channel(ports: Lease, host: str, model: ModelSpec) -> int:
    """Reserve the port of a worker's side channel, and one after it for each further data-parallel
    rank: vLLM adds the rank's number."""
    while True:
        first = ports.reserve_port(0, host, "a worker's side channel for KV")
        try:
            for rank in range(1, model.data_parallel):
                ports.reserve_port(first + rank, host, "a rank's side channel for KV")
        except PortInUse:
            continue  # the first port stays reserved, so the next attempt has another
        return first


def has_rdma() -> bool:
    """Return whether this machine has an RDMA device."""
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())


def check_nixl(model: ModelSpec, python: str) -> None:
    """Raise StartError if workers of this model need NIXL and their Python does not have it. vLLM
    would say so minutes later, after it has loaded the model."""
    if model.serving != "disaggregated" or model.engine != "vllm":
        return
    needs_nixl = any(
        NIXL_CONNECTOR in str(role.args.get("kv-transfer-config", NIXL_CONNECTOR))
        for role in model.roles.values()
    )
    if needs_nixl and not has_nixl(python):
        raise StartError(
            f"`{model.name}` is served disaggregated, and {python} has no module `nixl`, over "
            "which its workers hand over KV.",
            NIXL_ADVICE,
        )


@cache
def has_nixl(python: str = sys.executable) -> bool:
    """Return whether an interpreter finds the module `nixl`. The package nixl-cu12 alone has it
    under another name, which vLLM does not look for."""
    if python == sys.executable:
        return find_spec("nixl") is not None
    try:
        answer: Any = subprocess.run(
            [python, "-c", _FIND_NIXL], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return True  # the start of the worker says what is wrong with this interpreter
    return str(answer.stdout).strip() != "False"
