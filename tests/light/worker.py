"""Light Dynamo workers as a process.

    python -m tests.light.worker --model PATH --served-model-name NAME \\
        --endpoint dyn://NAMESPACE.COMPONENT.generate [--count K] [--seed N] [--max-model-len N]

Other flags are accepted and ignored, so that the command line of a real worker will do. With
--nnodes, rank 0 serves once all ranks have come to its master port, and a rank with --headless only
holds that connection; neither notices when another one dies, as an idle engine may not. Planes and
ports come from the environment, as everywhere in Dynamo. With --count, K workers live in this one
process, each with a runtime, a system port, routes and weights of its own.

Test hooks, from the environment: LIGHT_STEP_SECONDS (each token takes this long; 0.002),
LIGHT_PREFILL_SECONDS_PER_TOKEN (so does each token of a prompt that is not cached, one prompt
after the other; 0), LIGHT_LOAD_SECONDS (an update takes this much longer; 0), LIGHT_ROUTE_SECONDS
(so does every admin route; 0), LIGHT_PROBE_SECONDS (and every probe of a listing, and the version;
0), LIGHT_BUSY_SECONDS (each turn of the event loop takes this much longer, as with hundreds
of streams; 0), LIGHT_FOREIGN=1 (a worker that Rollway does not manage: it takes no orders, and the
`rollway_*` engine methods are unknown), LIGHT_NO_SLEEP_MODE=1 (the engine may not sleep),
LIGHT_FAULT (`events`: none are published; `salt`: blocks are found under any; `log-probs`: without
the temperature; `generation config`: a request without a temperature gets another than 1), and
LIGHT_LOSE_REGISTRATION=FILE (the worker that can create FILE serves its system port only, like
one whose registration got lost).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop
from dynamo.common.model_taints import register_model_taint_route
from dynamo.common.rl import RLRouteRegistry, register_rl_routes
from dynamo.common.utils.runtime import create_runtime, parse_endpoint
from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime, Endpoint
from dynamo.runtime.logging import configure_dynamo_logging

from tests.light.cache import BLOCK, CAPACITY, FAULT
from tests.light.engine import Engine
from tests.light.routes import AdminRoutes
from tests.light.weights import LightWorker

PROBE_SECONDS = float(os.environ.get("LIGHT_PROBE_SECONDS", "0"))
_EXIT_SECONDS = 3.0
_FLUSH_SECONDS = 0.05
"""For the errors of running requests to reach the frontend before their streams break; Dynamo has
no call that waits for it."""

log = logging.getLogger("light")


class SlowRoutes:
    """Stands in for the runtime where routes are registered; each gets the configured delay."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._seconds = float(os.environ.get("LIGHT_ROUTE_SECONDS", "0"))

    def register_engine_route(self, name: str, handler: Callable[[Any], Awaitable[Any]]) -> None:
        seconds = self._seconds + (PROBE_SECONDS if name == "get_weight_version" else 0.0)

        async def delayed(body: Any) -> Any:
            await asyncio.sleep(seconds)  # the configured delay of every route
            return await handler(body)

        self._runtime.register_engine_route(name, delayed if seconds else handler)


async def keep_busy(seconds: float) -> None:
    """Block every turn of the event loop."""
    while True:
        time.sleep(seconds)  # noqa: ASYNC251 (that is the point)
        await asyncio.sleep(0)  # one turn of the loop


class Worker:
    """One engine on one runtime."""

    def __init__(self, args: argparse.Namespace, index: int) -> None:
        self._args = args
        self.engine = Engine(
            LightWorker(Path(args.model)),
            seed=args.seed + index,
            max_length=args.max_model_len,
            mode=args.disaggregation_mode,
        )
        self.runtime, _ = create_runtime(
            os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
            os.environ.get("DYN_REQUEST_PLANE", "tcp"),
            os.environ.get("DYN_EVENT_PLANE"),
        )

    async def serve(self) -> list[asyncio.Future[None]]:
        """Register everything; the futures end with the worker."""
        namespace, component, name = parse_endpoint(self._args.endpoint)
        generate = self.runtime.endpoint(f"{namespace}.{component}.{name}")
        rl = self.runtime.endpoint(f"{namespace}.{component}.rl")
        registry = RLRouteRegistry(self.runtime, world_size=1)
        routes, admin = SlowRoutes(self.runtime), AdminRoutes(self.engine)
        register_rl_routes(routes, registry, admin.table(), enable_dispatch=True)
        register_model_taint_route(routes, generate)
        if _loses_registration():
            log.error("Unable to register service for discovery")
            return []
        self._publish_kv_events(generate)
        await self._register(generate)
        labels = [("model", self._args.served_model_name)]
        served = [
            generate.serve_endpoint(admin.generate, graceful_shutdown=False, metrics_labels=labels),
            rl.serve_endpoint(
                _slow_probe(registry), graceful_shutdown=False, metrics_labels=labels
            ),
        ]
        self.runtime.set_health_status(True)
        return [asyncio.ensure_future(future) for future in served]

    def _publish_kv_events(self, endpoint: Endpoint) -> None:
        if FAULT == "events":
            return
        publisher = KvEventPublisher(
            endpoint=endpoint, kv_block_size=BLOCK, enable_local_indexer=True
        )

        def stored(tokens: list[int], hashes: list[int], parent: int | None, salt: str) -> None:
            sizes = [BLOCK] * len(hashes)
            publisher.publish_stored(tokens, sizes, hashes, parent, cache_salt=salt or None)

        self.engine.cache.on_stored = stored
        self.engine.cache.on_removed = publisher.publish_removed

    async def _register(self, endpoint: Endpoint) -> None:
        config = ModelRuntimeConfig()
        config.total_kv_blocks = CAPACITY
        config.max_num_seqs = 64
        config.max_num_batched_tokens = 8192
        config.context_length = self.engine.max_length
        config.enable_local_indexer = True
        config.kv_event_publishing_enabled = True
        mode = self._args.disaggregation_mode
        types = {"prefill": (WorkerType.Prefill, [WorkerType.Decode])}
        types["decode"] = (WorkerType.Decode, [WorkerType.Prefill])
        worker_type, needs = types.get(mode, (WorkerType.Aggregated, []))
        answers = ModelType.Prefill if mode == "prefill" else ModelType.Chat | ModelType.Completions
        await register_model(
            ModelInput.Tokens,
            answers,
            endpoint,
            self._args.model,
            self._args.served_model_name,
            worker_type=worker_type,
            needs=[needs] if needs else None,
            kv_cache_block_size=BLOCK,
            runtime_config=config,
        )


async def run(args: argparse.Namespace) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if args.nnodes > 1:
        await meet_ranks(args)
    if args.headless:
        await stopping.wait()
        return
    os.environ.setdefault("DYN_SYSTEM_PORT", "0")  # Dynamo's default is to have no such server
    workers: list[Worker] = []
    serving: list[asyncio.Future[None]] = []
    for index in range(args.count):
        if index == 1:
            os.environ["DYN_SYSTEM_PORT"] = "0"  # the one that was given is taken
        workers.append(Worker(args, index))
        serving += await workers[-1].serve()
        if stopping.is_set():
            break
    for future in serving:
        future.add_done_callback(_report_end)
    busy_seconds = float(os.environ.get("LIGHT_BUSY_SECONDS", "0"))
    busy = asyncio.create_task(keep_busy(busy_seconds)) if busy_seconds else None
    log.info("%d light workers serve %s", len(workers), args.served_model_name)
    await stopping.wait()
    if busy is not None:
        busy.cancel()
    for worker in workers:
        worker.engine.close()
    await asyncio.sleep(_FLUSH_SECONDS)
    for worker in workers:
        worker.runtime.shutdown()
    if serving:
        await asyncio.wait(serving, timeout=_EXIT_SECONDS)


async def meet_ranks(args: argparse.Namespace) -> None:
    """Return when all ranks of this replica are connected to its rank 0."""
    if args.headless:
        while True:
            try:
                _, writer = await asyncio.open_connection(args.master_addr, args.master_port)
            except OSError:
                await asyncio.sleep(0.05)  # rank 0 does not listen yet
                continue
            log.info("rank %d is connected", args.node_rank)
            args.connection = writer  # kept open
            return
    ranks: asyncio.Queue[object] = asyncio.Queue()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ranks.put(writer)

    args.server = await asyncio.start_server(accept, args.master_addr, args.master_port)
    args.connections = [await ranks.get() for _ in range(args.nnodes - 1)]


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--endpoint")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-model-len", type=int)
    modes = ("agg", "prefill", "decode")
    parser.add_argument("--disaggregation-mode", choices=modes, default="agg")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=29501)
    parser.add_argument("--headless", action="store_true")
    return parser.parse_known_args(argv)[0]


def main() -> None:
    args = parse_args(sys.argv[1:])
    configure_dynamo_logging()
    uvloop.run(run(args))
    # The runtimes' threads have nothing left to do, and some take seconds to notice.
    sys.stdout.flush()
    os._exit(0)


def _slow_probe(registry: RLRouteRegistry) -> Callable[..., AsyncIterator[Any]]:
    """What the frontend asks of each worker when it lists them."""

    async def dispatch(request: Any = None) -> AsyncIterator[Any]:
        await asyncio.sleep(PROBE_SECONDS)
        async for answer in registry.dispatch_stream(request):
            yield answer

    return dispatch


def _loses_registration() -> bool:
    marker = os.environ.get("LIGHT_LOSE_REGISTRATION")
    if not marker:
        return False
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _report_end(future: asyncio.Future[None]) -> None:
    # As in Dynamo itself: an endpoint that fails to register ends, and the process lives on.
    if not future.cancelled() and future.exception() is not None:
        log.error("an endpoint ended: %s", future.exception())


if __name__ == "__main__":
    main()
