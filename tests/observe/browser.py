"""A headless Chromium, driven over its debugging protocol; no browser is downloaded.

async with open_browser() as browser:
    page = await browser.open("http://127.0.0.1:8180/")
    await page.wait_for("document.body?.dataset.ready === 'yes'")
    assert page.problems == []
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here (Debian: apt-get install chromium)"
)
_START_SECONDS = 60.0
_POLL_SECONDS = 0.1
_FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-domain-reliability",
    "--disable-sync",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--metrics-recording-only",
    "--no-pings",
    "--hide-scrollbars",
)


class Page:
    """One tab. `problems` has every console error, exception, violation of the content policy and
    failed load; `requests` every address that the page asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.received_bytes = 0
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                self._answers.pop(data["id"]).set_result(data)
            else:
                self._note(data["method"], data["params"])

    def _note(self, method: str, fields: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = fields["exceptionDetails"]
            self.problems.append(str(details.get("exception", details).get("description", details)))
        elif method == "Runtime.consoleAPICalled" and fields["type"] in ("error", "warning"):
            self.problems.append(str([each.get("value") for each in fields["args"]]))
        elif method == "Log.entryAdded" and fields["entry"]["level"] in ("error", "warning"):
            entry = fields["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url', '')}")
        elif method == "Audits.issueAdded":
            issue = str(fields["issue"])
            # A test changes the address without the gesture of a person.
            if "NavigationEntryMarkedSkippable" not in issue:
                self.problems.append(issue)
        elif method == "Network.requestWillBeSent":
            self.requests.append(fields["request"]["url"])
        elif method == "Network.dataReceived":
            self.received_bytes += int(fields["encodedDataLength"] or fields["dataLength"])

    async def call(self, method: str, **fields: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": fields})
        data = await asyncio.wait_for(answer, 60.0)
        assert "error" not in data, f"{method}: {data['error']}"
        result: dict[str, Any] = data["result"]
        return result

    async def run(self, script: str) -> Any:
        """Return the value of an expression in the page; it may be a promise."""
        result = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait_for(self, script: str, seconds: float = 60.0) -> Any:
        """Return the first true value of an expression."""
        async with asyncio.timeout(seconds):
            while not (value := await self.run(script)):
                await asyncio.sleep(_POLL_SECONDS)
            return value

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def press(self, key: str, *, text: str = "", shift: bool = False) -> None:
        """Press and release a key, as a keyboard does."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37,
                 "ArrowRight": 39, " ": 32}  # fmt: skip
        code = codes.get(key, ord(key[0].upper()))
        text = text or ("\r" if key == "Enter" else key if len(key) == 1 else "")
        fields = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **fields)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def prefer(self, scheme: str) -> None:
        """Have the system prefer `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def take_picture(self, file: Path, *, whole: bool = False) -> None:
        """Write the page as PNG; the `whole` of it, also what is below the window."""
        picture = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole
        )
        file.write_bytes(base64.b64decode(picture["data"]))

    def list_foreign_requests(self) -> list[str]:
        """List requests that did not go to this machine."""
        local = ("127.0.0.1", "localhost", None, "")
        return [url for url in self.requests if urlsplit(url).hostname not in local]

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._socket.close()


class Browser:
    """A running Chromium."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session, self._port = session, port
        self._pages: list[Page] = []

    async def open(self, url: str, width: int = 1280, height: int = 900) -> Page:
        """Open a tab that notes its problems from the start."""
        address = f"http://127.0.0.1:{self._port}/json/new?about:blank"
        async with self._session.put(address) as answer:
            target = await answer.json()
        socket = await self._session.ws_connect(
            target["webSocketDebuggerUrl"], max_msg_size=0, heartbeat=None
        )
        page = Page(socket)
        self._pages.append(page)
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            await page.call(f"{domain}.enable")
        await page.resize(width, height)
        await page.go(url)
        return page

    async def close(self) -> None:
        for page in self._pages:
            await page.close()


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """Start Chromium with a profile of its own, and end it."""
    assert CHROMIUM is not None
    # As root, as in a container, Chromium has no sandbox; the pages are our own.
    flags = [*_FLAGS, *(["--no-sandbox"] if os.getuid() == 0 else [])]
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *flags,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            place = Path(profile) / "DevToolsActivePort"
            async with asyncio.timeout(_START_SECONDS):
                while not (place.exists() and "\n" in place.read_text()):
                    await asyncio.sleep(_POLL_SECONDS)
            port = int(place.read_text().splitlines()[0])
            async with aiohttp.ClientSession() as session:
                browser = Browser(session, port)
                try:
                    yield browser
                finally:
                    await browser.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
