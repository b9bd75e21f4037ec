"""Rollway's own metrics on a page that the recording process serves."""

from __future__ import annotations

import logging
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollway.fleet.recording import DriverHistory
from rollway.observe import metrics_endpoint, step, steps
from rollway.observe.record import SCHEMA, Recorder

TOKEN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def own_page(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process has one page: this one begins without."""
    monkeypatch.setattr(metrics_endpoint, "_home_metrics", metrics_endpoint.HomeMetrics())
    yield
    end_page()


def end_page() -> None:
    if metrics_endpoint._server is not None:
        metrics_endpoint.close(metrics_endpoint._server)
        metrics_endpoint._server = None


def get(url: str, **headers: str) -> str:
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return str(answer.read().decode())


def get_status(url: str, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(url, **headers)
    return refused.value.code


def test_a_driver_serves_its_steps_if_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert metrics_endpoint.serve_if_asked(tmp_path) is None
    monkeypatch.setenv(metrics_endpoint.ADDRESS, "127.0.0.1:0")
    history = DriverHistory(tmp_path / "attached-1", "dgd://rl/policy", "attached-1")
    url = metrics_endpoint.serve_if_asked(tmp_path)
    assert url is not None
    with step(7):
        pass
    history.recorder.flush()
    assert 'rollway_step{stack="policy",run="attached-1"} 7' in get(url)
    with step(9):
        pass
    history.recorder.flush()
    assert 'rollway_step{stack="policy",run="attached-1"} 9' in get(url)
    history.close()


def test_every_run_is_on_the_page_while_it_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of this process, and one whose writer is another, which is dead."""
    monkeypatch.setenv(metrics_endpoint.ADDRESS, "127.0.0.1:0")
    url = metrics_endpoint.serve_if_asked(tmp_path)
    assert url is not None
    recorders = []
    for number in (1, 2):
        recorder = Recorder(tmp_path / f"run-{number}", "driver", stack="s", run=f"run-{number}")
        steps.register(recorder)
        recorder.write("trainer", step=number, seconds=1.0, parts={})
        recorder.close()
        recorders.append(recorder)
    dead = tmp_path / "run-3"
    dead.mkdir()
    (file,) = (tmp_path / "run-1").glob("driver-*.jsonl")
    own = f'"pid":{os.getpid()}'
    assert own in file.read_text()
    (dead / file.name).write_text(file.read_text().replace(own, '"pid":2147483647'))
    text = get(url)
    assert text.count("# TYPE rollway_step gauge") == 1  # a family stands together
    assert [line for line in text.splitlines() if line.startswith("rollway_step{")] == [
        'rollway_step{stack="s",run="run-1"} 1',
        'rollway_step{stack="s",run="run-2"} 2',
    ]
    steps.unregister(recorders[0])
    assert "run-1" not in get(url) and "run-2" in get(url)
    steps.unregister(recorders[1])
    assert get(url) == ""


def test_a_run_that_another_rollway_records_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(metrics_endpoint.ADDRESS, "127.0.0.1:0")
    url = metrics_endpoint.serve_if_asked(tmp_path)
    assert url is not None
    recorder = Recorder(tmp_path / "run-1", "driver")
    steps.register(recorder)
    recorder.event("start")
    recorder.close()
    (file,) = (tmp_path / "run-1").glob("driver-*.jsonl")
    file.write_text(file.read_text().replace(f'"schema":{SCHEMA}', '"schema":1'))
    assert get(url) == get(url) == ""
    assert caplog.text.count("its schema is 1") == 1
    steps.unregister(recorder)


def test_a_token_is_asked_for_and_loopback_means_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(metrics_endpoint.ADDRESS, "127.0.0.1:0")
    url = metrics_endpoint.serve_if_asked(tmp_path)
    assert url is not None and get(url) == ""
    assert get_status(url.replace("metrics", "")) == 404
    assert get_status(url, Host="evil.example:9400") == 403
    end_page()
    monkeypatch.setenv(metrics_endpoint.ADDRESS, "0.0.0.0:0")
    monkeypatch.setenv(metrics_endpoint.TOKEN, TOKEN)
    url = metrics_endpoint.serve_if_asked(tmp_path)
    assert url is not None
    assert get(url, Authorization=f"Bearer {TOKEN}", Host="10.0.0.9:9400") == ""
    assert get_status(url) == 401
    assert get_status(url, Authorization="Bearer other") == 401


def test_what_is_wrong_is_logged_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for address, text in (
        ("127.0.0.1", "no port"),
        ("0.0.0.0:0", metrics_endpoint.TOKEN),
        ("127.0.0.1:99999", "0-65535"),
    ):  # fmt: skip
        monkeypatch.setenv(metrics_endpoint.ADDRESS, address)
        assert metrics_endpoint.serve_if_asked(tmp_path) is None
        assert text in caplog.messages[-1]
    with monkeypatch.context() as patch:
        patch.setenv(metrics_endpoint.TOKEN, "short")
        assert metrics_endpoint.serve_if_asked(tmp_path) is None
        assert f"{metrics_endpoint.TOKEN} has fewer than 16" in caplog.messages[-1]
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv(metrics_endpoint.ADDRESS, f"127.0.0.1:{other.getsockname()[1]}")
        assert metrics_endpoint.serve_if_asked(tmp_path) is None
    assert "in use" in caplog.messages[-1]
