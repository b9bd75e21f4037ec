"""Connections that send nothing or little do not block other clients."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from aiohttp import web

from rollway.gateway.connections import ServerConnections, raise_connection_limit
from tests.security.gateway_service import Service, serve_gateway
from tests.soak import SOAK
from tests.waiting import wait_until_async

_HEAD = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _connect(gateway: Service, data: bytes = b"") -> Streams:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    if data:
        writer.write(data)
    return reader, writer


async def _wait_for_close(streams: Streams) -> bool:
    """Wait until the gateway closes the connection."""
    reader, writer = streams
    try:
        while await reader.read(2**16):
            pass
    except ConnectionError:
        pass
    writer.close()
    return True


async def test_requests_that_never_end_are_disconnected(tmp_path: Path) -> None:
    connections = ServerConnections(100, header_seconds=0.5, body_seconds=0.5, idle_seconds=60)
    async with serve_gateway(tmp_path, connections=connections) as gateway:
        silent = await _connect(gateway)
        slow = await _connect(gateway, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ")

        async def drip() -> None:
            while not slow[1].is_closing():
                slow[1].write(b"a")
                await asyncio.sleep(0.1)  # a client that sends a byte now and then

        dripping = asyncio.create_task(drip())
        body = await _connect(gateway, _HEAD + b"Content-Length: 500\r\n\r\n{")
        async with asyncio.timeout(60):
            assert all(
                await asyncio.gather(
                    *(_wait_for_close(streams) for streams in (silent, slow, body))
                )
            )
        dripping.cancel()
        assert (await gateway.get("/health"))[0] == 200


async def test_idle_connections_are_closed_and_busy_ones_are_not(tmp_path: Path) -> None:
    connections = ServerConnections(100, header_seconds=0.5, body_seconds=0.5, idle_seconds=0.5)
    async with serve_gateway(tmp_path, connections=connections) as gateway:
        gateway.frontend.may_answer.clear()
        busy = asyncio.create_task(gateway.chat())
        await wait_until_async(lambda: gateway.frontend.bodies)
        idle = await _connect(gateway, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        async with asyncio.timeout(60):
            await _wait_for_close(idle)  # by now the busy one has waited longer than the idle limit
        gateway.frontend.may_answer.set()
        assert (await busy)[0] == 200


async def test_idle_connections_do_not_block_clients(tmp_path: Path) -> None:
    """There are more connections than the limit, and no client waits for a timeout."""
    async with serve_gateway(tmp_path, connections=ServerConnections(40)) as gateway:
        gateway.frontend.may_answer.clear()
        busy = asyncio.create_task(gateway.chat())
        await wait_until_async(lambda: gateway.frontend.bodies)
        half = _HEAD + b"Content-Length: 500\r\n\r\n{"
        held = [await _connect(gateway, half if number % 2 else b"") for number in range(400)]
        assert (await gateway.get("/health"))[0] == 200
        await wait_until_async(lambda: _count_held(gateway.port) <= 60)
        gateway.frontend.may_answer.set()
        assert (await busy)[0] == 200, "a request that is being answered is not disconnected"
        for _, writer in held:
            writer.close()


async def test_connections_that_are_gone_push_nobody_out(tmp_path: Path) -> None:
    """Clients that connect and leave are not open, so an upload meanwhile goes on."""
    async with serve_gateway(tmp_path, connections=ServerConnections(16)) as gateway:
        upload = await _connect(gateway, _HEAD + b"Content-Length: 16\r\n\r\n{")
        for _ in range(64):
            _, writer = await _connect(gateway)
            writer.close()
            await writer.wait_closed()
            assert (await gateway.get("/health"))[0] == 200
        upload[1].write(b'"prompt": "hi"}')
        async with asyncio.timeout(30):
            assert b" 200 " in await upload[0].readline()
        upload[1].close()


async def test_idle_connections_beyond_the_file_limit_do_not_block_clients(tmp_path: Path) -> None:
    """The gateway may open 256 files, and has more idle connections than that and one client."""
    script = textwrap.dedent(
        """
        import asyncio, resource, sys
        from pathlib import Path
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))
        from rollway.gateway.connections import raise_connection_limit
        from tests.security.gateway_service import serve_gateway

        async def main():
            print(raise_connection_limit(), file=sys.stderr)
            async with serve_gateway(Path(sys.argv[1])) as gateway:
                print(gateway.port, flush=True)
                await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

        asyncio.run(main())
        """
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(tmp_path),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=dict(os.environ), cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdout and process.stderr and process.stdin
    port = int(await process.stdout.readline())
    held: list[Streams] = []
    try:
        # Whenever its queue of new connections is full, the kernel retries after a second.
        for number in range(1_000 if SOAK else 300):
            held.append(await asyncio.open_connection("127.0.0.1", port))
            if number % 150 == 149:
                assert await _get_status(port) == b"200"
    finally:
        for _, writer in held:
            writer.close()
        process.stdin.close()
        stderr = (await process.stderr.read()).decode()
        await process.wait()
    assert "may open 256 files" in stderr and "ulimit" in stderr
    assert process.returncode == 0, stderr


async def _get_status(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    return answer.split(b" ")[1] if answer else b""


def test_the_soft_file_limit_is_raised_to_the_hard_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        raise_connection_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_client_that_does_not_read_its_answer_is_disconnected(tmp_path: Path) -> None:
    """A plain close waits until the client has read all, so socket and answer stayed for ever."""
    connections = ServerConnections(100, header_seconds=0.5, body_seconds=60, idle_seconds=0.5)
    async with serve_gateway(tmp_path, connections=connections, context=4_000_000) as gateway:
        body = b'{"tokens": [' + b"5," * 3_000_000 + b"5]}"
        head = _HEAD.replace(b"/tokenize", b"/detokenize")
        request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", gateway.port))
        await loop.sock_sendall(client, request)
        own = f"{client.getsockname()[1]:04X}"
        await wait_until_async(lambda: _count_held(gateway.port, own) == 0)
        client.close()


def _count_held(port: int, peer: str = "") -> int:
    """Count the connections whose end the gateway still holds; `peer` is the other end's port."""
    count = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *_, inode = line.split()[:10]
        if local.endswith(f":{port:04X}") and not remote.endswith(":0000"):
            # Without an inode, only the kernel still has it.
            count += remote.endswith(f":{peer}" if peer else "") and inode != "0"
    return count


async def test_malformed_http_leaves_no_key_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_gateway(tmp_path) as gateway:
        for _ in range(20):
            streams = await _connect(
                gateway, b"GET / HTTP/1.1\r\nAuthorization: Bearer sk-KEY\x01\r\n\r\n"
            )
            async with asyncio.timeout(60):
                await _wait_for_close(streams)
        assert (await gateway.get("/health"))[0] == 200
    assert "sk-KEY" not in caplog.text and len(caplog.text) < 1000


async def test_connections_without_a_handshake_are_counted_and_closed(tmp_path: Path) -> None:
    connections = ServerConnections(10, header_seconds=0.5)
    app = web.Application(middlewares=[connections.follow])
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    listener = await connections.listen(app, "127.0.0.1", 0, tls)
    held = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(30)]
    await wait_until_async(lambda: 0 < len(connections._waiting) <= 10)
    await wait_until_async(lambda: not connections._waiting)
    for _, writer in held:
        writer.close()
    await listener.close()
