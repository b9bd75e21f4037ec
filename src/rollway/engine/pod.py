"""Start a worker in a pod: `python -m rollway.engine.pod MODULE ARGUMENTS…`.

All pods of a component have one command line, and MODULE runs with it. What differs between pods is
added here: the Dynamo namespace, whose suffix the operator decides, and the seed, because workers
with equal seeds sample equal tokens. Ranks of one replica share its seed.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import sys
from collections.abc import Mapping, Sequence

COMPONENT = "ROLLWAY_COMPONENT"
"""The Dynamo component of the worker."""
SEED = "ROLLWAY_SEED"
"""The seed of the model, to which a number of the replica is added."""
_SEEDS = 2**20


def complete_arguments(arguments: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the arguments of a worker with what only its pod knows."""
    given = list(arguments)
    is_headless = "--headless" in given
    if (component := env.get(COMPONENT)) and not is_headless:
        suffix = env.get("DYN_NAMESPACE_WORKER_SUFFIX")
        namespace = "-".join(filter(None, (env.get("DYN_NAMESPACE", "dynamo"), suffix)))
        given += ["--endpoint", f"dyn://{namespace}.{component}.generate"]
    if SEED in env:
        given += ["--seed", str(int(env[SEED]) + number_replica(given, env))]
    return given


def number_replica(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Return a number of this replica, the same in all of its pods.

    The operator tells ranks on several nodes the address of their leader."""
    if "--master-addr" in arguments[:-1]:
        name = arguments[list(arguments).index("--master-addr") + 1]
    else:
        name = env.get("HOSTNAME", "")
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4]) % _SEEDS


def main() -> None:
    """Run MODULE like `python -m MODULE`."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m rollway.engine.pod MODULE ARGUMENTS…")
    sys.argv[:] = complete_arguments(sys.argv[1:], os.environ)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
