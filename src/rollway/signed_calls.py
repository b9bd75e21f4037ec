"""Signed orders: a worker changes its weights, its state or its label for its own stack only.

    fleet, supervisor                            worker's process (`engine/guard.py`)
      │ POST /engine/rollway_door {}               │
      │ ◄── {"process": "9f3c…"} ──────────────────│  a random name of this process
      │ POST /engine/pause_generation              │
      │   {"rollway_order": {process, sent,        │
      │     number, body, mac}} ──────────────────►│  verify: secret, route, process, time,
      │ ◄── the answer of the route ───────────────│  number not used before; then run the route

Dynamo's admin routes need no credentials: every user of the machine, and every web page open in a
browser on it, could call them. The secret belongs to one stack. The supervisor writes it into a
file that only its user can read.

The body is text inside the order, so that both sides compute the MAC over the same bytes.

This file uses the standard library only: the guard loads it by its path, also into a Python without
Rollway.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECRET = "ROLLWAY_WEIGHTS_SECRET"
"""The environment variable with the secret itself, for workers that Rollway did not start."""
SECRET_FILE = "ROLLWAY_SECRET_FILE"
"""The environment variable with the path of the secret's file, which the supervisor sets."""
REFITTED_FILE = "ROLLWAY_REFITTED_FILE"
"""The environment variable with the path of a file that exists once a worker of this supervisor
and model has entered service with other weights than it started with."""
ORDER, DOOR = "rollway_order", "rollway_door"
REFIT, CANCEL = "rollway_refit", "rollway_cancel"
STAGE, DISCARD = "rollway_stage", "rollway_discard"
"""Routes that the guard adds; see rollway/engine/refit_orders.py."""
SLEEP, WAKE, MEMORY = "rollway_sleep", "rollway_wake", "rollway_memory"
"""The same; see rollway/engine/sleep_orders.py."""
READ_ONLY = frozenset({"liveness_probe", "get_weight_version", DOOR})
"""Routes that change nothing and need no signature."""
UNSIGNED = "this worker takes signed orders only"
OTHER_PROCESS = "the order is for another process"
# `UNSIGNED` and `OTHER_PROCESS` are on the wire: the fleet recognises a refusal by them.
FRESH_SECONDS = 120.0
"""How much two clocks may differ, and for how long a number is remembered."""

_kept_secret: str | None = None


class OrderRefused(PermissionError):
    """An order that is not signed, not for this process, too old, or sent before."""


def read_stack_secret() -> str:
    """Return the stack's secret from the file or the variable; an empty one if there is neither."""
    if _kept_secret is not None:
        return _kept_secret
    path = os.environ.get(SECRET_FILE)
    try:
        return Path(path).read_text().strip() if path else os.environ.get(SECRET, "")
    except OSError:
        return ""


def keep_secret() -> str:
    """Read the secret for the rest of the process, and remove it from the environment, so that
    nothing that later changes or prints the environment replaces or shows it."""
    global _kept_secret
    _kept_secret = read_stack_secret()
    for name in (SECRET, SECRET_FILE):
        os.environ.pop(name, None)
    return _kept_secret


class UsedNumbers:
    """Accepts each number once, and remembers it for as long as its order counts as fresh."""

    def __init__(self, fresh_seconds: float = FRESH_SECONDS) -> None:
        self._fresh_seconds = fresh_seconds
        self._numbers: dict[str, float] = {}
        """Each number with the time at which it may be forgotten, in the order of arrival."""

    def __len__(self) -> int:
        return len(self._numbers)

    def use(self, number: str, sent: str) -> None:
        """Raise `OrderRefused` for a number that was used before or that is too old."""
        now = time.time()
        try:
            fresh = abs(now - float(sent)) <= self._fresh_seconds
        except ValueError:
            fresh = False
        if not fresh:
            raise OrderRefused(
                f"too old: sent more than {self._fresh_seconds:g} s ago, or the clocks of the two "
                "machines differ by that much"
            )
        while self._numbers and next(iter(self._numbers.values())) < now:
            del self._numbers[next(iter(self._numbers))]
        if number in self._numbers:
            raise OrderRefused("sent before")
        self._numbers[number] = now + 2 * self._fresh_seconds


def sign(secret: str, purpose: str, process: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an order to run `purpose`, a route or an engine method, with these arguments."""
    fields = {
        "process": process,
        "sent": f"{time.time():.3f}",
        "number": secrets.token_hex(16),
        "body": json.dumps(body),
    }
    return {**fields, "mac": _mac(secret, purpose, fields)}


class Verifier:
    """Checks orders against one secret, for one process."""

    def __init__(
        self, secret: str, process: str = "", *, fresh_seconds: float = FRESH_SECONDS
    ) -> None:
        self.process = process
        self._secret = secret
        self._used = UsedNumbers(fresh_seconds)

    def open(self, purpose: str, order: Any) -> dict[str, Any]:
        """Return the arguments of an order, or raise `OrderRefused`."""
        if not self._secret:
            raise OrderRefused(
                f"{UNSIGNED}, and it was started without a secret to check them with ({SECRET})"
            )
        names = ("process", "sent", "number", "body", "mac")
        if not isinstance(order, Mapping) or not all(isinstance(order.get(n), str) for n in names):
            raise OrderRefused(UNSIGNED)
        fields = {name: order[name] for name in names[:-1]}
        expected = _mac(self._secret, purpose, fields)
        if not is_same(order["mac"], expected):
            raise OrderRefused(f"{UNSIGNED}, and this one has another secret's signature")
        # After the MAC: only a sender that knows the secret may learn which process this is.
        if fields["process"] != self.process:
            raise OrderRefused(OTHER_PROCESS)
        self._used.use(fields["number"], fields["sent"])
        body = json.loads(fields["body"])
        if not isinstance(body, dict):
            raise OrderRefused("the body of the order is not a JSON object")
        return body


def _mac(secret: str, purpose: str, fields: Mapping[str, str]) -> str:
    parts = [purpose, *(fields[name] for name in sorted(fields))]
    # JSON keeps the parts apart: two different lists never give the same bytes.
    return make_mac(secret, json.dumps(parts).encode())


def make_mac(secret: str, body: bytes) -> str:
    """Return the signature of all that Rollway signs: orders, and offers of weights."""
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def is_same(left: str, right: str) -> bool:
    """Compare two signatures in a time that does not tell how much of them is equal."""
    return hmac.compare_digest(left.encode(errors="replace"), right.encode(errors="replace"))
