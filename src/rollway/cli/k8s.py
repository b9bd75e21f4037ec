"""`rollway k8s …`: inference and training on Kubernetes."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollway.cli.output import print_json, print_progress, print_result, print_table
from rollway.errors import SpecError, UsageError

if TYPE_CHECKING:
    from rollway.kubernetes.check import Finding
    from rollway.kubernetes.cluster import Cluster
    from rollway.kubernetes.manifests import Manifests
    from rollway.kubernetes.spec import Infra
    from rollway.kubernetes.status import RunStatus
    from rollway.kubernetes.steps import RunOptions, RunResult


_SECTIONS = {"graphs": "dynamo", "jobs": "kuberay", "clusters": "kuberay",
             "deployments": "deployments", "services": "deployments"}  # fmt: skip
"""The fields of `Manifests`, and the section of `--target` that each belongs to."""


def check(options: argparse.Namespace) -> int:
    from rollway.kubernetes.check import Finding, check_cluster

    infra = _load(options)
    cluster = None if options.offline else _connect(options, infra)
    infra = _set_namespace(infra, cluster, options)
    manifests = _render(infra, options)
    findings = [Finding("entry point", False, text, "") for text in manifests.warnings]
    if cluster is not None:
        findings += check_cluster(cluster, manifests)
    result = {
        "run": infra.name,
        "namespace": infra.namespace,
        "graphs": _summarize(infra, manifests),
        "findings": [finding.as_json() for finding in findings],
        "ok": all(finding.ok for finding in findings),
    }
    print_result(options, result, lambda _: _print_check(result, findings))
    return 0 if result["ok"] else 1


def render(options: argparse.Namespace) -> int:
    from rollway.kubernetes.manifests import write_yaml

    if options.stack is not None:
        objects = list(_render_stack(options).graphs.values())
    else:
        infra = _set_namespace(_load(options), None, options)
        objects = _render(infra, options).objects
    if options.crd_version is not None:
        objects = [_convert(body, options.crd_version) for body in objects]
    print_result(options, {"objects": objects}, lambda _: print(write_yaml(objects), end=""))
    return 0


def up(options: argparse.Namespace) -> int:
    from rollway.kubernetes.run import bring_up

    return _start(options, bring_up)


def run(options: argparse.Namespace) -> int:
    from rollway.kubernetes.run import start_run

    if options.target:
        raise UsageError(
            "`run` starts all parts of a run.", "Use `rollway k8s up --target …` for one of them."
        )
    return _start(options, start_run)


def _start(options: argparse.Namespace, start: Callable[..., RunResult]) -> int:
    infra = _load(options)
    cluster = _connect(options, infra)
    infra = _set_namespace(infra, cluster, options)
    manifests = _render(infra, options)
    report: Callable[[str], None] = (lambda _: None) if options.quiet else print_progress
    for text in manifests.warnings:
        print_progress(f"rollway: warning: {text}")
    if options.dry_run:
        return _dry_run(options, cluster, manifests)
    with _terminated_as_interrupt():
        result = start(cluster, infra, manifests, _read_options(options), report)
    print_result(options, result.as_json(), lambda _: _print_run(result))
    return 0


def _dry_run(options: argparse.Namespace, cluster: Cluster, manifests: Manifests) -> int:
    """Have the API server validate every object, and say what would happen to it."""
    from rollway.kubernetes.check import check_objects

    findings = list(check_objects(cluster, manifests))
    result = {
        "findings": [finding.as_json() for finding in findings],
        "ok": all(finding.ok for finding in findings),
    }
    print_result(options, result, lambda _: _print_findings(findings))
    return 0 if result["ok"] else 1


def status(options: argparse.Namespace) -> int:
    from rollway.kubernetes.status import read_status, read_versions
    from rollway.kubernetes.teardown import resolve_run

    cluster = _connect(options, None)
    state = read_status(cluster, resolve_run(cluster, options.name), tuple(options.target))
    for part in state.parts:
        if part.kind == "DynamoGraphDeployment" and not part.waits_for:
            part.details["versions"] = read_versions(cluster, part.name)
    print_result(options, state.as_json(), lambda _: _print_status(state))
    return 0


def logs(options: argparse.Namespace) -> int:
    from rollway.kubernetes.pod_logs import read_logs
    from rollway.kubernetes.teardown import resolve_run

    cluster = _connect(options, None)
    name = resolve_run(cluster, options.name)
    lines = read_logs(cluster, name, options.role, follow=options.follow, tail=options.lines)
    if options.json and not options.follow:
        print_json({"lines": [{"source": source, "line": line} for source, line in lines]})
        return 0
    last = ""
    for source, line in lines:
        if options.json:
            print_json({"source": source, "line": line})
            continue
        if source != last:
            print_progress(f"==> {source}")
        last = source
        print(line, flush=True)
    return 0


def down(options: argparse.Namespace) -> int:
    from rollway.kubernetes.teardown import list_targets, resolve_run, take_down

    began, cluster = time.monotonic(), _connect(options, None)
    name = resolve_run(cluster, options.name)
    if options.dry_run:
        names = [f"{kind.kind} {body['metadata']['name']}"
                 for kind, body in list_targets(cluster, name, keys=options.target)]  # fmt: skip
        planned = {"run": name, "would_delete": names}
        print_result(options, planned, lambda _: print("\n".join(names)))
        return 0
    removal = take_down(
        cluster, name, timeout=options.timeout, wait=options.wait, keys=options.target,
        report=print_progress,
    )  # fmt: skip
    result = {**removal.as_json(), "seconds": round(time.monotonic() - began, 3)}
    text = f"removed {len(removal.deleted)} objects of {name}"
    print_result(options, result, lambda _: print(text))
    return 0


def scale(options: argparse.Namespace) -> int:
    from rollway.kubernetes import gates
    from rollway.kubernetes.scale import scale as scale_component
    from rollway.kubernetes.steps import gates_reporter
    from rollway.kubernetes.teardown import resolve_run

    if len(options.names) > 2:
        raise UsageError("Too many arguments.", "Write [NAME] [KEY.]COMPONENT=REPLICAS.")
    cluster = _connect(options, None)
    name = resolve_run(cluster, options.names[0] if len(options.names) == 2 else None)
    scaling, graph = scale_component(cluster, name, options.names[-1], dry_run=options.dry_run)
    if options.wait and not options.dry_run:
        on_change = gates_reporter(print_progress)
        gates.wait_until_ready(
            cluster, [graph], timeout=options.timeout or 7200.0, on_change=on_change
        )
    text = f"{scaling.graph}: {scaling.component} from {scaling.before} to {scaling.after} replicas"
    print_result(options, scaling.as_json(), lambda _: print(text))
    return 0


# --- what the commands share ---------------------------------------------------------------------


def _load(options: argparse.Namespace) -> Infra:
    from rollway.kubernetes.infra import load_infra

    return load_infra(options.recipe, options.infra, options.set)


def _connect(options: argparse.Namespace, infra: Infra | None) -> Cluster:
    from rollway.errors import require
    from rollway.kubernetes.cluster import Cluster

    require("kubernetes")
    own = infra.namespace if infra is not None else ""
    if own and options.namespace and own != options.namespace:
        raise UsageError(
            f"--namespace is {options.namespace}, and the infra file has `namespace: {own}`.",
            "Give both the same.",
        )
    return Cluster.connect(
        context=options.context,
        namespace=options.namespace or own or None,
        kubeconfig=options.kubeconfig,
    )


def _set_namespace(infra: Infra, cluster: Cluster | None, options: argparse.Namespace) -> Infra:
    """Return the infra with the namespace that its objects go to."""
    default = cluster.namespace if cluster is not None else "default"
    return infra.model_copy(update={"namespace": infra.namespace or options.namespace or default})


def _render(infra: Infra, options: argparse.Namespace) -> Manifests:
    """Render the parts that `--target` names; all without it."""
    from rollway.kubernetes.manifests import render_all

    unknown = set(options.target) - set(infra.targets)
    if unknown:
        raise SpecError(
            f"The infra file has no {', '.join(sorted(unknown))}.",
            f"Targets are {', '.join(infra.targets)}.",
        )
    manifests = render_all(infra)
    if not options.target:
        return manifests
    chosen: dict[str, Any] = {}
    for field, section in _SECTIONS.items():
        parts = getattr(manifests, field)
        chosen[field] = {k: part for k, part in parts.items() if f"{section}.{k}" in options.target}
    return dataclasses.replace(manifests, **chosen)


def _read_options(options: argparse.Namespace) -> RunOptions:
    from rollway.kubernetes.steps import Limits, RunOptions

    limits = Limits(gates=options.timeout)
    if "order" not in options:
        return RunOptions(wait=options.wait, recreate=options.recreate, limits=limits)
    limits = Limits(
        gates=options.timeout,
        suspend=options.operator_timeout,
        cluster=options.operator_timeout,
        grace=options.driver_grace,
    )
    return RunOptions(options.order, options.wait, options.recreate, limits)


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C, so that it rolls back as well."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _convert(body: dict[str, Any], version: str) -> dict[str, Any]:
    from rollway.kubernetes.conversion import convert

    if body["kind"] != "DynamoGraphDeployment":
        return body
    conversion = convert(body, version)
    for loss in conversion.losses:
        print_progress(f"rollway: warning: {version} does not have `{loss}`")
    return conversion.graph


def _render_stack(options: argparse.Namespace) -> Manifests:
    """Render the graph of a stack file alone, without a run around it."""
    from rollway.kubernetes.infra import parse_infra
    from rollway.kubernetes.manifests import render_all
    from rollway.kubernetes.render import read_stack

    name = options.name or read_stack(options.stack).name
    part = {"stack": str(options.stack.resolve()), "name": name}
    fields = {"name": name, "namespace": options.namespace or "default", "dynamo": {"stack": part}}
    return render_all(
        parse_infra({**fields, **({"image": options.image} if options.image else {})})
    )


def _summarize(infra: Infra, manifests: Manifests) -> list[dict[str, Any]]:
    from rollway.kubernetes.dgd import list_components

    return [
        {
            "key": key,
            "name": body["metadata"]["name"],
            "version": body["apiVersion"],
            "components": {
                name: 1 if part.get("replicas") is None else part["replicas"]
                for name, part in list_components(body)
            },
            "ready_timeout": infra.dynamo[key].ready_timeout,
        }
        for key, body in manifests.graphs.items()
    ]


# --- for people ----------------------------------------------------------------------------------


def _print_check(result: dict[str, Any], findings: list[Finding]) -> None:
    print(f"run {result['run']} in namespace {result['namespace']}")
    for graph in result["graphs"]:
        parts = ", ".join(f"{name} x {count}" for name, count in graph["components"].items())
        print(f"  {graph['key']}: {graph['name']} ({parts}), ready in {graph['ready_timeout']:g} s")
    _print_findings(findings)


def _print_findings(findings: list[Finding]) -> None:
    print_table(
        ("", "what", "", "fix"),
        (("ok" if each.ok else "NO", each.what, each.text, each.fix) for each in findings),
    )


def _print_run(result: RunResult) -> None:
    print(f"{result.name} is {result.state}")
    if result.driver is not None:
        print(f"  driver:  {result.driver.id} in RayCluster {result.ray_cluster}")
    for graph in result.graphs:
        print(f"  Python:  rollway.attach('dgd://{result.namespace}/{graph}')")
    print(f"  look:    rollway k8s status {result.name} -n {result.namespace}")
    print(f"  stop:    rollway k8s down {result.name} -n {result.namespace}", flush=True)


def _print_status(state: RunStatus) -> None:
    print(f"run {state.run} in namespace {state.namespace}")
    print_table(
        ("part", "object", "state", "owner", "waits for"),
        ((each.key, f"{each.kind} {each.name}", each.state, each.owner, each.waits_for)
         for each in state.parts),
    )  # fmt: skip
    if state.pods:
        print()
        print_table(
            ("pod", "of", "phase", "ready", "why"),
            ((each.name, each.part, each.phase, each.ready,
              " ".join(filter(None, (each.reason, each.event)))) for each in state.pods),
        )  # fmt: skip
    for part in state.parts:
        for worker, version in (part.details.get("versions") or {}).items():
            print(f"{part.name}: worker {worker} serves version {version}")
