"""The gateway of a run, for NeMo-Gym.

    driver ── GymServer ── stdin: the job, then the lifeline ──► child: a Rollway gateway
                       ◄── stdout: its port, or the error ─────     │
    Gym's actors ── POST URL/chat/completions, /tokenize ──────────►│── ids ──► Dynamo frontend

Answers carry the ids and log-probs of their tokens, and every prompt begins with the ids of the
turns before it. The child is a process of its own, so that neither the driver's threads nor those
of the gateway wait for each other. It ends with the driver, however that ends: the pipe closes.

Access: Gym's key is fixed in NeMo-RL (`dummy_key`), so it proves nothing. On loopback the gateway
needs no token, as always. On any other address the token is in the path of `url`, the one part that
the driver chooses and that NeMo-RL hands to Gym's actors alone. Whoever can read the run's config
can read it, and nobody else: it is on no command line and in no log of ours.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec

import rollway
from rollway.errors import (
    RollwayError,
    StartError,
    Unreachable,
    UsageError,
)
from rollway.fleet.workers import RlListing, Source
from rollway.gateway.command import create_gateway, listen, tune_collector
from rollway.gateway.connections import raise_connection_limit
from rollway.gateway.server import Gateway
from rollway.gateway.store import SessionStore
from rollway.gateway.template import Template
from rollway.gateway.tokens import Access
from rollway.integrations.nemo_rl.config import returns_experts
from rollway.integrations.nemo_rl.connection import Address
from rollway.publishing import find_addresses
from rollway.spec import is_loopback
from rollway.stack.launch import Child, Parent

STOP_SECONDS = 15.0
START_SECONDS = 900.0
REQUEST_SECONDS = 3600.0
BODY_BYTES = 4 * 2**30
"""For all requests in flight: each carries the ids of every turn before it."""
# NeMo-RL's meaning of `chat_template: null`: the texts of the messages, one after the other.
_TEXTS_ONLY = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class Profile:
    """How to sample: for training, or for validation."""

    temperature: float
    top_p: float
    top_k: int

    def matches(self, body: Mapping[str, Any]) -> bool:
        """Return whether a request asks for nothing else."""
        return all(body.get(name) in (None, value) for name, value in self.fields.items())

    @property
    def fields(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.fields.items())


@dataclass(frozen=True)
class Job:
    """What the child needs to know."""

    address: Address
    host: str
    token: str = field(repr=False)
    tokenizer: str
    chat_template: str | None
    settings: dict[str, Any]
    """`chat_template_kwargs` of the tokenizer's config; those of a request win."""
    keep_tools: bool
    experts: bool
    most_tokens: int | None
    seconds: float
    profiles: tuple[Profile, ...]


_LISTINGS = {kind.__name__: kind for kind in get_args(Source)}


def encode_job(job: Job) -> bytes:
    """Return a job as one line of JSON."""
    fields = {**msgspec.to_builtins(job), "listing": type(job.address.listing).__name__}
    return msgspec.json.encode(fields)


def decode_job(line: bytes) -> Job:
    """Return the job of a line."""
    fields = msgspec.json.decode(line)
    address = fields["address"]
    listing = msgspec.convert(address["listing"], _LISTINGS[fields.pop("listing")])
    profiles = tuple(Profile(**profile) for profile in fields["profiles"])
    return Job(
        **{**fields, "address": Address(**{**address, "listing": listing}), "profiles": profiles}
    )


class GymServer:
    """A gateway for NeMo-Gym, in a child process.

    Attributes:
        url: what `dp_openai_server_base_urls` gives to Gym; it ends with /v1.
    """

    def __init__(
        self, address: Address, cfg: Mapping[str, Any], tokenizer_config: Mapping[str, Any]
    ) -> None:
        """Start the gateway and return when it serves. `cfg` is `policy.generation`,
        `tokenizer_config` is `policy.tokenizer`."""
        job = make_job(address, cfg, tokenizer_config)
        self._child = Child(__name__, encode_job(job))
        try:
            port = self._wait_until_ready(cfg)
        except BaseException:
            self.close()
            raise
        host = f"[{job.host}]" if ":" in job.host else job.host
        path = f"/{job.token}/v1" if job.token else "/v1"
        self.url = f"http://{host}:{port}{path}"

    def close(self) -> None:
        """End the gateway; requests in flight get a few seconds. A second call does nothing."""
        self._child.stop(STOP_SECONDS)

    def _wait_until_ready(self, cfg: Mapping[str, Any]) -> int:
        """Return the port; raise the error that the child reports."""
        seconds = (cfg.get("dynamo_cfg") or {}).get("startup_timeout_s") or START_SECONDS
        try:
            report = self._child.read_report(seconds)
        except TimeoutError:
            raise StartError(
                f"The gateway for NeMo-Gym did not start within {seconds:g} s."
            ) from None
        if report is None:
            raise StartError(
                "The gateway for NeMo-Gym ended before it served "
                f"(status {self._child.process.wait(STOP_SECONDS)}).",
                "Its error is above, in the output of this process.",
            )
        return int(report["port"])


def make_job(address: Address, cfg: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> Job:
    """Read what the gateway needs from a recipe."""
    vllm, dynamo = cfg.get("vllm_cfg") or {}, cfg.get("dynamo_cfg") or {}
    workers = dynamo.get("worker_args") or {}
    _, host = find_addresses([address.frontend_url])
    length = vllm.get("max_model_len")
    return Job(
        address=address,
        host=host,
        token="" if is_loopback(host) else secrets.token_urlsafe(24),
        tokenizer=str(tokenizer_config.get("name") or cfg.get("model_name") or address.model),
        chat_template=read_chat_template(tokenizer_config),
        settings=dict(tokenizer_config.get("chat_template_kwargs") or {}),
        keep_tools=not workers.get("exclude_tools_when_tool_choice_none", True),
        experts=returns_experts(cfg),
        most_tokens=None if length is None else int(length),
        seconds=float(dynamo.get("request_timeout_s") or REQUEST_SECONDS),
        profiles=read_profiles(cfg),
    )


def read_chat_template(config: Mapping[str, Any]) -> str | None:
    """Return the template that a tokenizer's config sets; None for the tokenizer's own."""
    template = config.get("chat_template", "default")
    if template is None:
        return _TEXTS_ONLY
    if template.lower() == "default":
        return None
    if not template.endswith(".jinja"):
        return str(template)
    try:
        return Path(template).read_text()
    except OSError as error:
        raise UsageError(
            f"The chat template {template} cannot be read: {error.strerror}.",
            "Give its path as policy.tokenizer.chat_template.",
        ) from error


def read_profiles(cfg: Mapping[str, Any]) -> tuple[Profile, Profile]:
    """Return how the recipe samples for training and for validation."""

    def read(prefix: str, otherwise: Profile) -> Profile:
        temperature, top_p, top_k = (cfg.get(prefix + name) for name in otherwise.fields)
        return Profile(
            otherwise.temperature if temperature is None else float(temperature),
            otherwise.top_p if top_p is None else float(top_p),
            otherwise.top_k if top_k is None else int(top_k),
        )

    training = read("", Profile(1.0, 1.0, -1))
    return training, read("val_", training)


def choose_sampling(body: Mapping[str, Any], profiles: Sequence[Profile]) -> dict[str, Any]:
    """Return the sampling of a request: the first profile that has what it asks for.

    Agents send requests of their own. One that samples otherwise than the recipe would be trained
    on as if the policy had sampled it."""
    profile = next((each for each in profiles if each.matches(body)), None)
    if profile is not None:
        return profile.fields
    asked = ", ".join(f"{name} {body[name]}" for name in profiles[0].fields if name in body)
    raise UsageError(
        f"This request asks for {asked}; the run samples with {profiles[0]} for training and "
        f"{profiles[-1]} for validation.",
        "Leave them out of the agent's requests, or change policy.generation (temperature, top_p, "
        "top_k, val_temperature, val_top_p, val_top_k).",
    )


# --- in the child --------------------------------------------------------------------------------


@dataclass(slots=True)
class GymGateway(Gateway):
    """A gateway with the rules of a recipe, and statuses that Gym knows from NeMo-RL's server."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    profiles: tuple[Profile, ...] = ()

    async def parse(self, request: Any) -> dict[str, Any]:
        body = await Gateway.parse(self, request)  # no super(): `slots` makes another class
        kwargs = body.get("chat_template_kwargs") or {}
        body["chat_template_kwargs"] = {**self.settings, **kwargs}
        if request.path.endswith("/completions"):
            body |= choose_sampling(body, self.profiles)
        return body

    def explain(self, failure: Exception) -> tuple[int, str, str]:
        status, kind, message = Gateway.explain(self, failure)
        if isinstance(failure, Unreachable):
            status = 504 if isinstance(failure.__cause__, TimeoutError) else 502
        return status, kind, message


def main() -> int:
    """Serve the job that arrives at stdin until the driver lets go."""
    parent = Parent()
    try:
        asyncio.run(_serve(decode_job(parent.job), parent))
    except RollwayError as error:
        parent.report_error(error)
        return 1
    return 0


async def _serve(job: Job, parent: Parent) -> None:
    if warning := raise_connection_limit():
        print(warning, file=sys.stderr)
    template = Template(
        job.tokenizer,
        chat_template=job.chat_template,
        keep_tools=job.keep_tools,
        trust_remote_code=True,  # as NeMo-RL loads it, in the driver and everywhere
    )
    template.settings({"chat_template_kwargs": job.settings})  # an error now, not at each request
    listing = job.address.listing
    async with rollway.attach(
        job.address.frontend_url,
        rl_url=listing.url if isinstance(listing, RlListing) else None,
        watch=False,  # the driver brings workers up to date
        listing=listing,
        secret=job.address.secret,
    ) as stack:
        gateway = await create_gateway(
            stack,
            template,
            SessionStore(None),  # Gym keeps the tokens itself
            job.address.model,
            kind=GymGateway,
            seconds=job.seconds,
            most_tokens=job.most_tokens,
            access=Access((job.token.encode(),), in_path=True) if job.token else Access(),
            bundle="always",
            routed_experts=job.experts,
            exact=True,
            expert_strings=True,
            body_bytes=BODY_BYTES,
            settings=job.settings,
            profiles=job.profiles,
        )
        tune_collector()
        listener = await listen(gateway, job.host, 0)
        try:
            loop, is_let_go = asyncio.get_running_loop(), asyncio.Event()
            parent.watch(lambda _: loop.call_soon_threadsafe(is_let_go.set))
            parent.report({"port": listener.port})
            await is_let_go.wait()
        finally:
            await listener.close()
