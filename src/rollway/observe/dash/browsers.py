"""Decide who may see the page, and what a browser may do with it.

    no token     loopback only: the Host must be loopback, so that no web page that a user visits
                 can reach the dashboard under a name of its own (DNS rebinding)
    a token      in the address that `rollway dash` prints, once; then in a cookie of this port, or
                 as `Authorization: Bearer`

Only GET and HEAD are answered: there is nothing to change.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from rollway.callers import admits, is_one_of

TOKEN = "ROLLWAY_DASH_TOKEN"
TOKEN_FIX = f"Add --token, which prints an address with a random one, or set {TOKEN}."
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no markup from text, whoever wrote the text
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class DashAccess:
    """The token, or an empty one for loopback alone."""

    token: str = ""

    def admits(self, request: web.Request) -> bool:
        cookie = request.cookies.get(get_cookie_name(request), "")
        return self._matches(cookie) or admits(request.headers, self.token)

    def trade(self, request: web.Request) -> web.StreamResponse | None:
        """Return the answer to an address with the token: a cookie, and the address without it, so
        that it does not stay in the history of the browser.

        It is a page that leads on: after a redirect, a browser that comes from a file would not
        send a strict cookie."""
        if not self.token or not self._matches(request.query.get("token", "")):
            return None
        response = web.Response(headers={"Refresh": "0; url=/"})
        response.set_cookie(
            get_cookie_name(request), self.token, httponly=True, samesite="Strict", path="/"
        )
        return response

    def _matches(self, text: str) -> bool:
        return is_one_of(text, self.token.encode())


def get_cookie_name(request: web.Request) -> str:
    """Return a name for this port: browsers send cookies to all ports of a host."""
    name = request.transport.get_extra_info("sockname") if request.transport else None
    return f"rollway_dash_{name[1]}" if isinstance(name, tuple) else "rollway_dash"


def make_app(access: DashAccess) -> web.Application:
    """Return an application without routes, which answers only requests that are admitted."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await _admit(access, request, handler)

    app = web.Application(middlewares=[guard])
    app.on_response_prepare.append(add_headers)
    return app


async def _admit(access: DashAccess, request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.method not in ("GET", "HEAD"):
        return refuse(405, "The dashboard only reads.")
    if request.path == "/" and (response := access.trade(request)) is not None:
        return response
    if not access.admits(request):
        if access.token:
            return refuse(401, "Open the address with the token that `rollway dash` printed.")
        return refuse(403, "Without a token, the dashboard answers to loopback names only.")
    try:
        return await handler(request)
    except web.HTTPException as error:
        return refuse(error.status, error.reason)


def refuse(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n")


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of every answer, also of refusals and streams."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    del response.headers["Server"]
