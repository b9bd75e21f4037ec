"""Publishing from the ranks of NeMo-RL's policy.

    driver (`Synchronizer`)                     every rank of the policy
    open(options, catalog)          ─────────►  RankPublisher: its publisher, at the first version
    publish(version, receivers)     ─────────►  gathered: rank 0 publishes, the others only take
                                                part in gathering; shards: each publishes its own
      ◄── one offer, or one of each rank ─────
    refit of the fleet
    complete(version) or cancel()   ─────────►  the trainer may change its weights again

A version is the policy's weights and what belongs to them: those of a draft model, which NeMo-RL
exports as `draft.NAME`, and the scales of an FP8 KV cache, which the driver brings.

There are two ways to a rank. NeMo-RL's hook for checkpoint engines gathers tensors with Hugging
Face names, one at a time (`Engine`, named `module:ClassName`). A worker class with
`ShardPublishing` publishes what each rank holds, without gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rollway.errors import UsageError
from rollway.publishing import find_addresses
from rollway.weights.transports.base import Publisher, Source
from rollway.weights.transports.choose import Destination, TransportName, open_publisher

ENGINE = "rollway.integrations.nemo_rl.publish:Engine"
"""How NeMo-RL's policy workers find the engine."""
SHARDED = ("shm", "nixl")
"""Transports that carry shards of several ranks."""
DRAFT = "draft."
"""Before the names of a draft model's tensors, in NeMo-RL and in Rollway's engines."""
Scales = Mapping[str, float]
"""The scales of an FP8 KV cache, by the names that NeMo-RL gives them."""


@dataclass(frozen=True)
class PublishOptions:
    """What a rank must know to publish; it travels through Ray as plain values."""

    method: str
    stack: str
    secret: str = field(repr=False)
    model: str
    """The checkpoint that the engines started from."""
    admin_urls: tuple[str, ...]
    """The workers' addresses: whether they run on this rank's machine decides the transport."""
    engine_ranks: int = 1
    directory: str | None = None
    bucket_bytes: int | None = None
    keep: int = 2
    fanout: bool = False
    catalog: str = ""
    """For nixl: a catalog that runs elsewhere."""
    modelexpress: Mapping[str, str] = field(default_factory=dict)
    """For nixl: server, model and run, if a ModelExpress server records the versions."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """How Megatron's ranks share parameters that Rollway does not know, by patterns of names."""
    expert_pattern: str = ""
    """Part of the name of the modules that have Megatron's experts, if it is another."""
    same_rank: bool = False
    """For nixl: an engine's rank reads from the trainer's rank of the same number alone."""
    nic_pin: str = "off"
    """For nixl: the NICs of a rank; `auto` for those of its GPU's NUMA node."""

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)


def _choose_nics(pin: str) -> tuple[str, ...]:
    """Return the NICs of this process, which NeMo-RL has given one GPU, or none."""
    import torch

    from rollway.weights.transports.nixl.agent import choose_devices

    device = "cuda" if torch.cuda.is_available() else "cpu"
    index = torch.cuda.current_device() if device == "cuda" else 0
    return choose_devices(pin, torch.device(device, index))


class RankPublisher:
    """Publishes the versions of one rank; it keeps its memory and connections between them."""

    def __init__(self, options: PublishOptions, rank: int, world: int) -> None:
        """Open nothing yet: before the first version, the transport may not be known."""
        self._options, self._rank, self._world = options, rank, world
        self._publisher: Publisher | None = None

    def open_catalog(self) -> str:
        """Open this rank's publisher, and return the address of its catalog, where other ranks
        announce their shards; "" for a transport without one."""
        publisher: Any = self._open(is_shard=True)
        return str(publisher.catalog_url) if publisher.transport == "nixl" else ""

    def use_catalog(self, url: str) -> None:
        """Announce shards at another rank's catalog, from the first version on."""
        self._options = replace(self._options, catalog=url)

    def publish(self, version: int, receivers: int, source: Source) -> dict[str, Any]:
        """Publish whole tensors of the policy."""
        publisher = self._open(is_shard=False)
        publisher.expect(receivers)
        return publisher.publish(version, source).as_json()

    def publish_shards(self, version: int, source: Source) -> dict[str, Any]:
        """Publish what this rank holds."""
        return self._open(is_shard=True).publish(version, source).as_json()

    def complete(self, version: int) -> None:
        """Wait until the workers need the published memory no more."""
        if self._publisher is not None:
            self._publisher.wait(version)

    def cancel(self) -> None:
        """Stop sending: a broadcast would wait for receivers that never come."""
        if self._publisher is not None:
            self._publisher.cancel()

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _open(self, *, is_shard: bool) -> Publisher:
        if self._publisher is None:
            options = self._options
            addresses, own = find_addresses(options.admin_urls)
            destination = Destination(
                stack=options.stack,
                secret=options.secret,
                model=options.model,
                addresses=addresses,
                address=own,
                engine_ranks=options.engine_ranks,
            )
            transport = self._choose(is_shard, destination)
            self._publisher = open_publisher(
                transport,
                destination,
                directory=self._make_directory(),
                temporary=options.directory is None,
                bucket_bytes=options.bucket_bytes,
                **(self._list_nixl_options(is_shard) if transport == "nixl" else {}),
            )
        return self._publisher

    def _choose(self, is_shard: bool, destination: Destination) -> TransportName | Any:
        method = self._options.method
        if not is_shard:
            return method
        if method == "auto":
            return "shm" if destination.is_local else "nixl"
        if method not in SHARDED:
            raise UsageError(
                f"The {method} transport carries whole tensors, and this rank holds shards.",
                "Set cluster.weight_sync.method to shm or nixl, or its `shards` to false.",
            )
        return method

    def _make_directory(self) -> Any:
        """Return the directory of files and delta; a temporary one ends with this process."""
        import tempfile
        from pathlib import Path

        if self._options.method not in ("files", "delta"):
            return None
        if self._options.directory is not None:
            # Versions count from 1 in each run, so each has a directory of its own.
            return Path(self._options.directory) / self._options.stack
        return Path(tempfile.mkdtemp(prefix="rollway-weights-"))

    def _list_nixl_options(self, is_shard: bool) -> dict[str, Any]:
        options = self._options
        extra: dict[str, Any] = {"keep": options.keep, "fanout": options.fanout}
        extra["same_rank"] = options.same_rank
        if devices := _choose_nics(options.nic_pin):
            extra["net_devices"] = devices
        if is_shard:
            extra |= {"rank": self._rank, "world": self._world}
        if options.catalog:
            extra["catalog"] = options.catalog
        if options.modelexpress:
            extra["modelexpress"] = options.modelexpress
        return extra


def make_scale_tensors(scales: Scales, device: Any) -> Iterator[tuple[str, Any]]:
    """Yield the scales of a KV cache as tensors, under the names that engines know them by. They
    are on the device of the weights: a transport may read from one device only."""
    if not scales:
        return
    import torch

    from rollway.engine.companions import SCALE

    for name, value in scales.items():
        yield f"{SCALE}{name}", torch.tensor([value], dtype=torch.float32, device=device)


class Engine:
    """A checkpoint engine for NeMo-RL's public hook, which gives it the policy's tensors with
    Hugging Face names. The first rank publishes them; gathering needs all ranks.

    NeMo-RL calls the first group of methods, `Synchronizer` the second, by name."""

    shard_expert_weights = False

    def __init__(self, bucket_size: int, **options: Any) -> None:
        self._options = PublishOptions(**{"bucket_bytes": bucket_size, **options})
        self._publisher: RankPublisher | None = None
        self._next = (0, 0)
        self._scales: Scales = {}
        self._drafts = 0
        self._offer: dict[str, Any] | None = None
        self._sender: Any = None
        """For workers without Rollway's extension, a `VllmGroupSender`."""
        self._is_listing = False
        self._tensors: list[Any] = []

    def prepare(self) -> dict[str, Any]:
        return {}

    def get_target_weight_layout(self) -> None:
        """Return None: the engines cut the tensors themselves."""

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, **_: Any
    ) -> None:
        """Note this worker's rank: only the first publishes."""
        if worker_rank != 0:
            return
        if self._options.method == "nccl":
            from rollway.weights.transports.vllm_group import VllmGroupSender

            self._sender = VllmGroupSender(self._options.bucket_bytes)
        else:
            self._publisher = RankPublisher(self._options, worker_rank, train_world_size)

    def init_rollout_process_group(self, **_: Any) -> None:
        raise UsageError("Rollway's engines receive weights without a checkpoint engine.")

    async def send_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Publish the tensors; on other ranks walk through them, because each step gathers one."""
        if self._is_listing:
            from rollway.weights.transports.vllm_group import TensorInfo

            self._tensors = [TensorInfo.of(name, tensor) for name, tensor in weights]
            return
        if self._sender is not None:
            self._sender.send(weights, self._tensors)
            return
        source = self._complete(weights)
        if self._publisher is None:
            for _ in source:
                pass
            return
        version, receivers = self._next
        # In this thread: gathering uses the thread's GPU, and blocks the others' collectives.
        self._offer = self._publisher.publish(version, receivers, source)

    def _complete(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the weights, count those of a draft model, and add the scales of the KV cache."""
        device = None
        for name, tensor in weights:
            self._drafts += name.startswith(DRAFT)
            device = tensor.device
            yield name, tensor
        yield from make_scale_tensors(self._scales, device)

    async def receive_weight_batches(self) -> Any:
        raise UsageError("Rollway's engines receive weights without a checkpoint engine.")
        yield  # a generator, as NeMo-RL's contract has it

    def finalize(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        if self._sender is not None:
            self._sender.leave()

    def begin(
        self,
        version: int,
        receivers: int,
        kv_scales: Scales | None = None,
        *,
        is_listing: bool = False,
    ) -> None:
        """Note the version that `send_weights` publishes next, or that it shall only list the
        tensors."""
        self._next, self._offer = (version, receivers), None
        self._scales, self._drafts = kv_scales or {}, 0
        self._is_listing = is_listing

    def list_tensors(self) -> list[tuple[str, str, list[int], int]]:
        """Return names, dtypes, shapes and bytes of the policy's tensors, in the order of the
        export."""
        return [tuple(info) for info in self._tensors]

    def make_id(self) -> dict[str, Any] | None:
        """Return what receivers need to join a group with the first rank; None on the others."""
        return None if self._sender is None else self._sender.make_id()

    def join_group(self, nccl_unique_id_b64: str, world: int) -> None:
        if self._sender is not None:
            self._sender.join(nccl_unique_id_b64, world)

    def count_drafts(self) -> int:
        """Return how many tensors of a draft model this rank saw: on a later pipeline stage they
        are not seen by the rank that publishes."""
        return self._drafts

    def take_offer(self) -> dict[str, Any] | None:
        """Return the offer of the version that was published; None on the other ranks."""
        return self._offer

    def complete(self, version: int) -> None:
        if self._publisher is not None:
            self._publisher.complete(version)

    def cancel(self) -> None:
        if self._publisher is not None:
            self._publisher.cancel()


class ShardPublishing:
    """Lets a policy worker publish what its rank holds: a base for worker classes
    (`worker_extension_cls_fqn`), which have `model` and `rank`. `workers` has those of NeMo-RL.

        @ray.remote
        class Worker(ShardPublishing, DTensorPolicyWorkerV2Impl): ...
    """

    model: Any
    rank: int
    rollway_roles: Mapping[str, str]
    rollway_experts: str
    """As in `PublishOptions`."""

    def list_shards(self) -> Source:
        """Return what this rank holds: local parts of DTensors."""
        from rollway.weights.sources import from_module

        return from_module(self.model)

    def stream_weights_via_mx(
        self, *, version: int, mx_config: Any, kv_scales: Scales | None = None
    ) -> None:
        """Publish nothing yet, under the name that NeMo-RL's ModelExpress work calls before
        `Generation.update_weights_via_mx`: there `Synchronizer` has every rank publish."""
        if kv_scales:
            raise UsageError(
                f"The trainer sends {len(kv_scales)} scales of an FP8 KV cache, and the calls of "
                "NeMo-RL's ModelExpress work do not bring them to the refit.",
                "Refit by refit_policy_generation, or Synchronizer.sync_weights(kv_scales=…).",
            )

    def rollway_rpc(self, method: str, kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run one of the calls of `Synchronizer`."""
        calls: dict[str, Callable[..., Any]] = {
            "open": self._open_publisher,
            "catalog": lambda: self._rollway.open_catalog() if self.rank == 0 else "",
            "use_catalog": lambda url: self._rollway.use_catalog(url) if self.rank else None,
            "publish": self._publish,
            "complete": lambda version: self._rollway.complete(version),
            "cancel": lambda: self._rollway.cancel(),
            "close": lambda: self._rollway.close(),
        }
        return calls[method](**(kwargs or {}))

    def _publish(self, version: int, kv_scales: Scales | None = None) -> dict[str, Any]:
        from rollway.weights.sources import hold_whole

        held: list[Any] = list(self.list_shards())
        scales = make_scale_tensors(kv_scales or {}, held[0].tensor.device)
        held += [hold_whole(name, scale, owned_here=self.rank == 0) for name, scale in scales]
        return self._rollway.publish_shards(version, held)

    def _open_publisher(self, options: Mapping[str, Any], world: int) -> None:
        self._rollway = RankPublisher(PublishOptions(**options), self.rank, world)
        self.rollway_roles = options.get("roles", {})
        self.rollway_experts = options.get("expert_pattern", "")
