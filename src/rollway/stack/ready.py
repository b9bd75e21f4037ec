"""When a stack is ready: every model is listed, every worker of every replica has answered a
greedy and a sampled request. That a process exists, or that a port is open, proves neither.

The first request of each kind compiles kernels and takes seconds; here it is paid before the
first user, on every worker, by pinning the request to it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, Mapping, Sequence, Set
from urllib.parse import urlsplit

from rollway.config import is_loopback
from rollway.errors import RequestFailed, RolloutError, RollwayError, StartError, Unreachable
from rollway.fleet.admin import DynamoAdmin
from rollway.fleet.discovery import RlListing, discover
from rollway.http import ONCE, Http
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import DynamoAssembly, completion_request
from rollway.stack import logs
from rollway.stack.plan import ProcessPlan, StackPlan
from rollway.stack.state import ProcessState
from rollway.versions import BASE_VERSION, taint_of

Report = Callable[[ProcessPlan, str, str], None]
"""Called with a process, its new state, and a detail for the user."""

WARM_UP_SECONDS = 600.0
LOST_SECONDS = 15.0
JOIN_SECONDS = 60.0
UNSERVED_SECONDS = 60.0
_POLL_SECONDS = 0.5
_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
_UNTRUSTED_ANSWERS = 3
_WARM_UPS = (Sampling(max_tokens=2, temperature=0.0), Sampling(max_tokens=2, temperature=1.0))


async def until_serving(
    http: Http,
    plan: StackPlan,
    workers: Sequence[ProcessPlan],
    report: Report,
    *,
    warm_up: bool,
    secret: str = "",
    taken: Set[int] = frozenset(),
    lost: Callable[[ProcessPlan], None] | None = None,
) -> dict[str, int]:
    """Return the instance id of each of these workers, when all have registered and answered.

    `taken` are the ids of other workers and of dead ones, which stay listed for a while; `lost` is
    told of a worker that serves its admin port but does not get listed."""
    instances = await _registered(http, plan, workers, report, taken, lost)
    await _listed(http, plan, {w.model for w in workers if w.model})

    async def warm(worker: ProcessPlan) -> None:
        instance = instances[worker.name]
        if warm_up:
            report(worker, "warming up", "first greedy and first sampled request")
            await _answer(http, plan, worker, instance, report)
        if worker.engine != "mocker":
            # A worker that starts, also one that starts again, serves the spec's checkpoint.
            await _declare_base(http, plan, instance, secret)
        report(worker, "ready", "")

    await asyncio.gather(*map(warm, workers))
    return instances


async def until_open(http: Http, url: str) -> None:
    """Return when something answers HTTP at `url`, whatever it says."""
    while True:
        try:
            await http.get_text(url, timeout=2.0)
            return
        except RequestFailed:
            return
        except Unreachable:
            await asyncio.sleep(_POLL_SECONDS)


async def until_joined(http: Http, plan: StackPlan) -> None:
    """Return when the frontend of the stack to join answers; it may have been started just now."""
    try:
        await asyncio.wait_for(until_open(http, f"{plan.frontend_url}/health"), JOIN_SECONDS)
    except TimeoutError:
        raise StartError(
            f"No frontend to join answers at {plan.frontend_url} ({JOIN_SECONDS:g} s).",
            "Is that stack running, and does its `frontend.host` take connections from here? "
            "`rollway status NAME --json` on its machine shows its invitation.",
        ) from None


async def until_connectable(port: int, host: str) -> None:
    """Return when a TCP connection can be made (for servers that do not speak HTTP)."""
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(_POLL_SECONDS)
            continue
        writer.close()
        return


async def _registered(
    http: Http,
    plan: StackPlan,
    workers: Sequence[ProcessPlan],
    report: Report,
    taken: Set[int],
    lost: Callable[[ProcessPlan], None] | None,
) -> dict[str, int]:
    """The instance id of each worker, once all have registered."""
    found: dict[str, int] = {}
    unlisted_since: dict[str, float] = {}
    while len(found) < len(workers):
        try:
            seen = await _instances(http, plan, workers, taken)
        except RollwayError:
            unlisted_since.clear()  # the frontend itself is still starting: nobody is lost
            await asyncio.sleep(_POLL_SECONDS)
            continue
        for worker in workers:
            if worker.name in seen and worker.name not in found:
                found[worker.name] = seen[worker.name]
                report(worker, "registered", "")
        for worker in workers:
            # File discovery drops a registration now and then when very many start at once, and
            # nobody tries again.
            if lost is None or worker.name in found or not await _admin_answers(http, worker):
                continue
            since = unlisted_since.setdefault(worker.name, time.monotonic())
            if time.monotonic() - since > LOST_SECONDS:
                lost(worker)
                del unlisted_since[worker.name]
        await asyncio.sleep(_POLL_SECONDS)
    return found


async def _admin_answers(http: Http, worker: ProcessPlan) -> bool:
    """Whether an RL worker has its routes up, which it does right before it registers."""
    if worker.engine == "mocker" or worker.admin_url is None:
        return False
    try:
        await http.post(f"{worker.admin_url}/engine/get_weight_version", {}, timeout=2.0)
    except (Unreachable, RequestFailed):
        return False
    return True


class Absences:
    """Remembers for how many listings in a row a worker was missing."""

    def __init__(self, patience: int = 3) -> None:
        self._patience = patience
        self._missing: dict[int, int] = {}

    def lost(self, expected: Mapping[str, int], listed: Set[int] | None) -> list[str]:
        """Which of these workers (name to instance id) are lost for good. A listing that could
        not be had says nothing about anybody."""
        if not listed:  # none at all: then it is the frontend that has just started
            return []
        self._missing = {
            instance: self._missing.get(instance, 0) + 1
            for instance in expected.values()
            if instance not in listed
        }
        return [n for n, i in expected.items() if self._missing.get(i, 0) >= self._patience]


async def listed_instances(http: Http, plan: StackPlan) -> set[int] | None:
    """The ids of all workers that the frontend knows; None when it does not answer."""
    try:
        health = await http.get(f"{plan.frontend_url}/health", timeout=5.0, retry=ONCE)
        return {int(entry["instance_id"]) for entry in health["instances"]}
    except (RollwayError, KeyError, TypeError, ValueError):
        return None


async def _instances(
    http: Http, plan: StackPlan, workers: Sequence[ProcessPlan], taken: Set[int]
) -> dict[str, int]:
    """Worker name to instance id, for those that are there."""
    found = {}
    for listed in await discover(http, RlListing(plan.rl_url), retry=ONCE):
        worker = next((one for one in workers if is_at(listed.admin_url, one)), None)
        if worker is not None and listed.error is None and listed.instance_id not in taken:
            found[worker.name] = listed.instance_id
    mockers = [worker for worker in workers if worker.engine == "mocker"]
    if mockers:
        found.update(await _mocker_instances(http, plan, mockers, taken))
    return found


def is_at(admin_url: str, worker: ProcessPlan | ProcessState) -> bool:
    """Whether a worker is the one that is listed there. Another machine's may have the same port;
    but the address of one that listens on all of them, or on a name, is Dynamo's choice."""
    listed, own = urlsplit(admin_url), urlsplit(worker.admin_url or "")
    if listed.port != worker.ports.get("system"):
        return False
    chosen = own.hostname or ""
    return is_loopback(chosen) or not _is_number(chosen) or listed.hostname == chosen


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _mocker_instances(
    http: Http, plan: StackPlan, mockers: Sequence[ProcessPlan], taken: Set[int]
) -> dict[str, int]:
    """Mockers are not in the RL listing. The frontend's health lists instances without saying
    which process each is; for replicas of one model any assignment will do."""
    health = await http.get(f"{plan.frontend_url}/health", timeout=5.0, retry=ONCE)
    endpoint = {m.name: m.argv[m.argv.index("--endpoint") + 1] for m in mockers}
    found: dict[str, int] = {}
    for address in set(endpoint.values()):
        component = address.split(".")[-2]
        ids = sorted(
            i["instance_id"]
            for i in health.get("instances", [])
            if i.get("endpoint") == "generate"
            and i.get("component") == component
            and i["instance_id"] not in taken
        )
        found.update(zip((n for n, a in endpoint.items() if a == address), ids, strict=False))
    return found


async def _listed(http: Http, plan: StackPlan, models: set[str]) -> None:
    """Return when the frontend serves the models, whose workers have registered with it."""
    answered = 0.0
    while answered < UNSERVED_SECONDS:
        try:
            answer = await http.get(f"{plan.frontend_url}/v1/models", timeout=5.0, retry=ONCE)
            missing = models - {entry["id"] for entry in answer["data"]}
            if not missing:
                return
            answered += _POLL_SECONDS
        except (Unreachable, RequestFailed):
            pass
        await asyncio.sleep(_POLL_SECONDS)
    frontends = [process.log for process in plan.processes if process.role == "frontend"]
    seen = str(frontends[0]) if frontends else f"the log of {plan.frontend_url}"
    raise StartError(
        f"The frontend knows the workers of {', '.join(sorted(missing))} and does not serve it.",
        f"It could not load the model's files, perhaps (no chat template, say): see {seen}.",
        log_tail="\n".join(logs.telling_tail(frontends[0])) if frontends else "",
    )


async def _declare_base(http: Http, plan: StackPlan, instance: int, secret: str) -> None:
    """Routing first, label last: once a worker has its label, a refit may begin to change both. One
    that has a label already was moved by somebody who did not wait. The caller bounds the time."""
    while True:
        try:
            for listed in await discover(http, RlListing(plan.rl_url)):
                if listed.instance_id == instance and listed.error is None:
                    async with DynamoAdmin(http, secret=secret).held() as admin:
                        if await admin.weight_version(listed) is None:
                            await admin.set_taints(listed, [taint_of(BASE_VERSION)])
                            await admin.declare_version(listed, BASE_VERSION)
                    return
        except RollwayError:
            pass  # the frontend restarts, perhaps
        await asyncio.sleep(_POLL_SECONDS)


async def _answer(
    http: Http, plan: StackPlan, worker: ProcessPlan, instance: int, report: Report
) -> None:
    """Send one request of each kind, answered by this very worker; raise `RolloutError` if its
    answers cannot be trusted."""
    for sampling in _WARM_UPS:
        body = completion_request(worker.model or "", _PROMPT, sampling, pin=instance)
        if worker.engine == "mocker":
            body.pop("logprobs")
        untrusted = 0
        while True:
            try:
                answer = await http.post(
                    f"{plan.frontend_url}/v1/completions", body, timeout=WARM_UP_SECONDS
                )
                if worker.engine != "mocker":
                    assembly = DynamoAssembly(sampling, len(_PROMPT))
                    assembly.add(answer)
                    assembly.finish()
                break
            except (RequestFailed, Unreachable) as error:
                # The frontend answers 404 or 400 for a moment after it has listed a model, and
                # not at all while it restarts. The caller bounds how long this goes on.
                report(worker, "warming up", error.message)
            except RolloutError as error:
                # vLLM with a draft model on CPU has once answered its very first request with a
                # log-prob that is none, and never again. What stays wrong ends the start.
                untrusted += 1
                if untrusted == _UNTRUSTED_ANSWERS:
                    raise
                report(worker, "warming up", error.message)
            await asyncio.sleep(_POLL_SECONDS)
