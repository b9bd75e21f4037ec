"""Print the modules of Rollway that one refit passes through.

    python scripts/refit_modules.py [--transport shm]

It starts a stack of one real worker, refits it once to warm up, and traces the second publication
and refit in all processes: the driver, Dynamo's process and vLLM's engine. A module counts if one
of its functions runs."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import tempfile
from pathlib import Path

import rollway
from rollway.demo.model import build_base
from rollway.weights.transports.files import read_tensors

TRACER = """
import os, sys, threading
folder, seen = os.environ["REFIT_TRACE"], set()
package = os.environ["REFIT_PACKAGE"] + os.sep
def trace(frame, event, _):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(package) and name not in seen:
        if frame.f_code.co_name != "<module>" and os.path.exists(folder + "/on"):
            seen.add(name)
            with open(f"{folder}/{os.getpid()}.txt", "a") as file:
                file.write(name[len(package):] + "\\n")
sys.setprofile(trace)
threading.setprofile(trace)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="shm")
    transport = parser.parse_args().transport
    package = Path(rollway.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        tracer, switch = Path(folder) / "sitecustomize.py", Path(folder) / "on"
        tracer.write_text(TRACER)
        places = {"REFIT_TRACE": folder, "REFIT_PACKAGE": str(package)}
        os.environ |= places
        model = build_base(Path(folder) / "model")
        env = {"PYTHONPATH": f"{folder}{os.pathsep}{package.parent}", **places}
        tensors = list(read_tensors(model))
        spec = {"models": [{"path": str(model), "name": "m", "env": env}]}
        runpy.run_path(str(tracer))  # before the client's thread begins
        with rollway.up(spec) as stack, stack.publisher(transport=transport) as publisher:
            stack.refit(publisher.publish(1, [(name, tensor * 2) for name, tensor in tensors]))
            switch.touch()
            report = stack.refit(publisher.publish(2, tensors))
            switch.unlink()
        names = {name for file in Path(folder).glob("*.txt") for name in file.read_text().split()}
    print("\n".join(sorted(names)))
    proof = report.workers[0].proof
    print(f"{len(names)} modules; transport {transport}, proof {proof}", file=sys.stderr)


if __name__ == "__main__":
    main()
