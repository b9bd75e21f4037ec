"""Fields of a spec that contradict each other: each check raises ValueError with the cause and the
fix."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollway.ranks import merge_runtime_envs, normalise_option

if TYPE_CHECKING:
    from rollway.config import StackSpec


def check_launcher(spec: StackSpec) -> None:
    """Check what only a launcher reads or fills in."""
    for model in spec.models:
        try:
            merge_runtime_envs(spec.runtime_env, model.runtime_env)
        except ValueError as error:
            raise ValueError(
                f"the runtime_env of `{model.name}` over the stack's: {error}"
            ) from None
    if spec.launcher == "ray" and (spec.join is not None or spec.placed is not None):
        raise ValueError(
            "`launcher: ray` fills in `join` and `placed` itself; remove them from the stack"
        )
    roles = {model.name: model.roles for model in spec.models}
    seen = set()
    for worker in spec.placed or ():
        if worker.model not in roles:
            raise ValueError(f"`placed` names the model `{worker.model}`, which is not served")
        if worker.role not in roles[worker.model]:
            known = " and ".join(f"`{role}`" for role in roles[worker.model] if role)
            raise ValueError(
                f"`placed` has a worker of `{worker.model}` in the role `{worker.role}`; "
                f"the roles of this model are {known or 'not apart'}"
            )
        key = (worker.model, worker.role, worker.replica, worker.node_rank)
        if key in seen:
            raise ValueError(
                f"`placed` has replica {worker.replica} of `{worker.model}` twice; keep one"
            )
        seen.add(key)


def check_router(spec: StackSpec) -> None:
    """Check that a router which was told to use KV events can get them from every model.

    By default the router uses events where there are any, so only an explicit wish is checked."""
    wishes = {
        f"{part}.args.{name}": value
        for part, args in (("router", spec.router.args), ("frontend", spec.frontend.args))
        for name, value in args.items()
        if normalise_option(name) == "router-kv-events"
    }
    for field, value in wishes.items():
        if value is not True:
            continue
        if spec.router.mode != "kv":
            raise ValueError(
                f"`{field}` is true, but `router.mode` is `{spec.router.mode}`, which uses no "
                "events; set `router.mode: kv`, or remove the option"
            )
        for model in spec.models:
            # A decode worker gives none: the router looks for prefixes at prefill workers.
            roles = (settings for role, settings in model.roles.items() if role != "decode")
            reasons = (explain_missing_events(settings.args) for settings in roles)
            reason = next(filter(None, reasons), None)
            if model.engine == "vllm" and reason:
                raise ValueError(
                    f"`{field}` is true, but workers of `{model.name}` give no KV events: "
                    f"{reason}; change one of the two"
                )


def explain_missing_events(args: Mapping[str, Any]) -> str | None:
    """Return why a vLLM worker with these options publishes no KV events; None if it does."""
    options = {normalise_option(name): value for name, value in args.items()}
    if options.get("enable-prefix-caching") is False or options.get("no-enable-prefix-caching"):
        return "`args.enable-prefix-caching` is false"
    config = options.get("kv-events-config")
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            return None  # vLLM says what is wrong with it
    if isinstance(config, dict) and not config.get("enable_kv_cache_events"):
        return "`args.kv-events-config` does not set `enable_kv_cache_events`"
    return None
