"""Who can use the gateway, and which sessions they can see."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollway.callers import is_loopback_host
from rollway.cli.gateway import gateway as run_gateway
from rollway.errors import UsageError
from rollway.gateway.command import listen, make_tls_context
from rollway.gateway.tokens import Access, key_name, scope_of
from tests.security.gateway_service import CHAT_BODY, Service, read_error, serve_gateway
from tests.security.stores import read_files

TOKENS = Access((b"agent-a", b"agent-b"), (b"boss",))


def authorize(token: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}", **more}


async def send_raw(gateway: Service, head: bytes) -> tuple[int, Any]:
    """Send raw bytes; return the status and the decoded body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(head)
    answer = await reader.read()
    writer.close()
    top, _, body = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(body)


def _build_post(*headers: bytes) -> bytes:
    body = json.dumps(CHAT_BODY).encode()
    lines = [
        b"POST /v1/chat/completions HTTP/1.1", b"Host: 127.0.0.1", b"Connection: close",
        b"Content-Type: application/json", b"Content-Length: %d" % len(body), *headers,
    ]  # fmt: skip
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def test_a_web_page_reaches_nothing(tmp_path: Path) -> None:
    """The page uses DNS rebinding or a simple request to loopback."""
    async with serve_gateway(tmp_path) as gateway:
        paths = ("/health", "/v1/models", "/v1/rollway/sessions", "/v1/rollway/trajectories/s")
        for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.5:8100", "[::2]", "["):
            for path in paths:
                status, answer = await gateway.get(path, host=host)
                assert status == 403, (host, path)
                assert "Host" in read_error(answer)["message"]
        for host in ("127.0.0.1:1", "localhost", "LocalHost:8100", "[::1]:5", "127.8.8.8"):
            assert (await gateway.get("/v1/models", host=host))[0] == 200, host
        for origin in ("http://evil.example", "null", "http://127.0.0.1"):
            for path in paths:
                status, answer = await gateway.get(path, origin=origin)
                assert status == 403 and "Web pages" in read_error(answer)["message"]
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            status, answer = await gateway.chat({"content-type": kind})
            assert status == 415
            read_error(answer)
        assert gateway.frontend.bodies == []
        kind = "application/json; charset=utf-8"
        assert (await gateway.chat({"content-type": kind}))[0] == 200


async def test_bodies_must_be_json_even_with_a_token(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path, access=TOKENS) as gateway:
        status, _ = await gateway.chat(authorize("agent-a", **{"content-type": "text/plain"}))
        assert status == 415
        assert (await gateway.get("/v1/models", **authorize("agent-a", host="a.example")))[0] == 200


async def test_guessed_tokens_are_refused(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path, access=TOKENS) as gateway:
        for headers in (
            {},
            authorize("agent-c"),
            authorize(""),
            authorize("/agent-a"),
            authorize("agent-a x"),
        ):
            for path in ("/v1/models", "/v1/rollway/sessions", "/nothing"):
                status, answer = await gateway.get(path, **headers)
                assert status == 401 and read_error(answer)["type"] == "authentication_error"
            assert (await gateway.chat(headers))[0] == 401
        assert (await gateway.get("/health"))[1] == {"status": "ok", "model": "m"}


async def test_a_token_with_a_byte_above_0x7f_is_refused(tmp_path: Path) -> None:
    """It once caused a 500 before authentication."""
    async with serve_gateway(tmp_path, access=TOKENS) as gateway:
        for token in (b"agent-a\xff", b"\x80", b"\xc3\xa9"):
            status, answer = await send_raw(gateway, _build_post(b"Authorization: Bearer " + token))
            assert status == 401, token
            read_error(answer)


async def test_session_names_that_cannot_be_shown_are_refused(tmp_path: Path) -> None:
    """One byte above 0x7f once broke the listing until a restart."""
    async with serve_gateway(tmp_path) as gateway:
        for name in (
            b"a\xffb",
            b"\x80",
            b"n" * 257,
            b"a\tb",
            b"..",
            b"../x",
            b"a/./b",
            "a\u200bb".encode(),
        ):
            status, answer = await send_raw(gateway, _build_post(b"x-rollway-session: " + name))
            assert status == 400, name
            read_error(answer)
        long_key = b"Authorization: Bearer " + b"k" * 257
        assert (await send_raw(gateway, _build_post(long_key)))[0] == 400
        assert (await send_raw(gateway, _build_post(b"Authorization: Bearer \xff")))[0] == 200
        good = "épisode 17/b"
        good_name = b"x-rollway-session: " + good.encode()
        assert (await send_raw(gateway, _build_post(good_name)))[0] == 200
        status, answer = await gateway.get("/v1/rollway/sessions")
        assert status == 200 and answer["sessions"][good] == 1
        for shown in answer["sessions"]:
            status, _ = await gateway.get(f"/v1/rollway/trajectories/{shown}")
            assert status == 200, shown
        assert (await gateway.get("/v1/rollway/trajectories/a%FFb"))[0] in (400, 404)
        assert (await gateway.get(f"/v1/rollway/trajectories/{'n' * 300}"))[0] == 400


async def test_an_agent_reads_and_continues_its_own_sessions_only(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path, access=TOKENS) as gateway:
        for token in ("agent-a", "agent-b"):
            status, answer = await gateway.chat(authorize(token, **{"x-rollway-session": "one"}))
            assert status == 200 and answer["session"] == "one"
        history = [CHAT_BODY["messages"][0], {"role": "assistant", "content": "ok"}]
        more = [*history, {"role": "user", "content": "more"}]
        assert (await gateway.chat(authorize("agent-a/one"), messages=more))[0] == 200
        path = "/v1/rollway/trajectories/one"
        for token, turns in (("agent-a", 2), ("agent-b", 1)):
            status, answer = await gateway.get(path, **authorize(token))
            assert status == 200 and answer["turns"] == turns and answer["session"] == "one"
            _, listing = await gateway.get("/v1/rollway/sessions", **authorize(token))
            assert listing["sessions"] == {"one": turns}
        other = f"{scope_of(b'agent-a')}/one"
        for attempt in (other, f"..%2F{other}", f"/{other}"):
            url = f"/v1/rollway/trajectories/{attempt}"
            assert (await gateway.get(url, **authorize("agent-b")))[0] in (400, 404)
            headers = authorize("agent-b")
            assert (await gateway.call("DELETE", url, headers=headers))[0] in (400, 404)
        # A session name that looks like another agent's full name stays in the agent's own scope.
        headers = authorize("agent-b", **{"x-rollway-session": other})
        assert (await gateway.chat(headers, messages=more))[0] == 200
        assert (await gateway.get(path, **authorize("agent-a")))[1]["turns"] == 2
        assert (await gateway.call("DELETE", path, headers=authorize("agent-b")))[0] == 200
        assert (await gateway.get(path, **authorize("agent-a")))[0] == 200


async def test_an_operator_sees_the_sessions_of_all_agents(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path, access=TOKENS) as gateway:
        for token in ("agent-a", "agent-b", "boss"):
            assert (await gateway.chat(authorize(f"{token}/one")))[0] == 200
        _, listing = await gateway.get("/v1/rollway/sessions", **authorize("boss"))
        names = [f"{scope_of(token)}/one" for token in (b"agent-a", b"agent-b", b"boss")]
        assert listing["sessions"] == dict.fromkeys(names, 1)
        for name in (*names, "one"):
            path = f"/v1/rollway/trajectories/{name}"
            assert (await gateway.get(path, **authorize("boss")))[0] == 200
        headers = authorize("boss")
        path = f"/v1/rollway/trajectories/{names[0]}"
        assert (await gateway.call("DELETE", path, headers=headers))[0] == 200
        assert (await gateway.get("/v1/rollway/trajectories/one", **authorize("agent-a")))[0] == 404
        assert "agent-a" not in json.dumps(listing)


async def test_the_error_without_an_operator_explains_how_to_set_one(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path, access=Access((b"agent-a",))) as gateway:
        path = "/v1/rollway/trajectories/0123/one"
        status, answer = await gateway.get(path, **authorize("agent-a"))
        assert status == 404
        assert "ROLLWAY_GATEWAY_OPERATOR_TOKENS" in read_error(answer)["message"]


async def test_client_keys_are_never_stored(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path) as gateway:
        status, answer = await gateway.chat(authorize("sk-very-secret"))
        name = key_name("sk-very-secret")
        assert status == 200 and answer["session"] == name
        _, listing = await gateway.get("/v1/rollway/sessions")
        assert listing["sessions"] == {name: 1}
        for known in ("sk-very-secret", name):
            status, answer = await gateway.get(f"/v1/rollway/trajectories/{known}")
            assert status == 200 and answer["session"] == name
        assert b"sk-very-secret" not in read_files(tmp_path / "gateway.sqlite")
        # A session name in the header takes precedence.
        assert (await gateway.chat({"x-rollway-session": "sk-very-secret"}))[0] == 200
        _, answer = await gateway.get("/v1/rollway/trajectories/sk-very-secret")
        assert answer["session"] == "sk-very-secret"
        assert (await gateway.chat(authorize("EMPTY")))[1]["session"] == ""
        status, _ = await gateway.call("DELETE", "/v1/rollway/trajectories/sk-very-secret")
        _, listing = await gateway.get("/v1/rollway/sessions")
        assert listing["sessions"] == {name: 1}


def test_unusable_tokens_are_refused() -> None:
    names = ("ROLLWAY_GATEWAY_TOKENS", "ROLLWAY_GATEWAY_OPERATOR_TOKENS")
    read = Access.from_environment({names[0]: "a,b  c", names[1]: "d"})
    assert read == Access((b"a", b"b", b"c"), (b"d",)) and read.needs_token
    assert not Access.from_environment({}).needs_token
    with pytest.raises(UsageError, match="slash"):
        Access.from_environment({names[0]: "a/b"})
    with pytest.raises(UsageError, match="both"):
        Access.from_environment({names[0]: "a", names[1]: "a"})


def test_only_loopback_needs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLWAY_GATEWAY_TOKENS", raising=False)
    monkeypatch.delenv("ROLLWAY_GATEWAY_OPERATOR_TOKENS", raising=False)
    for host in ("0.0.0.0", "::", "10.1.2.3", "127.0.0.1.evil.example", ""):
        options = argparse.Namespace(host=host, tls_cert=None, tls_key=None)
        with pytest.raises(UsageError, match="let anybody in"):
            run_gateway(options)
    assert is_loopback_host("127.0.0.9") and not is_loopback_host("127.0.0.1@evil.example")


def _make_certificate(directory: Path) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed; it makes the certificate")
    certificate, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out",
         str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(certificate), str(key)


async def test_tls_works_with_a_certificate_and_a_key(tmp_path: Path) -> None:
    certificate, key = _make_certificate(tmp_path)
    async with serve_gateway(tmp_path) as gateway:
        listener = await listen(gateway.gateway, "127.0.0.1", 0, make_tls_context(certificate, key))
        trust = ssl.create_default_context(cafile=certificate)
        url = f"https://127.0.0.1:{listener.port}/v1/models"
        async with aiohttp.ClientSession() as http, http.get(url, ssl=trust) as answer:
            assert answer.status == 200
        await listener.close()


def test_unusable_certificate_files_are_refused(tmp_path: Path) -> None:
    certificate, key = _make_certificate(tmp_path)
    (tmp_path / "empty").write_text("")
    empty, missing = str(tmp_path / "empty"), str(tmp_path / "missing")
    locked = str(tmp_path / "locked.pem")
    subprocess.run(
        ["openssl", "rsa", "-in", key, "-aes128", "-passout", "pass:abcd", "-out", locked],
        check=True, capture_output=True,
    )  # fmt: skip
    for pair in ((certificate, None), (None, key)):
        with pytest.raises(UsageError, match="certificate and a key"):
            make_tls_context(*pair)
    for pair in ((certificate, missing), (empty, key), (certificate, empty), (certificate, locked)):
        with pytest.raises(UsageError, match="TLS cannot be used"):
            make_tls_context(*pair)
    assert make_tls_context(None, None) is None


def test_token_variables_that_are_set_but_empty_are_refused() -> None:
    """`TOKENS="$(a missing command)"` must not open the gateway to all."""
    for name in ("ROLLWAY_GATEWAY_TOKENS", "ROLLWAY_GATEWAY_OPERATOR_TOKENS"):
        for value in ("", " , "):
            with pytest.raises(UsageError, match="contains no token"):
                Access.from_environment({name: value})


async def test_an_image_request_from_a_web_page_is_refused(tmp_path: Path) -> None:
    async with serve_gateway(tmp_path) as gateway:
        status, _ = await gateway.get("/v1/rollway/sessions", **{"sec-fetch-site": "cross-site"})
        assert status == 403
        status, _ = await gateway.get("/v1/rollway/sessions", **{"sec-fetch-site": "none"})
        assert status == 200


def test_a_host_header_with_more_than_a_host_is_not_loopback() -> None:
    for header in ("127.0.0.1#.evil", "127.0.0.1/.evil", "evil@127.0.0.1", "127.0.0.1.evil"):
        assert not is_loopback_host(header)
