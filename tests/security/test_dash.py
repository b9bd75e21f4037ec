"""What other users of the machine can do to a dashboard and to a trainer's page of metrics."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import resource
import socket
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollway.gateway.store import SessionStore
from rollway.gateway.tokens import scope_of
from tests.children import run_server, start_child
from tests.observe.make_run import write_run
from tests.security.other_user import another_user, needs_root
from tests.security.stores import make_turn, record
from tests.waiting import wait_until

TRAINER = """
    import os, resource, sys, threading
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    from pathlib import Path
    from rollway.observe.metrics_endpoint import serve_if_asked
    print(serve_if_asked(Path(sys.argv[1])), flush=True)
    for line in sys.stdin:
        open(os.devnull).close()  # what a trainer does all the time
        print(threading.active_count(), flush=True)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", workers=2, seconds=30)
    return tmp_path / "run"


def connect(url: str, data: bytes = b"") -> socket.socket:
    """Connect as a client that sends this, and then stays."""
    port = int(url.split(":")[2].partition("/")[0])
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(data)
    return client


@contextlib.contextmanager
def hold(clients: list[socket.socket]) -> Iterator[None]:
    try:
        yield
    finally:
        for client in clients:
            client.close()


def read_page(url: str, token: str = "") -> bytes:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        return bytes(answer.read(1 << 16))


def test_idle_clients_take_few_threads_and_files_of_a_trainer(tmp_path: Path) -> None:
    """More than the trainer may have files; half of them send a part of a request."""
    environment = {**os.environ, "ROLLWAY_METRICS": "127.0.0.1:0"}
    trainer, url = start_child(TRAINER, str(tmp_path), env=environment)
    assert trainer.stdin is not None and trainer.stdout is not None
    clients: list[socket.socket] = []
    with trainer, hold(clients):
        try:
            clients += (connect(url, b"GET /met" * (number % 2)) for number in range(160))
            assert read_page(url) == b""  # Prometheus is answered
            trainer.stdin.write("\n")
            trainer.stdin.flush()
            threads = trainer.stdout.readline()
            assert threads and int(threads) < 32
            assert len(list(Path(f"/proc/{trainer.pid}/fd").iterdir())) < 64
        finally:
            trainer.kill()


def test_idle_pages_do_not_shut_the_owner_out(run_dir: Path) -> None:
    """Another user opens more streams than the dashboard keeps, and reads none of them."""
    request = b"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    clients: list[socket.socket] = []
    with run_server("dash", "--run", str(run_dir)) as dash, hold(clients):
        for _ in range(70):
            clients.append(connect(dash["url"], request))
            assert clients[-1].recv(12) == b"HTTP/1.1 200"
        with urllib.request.urlopen(f"{dash['url']}api/stream", timeout=30) as page:
            assert page.readline().startswith(b"data: ")
        wait_until(lambda: has_ended(clients[0]))  # the oldest made room


def has_ended(client: socket.socket) -> bool:
    """Read what is there; return whether the other end has closed the connection."""
    client.setblocking(False)
    try:
        while client.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def test_idle_connections_do_not_shut_the_owner_out(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dashboard may open fewer files than there are connections without the token."""
    monkeypatch.setenv("ROLLWAY_DASH_TOKEN", "0123456789abcdef")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))  # the dashboard inherits it
    clients: list[socket.socket] = []
    try:
        with run_server("dash", "--run", str(run_dir)) as dash, hold(clients):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
            url = dash["url"].partition("?")[0]
            clients += (connect(url) for _ in range(600))
            page = read_page(f"{url}api/model", "0123456789abcdef")
            assert b"sections" in page
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def ask_as_another_user(url: str) -> str:
    """GET an address as a user who has nothing of ours; return the answer, or why there is none."""
    with another_user(lambda: read_page(url).decode()) as answer:
        return answer


@needs_root
async def test_another_user_sees_no_session_of_a_gateway_with_tokens(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the token of the dashboard sees all; sessions without a token are everybody's."""
    journal, secret = tmp_path / "gateway.sqlite", f"{scope_of(b'agent-a')}/diary"
    store = SessionStore(journal)
    for name in ("public", secret):
        assert await record(store, make_turn(name))
    store.close()
    arguments = ("dash", "--run", str(run_dir), "--journal", str(journal))
    with run_server(*arguments) as dash:
        answer = json.loads(ask_as_another_user(f"{dash['url']}api/sessions"))
        assert [session["name"] for session in answer["sessions"]] == ["public"]
        assert answer["has_hidden"]  # the page says how to see them
        assert "404" in ask_as_another_user(f"{dash['url']}api/session?name={secret}")
    token = "0123456789abcdef"
    monkeypatch.setenv("ROLLWAY_DASH_TOKEN", token)
    with run_server(*arguments) as dash:
        page = read_page(f"{dash['url'].partition('?')[0]}api/sessions", token)
        assert {session["name"] for session in json.loads(page)["sessions"]} == {"public", secret}


def test_the_token_is_in_no_argument_of_the_browser(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The browser is a script that writes what it was given; the dashboard has a terminal."""
    browser, given = tmp_path / "browser", tmp_path / "given"
    browser.write_text(f'#!/bin/sh\necho "$@" > {given}.new; mv {given}.new {given}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    monkeypatch.setenv("ROLLWAY_DASH_TOKEN", "0123456789abcdef")
    command = [sys.executable, "-m", "rollway.cli", "dash", "--run", str(run_dir), "--port", "0"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs) as dash:
        try:
            wait_until(given.exists)
            argument = given.read_text().strip()
            assert "0123456789abcdef" not in argument
            page = Path(argument.removeprefix("file://"))
            assert stat.S_IMODE(page.stat().st_mode) == 0o600
            assert "?token=0123456789abcdef" in page.read_text()
            dash.terminate()
            assert dash.wait(60) == 0
            assert not page.exists()
        finally:
            dash.kill()
            os.close(ours)
            os.close(theirs)
