"""The arguments of `rollway k8s …`; it imports no command, as `grammar.py` explains."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollway.cli.arguments import Add, add_only

_TARGET = "only this part: dynamo.KEY, kuberay.ROLE or deployments.KEY; repeatable"


def add_k8s_commands(add: Add) -> None:
    text = "say what of a run would not work, here and on the cluster"
    parser = add("check", "k8s:check", text)
    _add_infra(parser)
    _add_cluster(parser)
    text = "do not ask the cluster"
    parser.add_argument("--offline", action="store_true", help=text)
    parser = add("render", "k8s:render", "print the objects of a run, or the graph of a stack")
    _add_infra(parser)
    parser.add_argument("--namespace", "-n", help="default: that of the infra file")
    text = "a stack file, to print its DynamoGraphDeployment"
    parser.add_argument("--stack", type=Path, metavar="FILE", help=text)
    parser.add_argument("--name", help="with --stack: of the graph (default: the stack's)")
    parser.add_argument("--image", help="with --stack: of its pods")
    versions = ["v1beta1", "v1alpha1"]
    text = "convert graphs to this version (default: as they are written)"
    parser.add_argument("--crd-version", choices=versions, help=text)
    text = "start the servers of a run, without its job"
    parser = add("up", "k8s:up", text)
    _add_infra(parser)
    _add_start(parser, "return when they are ready (default)")
    text = "start inference and a training job, in order, and tie their lifetimes"
    parser = add("run", "k8s:run", text)
    _add_infra(parser)
    _add_start(parser, "return when the job has ended (default)")
    orders = ["auto", "suspended", "inference-first"]
    text = "what comes first (default: a suspended job, where KubeRay can suspend it)"
    parser.add_argument("--order", choices=orders, default="auto", help=text)
    text = "seconds that KubeRay has to submit the driver, before Rollway does (default 90)"
    parser.add_argument("--driver-grace", type=float, default=90.0, metavar="S", help=text)
    text = "seconds until KubeRay has suspended a job, and made its cluster (default 300)"
    parser.add_argument("--operator-timeout", type=float, default=300.0, metavar="S", help=text)
    text = "show what is where, and why it waits"
    parser = add("status", "k8s:status", text)
    _add_run(parser)
    _add_cluster(parser)
    parser.add_argument("--target", action="append", default=[], metavar="PART", help=_TARGET)
    parser = add("logs", "k8s:logs", "show the log of a part of a run")
    _add_run(parser)
    _add_cluster(parser)
    text = "driver (default), head, workers, frontend, or dynamo.KEY, kuberay.ROLE, deployments.KEY"
    parser.add_argument("--role", "--target", default="driver", help=text)
    parser.add_argument("-f", "--follow", action="store_true", help="wait for new lines")
    parser.add_argument("--lines", type=int, default=200, help="how many (default 200)")
    parser = add("down", "k8s:down", "delete what a run owns, and wait until it is gone")
    _add_run(parser)
    _add_cluster(parser)
    parser.add_argument("--target", action="append", default=[], metavar="PART", help=_TARGET)
    text = "print what would be deleted"
    parser.add_argument("--dry-run", action="store_true", help=text)
    _add_wait(parser, "return when it is gone (default)", 300.0)
    parser = add("scale", "k8s:scale", "change the replicas of a component of a graph")
    text = "a run and a component, for example: math worker=4, or policy.worker=4 of several graphs"
    parser.usage = "rollway k8s scale [-h] [--json] … [NAME] [KEY.]COMPONENT=REPLICAS"
    parser.add_argument("names", nargs="+", metavar="[NAME] [KEY.]COMPONENT=REPLICAS", help=text)
    _add_cluster(parser)
    text = "print what would change"
    parser.add_argument("--dry-run", action="store_true", help=text)
    _add_wait(parser, "return when the gates are passed again (default)", None)


def add_k8s_bench(parser: argparse.ArgumentParser) -> None:
    text = "the run that is measured: one graph and a job"
    parser.add_argument("--infra", type=Path, required=True, metavar="FILE", help=text)
    text = "override a field of the infra file; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help=text)
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help="default: $KUBECONFIG")
    parser.add_argument("--namespace", "-n", help="default: the context's")
    add_only(parser)


def _add_infra(parser: argparse.ArgumentParser) -> None:
    text = "the trainer's recipe; it may have the section `infra:`"
    parser.add_argument("recipe", nargs="?", type=Path, metavar="RECIPE", help=text)
    text = "the infra file (docs/kubernetes.md)"
    parser.add_argument("--infra", type=Path, metavar="FILE", help=text)
    text = "override a field of the infra file; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help=text)
    parser.add_argument("--target", action="append", default=[], metavar="PART", help=_TARGET)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--namespace", "-n", help="default: the infra file's, or the context's")
    parser.add_argument("--context", help="of the kubeconfig (default: the current one)")
    text = "default: $KUBECONFIG or ~/.kube/config; in a pod its service account"
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help=text)


def _add_run(parser: argparse.ArgumentParser) -> None:
    text = "a run; optional when the namespace has one"
    parser.add_argument("name", nargs="?", metavar="NAME", help=text)


def _add_start(parser: argparse.ArgumentParser, text: str) -> None:
    _add_cluster(parser)
    dry = "have the cluster validate every object, and change nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    again = "delete what the run has, wait until it is gone, start anew"
    parser.add_argument("--recreate", action="store_true", help=again)
    _add_wait(parser, text, None)
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _add_wait(parser: argparse.ArgumentParser, text: str, timeout: float | None) -> None:
    parser.add_argument("--wait", action=argparse.BooleanOptionalAction, default=True, help=text)
    limit = f"default {timeout:.0f}" if timeout else "default: each graph's `ready_timeout`"
    parser.add_argument(
        "--timeout", type=float, default=timeout, metavar="S", help=f"seconds to wait ({limit})"
    )
