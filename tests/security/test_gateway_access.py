"""Who gets in, and whose sessions they see."""

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

from rollway.cli.gateway import gateway as run_gateway
from rollway.errors import UsageError
from rollway.gateway.access import Access, is_loopback_host, key_name, scope_of
from rollway.gateway.command import listen, tls_context
from tests.security.gateway_service import CHAT_BODY, Service, error_of, service

TOKENS = Access((b"agent-a", b"agent-b"), (b"boss",))


def bearer(token: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}", **more}


async def raw(gateway: Service, head: bytes) -> tuple[int, Any]:
    """Send a request byte by byte as it is; return status and decoded body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(head)
    answer = await reader.read()
    writer.close()
    top, _, body = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(body)


def _posted(*headers: bytes) -> bytes:
    body = json.dumps(CHAT_BODY).encode()
    lines = [
        b"POST /v1/chat/completions HTTP/1.1", b"Host: 127.0.0.1", b"Connection: close",
        b"Content-Type: application/json", b"Content-Length: %d" % len(body), *headers,
    ]  # fmt: skip
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def test_a_web_page_reaches_nothing(tmp_path: Path) -> None:
    """By DNS rebinding, or with a simple request to loopback."""
    async with service(tmp_path) as gateway:
        paths = ("/health", "/v1/models", "/v1/rollway/sessions", "/v1/rollway/trajectories/s")
        for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.5:8100", "[::2]", "["):
            for path in paths:
                status, answer = await gateway.get(path, host=host)
                assert status == 403, (host, path)
                assert "Host" in error_of(answer)["message"]
        for host in ("127.0.0.1:1", "localhost", "LocalHost:8100", "[::1]:5", "127.8.8.8"):
            assert (await gateway.get("/v1/models", host=host))[0] == 200, host
        for origin in ("http://evil.example", "null", "http://127.0.0.1"):
            for path in paths:
                status, answer = await gateway.get(path, origin=origin)
                assert status == 403 and "Web pages" in error_of(answer)["message"]
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            status, answer = await gateway.chat({"content-type": kind})
            assert status == 415
            error_of(answer)
        assert gateway.frontend.bodies == []
        kind = "application/json; charset=utf-8"
        assert (await gateway.chat({"content-type": kind}))[0] == 200


async def test_with_tokens_bodies_are_json_too(tmp_path: Path) -> None:
    async with service(tmp_path, access=TOKENS) as gateway:
        status, _ = await gateway.chat(bearer("agent-a", **{"content-type": "text/plain"}))
        assert status == 415
        assert (await gateway.get("/v1/models", **bearer("agent-a", host="a.example")))[0] == 200


async def test_a_guess_gets_in_nowhere(tmp_path: Path) -> None:
    async with service(tmp_path, access=TOKENS) as gateway:
        for headers in ({}, bearer("agent-c"), bearer(""), bearer("/agent-a"), bearer("agent-a x")):
            for path in ("/v1/models", "/v1/rollway/sessions", "/nothing"):
                status, answer = await gateway.get(path, **headers)
                assert status == 401 and error_of(answer)["type"] == "authentication_error"
            assert (await gateway.chat(headers))[0] == 401
        assert (await gateway.get("/health"))[1] == {"status": "ok", "model": "m"}


async def test_a_byte_above_0x7f_in_a_token_is_a_wrong_token(tmp_path: Path) -> None:
    """It was a 500 before authentication."""
    async with service(tmp_path, access=TOKENS) as gateway:
        for token in (b"agent-a\xff", b"\x80", b"\xc3\xa9"):
            status, answer = await raw(gateway, _posted(b"Authorization: Bearer " + token))
            assert status == 401, token
            error_of(answer)


async def test_names_that_cannot_be_shown_are_refused(tmp_path: Path) -> None:
    """One byte above 0x7f broke the listing until a restart."""
    async with service(tmp_path) as gateway:
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
            status, answer = await raw(gateway, _posted(b"x-rollway-session: " + name))
            assert status == 400, name
            error_of(answer)
        assert (await raw(gateway, _posted(b"Authorization: Bearer " + b"k" * 257)))[0] == 400
        assert (await raw(gateway, _posted(b"Authorization: Bearer \xff")))[0] == 200
        good = "épisode 17/b"
        assert (await raw(gateway, _posted(b"x-rollway-session: " + good.encode())))[0] == 200
        status, answer = await gateway.get("/v1/rollway/sessions")
        assert status == 200 and answer["sessions"][good] == 1
        for shown in answer["sessions"]:
            status, _ = await gateway.get(f"/v1/rollway/trajectories/{shown}")
            assert status == 200, shown
        assert (await gateway.get("/v1/rollway/trajectories/a%FFb"))[0] in (400, 404)
        assert (await gateway.get(f"/v1/rollway/trajectories/{'n' * 300}"))[0] == 400


async def test_an_agent_reads_and_continues_its_own_sessions_only(tmp_path: Path) -> None:
    async with service(tmp_path, access=TOKENS) as gateway:
        for token in ("agent-a", "agent-b"):
            status, answer = await gateway.chat(bearer(token, **{"x-rollway-session": "one"}))
            assert status == 200 and answer["session"] == "one"
        said = [CHAT_BODY["messages"][0], {"role": "assistant", "content": "ok"}]
        more = [*said, {"role": "user", "content": "more"}]
        assert (await gateway.chat(bearer("agent-a/one"), messages=more))[0] == 200
        path = "/v1/rollway/trajectories/one"
        for token, turns in (("agent-a", 2), ("agent-b", 1)):
            status, answer = await gateway.get(path, **bearer(token))
            assert status == 200 and answer["turns"] == turns and answer["session"] == "one"
            _, listing = await gateway.get("/v1/rollway/sessions", **bearer(token))
            assert listing["sessions"] == {"one": turns}
        other = f"{scope_of(b'agent-a')}/one"
        for attempt in (other, f"..%2F{other}", f"/{other}"):
            url = f"/v1/rollway/trajectories/{attempt}"
            assert (await gateway.get(url, **bearer("agent-b")))[0] in (400, 404)
            headers = bearer("agent-b")
            assert (await gateway.call("DELETE", url, headers=headers))[0] in (400, 404)
        # A name that looks like another's full name is a name of one's own.
        headers = bearer("agent-b", **{"x-rollway-session": other})
        assert (await gateway.chat(headers, messages=more))[0] == 200
        assert (await gateway.get(path, **bearer("agent-a")))[1]["turns"] == 2
        assert (await gateway.call("DELETE", path, headers=bearer("agent-b")))[0] == 200
        assert (await gateway.get(path, **bearer("agent-a")))[0] == 200


async def test_an_operator_sees_the_sessions_of_all(tmp_path: Path) -> None:
    async with service(tmp_path, access=TOKENS) as gateway:
        for token in ("agent-a", "agent-b", "boss"):
            assert (await gateway.chat(bearer(f"{token}/one")))[0] == 200
        _, listing = await gateway.get("/v1/rollway/sessions", **bearer("boss"))
        names = [f"{scope_of(token)}/one" for token in (b"agent-a", b"agent-b", b"boss")]
        assert listing["sessions"] == dict.fromkeys(names, 1)
        for name in (*names, "one"):
            path = f"/v1/rollway/trajectories/{name}"
            assert (await gateway.get(path, **bearer("boss")))[0] == 200
        headers = bearer("boss")
        path = f"/v1/rollway/trajectories/{names[0]}"
        assert (await gateway.call("DELETE", path, headers=headers))[0] == 200
        assert (await gateway.get("/v1/rollway/trajectories/one", **bearer("agent-a")))[0] == 404
        assert "agent-a" not in json.dumps(listing)


async def test_without_an_operator_the_error_says_how_to_have_one(tmp_path: Path) -> None:
    async with service(tmp_path, access=Access((b"agent-a",))) as gateway:
        path = "/v1/rollway/trajectories/0123/one"
        status, answer = await gateway.get(path, **bearer("agent-a"))
        assert status == 404
        assert "ROLLWAY_GATEWAY_OPERATOR_TOKENS" in error_of(answer)["message"]


async def test_keys_of_clients_are_kept_nowhere(tmp_path: Path) -> None:
    async with service(tmp_path) as gateway:
        status, answer = await gateway.chat(bearer("sk-very-secret"))
        name = key_name("sk-very-secret")
        assert status == 200 and answer["session"] == name
        _, listing = await gateway.get("/v1/rollway/sessions")
        assert listing["sessions"] == {name: 1}
        for known in ("sk-very-secret", name):
            status, answer = await gateway.get(f"/v1/rollway/trajectories/{known}")
            assert status == 200 and answer["session"] == name
        assert "sk-very-secret" not in (tmp_path / "journal.jsonl").read_text()
        # A name in the header comes first.
        assert (await gateway.chat({"x-rollway-session": "sk-very-secret"}))[0] == 200
        _, answer = await gateway.get("/v1/rollway/trajectories/sk-very-secret")
        assert answer["session"] == "sk-very-secret"
        assert (await gateway.chat(bearer("EMPTY")))[1]["session"] == ""
        status, _ = await gateway.call("DELETE", "/v1/rollway/trajectories/sk-very-secret")
        _, listing = await gateway.get("/v1/rollway/sessions")
        assert listing["sessions"] == {name: 1}


def test_tokens_that_cannot_work_are_refused() -> None:
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


def _certificate(directory: Path) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here to make a certificate")
    certificate, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out",
         str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(certificate), str(key)


async def test_tls_by_certificate_and_key(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    async with service(tmp_path) as gateway:
        listener = await listen(gateway.gateway, "127.0.0.1", 0, tls_context(certificate, key))
        trust = ssl.create_default_context(cafile=certificate)
        url = f"https://127.0.0.1:{listener.port}/v1/models"
        async with aiohttp.ClientSession() as http, http.get(url, ssl=trust) as answer:
            assert answer.status == 200
        await listener.close()


def test_files_that_are_no_certificate_are_named(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    (tmp_path / "empty").write_text("")
    empty, missing = str(tmp_path / "empty"), str(tmp_path / "missing")
    locked = str(tmp_path / "locked.pem")
    subprocess.run(
        ["openssl", "rsa", "-in", key, "-aes128", "-passout", "pass:abcd", "-out", locked],
        check=True, capture_output=True,
    )  # fmt: skip
    for pair in ((certificate, None), (None, key)):
        with pytest.raises(UsageError, match="certificate and a key"):
            tls_context(*pair)
    for pair in ((certificate, missing), (empty, key), (certificate, empty), (certificate, locked)):
        with pytest.raises(UsageError, match="TLS cannot be used"):
            tls_context(*pair)
    assert tls_context(None, None) is None


def test_tokens_that_are_set_and_empty_are_an_error() -> None:
    """`TOKENS="$(a command that is not there)"` must not open the gateway."""
    for name in ("ROLLWAY_GATEWAY_TOKENS", "ROLLWAY_GATEWAY_OPERATOR_TOKENS"):
        for value in ("", " , "):
            with pytest.raises(UsageError, match="contains no token"):
                Access.from_environment({name: value})


async def test_a_web_pages_picture_is_refused(tmp_path: Path) -> None:
    async with service(tmp_path) as gateway:
        status, _ = await gateway.get("/v1/rollway/sessions", **{"sec-fetch-site": "cross-site"})
        assert status == 403
        status, _ = await gateway.get("/v1/rollway/sessions", **{"sec-fetch-site": "none"})
        assert status == 200


def test_a_host_header_with_more_than_a_host_is_not_loopback() -> None:
    for header in ("127.0.0.1#.evil", "127.0.0.1/.evil", "evil@127.0.0.1", "127.0.0.1.evil"):
        assert not is_loopback_host(header)
