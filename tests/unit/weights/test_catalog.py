"""The catalog of versions: signatures, the choice of sources, and limits."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollway.errors import UsageError, WeightsError
from rollway.signed_calls import SECRET, OrderRefused, Verifier
from rollway.weights.transports.nixl import catalog
from rollway.weights.transports.nixl.catalog import (
    ORDER_HEADER,
    Answer,
    Catalog,
    CatalogServer,
    ListedVersions,
    NotYet,
    check_bytes,
    read_order,
    sign_bytes,
)
from rollway.weights.transports.nixl.listing import Listing
from rollway.weights.transports.nixl.modelexpress import open_catalog

WORD = "a secret of this test"
CALLS = ("announce", "withdraw", "look_up")


@pytest.fixture
def server() -> Iterator[CatalogServer]:
    with CatalogServer(secret=WORD) as catalog:
        yield catalog


def listing(version: int = 1, source: str = "t0", rank: int = 0, world: int = 1) -> Listing:
    return Listing(version, source, rank, world, "trainer", b"body of " + source.encode())


def served(version: int, source: str) -> Listing:
    return Listing(version, source, 0, 1, "receiver", b"copy")


def sent(
    server: CatalogServer, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, bytes, str]:
    parts = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=10)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers.get(ORDER_HEADER, "")
    finally:
        connection.close()


def open_answer(headers: dict[str, str], raw: bytes, order: str) -> Answer:
    """Return the answer to a call with these headers, if it is one."""
    number = json.loads(headers[ORDER_HEADER])["number"]
    check_bytes(raw, read_order(Verifier(WORD), f"answer {number}", {ORDER_HEADER: order})[0])
    return msgspec.msgpack.decode(raw, type=Answer)


# --- sources of a version ------------------------------------------------------------------------


def find_source(versions: ListedVersions, receiver: str = "", *without: str) -> str:
    """Return the first source of version 1."""
    return versions.look_up(1, without, receiver)[0].source


def test_a_version_is_found_once_all_ranks_have_announced_it(server: CatalogServer) -> None:
    client = Catalog(server.url, secret=WORD)
    with pytest.raises(NotYet, match="0 of all ranks"):
        client.look_up(1)
    client.announce(listing(source="t1", rank=1, world=2))
    with pytest.raises(NotYet, match="1 of 2 ranks"):
        client.look_up(1)
    client.announce(listing(source="t0", rank=0, world=2))
    assert [listing.body for listing in client.look_up(1)] == [b"body of t0", b"body of t1"]


def test_waiting_for_ranks_ends(server: CatalogServer) -> None:
    began = time.monotonic()
    with pytest.raises(WeightsError, match=r"ranks have announced version 4.*waited for 0.05 s"):
        Catalog(server.url, secret=WORD).wait_for(4, 0.05)
    assert time.monotonic() - began < 20


def test_the_error_for_an_old_version_lists_the_kept_ones(server: CatalogServer) -> None:
    client = Catalog(server.url, secret=WORD)
    for version in (1, 2, 3):
        client.announce(listing(version))
    client.withdraw(1, "t0")
    client.withdraw(1, "t0")  # again is no error
    with pytest.raises(
        WeightsError, match=r"Version 1 is not kept any more \(kept: 2, 3\)"
    ) as caught:
        client.look_up(1)
    assert not isinstance(caught.value, NotYet)


def test_a_version_without_one_of_its_ranks_is_incomplete_again() -> None:
    versions = ListedVersions()
    versions.announce(listing(source="t0", rank=0, world=2))
    versions.announce(listing(source="t1", rank=1, world=2))
    versions.withdraw(1, "t1")
    with pytest.raises(NotYet, match="1 of 2"):
        find_source(versions)


def test_a_restarted_rank_replaces_its_listing() -> None:
    versions = ListedVersions()
    versions.announce(listing(source="old", rank=0, world=1))
    versions.announce(listing(source="new", rank=0, world=1))
    assert [listing.source for listing in versions.look_up(1, (), "")] == ["new"]
    versions.announce(listing(source="a", rank=0, world=2))
    with pytest.raises(NotYet):
        find_source(versions)


def test_receivers_that_serve_relieve_the_trainer() -> None:
    versions = ListedVersions()
    versions.announce(listing())
    assert find_source(versions) == "t0"
    versions.announce(served(1, "r1"))
    versions.announce(served(1, "r2"))
    assert {find_source(versions) for _ in range(100)} == {"r1", "r2"}


def test_receivers_that_arrive_at_once_form_a_tree(server: CatalogServer) -> None:
    """The trainer serves one receiver; each receiver that has the version serves two at a time."""
    client = Catalog(server.url, secret=WORD)

    def find_own(receiver: str, *without: str) -> str:
        return client.look_up(1, without, receiver)[0].source

    client.announce(listing())
    for _ in range(2):
        client.look_up(1)  # reads headers only, and must not keep others from the trainer
    assert find_own("r2") == find_own("r2") == "t0"
    for _ in range(2):
        with pytest.raises(NotYet, match="serving others"):
            find_own("r1")
    client.announce(served(1, "r2"))
    assert find_own("r1") == find_own("r3") == "r2"
    with pytest.raises(NotYet, match="serving others"):
        find_own("r4")
    assert client.look_up(1)[0].source == "r2"  # without waiting
    client.announce(served(1, "r1"))  # it reads no more
    assert [find_own(name) for name in ("r4", "r5", "r6")].count("r2") == 1
    assert find_own("r7", "r1", "r2") == "t0"


def test_a_version_that_is_published_again_serves_anew() -> None:
    versions = ListedVersions()
    for receiver in ("r1", "r2"):
        versions.announce(listing())
        assert find_source(versions, receiver) == "t0"
        with pytest.raises(WeightsError, match="Nobody else has version 1"):
            find_source(versions, receiver, "t0")
        versions.withdraw(1, "t0")


def test_receivers_come_and_go() -> None:
    versions = ListedVersions()
    versions.announce(listing())
    versions.announce(served(1, "r1"))
    assert find_source(versions) == "r1"
    versions.withdraw(1, "r1")
    assert find_source(versions) == "t0"
    versions.withdraw(1, "t0")
    with pytest.raises(WeightsError, match="not kept any more"):
        find_source(versions)


def test_failed_sources_are_excluded() -> None:
    versions = ListedVersions()
    versions.announce(listing())
    versions.announce(served(1, "r1"))
    assert find_source(versions, "", "r1") == "t0"
    with pytest.raises(WeightsError, match="Nobody else has version 1"):
        find_source(versions, "", "r1", "t0")


# --- signatures ----------------------------------------------------------------------------------


def test_a_catalog_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(UsageError, match="needs a secret"):
        CatalogServer()
    with pytest.raises(UsageError, match="needs a secret"):
        Catalog("http://127.0.0.1:1")
    monkeypatch.setenv(SECRET, WORD)
    with CatalogServer() as server:
        Catalog(server.url, secret=WORD).announce(listing())


def test_a_client_with_another_secret_gets_the_reason(server: CatalogServer) -> None:
    with pytest.raises(WeightsError, match=r"does not have this stack's secret \(401\)"):
        Catalog(server.url, secret="another").announce(listing())
    assert not server.versions.listed


@pytest.mark.parametrize("lost", ["process", "sent", "number", "body", "mac", ""])
def test_a_call_without_part_of_its_order_is_refused(server: CatalogServer, lost: str) -> None:
    body = msgspec.msgpack.encode([listing()])
    order = json.loads(sign_bytes(WORD, "/v1/announce", body)[ORDER_HEADER])
    order.pop(lost, None)
    headers = {ORDER_HEADER: json.dumps(order)} if lost else {}
    assert sent(server, "/v1/announce", body, headers)[0] == 401
    assert not server.versions.listed


def test_a_signed_call_cannot_be_sent_again_elsewhere_or_changed(server: CatalogServer) -> None:
    body = msgspec.msgpack.encode([listing()])
    headers = sign_bytes(WORD, "/v1/announce", body)
    assert sent(server, "/v1/look_up", body, headers)[0] == 401
    assert sent(server, "/v1/announce", body, headers)[0] == 200
    status, text, _ = sent(server, "/v1/announce", body, headers)
    assert (status, text) == (401, b"This call is refused: sent before.")
    headers = sign_bytes(WORD, "/v1/announce", body)
    changed = body.replace(b"t0", b"t9")
    assert changed != body
    assert sent(server, "/v1/announce", changed, headers)[0] == 401
    assert server.versions.listed[1].keys() == {"t0"}


def test_an_old_call_is_refused(server: CatalogServer, monkeypatch: pytest.MonkeyPatch) -> None:
    body = msgspec.msgpack.encode([1])
    for away in (-3600, 3600):
        now = time.time()
        monkeypatch.setattr(time, "time", lambda now=now, away=away: now + away)
        headers = sign_bytes(WORD, "/v1/look_up", body)
        monkeypatch.undo()
        status, text, _ = sent(server, "/v1/look_up", body, headers)
        assert status == 401 and b"too old" in text


def test_an_answer_belongs_to_one_call(server: CatalogServer) -> None:
    body = msgspec.msgpack.encode([1, "r"])
    headers = sign_bytes(WORD, "/v1/withdraw", body)
    status, raw, order = sent(server, "/v1/withdraw", body, headers)
    assert status == 200 and open_answer(headers, raw, order) == Answer()
    with pytest.raises(OrderRefused):
        open_answer(headers, raw + b"\0", order)
    with pytest.raises(OrderRefused):
        open_answer(sign_bytes(WORD, "/v1/withdraw", body), raw, order)


def test_a_changed_answer_is_refused(server: CatalogServer) -> None:
    class Forger(BaseHTTPRequestHandler):
        """Stands between both ends."""

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status, raw, order = sent(server, self.path, body, dict(self.headers))
            self.send_response(status)
            self.send_header(ORDER_HEADER, order)
            self.end_headers()
            self.wfile.write(raw.replace(b"body of t0", b"body of x0"))

    Catalog(server.url, secret=WORD).announce(listing())
    with HTTPServer(("127.0.0.1", 0), Forger) as between:
        threading.Thread(target=between.serve_forever, daemon=True).start()
        client = Catalog(f"http://127.0.0.1:{between.server_port}", secret=WORD)
        client.withdraw(1, "r")  # an answer that it does not change is accepted
        with pytest.raises(WeightsError, match="secret"):
            client.look_up(1)
        between.shutdown()


# --- sizes and noise -----------------------------------------------------------------------------


def test_sizes_are_bounded_at_both_ends(
    server: CatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Catalog(server.url, secret=WORD)
    large = Listing(1, "t0", 0, 1, "trainer", os.urandom(100_000))
    client.announce(large)
    monkeypatch.setattr(catalog, "MAX_BYTES", 50_000)
    with pytest.raises(WeightsError, match="more than 50000 bytes"):
        client.look_up(1)
    with (
        CatalogServer(secret=WORD) as small,
        pytest.raises(WeightsError, match="413"),
    ):
        Catalog(small.url, secret=WORD).announce(large)


def test_the_body_of_an_unsigned_request_is_not_read(server: CatalogServer) -> None:
    parts = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=10)
    connection.putrequest("POST", "/v1/announce")
    connection.putheader("content-length", str(1 << 40))
    connection.endheaders()
    assert connection.getresponse().status == 401  # without a byte of it
    connection.close()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(CALLS))
def test_signed_noise_is_refused_and_changes_nothing(raw: bytes, name: str) -> None:
    server = _fuzzed()
    headers = sign_bytes(WORD, f"/v1/{name}", raw)
    status, text, order = sent(server, f"/v1/{name}", raw, headers)
    assert status == 200
    open_answer(headers, text, order)
    assert list(server.versions.listed) == [1]


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(
        st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=80),
        st.dictionaries(
            st.sampled_from(["process", "sent", "number", "body", "mac", "other"]),
            st.one_of(st.text(), st.integers(), st.none()),
        ).map(json.dumps),
    ),
    st.binary(max_size=50),
)
def test_unsigned_noise_is_refused(order: str, raw: bytes) -> None:
    assert sent(_fuzzed(), "/v1/announce", raw, {ORDER_HEADER: order})[0] == 401


_KEPT: list[CatalogServer] = []


def _fuzzed() -> CatalogServer:
    if not _KEPT:
        _KEPT.append(CatalogServer(secret=WORD))
        _KEPT[0].versions.announce(listing())
    return _KEPT[0]


def test_a_closed_catalog_is_reported_in_bounded_time() -> None:
    with CatalogServer(secret=WORD) as server:
        client = Catalog(server.url, secret=WORD)
    began = time.monotonic()
    with pytest.raises(WeightsError, match="does not answer"):
        client.look_up(1)
    assert time.monotonic() - began < 30


def test_an_interrupt_does_not_wait_for_a_catalog_that_hangs() -> None:
    """It ends the process at once, while the call would wait for much longer."""
    code = """if True:
        import signal, sys
        from rollway.weights.transports.nixl import catalog
        signal.signal(signal.SIGINT, signal.default_int_handler)
        catalog._CALL_SECONDS = 600.0
        catalog.Catalog(sys.argv[1], secret="a secret").withdraw(1, "r")
    """
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        hanging.settimeout(60)
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        run = [sys.executable, "-c", code, url]
        with subprocess.Popen(run, stderr=subprocess.PIPE, text=True) as process:
            try:
                connection, _ = hanging.accept()
                assert connection.recv(1)  # the call is under way
                process.send_signal(signal.SIGINT)
                errors = process.communicate(timeout=30)[1]
            finally:
                process.kill()
            connection.close()
    assert "KeyboardInterrupt" in errors
    assert process.returncode == -signal.SIGINT


def test_an_invalid_address_is_refused(server: CatalogServer) -> None:
    for url in ("ftp://host:1", "http://:80", "host:80", "http://host:99999"):
        with pytest.raises(WeightsError, match=f"catalog at {url} does not answer"):
            Catalog(url, secret=WORD).look_up(1)
    with pytest.raises(WeightsError, match="does not say"):
        open_catalog({}, secret=WORD)
    port = int(server.url.rpartition(":")[2])
    for taken in (port, 70_000):
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{taken}: .*[a-z]"):
            CatalogServer(port=taken, secret=WORD)
