"""Who may call the gateway, and which sessions they may see.

    no tokens         loopback only; a web page cannot get in: Host must be loopback, no Origin
    agent tokens      generate, and see the sessions that the same token recorded
    operator tokens   everything, the sessions of all tokens included

With tokens, a session is kept as `<digest of the token>/<name>`, so two agents that choose the same
name have two sessions. Without tokens, an API key names a session by its digest: keys are secrets
elsewhere, and neither the journal nor a listing shows them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from aiohttp import web

from rollway.config import is_loopback
from rollway.errors import UsageError
from rollway.gateway.replies import Refused

SESSION = "x-rollway-session"
AGENT_TOKENS = "ROLLWAY_GATEWAY_TOKENS"
OPERATOR_TOKENS = "ROLLWAY_GATEWAY_OPERATOR_TOKENS"
_NO_SESSION = ("", "EMPTY", "none", "null", "dummy")
"""API keys that clients send when they have none."""
_MAX_NAME = 256
_OPEN_PATH = "/health"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    scope: str = ""
    """Digest of the token; empty where none is needed."""
    operator: bool = True
    key: str = ""
    """What names the session where the header does not: the API key, or what follows the token."""


@dataclass(frozen=True, slots=True)
class Access:
    """The tokens that are accepted, as bytes; anybody on this machine without any."""

    agents: tuple[bytes, ...] = ()
    operators: tuple[bytes, ...] = ()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Access:
        """Read the tokens. They are not options, so that no list of processes shows them."""
        agents, operators = (
            tuple(
                token.encode(errors="surrogateescape")
                for token in environment.get(name, "").replace(",", " ").split()
            )
            for name in (AGENT_TOKENS, OPERATOR_TOKENS)
        )
        for name, tokens in ((AGENT_TOKENS, agents), (OPERATOR_TOKENS, operators)):
            if name in environment and not tokens:
                raise UsageError(
                    f"{name} is set and holds no token.", "Set one, or unset the variable."
                )
        if any(b"/" in token for token in agents + operators):
            raise UsageError(
                "A token of the gateway holds a slash, which separates tokens from sessions.",
                f"Choose other tokens in {AGENT_TOKENS} and {OPERATOR_TOKENS}.",
            )
        if set(agents) & set(operators):
            raise UsageError(
                "One token is both an agent's and an operator's.",
                f"Take it out of {AGENT_TOKENS} or of {OPERATOR_TOKENS}.",
            )
        return cls(agents, operators)

    @property
    def needs_token(self) -> bool:
        return bool(self.agents or self.operators)

    def admit(self, request: web.Request) -> Caller:
        """Find out who calls; `Refused` where they may not."""
        caller = self._authenticate(request) if self.needs_token else self._local(request)
        if request.method == "POST":
            _check_body_headers(request)
        return caller

    def _authenticate(self, request: web.Request) -> Caller:
        token, _, session = _bearer(request).partition("/")
        # Every token is compared, each in constant time: how long it takes tells nothing.
        raw = token.encode(errors="surrogateescape")
        operator = sum(hmac.compare_digest(raw, known) for known in self.operators) > 0
        agent = sum(hmac.compare_digest(raw, known) for known in self.agents) > 0
        if operator or agent:
            return Caller(scope_of(raw), operator, session)
        if request.path == _OPEN_PATH:
            return Caller(scope="nobody", operator=False)
        raise Refused(401, "The bearer token is missing or wrong.", kind="authentication_error")

    def _local(self, request: web.Request) -> Caller:
        """Refuse what a browser sends for a web page, which could reach any port of loopback."""
        # A page's picture or script has no Origin, but browsers say where it comes from.
        site = request.headers.get("sec-fetch-site", "none")
        if "origin" in request.headers or site not in ("none", "same-origin"):
            raise Refused(
                403,
                "Web pages cannot use this gateway: a browser sent the request for one.",
                f"Set {AGENT_TOKENS} and send a token.",
                kind="permission_error",
            )
        host = request.headers.get("host")
        if host is not None and not is_loopback_host(host):
            raise Refused(
                403,
                "The Host header does not name this machine's loopback.",
                f"Use http://127.0.0.1:PORT, or set {AGENT_TOKENS} to be reached by a name.",
                kind="permission_error",
            )
        return Caller(key=_bearer(request))

    # --- names of sessions ----------------------------------------------------------------------

    def session_name(self, caller: Caller, request: web.Request) -> str:
        """Return the name that a request is recorded under; empty for one that is not recorded."""
        given = request.headers.get(SESSION)
        if given:
            return _scope(caller, checked_name(given))
        if caller.key in _NO_SESSION:
            return ""
        if self.needs_token:
            return _scope(caller, checked_name(caller.key))
        if len(caller.key) > _MAX_NAME:
            raise UsageError(f"An API key has at most {_MAX_NAME} characters.")
        return key_name(caller.key)

    def find(self, caller: Caller, sessions: Container[str], given: str) -> str:
        """Return the full name of the session that the caller means by `given`."""
        for name in self.candidates(caller, given):
            if name in sessions:
                return name
        raise self.missing(caller, given)

    def candidates(self, caller: Caller, given: str) -> list[str]:
        """Return the full names that a caller may mean, the likeliest first."""
        checked_name(given)
        if not self.needs_token:
            return [given, key_name(given)]
        if caller.operator:
            return [given, _scope(caller, given)]
        return [_scope(caller, given)]

    def missing(self, caller: Caller, given: str) -> Refused:
        """Return the error for a session that is not there, or is another token's."""
        hint = ""
        if not caller.operator and not self.operators:
            hint = (
                f"A token sees its own sessions; set {OPERATOR_TOKENS} for one that sees all of "
                "them."
            )
        return Refused(404, f"There is no session `{given}`.", hint, kind="not_found")

    def visible(self, caller: Caller, names: Iterable[str]) -> dict[str, str]:
        """Return the sessions that a caller may see: shown name to full name."""
        if caller.operator:
            return {name: name for name in names}
        prefix = f"{caller.scope}/"
        return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}

    def shown(self, caller: Caller, name: str) -> str:
        """Return a full name as its own caller knows it."""
        return name if caller.operator else name.removeprefix(f"{caller.scope}/")


def checked_name(name: str) -> str:
    """Return a session's name that can be listed, logged and asked for again."""
    if len(name) > _MAX_NAME or not name.isprintable():  # surrogates are not printable either
        raise UsageError(
            f"A session's name has at most {_MAX_NAME} characters, and all are printable."
        )
    # Clients take these parts out of a path, and so would fetch or delete another session.
    if not {".", ".."}.isdisjoint(name.split("/")):
        raise UsageError(f"No part of a session's name can be `.` or `..`: `{name}`.")
    return name


def key_name(key: str) -> str:
    """Return the name of the session of an API key."""
    digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
    return f"key-{digest[:16]}"


def scope_of(token: bytes) -> str:
    """Return the prefix of all session names of a token; the same after a restart."""
    return hashlib.sha256(b"rollway gateway scope\0" + token).hexdigest()[:12]


@lru_cache(maxsize=64)
def is_loopback_host(header: str) -> bool:
    """Tell whether a Host header names loopback. A name that merely begins with 127. does not."""
    if not {"/", "#", "?", "@"}.isdisjoint(header):
        return False
    try:
        host = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    return is_loopback(host)


def _bearer(request: web.Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ").strip()


def _scope(caller: Caller, name: str) -> str:
    return f"{caller.scope}/{name}" if caller.scope else name


def _check_body_headers(request: web.Request) -> None:
    # A browser sends JSON to another site only after asking it; text/plain it sends at once.
    if request.content_type != "application/json":
        raise Refused(415, "The body must be JSON.", "Send content-type: application/json.")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise Refused(
            415, "Compressed bodies are not accepted.", "Send the body without content-encoding."
        )
