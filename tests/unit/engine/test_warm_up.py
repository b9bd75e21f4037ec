"""A worker prepares for its first refit when its engine is up."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollway.engine import incoming, rpc, worker
from rollway.weights.digest import checksums


def test_readers_are_warmed_up_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    calls = threading.Semaphore(0)

    def warm_up() -> None:
        threads.append(threading.current_thread().name)
        calls.release()

    monkeypatch.setattr(checksums, "warm_up", warm_up)
    model = torch.nn.Linear(2, 2)
    engine = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    worker.start_warm_up(engine)
    for _ in incoming._WARMED_UP:
        assert calls.acquire(timeout=30)
    assert set(threads) == {"rollway-background"}
    assert {"rollway.weights.transports.delta", "rollway.weights.transports.shm"} <= set(
        sys.modules
    )


@pytest.mark.parametrize("is_uniprocess", [True, False])
def test_it_begins_after_the_last_call_of_the_start(
    is_uniprocess: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    engine = SimpleNamespace(load_model=None, compile_or_warm_up_model=None)
    wrapper = SimpleNamespace(worker=engine)
    if is_uniprocess:
        module: Any = SimpleNamespace(run_method=lambda _, method, *__: ran.append(method))
        rpc._guard_uniprocess(module, object, lambda it: ran.append(it))

        def call(method: str) -> None:
            module.run_method(wrapper, method, (), {})
    else:
        process = SimpleNamespace(worker=wrapper)
        module = SimpleNamespace(
            WorkerProc=SimpleNamespace(_execute_worker_rpc=lambda _, r: ran.append(r[0]))
        )
        rpc._guard_multiprocess(module, object, lambda it: ran.append(it))

        def call(method: str) -> None:
            module.WorkerProc._execute_worker_rpc(process, (method, (), {}, None))

    for method in ("load_model", "compile_or_warm_up_model", "load_model"):
        call(method)
    assert ran == ["load_model", "compile_or_warm_up_model", engine, "load_model"]
