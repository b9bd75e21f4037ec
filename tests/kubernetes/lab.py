"""A control plane with stand-in operators to try commands on: `python -m tests.kubernetes.lab DIR`.

It prints one line of JSON with the kubeconfig and an infra file, and stays until SIGTERM. With
`--light` graphs are real frontends with light workers, otherwise stubs of them. Pods get ready
after `--ready-after` seconds: real ones pull images and load weights.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
from pathlib import Path

from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import NAMESPACE
from tests.kubernetes.control_plane import ControlPlane, find_assets
from tests.kubernetes.dynamo_operator import Faults
from tests.kubernetes.flows import open_world, write_infra

NAME = "rl"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--light", action="store_true")
    parser.add_argument("--ready-after", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args()
    assets, stop = find_assets(), threading.Event()
    assert assets is not None, "`make setup-k8s` builds a control plane"
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    model = None
    if options.light:
        from rollway.demo.model import build_base
        from rollway.stack.preset import cache_dir

        model = build_base(cache_dir() / "demo")
    options.folder.mkdir(parents=True, exist_ok=True)
    with ControlPlane(assets, options.folder / "control-plane") as plane:
        plane.install_crds()
        kubeconfig = plane.write_kubeconfig(options.folder / "kubeconfig", plane.token, NAME)
        admin = Cluster.connect(kubeconfig=kubeconfig, namespace=NAME)
        admin.create(NAMESPACE, {"metadata": {"name": NAME}})
        infra = write_infra(
            options.folder / "infra", launch={"entrypoint": "sleep 600", "ttl_seconds": 600}
        )
        with open_world(admin, kubeconfig, options.folder, model) as world:
            world.dynamo.usual = Faults(ready_after=options.ready_after)
            answer = {"kubeconfig": str(kubeconfig), "namespace": NAME, "infra": str(infra)}
            print(json.dumps({**answer, "model": str(model or "")}), flush=True)
            stop.wait()


if __name__ == "__main__":
    main()
