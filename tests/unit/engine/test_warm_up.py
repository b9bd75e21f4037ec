"""A worker prepares for its first refit when its engine is up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollway.engine import incoming, rpc, worker


def test_readers_are_imported_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[tuple[str, str]] = []
    done = threading.Semaphore(0)

    def note(module: str) -> None:
        imported.append((module, threading.current_thread().name))
        done.release()

    monkeypatch.setattr(incoming, "import_module", note)
    model = torch.nn.Linear(2, 2)
    worker.start_warm_up(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model)))
    for _ in incoming._WARMED_UP:
        assert done.acquire(timeout=30)
    assert {thread for _, thread in imported} == {"rollway-background"}
    assert {"rollway.weights.transports.delta", "rollway.weights.transports.shm"} <= {
        module for module, _ in imported
    }


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
