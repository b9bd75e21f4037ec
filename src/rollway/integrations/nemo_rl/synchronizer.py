"""`Synchronizer`: NeMo-RL's WeightSynchronizer, over `Fleet.refit`.

    sync_weights():  choose a version ─► the policy's ranks publish it ─► refit of every live worker
                                                                            │
                     the ranks complete it ◄── all serve and prove it ──────┤
                     the ranks cancel it, raise with the report ◄── else ───┘

NeMo-RL uses one number for two sets of weights in one step, and begins again at 0 after a resume.
So versions are counted here: each is above all that the stack knows, served or only claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

from rollway.errors import RollwayError, UsageError
from rollway.fleet.report import RefitReport
from rollway.fleet.workers import Worker
from rollway.integrations.nemo_rl.config import OWN_CATALOG, WeightSync
from rollway.integrations.nemo_rl.generation import Generation
from rollway.integrations.nemo_rl.publish import ENGINE, PublishOptions, Scales
from rollway.integrations.nemo_rl.stock import StockUpdate, StockWire
from rollway.observe import end_step
from rollway.weights.offer import Offer, parse_offer

log = logging.getLogger(__name__)

_TRIES = 2
_LISTING_SECONDS = 15.0
_NEW_WEIGHTS = ""
"""Stands for weights that no version names yet."""
_CANCEL_SECONDS = 10.0
"""How long ranks may take to stop: one that waits for a dead one in a collective never does."""
_BUCKET_BYTES = 1 << 30
EXPERT_PATTERN = "NRL_MX_EXPERT_TENSOR_PATTERN"
"""Environment variable of NeMo-RL's ModelExpress work: part of the names of experts."""
TIMER = "prepare_for_generation/transfer_and_update_weights"
"""The name under which NeMo-RL's timers know a refit."""


class Synchronizer:
    """Refits the workers of a `Generation` with the weights of a policy.

    Only the driver's `Generation` has one: a copy in another process refits nothing."""

    def __init__(
        self,
        policy: Any,
        generation: Generation,
        sync: WeightSync | None = None,
        *,
        refit_timeout_s: float | None = None,
        get: Callable[[list[Any]], list[Any]] | None = None,
    ) -> None:
        """`get` waits for what the policy's workers answer; by default it is of Ray."""
        if generation.is_copy:
            raise UsageError(
                "This Generation is a copy in another process, which refits nothing.",
                "Refit in the driver, with the Generation that opened the stack.",
            )
        self._policy, self._generation = policy, generation
        self._sync = sync or generation.dynamo_cfg.weight_sync
        self._seconds = refit_timeout_s or generation.dynamo_cfg.refit_timeout_s
        if self._seconds is None and self._sync.mx_config.enabled:
            self._seconds = self._sync.mx_config.timeout_seconds
        self._get = get
        self._deadline: float | None = None
        self._last = self._steps = 0
        self._is_stale = True
        self._is_open = False
        self._wire = StockWire(self._call)
        self.report: RefitReport | None = None
        """The last refit."""

    @property
    def is_stale(self) -> bool:
        """Whether the workers may serve older weights than the policy has."""
        return self._is_stale

    def mark_stale(self) -> None:
        self._is_stale = True

    def init_communicator(self) -> None:
        """Tell every rank of the policy how to publish."""
        if self._is_open:
            return
        options = self._make_options().as_plain()
        workers = len(self._policy.worker_group.workers)
        if self._sync.shards:
            self._call("open", options=options, world=workers)
            if not options["catalog"] and (url := "".join(self._call("catalog"))):
                self._call("use_catalog", url=url)
        else:
            size = options.pop("bucket_bytes") or _BUCKET_BYTES
            self._call(
                "init_checkpoint_engine",
                backend=ENGINE,
                bucket_size_bytes=size,
                engine_kwargs=options,
            )
            self._call(
                "init_checkpoint_engine_process_group",
                train_world_size=workers,
                rollout_world_size=0,
                metadata=[],
            )
        self._is_open = True

    def sync_weights(
        self, *, timer: Any = None, kv_scales: Scales | None = None
    ) -> dict[str, float]:
        """Publish the policy's weights, and return when every live worker serves them.

        Args:
            timer: NeMo-RL's, for the time that this takes.
            kv_scales: the scales of an FP8 KV cache, which become part of the version.

        Raises:
            UsageError: what the engines cannot serve; none of them was touched.
            RefitError: not every worker serves the version; its `report` says which do.
            RollwayError: the refit took longer than its deadline.
        """
        scales = {name: float(value) for name, value in (kv_scales or {}).items()}
        self._check_scales(scales)
        self._is_stale = True
        self.init_communicator()
        began = time.monotonic()
        self._deadline = None if self._seconds is None else began + self._seconds
        with timer.time(TIMER) if timer is not None else contextlib.nullcontext():
            if self._sync.method == "nccl":
                nbytes, report = self._refit_stock(began)
            else:
                nbytes, report = self._refit(began, scales)
        self._is_stale = False
        self.report = report
        seconds = time.monotonic() - began
        # NeMo-RL does not tell its number: it refits once before its first step, then after each.
        end_step(self._steps, publish=seconds)
        self._steps += 1
        figures = describe_refit(report, nbytes, seconds)
        self._generation.note_refit(figures)
        return figures

    def shutdown(self) -> None:
        """Close the publishers of the policy's ranks."""
        if self._is_open:
            self._is_open = False
            self._deadline = None
            try:
                self._call("close" if self._sync.shards else "finalize_checkpoint_engine")
            except RollwayError as error:  # a rank that is dead has closed everything
                log.warning("the policy's publishers were not all closed: %s", error.message)

    # --- one refit -----------------------------------------------------------------------------

    def _check_scales(self, scales: Scales) -> None:
        if scales and self._sync.method == "nccl":
            raise UsageError(
                f"The trainer sends {len(scales)} scales of an FP8 KV cache, and workers without "
                "Rollway's extension set none.",
                "Give the workers the extension, and use another cluster.weight_sync.method.",
            )
        if scales and not self._generation.requires_kv_scale_sync:
            raise UsageError(
                f"The trainer sends {len(scales)} scales of an FP8 KV cache, and the engines have "
                "another cache.",
                "Set policy.generation.vllm_cfg.kv_cache_dtype to fp8, and start the engines so.",
            )
        for name, value in scales.items():
            if not (math.isfinite(value) and value > 0):
                raise UsageError(
                    f"The scale {name} is {value!r}, and a scale is a positive number.",
                    "Look at the trainer's calibration of the KV cache.",
                )

    def _refit_stock(self, began: float) -> tuple[int, RefitReport]:
        """Refit workers without Rollway's extension."""
        connection = self._generation.connection
        version, _ = connection.run(self._choose_version())
        try:
            update = connection.run(self._wire.prepare(connection.fleet))
            return self._wire.nbytes, connection.run(self._run_refit(version, update, began))
        except BaseException:
            self._wire.forget()
            raise

    def _refit(self, began: float, scales: Scales) -> tuple[int, RefitReport]:
        connection = self._generation.connection
        for _ in range(_TRIES):
            version, receivers = connection.run(self._choose_version())
            try:
                offer = self._publish(version, receivers, scales)
                counted = offer.where.get("receivers")
                if counted is not None and counted != connection.run(self._count_receivers()):
                    # A broadcast would wait for a rank that left, or leave out one that came.
                    self._cancel()
                    continue
                report = connection.run(self._run_refit(version, offer, began))
            except BaseException:
                self._cancel()
                raise
            self._call("complete", version=version)
            return offer.nbytes, report
        raise RollwayError(
            "The number of engine ranks changed twice during one update of the weights.",
            "Look at the workers' logs for engines that restart again and again.",
        )

    async def _choose_version(self) -> tuple[int, int]:
        """Return the next version, and how many ranks receive it."""
        fleet = self._generation.connection.fleet
        await fleet.read_versions()
        # Also above one that a killed driver has claimed, and that no worker serves.
        self._last = max(self._last + 1, await fleet.choose_version(_NEW_WEIGHTS))
        return self._last, await self._count_receivers()

    async def _count_receivers(self) -> int:
        connection = self._generation.connection
        return await connection.stack.count_receivers(connection.model)

    def _publish(self, version: int, receivers: int, scales: Scales) -> Offer:
        if self._sync.shards:
            raw = self._call("publish", version=version, kv_scales=scales)
            offers = [parse_offer(each) for each in raw]
            if offers[0].transport != "shm":
                return offers[0]  # the catalog has the parts of all ranks
            from rollway.weights.transports.shm import join_offers

            return join_offers(offers)
        self._call("begin", version=version, receivers=receivers, kv_scales=scales)
        # Without the scales: NeMo-RL's DTensor workers refuse them, and `Engine` adds them itself.
        self._call("send_weights_via_checkpoint_engine", kv_scales=None)
        first, *others = [count or 0 for count in self._call("count_drafts")]
        if any(count > first for count in others):
            raise UsageError(
                "The draft model is on a later pipeline stage than the rank that publishes.",
                "Set cluster.weight_sync.shards to true, or pipeline_model_parallel_size to 1.",
            )
        raw = [each for each in self._call("take_offer") if each is not None]
        return parse_offer(raw[0])

    async def _run_refit(
        self, version: int, weights: Offer | StockUpdate, began: float
    ) -> RefitReport:
        connection, dynamo = self._generation.connection, self._generation.dynamo_cfg
        left = None if self._seconds is None else self._seconds - (time.monotonic() - began)
        known: list[Worker] = []
        with contextlib.suppress(RollwayError):  # the refit lists them again, and has patience
            known = await connection.fleet.workers(fresh=False)

        async def run() -> RefitReport:
            options: dict[str, Any] = {"model": connection.model, "mode": dynamo.refit_mode}
            try:
                return await connection.stack.refit(version, weights, allow_cast=True, **options)
            finally:
                if isinstance(weights, StockUpdate):
                    weights.close()  # at once: the fleet's watch must not send it to a joiner

        refit = asyncio.create_task(run())
        silent = ""
        try:
            if (await asyncio.wait({refit}, timeout=left))[0]:
                return refit.result()
            silent = await self._list_silent(known)  # before a worker in doubt is replaced
        finally:
            refit.cancel()
            await asyncio.gather(refit, return_exceptions=True)
        if not refit.cancelled() and refit.exception() is None:
            return refit.result()  # it was done when the deadline came
        raise RollwayError(
            f"The refit to version {version} took longer than {self._seconds:g} s.{silent}",
            "Workers in doubt stay paused. Raise refit_timeout_s, or see `rollway fleet ls`.",
        ) from (None if refit.cancelled() else refit.exception())

    async def _list_silent(self, known: list[Worker]) -> str:
        """Return a sentence that names the workers that do not answer; "" if all do."""
        try:
            async with asyncio.timeout(_LISTING_SECONDS):
                listed = await self._generation.connection.fleet.workers()
        except (RollwayError, TimeoutError) as error:
            return f" The workers cannot be listed: {error or 'the listing does not answer'}."
        # A listing has no address for a worker that does not answer.
        names = {worker.instance_id: str(worker) for worker in known}
        silent = [
            names.get(worker.instance_id, str(worker))
            for worker in listed
            if worker.error is not None
        ]
        return f" No answer from {', '.join(silent)}." if silent else ""

    def _call(self, method: str, **kwargs: Any) -> list[Any]:
        """Call every rank of the policy, and return their answers.

        Raises:
            RollwayError: a rank failed or is dead.
        """
        if self._sync.shards:
            name, fields = "rollway_rpc", {"method": method, "kwargs": kwargs}
        else:
            name = "checkpoint_engine_rpc"
            fields = {"checkpoint_method": method, "method_kwargs": kwargs}
        try:
            refs = self._policy.worker_group.run_all_workers_single_data(name, **fields)
            return self._get(refs) if self._get else _get_from_ray(refs, self._deadline)
        except RollwayError:
            raise
        except Exception as error:
            cause = str(error) or type(error).__name__
            raise RollwayError(
                f"The policy's ranks failed in `{method}`: {cause}.",
                "Look at the logs of NeMo-RL's policy workers.",
            ) from error

    def _cancel(self) -> None:
        """Tell the ranks to stop sending. What failed before is the cause, not this."""
        deadline, self._deadline = self._deadline, time.monotonic() + _CANCEL_SECONDS
        try:
            self._call("cancel")
        except RollwayError as error:
            log.warning("the policy's ranks were not all told to stop: %s", error.message)
        finally:
            self._deadline = deadline  # the next try has what is left of the refit's time

    def _make_options(self) -> PublishOptions:
        connection, mx = self._generation.connection, self._sync.mx_config
        workers = connection.run(connection.fleet.workers())
        return PublishOptions(
            method=self._sync.method,
            stack=connection.stack.name or "attached",
            secret=connection.secret,
            model=connection.stack.find_checkpoint(connection.model) or connection.model,
            admin_urls=tuple(worker.admin_url for worker in workers),
            engine_ranks=max((worker.world_size for worker in workers), default=1),
            directory=self._sync.directory,
            bucket_bytes=self._sync.bucket_bytes,
            keep=mx.retain_latest_k,
            fanout=mx.enabled and mx.tree_scale_out,
            **self._find_catalogs(),
            roles=mx.megatron_role_overrides,
            expert_pattern=os.environ.get(EXPERT_PATTERN, ""),
            same_rank=mx.enabled and mx.same_rank_only,
            nic_pin=mx.nic_pin if mx.enabled else "off",
        )

    def _find_catalogs(self) -> dict[str, Any]:
        """Return where versions are announced besides the catalog of the trainer's rank 0: at one
        of Rollway's that runs elsewhere, or at a ModelExpress server."""
        mx, model = self._sync.mx_config, self._generation.connection.model
        if not mx.enabled:
            return {}
        if mx.mx_server_url.startswith(OWN_CATALOG):
            return {"catalog": f"http://{mx.mx_server_url.removeprefix(OWN_CATALOG)}"}
        # Versions count from 1 in each run, and the server remembers those of earlier runs.
        run = secrets.token_hex(8)
        return {"modelexpress": {"server": mx.mx_server_url, "model": model, "run": run}}


def describe_refit(report: RefitReport, nbytes: int, seconds: float) -> dict[str, float]:
    """Return the figures of a refit; NeMo-RL logs them as `refit/NAME`."""
    return {
        "seconds": seconds,
        "pause_seconds": report.paused_seconds,
        "bytes": float(nbytes),
        "gb_per_s": nbytes / 1e9 / seconds,
        "workers": float(report.serving),
        "passes": float(report.passes),
        "version": float(report.version),
    }


def _get_from_ray(refs: list[Any], deadline: float | None) -> list[Any]:
    """Return what all ranks answer, or raise the first failure at once, with the rank that died or
    those that are late."""
    import ray

    pending = list(refs)
    while pending:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not done:
            late = ", ".join(str(refs.index(ref)) for ref in pending)
            raise TimeoutError(f"ranks that did not answer in time: {late}")
        try:
            ray.get(done)
        except ray.exceptions.RayActorError as error:
            # Ray's own text is a page, and does not know the rank.
            rank = refs.index(done[0])
            raise RuntimeError(f"rank {rank} is dead ({type(error).__name__})") from error
    return list(ray.get(refs))
