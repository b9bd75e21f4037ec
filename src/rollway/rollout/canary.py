"""The canary's request: a few greedy tokens, from one worker and no other."""

from __future__ import annotations

from rollway.errors import AdminError, RequestFailed, RolloutError, Unreachable
from rollway.fleet.discovery import Worker
from rollway.fleet.verify import Answer, Ask
from rollway.http import Http
from rollway.rollout.sampling import Sampling
from rollway.rollout.wire import DynamoAssembly, completion_request

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
_SAMPLING = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


def canary(http: Http, frontend_url: str, model: str, *, timeout: float = 60.0) -> Ask:
    """How to ask one worker, past the routing."""
    url = f"{frontend_url.rstrip('/')}/v1/completions"
    runs = 0

    async def ask(worker: Worker) -> Answer:
        nonlocal runs
        runs += 1
        body = completion_request(
            model,
            PROMPT,
            _SAMPLING,
            cache_salt=f"canary-{runs}",  # its prefix must be computed anew each time
            pin=worker.instance_id,
        )
        assembly = DynamoAssembly(_SAMPLING, len(PROMPT))
        try:
            assembly.add(await http.post(url, body, timeout=timeout))
            completion = assembly.finish()
        except (RequestFailed, Unreachable, RolloutError) as error:
            raise AdminError(f"{worker} does not answer the canary: {error.message}") from error
        return Answer(tuple(completion.token_ids), tuple(completion.logprobs or ()))

    return ask
