"""Entry points: references, line ends, and what hides an exit status."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import SpecError
from rollway.kubernetes.entrypoint import (
    explain_hidden_status,
    resolve_entrypoint,
)

HIDING = [
    "false | tee log",
    "false 2>&1 | tee -a log",
    "false |& tee log",
    "false | cat",
    "cd /tmp && false | tee log",
    "false | tee log; echo done",
    "sh -c 'false | tee log'",
    'bash -c "false | tee log"',
    "exec sh -c 'false | cat'",
    "bash -lc 'false | tee log'",
    "bash -ec 'false | tee log'",
    'sh -xc "false; true"',
    "false \\\n  | tee log",
    "false || true",
    "false; true",
    "false\ntrue",
    "false\necho finished",
    "false &",
    "FOO=1 false | FOO=2 tee log",
]
HONEST = [
    "false",
    "false > log 2>&1",
    "cd /tmp && false",
    "X=$(ls | head -1) && false",
    "false \"$(echo a | tr a b)\" 'x | tee y'",
    "bash -o pipefail -c 'false | tee log'",
    "bash -c 'set -o pipefail; false | tee log'",
    "echo start\nfalse",
    "# a | tee b\nfalse",
    "false # | tee log",
    "ls / | head -1\nfalse",
    "false `echo a | cat`",
    "export A=1; false",
    "false &> log",
]


@pytest.mark.parametrize("text", HIDING)
def test_an_entry_point_that_hides_its_status_is_named(text: str) -> None:
    assert explain_hidden_status(text)


@pytest.mark.parametrize("text", HONEST)
def test_an_honest_one_is_not(text: str) -> None:
    assert explain_hidden_status(text) is None


@pytest.mark.parametrize("text", HIDING)
def test_those_are_hidden_from_sh_as_well(text: str, tmp_path: Path) -> None:
    """In `sh` itself, `false` in each of them ends well."""
    if "|&" in text:
        pytest.skip("bash only")
    assert (
        subprocess.run(["sh", "-c", text], cwd=str(tmp_path), capture_output=True).returncode == 0
    )


@pytest.mark.parametrize("text", HONEST)
def test_the_others_fail_in_sh(text: str, tmp_path: Path) -> None:
    if "&>" in text:
        pytest.skip("bash only")
    assert (
        subprocess.run(["sh", "-c", text], cwd=str(tmp_path), capture_output=True).returncode == 1
    )


@given(st.text(alphabet="ab |&;\n\"'`$()#\\><=", max_size=40))
def test_any_text_is_read(text: str) -> None:
    explain_hidden_status(text)


def test_references_become_names_and_shell_variables_stay() -> None:
    names = {"dynamo.policy": "math-policy"}
    text = "train ${HOME} dgd=${dynamo.policy} $X"
    assert resolve_entrypoint(text, names, "e") == "train ${HOME} dgd=math-policy $X"


def test_an_unknown_reference_is_named() -> None:
    with pytest.raises(SpecError, match=r"no `dynamo.polcy`. There are: \${dynamo.policy}"):
        resolve_entrypoint("a ${dynamo.polcy}", {"dynamo.policy": "x"}, "e")


def test_a_windows_line_end_is_named_with_its_line() -> None:
    with pytest.raises(SpecError, match="line 2"):
        resolve_entrypoint("a\nb\r\nc", {}, "e")
