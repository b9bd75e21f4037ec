"""An allow-list for the RPC of the engine.

`collective_rpc` runs any method of the worker by its name, or a pickled function. One method saves
the weights to a file, another changes the environment. With this list the worker runs only what the
engine needs, what Dynamo's routes call, and the methods of the extension; it refuses and logs the
rest.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

ENGINE_METHODS = frozenset(
    {
        # start and stop
        "init_worker", "init_device", "load_model", "determine_available_memory",
        "get_kv_cache_spec", "get_supported_kv_cache_layouts", "set_kv_cache_layout",
        "initialize_from_config", "compile_or_warm_up_model", "update_max_model_len",
        "get_supported_tasks", "get_kv_connector_handshake_metadata", "adjust_rank",
        "supports_draft_weight_updates", "check_health", "shutdown",
        # a step
        "execute_model", "sample_tokens", "execute_dummy_batch", "take_draft_token_ids",
        "synchronize_device",
        # what Dynamo's admin routes do; they take signed orders
        "liveness_probe", "sleep", "wake_up", "discard", "profile", "reload_weights",
        "reset_mm_cache", "reset_encoder_cache", "elastic_ep_execute", "handle_ft_command",
        "add_lora", "remove_lora", "pin_lora", "list_loras",
        # Dynamo's own start
        "fpm_gc_stop", "finish_benchmark_kda_state",
    }
)  # fmt: skip
"""For vLLM 0.31 and Dynamo 1.6. Left out on purpose: `update_environment_variables`,
`save_sharded_state`, `apply_model`, and vLLM's own weight transfer, which checks no signature."""

_LAST_OF_START = "compile_or_warm_up_model"
_WORKER_BASE = "vllm.v1.worker.worker_base"
_MULTIPROCESS = "vllm.v1.executor.multiproc_executor"
_UNIPROCESS = "vllm.v1.executor.uniproc_executor"


class MethodRefused(RuntimeError):
    """The engine's RPC named a method that is not on the list."""


def in_worker_process() -> bool:
    """Return whether this process runs a vLLM worker, and not, for example, a test."""
    return _WORKER_BASE in sys.modules


def check_method(worker: Any, method: Any, extension: type) -> None:
    """Raise `MethodRefused` unless the RPC may run this method of this worker."""
    if isinstance(method, str):
        if method in ENGINE_METHODS or _is_extension_method(worker, method, extension):
            return
        name = repr(method)
    else:
        name = "a pickled function"
    log.warning("refused the engine RPC %s", name)
    raise MethodRefused(
        f"Rollway does not let the engine's RPC run {name}; put it into a class that derives from "
        "rollway.engine.worker.WorkerExtension, and start the worker with that class"
    )


def _is_extension_method(worker: Any, method: str, extension: type) -> bool:
    """Return whether the method belongs to the extension, or to a user's class derived from it."""
    classes = type(getattr(worker, "worker", worker)).__mro__
    # vLLM adds the extension to the bases of its own worker class, which then derives from it too.
    engine = getattr(sys.modules.get(_WORKER_BASE), "WorkerBase", object)
    ours = {
        part
        for cls in classes
        if issubclass(cls, extension) and not issubclass(cls, engine)
        for part in cls.__mro__
    } | {extension}
    for cls in classes:
        if method in vars(cls):
            return cls in ours and not method.startswith("_")
    # The wrapper around the worker has methods too. For an unknown name, the engine raises its own
    # error, which callers recognise.
    return not hasattr(worker, method)


def guard_rpc(extension: type, when_up: Callable[[Any], None]) -> None:
    """Check every RPC of this process from now on; call `when_up` with the worker when its engine
    is up."""
    if not {_MULTIPROCESS, _UNIPROCESS} & sys.modules.keys():
        log.warning("unknown vLLM executor: its RPC methods are not restricted")
    if _MULTIPROCESS in sys.modules:
        _guard_multiprocess(sys.modules[_MULTIPROCESS], extension, when_up)
    if _UNIPROCESS in sys.modules:
        _guard_uniprocess(sys.modules[_UNIPROCESS], extension, when_up)


def _guard_multiprocess(module: Any, extension: type, when_up: Callable[[Any], None]) -> None:
    execute = getattr(module.WorkerProc, "_execute_worker_rpc", None)
    if execute is None:
        log.warning("this vLLM runs RPCs differently: its methods are not restricted")
        return

    def check_and_execute(proc: Any, request: tuple[Any, ...]) -> None:
        method, *rest = request
        try:
            check_method(proc.worker, method, extension)
        except MethodRefused as refusal:
            # The engine waits for an answer of every rank, so raise where it expects errors.
            proc.worker.worker._rollway_refusal = refusal
            request = ("rollway_refuse", (), {}, rest[-1])
        execute(proc, request)
        if method == _LAST_OF_START:
            when_up(proc.worker.worker)

    module.WorkerProc._execute_worker_rpc = check_and_execute


def _guard_uniprocess(module: Any, extension: type, when_up: Callable[[Any], None]) -> None:
    run = getattr(module, "run_method", None)
    if run is None:
        log.warning("this vLLM runs RPCs differently: its methods are not restricted")
        return

    def check_and_run(worker: Any, method: Any, args: Any, kwargs: Any) -> Any:
        check_method(worker, method, extension)
        result = run(worker, method, args, kwargs)
        if method == _LAST_OF_START:
            when_up(getattr(worker, "worker", worker))
        return result

    module.run_method = check_and_run
