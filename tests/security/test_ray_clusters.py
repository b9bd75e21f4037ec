"""Another user's Ray cluster on this machine runs no code as us, because no command dials it.

Ray unpickles what an actor answers, so whoever runs a cluster runs code in every process that asks
one of its actors. The other user here is real, and so is the cluster. Both live in namespaces of
their own: no other process of this machine sees the cluster, its ports or its /tmp/ray."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

import pytest

from rollway.processes import list_own_commands
from tests.light.spec import ROOT

NOBODY = 65534

ATTACKER = """
import json, os, pathlib, socket, sys
import ray

class Answer:
    def __reduce__(self):  # whoever unpickles this creates the file
        return os.open, ("/tmp/proof", os.O_CREAT | os.O_WRONLY, 0o600)

@ray.remote(num_cpus=0)
class Head:
    def identify(self):
        return Answer()
    read_state = read_secret = stop = wait_until_over = identify

cluster = ray.init(
    num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False,
    namespace="rollway", _node_ip_address="127.0.0.1",
)
head = Head.options(name="rollway/policy", lifetime="detached").remote()
ray.get(head.__ray_ready__.remote())
listener = socket.create_server(("127.0.0.1", 0))
listener.setblocking(False)
address = f"127.0.0.1:{listener.getsockname()[1]}"
pathlib.Path("/tmp/ray/ray_current_cluster").write_text(address)
print(cluster.address_info["gcs_address"], flush=True)
sys.stdin.read()

connections = 0
try:
    while True:
        listener.accept()
        connections += 1
except BlockingIOError:
    pass
print(json.dumps([connections, len(ray._private.state.jobs()) - 1]), flush=True)
"""
"""Runs a cluster with the Head of a stack named `policy`, and puts a port of its own where Ray's
drivers look for a cluster. Prints at the end how often that port and the cluster were dialled."""

VICTIM = """
import contextlib, io, json, os, pathlib, sys
import rollway
from rollway.cli import main

# A cluster of ours was here once, with a stack that nobody stopped.
place = pathlib.Path(os.environ["ROLLWAY_HOME"], "ray", "rollway%2Fpolicy")
place.parent.mkdir(parents=True, mode=0o700)
place.write_text(sys.argv[1])

def attach():
    with rollway.attach("policy"):
        pass

port = ["--port", "0"]
commands = [
    ["status"], ["status", "--on", "ray"], ["down", "policy"], ["down"], ["logs", "policy"],
    ["dash", "policy", *port], ["gateway", "policy", *port], ["fleet", "ls", "policy"],
    ["up", "--model", "org/model", "--on", "ray", "--dry-run"],
]
calls = {" ".join(words): lambda words=words: main(words) for words in commands}
outcomes = {}
for name, call in {**calls, "attach": attach}.items():
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
        try:
            call()
        except BaseException as error:
            print(repr(error))
    outcomes[name] = output.getvalue()
    if os.path.exists("/tmp/proof"):
        os.unlink("/tmp/proof")
        outcomes[name] = "RAN FOREIGN CODE"
print(json.dumps(outcomes), flush=True)
"""

SCENE = """
import json, os, pathlib, subprocess, sys
attacker, victim, user = sys.argv[1:]
for path in map(pathlib.Path, (sys.base_prefix, sys.prefix, os.getcwd())):
    for closed in [each for each in reversed(path.parents) if not each.stat().st_mode & 1]:
        layers = [pathlib.Path(f"/tmp/{kind}{closed.stat().st_ino}") for kind in ("upper", "work")]
        for layer in layers:
            layer.mkdir()
        options = f"lowerdir={closed},upperdir={layers[0]},workdir={layers[1]}"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", closed], check=True)
        closed.chmod(0o755)
python = [sys.executable, "-c"]
become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
homes = {"HOME": "/tmp/home", "ROLLWAY_HOME": "/tmp/home/rollway"}
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
ours = {name: os.environ[name] for name in ("PATH", "PYTHONPATH")}
theirs = {**ours, "HOME": "/tmp", "RAY_AUTH_MODE": "disabled"}  # who attacks asks for no token
other = subprocess.Popen([*become, *python, attacker], env=theirs, **pipes)
address = other.stdout.readline().strip()
assert address, "the other user's cluster did not start"
outcomes = subprocess.run(
    [*python, victim, address], env={**ours, **homes}, stdout=subprocess.PIPE, check=True,
).stdout
print(json.dumps([json.loads(outcomes), json.loads(other.communicate()[0])]))
"""
"""Runs both. A Python in a directory that is closed to other users is opened to them here alone."""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(
    not all(map(shutil.which, ("unshare", "setpriv", "ip"))), reason="no tools for namespaces"
)
@pytest.mark.timeout(180)
def test_no_command_dials_the_cluster_of_another_user() -> None:
    own_tmp = 'mount -t tmpfs none /tmp && ip link set lo up && exec "$@"'
    flags = ["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    scene = [sys.executable, "-c", SCENE, ATTACKER, VICTIM, str(NOBODY)]
    done = subprocess.run(
        ["unshare", *flags, "sh", "-c", own_tmp, "sh", *scene],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=170,
    )
    outcomes, (connections, drivers) = json.loads(done.stdout)
    assert [name for name, text in outcomes.items() if text == "RAN FOREIGN CODE"] == []
    assert (connections, drivers) == (0, 0), outcomes
    assert "There is no Ray cluster of yours" in outcomes["status --on ray"]
    assert "No stack named `policy` is running" in outcomes["down policy"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_raylet_that_another_user_started_is_not_ours() -> None:
    """It may be a setuid program under the name of Ray's, with arguments of their choice."""
    program = Path(mkdtemp(dir="/tmp")) / "raylet"
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    try:
        program.parent.chmod(0o755)
        shutil.copy("/bin/cat", program)
        program.chmod(0o4755)
        line = [*become, str(program), "-", "--", "--gcs-address=192.0.2.9:6379"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(line, bufsize=0, **pipes) as process:  # type: ignore[call-overload]
            process.stdin.write(b"started\n")
            assert process.stdout.readline() == b"started\n"
            commands = list_own_commands("raylet")
            process.kill()
    finally:
        shutil.rmtree(program.parent)
    assert [command for command in commands if str(program) in command] == []
