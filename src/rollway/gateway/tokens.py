"""Decide who may call the gateway, and which sessions they see.

    no tokens         loopback only, and no web pages: Host must be loopback, no Origin
    agent tokens      generate, and see the sessions that the same token recorded
    operator tokens   everything, including the sessions of all tokens
    a path token      an agent token that is the first part of the path, for clients whose API key
                      is fixed

With tokens, a session is stored as `<digest of the token>/<name>`, so two agents that choose the
same name have two sessions. Without tokens, the digest of an API key names the session: keys may be
secrets, so neither the store nor a listing contains them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aiohttp import web

from rollway.callers import is_loopback_host, is_one_of, read_bearer
from rollway.errors import UsageError
from rollway.gateway.replies import SESSION, Refused

AGENT_TOKENS = "ROLLWAY_GATEWAY_TOKENS"
OPERATOR_TOKENS = "ROLLWAY_GATEWAY_OPERATOR_TOKENS"
_NO_SESSION = ("", "EMPTY", "none", "null", "dummy", "dummy_key")
"""Placeholders that clients send when they have no API key."""
_MAX_NAME = 256
_OPEN_PATH = "/health"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    scope: str = ""
    """The digest of the token; empty if no token is needed."""
    operator: bool = True
    key: str = ""
    """The session's name if the header has none: the API key, or what follows the token."""


@dataclass(frozen=True, slots=True)
class Access:
    """The accepted tokens, as bytes. Without any, everybody on this machine is accepted."""

    agents: tuple[bytes, ...] = ()
    operators: tuple[bytes, ...] = ()
    in_path: bool = False
    """Whether the token is the first part of the path (`/TOKEN/v1/…`), not the API key, which then
    names the session as it does without tokens."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Access:
        """Read the tokens. They are not command-line options, which all users could read."""
        tokens: list[tuple[bytes, ...]] = []
        for name in (AGENT_TOKENS, OPERATOR_TOKENS):
            texts = environment.get(name, "").replace(",", " ").split()
            if name in environment and not texts:
                raise UsageError(
                    f"{name} is set but contains no token.", "Set a token, or unset the variable."
                )
            if any("/" in text for text in texts):
                raise UsageError(
                    f"A token in {name} contains a slash, which separates tokens from sessions.",
                    "Choose another token.",
                )
            tokens.append(tuple(text.encode(errors="surrogateescape") for text in texts))
        if set(tokens[0]) & set(tokens[1]):
            raise UsageError(
                "A token is both an agent's and an operator's.",
                f"Remove it from {AGENT_TOKENS} or from {OPERATOR_TOKENS}.",
            )
        return cls(tokens[0], tokens[1])

    @property
    def needs_token(self) -> bool:
        return bool(self.agents or self.operators)

    @property
    def prefix(self) -> str:
        """What all routes begin with, as a pattern of aiohttp."""
        return "/{token}" if self.in_path else ""

    def admit(self, request: web.Request) -> Caller:
        """Return the caller; raise `Refused` if it has no access."""
        caller = self._authenticate(request) if self.needs_token else self._local(request)
        if request.method == "POST":
            _check_body_headers(request)
        return caller

    def _authenticate(self, request: web.Request) -> Caller:
        token, _, session = _bearer(request).partition("/")
        if self.in_path:
            token, session = request.match_info.get("token", ""), _bearer(request)
        is_operator, is_agent = is_one_of(token, *self.operators), is_one_of(token, *self.agents)
        if is_operator or is_agent:
            raw = token.encode(errors="surrogateescape")
            return Caller(scope_of(raw), is_operator, session)
        if request.path == _OPEN_PATH:
            return Caller(scope="nobody", operator=False)
        raise Refused(401, "The bearer token is missing or wrong.", kind="authentication_error")

    def _local(self, request: web.Request) -> Caller:
        """Refuse requests that a browser sends for a web page, which could reach any loopback
        port."""
        # Requests for images and scripts have no Origin, but browsers send sec-fetch-site.
        site = request.headers.get("sec-fetch-site", "none")
        if "origin" in request.headers or site not in ("none", "same-origin"):
            raise Refused(
                403,
                "Web pages cannot use this gateway, and a browser sent this request for one.",
                f"Set {AGENT_TOKENS} and send a token.",
                kind="permission_error",
            )
        host = request.headers.get("host")
        if host is not None and not is_loopback_host(host):
            raise Refused(
                403,
                "The Host header does not name this machine's loopback.",
                f"Use http://127.0.0.1:PORT, or set {AGENT_TOKENS} to allow other names.",
                kind="permission_error",
            )
        return Caller(key=_bearer(request))

    # --- names of sessions ----------------------------------------------------------------------

    def session_name(self, caller: Caller, request: web.Request) -> str:
        """Return the session of a request; "" if it is not recorded."""
        header = request.headers.get(SESSION)
        if header:
            return _scope(caller, check_name(header))
        if caller.key in _NO_SESSION:
            return ""
        if self.needs_token:
            return _scope(caller, check_name(caller.key))
        if len(caller.key) > _MAX_NAME:
            raise UsageError(f"An API key has at most {_MAX_NAME} characters.")
        return key_name(caller.key)

    def candidates(self, caller: Caller, name: str) -> list[str]:
        """Return the full names that a caller may mean by a name, the likeliest first."""
        check_name(name)
        if not self.needs_token:
            return [name, key_name(name)]
        if caller.operator:
            return [name, _scope(caller, name)]
        return [_scope(caller, name)]

    def missing(self, caller: Caller, name: str) -> Refused:
        """Return the error for a session that does not exist or belongs to another token."""
        hint = ""
        if not caller.operator and not self.operators:
            hint = (
                f"A token sees only its own sessions; set {OPERATOR_TOKENS} for a token that sees "
                "all."
            )
        return Refused(404, f"There is no session `{name}`.", hint, kind="not_found")

    def visible(self, caller: Caller, names: Iterable[str]) -> dict[str, str]:
        """Return the sessions that a caller may see: the name it knows to the full name."""
        if caller.operator:
            return {name: name for name in names}
        prefix = f"{caller.scope}/"
        return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}

    def show(self, caller: Caller, name: str) -> str:
        """Return the name under which the caller knows a session."""
        return name if caller.operator else name.removeprefix(f"{caller.scope}/")


def check_name(name: str) -> str:
    """Return the name; raise if it cannot be listed, logged and requested again."""
    if len(name) > _MAX_NAME or not name.isprintable():  # surrogates are not printable
        raise UsageError(
            f"A session's name may have {_MAX_NAME} characters, all of them printable."
        )
    # Clients remove these parts from a path, and would fetch or delete another session.
    if not {".", ".."}.isdisjoint(name.split("/")):
        raise UsageError(f"No part of a session's name can be `.` or `..`: `{name}`.")
    return name


def key_name(key: str) -> str:
    """Return the name of the session of an API key."""
    digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
    return f"key-{digest[:16]}"


def scope_of(token: bytes) -> str:
    """Return the prefix of all session names of a token; a restart does not change it."""
    return hashlib.sha256(b"rollway gateway scope\0" + token).hexdigest()[:12]


def has_scope(name: str) -> bool:
    """Return whether a session was recorded for a token, to judge by its full name."""
    return re.match("[0-9a-f]{12}/", name) is not None


def _bearer(request: web.Request) -> str:
    return read_bearer(request.headers.get("authorization", ""))


def _scope(caller: Caller, name: str) -> str:
    return f"{caller.scope}/{name}" if caller.scope else name


def _check_body_headers(request: web.Request) -> None:
    if not request.can_read_body:
        return  # nothing to misread; pages of other sites are refused by their Origin
    # A browser asks a site before it sends JSON from another one; text/plain it sends at once.
    if request.content_type != "application/json":
        raise Refused(415, "The body must be JSON.", "Send content-type: application/json.")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise Refused(
            415, "Compressed bodies are not accepted.", "Send the body without content-encoding."
        )
