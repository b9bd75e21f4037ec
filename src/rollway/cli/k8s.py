"""`rollway k8s …`: inference and training on Kubernetes."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollway.cli.arguments import Parser, add_flag, add_quiet, add_set, make_group
from rollway.cli.output import print_json, print_problems, print_progress, print_result, print_table
from rollway.errors import Problem, SpecError, UsageError
from rollway.kubernetes import gates
from rollway.kubernetes.check import check_cluster, check_objects
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.cluster_run import Limits, RunOptions, RunResult, gates_reporter
from rollway.kubernetes.conversion import convert
from rollway.kubernetes.infra import load_infra, parse_infra
from rollway.kubernetes.manifests import Manifests, render_all, write_yaml
from rollway.kubernetes.objects import list_components
from rollway.kubernetes.pod_logs import read_logs
from rollway.kubernetes.render import read_stack
from rollway.kubernetes.run import bring_up, start_run
from rollway.kubernetes.scale import scale as scale_component
from rollway.kubernetes.spec import Infra
from rollway.kubernetes.status import RunStatus, read_status, read_versions
from rollway.kubernetes.teardown import list_targets, resolve_run, take_down

_SECTIONS = {"graphs": "dynamo", "jobs": "kuberay", "clusters": "kuberay",
             "deployments": "deployments", "services": "deployments"}  # fmt: skip
"""The fields of `Manifests`, and the section of `--target` that each belongs to."""


def check(options: argparse.Namespace) -> int:
    infra = _load(options)
    cluster = None if options.offline else _connect(options, infra)
    infra = _set_namespace(infra, cluster, options)
    manifests = _render(infra, options)
    findings = [Problem("entry point", "error", text) for text in manifests.warnings]
    if cluster is not None:
        findings += check_cluster(cluster, manifests)
    result = {
        "run": infra.name,
        "namespace": infra.namespace,
        "graphs": _summarize(infra, manifests),
        "findings": [_show_finding(finding) for finding in findings],
        "ok": all(finding.level == "ok" for finding in findings),
    }
    print_result(options, result, lambda _: _print_check(result, findings))
    return 0 if result["ok"] else 1


def render(options: argparse.Namespace) -> int:
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
    return _start(options, bring_up)


def run(options: argparse.Namespace) -> int:
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it rolls back as well
    result = start(cluster, infra, manifests, _read_options(options), report)
    print_result(options, result.as_json(), lambda _: _print_run(result))
    return 0


def _dry_run(options: argparse.Namespace, cluster: Cluster, manifests: Manifests) -> int:
    """Have the API server validate every object, and say what would happen to it."""
    findings = list(check_objects(cluster, manifests))
    result = {
        "findings": [_show_finding(finding) for finding in findings],
        "ok": all(finding.level == "ok" for finding in findings),
    }
    print_result(options, result, lambda _: print_problems(findings))
    return 0 if result["ok"] else 1


def status(options: argparse.Namespace) -> int:
    cluster = _connect(options, None)
    state = read_status(cluster, resolve_run(cluster, options.name), tuple(options.target))
    for part in state.parts:
        if part.kind == "DynamoGraphDeployment" and not part.waits_for:
            part.details["versions"] = read_versions(cluster, part.name)
    print_result(options, state.as_json(), lambda _: _print_status(state))
    return 0


def logs(options: argparse.Namespace) -> int:
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
    began, cluster = time.monotonic(), _connect(options, None)
    name = resolve_run(cluster, options.name)
    if options.dry_run:
        names = [f"{kind.kind} {body['metadata']['name']}"
                 for kind, body in list_targets(cluster, name, keys=options.target)]  # fmt: skip
        planned = {"run": name, "would_delete": names}
        print_result(options, planned, lambda _: print("\n".join(names)))
        return 0
    deleted = take_down(
        cluster, name, timeout=options.timeout, wait=options.wait, keys=options.target,
        report=print_progress,
    )  # fmt: skip
    result = {"run": name, "deleted": deleted, "seconds": round(time.monotonic() - began, 3)}
    text = f"removed {len(deleted)} objects of {name}"
    print_result(options, result, lambda _: print(text))
    return 0


def scale(options: argparse.Namespace) -> int:
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
    return load_infra(options.recipe, options.infra, options.set)


def _connect(options: argparse.Namespace, infra: Infra | None) -> Cluster:
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
    limits = Limits(gates=options.timeout)
    if "order" not in options:
        return RunOptions("auto", options.wait, options.recreate, options.resume, limits)
    limits = Limits(
        gates=options.timeout,
        suspend=options.operator_timeout,
        cluster=options.operator_timeout,
        grace=options.driver_grace,
    )
    return RunOptions(options.order, options.wait, options.recreate, options.resume, limits)


def _convert(body: dict[str, Any], version: str) -> dict[str, Any]:
    if body["kind"] != "DynamoGraphDeployment":
        return body
    conversion = convert(body, version)
    for loss in conversion.losses:
        print_progress(f"rollway: warning: {version} does not have `{loss}`")
    return conversion.graph


def _render_stack(options: argparse.Namespace) -> Manifests:
    """Render the graph of a stack file alone, without a run around it."""
    name = options.name or read_stack(options.stack).name
    part = {"stack": str(options.stack.resolve()), "name": name}
    fields = {"name": name, "namespace": options.namespace or "default", "dynamo": {"stack": part}}
    return render_all(
        parse_infra({**fields, **({"image": options.image} if options.image else {})})
    )


def _summarize(infra: Infra, manifests: Manifests) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "name": body["metadata"]["name"],
            "version": body["apiVersion"],
            "components": {
                name: 1 if part.get("replicas") is None else part["replicas"]
                for name, part in list_components(body).items()
            },
            "ready_timeout": infra.dynamo[key].ready_timeout,
        }
        for key, body in manifests.graphs.items()
    ]


# --- for people ----------------------------------------------------------------------------------


def _print_check(result: dict[str, Any], findings: list[Problem]) -> None:
    print(f"run {result['run']} in namespace {result['namespace']}")
    for graph in result["graphs"]:
        parts = ", ".join(f"{name} x {count}" for name, count in graph["components"].items())
        print(f"  {graph['key']}: {graph['name']} ({parts}), ready in {graph['ready_timeout']:g} s")
    print_problems(findings)


def _show_finding(finding: Problem) -> dict[str, Any]:
    return {**finding.as_json("what", "level", "text", "fix"), "ok": finding.level == "ok"}


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


# --- arguments ---------------------------------------------------------------------------------


def add_k8s(parser: Parser) -> None:
    add = make_group(parser)
    parser = add("check", check, "say what of a run would not work, here and on the cluster")
    _add_infra(parser)
    _add_cluster(parser)
    add_flag(parser, "--offline", "do not ask the cluster")
    parser = add("render", render, "print the objects of a run, or the graph of a stack")
    _add_infra(parser)
    parser.add_argument("--namespace", "-n", help="default: that of the infra file")
    text = "a stack file, to print its graph"
    parser.add_argument("--stack", type=Path, metavar="FILE", help=text)
    parser.add_argument("--name", help="with --stack: of the graph (default: the stack's)")
    parser.add_argument("--image", help="with --stack: of its pods")
    versions = ["v1beta1", "v1alpha1"]
    text = "of the graphs (default: as written)"
    parser.add_argument("--crd-version", choices=versions, help=text)
    parser = add("up", up, "start the servers of a run, without its job")
    _add_infra(parser)
    _add_start(parser, "return when they are ready (default)")
    parser = add("run", run, "start inference and a training job, and tie their lifetimes")
    _add_infra(parser)
    _add_start(parser, "return when the job has ended (default)")
    orders = ["auto", "suspended", "inference-first"]
    text = "what comes first (default: a suspended job, where KubeRay can suspend it)"
    parser.add_argument("--order", choices=orders, default="auto", help=text)
    text = "seconds that KubeRay has to submit the driver, before Rollway does (default 90)"
    parser.add_argument("--driver-grace", type=float, default=90.0, metavar="S", help=text)
    text = "seconds until KubeRay has suspended a job, and made its cluster (default 300)"
    parser.add_argument("--operator-timeout", type=float, default=300.0, metavar="S", help=text)
    parser = add("status", status, "show what is where, and why it waits")
    _add_run(parser)
    _add_cluster(parser)
    _add_target(parser)
    parser = add("logs", logs, "show the log of a part of a run")
    _add_run(parser)
    _add_cluster(parser)
    text = "driver (default), head, workers, frontend, or dynamo.KEY, kuberay.ROLE, deployments.KEY"
    parser.add_argument("--role", "--target", default="driver", help=text)
    parser.add_argument("-f", "--follow", action="store_true", help="wait for new lines")
    parser.add_argument("--lines", type=int, default=200, help="how many (default 200)")
    parser = add("down", down, "delete what a run owns, and wait until it is gone")
    _add_run(parser)
    _add_cluster(parser)
    _add_target(parser)
    add_flag(parser, "--dry-run", "print what would be deleted")
    _add_wait(parser, "return when it is gone (default)", 300.0)
    parser = add("scale", scale, "change the replicas of a component of a graph")
    text = "a run and a component, for example: math worker=4, or policy.worker=4 of several graphs"
    parser.usage = "rollway k8s scale [-h] [--json] … [NAME] [KEY.]COMPONENT=REPLICAS"
    parser.add_argument("names", nargs="+", metavar="[NAME] [KEY.]COMPONENT=REPLICAS", help=text)
    _add_cluster(parser)
    add_flag(parser, "--dry-run", "print what would change")
    _add_wait(parser, "return when the gates are passed again (default)", None)


def _add_infra(parser: Parser) -> None:
    text = "it may have `infra:`"
    parser.add_argument("recipe", nargs="?", type=Path, metavar="RECIPE", help=text)
    parser.add_argument("--infra", type=Path, metavar="FILE", help="see docs/kubernetes.md")
    add_set(parser, "override a field of the infra file; repeatable")
    _add_target(parser)


def _add_cluster(parser: Parser) -> None:
    parser.add_argument("--namespace", "-n", help="default: the infra file's, or the context's")
    parser.add_argument("--context", help="of the kubeconfig (default: the current one)")
    text = "default: $KUBECONFIG or ~/.kube/config; in a pod its service account"
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help=text)


def _add_run(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="optional when there is one run")


def _add_start(parser: Parser, text: str) -> None:
    _add_cluster(parser)
    add_flag(parser, "--dry-run", "have the cluster validate every object, and change nothing")
    add_flag(parser, "--recreate", "delete what the run has, wait until it is gone, start anew")
    again = "go on with a run that another command began, and take it over from that command"
    add_flag(parser, "--resume", again)
    _add_wait(parser, text, None)
    add_quiet(parser)


def _add_wait(parser: Parser, text: str, timeout: float | None) -> None:
    parser.add_argument("--wait", action=argparse.BooleanOptionalAction, default=True, help=text)
    limit = f"default {timeout:.0f}" if timeout else "default: each graph's `ready_timeout`"
    parser.add_argument(
        "--timeout", type=float, default=timeout, metavar="S", help=f"seconds to wait ({limit})"
    )


def _add_target(parser: Parser) -> None:
    text = "only this part: dynamo.KEY, kuberay.ROLE or deployments.KEY; repeatable"
    parser.add_argument("--target", action="append", default=[], metavar="PART", help=text)
