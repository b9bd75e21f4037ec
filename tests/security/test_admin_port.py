"""Attacks on a worker's admin port by somebody who can reach it and does not have the secret."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rollway
from rollway import processes
from rollway.engine import guard, rpc
from rollway.errors import AdminError
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.fleet import Fleet
from rollway.fleet.workers import Worker
from rollway.http import Http
from rollway.signed_calls import ORDER, SECRET, OrderRefused, Verifier, sign
from rollway.stack.state import StackDir, secret_file
from tests.light.spec import light
from tests.stack.policies import Policy, perturbed
from tests.waiting import wait_until

WORD = "a secret"
ATTACKS: list[tuple[str, dict[str, Any]]] = [
    ("pause_generation", {"mode": "abort"}),
    ("resume_generation", {}),
    ("flush_cache", {}),
    ("abort_request", {"request_id": "1"}),
    ("set_weight_version", {"weight_version": 7}),
    ("update_weights_from_disk", {"model_path": "/tmp", "weight_version": 7}),
    ("update_weights_from_distributed", {"engine_rpc": "reload_weights", "weights_path": "/tmp"}),
    (
        "update_weights_from_distributed",
        {
            "engine_rpc": "update_environment_variables",
            "allow_unpaused": True,
            "reset_prefix_cache": False,
            "envs_list": [{SECRET: ""}],
        },
    ),
    (
        "update_weights_from_distributed",
        {
            "engine_rpc": "save_sharded_state",
            "allow_unpaused": True,
            "reset_prefix_cache": False,
            "path": "/tmp/stolen",
        },
    ),
    ("update_weights_from_tensor", {"engine_rpc": "rollway_swap", "identity": "a" * 32}),
    ("init_weights_update_group", {"engine_rpc": "shutdown"}),
    ("destroy_weights_update_group", {"engine_rpc": "shutdown"}),
    ("update/model_taints", {"taints": ["rollway-v7"]}),
    ("control/sleep", {"level": 2}),
    ("rollway_stage", {"identity": "a" * 32, "needs_label": False, "seconds": 1.0}),
    ("rollway_refit", {"identity": "a" * 32, "label": 0, "version": 7}),
    ("rollway_discard", {"identity": "a" * 32}),
    ("rollway_sleep", {"level": 2, "mode": "abort", "label": 0}),
    ("rollway_wake", {}),
    ("control/start_profile", {}),
]


def post(url: str, body: Any, content_type: str = "application/json") -> dict[str, Any]:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"content-type": content_type}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        reply: dict[str, Any] = json.loads(answer.read())
    return reply


@pytest.fixture
def stack(base_model: Path) -> Iterator[rollway.Stack]:
    with rollway.up(light(base_model, "attacked", replicas=1)) as running:
        yield running


# --- The signature itself ------------------------------------------------------------------------


def test_an_order_is_good_once_for_one_route_and_one_process() -> None:
    order = sign(WORD, "pause_generation", "p1", {"mode": "wait"})
    with pytest.raises(OrderRefused, match="another secret's signature"):
        Verifier("other", "p1").open("pause_generation", order)
    with pytest.raises(OrderRefused, match="another secret's signature"):
        Verifier(WORD, "p1").open("resume_generation", order)
    with pytest.raises(OrderRefused, match="another process"):
        Verifier(WORD, "p2").open("pause_generation", order)
    verifier = Verifier(WORD, "p1")
    for name in ("body", "number", "sent", "process"):
        with pytest.raises(OrderRefused, match="signature"):
            verifier.open("pause_generation", {**order, name: order[name] + "1"})
    assert verifier.open("pause_generation", order) == {"mode": "wait"}
    with pytest.raises(OrderRefused, match="sent before"):
        verifier.open("pause_generation", order)


@pytest.mark.parametrize(
    "order", [None, [], "x", 7, {}, {"mac": "x"}, {"mac": 1, "body": {}}, {"mac": "\ud800"}]
)
def test_invalid_orders_are_refused(order: Any) -> None:
    with pytest.raises(OrderRefused, match="signed orders only"):
        Verifier(WORD, "p1").open("pause_generation", order)


def test_numbers_of_expired_orders_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, clock = Verifier(WORD, "p1"), [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    for _ in range(50):
        verifier.open("flush_cache", sign(WORD, "flush_cache", "p1", {}))
        clock[0] += 60
    assert len(verifier._used) <= 5


def test_a_worker_without_a_secret_refuses_every_order() -> None:
    with pytest.raises(OrderRefused, match="started without a secret"):
        Verifier("", "p1").open("pause_generation", sign("", "pause_generation", "p1", {}))


def test_an_old_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    order = sign(WORD, "pause_generation", "p1", {})
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1000)
    with pytest.raises(OrderRefused, match=r"too old: .* or the clocks of the two machines differ"):
        Verifier(WORD, "p1").open("pause_generation", order)


async def test_refusals_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    door = guard.Guard(WORD)

    async def run(body: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("it must not run")

    protected = door.protect("pause_generation", run)
    for _ in range(1000):
        assert (await protected({}))["status"] == "error"
    assert 1 <= len(caplog.records) <= 10


def test_the_engine_runs_no_method_outside_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.worker_base", raising=False)

    class Extension:
        def rollway_stage(self) -> None: ...

    class Engine:
        def execute_model(self) -> None: ...
        def save_sharded_state(self) -> None: ...

    class Mixed(Engine, Extension):
        """As vLLM mixes them."""

    class Wrapper:
        worker = Mixed()

        def update_environment_variables(self) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return getattr(self.worker, name)

    for method in ("execute_model", "rollway_stage", "no_such_method"):
        rpc.check_method(Wrapper(), method, Extension)
    for method in ("save_sharded_state", "update_environment_variables", b"pickle", "__init__"):
        with pytest.raises(rpc.MethodRefused):
            rpc.check_method(Wrapper(), method, Extension)


def test_the_list_holds_also_where_vllm_extends_its_own_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On GPUs vLLM adds the extension to the bases of the class that has its own methods."""

    class Base:
        """vLLM's WorkerBase."""

    class Engine(Base):
        def save_sharded_state(self) -> None: ...

    class Extension:
        def rollway_stage(self) -> None: ...

    class Mixin:
        def receive(self) -> None: ...

    class Users(Mixin, Extension):
        def rendezvous(self) -> None: ...

    worker_base = SimpleNamespace(WorkerBase=Base)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", worker_base)
    Engine.__bases__ = (*Engine.__bases__, Users)
    for method in ("rollway_stage", "receive", "rendezvous"):
        rpc.check_method(Engine(), method, Extension)
    with pytest.raises(rpc.MethodRefused):
        rpc.check_method(Engine(), "save_sharded_state", Extension)


# --- A stack of light workers: real Dynamo, real ports -------------------------------------------


@pytest.mark.stack
def test_without_the_secret_no_worker_can_be_changed(stack: rollway.Stack) -> None:
    """As any user of the machine, and as a web page whose text/plain needs no preflight."""
    (worker,) = stack.fleet.workers()
    for content_type in ("application/json", "text/plain"):
        for route, body in ATTACKS:
            url = f"{worker.admin_url}/engine/{route}"
            try:
                reply = post(url, body, content_type)
            except urllib.error.HTTPError as error:
                assert error.code == 404  # light workers lack some of the routes
                continue
            assert reply == {"status": "error", "message": "this worker takes signed orders only"}
            reply = post(url, {ORDER: sign("guessed", route, "", body)}, content_type)
            assert reply["status"] == "error" and "another secret" in reply["message"]
    assert stack.fleet.read_versions() == {worker.instance_id: 0}
    (rollout,) = stack.rollouts().generate([1, 2, 3], rollway.Sampling(max_tokens=4))
    assert rollout.weight_version == 0


@pytest.mark.stack
def test_a_recorded_order_cannot_be_sent_again(stack: rollway.Stack) -> None:
    (worker,) = stack.fleet.workers()
    url = f"{worker.admin_url}/engine"
    process = post(f"{url}/rollway_door", {})["process"]
    order = {ORDER: sign(stack.weights_secret, "flush_cache", process, {})}
    assert post(f"{url}/flush_cache", order)["status"] == "ok"
    assert "sent before" in post(f"{url}/flush_cache", order)["message"]
    order = {ORDER: sign(stack.weights_secret, "flush_cache", "a successor", {})}
    assert "another process" in post(f"{url}/flush_cache", order)["message"]


@pytest.mark.stack
def test_the_secret_is_in_no_environment_and_no_command_line(stack: rollway.Stack) -> None:
    state = StackDir("attacked").read()
    assert state is not None
    secret = stack.weights_secret.encode()
    assert len(secret) == 64
    assert secret_file(state).stat().st_mode & 0o777 == 0o600
    members = processes.find_members(state.run_id)
    assert len(members) >= 2
    for process in members:
        for name in ("environ", "cmdline"):
            assert secret not in Path(f"/proc/{process.pid}/{name}").read_bytes()
    for log in Path(state.log_dir).iterdir():
        assert secret not in log.read_bytes()


@pytest.mark.stack
def test_a_worker_restarts_after_its_secret_file_was_removed(stack: rollway.Stack) -> None:
    """What removes old files from /tmp takes it after some days."""
    state = StackDir("attacked").read()
    assert state is not None
    secret = stack.weights_secret
    secret_file(state).unlink()
    (worker,) = (process for process in state.processes if process.role == "worker")
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)

    def is_ready_again() -> bool:
        state = StackDir("attacked").read()
        assert state is not None
        (again,) = (process for process in state.processes if process.role == "worker")
        return again.pid != worker.pid and again.state == "ready"

    wait_until(is_ready_again)
    assert stack.weights_secret == secret


@pytest.mark.stack
def test_the_error_without_the_secret_says_what_to_do(stack: rollway.Stack) -> None:
    async def pause() -> None:
        async with Http() as http:
            fleet = Fleet(http, stack.rl_url, secret="")
            (worker,) = await fleet.workers()
            await fleet.admin.pause(worker)

    with pytest.raises(AdminError, match=r"signed orders only\. Attach to the stack by its name"):
        asyncio.run(pause())


@pytest.mark.stack
def test_orders_reach_a_restarted_worker(stack: rollway.Stack) -> None:
    """The client knows the process by name; the successor has another, and the same address."""

    async def flush(admin: DynamoAdmin, worker: Worker) -> None:
        await admin.flush_cache(worker)

    async def run() -> None:
        async with Http() as http:
            admin = DynamoAdmin(http, secret=stack.weights_secret)
            fleet = Fleet(http, stack.rl_url, secret=stack.weights_secret)
            (worker,) = await fleet.workers()
            await flush(admin, worker)
            admin._processes[worker.admin_url] = "a predecessor"
            await flush(admin, worker)
            admin._processes[worker.admin_url] = ""  # one without a guard
            await flush(admin, worker)

    asyncio.run(run())


@pytest.mark.stack
def test_orders_can_be_left_open_for_other_tools(base_model: Path, tmp_path: Path) -> None:
    """Its worker has no guard, and is a foreign one."""
    spec = {**light(base_model, "open", replicas=1), "admin_orders": "open"}
    with rollway.up(spec) as stack:
        (worker,) = stack.fleet.workers()
        assert post(f"{worker.admin_url}/engine/flush_cache", {})["status"] == "ok"
        stack.refit(1, perturbed(base_model, tmp_path / "other", seed=1))


# --- Real vLLM workers ---------------------------------------------------------------------------


@pytest.mark.stack
def test_no_unsigned_call_changes_a_real_engine(
    vllm_stack: rollway.Stack, policies: list[Policy], tmp_path: Path
) -> None:
    worker = vllm_stack.fleet.workers()[0]
    before = vllm_stack.fleet.read_versions()
    for route, body in ATTACKS:
        reply = post(f"{worker.admin_url}/engine/{route}", body)
        assert reply == {"status": "error", "message": "this worker takes signed orders only"}
    assert vllm_stack.fleet.read_versions() == before
    assert not Path("/tmp/stolen").exists()


@pytest.mark.stack
def test_not_even_a_signed_call_runs_any_method_of_the_engine(
    vllm_stack: rollway.Stack, tmp_path: Path
) -> None:
    """What blanked the secret, and what wrote the weights to a file: refused by the engine too."""
    worker = vllm_stack.fleet.workers()[0]

    async def attack() -> None:
        async with Http() as http:
            admin = DynamoAdmin(http, secret=vllm_stack.weights_secret)
            for method, arguments in (
                ("update_environment_variables", {"envs_list": [{SECRET: "", "PATH": ""}]}),
                ("save_sharded_state", {"path": str(tmp_path / "stolen")}),
                ("apply_model", {"func": "print"}),
            ):
                with pytest.raises(AdminError, match="Rollway does not let the engine's RPC run"):
                    await admin.call(worker, method, arguments)
            offer = {"transport": "files", "version": 1, "identity": "a" * 32, "nbytes": 1}
            offer["where"] = {"path": str(tmp_path)}
            for method in ("rollway_stage", "rollway_join"):
                with pytest.raises(AdminError, match="not signed with this stack's secret"):
                    await admin.call(worker, method, {"offer": offer})
            await admin.flush_cache(worker)

    asyncio.run(attack())
    assert not (tmp_path / "stolen").exists()
    state = StackDir("shared").read()
    assert state is not None
    logs = [path.read_text(errors="replace") for path in Path(state.log_dir).glob("tiny-*.log")]
    assert any("refused the engine RPC 'save_sharded_state'" in text for text in logs)
    assert vllm_stack.rollouts().generate([1, 2, 3], rollway.Sampling(max_tokens=4))
