"""`rollway prime-rl serve`, started as its quick start says, and another user of the machine."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollway.errors import UsageError
from rollway.gateway.tokens import Access
from rollway.integrations.prime_rl.directories import BroadcastRules
from rollway.integrations.prime_rl.serve import require_token
from tests.conftest import Cli
from tests.stack.policies import Policy
from tests.stack.prime_rl import PAUSE, PrimeServer, broadcast, distance, light_stack
from tests.stack.serving import TOLERANCE, fresh_prompt

NOBODY = 65534
pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user"),
]
ATTACKER = """
import json, sys, urllib.error, urllib.request
url, token_file, *calls = sys.argv[1:]
answers = []
for call in calls:
    path, body, headers = json.loads(call)
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    request.add_header("content-type", "application/json")
    try:
        answers.append(urllib.request.urlopen(request, timeout=60).status)
    except urllib.error.HTTPError as error:
        answers.append(error.code)
try:
    answers.append(open(token_file).read())
except OSError as error:
    answers.append(type(error).__name__)
print(json.dumps(answers))
"""


def attack(server: PrimeServer, home: Path, *calls: tuple[str, Any]) -> list[Any]:
    """Send calls as another user, each without a token and with a guessed one; then read ours."""
    tries = [
        json.dumps([path, body, headers])
        for path, body in calls
        for headers in ({}, {"Authorization": "Bearer EMPTY"})
    ]
    command = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    command += [str(Path(sys.executable).resolve()), "-I", "-c", ATTACKER, server.url]
    command += [str(home / "prime-rl" / "token"), *tries]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/")
    assert ran.returncode == 0, ran.stderr
    answers: list[Any] = json.loads(ran.stdout)
    return answers


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which every user may write, as /tmp."""
    directory = Path(tempfile.mkdtemp(prefix="rollway-shared-"))
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory)


def test_another_user_can_neither_load_weights_nor_stop_the_trainer(
    base_model: Path, own_home: Path, shared: Path, policies: list[Policy], cli: Cli
) -> None:
    ours, theirs = (broadcast(shared / name, 1, policies[1].path) for name in ("ours", "theirs"))
    for path in (shared / "theirs", *(shared / "theirs").rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    with light_stack(base_model, own_home, shared):
        server = PrimeServer("prime", shared).start()
        try:
            update = {"weight_dir": str(theirs)}
            adapter = {"lora_name": "a", "lora_path": str(theirs)}
            rpc = {"method": "update_weights_from_path", "args": [str(theirs)]}
            *statuses, token = attack(
                server, own_home,
                ("/pause", {}), ("/update_weights", update), ("/resume", {}),
                ("/init_broadcaster", {"host": "?"}), ("/load_lora_adapter", adapter),
                ("/collective_rpc", rpc),
                ("/v1/rollway/trainer_logprobs", {}),
            )  # fmt: skip
            assert set(statuses) == {401} and token == "PermissionError"
            assert stat.S_IMODE((own_home / "prime-rl" / "token").stat().st_mode) == 0o600
            # The owner's calls work: nothing that the other user sent is in their way.
            server.update(ours)
            prompt = fresh_prompt(20)
            assert distance(policies[1], prompt, server.generate(prompt)) < TOLERANCE
            assert server.post(PAUSE)[0] == 200
            status, answer = server.post("/update_weights", update)
            assert status == 400 and "of another user" in answer["error"]["message"]
            assert server.post("/resume")[0] == 200
            # The config command hands the token over.
            config = cli("prime-rl", "config", server.url)
            assert f'export VLLM_API_KEY="$(cat {own_home}/prime-rl/token)"' in config.stdout
        finally:
            server.end()


async def test_a_refusal_does_not_tell_which_directories_exist(
    shared: Path, tmp_path: Path
) -> None:
    """What is absent, of another user, or outside the roots has one answer."""
    theirs, link = shared / "theirs", shared / "link"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    link.symlink_to(tmp_path)
    rules = BroadcastRules([shared], marker_seconds=0.0)
    refusals = set()
    for path in (theirs, shared / "absent", link, tmp_path, Path("/no/such/directory")):
        with pytest.raises(UsageError) as refusal:
            await rules.find(str(path))
        refusals.add(str(refusal.value).replace(str(path), "DIRECTORY"))
    assert len(refusals) == 1, refusals


def test_an_empty_token_admits_nobody(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("", "EMPTY"):
        monkeypatch.setenv("VLLM_API_KEY", key)
        (token,) = require_token(Access()).operators
        assert len(token) == 64
    (own_home / "prime-rl" / "token").write_text("\n")
    with pytest.raises(UsageError, match="it is empty"):
        require_token(Access())
    # The token of an agent never becomes an operator's.
    (own_home / "prime-rl" / "token").unlink()
    monkeypatch.setenv("VLLM_API_KEY", "agent")
    assert b"agent" not in require_token(Access((b"agent",))).operators
