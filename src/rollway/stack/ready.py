"""Decide when a stack is ready: the frontend lists every model, and every worker has answered one
greedy and one sampled request. A running process or an open port shows neither.

The first request of each kind compiles kernels and takes seconds. The warm-up sends it to every
worker before the first user does, by pinning the request to the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from rollway.errors import RequestFailed, RolloutError, RollwayError, StartError, Unreachable
from rollway.fleet.admin import leaving_label
from rollway.fleet.dynamo_admin import DynamoAdmin
from rollway.fleet.workers import RlListing, Worker, discover
from rollway.http import ONCE, Http
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import DynamoAssembly, completion_request
from rollway.signed_calls import DOOR
from rollway.stack import logs
from rollway.stack.plan import ProcessPlan, StackPlan
from rollway.stack.state import WAITS_FOR_REFIT, is_at
from rollway.versions import BASE_VERSION, taint_of

Report = Callable[[ProcessPlan, str, str], None]
"""Called with a process, its new state, and a detail for the user."""

WARM_UP_SECONDS = 600.0
LOST_SECONDS = 15.0
JOIN_SECONDS = 60.0
UNSERVED_SECONDS = 60.0
REFUSED_SECONDS = 60.0
_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 0.1
_LISTING_SECONDS = 3.0
"""How often workers are listed before all of them answer."""
_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
_UNTRUSTED_ANSWERS = 3
_LOST_LISTINGS = 3
_NOTED_SECONDS = 5.0
"""After so many seconds of refusals the state of a worker says what may be the reason."""
_DISAGREES = (
    "It serves a model's workers only if they agree on how they serve it: give this one the "
    "options of the workers that it joins, such as max-model-len."
)
_OUT_OF_ROUTING = (
    "out of routing, because it has the base weights and the others were refitted: refit again, or "
    "`rollway fleet watch` refits it from the version's checkpoint"
)
_WARM_UPS = (Sampling(max_tokens=2, temperature=0.0), Sampling(max_tokens=2, temperature=1.0))


async def wait_until_open(http: Http, url: str) -> None:
    """Return when a server answers HTTP at `url`, with any status."""
    while True:
        try:
            await http.get_text(url, timeout=2.0)
            return
        except RequestFailed:
            return
        except Unreachable:
            await asyncio.sleep(_POLL_SECONDS)


async def wait_until_joinable(http: Http, plan: StackPlan) -> None:
    """Return when the frontend of the stack to join answers; it may still be starting."""
    try:
        await asyncio.wait_for(wait_until_open(http, f"{plan.frontend_url}/health"), JOIN_SECONDS)
    except TimeoutError:
        raise StartError(
            f"No frontend to join answers at {plan.frontend_url} ({JOIN_SECONDS:g} s).",
            "Is that stack running, and does its `frontend.host` accept connections from here? "
            "`rollway status NAME --json` on its machine shows its `invitation`.",
        ) from None


async def wait_until_connectable(port: int, host: str) -> None:
    """Return when a server that does not speak HTTP accepts TCP connections."""
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(_CONNECT_SECONDS)
            continue
        writer.close()
        return


class ServingCheck:
    """Waits until workers of a plan serve, and reports each step."""

    def __init__(
        self, http: Http, plan: StackPlan, report: Report, *, warm_up: bool, secret: str = ""
    ) -> None:
        self._http = http
        self._plan = plan
        self._report = report
        self._warmup = warm_up
        self._secret = secret

    async def wait(
        self,
        workers: Sequence[ProcessPlan],
        used_ids: Set[int],
        on_lost: Callable[[ProcessPlan], None],
    ) -> dict[str, int]:
        """Return the instance id of each worker when all have registered and answered.

        `used_ids` are the ids of other workers and of dead ones, which stay listed for some time.
        `on_lost` is called with a worker that serves its admin port but does not get listed.
        Headless ranks register nowhere: they are ready when their rank 0 is."""
        serving = [worker for worker in workers if not worker.is_headless]
        headless = [worker for worker in workers if worker.is_headless]
        instances, _ = await asyncio.gather(
            self._wait_until_serving(serving, used_ids, on_lost),
            asyncio.gather(*(self._wait_for_rank_zero(rank) for rank in headless)),
        )
        return instances

    async def _wait_until_serving(
        self,
        workers: Sequence[ProcessPlan],
        used_ids: Set[int],
        on_lost: Callable[[ProcessPlan], None],
    ) -> dict[str, int]:
        if not workers:
            return {}
        listed = await self._wait_for_registration(workers, used_ids, on_lost)
        held = {worker.name for worker in workers if await self._is_held(listed[worker.name])}
        # The frontend does not know workers that are held; without others, nor does it the model.
        await self._wait_for_models({w.model for w in workers if w.model and w.name not in held})
        finishes = (self._finish(w, listed[w.name], is_held=w.name in held) for w in workers)
        await asyncio.gather(*finishes)
        return {name: entry.instance_id for name, entry in listed.items()}

    async def _wait_for_rank_zero(self, rank: ProcessPlan) -> None:
        """Return when rank 0 of this rank's replica has its label, which it gets last of all."""
        placed = rank.placed
        assert placed is not None
        if placed.admin_port:
            self._report(rank, "waiting for rank 0", f"of its replica, at {placed.master_host}")
            url = f"http://{placed.master_host}:{placed.admin_port}/engine/get_weight_version"
            while True:
                with contextlib.suppress(Unreachable, RequestFailed):
                    answer = await self._http.post(url, {}, timeout=2.0)
                    if answer["version"] is not None:
                        break
                await asyncio.sleep(_POLL_SECONDS)
        self._report(rank, "ready", "")

    async def _finish(self, worker: ProcessPlan, listed: Worker, *, is_held: bool) -> None:
        if is_held:
            await self._declare(listed, leaving_label(BASE_VERSION), [])
            self._report(worker, WAITS_FOR_REFIT, _OUT_OF_ROUTING)
            return
        if self._warmup:
            self._report(worker, "warming up", "first greedy and first sampled request")
            await self.warm_up(worker, listed.instance_id)
        if worker.engine != "mocker":
            # Every start of a worker, a restart too, loads the checkpoint of the spec.
            await self._declare(listed, BASE_VERSION, [taint_of(BASE_VERSION)])
        self._report(worker, "ready", "")

    async def _is_held(self, listed: Worker) -> bool:
        """Return whether a worker keeps itself out of routing (`rollway/engine/guard.py`)."""
        if not listed.admin_url:
            return False  # a mocker
        try:
            answer = await self._http.post(f"{listed.admin_url}/engine/{DOOR}", {}, timeout=5.0)
        except (RequestFailed, Unreachable):  # it has no guard, or is gone again
            return False
        return bool(answer.get("held"))

    async def _wait_for_registration(
        self,
        workers: Sequence[ProcessPlan],
        used_ids: Set[int],
        on_lost: Callable[[ProcessPlan], None],
    ) -> dict[str, Worker]:
        registered: dict[str, Worker] = {}
        unlisted_since: dict[str, float] = {}
        listed_at = time.monotonic()
        while len(registered) < len(workers):
            missing = [worker for worker in workers if worker.name not in registered]
            answers = await asyncio.gather(*map(self._has_admin_routes, missing))
            answering = [worker for worker, does in zip(missing, answers, strict=True) if does]
            # A listing asks every worker of the stack, also those of other supervisors. So none is
            # made without news, and few before the last worker answers.
            if len(answering) < len(missing) and time.monotonic() - listed_at < _LISTING_SECONDS:
                answering = []
            try:
                if answering or any(worker.engine == "mocker" for worker in missing):
                    listed_at = time.monotonic()
                    others = used_ids | {entry.instance_id for entry in registered.values()}
                    registered |= await self._find_workers(missing, others)
            except RollwayError:
                # The frontend itself is still starting, so an unlisted worker is not lost.
                unlisted_since.clear()
                answering = []
            for worker in missing:
                if worker.name in registered:
                    self._report(worker, "registered", "")
                elif worker in answering:
                    # Dynamo's file discovery loses a registration now and then when very many
                    # workers start at once, and does not retry.
                    since = unlisted_since.setdefault(worker.name, time.monotonic())
                    if time.monotonic() - since > LOST_SECONDS:
                        on_lost(worker)
                        del unlisted_since[worker.name]
            if len(registered) < len(workers):
                await asyncio.sleep(_POLL_SECONDS)
        return registered

    async def _has_admin_routes(self, worker: ProcessPlan) -> bool:
        """Return whether a worker serves its admin routes; it does right before it registers."""
        if worker.engine == "mocker" or worker.admin_url is None:
            return False
        try:
            await self._http.post(f"{worker.admin_url}/engine/get_weight_version", {}, timeout=2.0)
        except (Unreachable, RequestFailed):
            return False
        return True

    async def _find_workers(
        self, workers: Sequence[ProcessPlan], used_ids: Set[int]
    ) -> dict[str, Worker]:
        """Return, by the names of these workers, the entries of those that are listed now."""
        entries: dict[str, Worker] = {}
        for entry in await discover(self._http, RlListing(self._plan.rl_url), retry=ONCE):
            worker = next((worker for worker in workers if is_at(entry.admin_url, worker)), None)
            if worker is not None and entry.error is None and entry.instance_id not in used_ids:
                entries[worker.name] = entry
        mockers = [worker for worker in workers if worker.engine == "mocker"]
        if mockers:
            health = await _read_health(self._http, self._plan)
            assigned = _assign_mockers(mockers, health.get("instances", []), used_ids)
            entries |= {name: Worker(instance, "", "") for name, instance in assigned.items()}
        return entries

    async def _wait_for_models(self, models: set[str]) -> None:
        """Return when the frontend serves these models, whose workers have registered."""
        answered = 0.0
        while answered < UNSERVED_SECONDS:
            try:
                url = f"{self._plan.frontend_url}/v1/models"
                answer = await self._http.get(url, timeout=5.0, retry=ONCE)
                missing = models - {entry["id"] for entry in answer["data"]}
                if not missing:
                    return
                answered += _POLL_SECONDS
            except (Unreachable, RequestFailed):
                pass
            await asyncio.sleep(_POLL_SECONDS)
        frontends = self._plan.by_role("frontend")
        log = frontends[0].log if frontends else None
        raise StartError(
            f"The frontend lists the workers of {', '.join(sorted(missing))} and does not serve "
            "the model.",
            "Perhaps it could not load the model's files (a missing chat template, for example): "
            f"see {log or f'the log of {self._plan.frontend_url}'}.",
            log_tail="\n".join(logs.read_error_tail(log)) if log else "",
        )

    async def _declare(self, listed: Worker, label: int, taints: Sequence[str]) -> None:
        """Set the taints and then the label of a worker. The caller limits the time.

        The label comes last: once a worker has it, a refit may change both. A worker that has a
        label already was refitted by a process that did not wait for this start."""
        while True:
            try:
                async with DynamoAdmin(self._http, secret=self._secret).pin() as admin:
                    if (await admin.read(listed)).label is None:
                        await admin.set_taints(listed, taints)
                        await admin.declare_version(listed, label)
                return
            except RollwayError:
                await asyncio.sleep(_POLL_SECONDS)
            # Only now: a listing for each of n workers would be n x n questions to them.
            with contextlib.suppress(RollwayError):  # the frontend may be restarting
                for entry in await discover(self._http, RlListing(self._plan.rl_url)):
                    if entry.instance_id == listed.instance_id and entry.error is None:
                        listed = entry

    async def warm_up(self, worker: ProcessPlan, instance: int) -> None:
        """Have this worker answer one request of each kind; raise `RolloutError` if its answers
        stay wrong, and `StartError` if the frontend keeps refusing requests for it."""
        for sampling in _WARM_UPS:
            untrusted = 0
            refused_since = None
            while True:
                try:
                    await self._request(worker, instance, sampling)
                    break
                except (RequestFailed, Unreachable) as error:
                    # The frontend answers 404 or 400 for a moment after it has listed a model, and
                    # not at all while it restarts. The caller limits the time.
                    is_refused = isinstance(error, RequestFailed) and error.status < 500
                    refused_since = (refused_since or time.monotonic()) if is_refused else None
                    seconds = time.monotonic() - (refused_since or time.monotonic())
                    if seconds > REFUSED_SECONDS:
                        raise StartError(
                            f"The frontend lists {worker.name} and refuses every request for it: "
                            f"{error.message}",
                            _DISAGREES,
                        ) from error
                    hint = f" {_DISAGREES}" if seconds > _NOTED_SECONDS else ""
                    self._report(worker, "warming up", error.message + hint)
                except RolloutError as error:
                    # vLLM with a draft model on CPU was seen to answer its very first request with
                    # a log-prob of null, and never again.
                    untrusted += 1
                    if untrusted == _UNTRUSTED_ANSWERS:
                        raise
                    self._report(worker, "warming up", error.message)
                await asyncio.sleep(_POLL_SECONDS)

    async def _request(self, worker: ProcessPlan, instance: int, sampling: Sampling) -> None:
        body = completion_request(worker.model or "", _PROMPT, sampling, pin=instance)
        if worker.worker_role:
            # A worker of one role answers together with one of the other, which the router picks.
            del body["nvext"]["backend_instance_id"]
            body["nvext"][f"{worker.worker_role}_worker_id"] = instance
        if worker.engine == "mocker":
            body.pop("logprobs")
        url = f"{self._plan.frontend_url}/v1/completions"
        answer = await self._http.post(url, body, timeout=WARM_UP_SECONDS)
        if worker.engine != "mocker":
            assembly = DynamoAssembly(sampling, len(_PROMPT))
            assembly.add(answer)
            assembly.finish()


class MissingCounter:
    """Counts for how many listings in a row each worker was missing."""

    def __init__(self) -> None:
        self._missing: dict[int, int] = {}

    def find_lost(self, expected: Mapping[str, int], listed: Set[int] | None) -> list[str]:
        """Return the names of the workers (name to instance id) that are lost for good.

        Without a listing, or with an empty one, nobody is: the frontend has only just started."""
        if not listed:
            return []
        self._missing = {
            instance: self._missing.get(instance, 0) + 1
            for instance in expected.values()
            if instance not in listed
        }
        return [n for n, i in expected.items() if self._missing.get(i, 0) >= _LOST_LISTINGS]


async def list_instances(http: Http, plan: StackPlan) -> set[int] | None:
    """Return the ids of all workers that the frontend lists; None when it does not answer."""
    try:
        health = await _read_health(http, plan)
        return {int(entry["instance_id"]) for entry in health["instances"]}
    except (RollwayError, KeyError, TypeError, ValueError):
        return None


async def _read_health(http: Http, plan: StackPlan) -> dict[str, Any]:
    health: dict[str, Any] = await http.get(f"{plan.frontend_url}/health", timeout=5.0, retry=ONCE)
    return health


def _assign_mockers(
    mockers: Sequence[ProcessPlan], listed: Sequence[Mapping[str, Any]], used_ids: Set[int]
) -> dict[str, int]:
    """Assign the listed instances to mockers, which are not in the RL listing.

    The frontend's health does not say which process an instance is; for replicas of one model any
    assignment works."""
    endpoint = {m.name: m.argv[m.argv.index("--endpoint") + 1] for m in mockers}
    assigned: dict[str, int] = {}
    for address in set(endpoint.values()):
        component = address.split(".")[-2]
        ids = sorted(
            entry["instance_id"]
            for entry in listed
            if entry.get("endpoint") == "generate"
            and entry.get("component") == component
            and entry["instance_id"] not in used_ids
        )
        assigned.update(zip((n for n, a in endpoint.items() if a == address), ids, strict=False))
    return assigned
