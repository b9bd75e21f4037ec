"""What a running stack must have before a refit is tried. The stack is a stand-in, and its frontend
a server that knows one route."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from rollway.errors import NoWorkers, RollwayError, Unreachable, UsageError
from rollway.fleet.workers import HealthListing, RlListing
from rollway.integrations.nemo_rl.connection import Connection

INSTANCES = [{"namespace": "team-other-0123abcd"}, {"namespace": "team-rl2"}, {"namespace": "x"}]


class Frontend(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"instances": INSTANCES}).encode()
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Frontend)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def connect(url: str, listing: Any, error: RollwayError | None = None) -> Connection:
    """Return a connection to a stack whose list of workers is empty, or fails."""

    async def workers() -> list[Any]:
        if error is not None:
            raise error
        return []

    connection = object.__new__(Connection)
    stack: Any = SimpleNamespace(frontend_url=url, models=["Qwen/Qwen3-0.6B"])
    fleet: Any = SimpleNamespace(membership=SimpleNamespace(source=listing), workers=workers)
    connection.stack, connection.fleet, connection.model = stack, fleet, "Qwen/Qwen3-0.6B"
    return connection


async def test_a_frontend_without_rl_workers_says_where_it_looked_and_what_it_saw(url: str) -> None:
    with pytest.raises(NoWorkers) as failure:
        await connect(url, HealthListing(url, ("team-rl",), 9090))._check_workers()
    assert "Searched namespace: team-rl; it sees team-other-0123abcd, team-rl2, x." in str(
        failure.value
    )
    assert "with a dash and eight hex digits or without" in failure.value.hint
    with pytest.raises(NoWorkers, match="Searched namespace: the frontend's own"):
        await connect(url, RlListing(f"{url}/rl", url))._check_workers()


async def test_a_frontend_without_a_list_of_workers_says_how_to_have_one(url: str) -> None:
    gone = Unreachable("nothing answers at port 8001")
    with pytest.raises(Unreachable, match=r"its workers are not listed: nothing") as failure:
        await connect(url, RlListing(f"{url}/rl", url), gone)._check_workers()
    assert "DYN_ENABLE_RL=true" in failure.value.hint and "rl_url" in failure.value.hint


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6b", "Qwen/Qwen3-0.6B/"])
def test_a_name_that_differs_by_a_byte_is_named_with_both(url: str, name: str) -> None:
    with pytest.raises(UsageError, match="must be equal to the byte") as failure:
        connect(url, None)._find_model(name)
    assert repr(name) in str(failure.value) and "'Qwen/Qwen3-0.6B'" in str(failure.value)
