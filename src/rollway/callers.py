"""Who may call a server of Rollway: the gateway, the dashboard, the page of metrics.

no token   loopback only, under a name of loopback: otherwise a web page could reach the server
           by a name of its own that leads to 127.0.0.1 (DNS rebinding)
tokens     any address; every request has one, as `Authorization: Bearer TOKEN`

The gateway has several tokens, which say what their callers may do (`gateway/tokens.py`).
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from email.message import Message
from functools import lru_cache
from urllib.parse import urlsplit

from rollway.errors import UsageError
from rollway.spec import is_loopback


def check_address(host: str, has_token: bool, fix: str) -> None:
    """Refuse to listen where strangers are, unless there is a token."""
    if not has_token and not is_loopback(host):
        raise UsageError(f"Listening on {host} without a token would let anybody in.", fix)


def read_token(variable: str) -> str:
    """Return the token of the environment, or an empty text. It is no argument of a command: all
    users can read those."""
    token = os.environ.get(variable, "").strip()
    if variable in os.environ and len(token) < 16:
        raise UsageError(f"{variable} has fewer than 16 characters.", "Unset or lengthen it.")
    return token


def admits(headers: Mapping[str, str] | Message, token: str) -> bool:
    """Return whether a request has the token; if there is none, whether it names loopback."""
    if token:
        return is_one_of(read_bearer(headers.get("Authorization", "")), token.encode())
    return is_loopback_host(headers.get("Host", ""))


def read_bearer(header: str) -> str:
    """Return the token of an Authorization header."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else header.strip()


def is_one_of(text: str, *tokens: bytes) -> bool:
    """Return whether a text is a token. All are compared, each in constant time, so that the time
    reveals nothing."""
    raw = text.encode(errors="surrogateescape")
    return sum(hmac.compare_digest(raw, token) for token in tokens if token) > 0


@lru_cache(maxsize=64)
def is_loopback_host(header: str) -> bool:
    """Return whether a Host header names loopback. A name that only begins with 127. does not."""
    if not {"/", "#", "?", "@"}.isdisjoint(header):
        return False
    try:
        return is_loopback(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return False
