"""What a stack answers: checks of versions, routing, caches, log-probs and proofs."""

from __future__ import annotations

import asyncio
import math

from rollway.errors import RequestFailed
from rollway.fleet.foreign import Answer
from rollway.fleet.workers import Worker
from rollway.observe.doctor.subject import ONE_TOKEN, Findings, ModelWorkers, Subject
from rollway.rollout.sampling import Sampling
from rollway.versions import taint_of

MOST_WORKERS = 8
"""How many workers of a model are asked something each."""
_FOLLOWED = 6
"""How many prompts are sent twice. A router that knows nothing hits all of two workers' by chance
once in 64 times, of three workers' once in 729."""
_LOGPROB_PROMPTS = 3
"""How many prompts are tried: a model may be too sure of its tokens to tell, or choose another one
at a temperature that is not quite 0."""
_EVENT_SECONDS = 1.5
"""Events take milliseconds; a busy machine may need more."""
_UNUSED_VERSION = 10**9
_SURE = -0.01
"""A token that is this likely says nothing about how log-probs are computed."""
_EQUAL = 1e-3
_PARAMETERS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip


async def check_workers(subject: Subject, pool: ModelWorkers) -> Findings:
    """Every worker answers and serves a version."""
    if pool.trouble is not None:
        text = f"{pool.model}: {pool.trouble.message}"
        yield "error", text, pool.trouble.hint
    elif not pool.workers:
        advice = "Its workers have died or are still starting: rollway status."
        yield "error", f"{pool.model} has none", advice
    sound = 0
    for worker in pool.workers:
        label = pool.get_label(worker)
        if worker.error is not None:
            advice = "It is dead, hung or unreachable: rollway status, then its log."
            yield "error", f"{worker}: {worker.error}", advice
        elif subject.doors.get(worker.instance_id) == "silent":
            text = f"{worker} is listed, and does not answer here"
            advice = (
                "It hangs, or its port is closed between the machines: `admin_host` must be "
                "an address that whoever refits can reach."
            )
            yield "error", text, advice
        elif label is not None and label < 0:
            advice = "A refit has not put it back: refit again, or restart it."
            yield "error", f"{worker} serves no version", advice
        else:
            sound += 1
    if sound and sound == len(pool.workers):
        yield "ok", f"{sound} of {pool.model} answer"


async def check_versions(subject: Subject, pool: ModelWorkers) -> Findings:
    """Every worker of a model serves the same version."""
    labels = {pool.get_label(w) for w in pool.workers if w.error is None}
    versions = sorted(label for label in labels if label is not None and label >= 0)
    if len(versions) > 1:
        behind = [w for w in pool.workers if pool.get_label(w) in versions[:-1]]
        text = f"{pool.model} serves {', '.join(map(str, versions))}; behind: "
        advice = "Refit, or keep a process attached: it brings workers that join up to date."
        yield "error", text + ", ".join(map(str, behind)), advice
    elif versions:
        yield "ok", f"{pool.model} serves {versions[0]}"
    elif pool.workers:
        advice = "Nobody has refitted it: its rollouts are not tied to weights."
        yield "note", f"{pool.model} declares none", advice


async def check_pools(subject: Subject, pool: ModelWorkers) -> Findings:
    """With prefill and decode apart, the newest version has workers in both pools."""
    if not pool.is_split:
        return
    counts = {
        role: sum(worker.role == role for worker in pool.serving) for role in ("prefill", "decode")
    }
    missing = [role for role, count in counts.items() if not count]
    text = f"{pool.model}: {counts['prefill']} prefill, {counts['decode']} decode"
    if missing:
        advice = f"Requests fail until a {missing[0]} worker serves it: rollway status."
        yield "error", text, advice
    else:
        yield "ok", text


def can_generate(pool: ModelWorkers) -> bool:
    """Return whether a request can be answered, by a worker that can be named."""
    roles = {worker.role for worker in pool.serving}
    needed = {"prefill", "decode"} if pool.is_split else {""}
    return roles >= needed and bool(_choose(pool))


async def check_taints(subject: Subject, pool: ModelWorkers) -> Findings:
    """The router sends a request for a version to every worker that serves it."""
    if pool.workers and all(worker.instance_id < 0 for worker in pool.workers):
        text = f"{pool.model} has no router: what it answers is not checked"
        yield "note", text
    if pool.newest is None or not can_generate(pool):
        return
    if pool.is_split:  # requests cannot be pinned to a worker of one role
        if await subject.is_answered(pool, cache_salt=subject.make_salt(pool)):
            yield "ok", f"both pools of {pool.model} are routed"
        else:
            pool.refusing.update(worker.instance_id for worker in pool.serving)
            text = f"{pool.model} serves {pool.newest}, and answers no request for it"
            advice = "Refit to the next version, which sets the taints of both pools."
            yield "error", text, advice
        return
    asked = _choose(pool)
    for worker in asked:
        pinned = {"pin": worker.instance_id, "cache_salt": subject.make_salt(pool)}
        if await subject.is_answered(pool, **pinned):
            continue
        pool.refusing.add(worker.instance_id)
        if await subject.is_answered(pool, required_taint=None, **pinned):
            text = f"{worker} serves {pool.newest}, and the router does not know it"
            advice = "Refit it to the next version: a refit sets the taint."
        else:
            text, advice = f"{worker} answers no request", "Read its log: rollway logs."
        yield "error", text, advice
    if asked and not pool.refusing:
        part = "" if len(asked) == len(pool.serving) else f" of {len(pool.serving)}"
        yield "ok", f"{len(asked)}{part} workers of {pool.model} are routed"


def _choose(pool: ModelWorkers) -> list[Worker]:
    """Return workers that requests can be pinned to, one after the other."""
    workers = [w for w in pool.serving if w.instance_id >= 0 and w.role != "prefill"]
    return workers[:MOST_WORKERS]


async def check_refusal(subject: Subject, pool: ModelWorkers) -> Findings:
    """A request for a version that nobody serves gets no tokens."""
    if pool.newest is None:
        return
    try:
        answer = await subject.ask(
            pool,
            subject.make_prompt(pool),
            ONE_TOKEN,
            required_taint=taint_of(_UNUSED_VERSION),
            cache_salt=subject.make_salt(pool),
        )
    except RequestFailed:
        yield "ok", f"{pool.model} refuses them"
        return
    advice = "The router ignores taints: use the tested Dynamo, and no proxy that drops nvext."
    text = f"worker {answer.worker_id} answers for version {_UNUSED_VERSION}"
    yield "error", text, advice


async def check_events(subject: Subject, pool: ModelWorkers) -> Findings:
    """A prompt that a worker has cached is routed to it."""
    workers = _choose(pool)
    count = _FOLLOWED if len(workers) > 1 or pool.is_split else 1
    sent = [
        (None if pool.is_split else workers[number % len(workers)], subject.make_prompt(pool))
        for number in range(count)
    ]
    salt = subject.make_salt(pool)
    places = []
    for worker, prompt in sent:
        pin = None if worker is None else worker.instance_id
        first = await subject.ask(pool, prompt, ONE_TOKEN, cache_salt=salt, pin=pin)
        places.append(first.prefill_worker_id or first.worker_id)
    await asyncio.sleep(_EVENT_SECONDS)
    astray, cold = 0, 0
    for (_, prompt), place in zip(sent, places, strict=True):
        second = await subject.ask(pool, prompt, ONE_TOKEN, cache_salt=salt)
        is_there = (second.prefill_worker_id or second.worker_id) == place
        astray += not is_there
        cold += is_there and not second.cached_tokens
    if cold:
        advice = "Prefix caching is off: remove `no-enable-prefix-caching` from its args."
        text = f"{pool.model}: a worker computes again what it has computed"
        yield "error", text, advice
    elif astray and _is_routed_by_cache(subject):
        text = f"{pool.model}: {astray} of {len(sent)} cached prompts went to another worker"
        if busy := await subject.count_requests():
            advice = "A router also avoids busy workers: check again when the stack is idle."
            text = f"{text}, beside {busy:.0f} other requests"
            yield "note", text, advice
            return
        advice = (
            "Events do not reach the router: check `kv-events-config` of the workers, and the "
            "event plane between their machines."
        )
        yield "error", text, advice
    elif astray:
        text = f"{pool.model}: requests are not routed by what is cached"
        yield "note", text, "Set `router: {mode: kv}` for prefix hits."
    elif len(pool.serving) == 1:
        yield "ok", f"{pool.model}: hits; one worker needs no events"
    else:
        yield "ok", f"{pool.model}: cached prompts return to their worker"


def _is_routed_by_cache(subject: Subject) -> bool:
    """Return whether the frontend is to route by cache; a stack of another's may be."""
    command = " ".join(subject.read_frontend_command())
    return not command or "--router-mode kv" in command


async def check_salt(subject: Subject, pool: ModelWorkers) -> Findings:
    """The same prompt with another salt finds nothing in a cache."""
    prompt, salts = subject.make_prompt(pool), [subject.make_salt(pool) for _ in range(2)]
    pin = None if pool.is_split else _choose(pool)[0].instance_id
    answers = [
        await subject.ask(pool, prompt, ONE_TOKEN, cache_salt=salt, pin=pin) for salt in salts
    ]
    if cached := answers[1].cached_tokens:
        text = f"{pool.model}: {cached} tokens were found under another salt"
        advice = (
            "KV of old weights could be used after a refit: the frontend or a worker drops "
            "`nvext.cache_salt`. Use the tested versions."
        )
        yield "error", text, advice
    else:
        yield "ok", f"{pool.model}: caches of salts are apart"


async def check_logprobs(subject: Subject, pool: ModelWorkers) -> Findings:
    """Log-probs are those of the distribution that was sampled from, with its temperature.

    At a temperature near 0 the likeliest token is nearly certain: an engine that reports the
    processed log-probs says so, and one that reports raw ones says the same as for greedy."""
    pairs: list[tuple[float, float]] = []
    for _ in range(_LOGPROB_PROMPTS):
        pairs = pairs or await _compare_temperatures(subject, pool)
    if not pairs:
        text = f"{pool.model}: the model is too sure of its tokens to tell"
        yield "note", text
    elif all(math.isclose(a, b, abs_tol=_EQUAL) for a, b in pairs):
        text = f"{pool.model}: log-probs ignore the temperature"
        advice = (
            "They are raw: start workers with --enable-rl, which reports the processed ones; "
            "or train at temperature 1, without top-p and top-k."
        )
        yield "error", text, advice
    else:
        yield "ok", f"{pool.model}: of the sampled distribution"


async def _compare_temperatures(subject: Subject, pool: ModelWorkers) -> list[tuple[float, float]]:
    """Return the log-probs of the same tokens, greedy and nearly so, unless the model is sure."""
    prompt = subject.make_prompt(pool)
    greedy, cold = [
        await subject.ask(
            pool,
            prompt,
            Sampling(max_tokens=4, temperature=temperature, seed=1),
            cache_salt=subject.make_salt(pool),
        )
        for temperature in (0.0, 0.01)
    ]
    return [
        (a, b)
        for a, b, first, second in zip(
            greedy.logprobs or (), cold.logprobs or (), greedy.token_ids, cold.token_ids,
            strict=False,
        )
        if first == second and a < _SURE
    ]  # fmt: skip


async def check_generation_config(subject: Subject, pool: ModelWorkers) -> Findings:
    """A parameter that a request leaves out is neutral, and not the checkpoint's."""
    prompt, sampling = subject.make_prompt(pool), Sampling(max_tokens=4, seed=1)
    pin = None if pool.is_split else _choose(pool)[0].instance_id
    answers = []
    for omit in ((), _PARAMETERS):
        salt = subject.make_salt(pool)
        done = await subject.ask(pool, prompt, sampling, omit=omit, cache_salt=salt, pin=pin)
        answers.append(Answer(done.token_ids, done.logprobs or ()))
    if answers[0].agrees(answers[1]):
        yield "ok", f"{pool.model}: does not interfere"
    else:
        text = f"{pool.model}: a request without sampling parameters is sampled otherwise"
        advice = (
            "The checkpoint's generation_config.json fills them in. Rollway's clients send "
            "all; for others start workers with --enable-rl, or set `generation-config: vllm`."
        )
        yield "warning", text, advice


async def check_proof(subject: Subject, pool: ModelWorkers) -> Findings:
    """After a refit, managed workers compare their parameters with what was published."""
    workers = pool.serving[:MOST_WORKERS]
    facts = [await pool.fleet.admin.read(worker) for worker in workers]
    foreign = sum(not each.enforces for each in facts)
    if foreign:
        text = f"{pool.model}: {foreign} workers are foreign ones, which Rollway does not manage"
        advice = (
            "Refits are verified by canary answers alone, and answers are not stamped. Start "
            "workers by Rollway, or with what docs/fleet.md names for a managed worker."
        )
        yield "note", text, advice
    elif workers:
        yield "ok", f"{pool.model}: by parameters"
