"""`CodeTool`: the sandbox as a tool of verl's tool agent loop, declared in `code_tool.yaml`."""

from __future__ import annotations

import dataclasses
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

from examples.retool.sandbox import Limits, Outcome, Sandbox, extract_code
from rollway.errors import UsageError

LIMITS = tuple(field.name for field in dataclasses.fields(Limits))
OPTIONS = ("interpreter", "network", "packages", "readable", "scratch", "max_concurrent")


class CodeTool(BaseTool):  # type: ignore[misc]  # verl is not typed
    """Runs the `code` of a call and returns its output. It keeps no state between calls and gives
    no reward."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        self.sandbox = make_sandbox(config)
        # verl shows the errors of a call to the model and continues, so check before any call.
        self.sandbox.check()

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        code = parameters.get("code") if isinstance(parameters, dict) else None
        if not isinstance(code, str):
            return ToolResponse(text="The tool needs `code`, a string of Python."), 0.0, {}
        outcome = await self.sandbox.run(extract_code(code))
        metrics = {"ending": outcome.ending, "code": outcome.code, "seconds": outcome.seconds}
        return ToolResponse(text=format_answer(outcome, self.sandbox.limits)), 0.0, metrics


def make_sandbox(config: dict[str, Any]) -> Sandbox:
    """Make the sandbox that a tool's config describes; raise for unknown options."""
    unknown = sorted(set(config) - {"type", *LIMITS, *OPTIONS})
    if unknown:
        raise UsageError(
            f"The code tool has no option {', '.join(unknown)}.",
            f"It has {', '.join((*LIMITS, *OPTIONS))}.",
        )
    options = {name: config[name] for name in OPTIONS if name in config}
    options["readable"] = tuple(options.get("readable") or ())
    return Sandbox(Limits(**{name: config[name] for name in LIMITS if name in config}), **options)


def format_answer(outcome: Outcome, limits: Limits) -> str:
    """Return the text that the model reads."""
    notes = {
        "timeout": f"[stopped after {limits.timeout:g} s]",
        "cpu": f"[stopped after {limits.cpu_seconds} s of processor time]",
        "output": f"[stopped: more than {limits.output_bytes} bytes of output]",
        "processes": f"[stopped: more than {limits.processes} processes]",
        "threads": "[stopped: too many threads]",
        "signal": f"[ended by signal {-outcome.code}]",
    }
    parts = [
        outcome.stdout.rstrip("\n"),
        outcome.stderr.rstrip("\n"),
        notes.get(outcome.ending, ""),
    ]
    return "\n".join(filter(None, parts)) or "[no output: print what you want to see]"
