"""What an integration adds to the gateway, and what it may read of a request."""

from __future__ import annotations

from typing import Any, Protocol

from aiohttp import web

from rollway.gateway.access import Caller

# aiohttp before 3.14 knows only plain names; later versions warn about them.
CALLER: Any = web.RequestKey("caller", Caller) if hasattr(web, "RequestKey") else "caller"
BODY: Any = web.RequestKey("body", bytearray) if hasattr(web, "RequestKey") else "body"


class Extension(Protocol):
    """Routes beside the gateway's own; they win where both have one."""

    def add_routes(self, router: web.UrlDispatcher) -> None: ...

    async def admit(self, request: web.Request) -> None:
        """Return when a request may be handled. Called once its body has arrived; raise to refuse
        it."""
        ...

    def find_model(self, name: Any) -> str:
        """Return the served model that a request means by `model`."""
        ...
