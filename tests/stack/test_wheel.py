"""The wheel as users install it: its files, and what an environment with nothing else can do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import rollway
from tests.light.spec import light

ROOT = Path(__file__).parents[2]
OUTSIDE = ("benchmarks", "chaos", "bench", "retool", "examples", "tests")
"""Folders of the repository that no user gets installed."""
ATTACH = """
import json, sys
import rollway
with rollway.attach(sys.argv[1]) as stack:
    group = stack.rollouts().generate(list(range(40, 60)), rollway.Sampling(max_tokens=4), n=2)
    print(json.dumps([len(rollout.token_ids) for rollout in group]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(ROOT)]
    subprocess.run([*command, "--wheel-dir", str(directory)], check=True, timeout=300)
    (path,) = directory.glob("rollway-*.whl")
    return path


def test_it_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [Path(name) for name in archive.namelist()]
    print(f"{wheel.name}: {wheel.stat().st_size} bytes, {len(names)} files")
    assert {name.parts[0].partition("-")[0] for name in names} == {"rollway"}
    assert not [name for name in names if set(name.parts) & set(OUTSIDE)]


@pytest.mark.stack
def test_an_empty_environment_attaches_to_a_stack(
    wheel: Path, tmp_path: Path, base_model: Path
) -> None:
    environment = tmp_path / "environment"
    venv.create(environment)  # without a pip of its own, which takes as long as the rest
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    install = [*pip, "install", "--quiet", "--no-compile", str(wheel)]
    subprocess.run(install, check=True, timeout=300)

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of that environment, in a directory that is no checkout."""
        command = [environment / "bin" / program, *arguments]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120
        )

    assert "COMMAND" in run("rollway", "--help").stdout
    for program in ("bench", "chaos"):
        refused = run("rollway", program, "--rounds", "1")
        assert refused.returncode == 2 and "Traceback" not in refused.stderr
        assert "is in the repository, not in the installed package" in refused.stderr
    with rollway.up(light(base_model, "wheel")) as stack:
        attached = run("python", "-c", ATTACH, stack.name)
        assert attached.returncode == 0, attached.stderr
        # What needs more than the core says which extra brings it.
        for arguments, extra in (
            (("gateway", stack.name, "--port", "0"), "cpu"),
            (("prime-rl", "serve", stack.name, "--port", "0"), "cpu"),
            (("k8s", "status"), "k8s"),
            (("demo",), "cpu,demo"),
        ):
            refused = run("rollway", *arguments)
            assert refused.returncode == 2 and "Traceback" not in refused.stderr, refused.stderr
            assert f"pip install 'rollway[{extra}]'" in refused.stderr
        assert json.loads(attached.stdout) == [4, 4]
        status = json.loads(run("rollway", "status", stack.name, "--json").stdout)
        assert [(shown["name"], shown["phase"]) for shown in status["stacks"]] == [
            (stack.name, "ready")
        ]
    # The report embeds the files of the page, which are no modules.
    reported = run("rollway", "report", "--out", "report.html")
    assert reported.returncode == 0, reported.stderr
    assert "uPlot" in (tmp_path / "report.html").read_text()
